//! Chat templates: a conversation to the text that the model was trained on, as transformers renders it.

mod meter;
mod methods;
mod python;
mod sandbox;

use crate::error::{ModelError, quoted};
use crate::gguf::Gguf;
use crate::source::{ModelFiles, ResolvedModel};
use crate::tokenizer::TokenizerConfig;
use minijinja::machinery::TemplateConfig;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};
use sandbox::Sandbox;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name of the one template in its environment.
const NAME: &str = "chat_template";

/// Names of several templates: the one for all conversations, and the one for those with tools.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Tokens that templates know by name.
const SPECIAL_TOKENS: [&str; 5] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token"];

/// One message of a conversation, in the form that templates expect.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// The text; none beside tool calls.
    pub content: Option<String>,
    /// Everything else that the template may read: `tool_calls`, `tool_call_id`, `name`.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

impl ChatMessage {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(content.into()), extra: serde_json::Map::new() }
    }
}

/// A chat template with the special tokens that it prints.
#[derive(Debug)]
pub struct ChatTemplate {
    texts: Arc<Texts>,
    special_tokens: serde_json::Map<String, serde_json::Value>,
    sandbox: Sandbox,
}

/// What is compiled whenever it is rendered: that takes less than a millisecond.
#[derive(Debug)]
struct Texts {
    environment: Environment<'static>,
    chat: String,
    /// Used instead, where there is one, for requests with tools.
    tools: Option<String>,
}

/// The most bytes of a template's text. Known ones have some ten thousand.
const TEXT_MAX: usize = 128 << 10;

