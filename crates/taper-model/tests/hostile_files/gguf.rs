//! GGUF files with odd metadata, odd tensors, odd bytes.

use super::mutate::{self, Change};
use super::{limits, used};
use proptest::prelude::*;
use proptest::sample::{Index, select};
use taper_model::Tokenizer;

/// A metadata value: its type's number, and its bytes.
type Value = (u32, Vec<u8>);

#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    /// Innermost first, as in the file.
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// A file in parts.
#[derive(Debug, Clone)]
struct Parts {
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
    data: Vec<u8>,
}

fn u32(n: u32) -> Value {
    (4, n.to_le_bytes().into())
}

fn f32(x: f32) -> Value {
    (6, x.to_le_bytes().into())
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn text(text: &str) -> Value {
    (8, string(text))
}

fn array(kind: u32, count: u64, items: Vec<u8>) -> Value {
    (9, [&kind.to_le_bytes()[..], &count.to_le_bytes(), &items].concat())
}

fn texts<S: AsRef<str>>(items: &[S]) -> Value {
    array(8, items.len() as u64, items.iter().flat_map(|s| string(s.as_ref())).collect())
}

fn f32s(items: &[f32]) -> Value {
    array(6, items.len() as u64, items.iter().flat_map(|x| x.to_le_bytes()).collect())
}

fn i32s(items: &[i32]) -> Value {
    array(5, items.len() as u64, items.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// How its tokenizer is written, and how its weights are.
#[derive(Debug, Clone, Copy)]
enum Style {
    ByteLevel,
    SentencePiece,
}

/// A tiny model, sound in every part: 64 wide, one layer, two query heads over one of keys.
fn good(style: Style) -> Parts {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    let mut types = vec![2, 3, 3];
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}";
    let mut metadata = vec![
        ("general.architecture", text("llama")),
        ("general.alignment", u32(32)),
        ("llama.block_count", u32(1)),
        ("llama.context_length", u32(64)),
        ("llama.embedding_length", u32(64)),
        ("llama.feed_forward_length", u32(32)),
        ("llama.attention.head_count", u32(2)),
        ("llama.attention.head_count_kv", u32(1)),
        ("llama.attention.key_length", u32(32)),
        ("llama.attention.value_length", u32(32)),
        ("llama.attention.sliding_window", u32(16)),
        ("llama.attention.layer_norm_rms_epsilon", f32(1e-5)),
        ("llama.rope.dimension_count", u32(32)),
        ("llama.rope.freq_base", f32(10_000.0)),
        ("llama.rope.scaling.type", text("yarn")),
        ("llama.rope.scaling.factor", f32(4.0)),
        ("llama.rope.scaling.original_context_length", u32(16)),
        ("llama.rope.scaling.attn_factor", f32(1.0)),
        ("llama.rope.scaling.yarn_beta_fast", f32(32.0)),
        ("llama.rope.scaling.yarn_beta_slow", f32(1.0)),
        ("tokenizer.chat_template", text(template)),
        ("tokenizer.ggml.bos_token_id", u32(1)),
        ("tokenizer.ggml.eos_token_id", u32(2)),
        ("tokenizer.ggml.unknown_token_id", u32(0)),
        ("tokenizer.ggml.add_bos_token", (7, vec![1])),
        ("tokenizer.ggml.add_eos_token", (7, vec![1])),
    ];
    match style {
        Style::ByteLevel => {
            // The alphabet of byte-level tokens, of which the printable part is enough here, and two merges.
            tokens.extend((b'!'..=b'~').map(|b| char::from(b).to_string()));
            tokens.extend(["Ġ", "Ċ", "Ã", "¶", "he", "hel"].map(str::to_owned));
            metadata.extend([
                ("tokenizer.ggml.model", text("gpt2")),
                ("tokenizer.ggml.pre", text("llama-bpe")),
                ("tokenizer.ggml.merges", texts(&["h e", "he l"])),
            ]);
        }
        Style::SentencePiece => {
            tokens.extend((0..=255u8).map(|b| format!("<0x{b:02X}>")));
            types.extend([6; 256]);
            tokens.extend(["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"].map(str::to_owned));
            let scores: Vec<f32> = (0..tokens.len()).map(|i| -(i as f32)).collect();
            metadata.extend([
                ("tokenizer.ggml.model", text("llama")),
                ("tokenizer.ggml.scores", f32s(&scores)),
                ("tokenizer.ggml.add_space_prefix", (7, vec![1])),
            ]);
        }
    }
    types.resize(tokens.len(), 1);
    let vocabulary = tokens.len() as u64;
    metadata.extend([("tokenizer.ggml.tokens", texts(&tokens)), ("tokenizer.ggml.token_type", i32s(&types))]);
    let (mut tensors, mut data) = (Vec::new(), Vec::new());
    let mut add = |name: &str, shape: &[u64]| {
        // f32 for norms, else Q8_0 or f16.
        let elements: u64 = shape.iter().product();
        let (kind, bytes) = match (shape.len(), style) {
            (1, _) => (0, elements * 4),
            (_, Style::ByteLevel) => (8, elements / 32 * 34),
            (_, Style::SentencePiece) => (1, elements * 2),
        };
        tensors.push(Tensor { name: name.to_owned(), shape: shape.to_vec(), kind, offset: data.len() as u64 });
        data.extend((0..bytes).map(|i| (i % 7) as u8));
        data.resize(data.len().next_multiple_of(32), 0);
    };
    add("token_embd.weight", &[64, vocabulary]);
    add("output.weight", &[64, vocabulary]);
    add("output_norm.weight", &[64]);
    add("blk.0.attn_norm.weight", &[64]);
    add("blk.0.attn_q.weight", &[64, 64]);
    add("blk.0.attn_k.weight", &[64, 32]);
    add("blk.0.attn_v.weight", &[64, 32]);
    add("blk.0.attn_output.weight", &[64, 64]);
    add("blk.0.ffn_norm.weight", &[64]);
    add("blk.0.ffn_gate.weight", &[64, 32]);
    add("blk.0.ffn_up.weight", &[64, 32]);
    add("blk.0.ffn_down.weight", &[32, 64]);
    Parts { metadata: metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(), tensors, data }
}

/// The file, and how many bytes of it come before the tensors' data.
fn written(parts: &Parts) -> (Vec<u8>, usize) {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((parts.tensors.len() as u64).to_le_bytes());
    bytes.extend((parts.metadata.len() as u64).to_le_bytes());
    for (key, (kind, value)) in &parts.metadata {
        bytes.extend(string(key));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(value);
    }
    for tensor in &parts.tensors {
        bytes.extend(string(&tensor.name));
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().for_each(|d| bytes.extend(d.to_le_bytes()));
        bytes.extend(tensor.kind.to_le_bytes());
        bytes.extend(tensor.offset.to_le_bytes());
    }
    let header = bytes.len();
    bytes.resize(header.next_multiple_of(32), 0);
    bytes.extend(&parts.data);
    (bytes, header)
}

/// Whether a file of these bytes is a model.
fn loads(bytes: Vec<u8>) -> bool {
    // A constant factor for what is kept per entry; weights are copied once, or turned into floats.
    limits::within(bytes.len() * 64, move || {
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        used(&super::common::gguf(file.path()))
    })
}

/// A metadata value that nobody expects.
fn odd() -> impl Strategy<Value = Value> {
    let float = select(vec![0.0, -0.0, 1.0, -1.0, 1e-40, 1e38, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    let name = || prop_oneof![Just("linear"), Just("yarn"), Just("none"), Just("llama"), Just("gpt2"), Just("tekken")];
    let word = prop_oneof![
        "\\PC{0,8}",
        select(vec![
            "<s>",
            "a b",
            "h e",
            "e h",
            "hel l",
            "zz q",
            " ",
            "\u{1b}[2J",
            "{{ 1/0 }}",
            "<0xZZ>",
            "<0x+1>",
            "▁"
        ])
        .prop_map(str::to_owned),
    ];
    prop_oneof![
        mutate::edge().prop_map(|n| u32(n as u32)),
        (0u32..140).prop_map(u32),
        mutate::edge().prop_map(|n| (10, n.to_le_bytes().into())),
        mutate::edge().prop_map(|n| (11, n.to_le_bytes().into())),
        any::<u8>().prop_map(|n| (7, vec![n])),
        float.clone().prop_map(f32),
        any::<f32>().prop_map(f32),
        any::<f64>().prop_map(|x| (12, x.to_le_bytes().into())),
        name().prop_map(text),
        "\\PC{0,12}".prop_map(|s| text(&s)),
        (1usize..20_000).prop_map(|n| text(&"x▁".repeat(n))),
        prop::collection::vec(word, 0..300).prop_map(|items| texts(&items)),
        prop::collection::vec(prop_oneof![float, any::<f32>()], 0..300).prop_map(|items| f32s(&items)),
        prop::collection::vec(-1i32..8, 0..300).prop_map(|items| i32s(&items)),
        // Arrays of arrays, of types that do not exist, longer or shorter than they say.
        (0u32..14, mutate::edge(), 0usize..40).prop_map(|(kind, count, n)| array(kind, count, vec![1; n])),
        (0usize..3000).prop_map(|deep| array(9, 1, array(9, 1, Vec::new()).1.repeat(deep))),
        (0u32..15).prop_map(|kind| (kind, Vec::new())),
    ]
}

/// What is done to the parts of a file.
#[derive(Debug, Clone)]
enum Edit {
    Set(Index, Value),
    Add(&'static str, Value),
    Remove(Index),
    Repeat(Index),
    /// A tensor's name takes another's.
    Name(Index, Index),
    Dimension(Index, Index, u64),
    Rank(Index, usize),
    Kind(Index, u32),
    Offset(Index, u64),
    Drop(Index),
    Twice(Index),
    Data(usize),
}

fn edit() -> impl Strategy<Value = Edit> {
    let place = any::<Index>;
    let absent = select(vec![
        "llama.expert_count",
        "llama.rope.scale_linear",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.pre",
        "",
    ]);
    prop_oneof![
        8 => (place(), odd()).prop_map(|(at, value)| Edit::Set(at, value)),
        2 => (absent, odd()).prop_map(|(key, value)| Edit::Add(key, value)),
        1 => place().prop_map(Edit::Remove),
        1 => place().prop_map(Edit::Repeat),
        1 => (place(), place()).prop_map(|(a, b)| Edit::Name(a, b)),
        2 => (place(), place(), mutate::edge()).prop_map(|(at, d, n)| Edit::Dimension(at, d, n)),
        1 => (place(), 0usize..9).prop_map(|(at, rank)| Edit::Rank(at, rank)),
        2 => (place(), 0u32..40).prop_map(|(at, kind)| Edit::Kind(at, kind)),
        2 => (place(), mutate::edge()).prop_map(|(at, n)| Edit::Offset(at, n)),
        1 => place().prop_map(Edit::Drop),
        1 => place().prop_map(Edit::Twice),
        1 => (0usize..100).prop_map(Edit::Data),
    ]
}

fn apply(parts: &mut Parts, edit: Edit) {
    let tensors = parts.tensors.len();
    let metadata = parts.metadata.len();
    if tensors == 0 || metadata == 0 {
        return;
    }
    match edit {
        Edit::Set(at, value) => parts.metadata[at.index(metadata)].1 = value,
        Edit::Add(key, value) => parts.metadata.push((key.to_owned(), value)),
        Edit::Remove(at) => drop(parts.metadata.remove(at.index(metadata))),
        Edit::Repeat(at) => parts.metadata.push(parts.metadata[at.index(metadata)].clone()),
        Edit::Name(a, b) => parts.tensors[a.index(tensors)].name = parts.tensors[b.index(tensors)].name.clone(),
        Edit::Dimension(at, d, n) => {
            let shape = &mut parts.tensors[at.index(tensors)].shape;
            let d = d.index(shape.len().max(1));
            shape.get_mut(d).map(|place| *place = n).unwrap_or_default();
        }
        Edit::Rank(at, rank) => parts.tensors[at.index(tensors)].shape.resize(rank, 1),
        Edit::Kind(at, kind) => parts.tensors[at.index(tensors)].kind = kind,
        Edit::Offset(at, n) => parts.tensors[at.index(tensors)].offset = n,
        Edit::Drop(at) => drop(parts.tensors.remove(at.index(tensors))),
        Edit::Twice(at) => parts.tensors.push(parts.tensors[at.index(tensors)].clone()),
        Edit::Data(percent) => parts.data.truncate(parts.data.len() * percent / 100),
    }
}

fn style() -> impl Strategy<Value = Style> {
    select(vec![Style::ByteLevel, Style::SentencePiece])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn a_gguf_file_with_odd_parts_is_a_model_or_an_error(style in style(), edits in prop::collection::vec(edit(), 1..4)) {
        let mut parts = good(style);
        edits.into_iter().for_each(|edit| apply(&mut parts, edit));
        loads(written(&parts).0);
    }

    #[test]
    fn a_gguf_file_with_odd_bytes_is_a_model_or_an_error(
        style in style(), whole in any::<bool>(), changes in prop::collection::vec(mutate::change(), 1..6)
    ) {
        let (mut bytes, header) = written(&good(style));
        let part = if whole { bytes.len() } else { header };
        changes.iter().for_each(|change: &Change| mutate::apply(&mut bytes, part, change));
        loads(bytes);
    }
}

#[test]
fn the_gguf_files_that_are_changed_are_good_before() {
    assert!(loads(written(&good(Style::ByteLevel)).0));
    assert!(loads(written(&good(Style::SentencePiece)).0));
}

#[test]
fn a_tensor_may_end_where_the_file_does_and_not_a_byte_later() {
    let parts = good(Style::SentencePiece);
    let last = parts.tensors.last().unwrap();
    let end = last.offset as usize + 32 * 64 * 2;
    for (left, sound) in [(end, true), (end - 1, false), (last.offset as usize, false)] {
        let mut parts = parts.clone();
        parts.data.truncate(left);
        assert_eq!(loads(written(&parts).0), sound, "{left} bytes");
    }
}

/// What multiplies blocks two at a time has no use for a last one.
#[test]
fn formats_whose_blocks_go_in_pairs_have_even_rows() {
    for kind in [3, 6, 7] {
        let mut parts = good(Style::SentencePiece);
        parts.tensors.iter_mut().find(|t| t.name == "blk.0.ffn_down.weight").unwrap().kind = kind;
        assert!(!loads(written(&parts).0), "{kind}");
    }
}

#[test]
fn tensors_that_share_their_bytes_cost_no_more_than_the_file() {
    let mut parts = good(Style::SentencePiece);
    let one = parts.tensors.clone();
    for layer in 1..200 {
        for tensor in one.iter().filter(|t| t.name.starts_with("blk.")) {
            parts
                .tensors
                .push(Tensor { name: tensor.name.replace("blk.0", &format!("blk.{layer}")), ..tensor.clone() });
        }
    }
    parts.metadata.iter_mut().find(|(key, _)| key == "llama.block_count").unwrap().1 = u32(200);
    assert!(!loads(written(&parts).0));
}

/// Whether a file of SentencePiece's kind with these tokens has a tokenizer.
fn tokenizes(tokens: &[String]) -> bool {
    let mut parts = good(Style::SentencePiece);
    for (key, value) in [
        ("tokenizer.ggml.tokens", texts(tokens)),
        ("tokenizer.ggml.scores", f32s(&vec![0.0; tokens.len()])),
        ("tokenizer.ggml.token_type", i32s(&vec![1; tokens.len()])),
    ] {
        parts.metadata.retain(|(k, _)| k != key);
        parts.metadata.push((key.to_owned(), value));
    }
    let (bytes, _) = written(&parts);
    limits::within(bytes.len() * 64, move || {
        let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        Tokenizer::load(&super::common::gguf(file.path())).is_ok()
    })
}

#[test]
fn a_token_as_long_as_a_book_takes_no_longer_than_reading_it() {
    assert!(!tokenizes(&["a".into(), "a".repeat(1_000_000)]));
}

/// A megabyte of names whose merges would take a hundred.
#[test]
fn a_name_that_many_tokens_share_is_cut_once() {
    let mut tokens: Vec<String> = (1..=400).map(|length| "a".repeat(length)).collect();
    tokens.extend(vec!["a".repeat(400); 2000]);
    assert!(tokenizes(&tokens));
}

/// Each of these joins from two others in as many ways as it is long.
#[test]
fn tokens_that_join_in_too_many_ways_are_refused() {
    let tokens: Vec<String> = (1..=1000).map(|length| "a".repeat(length)).collect();
    assert!(!tokenizes(&tokens));
    assert!(tokenizes(&tokens[..300]));
}
