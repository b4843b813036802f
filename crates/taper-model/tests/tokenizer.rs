//! Tokenizers against their own libraries, read from tokenizer.json and rebuilt from GGUF metadata, and the streaming
//! decoder's properties.

mod common;

use candle_core::quantized::gguf_file::{self, Value as Field};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use taper_model::{TextStart, Tokenizer};

const BYTE_LEVEL: [&str; 4] = ["gpt-2", "smollm", "llama-bpe", "tekken"];

fn fixture(name: &str) -> Value {
    let path = common::golden().join("tokenizers").join(format!("{name}.json"));
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A checkpoint folder with a tokenizer.json.
fn from_json(tokenizer: &Value) -> Tokenizer {
    from_folder(tokenizer, &json!({"eos_token": {"content": "<unk>"}})).unwrap()
}

/// With a tokenizer_config.json of one's own.
fn from_folder(tokenizer: &Value, config: &Value) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(common::golden().join("llama3/config.json"), folder.path().join("config.json")).unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    Tokenizer::load(&common::folder(folder.path())).map_err(|e| e.to_string())
}

/// The smallest GGUF file that holds a tokenizer.
fn write_gguf(path: &Path, tokenizer: Vec<(&str, Field)>) {
    let mut metadata = vec![("general.architecture", Field::String("llama".to_owned()))];
    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
    ] {
        metadata.push((key, Field::U32(if key == "llama.embedding_length" { 32 } else { 1 })));
    }
    metadata.push(("llama.attention.layer_norm_rms_epsilon", Field::F32(1e-5)));
    metadata.push(("tokenizer.ggml.bos_token_id", Field::U32(1)));
    metadata.push(("tokenizer.ggml.eos_token_id", Field::U32(2)));
    metadata.extend(tokenizer);
    let metadata: Vec<(&str, &Field)> = metadata.iter().map(|(k, v)| (*k, v)).collect();
    let table = Tensor::zeros((500, 32), DType::F32, &Device::Cpu).unwrap();
    let table = QTensor::quantize(&table, GgmlDType::F32).unwrap();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, &[("token_embd.weight", &table)]).unwrap();
}

fn from_gguf(tokenizer: Vec<(&str, Field)>) -> Result<Tokenizer, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    write_gguf(&path, tokenizer);
    Tokenizer::load(&common::gguf(&path)).map_err(|e| e.to_string())
}

fn strings<'a>(items: impl IntoIterator<Item = &'a str>) -> Field {
    Field::Array(items.into_iter().map(|s| Field::String(s.to_owned())).collect())
}

/// A byte-level fixture as llama.cpp would write it.
fn byte_level_fields<'a>(name: &str, fixture: &Value) -> Vec<(&'a str, Field)> {
    let model = &fixture["tokenizer"]["model"];
    let added = fixture["tokenizer"]["added_tokens"].as_array().unwrap();
    let mut tokens = vec![String::new(); model["vocab"].as_object().unwrap().len()];
    for (token, id) in model["vocab"].as_object().unwrap() {
        tokens[id.as_u64().unwrap() as usize] = token.clone();
    }
    let mut types = vec![1; tokens.len()];
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        if id == tokens.len() {
            tokens.push(token["content"].as_str().unwrap().to_owned());
            types.push(1);
        }
        types[id] = if token["special"] == true { 3 } else { 4 };
    }
    let merges: Vec<String> = model["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()))
        .collect();
    vec![
        ("tokenizer.ggml.model", Field::String("gpt2".to_owned())),
        ("tokenizer.ggml.pre", Field::String(name.to_owned())),
        ("tokenizer.ggml.tokens", strings(tokens.iter().map(String::as_str))),
        ("tokenizer.ggml.token_type", Field::Array(types.into_iter().map(Field::I32).collect())),
        ("tokenizer.ggml.merges", strings(merges.iter().map(String::as_str))),
        ("tokenizer.ggml.add_bos_token", Field::Bool(false)),
    ]
}

fn sentence_piece_fields<'a>() -> Vec<(&'a str, Field)> {
    let fixture = fixture("sentencepiece");
    let list = |key: &str| fixture[key].as_array().unwrap().clone();
    let scores = list("scores").iter().map(|s| Field::F32(s.as_f64().unwrap() as f32)).collect();
    let types = list("types").iter().map(|t| Field::I32(t.as_i64().unwrap() as i32)).collect();
    vec![
        ("tokenizer.ggml.model", Field::String("llama".to_owned())),
        ("tokenizer.ggml.tokens", strings(list("tokens").iter().map(|t| t.as_str().unwrap()))),
        ("tokenizer.ggml.scores", Field::Array(scores)),
        ("tokenizer.ggml.token_type", Field::Array(types)),
    ]
}

