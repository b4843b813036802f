//! Whatever the files of a model hold, reading them ends soon, in little memory, with a model or with one clear error.

#[path = "../common/mod.rs"]
mod common;
mod folder;
mod gguf;
mod limits;
mod mutate;
mod templates;

use candle_core::Device;
use common::PlainAttention;
use serde_json::{Map, json};
use std::path::Path;
use taper_model::{
    ChatMessage, ChatTemplate, GenerationConfig, LoadOptions, Model, ModelConfig, ModelError, ResolvedModel, Tokenizer,
};

/// Reads all of a model as `taper serve` does, and uses what there is: text to tokens and back, a prompt, a step.
///
/// Returns whether the model could be loaded.
fn used(model: &ResolvedModel) -> bool {
    let file = match &model.files {
        taper_model::ModelFiles::Folder(path) | taper_model::ModelFiles::Gguf(path) => path.clone(),
    };
    let tokenizer = checked(&file, Tokenizer::load(model));
    let template = checked(&file, ChatTemplate::load(model, None)).flatten();
    let loaded = checked(&file, Model::load(model, &LoadOptions::default(), &Device::Cpu));
    if let Some(config) = checked(&file, ModelConfig::read(model)) {
        config.key();
    }
    checked(&file, GenerationConfig::read(model));
    if let Some(template) = template {
        let messages = [ChatMessage::new("user", "hi"), ChatMessage::new("assistant", "{{ 1/0 }}")];
        let tools = json!({"tools": [{"type": "function", "function": {"name": "f"}}]});
        for variables in [Map::new(), tools.as_object().unwrap().clone()] {
            said(template.render(&messages, true, &variables));
        }
    }
    let tokens = tokenizer.as_ref().map(encoded).unwrap_or_default();
    if let Some(model) = &loaded {
        step(model, &tokens);
        step(model, &[0, 1, 2]);
    }
    loaded.is_some()
}

/// Tokens of a text, which come back as some text.
fn encoded(tokenizer: &Tokenizer) -> Vec<u32> {
    let text = "Hello, wörld! It's 12345 <s> </s> 🙂\u{0}  \n\n a";
    let tokens = said(tokenizer.encode(text, true)).unwrap_or_default();
    for skip in [false, true] {
        tokenizer.decode(&tokens, skip);
        tokenizer.decode(&[0, 1, 2, 300, u32::MAX], skip);
    }
    tokenizer.decode(tokenizer.eos_tokens(), false);
    tokens
}

/// One pass, whose error has to say something.
fn step(model: &Model, tokens: &[u32]) {
    // A head may be absurdly wide, and this attention is slow.
    let tokens = &tokens[..tokens.len().min(8)];
    let mut attention = PlainAttention::new(model.attention_shape(), 1);
    attention.length = tokens.len() as u32;
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    let logits = model.forward(tokens, &positions, &mut attention).and_then(|hidden| model.logits(&hidden));
    if let Err(error) = logits {
        assert!(!error.to_string().is_empty());
    }
}

/// An error must name the file, and must be a line that can be read.
fn checked<T>(file: &Path, result: Result<T, ModelError>) -> Option<T> {
    if let Err(error) = &result {
        let message = error.to_string();
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(message.contains(name), "no file in '{message}'");
    }
    said(result)
}

fn said<T>(result: Result<T, ModelError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            let message = error.to_string();
            assert!(!message.is_empty() && message.len() < 5000, "{} bytes: {:.200}", message.len(), message);
            assert!(!message.contains(|c: char| c.is_control() && c != '\n'), "{message:?}");
            None
        }
    }
}
