//! From settings to a running engine: the one way for all commands.

use crate::config::ModelConfig;
use anyhow::{Context, Error, Result, anyhow};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use taper_attention::{Artifacts, AttentionSpec, ModelKey, Place};
use taper_engine::{DeviceChoice, Engine, LoadError, ModelBackend, ModelInfo, ModelText};
use taper_model::{Model, ModelError, Progress, ResolvedModel, Tokenizer, default_cache, resolve};

/// A model at work.
pub struct Loaded {
    pub engine: Engine,
    /// What methods learned offline for it.
    pub artifacts: Arc<Artifacts>,
    /// Attention where a request says nothing of it.
    pub attention: AttentionSpec,
    /// What requests may say of it by a name.
    pub presets: BTreeMap<String, AttentionSpec>,
}

/// A model that waits for somebody to make its steps.
pub struct Ready {
    pub model: ResolvedModel,
    pub backend: ModelBackend,
    pub text: ModelText,
    /// What methods learned offline for it.
    pub artifacts: Artifacts,
}

/// Finds, loads and starts the model.
///
/// # Errors
/// The file and field at fault, or a machine that cannot hold the model.
pub fn engine(config: &ModelConfig) -> Result<Loaded> {
    engine_of(config, find(config)?)
}

/// Loads and starts a model that was found.
///
/// # Errors
/// As [`engine`].
pub fn engine_of(config: &ModelConfig, model: ResolvedModel) -> Result<Loaded> {
    let Ready { model, backend, text, artifacts } = backend_of(config, model)?;
    let (attention, presets) = attention(config, &artifacts)?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let info = ModelInfo { id: model.name.clone(), created };
    let engine = Engine::start(backend, Arc::new(text), info, config.engine).context("starting the engine")?;
    Ok(Loaded { engine, artifacts: Arc::new(artifacts), attention, presets })
}

/// Attention where a request says nothing of it, and what has a name.
///
/// # Errors
/// The setting or preset at fault, or an artefact that is not there.
pub fn attention(
    config: &ModelConfig,
    artifacts: &Artifacts,
) -> Result<(AttentionSpec, BTreeMap<String, AttentionSpec>)> {
    let wanted = config.attention.as_ref();
    let attention = wanted.map_or(Ok(AttentionSpec::default()), |wanted| wanted.resolve(&config.presets, artifacts));
    Ok((attention.context("attention")?, config.presets.specs(artifacts)?))
}

/// Finds and loads the model.
///
/// # Errors
/// As [`engine`].
pub fn backend(config: &ModelConfig) -> Result<Ready> {
    backend_of(config, find(config)?)
}

fn backend_of(config: &ModelConfig, model: ResolvedModel) -> Result<Ready> {
    start_threads(config)?;
    let (backend, text) = taper_engine::load(&model, &config.load, config.cache.clone(), &config.device.open()?)
        .map_err(|error| match error {
            LoadError::Model(error) => by_flag(error),
            other => other.into(),
        })?;
    let artifacts = artifacts(config, &backend.key())?;
    Ok(Ready { model, backend, text, artifacts })
}

/// Finds the model, and fetches it where it is not at hand.
///
/// # Errors
/// A name that leads nowhere.
pub fn find(config: &ModelConfig) -> Result<ResolvedModel> {
    Ok(resolve(&config.model, &default_cache(), Progress::Shown)?)
}

/// Finds and loads the model alone, for a caller that looks into it.
///
/// # Errors
/// As [`engine`].
pub fn model(config: &ModelConfig) -> Result<(Model, Tokenizer)> {
    start_threads(config)?;
    let model = find(config)?;
    let loaded = Model::load(&model, &config.load, &config.device.open()?).map_err(by_flag)?;
    Ok((loaded, Tokenizer::load(&model)?))
}

/// What a model cannot be loaded for, by the name of the flag if one is at fault.
fn by_flag(error: ModelError) -> Error {
    match error {
        ModelError::ContextLimit { limit, model } => {
            anyhow!("--context: {limit} must be at least 1, and at most the model's own context of {model} tokens")
        }
        other => other.into(),
    }
}

/// What methods learned offline for a model; of what was made for another one there is a warning.
///
/// # Errors
/// The file at fault.
pub fn artifacts(config: &ModelConfig, key: &ModelKey) -> Result<Artifacts> {
    let artifacts = match &config.artifacts {
        Some(folder) => Artifacts::open(folder, key)?,
        None => Artifacts::default(),
    };
    artifacts.foreign().for_each(|(file, why)| tracing::warn!("{file} {why}; requests for it are refused"));
    Ok(artifacts.at(place(config.device)).with_dense_below(config.dense_below))
}

/// Where methods run, by the device that answers are computed on.
pub fn place(answers: DeviceChoice) -> Place {
    if answers == DeviceChoice::Cpu { Place::Host } else { Place::Device }
}

fn start_threads(config: &ModelConfig) -> Result<()> {
    let Some(threads) = config.threads else { return Ok(()) };
    rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global().context("threads")
}