/// A template as `tokenizer_config.json` writes it: one text, or named ones.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawTemplate {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl ChatTemplate {
    /// Reads a checkpoint's template, or the one in the file `instead`, with the checkpoint's special tokens; none for a base
    /// model, which has no template.
    ///
    /// Looks in `chat_template.jinja`, then in `tokenizer_config.json`; or in a GGUF's metadata.
    ///
    /// # Errors
    /// [`ModelError`] naming the file, if it cannot be read or the template does not compile.
    pub fn load(model: &ResolvedModel, instead: Option<&Path>) -> Result<Option<Self>, ModelError> {
        let given = instead.map(Found::file).transpose()?;
        let (special_tokens, found) = match &model.files {
            ModelFiles::Folder(folder) => {
                let config = TokenizerConfig::read(folder)?;
                (tokens_of_folder(&config)?, given.map_or_else(|| Found::in_folder(folder, &config), |f| Ok(Some(f)))?)
            }
            ModelFiles::Gguf(path) => {
                let gguf = Gguf::open(path)?;
                (tokens_of_gguf(&gguf)?, given.map_or_else(|| Found::in_gguf(&gguf), |f| Ok(Some(f)))?)
            }
        };
        let Some(Found { path, field, raw }) = found else { return Ok(None) };
        Self::compile(raw, special_tokens).map(Some).map_err(|e| at(&path, field, e))
    }

    /// Compiles a template's text. `special_tokens` gives `bos_token` and its like.
    ///
    /// # Errors
    /// [`ModelError::Template`] if it does not compile.
    pub fn new(text: &str, special_tokens: serde_json::Map<String, serde_json::Value>) -> Result<Self, ModelError> {
        Self::compile(RawTemplate::One(text.to_owned()), special_tokens)
    }

    /// Renders a conversation.
    ///
    /// `variables` are what else the template may read; `tools` and `documents` are none where they are not given.
    /// `add_generation_prompt` opens the assistant's turn.
    ///
    /// # Errors
    /// [`ModelError::TemplateRefused`] where the template turns the conversation down, [`ModelError::Template`] where
    /// it fails, [`ModelError::TemplateBusy`] where it takes too long.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, ModelError> {
        let has_tools = variables.get("tools").is_some_and(|tools| !tools.is_null());
        let mut context = self.special_tokens.clone();
        context.insert("tools".to_owned(), serde_json::Value::Null);
        context.insert("documents".to_owned(), serde_json::Value::Null);
        context.extend(variables.clone());
        let messages = serde_json::to_value(messages).map_err(ModelError::template)?;
        context.insert("messages".to_owned(), messages);
        context.insert("add_generation_prompt".to_owned(), add_generation_prompt.into());
        let texts = self.texts.clone();
        self.sandbox.run(move || {
            let text = texts.tools.as_ref().filter(|_| has_tools).unwrap_or(&texts.chat);
            render(&texts.environment, text, &context).map_err(|e| refused(&e).unwrap_or_else(|| broken(&e)))
        })
    }

    /// Renders a conversation up to where its last message's text ends, for the model to go on with that.
    ///
    /// # Errors
    /// As [`render`](Self::render); [`ModelError::TemplateRefused`] where that text is not shown.
    pub fn render_open(
        &self,
        messages: &[ChatMessage],
        variables: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, ModelError> {
        /// Stands behind the text; its blank is lost where the template trims messages.
        const END: &str = "<the text goes on here> ";
        let not_shown = || ModelError::TemplateRefused("the last message's text is not shown".into());
        let mut messages = messages.to_vec();
        let text = messages.last_mut().and_then(|last| last.content.as_mut()).ok_or_else(not_shown)?;
        text.push_str(END);
        let mut rendered = self.render(&messages, false, variables)?;
        let end = rendered.rfind(END.trim_end()).ok_or_else(not_shown)?;
        let trimmed = !rendered[end..].starts_with(END);
        rendered.truncate(end);
        if trimmed {
            rendered.truncate(rendered.trim_end().len());
        }
        Ok(rendered)
    }

    /// Whether a template's source has a text in it: a name that it reads, or a mark that it prints.
    pub fn says(&self, text: &str) -> bool {
        std::iter::once(&self.texts.chat).chain(&self.texts.tools).any(|template| template.contains(text))
    }

    fn compile(
        raw: RawTemplate,
        special_tokens: serde_json::Map<String, serde_json::Value>,
    ) -> Result<Self, ModelError> {
        let (mut environment, sandbox) = (meter::metered(environment()), Sandbox::default());
        let mut checked = |text: String| {
            if text.len() > TEXT_MAX {
                return Err(ModelError::template(format!("has {} bytes; at most {TEXT_MAX} are read", text.len())));
            }
            let text = without_generation_tags(&text);
            let (text, steps) = sandbox.run(move || {
                let steps = meter::steps(&meter::compile(NAME, &text, &config()?).map_err(|e| broken(&e))?);
                Ok((text, steps))
            })?;
            environment.set_fuel(Some(environment.fuel().map_or(steps, |other| other.min(steps))));
            Ok(text)
        };
        let (chat, tools) = match raw {
            RawTemplate::One(text) => (Some(checked(text)?), None),
            RawTemplate::Named(templates) => {
                // Others are for purposes that the API has no words for.
                let (mut chat, mut tools) = (None, None);
                for NamedTemplate { name, template } in templates {
                    match name.as_str() {
                        DEFAULT => chat = Some(checked(template)?),
                        TOOL_USE => tools = Some(checked(template)?),
                        _ => {}
                    }
                }
                (chat, tools)
            }
        };
        let chat = chat.ok_or_else(|| ModelError::template("none of the named templates is called default"))?;
        Ok(Self { texts: Arc::new(Texts { environment, chat, tools }), special_tokens, sandbox })
    }
}

/// A template that was found.
struct Found {
    path: PathBuf,
    /// What it is called there.
    field: &'static str,
    raw: RawTemplate,
}

impl Found {
    /// The whole of a file.
    fn file(path: &Path) -> Result<Self, ModelError> {
        let raw = RawTemplate::One(crate::json::read_text(path)?);
        Ok(Self { path: path.to_owned(), field: NAME, raw })
    }

    fn in_folder(folder: &Path, config: &TokenizerConfig) -> Result<Option<Self>, ModelError> {
        let own = folder.join("chat_template.jinja");
        if own.exists() {
            return Self::file(&own).map(Some);
        }
        let Some(raw) = config.field(NAME) else { return Ok(None) };
        let path = config.path();
        let raw = RawTemplate::deserialize(raw)
            .map_err(|_| ModelError::invalid(path, NAME, "must be a string or a list of named templates"))?;
        Ok(Some(Self { path: path.to_owned(), field: NAME, raw }))
    }

