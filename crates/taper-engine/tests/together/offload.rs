//! A KV cache of which a part lies in a file gives the answers of one in memory.

use crate::{Answer, Watched, answer, backend, engine, pairs, request, sound, start, together};
use std::path::Path;
use std::sync::Arc;
use taper_engine::{Backend, CacheOptions, EngineConfig, Offload, Request, StopRules};

fn offloaded(memory: u64, bytes: u64, folder: &Path) -> Result<Watched, taper_engine::LoadError> {
    let offload = Some(Offload::File { bytes, folder: folder.into() });
    let mut watched =
        backend(memory, CacheOptions { offload, prefix: true, ..CacheOptions::default() }).map(Watched::new)?;
    // Nothing of the file stays in memory from one step to the next.
    watched.before = Box::new(|backend| backend.page_out().unwrap());
    Ok(watched)
}

/// A cache of so many blocks, of which three lie in memory.
pub fn nearly_all_in_a_file(blocks: u64, folder: &Path) -> Watched {
    offloaded(3, (blocks - 3) * crate::BLOCK_BYTES, folder).unwrap()
}

#[test]
fn answers_do_not_show_that_their_cache_was_in_a_file() {
    // Every method of both phases, with answers that go on over many steps.
    let long = |(i, pair): (usize, &serde_json::Value)| Request {
        stop: StopRules { ignore_eos: true, max_tokens: Some(60), ..StopRules::default() },
        choices: 1,
        ..request(i, pair)
    };
    let pairs: Vec<_> = pairs().into_iter().step_by(5).collect();
    let requests: Vec<Request> = pairs.iter().enumerate().map(long).collect();
    let quiet = engine(64, false, EngineConfig::default());
    let alone: Vec<Answer> = requests.iter().map(|r| answer(quiet.submit(r.clone()).unwrap())).collect();
    let folder = tempfile::tempdir().unwrap();
    let watched = nearly_all_in_a_file(200, folder.path());
    let limits = watched.limits();
    assert_eq!((limits.cache_tokens, limits.offloaded_tokens), (200 * 64, 197 * 64));
    let seen = Arc::clone(&watched.seen);
    let busy = start(watched, EngineConfig { chunk_tokens: 100, ..EngineConfig::default() });
    together(&busy, &requests, &alone);
    sound(&busy, &seen, 200);
}

#[test]
fn a_file_that_the_disk_cannot_hold_is_an_error_that_says_where_and_how_large() {
    let folder = tempfile::tempdir().unwrap();
    let error = offloaded(3, 1 << 60, folder.path()).err().expect("no disk is so large").to_string();
    let expected =
        format!("the KV cache: {}: no file of {} bytes for the KV cache: ", folder.path().display(), 1u64 << 60);
    assert!(error.starts_with(&expected) && error.contains("No space left"), "{error}");
    let error = offloaded(3, 9, folder.path()).err().expect("no block fits").to_string();
    let takes = format!("hold no block of 64 tokens, which takes {}", crate::BLOCK_BYTES);
    assert_eq!(error, format!("the KV cache: 9 bytes (--kv-memory, --kv-offload) {takes}"));
}
