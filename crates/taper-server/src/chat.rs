//! `/v1/chat/completions`: the request.

use crate::answer::{Call, Kind, Prompt};
use crate::app::App;
use crate::error::{self, ApiError};
use crate::fields::{Fields, brief};
use crate::tools::Tools;
use crate::{attention, knobs, sampling, structured};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use taper_engine::{Message, Text};

/// Parses and tokenizes a chat request.
pub(crate) fn parse(app: &App, map: &Map<String, Value>) -> Result<Call, ApiError> {
    let mut fields = Fields::new(map, "");
    app.check_model(fields.text("model")?)?;
    let tools = Tools::read(&mut fields)?;
    let conversation = Conversation::read(&mut fields, tools.as_ref())?;
    let tools = tools.filter(Tools::callable);
    let mut common = sampling::read(&mut fields, app, 1)?;
    let top = fields.int("top_logprobs", 0..=20)?;
    let logprobs = fields.bool("logprobs")?.unwrap_or(false);
    if top.is_some_and(|n| n > 0) && !logprobs {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
    }
    let (attention, mut ignored) = attention::read(&mut fields, &app.config)?;
    let mut wanted = structured::read(&mut fields)?;
    ignored.extend(knobs::unknown(map, fields.unread())?);
    ignored.extend_from_slice(&conversation.ignored);
    ignored.append(&mut common.ignored);
    let text = app.engine.text();
    if let Some(tools) = &tools {
        // Calls may be marked by what is else not shown.
        common.special = true;
        let (shape, path) = wanted.unzip();
        wanted = tools.shape(text, shape)?.map(|shape| (shape, path.unwrap_or_else(|| "tools".into())));
    }
    let (shape, grammar_field) = wanted.unzip();
    let tokens = conversation.tokens(text)?;
    common.default_length(app, app.config.max_tokens, [tokens.len()]);
    let question_tokens = attention::question(&attention, tokens.len(), || conversation.question(text, &tokens))?;
    Ok(Call {
        kind: Kind::Chat,
        continues: conversation.open,
        kept: common.choices,
        prompts: vec![Prompt { tokens, question_tokens, echo: None }],
        prompt_field: "messages",
        common,
        logprobs: logprobs.then(|| top.unwrap_or(0) as usize),
        tools,
        shape,
        grammar: None,
        grammar_field,
        attention: Arc::new(attention),
        ignored,
    })
}

/// What the chat template renders.
pub(crate) struct Conversation {
    messages: Vec<Message>,
    variables: Map<String, Value>,
    /// Whether the answer goes on with the last message.
    pub(crate) open: bool,
    /// Fields of messages that have no effect.
    ignored: Vec<String>,
}

impl Conversation {
    /// Reads `messages`, `chat_template_kwargs` and `continue_final_message`.
    pub(crate) fn read(fields: &mut Fields<'_>, tools: Option<&Tools>) -> Result<Self, ApiError> {
        let mut variables = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
        if let Some(name) =
            ["messages", "tools", "add_generation_prompt"].iter().find(|name| variables.contains_key(**name))
        {
            let path = format!("chat_template_kwargs.{name}");
            return Err(ApiError::invalid(&path, format!("{path} is not for the request to set here")));
        }
        variables.extend(tools.map(|tools| ("tools".into(), tools.for_template())));
        let (messages, ignored) = messages(fields)?;
        let open = fields.bool("continue_final_message")?.unwrap_or(false);
        if open {
            check_open(fields, &messages)?;
        }
        Ok(Self { messages, variables, open, ignored })
    }

    /// Ready for the assistant's answer.
    pub(crate) fn tokens(&self, text: &dyn Text) -> Result<Vec<u32>, ApiError> {
        let tokens = match self.open {
            true => text.open(&self.messages, &self.variables),
            false => text.chat(&self.messages, &self.variables),
        };
        tokens.map_err(|e| error::text(&e, "messages"))
    }

    /// Without the opening of the assistant's answer.
    pub(crate) fn turns(&self, text: &dyn Text) -> Result<Vec<u32>, ApiError> {
        text.turns(&self.messages, &self.variables).map_err(|e| error::text(&e, "messages"))
    }

    /// Tokens from where the last user message begins.
    fn question(&self, text: &dyn Text, tokens: &[u32]) -> Option<usize> {
        taper_engine::question(text, &self.messages, &self.variables, tokens)
    }
}

/// Whether an answer can go on with the last message.
fn check_open(fields: &mut Fields<'_>, messages: &[Message]) -> Result<(), ApiError> {
    const FIELD: &str = "continue_final_message";
    if fields.bool("add_generation_prompt")? == Some(true) {
        return Err(ApiError::invalid(FIELD, format!("{FIELD} and add_generation_prompt exclude each other")));
    }
    let goes_on = |last: &Message| {
        let text = last.content.as_deref().is_some_and(|text| !text.trim().is_empty());
        last.role == "assistant" && text && !last.extra.contains_key("tool_calls")
    };
    match messages.last().is_some_and(goes_on) {
        true => Ok(()),
        false => {
            Err(ApiError::invalid(FIELD, format!("{FIELD} needs a last message of the assistant's, of text alone")))
        }
    }
}

/// The messages, and their fields that have no effect.
fn messages(fields: &mut Fields<'_>) -> Result<(Vec<Message>, Vec<String>), ApiError> {
    let list = fields.array("messages")?;
    let list = list
        .filter(|list| !list.is_empty())
        .ok_or_else(|| ApiError::invalid("messages", "messages must be an array of at least one message"))?;
    let mut ignored = Vec::new();
    let messages = list.iter().enumerate().map(|(index, value)| message(index, value, &mut ignored));
    Ok((messages.collect::<Result<_, _>>()?, ignored))
}

