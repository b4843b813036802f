//! `tokenizer_config.json`: special tokens by their roles, and what a text is put between.

use crate::error::ModelError;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The file's fields; none where there is no such file.
pub(crate) struct TokenizerConfig {
    path: PathBuf,
    fields: Map<String, Value>,
}

/// A special token's name, plain or with its settings.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenName {
    Plain(String),
    Settings { content: String },
}

impl TokenizerConfig {
    /// Reads a folder's file.
    pub(crate) fn read(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join("tokenizer_config.json");
        let fields = if path.exists() { crate::json::read(&path)? } else { Map::new() };
        Ok(Self { path, fields })
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A field; null is as good as absent.
    pub(crate) fn field(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    /// The name of the token of a role, `bos_token` say.
    pub(crate) fn token(&self, role: &str) -> Result<Option<String>, ModelError> {
        Ok(self.typed(role)?.map(|name| match name {
            TokenName::Plain(name) | TokenName::Settings { content: name } => name,
        }))
    }

    /// Whether the file has a role's entry, be it null.
    pub(super) fn mentions(&self, role: &str) -> bool {
        self.fields.contains_key(role)
    }

    /// A truth value, `add_bos_token` say.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        self.typed(name)
    }

    /// The class by which transformers reads the tokenizer.
    pub(super) fn class(&self) -> Option<&str> {
        self.field("tokenizer_class").and_then(Value::as_str)
    }

    fn typed<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ModelError> {
        let value = self.field(name).cloned();
        value.map(serde_json::from_value).transpose().map_err(|e| ModelError::invalid(&self.path, name, e))
    }
}