fn sentence_piece() -> Tokenizer {
    from_gguf(sentence_piece_fields()).unwrap()
}

fn check_cases(what: &str, tokenizer: &Tokenizer, fixture: &Value) {
    for case in fixture["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let tokens: Vec<u32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), tokens, "{what}: {text:?}");
        assert_eq!(tokenizer.decode(&tokens, true), case["decoded"].as_str().unwrap(), "{what}: {text:?}");
    }
}

#[test]
fn tokens_equal_those_of_the_tokenizers_library() {
    for name in BYTE_LEVEL {
        let fixture = fixture(name);
        let tokenizer = from_json(&fixture["tokenizer"]);
        check_cases(name, &tokenizer, &fixture);
        // config.json names 2 and 3, tokenizer_config.json names <unk>.
        assert_eq!(tokenizer.eos_tokens(), [2, 3, 0]);
        assert_eq!((tokenizer.token_id("</s>"), tokenizer.token_id("nothing")), (Some(2), None));
        assert!(tokenizer.is_special(2) && !tokenizer.is_special(60) && !tokenizer.is_special(u32::MAX));
    }
}

#[test]
fn a_gguf_file_rebuilds_the_same_byte_level_tokenizer() {
    for name in BYTE_LEVEL {
        let fixture = fixture(name);
        let tokenizer = from_gguf(byte_level_fields(name, &fixture)).unwrap();
        check_cases(&format!("{name} by GGUF"), &tokenizer, &fixture);
        assert_eq!(tokenizer.encode("The", true).unwrap(), tokenizer.encode("The", false).unwrap());
    }
}

/// As llama.cpp has them: names of one rule, of which Llama 3's opens a sequence where the file does not say.
#[test]
fn a_rule_goes_by_several_names() {
    for (rule, opens, names) in [
        ("gpt-2", false, &["phi-2", "mellum"][..]),
        ("smollm", false, &["codeshell", "minerva-7b"]),
        ("llama-bpe", true, &["falcon3", "pixtral", "midm-2.0"]),
    ] {
        let fixture = fixture(rule);
        for name in names {
            let mut fields = byte_level_fields(name, &fixture);
            fields.retain(|(key, _)| *key != "tokenizer.ggml.add_bos_token");
            let tokenizer = from_gguf(fields).unwrap();
            check_cases(name, &tokenizer, &fixture);
            assert_eq!(tokenizer.encode("", true).unwrap().len(), usize::from(opens), "{name}");
        }
    }
}

#[test]
fn a_gguf_file_that_does_not_say_how_texts_are_cut_is_read_as_gpt_2() {
    let fixture = fixture("gpt-2");
    let mut fields = byte_level_fields("gpt-2", &fixture);
    fields.retain(|(key, _)| *key != "tokenizer.ggml.pre");
    check_cases("no pre-tokenizer", &from_gguf(fields).unwrap(), &fixture);
}

#[test]
fn an_end_that_a_gguf_file_calls_a_word_is_no_text() {
    let fields = |kind: i32| {
        vec![
            ("tokenizer.ggml.model", Field::String("llama".to_owned())),
            ("tokenizer.ggml.tokens", strings(["<unk>", "<s>", "</s>", "<|end|>", "<think>", "▁"])),
            ("tokenizer.ggml.scores", Field::Array(vec![Field::F32(0.0); 6])),
            ("tokenizer.ggml.token_type", Field::Array([2, 3, 3, kind, 4, 1].map(Field::I32).to_vec())),
        ]
    };
    let tokenizer = from_gguf(fields(4)).unwrap();
    assert_eq!(tokenizer.encode("<|end|><think>", false).unwrap(), [3, 4]);
    assert_eq!(tokenizer.decode(&[4, 3], true), "<think>");
    assert_eq!(tokenizer.eos_tokens(), [2, 3]);
    assert_eq!(from_gguf(fields(1)).unwrap().eos_tokens(), [2]);
}

