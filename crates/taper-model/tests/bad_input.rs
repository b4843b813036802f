//! Damaged, hostile and unsupported checkpoints: each is one error that names the file and the field, never a panic.

mod common;

use candle_core::Device;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use taper_model::{LoadOptions, Model, ModelConfig, Progress, Tokenizer, resolve};

/// A copy of a golden checkpoint to damage.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(common::golden().join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn error(folder: &Path) -> String {
    match Model::load(&common::folder(folder), &LoadOptions::default(), &Device::Cpu) {
        Ok(_) => panic!("a damaged checkpoint loaded"),
        Err(error) => error.to_string(),
    }
}

fn edit(folder: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(config.as_object_mut().unwrap());
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn bad_configurations_are_errors_that_name_the_field() {
    // field, its new value (null removes nothing), parts of the message
    let table: Vec<(&str, Value, &[&str])> = vec![
        ("architectures", json!(["Qwen2ForCausalLM"]), &["architectures", "Qwen2ForCausalLM is not supported"]),
        ("vocab_size", json!("many"), &["vocab_size", "invalid type"]),
        ("vocab_size", json!(-1), &["vocab_size"]),
        ("vocab_size", json!(0), &["vocab_size", "between 1 and"]),
        ("vocab_size", json!(65), &["model.embed_tokens.weight", "expected shape [65, 32], got [64, 32]"]),
        ("hidden_size", json!(1u64 << 60), &["hidden_size", "between 1 and"]),
        ("hidden_size", json!(34), &["expected shape", "34"]),
        ("intermediate_size", json!(41), &["mlp.", "expected shape [41, 32], got [40, 32]"]),
        ("num_hidden_layers", json!(3), &["model.layers.2.input_layernorm.weight is missing"]),
        ("num_hidden_layers", json!(1), &["config.json", "num_hidden_layers", "holds more layers"]),
        ("num_hidden_layers", json!(1u64 << 40), &["num_hidden_layers", "between 1 and"]),
        ("num_attention_heads", json!(0), &["num_attention_heads"]),
        ("num_key_value_heads", json!(3), &["num_key_value_heads", "3 does not divide num_attention_heads = 4"]),
        ("num_key_value_heads", json!(4), &["self_attn.k_proj.weight", "expected shape [64, 32], got [32, 32]"]),
        ("head_dim", json!(15), &["head_dim", "15 is not an even number"]),
        ("head_dim", json!(8), &["self_attn.q_proj.weight", "expected shape"]),
        ("rms_norm_eps", json!(-1.0), &["rms_norm_eps"]),
        ("rope_theta", json!(0.0), &["rope_theta"]),
        ("max_position_embeddings", json!(0), &["max_position_embeddings"]),
        ("hidden_act", json!("gelu"), &["hidden_act", "gelu is not supported"]),
        ("attention_bias", json!(true), &["attention_bias"]),
        ("mlp_bias", json!(true), &["mlp_bias"]),
        ("partial_rotary_factor", json!(0.5), &["partial_rotary_factor"]),
        ("quantization_config", json!({"quant_method": "awq"}), &["quantization_config"]),
        ("tie_word_embeddings", json!(3), &["tie_word_embeddings", "invalid type"]),
        ("eos_token_id", json!("two"), &["eos_token_id", "must be a token's id or a list of ids"]),
        ("eos_token_id", json!([2, null]), &["eos_token_id", "must be a token's id or a list of ids"]),
        ("eos_token_id", json!(1u64 << 32), &["eos_token_id", "4294967296 is not between 0 and 4294967295"]),
        ("rope_scaling", json!({"type": "linear"}), &["rope_scaling.factor is missing"]),
        ("rope_scaling", json!({"type": "linear", "factor": "big"}), &["rope_scaling.factor", "invalid type"]),
        ("rope_scaling", json!({"type": "dynamic", "factor": 0.0}), &["rope_scaling.factor", "1 or more"]),
        ("rope_scaling", json!({"rope_type": "longrope", "factor": 2.0}), &["rope_scaling.rope_type", "longrope"]),
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
            &["rope_scaling.high_freq_factor"],
        ),
        (
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 0}),
            &["rope_scaling.original_max_position_embeddings"],
        ),
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 2.0}),
            &["rope_parameters.beta_fast"],
        ),
    ];
    for (field, value, parts) in table {
        let folder = copy("llama2-gqa");
        edit(folder.path(), |config| {
            config.insert(field.to_owned(), value.clone());
        });
        let message = error(folder.path());
        assert!(message.contains(folder.path().to_str().unwrap()), "{field} = {value}: no file in '{message}'");
        for part in parts {
            assert!(message.contains(part), "{field} = {value}: no '{part}' in '{message}'");
        }
    }
}

