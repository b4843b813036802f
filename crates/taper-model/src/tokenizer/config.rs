//! `tokenizer_config.json` and `special_tokens_map.json`: special tokens by their roles, and what a text is put between.

use crate::error::ModelError;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The files' fields; none where there is no such file.
pub(crate) struct TokenizerConfig {
    path: PathBuf,
    fields: Map<String, Value>,
    /// Roles of special tokens, which stand above the same of `fields`, and their file.
    roles: (PathBuf, Map<String, Value>),
}

/// A special token's name, plain or with its settings.
#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a token's name, or an object with its content")]
enum TokenName {
    Plain(String),
    Settings { content: String },
}

impl TokenizerConfig {
    /// Reads a folder's files.
    pub(crate) fn read(folder: &Path) -> Result<Self, ModelError> {
        let read = |path: &Path| if path.exists() { crate::json::read(path) } else { Ok(Map::new()) };
        let path = folder.join("tokenizer_config.json");
        let fields: Map<String, Value> = read(&path)?;
        let map = folder.join("special_tokens_map.json");
        // As transformers has it: newer files say all in the first, and the other one beside it may be an older state.
        let roles = if fields.contains_key("added_tokens_decoder") { Map::new() } else { read(&map)? };
        Ok(Self { path, fields, roles: (map, roles) })
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
        let (path, fields) = self.of_role(role);
        Ok(typed(path, fields, role)?.map(|name| match name {
            TokenName::Plain(name) | TokenName::Settings { content: name } => name,
        }))
    }

    /// Whether the file has a role's entry, be it null.
    pub(super) fn mentions(&self, role: &str) -> bool {
        self.of_role(role).1.contains_key(role)
    }

    /// The file that tells of a role, and its fields.
    fn of_role(&self, role: &str) -> (&Path, &Map<String, Value>) {
        let (path, roles) = &self.roles;
        if roles.contains_key(role) { (path, roles) } else { (&self.path, &self.fields) }
    }

    /// A truth value, `add_bos_token` say.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ModelError> {
        typed(&self.path, &self.fields, name)
    }

    /// The class by which transformers reads the tokenizer.
    pub(super) fn class(&self) -> Option<&str> {
        self.field("tokenizer_class").and_then(Value::as_str)
    }
}

/// A field of a type; null is as good as absent.
fn typed<T: DeserializeOwned>(path: &Path, fields: &Map<String, Value>, name: &str) -> Result<Option<T>, ModelError> {
    let value = fields.get(name).filter(|value| !value.is_null()).cloned();
    value.map(serde_json::from_value).transpose().map_err(|e| ModelError::invalid(path, name, e))
}
