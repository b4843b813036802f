//! Models from the Hugging Face hub.

use super::{Loading, ModelFiles, Progress, ResolvedModel, fetch_failed};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::tokenizer;
use crate::weights::{INDEX, SINGLE, indexed};
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How long the hub has for its first answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Each time.
    pub(super) answer_max: Duration,
    /// How often it is asked. After that it counts as not there.
    pub(super) times: u64,
}

impl Patience {
    /// For what only the hub has.
    pub(super) const LONG: Self = Self { answer_max: Duration::from_secs(30), times: 2 };
    /// For what is to be had elsewhere too.
    pub(super) const SHORT: Self = Self { answer_max: Duration::from_secs(4), times: 1 };
}

/// How long a download may stand still. The hub's files come from other machines than its answers, and a network may
/// let the one through and not the other.
const STILL_MAX: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 30 });

/// Files of a folder checkpoint that loading reads, besides its weights.
const SMALL_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    tokenizer::FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// What to fetch.
pub(super) struct HubModel {
    pub(super) repo: String,
    pub(super) revision: String,
    pub(super) file: Option<String>,
    /// Another hub than the usual one, which the environment's `HF_ENDPOINT` may name too.
    pub(super) endpoint: Option<String>,
    pub(super) patience: Patience,
}

/// Finds a repository's files in the cache, or fetches them.
pub(super) fn resolve(
    spec: &str,
    wanted: &HubModel,
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
        Some(file) => {
            // Of a model in parts all that the name tells of; they are read from the one that was named.
            for part in crate::gguf::split::parts(file).unwrap_or_default() {
                get(spec, &repo, &part)?;
            }
            ModelFiles::Gguf(get(spec, &repo, file)?)
        }
        None => ModelFiles::Folder(folder(spec, &repo)?),
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
    wanted: &HubModel,
    file: &str,
    hub: &Path,
    progress: Progress,
) -> Result<PathBuf, ModelError> {
    get(spec, &answering(spec, wanted, hub, progress)?, file)
}

/// A repository that has answered, and the files that it lists.
struct Answering {
    api: Api,
    repo: Repo,
    cache: Cache,
    progress: Progress,
    files: Vec<String>,
}

/// Asks the hub what the repository holds, as patiently as is wanted.
///
/// The question runs on a thread of its own, because the client has no time limit; a thread that never gets its
/// answer holds a socket until the system gives up on it.
fn answering(spec: &str, wanted: &HubModel, hub: &Path, progress: Progress) -> Result<Answering, ModelError> {
    let build = || -> Result<Api, ApiError> {
        let mut builder = ApiBuilder::from_env().with_cache_dir(hub.to_owned());
        // An empty one is none: what passes variables on does not know whether there is one.
        if let Ok(token) = std::env::var("HF_TOKEN")
            && !token.is_empty()
        {
            builder = builder.with_token(Some(token));
        }
        if let Some(endpoint) = &wanted.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        builder.with_retries(2).build()
    };
    let api = build().map_err(|e| fetch_failed(spec, format!("the hub client: {e}")))?;
    let repo = Repo::with_revision(wanted.repo.clone(), RepoType::Model, wanted.revision.clone());
    let Patience { answer_max, times } = wanted.patience;
    // Its answer, if it comes in time.
    let ask = || {
        let (send, receive) = mpsc::channel();
        let asked = api.repo(repo.clone());
        std::thread::spawn(move || {
            // The receiver may be gone by then.
            let _ = send.send(asked.info());
        });
        receive.recv_timeout(answer_max).ok()
    };
    let late = || fetch_failed(spec, format!("the hub did not answer within {} s", answer_max.as_secs() * times));
    let answer = (0..times).find_map(|_| ask()).ok_or_else(late)?;
    let info = answer.map_err(|e| fetch_failed(spec, format!("the hub: {e}")))?;
    let files = info.siblings.into_iter().map(|s| s.rfilename).collect();
    Ok(Answering { api, repo, cache: Cache::new(hub.to_owned()), progress, files })
}

