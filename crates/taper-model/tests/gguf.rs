//! GGUF files against the golden checkpoints: each is rewritten as llama.cpp would convert it, with the rows of query
//! and key heads interleaved, and must give the same logits.

mod common;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use common::{difference, expected, load, logits_of};
use std::fs;
use std::path::{Path, PathBuf};
use taper_model::{LoadOptions, Model, ModelConfig, ModelError, RopeScaling, WeightDType};

/// Writes a golden checkpoint as GGUF, each matrix in the format that `dtype` says for its name.
fn convert(
    name: &str,
    dtype: impl Fn(&str) -> GgmlDType,
    folder: &Path,
    change: impl FnOnce(&mut Vec<(String, Value)>),
) -> PathBuf {
    convert_folder(&common::golden().join(name), dtype, &folder.join(format!("{name}.gguf")), change)
}

/// The same of any folder, to a path.
fn convert_folder(
    from: &Path,
    dtype: impl Fn(&str) -> GgmlDType,
    path: &Path,
    change: impl FnOnce(&mut Vec<(String, Value)>),
) -> PathBuf {
    let config = ModelConfig::read(&common::folder(from)).unwrap();
    let tensors = candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    let mut converted: Vec<(String, QTensor)> = Vec::new();
    for (name, tensor) in &tensors {
        let tensor = tensor.to_dtype(DType::F32).unwrap();
        let (heads, name) = (
            if name.contains("q_proj") {
                config.q_heads
            } else if name.contains("k_proj") {
                config.kv_heads
            } else {
                0
            },
            gguf_name(name),
        );
        // llama.cpp's order: the two halves of each head, turn by turn.
        let tensor = if heads > 0 {
            let (rows, columns) = tensor.dims2().unwrap();
            let halves = tensor.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
            halves.transpose(1, 2).unwrap().contiguous().unwrap().reshape((rows, columns)).unwrap()
        } else {
            tensor
        };
        let dtype = if tensor.rank() == 1 { GgmlDType::F32 } else { dtype(&name) };
        converted.push((name, QTensor::quantize(&tensor, dtype).unwrap()));
    }
    if let RopeScaling::Llama3 { .. } = config.rope.scaling {
        let plain = taper_model::Rope { scaling: RopeScaling::Default, ..config.rope.clone() };
        let scaled = config.rope.frequencies(1);
        let divisors: Vec<f32> = plain.frequencies(1).iter().zip(&scaled).map(|(a, b)| a / b).collect();
        let tensor = Tensor::new(divisors, &Device::Cpu).unwrap();
        converted.push(("rope_freqs.weight".to_owned(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap()));
    }
    let number = |n: usize| Value::U32(n as u32);
    let mut metadata = vec![
        ("general.architecture".to_owned(), Value::String("llama".to_owned())),
        ("llama.block_count".to_owned(), number(config.layers)),
        ("llama.context_length".to_owned(), number(config.context_length)),
        ("llama.embedding_length".to_owned(), number(config.hidden_size)),
        ("llama.feed_forward_length".to_owned(), number(config.intermediate_size)),
        ("llama.attention.head_count".to_owned(), number(config.q_heads)),
        ("llama.attention.head_count_kv".to_owned(), number(config.kv_heads)),
        ("llama.attention.key_length".to_owned(), number(config.head_dim)),
        ("llama.attention.value_length".to_owned(), number(config.head_dim)),
        ("llama.rope.dimension_count".to_owned(), number(config.head_dim)),
        ("llama.rope.freq_base".to_owned(), Value::F32(config.rope.theta as f32)),
        ("llama.attention.layer_norm_rms_epsilon".to_owned(), Value::F32(config.rms_norm_eps as f32)),
    ];
    change(&mut metadata);
    write(path, &metadata, &converted);
    path.to_owned()
}

fn write(path: &Path, metadata: &[(String, Value)], tensors: &[(String, QTensor)]) {
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

fn gguf_name(name: &str) -> String {
    let mut name = name.trim_start_matches("model.").replace("layers.", "blk.");
    for (ours, theirs) in [
        ("embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
    ] {
        name = name.replace(ours, theirs);
    }
    if name == "norm.weight" { "output_norm.weight".to_owned() } else { name }
}

#[test]
fn a_converted_checkpoint_gives_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    let set = |key: &str, value: Value| {
        let key = key.to_owned();
        move |metadata: &mut Vec<(String, Value)>| metadata.push((key, value))
    };
    let linear = |metadata: &mut Vec<(String, Value)>| {
        set("llama.rope.scaling.type", Value::String("linear".to_owned()))(metadata);
        set("llama.rope.scaling.factor", Value::F32(4.0))(metadata);
    };
    let yarn = |metadata: &mut Vec<(String, Value)>| {
        set("llama.rope.scaling.type", Value::String("yarn".to_owned()))(metadata);
        set("llama.rope.scaling.factor", Value::F32(4.0))(metadata);
        set("llama.rope.scaling.original_context_length", Value::U32(16))(metadata);
    };
    type Change<'a> = Box<dyn FnOnce(&mut Vec<(String, Value)>) + 'a>;
    let table: Vec<(&str, Change<'_>)> = vec![
        ("llama1", Box::new(|_| ())),
        ("llama2-gqa", Box::new(|_| ())),
        ("llama3.1", Box::new(|_| ())),
        ("llama3.2-tied", Box::new(|_| ())),
        ("smollm2", Box::new(|_| ())),
        ("mistral-nemo", Box::new(|_| ())),
        ("linear", Box::new(linear)),
        ("yarn", Box::new(yarn)),
        ("mistral-v0.1", Box::new(set("llama.attention.sliding_window", Value::U32(16)))),
    ];
    for (name, change) in table {
        let path = convert(name, |_| GgmlDType::F32, folder.path(), change);
        let model = load(&common::gguf(&path), false);
        let (tokens, logits) = expected(name);
        let difference = difference(&logits_of(&model, &tokens), &logits);
        assert!(difference < 1e-4, "{name}: logits differ by {difference}");
    }
}

/// Root mean square of the difference, of logits whose own is above 1.
fn rms(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    let squares: Vec<f32> = pairs.map(|(a, b)| (a - b).powi(2)).collect();
    (squares.iter().sum::<f32>() / squares.len() as f32).sqrt()
}

#[test]
fn quantised_weights_stay_close_joined_or_not_dequantised_or_not() {
    use GgmlDType::{BF16, F16, F32, Q8_0};
    let folder = tempfile::tempdir().unwrap();
    let (tokens, logits) = expected("llama2-gqa");
    // f16 and bf16 hold this checkpoint exactly. Rows of the down projection do not divide into blocks.
    let q8 = |name: &str| if name.contains("ffn_down") { F32 } else { Q8_0 };
    // Query, key and value of one format are joined; here they are not, nor are gate and up.
    let mixed = |name: &str| if name.contains("attn_v") || name.contains("ffn_up") { F16 } else { q8(name) };
    type Formats<'a> = &'a dyn Fn(&str) -> GgmlDType;
    let table: [(&str, Formats<'_>, f32); 4] =
        [("f16", &|_| F16, 1e-4), ("bf16", &|_| BF16, 1e-4), ("q8", &q8, 0.1), ("mixed", &mixed, 0.1)];
    for (what, formats, tolerance) in table {
        let path = convert("llama2-gqa", formats, folder.path(), |_| ());
        for dequantize in [false, true] {
            let error = rms(&logits_of(&load(&common::gguf(&path), dequantize), &tokens), &logits);
            assert!(error < tolerance, "{what}, dequantize {dequantize}: {error}");
        }
    }
}

/// A golden checkpoint as a network whose rows are super-blocks of 256, for which zeros stand behind its own weights: of the same
/// logits, since what its norms divide by is smaller by as much as their weights are.
fn widened(name: &str, folder: &Path) {
    const WIDTH: usize = 256;
    let read = |file: &str| fs::read(common::golden().join(name).join(file)).unwrap();
    let mut config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&read("config.json")).unwrap();
    let number = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, head_dim) = (number("hidden_size"), number("head_dim"));
    let (heads, kv_heads) =
        (WIDTH / head_dim, WIDTH / head_dim * number("num_key_value_heads") / number("num_attention_heads"));
    let shrunk = hidden as f64 / WIDTH as f64;
    let epsilon = config["rms_norm_eps"].as_f64().unwrap() * shrunk;
    for (key, value) in [
        ("hidden_size", WIDTH.into()),
        ("intermediate_size", WIDTH.into()),
        ("num_attention_heads", heads.into()),
        ("num_key_value_heads", kv_heads.into()),
        ("rms_norm_eps", epsilon.into()),
    ] {
        config.insert(key.to_owned(), value);
    }
    let path = common::golden().join(name).join("model.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let widen = |(name, tensor): (String, Tensor)| {
        let tensor = tensor.to_dtype(DType::F32).unwrap();
        let (rows, last) = (tensor.dim(0).unwrap(), tensor.rank() - 1);
        let tensor = tensor.pad_with_zeros(last, 0, WIDTH - tensor.dim(last).unwrap()).unwrap();
        let wide = match name.as_str() {
            _ if last == 0 => return (name, (tensor * shrunk.sqrt()).unwrap()),
            "model.embed_tokens.weight" | "lm_head.weight" => rows,
            other if other.contains("k_proj") || other.contains("v_proj") => kv_heads * head_dim,
            _ => WIDTH,
        };
        (name, tensor.pad_with_zeros(0, 0, wide - rows).unwrap())
    };
    let tensors: std::collections::HashMap<String, Tensor> = tensors.into_iter().map(widen).collect();
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    fs::write(folder.join("config.json"), serde_json::Value::from(config).to_string()).unwrap();
}

#[test]
fn weights_in_super_blocks_stay_close_of_one_type_or_of_several() {
    use GgmlDType::{F32, Q2K, Q3K, Q4K, Q5K, Q6K};
    let folder = tempfile::tempdir().unwrap();
    widened("llama2-gqa", folder.path());
    let (tokens, logits) = expected("llama2-gqa");
    let own = ["token_embd", "output.weight", "attn_v", "ffn_down"];
    // As files that are named after Q4_K_M have them: head, table and some of the matrices in six bits, and layers differ.
    let medium = |name: &str| if !name.contains("blk.1") && own.iter().any(|o| name.contains(o)) { Q6K } else { Q4K };
    type Formats<'a> = &'a dyn Fn(&str) -> GgmlDType;
    let table: [(&str, Formats<'_>, f32); 7] = [
        ("f32", &|_| F32, 1e-4),
        ("q6", &|_| Q6K, 0.3),
        ("q5", &|_| Q5K, 0.5),
        ("q4", &|_| Q4K, 0.8),
        ("medium", &medium, 0.6),
        ("q3", &|_| Q3K, 1.5),
        ("q2", &|_| Q2K, 2.2),
    ];
    for (what, formats, tolerance) in table {
        let path = convert_folder(folder.path(), formats, &folder.path().join("wide.gguf"), |_| ());
        let [quantised, floats] =
            [false, true].map(|dequantize| logits_of(&load(&common::gguf(&path), dequantize), &tokens));
        let (error, own) = (rms(&quantised, &logits), rms(&quantised, &floats));
        assert!(error < tolerance, "{what}: {error} from the original");
        assert!(own < 0.06, "{what}: {own} from the same weights as floats");
    }
}

#[test]
fn a_files_floats_are_loaded_in_the_dtype_asked_for() {
    use WeightDType::{Auto, BF16, F32};
    let folder = tempfile::tempdir().unwrap();
    let (tokens, logits) = expected("llama2-gqa");
    for (stored, asked, bytes) in
        [(GgmlDType::F32, Auto, 4), (GgmlDType::F32, BF16, 2), (GgmlDType::F16, Auto, 2), (GgmlDType::F16, F32, 4)]
    {
        let path = convert("llama2-gqa", |_| stored, folder.path(), |_| ());
        let options = LoadOptions { dtype: asked, ..LoadOptions::default() };
        let model = Model::load(&common::gguf(&path), &options, &Device::Cpu).unwrap();
        let config = model.config();
        let norms = 4 * (2 * config.layers + 1) * config.hidden_size;
        assert_eq!(model.weight_bytes(), (bytes * config.multiplied_weights() + norms) as u64, "{stored:?} {asked:?}");
        assert!(rms(&logits_of(&model, &tokens), &logits) < 1e-2, "{stored:?} {asked:?}");
    }
}

/// As `Packed` keeps them: rows' scales and offsets before their weights. Elsewhere fewer types are packed.
#[cfg(target_arch = "x86_64")]
#[test]
fn what_quantised_weights_take_on_the_cpu_is_what_they_are_packed_into() {
    let folder = tempfile::tempdir().unwrap();
    widened("llama2-gqa", folder.path());
    let path = folder.path().join("wide.gguf");
    let bytes =
        |dtype| load(&common::gguf(&convert_folder(folder.path(), |_| dtype, &path, |_| ())), false).weight_bytes();
    let floats = bytes(GgmlDType::F32);
    let packed = ModelConfig::read(&common::gguf(&path)).unwrap().multiplied_weights();
    for (dtype, block) in [
        (GgmlDType::Q4_0, 8 * 20),
        (GgmlDType::Q5_0, 8 * 24),
        (GgmlDType::Q8_0, 8 * 34),
        (GgmlDType::Q4K, 4 + 16 + 128),
        (GgmlDType::Q5K, 4 + 16 + 160),
        (GgmlDType::Q6K, 2 + 16 + 192),
    ] {
        assert_eq!(floats - bytes(dtype), (packed * 4 - packed / 256 * block) as u64, "{dtype:?}");
    }
}

#[test]
fn contradictions_name_the_file_and_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let replace = |key: &str, value: Value| {
        let key = key.to_owned();
        move |metadata: &mut Vec<(String, Value)>| {
            metadata.retain(|(k, _)| *k != key);
            metadata.push((key, value));
        }
    };
    let text = |s: &str| Value::String(s.to_owned());
    let table: Vec<(&str, Value, &str)> = vec![
        ("general.architecture", text("qwen2"), "general.architecture: qwen2 is not supported"),
        ("llama.block_count", Value::U32(3), "blk.2.attn_norm.weight is missing"),
        ("llama.block_count", Value::U32(1), "llama.block_count: is 1, but the file holds more layers"),
        ("llama.block_count", text("two"), "llama.block_count: must be a whole number"),
        ("llama.block_count", Value::U32(0), "llama.block_count: 0 is not between 1 and"),
        ("llama.embedding_length", Value::U64(u64::MAX / 4), "llama.embedding_length: "),
        ("llama.embedding_length", Value::U32(64), "expected shape [64]"),
        ("llama.feed_forward_length", Value::U32(41), "expected shape [41, 32], got [40, 32]"),
        ("llama.attention.head_count", Value::U32(0), "llama.attention.head_count: 0"),
        ("llama.attention.head_count_kv", Value::U32(3), "llama.attention.head_count_kv: 3 does not divide"),
        ("llama.attention.key_length", Value::U32(15), "llama.attention.value_length: 16 beside"),
        ("llama.rope.dimension_count", Value::U32(8), "llama.rope.dimension_count: rotating 8"),
        ("llama.expert_count", Value::U32(8), "llama.expert_count: a mixture of experts is not supported"),
        ("llama.rope.scaling.type", text("linear"), "llama.rope.scaling.factor is missing"),
        ("llama.rope.scaling.type", text("odd"), "llama.rope.scaling.type: odd is not supported"),
        ("general.alignment", Value::U32(3), "general.alignment: must be a power of two"),
    ];
    for (key, value, part) in table {
        let path = convert("llama2-gqa", |_| GgmlDType::F32, folder.path(), replace(key, value));
        let message = match Model::load(&common::gguf(&path), &LoadOptions::default(), &Device::Cpu) {
            Ok(_) => panic!("{key} loaded"),
            Err(error) => error.to_string(),
        };
        assert!(message.contains("llama2-gqa.gguf: ") && message.contains(part), "{key}: {message}");
    }
}

#[test]
fn what_ends_an_answer_is_told_by_three_keys_and_by_the_names_of_marks() {
    let folder = tempfile::tempdir().unwrap();
    let ends = |eos: u32, names: [&str; 5], kinds: [i32; 5], eom: Option<u32>| {
        let path = convert(
            "llama2-gqa",
            |_| GgmlDType::F32,
            folder.path(),
            |metadata| {
                let mut set = |key: &str, value| metadata.push((format!("tokenizer.ggml.{key}"), value));
                set("eos_token_id", Value::U32(eos));
                set("tokens", Value::Array(names.map(|name| Value::String(name.to_owned())).to_vec()));
                set("token_type", Value::Array(kinds.map(Value::I32).to_vec()));
                eom.into_iter().for_each(|id| set("eom_token_id", Value::U32(id)));
            },
        );
        ModelConfig::read(&common::gguf(&path)).unwrap().eos_tokens
    };
    let names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "<|eot_id|>"];
    assert_eq!(ends(0, names, [3, 3, 3, 1, 3], None), [0, 2, 4]);
    // One that its file calls its own word is an end all the same, and one that is text like any other ends nothing.
    assert_eq!(ends(3, names, [3, 3, 1, 1, 4], Some(1)), [0, 1, 3, 4]);
    assert_eq!(ends(1, ["</s>", "a", "<｜end▁of▁sentence｜>", "</s>", "[EOS]"], [1, 1, 4, 3, 2], None), [1, 2, 3]);
}

/// Writes a golden checkpoint in parts, as llama-gguf-split cuts it: two of its tensors to a file.
fn convert_split(folder: &Path) -> Vec<PathBuf> {
    let whole = convert("llama2-gqa", |_| GgmlDType::F16, folder, |_| ());
    let mut file = fs::File::open(&whole).unwrap();
    let content = gguf_file::Content::read(&mut file).unwrap();
    let mut names: Vec<&String> = content.tensor_infos.keys().collect();
    names.sort();
    let parts: Vec<&[&String]> = names.chunks(2).collect();
    let paths: Vec<PathBuf> =
        (1..=parts.len()).map(|number| folder.join(format!("tiny-{number:05}-of-{:05}.gguf", parts.len()))).collect();
    for (number, (part, path)) in parts.iter().zip(&paths).enumerate() {
        let mut metadata = vec![
            ("split.no".to_owned(), Value::U16(number as u16)),
            ("split.count".to_owned(), Value::U16(parts.len() as u16)),
            ("split.tensors.count".to_owned(), Value::I32(names.len() as i32)),
        ];
        if number == 0 {
            metadata.extend(content.metadata.clone());
        }
        let tensors: Vec<(String, QTensor)> =
            part.iter().map(|name| ((*name).clone(), content.tensor(&mut file, name, &Device::Cpu).unwrap())).collect();
        write(path, &metadata, &tensors);
    }
    paths
}

#[test]
fn a_model_in_parts_is_read_from_its_first() {
    let folder = tempfile::tempdir().unwrap();
    let parts = convert_split(folder.path());
    let (tokens, _) = expected("llama2-gqa");
    let logits = |path: &Path| logits_of(&load(&common::gguf(path), false), &tokens);
    assert_eq!(logits(&parts[0]), logits(&folder.path().join("llama2-gqa.gguf")));

    let error = |path: &Path| {
        let loaded = Model::load(&common::gguf(path), &LoadOptions::default(), &Device::Cpu);
        loaded.map(|_| ()).unwrap_err().to_string()
    };
    let count = parts.len();
    let message = error(&parts[1]);
    assert!(
        message.contains(&format!("split.no: is 1, so this is not the first of {count} parts: give tiny-00001-of-")),
        "{message}"
    );
    let renamed = folder.path().join("renamed.gguf");
    fs::copy(&parts[0], &renamed).unwrap();
    let message = error(&renamed);
    assert!(message.contains("no part is found; llama-gguf-split --merge"), "{message}");
    // A part that is another one's copy.
    let third = fs::read(&parts[2]).unwrap();
    fs::copy(&parts[1], &parts[2]).unwrap();
    let message = error(&parts[0]);
    assert!(message.contains("tiny-00003-of-") && message.ends_with("split.no: is 1 in place of 2"), "{message}");
    // The same tensors twice.
    let mut twice = fs::read(&parts[1]).unwrap();
    let at = twice.windows(8).position(|bytes| bytes == b"split.no").unwrap() + 8 + 4;
    twice[at] = 2;
    fs::write(&parts[2], twice).unwrap();
    assert!(error(&parts[0]).ends_with("tensors: are in another part too"));
    fs::write(&parts[2], third).unwrap();
    fs::remove_file(&parts[1]).unwrap();
    let message = error(&parts[0]);
    assert!(
        message.contains(&format!("split.count: is {count}, and tiny-00002-of-")) && message.contains("--merge"),
        "{message}"
    );
}

/// What is read of a checkpoint as GGUF whose positions are said to be scaled, from 16 on.
fn scaled(name: &str, folder: &Path, kind: &str, factor: f32) -> Result<ModelConfig, ModelError> {
    let change = |metadata: &mut Vec<(String, Value)>| {
        metadata.push(("llama.rope.scaling.type".to_owned(), Value::String(kind.to_owned())));
        metadata.push(("llama.rope.scaling.factor".to_owned(), Value::F32(factor)));
        metadata.push(("llama.rope.scaling.original_context_length".to_owned(), Value::U32(16)));
    };
    ModelConfig::read(&common::gguf(&convert(name, |_| GgmlDType::F32, folder, change)))
}

#[test]
fn a_context_that_yarn_stretches_is_what_the_file_says_or_what_it_comes_to() {
    let folder = tempfile::tempdir().unwrap();
    let context = |kind, factor| scaled("yarn", folder.path(), kind, factor).unwrap().context_length;
    assert_eq!([context("yarn", 2.0), context("yarn", 8.0), context("linear", 8.0)], [64, 128, 64]);
}

/// As llama.cpp does it: what is divided is scaled besides.
#[test]
fn divisors_and_linear_scaling_both_hold() {
    let folder = tempfile::tempdir().unwrap();
    let frequencies = |kind, factor| {
        let config = scaled("llama3.1", folder.path(), kind, factor);
        config.map(|config| config.rope.frequencies(1)).map_err(|e| e.to_string())
    };
    let (plain, scaled) = (frequencies("none", 4.0).unwrap(), frequencies("linear", 4.0).unwrap());
    assert!(plain.iter().zip(&scaled).all(|(plain, scaled)| plain / scaled == 4.0), "{plain:?} {scaled:?}");
    let error = frequencies("yarn", 4.0).unwrap_err();
    assert!(error.contains("llama.rope.scaling.type: yarn beside the tensor rope_freqs.weight is not"), "{error}");
    assert!(frequencies("linear", f32::MAX).unwrap_err().contains("rope_freqs.weight: holds values"));
}

#[test]
fn a_layers_tensor_that_is_not_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert("llama2-gqa", |_| GgmlDType::F32, folder.path(), |_| ());
    let mut bytes = fs::read(&path).unwrap();
    let (old, new) = (b"blk.1.attn_q.weight", b"blk.1.attn_q.biases");
    let at = bytes.windows(old.len()).position(|name| name == old).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new);
    fs::write(&path, bytes).unwrap();
    let message = Model::load(&common::gguf(&path), &LoadOptions::default(), &Device::Cpu).unwrap_err().to_string();
    assert!(
        message.contains("llama2-gqa.gguf: blk.1.attn_q.biases: is part of a layer, but no part that is read"),
        "{message}"
    );
}

#[test]
fn no_cut_and_no_flipped_byte_panics() {
    let folder = tempfile::tempdir().unwrap();
    let path = convert("llama2-gqa", |_| GgmlDType::F16, folder.path(), |_| ());
    let whole = fs::read(&path).unwrap();
    let load = || Model::load(&common::gguf(&path), &LoadOptions::default(), &Device::Cpu);
    assert!(load().is_ok());
    for length in (0..2000).step_by(13).chain((2000..whole.len()).step_by(997)) {
        fs::write(&path, &whole[..length]).unwrap();
        let message = load().unwrap_err().to_string();
        assert!(message.contains("llama2-gqa.gguf: "), "{length}: {message}");
    }
    for (place, flip) in (0..2000).zip([0x01, 0x80, 0xff].into_iter().cycle()) {
        let mut bytes = whole.clone();
        bytes[place] ^= flip;
        fs::write(&path, bytes).unwrap();
        let _ = load();
    }
}
