//! Prompts as a chat model takes them: a user's turn, and an answer that has already begun.

use crate::error::EvalError;
use std::path::Path;
use taper_model::{ChatMessage, ChatTemplate, ResolvedModel, Tokenizer};

/// What generators and runner need of a model's text.
pub trait PromptText {
    /// Tokens of a prompt: the user's turn, and the assistant's opened with `prefix`.
    ///
    /// # Errors
    /// What the tokenizer or the template refuses.
    fn prompt(&self, user: &str, prefix: &str) -> Result<Vec<u32>, EvalError>;

    /// The text of an answer's tokens, special ones left out.
    fn decode(&self, tokens: &[u32]) -> String;

    /// Whether the token ends an answer.
    fn ends(&self, token: u32) -> bool;
}

/// A model's tokenizer and chat template.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl ModelText {
    /// Reads both from a checkpoint, or the template from the file `instead`. A model without a template takes the plain text.
    ///
    /// # Errors
    /// The file and field at fault.
    pub fn load(model: &ResolvedModel, instead: Option<&Path>) -> Result<Self, EvalError> {
        Ok(Self { tokenizer: Tokenizer::load(model)?, template: ChatTemplate::load(model, instead)? })
    }
}

impl PromptText for ModelText {
    fn prompt(&self, user: &str, prefix: &str) -> Result<Vec<u32>, EvalError> {
        let Some(template) = &self.template else {
            return Ok(self.tokenizer.encode(&format!("{user}{prefix}"), true)?);
        };
        let messages = [ChatMessage::new("user", user)];
        let opened = template.render(&messages, true, &serde_json::Map::new())?;
        // The template has written the tokens that open a sequence.
        Ok(self.tokenizer.encode(&(opened + prefix), false)?)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        self.tokenizer.decode(tokens, true)
    }

    fn ends(&self, token: u32) -> bool {
        self.tokenizer.eos_tokens().contains(&token)
    }
}