#[test]
fn a_gguf_file_rebuilds_sentence_piece() {
    let tokenizer = sentence_piece();
    check_cases("sentencepiece", &tokenizer, &fixture("sentencepiece"));
    let tokens = tokenizer.encode("The river", true).unwrap();
    assert_eq!(tokens[0], 1, "a sequence opens with its token");
    assert_eq!(tokenizer.decode(&tokens, true), "The river");
    assert_eq!(tokenizer.decode(&tokens, false), "<s> The river");
    // A stream that goes on with a text keeps the space before its first word.
    let mut stream = tokenizer.stream(TextStart::Continued, true);
    let text: String = tokens.iter().map(|t| stream.push(*t)).collect();
    assert_eq!(text, " The river");
}

#[test]
fn ends_are_added_where_the_file_wants_them() {
    let fixture = fixture("llama-bpe");
    let encode = |bos: Option<bool>, eos: Option<bool>| {
        let mut fields = byte_level_fields("llama-bpe", &fixture);
        fields.retain(|(key, _)| *key != "tokenizer.ggml.add_bos_token");
        fields.extend(bos.map(|b| ("tokenizer.ggml.add_bos_token", Field::Bool(b))));
        fields.extend(eos.map(|b| ("tokenizer.ggml.add_eos_token", Field::Bool(b))));
        from_gguf(fields).unwrap().encode("", true).unwrap()
    };
    assert_eq!(encode(None, None), [1]);
    assert_eq!(encode(Some(false), None), [0; 0]);
    assert_eq!(encode(Some(true), Some(true)), [1, 2]);
    assert_eq!(encode(Some(false), Some(true)), [2]);
}

/// The rows are what transformers 4.57's AutoTokenizer gives for the same folders; those without a class, which it takes for
/// a Llama tokenizer's by config.json, as it does where a flag is there. A template without a flag beside it is what
/// transformers 5 writes, and is read as it does.
#[test]
fn flags_of_llama_tokenizers_stand_above_the_post_processor() {
    let mut tokenizer = fixture("llama-bpe")["tokenizer"].clone();
    let opening = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}});
    let mut bare = opening.clone();
    bare["single"].as_array_mut().unwrap().remove(0);
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true});
    let flags = [(None, None), (Some(true), None), (Some(false), None), (None, Some(true)), (Some(false), Some(true))];
    let (heeded, opened, plain) = (["B", "B", "", "BE", "E"], ["B"; 5], [""; 5]);
    for (class, processor, expected) in [
        (Some("LlamaTokenizer"), &opening, heeded),
        (Some("LlamaTokenizer"), &bare, ["", "B", "", "BE", "E"]),
        (Some("LlamaTokenizerFast"), &bytes, heeded),
        (Some("LlamaTokenizerFast"), &Value::Null, heeded),
        (Some("PreTrainedTokenizerFast"), &opening, opened),
        (Some("PreTrainedTokenizerFast"), &bytes, plain),
        (None, &opening, heeded),
        (None, &bytes, ["", "B", "", "BE", "E"]),
    ] {
        tokenizer["post_processor"] = processor.clone();
        for ((bos, eos), expected) in flags.into_iter().zip(expected) {
            let mut config = json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>"});
            for (key, value) in
                [("tokenizer_class", json!(class)), ("add_bos_token", json!(bos)), ("add_eos_token", json!(eos))]
            {
                config[key] = value;
            }
            let loaded = from_folder(&tokenizer, &config).unwrap();
            let tokens = loaded.encode("", true).unwrap();
            let ends: String = tokens.iter().map(|t| if *t == 1 { 'B' } else { 'E' }).collect();
            assert_eq!(ends, expected, "{config} beside {processor}");
            // What a chat template wrote has its own.
            assert_eq!(loaded.encode("<s>", false).unwrap(), [1]);
        }
    }
    let mut config = json!({"tokenizer_class": "LlamaTokenizer", "bos_token": "<nowhere>"});
    assert_eq!(from_folder(&tokenizer, &config).unwrap().encode("", true).unwrap(), [0; 0]);
    config["add_bos_token"] = json!(true);
    let message = from_folder(&tokenizer, &config).unwrap_err();
    assert!(message.ends_with("add_bos_token: is true, and bos_token names no token of the vocabulary"), "{message}");
    config["add_bos_token"] = json!("yes");
    let message = from_folder(&tokenizer, &config).unwrap_err();
    assert!(message.contains("tokenizer_config.json: add_bos_token: invalid type"), "{message}");
}

