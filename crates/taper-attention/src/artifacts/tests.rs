//! Whatever an artefact holds, reading it ends with one clear error, or with a method that runs or says why not.

use super::*;
use crate::methods::tests::{Input, PlainRotary, artifact, key, random_artifacts, shape};
use crate::{AttentionBatch, AttentionSpec, LayerAttention, Sequence, Span};
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};
use std::path::Path;
use taper_kv_cache::{KvPool, KvShape};

const HEAD_DIM: usize = 64;

fn model() -> ModelKey {
    key(shape(2, HEAD_DIM, None))
}

/// A sound file of every kind, with the attention that reads it.
fn files() -> Vec<(&'static str, Vec<u8>, Value)> {
    let (q, kv, d) = (4, 2, HEAD_DIM);
    let tensor = |name: &str, dims: &[usize]| {
        let values: Vec<f32> = (0..dims.iter().product()).map(|i: usize| (i * 37 % 19) as f32 / 19.0 - 0.5).collect();
        (format!("layers.0.{name}"), Tensor::from_vec(values, dims, &Device::Cpu).unwrap())
    };
    let layers = |of: &str, heads: usize, widths: &[usize]| -> Vec<(String, Tensor)> {
        let one = |(i, w): (usize, &[usize])| {
            let (weight, bias) = (format!("{of}.{i}.weight"), format!("{of}.{i}.bias"));
            [tensor(&weight, &[heads, w[1], w[0]]), tensor(&bias, &[heads, w[1]])]
        };
        widths.windows(2).enumerate().flat_map(one).collect()
    };
    let channels = Tensor::from_iter((0..kv * 8).map(|i| (i % d) as u32), &Device::Cpu).unwrap();
    let channels = vec![("channels".to_owned(), channels.reshape((1, kv, 8)).unwrap())];
    let maps = [layers("query", q, &[d, 8, 8, 32]), layers("key", kv, &[d, 8, 8, 32])].concat();
    let centroids = || vec![tensor("centroids", &[kv, 8, d])];
    let saap = [centroids(), layers("classifier", kv, &[d, 8, 8])].concat();
    let decode = |method: &str| json!({"decode": {"method": method, "sink": 1, "window": 4}});
    let toml = |method: &str, rest: &str| {
        format!("format = \"taper-artefact-1\"\nmethod = \"{method}\"\nmodel = \"test\"\n{rest}").into_bytes()
    };
    let heads = "default = { pattern = \"a_shape\", init = 4, local = 16 }\n\
                 [[heads]]\nlayer = 0\nhead = 1\nreads = { pattern = \"vertical_slash\", vertical = 30, slash = 100 }\n\
                 [[heads]]\nlayer = 0\nhead = 2\nreads = { pattern = \"block_sparse\", blocks = 1 }\n[trained]\nseed = \"1\"\n";
    let bands = "[[bands]]\nbelow = 100\nalpha_c = 0.9\nalpha_s = 0.9\nchunks = 1\n\
                 [[bands]]\nalpha_c = 0.5\nalpha_s = 0.5\nchunks = 2\n";
    vec![
        ("double_sparsity.safetensors", artifact("double_sparsity", &channels), decode("double_sparsity")),
        ("hash_attention.safetensors", artifact("hash_attention", &maps), decode("hash_attention")),
        ("kmeans.safetensors", artifact("kmeans", &centroids()), decode("kmeans")),
        ("saap.safetensors", artifact("saap", &saap), decode("saap")),
        ("minference.toml", toml("minference", heads), json!({"prefill": {"method": "minference", "pattern": "file"}})),
        (
            "sample_attention.toml",
            toml("sample_attention", bands),
            json!({"prefill": {"method": "sample_attention", "tuning": "file", "min_tokens": 0}}),
        ),
    ]
}

/// Reads a file's content, and attends by it for a prompt and a few tokens. Returns whether it was read.
fn used(file: &str, bytes: &[u8], spec: &Value) -> bool {
    let artifacts = match Artifacts::default().with(file, bytes, &model()) {
        Ok(artifacts) => artifacts,
        Err(message) => {
            let odd = message.contains(|c: char| c.is_control() && c != '\n');
            assert!(!message.is_empty() && message.len() < 2000 && !odd, "{} bytes: {message:.300?}", message.len());
            return false;
        }
    };
    if let Err(error) = attended(spec, &artifacts) {
        assert!(!error.is_empty());
    }
    true
}

