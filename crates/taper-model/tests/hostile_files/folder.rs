//! Hugging Face folders with odd JSON, odd headers of safetensors, odd bytes.

use super::mutate::{self, Change};
use super::{common, limits, used};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

/// Files by name.
type Files = BTreeMap<String, Vec<u8>>;

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A golden checkpoint with one of the tokenizers, and what else a folder may have.
fn good(name: &str, tokenizer: &str) -> Files {
    let mut files: Files = fs::read_dir(common::golden().join(name))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect();
    files.remove("golden.safetensors");
    let fixture = fs::read(common::golden().join("tokenizers").join(format!("{tokenizer}.json"))).unwrap();
    let fixture: Value = serde_json::from_slice(&fixture).unwrap();
    let template = json!([
        {"name": "default", "template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"}]);
    let config =
        json!({"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "chat_template": template});
    files.insert("tokenizer.json".to_owned(), fixture["tokenizer"].to_string().into());
    files.insert("tokenizer_config.json".to_owned(), config.to_string().into());
    let sampling =
        json!({"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05});
    files.insert("generation_config.json".to_owned(), sampling.to_string().into());
    files
}

fn any_good() -> impl Strategy<Value = Files> {
    let checkpoints = select(vec!["llama2-gqa", "llama3", "llama3.2-tied", "yarn-mscale", "dynamic", "mistral-v0.1"]);
    let tokenizers = select(vec!["gpt-2", "smollm", "llama-bpe", "tekken"]);
    (checkpoints, tokenizers).prop_map(|(name, tokenizer)| good(name, tokenizer))
}

/// Whether a folder of these files is a model.
fn loads(files: Files) -> bool {
    let size: usize = files.values().map(Vec::len).sum();
    limits::within(size * 64, move || {
        let folder = tempfile::Builder::new().prefix("folder").tempdir().unwrap();
        files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
        used(&common::folder(folder.path()))
    })
}

/// All places of a value, as pointers.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.to_string());
    let mut inner =
        |key: &str, value| places(value, &format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), all);
    match value {
        // Of a long list a few say it all.
        Value::Object(map) => map.iter().take(40).for_each(|(key, value)| inner(key, value)),
        Value::Array(list) => list.iter().take(10).enumerate().for_each(|(i, value)| inner(&i.to_string(), value)),
        _ => {}
    }
}

/// A value that nobody expects.
fn odd() -> impl Strategy<Value = Value> {
    let words = select(vec![
        "",
        "BPE",
        "Unigram",
        "WordPiece",
        "WordLevel",
        "ByteLevel",
        "Metaspace",
        "Sequence",
        "Split",
        "Replace",
        "Precompiled",
        "Prepend",
        "Strip",
        "Fuse",
        "ByteFallback",
        "NFKC",
        "Regex",
        "F32",
        "I64",
        "yarn",
        "llama3",
        "dynamic",
        "longrope",
        "(((((a*)*)*)*)*)*b",
        "(?:a{999}){999}",
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        "a\u{0}b",
        "config.json",
        "\u{1b}[2J\u{7}",
        "{{ 1/0 }}{% for",
        "é",
        "▁",
    ]);
    let numbers = select(vec![
        json!(0),
        json!(1),
        json!(-1),
        json!(2),
        json!(3),
        json!(7),
        json!(64),
        json!(65),
        json!(u32::MAX),
        json!(1u64 << 32),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(0.0),
        json!(-0.5),
        json!(1e-300),
        json!(1e300),
        json!(0.999),
        json!(1e38),
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        numbers.clone(),
        numbers,
        mutate::edge().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        words.prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        (0usize..5000).prop_map(|n| json!("x▁".repeat(n))),
    ];
    let keys = "[a-z_]{1,8}|type|pattern|String|Regex|content|factor|rope_type|vocab|merges|id|behavior|__metadata__";
    leaf.prop_recursive(3, 16, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..5).prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// Changes of a JSON text: a value at a place, or none any more.
type Edits = Vec<(Index, Option<Value>)>;

fn edits() -> impl Strategy<Value = Edits> {
    prop::collection::vec((any::<Index>(), prop::option::weighted(0.85, odd())), 1..4)
}

fn edited(text: &[u8], edits: Edits) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(text).unwrap();
    for (place, value) in edits {
        let mut all = Vec::new();
        places(&json, "", &mut all);
        let place = &all[place.index(all.len())];
        match (value, place.rsplit_once('/')) {
            (None, Some((around, key))) => {
                if let Some(map) = json.pointer_mut(around).and_then(Value::as_object_mut) {
                    map.remove(key);
                }
            }
            (value, _) => json.pointer_mut(place).into_iter().for_each(|at| *at = value.clone().unwrap_or_default()),
        }
    }
    json.to_string().into()
}

/// A safetensors file's header, and what follows it.
fn parted(bytes: &[u8]) -> (&[u8], &[u8]) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8..].split_at(length)
}

fn joined(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, ..ProptestConfig::default() })]

    #[test]
    fn a_folder_with_odd_settings_is_a_model_or_an_error(
        mut files in any_good(), which in select(vec!["config.json", "generation_config.json", "tokenizer_config.json", INDEX]),
        edits in edits()
    ) {
        let text = files.get(which).or(files.get("config.json")).unwrap().clone();
        let which = if files.contains_key(which) { which } else { "config.json" };
        files.insert(which.to_owned(), edited(&text, edits));
        loads(files);
    }

    #[test]
    fn a_folder_with_an_odd_tokenizer_is_a_model_or_an_error(mut files in any_good(), edits in edits()) {
        let text = edited(&files["tokenizer.json"], edits);
        files.insert("tokenizer.json".to_owned(), text);
        loads(files);
    }

    #[test]
    fn a_folder_with_an_odd_header_is_a_model_or_an_error(edits in edits()) {
        let mut files = good("llama2-gqa", "gpt-2");
        let (header, data) = parted(&files[WEIGHTS]);
        let bytes = joined(&edited(header, edits), data);
        files.insert(WEIGHTS.to_owned(), bytes);
        loads(files);
    }

    #[test]
    fn a_folder_with_odd_bytes_is_a_model_or_an_error(
        mut files in any_good(), which in any::<Index>(), changes in prop::collection::vec(mutate::change(), 1..5)
    ) {
        let names: Vec<String> = files.keys().cloned().collect();
        let name = &names[which.index(names.len())];
        let mut bytes = files[name].clone();
        // Of weights the header.
        let part = if name.ends_with(".safetensors") { parted(&bytes).0.len() + 8 } else { bytes.len() };
        changes.iter().for_each(|change: &Change| mutate::apply(&mut bytes, part, change));
        files.insert(name.clone(), bytes);
        loads(files);
    }
}

