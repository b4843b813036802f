//! Text to tokens and back, from `tokenizer.json` or rebuilt from a GGUF file's metadata.

mod config;
mod ends;
pub(crate) mod gguf;
mod growth;
mod pieces;
mod stream;

pub(crate) use config::TokenizerConfig;
pub use stream::{StreamDecoder, TextStart};

use crate::config::ModelConfig;
use crate::error::{ModelError, quoted};
use crate::source::{ModelFiles, ResolvedModel};
use pieces::Pieces;
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;

/// A folder's file.
pub(crate) const FILE: &str = "tokenizer.json";

/// The file with the way to it, for those who lack it.
pub(crate) fn needed() -> String {
    format!("{FILE}, which transformers writes by AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)")
}

/// A model's tokenizer; clones are cheap and share it.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    pieces: Arc<Pieces>,
    eos_tokens: Arc<[u32]>,
}

impl Tokenizer {
    /// Reads a checkpoint's tokenizer.
    ///
    /// # Errors
    /// [`ModelError`] naming the file and the field that is missing, malformed or not supported.
    pub fn load(model: &ResolvedModel) -> Result<Self, ModelError> {
        let config = ModelConfig::read(model)?;
        let mut eos_tokens = config.eos_tokens.clone();
        let (path, inner) = match &model.files {
            ModelFiles::Folder(folder) => {
                let path = folder.join(FILE);
                if !path.exists() {
                    return Err(ModelError::missing(folder, needed() + ","));
                }
                let mut inner = from_json(&path)?;
                let names = TokenizerConfig::read(folder)?;
                ends::from_config(&names, &mut inner)?;
                // Instruction models may name their end of turn only here.
                let named = names.token("eos_token")?.and_then(|name| inner.token_to_id(&name));
                eos_tokens.extend(named.filter(|id| !config.eos_tokens.contains(id)));
                (path, inner)
            }
            ModelFiles::Gguf(path) => (path.clone(), gguf::build(&crate::gguf::Gguf::open(path)?)?),
        };
        let pieces = Arc::new(Pieces::of(&inner, &path)?);
        Ok(Self { inner: Arc::new(inner), pieces, eos_tokens: eos_tokens.into() })
    }

    /// Tokens of a text. Names of special tokens in it become those tokens, as in transformers.
    ///
    /// `add_special` adds what the tokenizer puts around a text, such as the token that opens a sequence; a rendered
    /// chat template holds it already.
    ///
    /// # Errors
    /// [`ModelError::Encode`] with the tokenizer's reason.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = guarded(|| self.inner.encode_fast(text, add_special)).map_err(ModelError::Encode)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens that stand alone: what a [`StreamDecoder`] at [`TextStart::Fresh`] says of them in all.
    ///
    /// Bytes that are not UTF-8 become U+FFFD, and ids outside the vocabulary nothing.
    pub fn decode(&self, tokens: &[u32], skip_special: bool) -> String {
        let mut stream = self.stream(TextStart::Fresh, skip_special);
        let mut text: String = tokens.iter().map(|token| stream.push(*token)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// A decoder for tokens that arrive one by one.
    pub fn stream(&self, start: TextStart, skip_special: bool) -> StreamDecoder {
        StreamDecoder::new(self.pieces.clone(), start, skip_special)
    }

    /// The bytes that a token adds to a text, maybe a part of a UTF-8 character; none for an unknown id.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        self.pieces.bytes(token)
    }

    /// Whether a token is a special one, which users do not see.
    pub fn is_special(&self, token: u32) -> bool {
        self.pieces.is_special(token)
    }

    /// The id of a token by its exact name, such as `<|im_end|>`.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// The tokens that end a generation.
    pub fn eos_tokens(&self) -> &[u32] {
        &self.eos_tokens
    }

    /// One more than the largest id. The model's own vocabulary may be larger, for padding.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }
}

fn from_json(path: &Path) -> Result<tokenizers::Tokenizer, ModelError> {
    /// What is looked at before the library is given the file; a vocabulary is none of it.
    #[derive(Deserialize)]
    struct Raw {
        model: RawModel,
        #[serde(default)]
        normalizer: serde_json::Value,
        #[serde(default)]
        pre_tokenizer: serde_json::Value,
        #[serde(default)]
        post_processor: serde_json::Value,
    }
    #[derive(Deserialize)]
    struct RawModel {
        #[serde(default)]
        continuing_subword_prefix: Option<String>,
    }
    let text = crate::json::read_text(path)?;
    let raw: Raw = serde_json::from_str(&text).map_err(|e| ModelError::invalid(path, "tokenizer", e))?;
    // The library cuts it off the second half of merges without a look at what it cuts.
    if raw.model.continuing_subword_prefix.is_some_and(|prefix| !prefix.is_empty()) {
        return Err(ModelError::unsupported(
            path,
            "model.continuing_subword_prefix",
            "a prefix of pieces within a word",
        ));
    }
    growth::check(path, &raw.normalizer, &raw.pre_tokenizer, &raw.post_processor)?;
    let mut inner: tokenizers::Tokenizer =
        guarded(|| text.parse()).map_err(|e| ModelError::invalid(path, "tokenizer", e))?;
    // Some files carry the settings of a training run.
    inner.with_padding(None);
    inner.with_truncation(None).map_err(|e| ModelError::invalid(path, "truncation", e))?;
    Ok(inner)
}

/// The tokenizers library panics where a file's parts contradict each other, at the latest when a text comes by them; that
/// is an error like its others.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(quoted),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(quoted(format!("the tokenizer's parts contradict each other: {text}")))
        }
    }
}