fn attended(spec: &Value, artifacts: &Artifacts) -> Result<(), String> {
    let shape = model().shape;
    let (prompt, n) = (150, 154);
    let spec = AttentionSpec::from_json(spec, "attention", artifacts).map_err(|e| e.to_string())?;
    let kv = KvShape { layers: 1, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let mut pool = KvPool::new(kv, DType::F32, 4, &Device::Cpu).unwrap();
    let mut sequence = Sequence::new(Arc::new(spec), 5, prompt);
    let (rotary, input) = (PlainRotary(shape.head_dim), Input::random(shape, n));
    while sequence.len() < n {
        let tokens = sequence.chunk(4096).max(1);
        let start = sequence.len();
        let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap();
        let spans = vec![Span { sequence: &mut sequence, tokens }];
        let mut batch = AttentionBatch::new(shape, &rotary, &mut pool, spans).map_err(|e| e.to_string())?;
        batch.attend(0, &part(&input.q), &part(&input.k), &part(&input.v)).map_err(|e| e.to_string())?;
        batch.finish().map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// A piece of a header or of TOML that nobody expects in its place.
fn odd() -> impl Strategy<Value = String> {
    let words = select(vec![
        "0",
        "-1",
        "1",
        "2",
        "65537",
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775808",
        "1e999",
        "nan",
        "inf",
        "-inf",
        "1e-400",
        "[]",
        "{}",
        "[[",
        "]]",
        "[[[[",
        "null",
        "true",
        "\"\"",
        "\"F32\"",
        "\"I64\"",
        "\"F4\"",
        "\"BOOL\"",
        "\"\u{1b}[2J\"",
        "a_shape",
        "block_sparse",
        "layer",
        "chunks",
        "default",
        "\n",
        "[0,0]",
        "[0,18446744073709551615]",
    ]);
    prop_oneof![4 => words.prop_map(str::to_owned), 1 => "\\PC{0,8}", 1 => (0usize..3000).prop_map(|n| "[".repeat(n))]
}

/// Where the numbers and words of a text are.
fn words(text: &[u8]) -> Vec<std::ops::Range<usize>> {
    let word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_' || *b == b'.';
    let mut all = Vec::new();
    let mut at = 0;
    for run in text.chunk_by(|a, b| word(a) == word(b)) {
        if word(&run[0]) {
            all.push(at..at + run.len());
        }
        at += run.len();
    }
    all
}

/// The part of a file that is text: all of it, or the header after its length.
fn text(file: &str, bytes: &[u8]) -> std::ops::Range<usize> {
    if file.ends_with(".toml") {
        return 0..bytes.len();
    }
    8..8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn an_artefact_of_odd_words_is_read_or_an_error(
        which in any::<Index>(), changes in prop::collection::vec((any::<Index>(), odd()), 1..4)
    ) {
        let all = files();
        let (file, mut bytes, spec) = all[which.index(all.len())].clone();
        for (place, new) in changes {
            let part = text(file, &bytes);
            let words = words(&bytes[part.clone()]);
            if words.is_empty() {
                continue;
            }
            let word = words[place.index(words.len())].clone();
            bytes.splice(part.start + word.start..part.start + word.end, new.bytes());
            if part.start == 8 {
                let length = (part.len() - word.len() + new.len()) as u64;
                bytes[..8].copy_from_slice(&length.to_le_bytes());
            }
        }
        used(file, &bytes, &spec);
    }

    #[test]
    fn an_artefact_of_odd_bytes_is_read_or_an_error(
        which in any::<Index>(), whole in any::<bool>(), cut in prop::option::weighted(0.2, any::<Index>()),
        flips in prop::collection::vec((any::<Index>(), any::<[u8; 4]>()), 1..6)
    ) {
        let all = files();
        let (file, mut bytes, spec) = all[which.index(all.len())].clone();
        let part = if whole { 0..bytes.len() } else { 0..text(file, &bytes).end };
        for (place, new) in flips {
            let at = place.index(part.len());
            bytes.iter_mut().skip(at).zip(new).for_each(|(old, new)| *old = new);
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        used(file, &bytes, &spec);
    }

    #[test]
    fn an_artefact_of_odd_numbers_attends_or_is_an_error(
        which in 0usize..4, numbers in prop::collection::vec(select(vec![0f32, -0.0, 1.0, f32::MAX, f32::MIN, 1e-45, 1e30]), 1..8)
    ) {
        let (file, mut bytes, spec) = files()[which].clone();
        let data = text(file, &bytes).end;
        for (place, number) in bytes[data..].chunks_exact_mut(4).zip(numbers.iter().cycle()) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        used(file, &bytes, &spec);
    }
}

#[test]
fn the_artefacts_that_are_changed_are_good_before() {
    for (file, bytes, spec) in files() {
        assert!(used(file, &bytes, &spec), "{file}");
        let artifacts = Artifacts::default().with(file, &bytes, &model()).unwrap();
        attended(&spec, &artifacts).unwrap_or_else(|e| panic!("{file}: {e}"));
    }
    assert_eq!(random_artifacts(model().shape).names().len(), 5);
}

#[test]
fn tensors_of_an_artefact_lie_in_it_to_the_byte() {
    for (file, bytes, spec) in files().into_iter().filter(|(file, ..)| file.ends_with(".safetensors")) {
        assert!(!used(file, &bytes[..bytes.len() - 1], &spec), "{file}: a byte less");
        assert!(!used(file, &[&bytes[..], &[0]].concat(), &spec), "{file}: a byte more");
        for length in [0, 1, bytes.len() as u64, 1 << 40, u64::MAX] {
            let bytes = [&length.to_le_bytes(), &bytes[8..]].concat();
            assert!(!used(file, &bytes, &spec), "{file}: a header of {length}");
        }
    }
}

/// A pipe would be waited for, a device may never end.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_not_opened() {
    let folder = std::env::temp_dir().join(format!("taper-artefacts-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.join("saap.safetensors")).unwrap();
    let message = Artifacts::open(&folder, &model()).unwrap_err().to_string();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(message.contains("saap.safetensors: is not a regular file"), "{message}");
}

/// A folder with files, for as long as `run` takes.
fn in_folder<T>(name: &str, files: &[(&str, Vec<u8>)], run: impl FnOnce(&Path) -> T) -> T {
    let folder = std::env::temp_dir().join(format!("taper-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    files.iter().for_each(|(file, bytes)| std::fs::write(folder.join(file), bytes).unwrap());
    let result = run(&folder);
    std::fs::remove_dir_all(&folder).unwrap();
    result
}

#[test]
fn what_was_made_for_another_model_is_known_and_refused_by_name() {
    let other = ModelKey { fingerprint: "other".into(), ..model() };
    let files = files();
    let held: Vec<_> = files.iter().map(|(file, bytes, _)| (*file, bytes.clone())).collect();
    let artifacts = in_folder("foreign", &held, |folder| Artifacts::open(folder, &other)).unwrap();
    assert_eq!((artifacts.names().len(), artifacts.foreign().count()), (0, files.len()));
    for (file, _, spec) in &files {
        let error = AttentionSpec::from_json(spec, "attention", &artifacts).unwrap_err();
        let both = format!("needs the artefact {file}, which was made for another model (test); this one is other");
        assert!(error.path.starts_with("attention.") && error.message.contains(&both), "{error:?}");
    }
    // Those of this model are none the worse for one that is not.
    let mixed =
        [held[0].clone(), (held[4].0, String::from_utf8(held[4].1.clone()).unwrap().replace("test", "x").into())];
    let artifacts = in_folder("mixed", &mixed, |folder| Artifacts::open(folder, &model())).unwrap();
    assert_eq!(artifacts.names(), [mixed[0].0]);
    assert_eq!(artifacts.foreign().map(|(file, _)| file).collect::<Vec<_>>(), [mixed[1].0]);
    assert!(AttentionSpec::from_json(&files[0].2, "attention", &artifacts).is_ok());
}

/// What no model could read ends the start, whomever it says it was made for.
#[test]
fn a_malformed_artefact_is_an_error_at_once() {
    let all = files();
    let (file, bytes) = (all[0].0, &all[0].1);
    let toml = |text: &str| (all[5].0, text.as_bytes().to_vec());
    for (bad, message) in [
        ((file, bytes[..bytes.len() - 1].to_vec()), "is no safetensors file"),
        (toml("format = \"taper-artefact-1\"\nmodel = \"other"), "is no TOML file"),
        (toml("format = \"taper-artefact-2\"\nmethod = \"sample_attention\"\nmodel = \"other\""), "`format` is"),
        (toml("format = \"taper-artefact-1\"\nmethod = \"sample_attention\"\nmodel = 3"), "expected a string"),
    ] {
        let error = in_folder("malformed", &[bad], |folder| Artifacts::open(folder, &model()).unwrap_err().to_string());
        assert!(error.contains(message), "{error}");
    }
}
