//! A tokenizer from a GGUF file's metadata: GPT-2's byte-level BPE, and Llama's SentencePiece BPE.

use super::ends::surround;
use crate::config::gguf::token;
use crate::error::ModelError;
use crate::gguf::Gguf;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(crate) const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";

/// Token types, as the format numbers them.
const TYPE_UNKNOWN: i64 = 2;
const TYPE_CONTROL: i64 = 3;
const TYPE_USER_DEFINED: i64 = 4;

/// Tokens that end an answer whatever a file says of them, as llama.cpp has it: some files name another end alone. Without those
/// of families that are not read here.
const ENDS: [&str; 15] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|im_end|>",
    "<|end|>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
];

/// Whether a token of a type ends an answer by its name. llama.cpp asks for no type; but one of plain text is what a model
/// writes of others' marks, as `</s>` of HTML, and means to go on after.
pub(crate) fn ends_by_name(name: &str, kind: i64) -> bool {
    matches!(kind, TYPE_CONTROL | TYPE_USER_DEFINED) && ENDS.contains(&name)
}

/// The most bytes of a token. Known vocabularies have some of a few hundred; every cut of every token is looked up.
const TOKEN_BYTES_MAX: usize = 1024;

/// The most bytes of all merges: those of known vocabularies take some megabytes.
const MERGES_BYTES_MAX: usize = 1 << 28;

/// How Llama 3 cuts a text before merging: contractions, words, up to three digits, punctuation, line ends, spaces.
const LLAMA3_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What llama.cpp calls that rule, by the models that it is of.
const LLAMA3_NAMES: [&str; 6] = ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"];

/// How Mistral NeMo does: words split where case changes, single digits.
const TEKKEN_PATTERN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Rebuilds the tokenizer.
pub(super) fn build(gguf: &Gguf) -> Result<Tokenizer, ModelError> {
    let path = gguf.path();
    let vocabulary = Vocabulary::read(gguf)?;
    let mut tokenizer = match gguf.str(MODEL)? {
        "gpt2" => byte_level(gguf, &vocabulary)?,
        "llama" => sentence_piece(gguf, &vocabulary)?,
        other => return Err(ModelError::unsupported(path, MODEL, other)),
    };
    let failed = |e| ModelError::invalid(path, TYPES, e);
    tokenizer.add_special_tokens(vocabulary.added(true)).map_err(failed)?;
    tokenizer.add_tokens(vocabulary.added(false)).map_err(failed)?;
    add_ends(gguf, &vocabulary, &mut tokenizer)?;
    Ok(tokenizer)
}

/// Names and types of all tokens.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    types: Vec<i64>,
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &'a Gguf) -> Result<Self, ModelError> {
        let tokens = gguf.optional_strings(TOKENS)?.ok_or_else(|| ModelError::missing(gguf.path(), TOKENS))?;
        if let Some(i) = tokens.iter().position(|token| token.len() > TOKEN_BYTES_MAX) {
            let reason = format!("has {} bytes; at most {TOKEN_BYTES_MAX} are read", tokens[i].len());
            return Err(ModelError::invalid(gguf.path(), format!("{TOKENS}[{i}]"), reason));
        }
        let types = gguf.optional_integers(TYPES)?.unwrap_or_else(|| vec![1; tokens.len()]);
        if types.len() != tokens.len() {
            let reason = format!("has {} entries for {} tokens", types.len(), tokens.len());
            return Err(ModelError::invalid(gguf.path(), TYPES, reason));
        }
        Ok(Self { tokens, types })
    }

    /// Ids by name; where two tokens share a name, the later one has it.
    fn ids(&self) -> Vocab {
        self.tokens.iter().map(|name| (*name).to_owned()).zip(0u32..).collect()
    }

    /// The marks among them, which users do not see, or else the words that are never cut.
    fn added(&self, special: bool) -> Vec<AddedToken> {
        let all = self.tokens.iter().zip(&self.types);
        let of_kind = all.filter(|(name, kind)| match **kind {
            TYPE_CONTROL => special,
            TYPE_USER_DEFINED => special == ends_by_name(name, TYPE_USER_DEFINED),
            _ => false,
        });
        of_kind.map(|(name, _)| AddedToken::from((*name).to_owned(), special).normalized(false)).collect()
    }
}

fn byte_level(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Tokenizer, ModelError> {
    let path = gguf.path();
    let lines = gguf.optional_strings(MERGES)?.ok_or_else(|| ModelError::missing(path, MERGES))?;
    let mut merges = Vec::with_capacity(lines.len());
    for (i, line) in lines.iter().enumerate() {
        let pair = line.split_once(' ');
        let (left, right) = pair.ok_or_else(|| ModelError::invalid(path, format!("{MERGES}[{i}]"), "is not a pair"))?;
        merges.push((left.to_owned(), right.to_owned()));
    }
    let whole = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = |pattern: &str| {
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        json!({"type": "Sequence", "pretokenizers": [split, bytes]})
    };
    let pre = gguf.optional_str(PRE)?.unwrap_or_else(|| {
        tracing::warn!(
            "{}: {PRE} is missing, as in files of before May 2024: texts are cut as GPT-2 does it, which makes answers worse \
             where the model was trained otherwise. A file that was converted anew says how",
            path.display()
        );
        "default"
    });
    let (pre_tokenizer, ignore_merges) = match pre {
        "default" | "gpt-2" | "phi-2" | "mellum" => (whole.clone(), false),
        "smollm" | "starcoder" | "refact" | "codeshell" | "minerva-7b" => {
            let digits = json!({"type": "Digits", "individual_digits": true});
            (json!({"type": "Sequence", "pretokenizers": [digits, whole]}), false)
        }
        llama3 if LLAMA3_NAMES.contains(&llama3) => (split(LLAMA3_PATTERN), true),
        "tekken" => (split(TEKKEN_PATTERN), true),
        other => return Err(ModelError::unsupported(path, PRE, format!("the pre-tokenizer '{other}'"))),
    };
    let model = BPE::builder().vocab_and_merges(vocabulary.ids(), merges).ignore_merges(ignore_merges);
    let model = model.build().map_err(|e| ModelError::invalid(path, MERGES, e))?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(part::<PreTokenizerWrapper>(path, PRE, pre_tokenizer)?));
    tokenizer.with_decoder(Some(part::<DecoderWrapper>(path, MODEL, whole)?));
    Ok(tokenizer)
}

