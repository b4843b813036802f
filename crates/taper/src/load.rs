//! From settings to a running engine: the one way for all commands.

use crate::config::ModelConfig;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use taper_engine::{Engine, ModelBackend, ModelInfo, ModelText};
use taper_model::{Progress, ResolvedModel, default_cache, resolve};

/// Finds, loads and starts the model.
///
/// # Errors
/// The file and field at fault, or a machine that cannot hold the model.
pub fn engine(config: &ModelConfig) -> Result<Engine> {
    let (model, backend, text) = backend(config)?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let info = ModelInfo { id: model.name.clone(), created };
    Engine::start(backend, Arc::new(text), info, config.engine).context("starting the engine")
}

/// Finds and loads the model, for a caller that makes the steps itself.
///
/// # Errors
/// As [`engine`].
pub fn backend(config: &ModelConfig) -> Result<(ResolvedModel, ModelBackend, ModelText)> {
    if let Some(threads) = config.threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global().context("threads")?;
    }
    let model = resolve(&config.model, &default_cache(), Progress::Shown)?;
    let (backend, text) = taper_engine::load(&model, &config.load, config.cache)?;
    Ok((model, backend, text))
}
