//! The bytes of every token, worked out once: decoding is then only joining them.

use crate::error::ModelError;
use std::collections::HashMap;
use std::path::Path;
use tokenizers::Tokenizer;

/// Ids that a vocabulary may leave out, beside as many as it has: a table with a place for each is kept.
const HOLES_MAX: usize = 1 << 17;

/// How a vocabulary writes bytes as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// GPT-2's: one printable character for each byte.
    ByteLevel,
    /// SentencePiece's: `▁` for a space, `<0xAB>` for a byte.
    SentencePiece,
}

/// Bytes of all tokens, end to end.
#[derive(Debug)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Whether the space that opens a text is the tokenizer's own.
    strips_first_space: bool,
}

impl Pieces {
    /// Works out the pieces by what the tokenizer's decoder says of its spelling.
    pub(super) fn of(tokenizer: &Tokenizer, path: &Path) -> Result<Self, ModelError> {
        let (spelling, strips_first_space) = spelling(tokenizer, path)?;
        let added = tokenizer.get_added_tokens_decoder();
        let vocabulary = tokenizer.get_vocab(true);
        let largest = vocabulary.values().copied().max().unwrap_or(0);
        let most = 2 * vocabulary.len() + HOLES_MAX;
        if largest as usize > most {
            let reason = format!("holds the absurd id {largest}; with {} tokens at most {most}", vocabulary.len());
            return Err(ModelError::invalid(path, "model.vocab", reason));
        }
        let mut names = vec![""; largest as usize + 1];
        for (name, id) in &vocabulary {
            names[*id as usize] = name;
        }
        let characters = byte_level_characters();
        let mut pieces = Self { bytes: Vec::new(), ends: Vec::new(), special: Vec::new(), strips_first_space };
        for (id, name) in (0u32..).zip(names) {
            let token = added.get(&id);
            match (token, spelling) {
                (Some(token), _) => pieces.bytes.extend(token.content.as_bytes()),
                (None, Spelling::ByteLevel) => push_byte_level(name, &characters, &mut pieces.bytes),
                (None, Spelling::SentencePiece) => push_sentence_piece(name, &mut pieces.bytes),
            }
            pieces.ends.push(pieces.bytes.len() as u32);
            pieces.special.push(token.is_some_and(|token| token.special));
        }
        Ok(pieces)
    }

    /// A token's bytes; none for an unknown id.
    pub(super) fn bytes(&self, token: u32) -> &[u8] {
        let index = token as usize;
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..end as usize]
    }

    pub(super) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

/// Reads the decoder's description: the crate's types for it say less than what they serialise to.
fn spelling(tokenizer: &Tokenizer, path: &Path) -> Result<(Spelling, bool), ModelError> {
    let unsupported = |what: &str| ModelError::unsupported(path, "decoder", what);
    let decoder = tokenizer.get_decoder().ok_or_else(|| unsupported("a tokenizer without a decoder"))?;
    let description = serde_json::to_value(decoder).map_err(|e| ModelError::invalid(path, "decoder", e))?;
    let steps = match description.get("decoders").and_then(|steps| steps.as_array()) {
        Some(steps) => steps.clone(),
        None => vec![description],
    };
    let is = |step: &serde_json::Value, kind: &str| step["type"] == kind;
    if steps.iter().any(|step| is(step, "ByteLevel")) {
        return Ok((Spelling::ByteLevel, false));
    }
    if steps.iter().any(|step| is(step, "ByteFallback") || is(step, "Metaspace")) {
        let strips = steps.iter().any(|step| {
            is(step, "Strip") && step["start"] == 1 || is(step, "Metaspace") && step["prepend_scheme"] != "never"
        });
        return Ok((Spelling::SentencePiece, strips));
    }
    Err(unsupported("a decoder that is neither byte-level nor SentencePiece's"))
}

/// GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on.
pub(super) fn byte_level_characters() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = '\u{100}'..;
    let character = |byte| if printable(byte) { Some(char::from(byte)) } else { others.next() };
    (0..=u8::MAX).map(character).zip(0..=u8::MAX).filter_map(|(c, byte)| Some((c?, byte))).collect()
}

fn push_byte_level(name: &str, characters: &HashMap<char, u8>, out: &mut Vec<u8>) {
    let start = out.len();
    for character in name.chars() {
        match characters.get(&character) {
            Some(byte) => out.push(*byte),
            None => {
                // Not in the alphabet, so the name is plain text.
                out.truncate(start);
                out.extend(name.as_bytes());
                return;
            }
        }
    }
}

fn push_sentence_piece(name: &str, out: &mut Vec<u8>) {
    let hex = name.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => out.push(byte),
        None => out.extend(name.replace('▁', " ").as_bytes()),
    }
}
