//! The forward pass against transformers, on tiny random checkpoints of every supported variant.

mod common;

use candle_core::{DType, Device, Tensor};
use common::{PlainAttention, checkpoint, difference, expected, folder, golden, load, logits_of};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use taper_attention::{AttentionBatch, Sequence, Span};
use taper_kv_cache::{KvPool, KvShape};
use taper_model::{LoadOptions, Model, ModelConfig, RopeScaling, WeightDType, weights_digest};

const TOLERANCE: f32 = 1e-4;

/// Every checkpoint under tests/golden.
const VARIANTS: [&str; 14] = [
    "llama1",
    "llama2-gqa",
    "llama3",
    "llama3.1",
    "llama3.2-tied",
    "linear",
    "dynamic",
    "yarn",
    "yarn-mscale",
    "smollm2",
    "mistral-v0.1",
    "mistral-v0.2",
    "mistral-v0.3",
    "mistral-nemo",
];

#[test]
fn logits_equal_those_of_transformers_at_every_position() {
    for name in VARIANTS {
        let model = load(&checkpoint(name), false);
        let (tokens, logits) = expected(name);
        if let Some(window) = model.attention_shape().window {
            assert!(tokens.len() > 2 * window, "{name}: the prompt must outgrow the window");
        }
        let difference = difference(&logits_of(&model, &tokens), &logits);
        assert!(difference < TOLERANCE, "{name}: logits differ by {difference}");
    }
}

#[test]
fn every_folder_is_tested() {
    let mut folders: Vec<String> = std::fs::read_dir(common::golden())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("golden.safetensors").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    folders.sort();
    let mut variants = VARIANTS.map(str::to_owned).to_vec();
    variants.sort();
    assert_eq!(folders, variants);
}

#[test]
fn steps_and_batch_mates_do_not_change_a_sequence() {
    for name in VARIANTS {
        let model = load(&checkpoint(name), false);
        let (tokens, logits) = expected(name);
        let mut attention = PlainAttention::new(model.attention_shape(), 2);
        attention.length = tokens.len() as u32;
        let mut got = vec![Vec::new(); tokens.len()];
        // The same sequence twice, the second running five tokens behind the first, in steps of uneven size.
        let (mut lead, mut rear) = (0, 0);
        for step in [1, 7, 1, 20, 3, 1, 7] {
            let lead_end = (lead + step).min(tokens.len());
            let rear_end = lead_end.saturating_sub(5);
            let places: Vec<(usize, usize)> =
                (rear..rear_end).map(|i| (1, i)).chain((lead..lead_end).map(|i| (0, i))).collect();
            let batch: Vec<u32> = places.iter().map(|(_, i)| tokens[*i]).collect();
            let positions: Vec<u32> = places.iter().map(|(_, i)| *i as u32).collect();
            attention.sequence_of = places.iter().map(|(sequence, _)| *sequence).collect();
            let hidden = model.forward(&batch, &positions, &mut attention).unwrap();
            let rows: Vec<Vec<f32>> = model.logits(&hidden).unwrap().to_vec2().unwrap();
            for ((sequence, i), row) in places.into_iter().zip(rows) {
                if sequence == 0 {
                    got[i] = row;
                } else {
                    let difference = difference(&[row], &logits[i..=i]);
                    assert!(difference < TOLERANCE, "{name}: position {i} of the second differs by {difference}");
                }
            }
            (lead, rear) = (lead_end, rear_end);
        }
        assert_eq!(lead, tokens.len());
        let difference = difference(&got, &logits);
        assert!(difference < TOLERANCE, "{name}: logits differ by {difference}");
    }
}