fn message(index: usize, value: &Value, ignored: &mut Vec<String>) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let map = value
        .as_object()
        .ok_or_else(|| ApiError::invalid(&path, format!("{path} must be an object, not {}", brief(value))))?;
    let mut fields = Fields::new(map, &format!("{path}."));
    let role = fields.text("role")?;
    let role = role.filter(|role| !role.is_empty()).ok_or_else(|| {
        let path = fields.path("role");
        ApiError::invalid(&path, format!("{path} must be a string such as \"user\""))
    })?;
    let mut extra = Map::new();
    for name in ["name", "tool_call_id"] {
        extra.extend(fields.text(name)?.map(|text| (name.to_string(), text.into())));
    }
    let calls = fields.array("tool_calls")?.map_or(&[][..], Vec::as_slice);
    if !calls.is_empty() {
        let path = fields.path("tool_calls");
        let calls = calls.iter().enumerate().map(|(index, value)| call(&format!("{path}[{index}]"), value));
        extra.insert("tool_calls".into(), calls.collect::<Result<_, _>>()?);
    }
    let path = fields.path("content");
    let content = match fields.get("content") {
        Some(Value::String(text)) => Some(text.clone()),
        None if extra.contains_key("tool_calls") => None,
        // As a refused answer comes back.
        None if role == "assistant" => Some(String::new()),
        Some(Value::Array(parts)) => {
            let parts = parts.iter().enumerate().map(|(index, value)| part(&format!("{path}[{index}]"), value));
            Some(parts.collect::<Result<Vec<_>, ApiError>>()?.join(BETWEEN_PARTS))
        }
        _ => {
            return Err(ApiError::invalid(&path, format!("{path} must be a string or an array of text parts")));
        }
    };
    ignored.extend(knobs::unknown_of_message(&format!("messages[{index}]"), map, fields.unread())?);
    Ok(Message { role: role.to_string(), content, extra })
}

/// A call that an earlier answer made, its arguments as what they stand for: templates expect an object.
fn call(path: &str, value: &Value) -> Result<Value, ApiError> {
    let name = value.pointer("/function/name").filter(|name| name.is_string()).ok_or_else(|| {
        let path = format!("{path}.function.name");
        ApiError::invalid(&path, format!("{path} must be a string"))
    })?;
    let arguments = match value.pointer("/function/arguments") {
        None | Some(Value::Null) => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        // An answer that was cut short has made it less than an object.
        Some(Value::String(text)) => {
            serde_json::from_str(text).ok().filter(Value::is_object).unwrap_or_else(|| json!(text))
        }
        Some(object @ Value::Object(_)) => object.clone(),
        Some(_) => {
            let path = format!("{path}.function.arguments");
            return Err(ApiError::invalid(&path, format!("{path} must be a JSON object, as text")));
        }
    };
    Ok(json!({"id": value["id"], "type": "function", "function": {"name": name, "arguments": arguments}}))
}

/// What stands between the parts of a message, as in vLLM.
pub(crate) const BETWEEN_PARTS: &str = "\n";

/// The text of one part, `{"type": "text", "text": …}`, or of an earlier answer that refused.
fn part<'a>(path: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    let name = match value.get("type").and_then(Value::as_str) {
        Some("text") => "text",
        Some("refusal") => "refusal",
        kind => {
            let path = format!("{path}.type");
            let kind = kind.unwrap_or("none");
            return Err(ApiError::invalid(&path, format!("{path} must be \"text\", not {kind:?}")));
        }
    };
    value.get(name).and_then(Value::as_str).ok_or_else(|| {
        let path = format!("{path}.{name}");
        ApiError::invalid(&path, format!("{path} must be a string"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use taper_engine::ModelText;
    use taper_model::{ChatTemplate, ModelFiles, ResolvedModel, Tokenizer};

    /// A small tokenizer under the template of a real model.
    fn text(template: &str) -> ModelText {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden");
        let folder = tempfile::tempdir().unwrap();
        let fixture = std::fs::read(golden.join("tokenizers/llama-bpe.json")).unwrap();
        let fixture: Value = serde_json::from_slice(&fixture).unwrap();
        std::fs::copy(golden.join("llama3/config.json"), folder.path().join("config.json")).unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), fixture["tokenizer"].to_string()).unwrap();
        let model = ResolvedModel { name: "tiny".into(), files: ModelFiles::Folder(folder.path().to_owned()) };
        let template = std::fs::read_to_string(golden.join("templates").join(template)).unwrap();
        let Value::Object(marks) = json!({ "bos_token": "<s>", "eos_token": "</s>" }) else { unreachable!() };
        let template = ChatTemplate::new(&template, marks).unwrap();
        ModelText::new(Tokenizer::load(&model).unwrap(), Some(template), 1 << 16)
    }

    #[test]
    fn a_question_begins_where_the_last_users_message_does() {
        let talk = [("system", "Be brief."), ("user", "One?"), ("assistant", "1"), ("user", "Two?")];
        let llama = "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
        for (template, talk, question) in [
            ("llama-3.1.jinja", &talk[..], llama),
            ("llama-3.1.jinja", &[talk[0], talk[3]], llama),
            ("mistral-v0.3.jinja", &talk[1..], "[INST] Two?[/INST]"),
        ] {
            let text = text(template);
            let messages = talk.iter().map(|(role, content)| Message::new(*role, *content)).collect();
            let conversation = Conversation { messages, variables: Map::new(), open: false, ignored: Vec::new() };
            let tokens = conversation.tokens(&text).unwrap();
            let count = conversation.question(&text, &tokens).unwrap();
            assert_eq!(text.decode(&tokens[tokens.len() - count..], true), question, "{template}");
        }
    }
}