    fn in_gguf(gguf: &Gguf) -> Result<Option<Self>, ModelError> {
        const KEY: &str = "tokenizer.chat_template";
        let named = |key: &str, name: &str| {
            let template = gguf.optional_str(key)?;
            Ok::<_, ModelError>(template.map(|text| NamedTemplate { name: name.to_owned(), template: text.to_owned() }))
        };
        let Some(chat) = named(KEY, DEFAULT)? else { return Ok(None) };
        let tools = named("tokenizer.chat_template.tool_use", TOOL_USE)?;
        let raw = RawTemplate::Named([chat].into_iter().chain(tools).collect());
        Ok(Some(Self { path: gguf.path().to_owned(), field: KEY, raw }))
    }
}

/// Special tokens by the names that templates know, of a folder.
fn tokens_of_folder(config: &TokenizerConfig) -> Result<serde_json::Map<String, serde_json::Value>, ModelError> {
    let mut tokens = serde_json::Map::new();
    for name in SPECIAL_TOKENS {
        tokens.extend(config.token(name)?.map(|token| (name.to_owned(), token.into())));
    }
    Ok(tokens)
}

/// The same of a GGUF file.
fn tokens_of_gguf(gguf: &Gguf) -> Result<serde_json::Map<String, serde_json::Value>, ModelError> {
    let names = gguf.optional_strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    let mut tokens = serde_json::Map::new();
    for (name, key) in [
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ] {
        let id = crate::config::gguf::token(gguf, key)?;
        if let Some(token) = id.and_then(|id| names.get(id as usize)) {
            tokens.insert(name.to_owned(), (*token).into());
        }
    }
    Ok(tokens)
}

/// Compiles a text and runs it.
fn render(
    environment: &Environment<'static>,
    text: &str,
    context: &serde_json::Map<String, serde_json::Value>,
) -> Result<String, Error> {
    let config = config().map_err(|e| Error::new(ErrorKind::SyntaxError, e.to_string()))?;
    let template = meter::compile(NAME, text, &config)?;
    meter::render(environment, &template, Value::from(Serde(context)))
}

/// Whitespace as transformers has it.
fn config() -> Result<TemplateConfig, ModelError> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|e| broken(&e))?;
    Ok(TemplateConfig { syntax_config: syntax, default_auto_escape: Arc::new(|_| AutoEscape::None) })
}

/// Jinja as transformers sets it up.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(python::format);
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("join", python::join);
    environment.add_filter("string", |value: &Value| python::text(value));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Refusal(message)))
    });
    environment.add_function("strftime_now", |state: &mut State<'_, '_>, format: String| -> Result<String, Error> {
        use std::fmt::Write;
        // No directive makes more of its letters, of which it has two at least.
        meter::charge(state, format.len().saturating_mul(20))?;
        let mut out = String::new();
        // Fails for a directive that does not exist.
        write!(out, "{}", chrono::Local::now().format(&format))
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("'{format}' is no time format")))?;
        Ok(out)
    });
    environment
}

/// What a template said by `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn refused(error: &Error) -> Option<ModelError> {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Refusal(message)) = cause.downcast_ref() {
            return Some(ModelError::TemplateRefused(quoted(message)));
        }
        source = cause.source();
    }
    None
}

fn broken(error: &Error) -> ModelError {
    let place = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    ModelError::template(format!("{error}{place}"))
}

/// Names the file that a template came from.
fn at(path: &Path, field: &str, error: ModelError) -> ModelError {
    match error {
        ModelError::Template(reason) => ModelError::invalid(path, field, reason),
        other => other,
    }
}

/// Drops the `generation` tags, by which transformers marks an assistant's tokens for training; the text between them
/// stays. A comment in each tag's place keeps its whitespace marks.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        // What closes a tag stands behind what opens it: `{%}` is not one.
        let Some(end) = tag[2..].find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 4);
        let inner = &tag[2..end + 2];
        let word = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        if matches!(word, "generation" | "endgeneration") {
            let open = if inner.starts_with('-') { "{#-" } else { "{#" };
            let close = if inner.ends_with('-') { "-#}" } else { "#}" };
            out.push_str(open);
            out.push(' ');
            out.push_str(close);
        } else {
            out.push_str(tag);
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Reads `tojson`'s arguments; here because `Kwargs` is part of the filter's signature.
fn json_style(kwargs: &Kwargs) -> Result<python::JsonStyle, Error> {
    let style = python::JsonStyle {
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent: kwargs.get::<Option<usize>>("indent")?,
        separators: kwargs.get::<Option<Vec<String>>>("separators")?,
        sorted: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    Ok(style)
}

#[cfg(test)]
mod tests;
