//! From settings to a running engine: the one way for all commands.

use crate::config::ModelConfig;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use taper_engine::{Engine, ModelInfo};
use taper_model::{Progress, default_cache, resolve};

/// Finds, loads and starts the model.
///
/// # Errors
/// The file and field at fault, or a machine that cannot hold the model.
pub fn engine(config: &ModelConfig) -> Result<Engine> {
    if let Some(threads) = config.threads {
        rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global().context("threads")?;
    }
    let model = resolve(&config.model, &default_cache(), Progress::Shown)?;
    let (backend, text) = taper_engine::load(&model, &config.load, config.cache)?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let info = ModelInfo { id: model.name.clone(), created };
    Engine::start(backend, Arc::new(text), info, config.engine).context("starting the engine")
}