#[test]
fn damaged_vocabularies_name_their_field() {
    let replace = |key: &'static str, value: Option<Field>| {
        let mut fields = byte_level_fields("gpt-2", &fixture("gpt-2"));
        fields.retain(|(k, _)| *k != key);
        fields.extend(value.map(|value| (key, value)));
        from_gguf(fields).unwrap_err()
    };
    for (key, value, part) in [
        ("tokenizer.ggml.model", None, "is missing"),
        ("tokenizer.ggml.model", Some(Field::String("t5".to_owned())), "t5 is not supported"),
        ("tokenizer.ggml.pre", Some(Field::String("odd".to_owned())), "'odd' is not supported"),
        ("tokenizer.ggml.tokens", None, "is missing"),
        ("tokenizer.ggml.tokens", Some(Field::U32(3)), "must be an array"),
        ("tokenizer.ggml.tokens", Some(Field::Array(vec![Field::U32(3)])), "must be an array of strings"),
        ("tokenizer.ggml.tokens", Some(strings(["a", &"b".repeat(1025)])), "[1]: has 1025 bytes; at most 1024"),
        ("tokenizer.ggml.token_type", Some(Field::Array(vec![Field::I32(1)])), "has 1 entries for"),
        ("tokenizer.ggml.merges", None, "is missing"),
        ("tokenizer.ggml.merges", Some(strings(["x"])), "is not a pair"),
        ("tokenizer.ggml.merges", Some(strings(["nowhere found"])), ""),
    ] {
        let message = replace(key, value.clone());
        assert!(message.contains(key) && message.contains(part), "{key} = {value:?}: {message}");
    }
    let mut fields = sentence_piece_fields();
    fields.retain(|(key, _)| *key != "tokenizer.ggml.scores");
    let message = from_gguf(fields).unwrap_err();
    assert!(message.ends_with("tokenizer.ggml.scores is missing"), "{message}");
}

static TOKENIZERS: LazyLock<[Tokenizer; 2]> =
    LazyLock::new(|| [from_json(&fixture("smollm")["tokenizer"]), sentence_piece()]);

/// Whole words and single bytes alike, and ids outside the vocabulary.
fn any_tokens() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![0u32..520, 3u32..259], 0..40)
}

proptest! {
    #[test]
    fn a_stream_says_what_decoding_says(tokens in any_tokens(), skip in any::<bool>(), split in 0usize..40) {
        for tokenizer in TOKENIZERS.iter() {
            let shown = tokens.iter().filter(|t| !(skip && tokenizer.is_special(**t)));
            let bytes: Vec<u8> = shown.flat_map(|t| tokenizer.token_bytes(*t).to_vec()).collect();
            let mut stream = tokenizer.stream(TextStart::Continued, skip);
            let (left, right) = tokens.split_at(split.min(tokens.len()));
            let mut text: String = left.iter().map(|t| stream.push(*t)).collect();
            // A copy taken in the middle goes on alike.
            let mut copy = stream.clone();
            let rest: String = right.iter().map(|t| stream.push(*t)).collect();
            prop_assert_eq!(&rest, &right.iter().map(|t| copy.push(*t)).collect::<String>());
            text.push_str(&rest);
            text.push_str(&stream.finish());
            prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));

            let decoded = tokenizer.decode(&tokens, skip);
            let fresh = text.strip_prefix(' ').filter(|_| tokenizer.vocab_size() == 480).unwrap_or(&text);
            prop_assert_eq!(decoded, fresh);
        }
    }

    #[test]
    fn any_text_survives_a_round_trip(text in "\\PC*") {
        for tokenizer in TOKENIZERS.iter() {
            // SentencePiece writes spaces as this character, so it cannot tell them apart.
            let text = text.replace('▁', "_");
            let tokens = tokenizer.encode(&text, false).unwrap();
            prop_assert_eq!(tokenizer.decode(&tokens, false), &text[..]);
            let mut stream = tokenizer.stream(TextStart::Fresh, false);
            for token in tokens {
                // Whole characters only: a half one would show as a replacement.
                let piece = stream.push(token);
                let broken = piece.contains(char::REPLACEMENT_CHARACTER);
                prop_assert!(!broken || text.contains(char::REPLACEMENT_CHARACTER));
            }
            prop_assert_eq!(stream.finish(), "");
        }
    }
}