/// transformers takes such files too, and warns.
#[test]
fn negative_ids_and_null_end_no_answer() {
    let folder = copy("llama2-gqa");
    let ends = |config: Value, generation: Value| {
        edit(folder.path(), |fields| {
            fields.insert("eos_token_id".to_owned(), config);
            fields.insert("bos_token_id".to_owned(), json!(-1));
        });
        fs::write(folder.path().join("generation_config.json"), json!({"eos_token_id": generation}).to_string())
            .unwrap();
        ModelConfig::read(&common::folder(folder.path())).unwrap().eos_tokens
    };
    assert_eq!(ends(json!(-1), Value::Null), [0; 0]);
    assert_eq!(ends(json!([-1, 2]), json!(-2)), [2]);
    assert_eq!(ends(Value::Null, json!([3, 2, -1])), [2, 3]);
}

#[test]
fn every_needed_field_is_missed_by_name() {
    for field in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ] {
        let folder = copy("llama2-gqa");
        edit(folder.path(), |config| {
            config.shift_remove(field);
        });
        let message = error(folder.path());
        assert!(message.ends_with(&format!("config.json: {field} is missing")), "{message}");
    }
    let folder = copy("llama2-gqa");
    edit(folder.path(), |config| {
        config.shift_remove("architectures");
        config.shift_remove("model_type");
    });
    assert!(error(folder.path()).ends_with("config.json: architectures is missing"));
}

#[test]
fn damaged_files_are_errors_that_name_them() {
    type Damage = fn(&Path);
    let table: [(&str, &str, Damage, &[&str]); 12] = [
        ("no config", "llama2-gqa", |f| fs::remove_file(f.join("config.json")).unwrap(), &["config.json"]),
        ("config cut", "llama2-gqa", |f| truncate(&f.join("config.json"), 100), &["config.json", "EOF"]),
        ("config is a list", "llama2-gqa", |f| fs::write(f.join("config.json"), "[]").unwrap(), &["config.json"]),
        (
            "no weights",
            "llama2-gqa",
            |f| fs::remove_file(f.join("model.safetensors")).unwrap(),
            &["model.safetensors or model.safetensors.index.json is missing"],
        ),
        (
            "weights cut",
            "llama2-gqa",
            |f| truncate(&f.join("model.safetensors"), 30_000),
            &["model.safetensors: header", "truncated"],
        ),
        ("header cut", "llama2-gqa", |f| truncate(&f.join("model.safetensors"), 100), &["model.safetensors: header"]),
        ("eight bytes", "llama2-gqa", |f| truncate(&f.join("model.safetensors"), 8), &["model.safetensors: header"]),
        ("empty", "llama2-gqa", |f| truncate(&f.join("model.safetensors"), 0), &["model.safetensors"]),
        (
            "absurd header",
            "llama2-gqa",
            |f| fs::write(f.join("model.safetensors"), [0xff; 64]).unwrap(),
            &["model.safetensors: header"],
        ),
        (
            "no shard",
            "llama3",
            |f| fs::remove_file(f.join("model-00002-of-00002.safetensors")).unwrap(),
            &["model-00002-of-00002.safetensors: file is missing"],
        ),
        (
            "shard cut",
            "llama3",
            |f| truncate(&f.join("model-00002-of-00002.safetensors"), 5000),
            &["model-00002-of-00002.safetensors: header"],
        ),
        (
            "index leads out",
            "llama3",
            |f| {
                let index = json!({"weight_map": {"a": "../../secret.safetensors"}});
                fs::write(f.join("model.safetensors.index.json"), index.to_string()).unwrap();
            },
            &["model.safetensors.index.json: weight_map", "not a plain file name"],
        ),
    ];
    for (what, name, damage, parts) in table {
        let folder = copy(name);
        damage(folder.path());
        let message = error(folder.path());
        for part in parts {
            assert!(message.contains(part), "{what}: no '{part}' in '{message}'");
        }
    }
}

