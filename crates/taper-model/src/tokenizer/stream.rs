//! Tokens to text as they arrive.

use super::pieces::Pieces;
use std::sync::Arc;

/// What comes before the first token of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextStart {
    /// Nothing: a reply, or a whole text. SentencePiece's own leading space is dropped.
    Fresh,
    /// A text that the tokens go on with; a leading space belongs to it.
    Continued,
}

/// Turns tokens into text, one by one, in constant time each: bytes that do not yet make a character wait for the
/// next token.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    pieces: Arc<Pieces>,
    skip_special: bool,
    /// Whether the next bytes are the first, and a space before them is the tokenizer's.
    strip_space: bool,
    /// The start of a character, three bytes at most between calls.
    pending: Vec<u8>,
}

impl StreamDecoder {
    pub(super) fn new(pieces: Arc<Pieces>, start: TextStart, skip_special: bool) -> Self {
        let strip_space = start == TextStart::Fresh && pieces.strips_first_space();
        Self { pieces, skip_special, strip_space, pending: Vec::new() }
    }

    /// Takes a token and returns the characters that it completes, maybe none.
    pub fn push(&mut self, token: u32) -> String {
        if self.skip_special && self.pieces.is_special(token) {
            return String::new();
        }
        let mut bytes = self.pieces.bytes(token);
        if self.strip_space && !bytes.is_empty() {
            self.strip_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend(bytes);
        self.take_complete()
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut rest = &self.pending[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    // Lossy, though nothing is lost: the part was found valid.
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    match error.error_len() {
                        Some(length) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &rest[length..];
                        }
                        None => break,
                    }
                }
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
        text
    }
}