/// Llama's tokenizer merges the neighbours whose joint token has the best score: a BPE whose merges are ranked by
/// score.
fn sentence_piece(gguf: &Gguf, vocabulary: &Vocabulary<'_>) -> Result<Tokenizer, ModelError> {
    let path = gguf.path();
    let scores = gguf.optional_floats(SCORES)?.ok_or_else(|| ModelError::missing(path, SCORES))?;
    if scores.len() != vocabulary.tokens.len() {
        let reason = format!("has {} entries for {} tokens", scores.len(), vocabulary.tokens.len());
        return Err(ModelError::invalid(path, SCORES, reason));
    }
    let merges = ranked_merges(&vocabulary.tokens, &scores).ok_or_else(|| {
        let reason = format!("join in more ways than fit {} MiB", MERGES_BYTES_MAX >> 20);
        ModelError::invalid(path, TOKENS, reason)
    })?;
    let mut model = BPE::builder().vocab_and_merges(vocabulary.ids(), merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = vocabulary.types.iter().position(|t| *t == TYPE_UNKNOWN) {
        model = model.unk_token(vocabulary.tokens[unknown].to_owned());
    }
    let model = model.build().map_err(|e| ModelError::invalid(path, TOKENS, e))?;

    let prefix = gguf.optional_bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let normalizer = json!({"type": "Sequence", "normalizers": normalizers});
    let decoder = json!({"type": "Sequence", "decoders": decoders});
    let mut tokenizer = Tokenizer::new(model);
    let normalizer = part::<NormalizerWrapper>(path, MODEL, normalizer)?;
    tokenizer.with_normalizer(Some(normalizer)).map_err(|e| ModelError::invalid(path, MODEL, e))?;
    tokenizer.with_decoder(Some(part::<DecoderWrapper>(path, MODEL, decoder)?));
    Ok(tokenizer)
}

/// Every way in which two tokens join into a third, the best-scored third first. None where these take more memory than
/// [`MERGES_BYTES_MAX`].
fn ranked_merges(tokens: &[&str], scores: &[f32]) -> Option<Vec<(String, String)>> {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, name)| (*name, id)).collect();
    let mut merges: Vec<(f32, usize, usize)> = Vec::new();
    let mut bytes = 0;
    // A name that several tokens share is the last one's.
    let named = tokens.iter().enumerate().filter(|(id, name)| ids[**name] == *id);
    for (id, name) in named {
        for (at, _) in name.char_indices().skip(1) {
            let (left, right) = name.split_at(at);
            if let (Some(left), Some(right)) = (ids.get(left), ids.get(right)) {
                bytes += name.len() + size_of::<(String, String)>();
                if bytes > MERGES_BYTES_MAX {
                    return None;
                }
                merges.push((scores[id], *left, *right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    Some(merges.into_iter().map(|(_, left, right)| (tokens[left].to_owned(), tokens[right].to_owned())).collect())
}

/// Adds the tokens that open and close a sequence, where the file wants them.
fn add_ends(gguf: &Gguf, vocabulary: &Vocabulary<'_>, tokenizer: &mut Tokenizer) -> Result<(), ModelError> {
    let path = gguf.path();
    // llama.cpp's defaults for files that do not say.
    let opens_by_default = gguf.str(MODEL)? == "llama"
        || gguf.optional_str(PRE)?.is_some_and(|pre| pre == "tekken" || LLAMA3_NAMES.contains(&pre));
    let opens = gguf.optional_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(opens_by_default);
    let closes = gguf.optional_bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let named = |key: &str| {
        let id = token(gguf, key)?.ok_or_else(|| ModelError::missing(path, key))?;
        let name = *vocabulary.tokens.get(id as usize).ok_or_else(|| {
            ModelError::invalid(path, key, format!("{id} is not one of {} tokens", vocabulary.tokens.len()))
        })?;
        Ok::<_, ModelError>((name.to_owned(), id))
    };
    let opens = opens.then(|| named("tokenizer.ggml.bos_token_id")).transpose()?;
    let closes = closes.then(|| named("tokenizer.ggml.eos_token_id")).transpose()?;
    surround(tokenizer, opens, closes).map_err(|e| ModelError::invalid(path, MODEL, e))
}

/// A part of a tokenizer from its JSON form, the one that is documented and stable.
fn part<T: DeserializeOwned>(path: &Path, field: &str, description: Value) -> Result<T, ModelError> {
    serde_json::from_value(description).map_err(|e| ModelError::invalid(path, field, e))
}