/// No prefix and no flipped byte of a header may panic, whatever it does.
#[test]
fn no_cut_and_no_flipped_byte_panics() {
    let whole = fs::read(common::golden().join("llama2-gqa/model.safetensors")).unwrap();
    let folder = copy("llama2-gqa");
    let path = folder.path().join("model.safetensors");
    let load = || Model::load(&common::folder(folder.path()), &LoadOptions::default(), &Device::Cpu);
    for length in (0..2500).step_by(37) {
        fs::write(&path, &whole[..length]).unwrap();
        assert!(load().is_err(), "{length} bytes loaded");
    }
    for place in (0..2200).step_by(11) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x15;
        fs::write(&path, bytes).unwrap();
        let _ = load();
    }
}

#[test]
fn damaged_tokenizers_are_errors_that_name_the_file() {
    let folder = copy("llama2-gqa");
    let error = || Tokenizer::load(&common::folder(folder.path())).unwrap_err().to_string();
    let missing = error();
    let way = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), is missing";
    assert!(missing.contains(": tokenizer.json, which transformers writes") && missing.ends_with(way), "{missing}");
    let path = folder.path().join("tokenizer.json");
    for text in ["", "{}", r#"{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}"#] {
        fs::write(&path, text).unwrap();
        let message = error();
        assert!(message.contains("tokenizer.json: "), "{text}: {message}");
    }
    let absurd = r#"{"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true, "use_regex": true}, "model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}"#;
    fs::write(&path, absurd).unwrap();
    assert!(error().contains("absurd id"), "{}", error());
    let cut = absurd.replace("4000000000", "0").replace(r#""merges""#, r#""continuing_subword_prefix": "é", "merges""#);
    fs::write(&path, cut).unwrap();
    assert!(error().contains("tokenizer.json: model.continuing_subword_prefix: "), "{}", error());
}

#[test]
fn names_that_mean_nothing_are_errors_that_say_so() {
    let cache = tempfile::tempdir().unwrap();
    let file = cache.path().join("weights.bin");
    fs::write(&file, "x").unwrap();
    for (spec, part) in [
        ("", "is not 'default', a folder"),
        ("no-such-model", "is not 'default', a folder"),
        ("./missing/folder", "is not 'default', a folder"),
        ("owner/name:file.bin", "is not 'default', a folder"),
        ("owner/../name", "is not 'default', a folder"),
        (file.to_str().unwrap(), "is a file, but not a .gguf file"),
    ] {
        let message = resolve(spec, cache.path(), Progress::Hidden).unwrap_err().to_string();
        assert!(message.contains(part), "'{spec}': {message}");
    }
}

#[test]
fn an_empty_folder_misses_its_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let model = resolve(folder.path().to_str().unwrap(), folder.path(), Progress::Hidden).unwrap();
    let message = ModelConfig::read(&model).unwrap_err().to_string();
    assert!(message.contains("config.json"), "{message}");
}

fn truncate(path: &Path, length: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(length).unwrap();
}