/// Through the cache and the methods that serve requests: the whole prompt in chunks, and its last tokens one by one.
#[test]
fn logits_through_the_paged_cache_equal_those_of_transformers() {
    for name in VARIANTS {
        let model = load(&checkpoint(name), false);
        let (tokens, logits) = expected(name);
        let shape = model.attention_shape();
        let kv = KvShape { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        // The dynamic rule turns a generated token by its own length, which a golden vector of one step does not show.
        let generated = if name == "dynamic" { 0 } else { 5 };
        for chunk in [7, 4096] {
            let mut pool = KvPool::new(kv, DType::F32, 4, &Device::Cpu).unwrap();
            let mut sequence = Sequence::new(Arc::default(), 1, tokens.len() - generated);
            let mut got = Vec::new();
            while sequence.len() < tokens.len() {
                let (start, count) = (sequence.len(), sequence.chunk(chunk).max(1));
                let spans = vec![Span { sequence: &mut sequence, tokens: count }];
                let mut batch = AttentionBatch::new(shape, model.rotary(), &mut pool, spans).unwrap();
                let hidden = model.forward(&tokens[start..start + count], &batch.positions(), &mut batch).unwrap();
                batch.finish().unwrap();
                got.extend(model.logits(&hidden).unwrap().to_vec2().unwrap());
            }
            let difference = difference(&got, &logits);
            assert!(difference < TOLERANCE, "{name} in chunks of {chunk}: logits differ by {difference}");
        }
    }
}

#[test]
fn half_precision_weights_stay_close() {
    for dtype in [WeightDType::F16, WeightDType::BF16] {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        let model = Model::load(&checkpoint("llama3"), &options, &Device::Cpu).unwrap();
        let (tokens, logits) = expected("llama3");
        // Activations are rounded to 8 or 11 bits before each product.
        let difference = difference(&logits_of(&model, &tokens), &logits);
        assert!(difference < 0.3, "{dtype:?}: logits differ by {difference}");
    }
}

/// Whose defaults are transformers' own classes'.
#[test]
fn what_a_configuration_leaves_out_is_as_its_family_has_it() {
    let read = |model: &str, change: &dyn Fn(&mut Map<String, Value>, &str)| {
        let changed = configured(model, |config| {
            config.extend([("num_attention_heads", 16), ("hidden_size", 64)].map(|(k, v)| (k.to_owned(), v.into())));
            ["num_key_value_heads", "sliding_window", "head_dim"].iter().for_each(|field| change(config, field));
        });
        let config = ModelConfig::read(&folder(changed.path())).unwrap();
        (config.kv_heads, config.sliding_window)
    };
    for (model, absent) in [("mistral-v0.1", (8, Some(4096))), ("llama1", (16, None))] {
        assert_eq!(read(model, &|config, field| drop(config.remove(field))), absent, "{model}");
        assert_eq!(read(model, &|config, field| drop(config.insert(field.into(), Value::Null))), (16, None), "{model}");
    }
}

#[test]
fn configurations_say_what_attention_and_generation_need() {
    let config = ModelConfig::read(&checkpoint("mistral-v0.1")).unwrap();
    assert_eq!(config.sliding_window, Some(16));
    let config = ModelConfig::read(&checkpoint("mistral-v0.3")).unwrap();
    assert_eq!((config.vocab_size, config.sliding_window), (68, None));
    let config = ModelConfig::read(&checkpoint("mistral-nemo")).unwrap();
    assert_eq!((config.hidden_size, config.head_dim, config.q_heads), (40, 8, 4));
    let config = ModelConfig::read(&checkpoint("llama3")).unwrap();
    assert_eq!(config.eos_tokens, [2, 3]);
    let config = ModelConfig::read(&checkpoint("llama1")).unwrap();
    assert_eq!((config.head_dim, config.kv_heads), (8, 4));
    let config = ModelConfig::read(&checkpoint("dynamic")).unwrap();
    assert!(matches!(config.rope.scaling, RopeScaling::Dynamic { .. }));
    assert_eq!(config.context_length, 64);
}

#[test]
fn a_stretched_context_is_as_long_as_its_rule_reaches() {
    let context = |name: &str| ModelConfig::read(&checkpoint(name)).unwrap().context_length;
    // 16 positions times 4 in a file of 64; times 8 in one of 64; a linear file's own number.
    assert_eq!([context("yarn"), context("yarn-mscale"), context("linear")], [64, 128, 64]);
}

#[test]
fn a_context_limit_is_kept_or_refused() {
    let load = |limit| {
        let options = LoadOptions { context_limit: Some(limit), ..LoadOptions::default() };
        Model::load(&checkpoint("llama3"), &options, &Device::Cpu)
    };
    let model = load(8).unwrap();
    assert_eq!(model.config().context_length, 8);
    let mut attention = PlainAttention::new(model.attention_shape(), 1);
    let error = model.forward(&[1], &[8], &mut attention).unwrap_err().to_string();
    assert!(error.contains("past the context of 8"), "{error}");
    for limit in [0, 65] {
        let error = load(limit).unwrap_err().to_string();
        assert!(error.contains("between 1 and the model's own 64"), "{error}");
    }
    // Of weights, which may take minutes, nothing is asked before.
    let bare = tempfile::tempdir().unwrap();
    std::fs::copy(golden().join("llama3/config.json"), bare.path().join("config.json")).unwrap();
    let options = LoadOptions { context_limit: Some(65), ..LoadOptions::default() };
    let error = Model::load(&folder(bare.path()), &options, &Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("context limit 65"), "{error}");
}

#[test]
fn steps_that_make_no_sense_are_errors() {
    let model = load(&checkpoint("llama3"), false);
    for (tokens, positions) in [(&[][..], &[][..]), (&[1, 2], &[0]), (&[64], &[0]), (&[u32::MAX], &[0])] {
        let mut attention = PlainAttention::new(model.attention_shape(), 1);
        assert!(model.forward(tokens, positions, &mut attention).is_err(), "{tokens:?} at {positions:?}");
    }
}

#[test]
fn a_model_says_what_its_weights_take() {
    let bytes = |dtype| {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        Model::load(&checkpoint("llama3"), &options, &Device::Cpu).unwrap().weight_bytes()
    };
    let config = ModelConfig::read(&checkpoint("llama3")).unwrap();
    // The table of embeddings stays in its file, the norms are f32.
    let norms = (2 * config.layers + 1) * config.hidden_size * 4;
    let matrices = config.multiplied_weights();
    assert_eq!(bytes(WeightDType::F32), (4 * matrices + norms) as u64);
    assert_eq!(bytes(WeightDType::BF16), (2 * matrices + norms) as u64);
}

/// A golden checkpoint with another configuration.
fn configured(name: &str, change: impl FnOnce(&mut Map<String, Value>)) -> tempfile::TempDir {
    let whole = renamed(name, |name| Some(name.to_owned()));
    let path = whole.path().join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(path, Value::from(config).to_string()).unwrap();
    whole
}

/// As transformers writes a configuration from version 5 on, and somebody stretches it in the way that models' pages tell.
#[test]
fn a_scaling_that_stands_beside_the_newer_field_holds() {
    for name in ["yarn", "linear", "llama3.1"] {
        let both = configured(name, |config| {
            let theta = config.remove("rope_theta");
            config.insert("rope_parameters".into(), json!({ "rope_type": "default", "rope_theta": theta }));
        });
        let newer = configured(name, |config| {
            let mut scaling = config.remove("rope_scaling").unwrap();
            scaling["rope_theta"] = config.remove("rope_theta").unwrap();
            config.insert("rope_parameters".into(), scaling);
            config.insert("rope_scaling".into(), json!({}));
        });
        let (tokens, logits) = expected(name);
        for (what, whole) in [("both", both), ("the newer", newer)] {
            let model = load(&folder(whole.path()), false);
            let difference = difference(&logits_of(&model, &tokens), &logits);
            assert!(difference < TOLERANCE, "{name}, {what}: logits differ by {difference}");
        }
    }
}

#[test]
fn the_context_of_training_may_stand_apart_from_the_scaling() {
    for name in ["yarn", "llama3.1"] {
        let whole = configured(name, |config| {
            let original = config["rope_scaling"]["original_max_position_embeddings"].take();
            config.insert("original_max_position_embeddings".into(), original);
        });
        let (apart, own) = (folder(whole.path()), checkpoint(name));
        let [apart, own] = [apart, own].map(|model| ModelConfig::read(&model).unwrap());
        assert_eq!((apart.rope, apart.context_length), (own.rope, own.context_length), "{name}");
    }
}

/// Vicuna's and LongChat's longer versions.
#[test]
fn positions_before_a_linear_stretch_are_known_by_the_length_beside_them() {
    let context = |positions: usize, length: usize| {
        let whole = configured("linear", |config| {
            config.insert("max_position_embeddings".into(), json!(positions));
            config.insert("max_sequence_length".into(), json!(length));
        });
        ModelConfig::read(&folder(whole.path())).unwrap().context_length
    };
    assert_eq!([context(16, 64), context(16, 1 << 40), context(64, 16)], [64, 64, 64]);
}

/// A golden checkpoint of one file, its tensors under other names or left out.
fn renamed(name: &str, rename: impl Fn(&str) -> Option<String>) -> tempfile::TempDir {
    let (from, folder) = (golden().join(name), tempfile::tempdir().unwrap());
    std::fs::copy(from.join("config.json"), folder.path().join("config.json")).unwrap();
    let mut tensors: HashMap<String, Tensor> = HashMap::new();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap();
        if file.starts_with("model") && file.ends_with(".safetensors") {
            tensors.extend(candle_core::safetensors::load(path, &Device::Cpu).unwrap());
        }
    }
    let tensors: HashMap<String, Tensor> =
        tensors.into_iter().filter_map(|(name, tensor)| Some((rename(&name)?, tensor))).collect();
    candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).unwrap();
    folder
}

