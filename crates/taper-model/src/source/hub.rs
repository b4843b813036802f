//! Models from the Hugging Face hub.

use super::{ModelFiles, Progress, ResolvedModel, fetch_failed};
use crate::error::ModelError;
use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
use hf_hub::{Repo, RepoType};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// How long the hub has for its first answer. Past it, it counts as not there.
const ANSWER_MAX: Duration = Duration::from_secs(4);

/// Files of a folder checkpoint that loading reads, besides its weights.
const SMALL_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// What to fetch.
pub(super) struct Wanted {
    pub(super) repo: String,
    pub(super) revision: String,
    pub(super) file: Option<String>,
    /// Another hub than the usual one, which the environment's `HF_ENDPOINT` may name too.
    pub(super) endpoint: Option<String>,
}

/// Finds a repository's files in the cache, or fetches them.
pub(super) fn resolve(
    spec: &str,
    wanted: &Wanted,
    cache: &Path,
    progress: Progress,
) -> Result<ResolvedModel, ModelError> {
    let hub = cache.join("hub");
    let name = match &wanted.file {
        Some(file) => file.trim_end_matches(".gguf").to_owned(),
        None => wanted.repo.clone(),
    };
    // Written last, so what it names is complete; a later start asks the hub nothing.
    let record = hub.join("complete").join(spec.replace(['/', ':', '@'], "--"));
    if let Some(files) = read_record(&record) {
        return Ok(ResolvedModel { name, files });
    }
    let repo = answering(spec, wanted, &hub, progress)?;
    let files = match &wanted.file {
        Some(file) => ModelFiles::Gguf(get(spec, &repo.repo, file)?),
        None => folder(spec, &repo)?,
    };
    let path = match &files {
        ModelFiles::Folder(path) | ModelFiles::Gguf(path) => path,
    };
    let write = || {
        std::fs::create_dir_all(hub.join("complete"))?;
        std::fs::write(&record, path.to_string_lossy().as_bytes())
    };
    write().map_err(|e| ModelError::io(&record, e))?;
    Ok(ResolvedModel { name, files })
}

/// Fetches one file into a cache folder of the hub's layout.
pub(super) fn fetch_file(
    spec: &str,
    wanted: &Wanted,
    file: &str,
    hub: &Path,
    progress: Progress,
) -> Result<PathBuf, ModelError> {
    get(spec, &answering(spec, wanted, hub, progress)?.repo, file)
}

/// A repository that has answered, and the files that it lists.
struct Answering {
    repo: ApiRepo,
    files: Vec<String>,
}

/// Asks the hub what the repository holds, and waits for `ANSWER_MAX` at most.
///
/// The question runs on a thread of its own, because the client has no time limit; a thread that never gets its
/// answer holds a socket until the system gives up on it.
fn answering(spec: &str, wanted: &Wanted, hub: &Path, progress: Progress) -> Result<Answering, ModelError> {
    let build = || -> Result<Api, hf_hub::api::sync::ApiError> {
        let mut builder = ApiBuilder::from_env().with_cache_dir(hub.to_owned());
        if let Ok(token) = std::env::var("HF_TOKEN") {
            builder = builder.with_token(Some(token));
        }
        if let Some(endpoint) = &wanted.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        builder.with_progress(progress == Progress::Shown).with_retries(2).build()
    };
    let api = build().map_err(|e| fetch_failed(spec, format!("the hub client: {e}")))?;
    let describe = Repo::with_revision(wanted.repo.clone(), RepoType::Model, wanted.revision.clone());
    let repo = api.repo(describe.clone());
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver may be gone by then.
        let _ = send.send(api.repo(describe).info());
    });
    let info = receive
        .recv_timeout(ANSWER_MAX)
        .map_err(|_| fetch_failed(spec, format!("the hub did not answer within {} s", ANSWER_MAX.as_secs())))?
        .map_err(|e| fetch_failed(spec, format!("the hub: {e}")))?;
    Ok(Answering { repo, files: info.siblings.into_iter().map(|s| s.rfilename).collect() })
}

/// Fetches what a folder checkpoint needs.
fn folder(spec: &str, hub: &Answering) -> Result<ModelFiles, ModelError> {
    let listed = |file: &str| hub.files.iter().any(|f| f == file);
    let mut weights: Vec<&String> = hub
        .files
        .iter()
        .filter(|f| !f.contains('/') && f.starts_with("model") && f.ends_with(".safetensors"))
        .collect();
    if weights.is_empty() {
        let ggufs: Vec<&str> = hub.files.iter().filter(|f| f.ends_with(".gguf")).map(String::as_str).collect();
        let reason = if ggufs.is_empty() {
            "the repository holds neither model*.safetensors nor .gguf files".to_owned()
        } else {
            format!("name one of its files as {spec}:FILE; it has {}", ggufs.join(", "))
        };
        return Err(fetch_failed(spec, reason));
    }
    // A whole file beside its shards would be fetched twice over.
    if listed("model.safetensors") {
        weights.retain(|f| *f == "model.safetensors");
    } else {
        get(spec, &hub.repo, "model.safetensors.index.json")?;
    }
    let config = get(spec, &hub.repo, SMALL_FILES[0])?;
    for file in SMALL_FILES[1..].iter().filter(|f| listed(f)) {
        get(spec, &hub.repo, file)?;
    }
    for file in weights {
        get(spec, &hub.repo, file)?;
    }
    match config.parent() {
        Some(folder) => Ok(ModelFiles::Folder(folder.to_owned())),
        None => Err(fetch_failed(spec, "the hub client put the files nowhere")),
    }
}

fn get(spec: &str, repo: &ApiRepo, file: &str) -> Result<PathBuf, ModelError> {
    repo.get(file).map_err(|e| fetch_failed(spec, format!("{file}: {e}")))
}

fn read_record(record: &Path) -> Option<ModelFiles> {
    let path = PathBuf::from(std::fs::read_to_string(record).ok()?);
    if path.is_dir() {
        Some(ModelFiles::Folder(path))
    } else if path.is_file() {
        Some(ModelFiles::Gguf(path))
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
