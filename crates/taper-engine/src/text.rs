//! The seam to tokenizer and chat template.

use crate::calls::CallFormat;
use serde_json::{Map, Value};
pub use taper_model::ChatMessage as Message;

/// Why a text has no tokens.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer or the chat template refuses it: the caller's fault.
    #[error("{0}")]
    Refused(String),
    /// There was no time for it, as there may be later.
    #[error("{0}")]
    Busy(String),
    /// The chat template fails, whoever asks.
    #[error("{0}")]
    Failed(String),
}

/// How many tokens of a chat's end are the question: from where the last user message begins, where the prompt parts from that of
/// the messages before it. None, where no user spoke.
pub fn question(
    text: &dyn Text,
    messages: &[Message],
    variables: &Map<String, Value>,
    tokens: &[u32],
) -> Option<usize> {
    let last = messages.iter().rposition(|m| m.role == "user")?;
    if last == 0 {
        return Some(tokens.len());
    }
    // Not ready for an answer: that opens as a question does, by the same mark.
    let before = text.turns(&messages[..last], variables).ok()?;
    Some(tokens.len() - tokens.iter().zip(&before).take_while(|(a, b)| a == b).count())
}

/// Text to tokens and back.
pub trait Text: Send + Sync + 'static {
    /// Tokenizes a text, if `special` with the tokens that the model wants at the start of each.
    ///
    /// # Errors
    /// The tokenizer's own, or a text of far more tokens than anyone could use.
    fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError>;

    /// The same for a prompt, which a context has to hold.
    ///
    /// # Errors
    /// The tokenizer's own, or a text that no context holds.
    fn prompt(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        self.encode(text, special)
    }

    /// Renders messages by the chat template, ready for the assistant's answer, and tokenizes the result. `variables` are what
    /// else the template reads: `tools`, an array, is told to the model in any case.
    ///
    /// # Errors
    /// The model has no template, or the template refuses the messages, fails, or takes too long.
    fn chat(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError>;

    /// The same without the opening of the assistant's answer.
    ///
    /// # Errors
    /// As [`chat`](Self::chat).
    fn turns(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError> {
        self.chat(messages, variables)
    }

    /// The same up to where the last message's text ends, which the answer goes on with.
    ///
    /// # Errors
    /// As [`chat`](Self::chat), or the template does not show that text.
    fn open(&self, messages: &[Message], variables: &Map<String, Value>) -> Result<Vec<u32>, TextError>;

    /// How the model writes calls of functions.
    fn call_format(&self) -> CallFormat;

    /// The [special](Self::special) token that is this mark, if one is.
    fn mark(&self, mark: &str) -> Option<u32>;

    /// The text of tokens, with the `special` ones or without.
    fn decode(&self, tokens: &[u32], special: bool) -> String;

    /// The bytes that a token adds to a text, maybe a part of a character.
    fn token_bytes(&self, token: u32) -> Vec<u8>;

    /// Whether a token is no text but a mark between texts, which users do not see.
    fn special(&self, token: u32) -> bool;

    /// Tokens that end an answer.
    fn eos(&self) -> &[u32];

    /// A decoder for one stream of tokens: one that goes on with the prompt's text, or a reply of its own; with the `special`
    /// ones or without.
    fn stream(&self, continues: bool, special: bool) -> Box<dyn TokenStream>;
}

/// Decodes one stream of tokens and never splits a character.
pub trait TokenStream: Send {
    /// Adds a token; returns the text that became complete.
    fn push(&mut self, token: u32) -> String;

    /// What is left at the end.
    fn finish(&mut self) -> String;
}