/// What is saved of LlamaModel or MistralModel in place of the class with a head.
#[test]
fn a_network_saved_without_its_head_is_loaded_where_the_head_is_its_table() {
    let bare = |name: &str| name.strip_prefix("model.").map(str::to_owned);
    let tied = renamed("llama3.2-tied", bare);
    let (tokens, logits) = expected("llama3.2-tied");
    let difference = difference(&logits_of(&load(&folder(tied.path()), false), &tokens), &logits);
    assert!(difference < 1e-4, "logits differ by {difference}");
    let untied = renamed("llama2-gqa", bare);
    let error = Model::load(&folder(untied.path()), &LoadOptions::default(), &Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: lm_head.weight, without which only a model with tie_word"), "{error}");
}

/// What saves a tensor of two names once keeps either.
#[test]
fn a_table_that_is_the_head_too_may_have_the_heads_name() {
    let as_head =
        |name: &str| Some(if name == "model.embed_tokens.weight" { "lm_head.weight" } else { name }.to_owned());
    let tied = renamed("llama3.2-tied", as_head);
    let (tokens, logits) = expected("llama3.2-tied");
    let difference = difference(&logits_of(&load(&folder(tied.path()), false), &tokens), &logits);
    assert!(difference < 1e-4, "logits differ by {difference}");
    let untied = renamed("llama2-gqa", |name| as_head(name).filter(|_| name != "lm_head.weight"));
    let error = Model::load(&folder(untied.path()), &LoadOptions::default(), &Device::Cpu).unwrap_err().to_string();
    assert!(error.contains("model.embed_tokens.weight is missing"), "{error}");
}

/// As adapters leave it behind that trained the head too: transformers 5 takes the head, whatever the configuration says.
#[test]
fn a_head_of_its_own_is_the_output_of_a_model_that_is_said_to_be_tied() {
    let said = configured("llama2-gqa", |config| {
        config.insert("tie_word_embeddings".into(), json!(true));
    });
    let (tokens, logits) = expected("llama2-gqa");
    let own = logits_of(&load(&folder(said.path()), false), &tokens);
    assert!(difference(&own, &logits) < TOLERANCE, "logits differ by {}", difference(&own, &logits));
    // One that is the same, or cannot be the output, changes nothing.
    let path = said.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    tensors.remove("lm_head.weight");
    let mut with = |head: Option<Tensor>| {
        tensors.extend(head.map(|head| ("lm_head.weight".to_owned(), head)));
        candle_core::safetensors::save(&tensors, &path).unwrap();
        logits_of(&load(&folder(said.path()), false), &tokens)
    };
    let tied = with(None);
    let table = candle_core::safetensors::load(golden().join("llama2-gqa/model.safetensors"), &Device::Cpu).unwrap();
    let table = table["model.embed_tokens.weight"].clone();
    assert!(tied != own && tied == with(Some(table.clone())) && tied == with(Some(table.narrow(0, 0, 60).unwrap())));
}

#[test]
fn biases_that_the_configuration_does_not_tell_of_are_refused_unless_they_are_0() {
    let folder_of = |bias: f32| {
        let whole = renamed("llama2-gqa", |name| Some(name.to_owned()));
        let path = whole.path().join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        let bias = Tensor::full(bias, 64, &Device::Cpu).unwrap();
        tensors.insert("model.layers.1.self_attn.q_proj.bias".to_owned(), bias);
        candle_core::safetensors::save(&tensors, path).unwrap();
        whole
    };
    load(&folder(folder_of(0.0).path()), false);
    let biased = folder_of(0.5);
    let error = Model::load(&folder(biased.path()), &LoadOptions::default(), &Device::Cpu).unwrap_err().to_string();
    let says = "model.safetensors: model.layers.1.self_attn.q_proj.bias: is part of a layer, but no part that is read";
    assert!(error.contains(says), "{error}");
}

#[test]
fn weights_are_told_from_others_of_their_shape() {
    let digest = |path: &Path| weights_digest(&folder(path)).unwrap();
    let as_they_are = |name: &str| Some(name.to_owned());
    // One file or two, it is the same model.
    let whole = renamed("llama3", as_they_are);
    assert_eq!(digest(whole.path()), digest(&golden().join("llama3")));
    let path = whole.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // A small tensor in full, a large one at places: what is trained changes far more.
    for (first, step) in [(header, usize::MAX), (bytes.len() - 1, usize::MAX), (header, 32)] {
        let mut trained = bytes.clone();
        trained[first..].iter_mut().step_by(step).for_each(|byte| *byte ^= 1);
        std::fs::write(&path, trained).unwrap();
        assert_ne!(digest(whole.path()), digest(&golden().join("llama3")));
    }
    assert!(weights_digest(&folder(Path::new("/nowhere"))).unwrap_err().to_string().contains("/nowhere"));
}