#[test]
fn the_folders_that_are_changed_are_good_before() {
    for name in ["llama2-gqa", "llama3", "llama3.2-tied", "yarn-mscale", "dynamic", "mistral-v0.1"] {
        assert!(loads(good(name, "gpt-2")), "{name}");
    }
}

#[test]
fn tensors_lie_in_their_file_to_the_byte() {
    let files = good("llama2-gqa", "gpt-2");
    let (header, data) = parted(&files[WEIGHTS]);
    let with = |bytes: Vec<u8>| {
        let mut files = files.clone();
        files.insert(WEIGHTS.to_owned(), bytes);
        loads(files)
    };
    assert!(with(joined(header, data)));
    assert!(!with(joined(header, &data[..data.len() - 1])), "a byte less");
    assert!(!with(joined(header, &[data, &[0]].concat())), "a byte more");
    for length in [0, 1, 7, header.len() as u64 - 1, header.len() as u64 + 1, 1 << 40, u64::MAX, u64::MAX - 7] {
        assert!(!with([&length.to_le_bytes()[..], header, data].concat()), "a header of {length}");
    }
    let text = String::from_utf8(header.to_vec()).unwrap();
    let (offsets, _) = text.split_once("\"data_offsets\":[").map(|(_, rest)| rest.split_once(']').unwrap()).unwrap();
    for other in ["0,0", "8,4", "0,18446744073709551615", "18446744073709551615,0", "-4,4", "0,99999999"] {
        let text = text.replacen(&format!("[{offsets}]"), &format!("[{other}]"), 1);
        assert!(!with(joined(text.as_bytes(), data)), "{other}");
    }
}

#[test]
fn an_index_leads_to_no_file_but_those_of_its_folder() {
    for name in
        ["../model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "absent.safetensors", "a\u{0}", "config.json"]
    {
        let mut files = good("llama3", "gpt-2");
        files.insert(INDEX.to_owned(), json!({"weight_map": {"a": name}}).to_string().into());
        assert!(!loads(files), "{name:?}");
    }
    // No file has so long a name, and a message repeats it no further than it has to.
    let mut files = good("llama3", "gpt-2");
    files.insert(INDEX.to_owned(), json!({"weight_map": {"a": "x".repeat(20_000)}}).to_string().into());
    assert!(!loads(files));
}

/// Reading a pipe waits for a writer that never comes, and a device may never end.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_not_opened() {
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS] {
        for pipe in [true, false] {
            let loaded = limits::within(1 << 20, move || {
                let folder = tempfile::Builder::new().prefix("folder").tempdir().unwrap();
                let files = good("llama2-gqa", "gpt-2");
                files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
                let path = folder.path().join(name);
                fs::remove_file(&path).unwrap();
                if pipe {
                    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
                } else {
                    std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
                }
                used(&common::folder(folder.path()))
            });
            // Weights alone can be loaded without a tokenizer.
            assert!(!loaded || name.starts_with("tokenizer"), "{name}");
        }
    }
}

#[test]
fn parts_of_a_tokenizer_nested_without_end_are_an_error() {
    for part in ["pre_tokenizer", "normalizer", "decoder", "post_processor"] {
        for depth in [10, 40, 5000] {
            let key = match part {
                "pre_tokenizer" => "pretokenizers",
                "normalizer" => "normalizers",
                "decoder" => "decoders",
                _ => "processors",
            };
            let open = format!("{{\"type\":\"Sequence\",\"{key}\":[").repeat(depth);
            let nested = format!("{open}{}", "]}".repeat(depth));
            let mut files = good("llama2-gqa", "gpt-2");
            let mut tokenizer: Value = serde_json::from_slice(&files["tokenizer.json"]).unwrap();
            tokenizer[part] = json!("HERE");
            files.insert("tokenizer.json".to_owned(), tokenizer.to_string().replace("\"HERE\"", &nested).into());
            loads(files);
        }
    }
}

#[test]
fn what_two_thousand_ids_leave_out_takes_no_room() {
    for id in [70_000_000, 16_000_000, u32::MAX] {
        let mut files = good("llama2-gqa", "gpt-2");
        let mut tokenizer: Value = serde_json::from_slice(&files["tokenizer.json"]).unwrap();
        tokenizer["model"]["vocab"]["far"] = json!(id);
        files.insert("tokenizer.json".to_owned(), tokenizer.to_string().into());
        loads(files);
    }
}