/// Fetches what a folder checkpoint needs. Whether it is a model that Taper can read is known before its weights are asked for.
fn folder(spec: &str, hub: &Answering) -> Result<PathBuf, ModelError> {
    let listed = |file: &str| hub.files.iter().any(|f| f == file);
    if !listed(SINGLE) && !listed(INDEX) {
        let ggufs: Vec<&str> = hub.files.iter().filter(|f| f.ends_with(".gguf")).map(String::as_str).collect();
        let reason = if ggufs.is_empty() {
            format!("the repository holds neither {SINGLE} nor {INDEX}, and no .gguf files")
        } else {
            format!("name one of its files as {spec}:FILE; it has {}", ggufs.join(", "))
        };
        return Err(fetch_failed(spec, reason));
    }
    let config = get(spec, hub, SMALL_FILES[0])?;
    let folder = config.parent().ok_or_else(|| fetch_failed(spec, "the hub client put the files nowhere"))?;
    for file in SMALL_FILES[1..].iter().filter(|f| listed(f)) {
        get(spec, hub, file)?;
    }
    let model = ResolvedModel { name: spec.to_owned(), files: ModelFiles::Folder(folder.to_owned()) };
    ModelConfig::read(&model)?;
    if !listed(tokenizer::FILE) {
        let reason =
            format!("the repository has no {}; --model takes a folder with all files as well", tokenizer::needed());
        return Err(fetch_failed(spec, reason));
    }
    // A whole file beside its shards would be fetched twice over, and so would be copies of other formats beside these.
    let weights = match listed(SINGLE) {
        true => BTreeSet::from([SINGLE.to_owned()]),
        false => indexed(&get(spec, hub, INDEX)?)?,
    };
    for file in &weights {
        get(spec, hub, file)?;
    }
    Ok(folder.to_owned())
}

/// Finds one file in the cache or downloads it, for as long as it moves.
///
/// As for the first answer, a thread of its own does it; one that stands still is left behind.
fn get(spec: &str, hub: &Answering, file: &str) -> Result<PathBuf, ModelError> {
    if let Some(path) = hub.cache.repo(hub.repo.clone()).get(file) {
        return Ok(path);
    }
    let (news, receive) = mpsc::channel();
    let (asked, name) = (hub.api.repo(hub.repo.clone()), file.to_owned());
    // The models' folder: names under it are the hub's, or gone soon.
    let (from, to) = (asked.url(file), hub.cache.path().parent().unwrap_or(hub.cache.path()).to_owned());
    std::thread::spawn(move || {
        let done = asked.download_with_progress(&name, Watched(news.clone()));
        let _ = news.send(News::Done(done));
    });
    let mut fetching = None;
    let result = loop {
        match receive.recv_timeout(STILL_MAX) {
            Ok(News::Begun(bytes)) => {
                let begin = || Loading::fetching(hub.progress, file, bytes, &from, &to);
                // A retry says anew how much is there already.
                fetching.get_or_insert_with(begin).reach(0);
            }
            Ok(News::Moved(bytes)) => fetching.iter_mut().for_each(|fetching| fetching.add(bytes)),
            Ok(News::Done(done)) => break done.map_err(|e| e.to_string()),
            Err(RecvTimeoutError::Timeout) => break Err(format!("nothing came for {} s", STILL_MAX.as_secs())),
            Err(RecvTimeoutError::Disconnected) => break Err("the download broke off".to_owned()),
        }
    };
    let path = result.map_err(|reason| fetch_failed(spec, format!("{file}: {reason}")))?;
    fetching.into_iter().for_each(Loading::end);
    Ok(path)
}

/// What a download's thread has to say.
enum News {
    /// So many bytes are to come, or again to come.
    Begun(u64),
    /// So many more have come.
    Moved(u64),
    /// The end.
    Done(Result<PathBuf, ApiError>),
}

/// Tells of a download. Nobody listens any more once it was given up.
struct Watched(mpsc::Sender<News>);

impl hf_hub::api::Progress for Watched {
    fn init(&mut self, size: usize, _filename: &str) {
        let _ = self.0.send(News::Begun(size as u64));
    }

    fn update(&mut self, size: usize) {
        let _ = self.0.send(News::Moved(size as u64));
    }

    fn finish(&mut self) {}
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
