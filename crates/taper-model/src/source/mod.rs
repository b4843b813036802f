//! From what a person types after `--model` to files on this machine.

mod default_model;
mod hub;
mod progress;

use crate::error::ModelError;
use std::path::{Path, PathBuf};

pub(crate) use progress::Loading;
pub use progress::Progress;

/// The name of the model that Taper serves when none is chosen.
pub const DEFAULT_MODEL: &str = "default";

/// What a model's name can mean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// SmolLM2-135M-Instruct, fetched and checked on first use.
    Default,
    /// A Hugging Face folder: `config.json`, safetensors, `tokenizer.json`.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// A hub repository, `owner/name`, perhaps with `@revision` and `:file.gguf`.
    Hub {
        /// `owner/name`.
        repo: String,
        /// Branch, tag or commit; `main` where none is given.
        revision: String,
        /// One GGUF file of the repository, instead of its safetensors.
        file: Option<String>,
    },
}

/// The files of a model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelFiles {
    /// A Hugging Face folder.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
}

/// A model whose files are all here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedModel {
    /// A short name, for `/v1/models`.
    pub name: String,
    /// Where it lies.
    pub files: ModelFiles,
}

impl ModelSource {
    /// Reads a model's name: `default`, a path that exists, else a hub id.
    ///
    /// # Errors
    /// [`ModelError::Spec`] for what is neither.
    pub fn parse(spec: &str) -> Result<Self, ModelError> {
        if spec == DEFAULT_MODEL {
            return Ok(Self::Default);
        }
        let path = Path::new(spec);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.is_file() {
            let gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
            let reason = "is a file, but not a .gguf file; for safetensors give the folder";
            return if gguf { Ok(Self::Gguf(path.to_owned())) } else { Err(bad_spec(spec, reason)) };
        }
        Self::parse_hub(spec).ok_or_else(|| {
            bad_spec(spec, "is not 'default', a folder, a .gguf file, or a hub id (owner/name[@revision][:file.gguf])")
        })
    }

    fn parse_hub(spec: &str) -> Option<Self> {
        let (spec, file) = match spec.split_once(':') {
            Some((spec, file)) => (spec, Some(file)),
            None => (spec, None),
        };
        let (repo, revision) = spec.split_once('@').unwrap_or((spec, "main"));
        let (owner, name) = repo.split_once('/')?;
        let plain = |part: &str| {
            let first = part.bytes().next();
            first.is_some_and(|b| b.is_ascii_alphanumeric())
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        let sound = plain(owner) && plain(name) && !revision.is_empty();
        let sound = sound && file.is_none_or(|f| f.to_ascii_lowercase().ends_with(".gguf"));
        sound.then(|| Self::Hub { repo: repo.to_owned(), revision: revision.to_owned(), file: file.map(str::to_owned) })
    }
}

/// Finds a model's files, fetching them into `cache` if need be. What has been fetched once is not fetched again.
///
/// # Errors
/// [`ModelError::Spec`] for a name that means nothing, [`ModelError::Fetch`] where no source answers or what they sent
/// is not what was asked for, [`ModelError::Io`] for the cache folder.
pub fn resolve(spec: &str, cache: &Path, progress: Progress) -> Result<ResolvedModel, ModelError> {
    let files = match ModelSource::parse(spec)? {
        ModelSource::Default => return default_model::resolve(cache, progress),
        ModelSource::Hub { repo, revision, file } => {
            let wanted = hub::HubModel { repo, revision, file, endpoint: None, patience: hub::Patience::LONG };
            return hub::resolve(spec, &wanted, cache, progress);
        }
        ModelSource::Folder(path) => ModelFiles::Folder(path),
        ModelSource::Gguf(path) => ModelFiles::Gguf(path),
    };
    let path = match &files {
        ModelFiles::Folder(path) => path.canonicalize().unwrap_or_else(|_| path.clone()),
        ModelFiles::Gguf(path) => path.with_extension(""),
    };
    let name = path.file_name().map_or_else(|| spec.to_owned(), |name| name.to_string_lossy().into_owned());
    Ok(ResolvedModel { name, files })
}

/// Where models are kept unless the caller says otherwise: `taper/models` in the user's cache folder.
pub fn default_cache() -> PathBuf {
    let base = match (std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(cache), _) if !cache.is_empty() => PathBuf::from(cache),
        (_, Some(home)) => Path::new(&home).join(".cache"),
        _ => std::env::temp_dir(),
    };
    base.join("taper").join("models")
}

fn bad_spec(spec: &str, reason: &str) -> ModelError {
    ModelError::Spec { spec: spec.to_owned(), reason: reason.to_owned() }
}

fn fetch_failed(spec: &str, reason: impl Into<String>) -> ModelError {
    ModelError::Fetch { spec: spec.to_owned(), reason: reason.into() }
}
