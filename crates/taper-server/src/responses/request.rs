//! The request, put as the chat that it stands for.

use crate::answer::Call;
use crate::app::App;
use crate::body::Parsed;
use crate::chat::{self, BETWEEN_PARTS};
use crate::error::ApiError;
use crate::fields::{Fields, brief, exact};
use serde_json::{Map, Value, json};

type Result<T> = std::result::Result<T, ApiError>;

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) call: Call,
    /// What the answer says again of the request.
    pub(crate) echo: Map<String, Value>,
}

impl Parsed for Asked {
    fn has_grammar(&self) -> bool {
        self.call.has_grammar()
    }

    fn compile(&mut self, app: &App) -> Result<()> {
        self.call.compile(app).map_err(renamed)
    }
}

/// Fields that would need answers to be kept, or done later.
const STORED: [&str; 4] = ["previous_response_id", "conversation", "background", "prompt"];

/// Names of a chat's fields, and what they are called here.
const NAMES: [(&str, &str); 4] = [
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
];

/// Fields of a chat, and what says the same here.
const CHATS: [(&str, &str); 5] = [
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("logprobs", "top_logprobs, or \"message.output_text.logprobs\" in include"),
];

/// What `include` may ask for that there is.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Parses and tokenizes the request.
pub(crate) fn parse(app: &App, map: &Map<String, Value>) -> Result<Asked> {
    let mut fields = Fields::new(map, "");
    let mut says = |name: &'static str| fields.get(name).is_some_and(|value| value != &Value::Bool(false));
    for name in STORED {
        if says(name) {
            return Err(ApiError::invalid(name, format!("{name} is not supported: nothing is stored here")));
        }
    }
    for (name, here) in CHATS {
        if says(name) {
            return Err(ApiError::invalid(name, format!("{name} is a chat's; here it is {here}")));
        }
    }
    let (mut own, mut ignored) = (Map::new(), Vec::new());
    fields.int("n", 1..=1)?;
    let metadata = fields.object("metadata")?;
    if fields.bool("store")? == Some(true) {
        ignored.push("store".into());
    }
    match fields.text("truncation")? {
        None | Some("disabled") => {}
        // What is too long is refused all the same.
        Some("auto") => ignored.push("truncation".into()),
        Some(other) => {
            let message = format!("truncation must be \"disabled\" or \"auto\", not {}", brief(&json!(other)));
            return Err(ApiError::invalid("truncation", message));
        }
    }
    let top = fields.int("top_logprobs", 0..=20)?;
    let included = fields.array("include")?.map_or(&[][..], Vec::as_slice);
    if included.iter().any(|name| !name.is_string()) {
        return Err(ApiError::invalid("include", "include must be an array of strings"));
    }
    if included.iter().any(|name| name != LOGPROBS) {
        ignored.push("include".into());
    }
    if top.is_some_and(|top| top > 0) || included.iter().any(|name| name == LOGPROBS) {
        own.insert("logprobs".into(), true.into());
        own.insert("top_logprobs".into(), top.unwrap_or(0).into());
    }
    let instructions = fields.text("instructions")?;
    own.insert("messages".into(), messages(fields.get("input"), instructions)?);
    let most = fields.int("max_output_tokens", 1..=i64::MAX)?;
    own.extend(most.map(|most| ("max_tokens".to_string(), json!(most))));
    if let Some(tools) = fields.array("tools")? {
        let tools = tools.iter().enumerate().map(tool).collect::<Result<Vec<_>>>()?;
        own.insert("tools".into(), tools.into());
    }
    if let Some(choice) = fields.get("tool_choice") {
        own.insert("tool_choice".into(), tool_choice(choice)?);
    }
    let mut format = None;
    if let Some(text) = fields.object("text")? {
        let mut text = Fields::new(text, "text.");
        format = text.get("format");
        ignored.extend(text.text("verbosity")?.map(|_| "text.verbosity".to_string()));
        text.finish()?;
    }
    if let Some(format) = format {
        own.insert("response_format".into(), response_format(format)?);
    }
    // What is a chat's too is as it came.
    own.extend(fields.unread().map(|name| (name.to_owned(), map[name].clone())));
    let mut call = chat::parse(app, &own).map_err(renamed)?;
    call.ignored.extend(ignored);
    let said = |name| map.get(name).filter(|value: &&Value| !value.is_null());
    let echo = json!({
        "instructions": instructions,
        "max_output_tokens": most,
        "metadata": metadata.unwrap_or(&Map::new()),
        "parallel_tool_calls": said("parallel_tool_calls").unwrap_or(&json!(true)),
        "temperature": exact(call.common.sampling.temperature),
        "top_p": exact(call.common.sampling.top_p),
        "text": {"format": format.unwrap_or(&json!({"type": "text"}))},
        "tool_choice": said("tool_choice").unwrap_or(&json!("auto")),
        "tools": said("tools").unwrap_or(&json!([])),
    });
    Ok(Asked { call, echo: echo.as_object().cloned().unwrap_or_default() })
}

/// A chat's, which has objects around names.
fn tool_choice(choice: &Value) -> Result<Value> {
    let Value::Object(map) = choice else { return Ok(choice.clone()) };
    match map.get("type").and_then(Value::as_str) {
        Some("allowed_tools") => {
            let tools = map.get("tools").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let tools: Vec<Value> = tools.iter().map(|tool| json!({"function": {"name": tool.get("name")}})).collect();
            let mode = map.get("mode").cloned().unwrap_or_else(|| json!("auto"));
            Ok(json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}))
        }
        Some("function") if map.get("name").is_some_and(Value::is_string) => {
            Ok(json!({"type": "function", "function": {"name": map["name"]}}))
        }
        _ => {
            let message = "tool_choice must be \"none\", \"auto\", \"required\", {\"type\": \"function\", \"name\": …} or {\"type\": \"allowed_tools\", …}";
            Err(ApiError::invalid("tool_choice", message))
        }
    }
}

/// An error about the chat, in this request's words.
pub(super) fn renamed(mut error: ApiError) -> ApiError {
    let Some(param) = &error.param else { return error };
    // A function has no object of its own around it here, nor a call.
    if let Some(at) = param.find(".function.").filter(|_| param.starts_with("tools[")) {
        let own = format!("{}.{}", &param[..at], &param[at + ".function.".len()..]);
        error.message = error.message.replace(param.as_str(), &own);
        error.param = Some(own);
        return error;
    }
    if let Some((old, new)) = NAMES.iter().find(|(old, _)| param.starts_with(old)) {
        // The field, not a word of what is said of it.
        error.message = match error.message.strip_prefix(param.as_str()) {
            Some(rest) => format!("{}{rest}", param.replace(old, new)),
            None => error.message,
        };
        error.param = Some(param.replace(old, new));
    }
    error
}

fn messages(input: Option<&Value>, instructions: Option<&str>) -> Result<Value> {
    let mut messages: Vec<Value> = Vec::new();
    messages.extend(instructions.map(|text| json!({"role": "system", "content": text})));
    match input {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, value) in items.iter().enumerate() {
                item(&mut messages, &format!("input[{index}]"), value)?;
            }
        }
        _ => return Err(ApiError::invalid("input", "input must be a string or an array of at least one item")),
    }
    Ok(messages.into())
}

/// Adds what one item of the conversation is in a chat.
fn item(messages: &mut Vec<Value>, path: &str, value: &Value) -> Result<()> {
    let wrong = |what: &str| ApiError::invalid(path, format!("{path} must be {what}, not {}", brief(value)));
    let map = value.as_object().ok_or_else(|| wrong("an object"))?;
    let mut fields = Fields::new(map, &format!("{path}."));
    let missing = |fields: &Fields<'_>, name: &str, what: &str| {
        let path = fields.path(name);
        ApiError::invalid(&path, format!("{path} must be {what}"))
    };
    // Whatever a message of the chat could be refused for is found here, where the item's own place is known.
    match fields.text("type")?.unwrap_or("message") {
        "message" => {
            let role = fields.text("role")?.filter(|role| !role.is_empty());
            let role = match role.ok_or_else(|| missing(&fields, "role", "a string such as \"user\""))? {
                "developer" => "system",
                role => role,
            };
            let content = content(&fields.path("content"), map.get("content"))?;
            messages.push(json!({"role": role, "content": content}));
        }
        "function_call" => {
            let name = fields.text("name")?.ok_or_else(|| missing(&fields, "name", "a string"))?;
            let arguments = map.get("arguments").unwrap_or(&Value::Null);
            if !matches!(arguments, Value::Null | Value::String(_) | Value::Object(_)) {
                return Err(missing(&fields, "arguments", "a JSON object, as text"));
            }
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"id": fields.text("call_id")?, "type": "function", "function": function});
            // Calls that came together, after text or not, are of one message.
            let last = messages.last_mut().filter(|last| last["role"] == "assistant").and_then(Value::as_object_mut);
            match last.map(|last| last.entry("tool_calls").or_insert_with(|| json!([]))) {
                Some(Value::Array(calls)) => calls.push(call),
                _ => messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
            }
        }
        "function_call_output" => {
            let content = content(&fields.path("output"), map.get("output"))?;
            messages.push(json!({"role": "tool", "tool_call_id": fields.text("call_id")?, "content": content}));
        }
        // What the model thought is not shown to it again.
        "reasoning" => {}
        kind => {
            let path = fields.path("type");
            let known = "message, function_call, function_call_output, reasoning";
            return Err(ApiError::invalid(&path, format!("{path} is {kind:?}; known: {known}")));
        }
    }
    Ok(())
}

/// Text, or parts of it.
fn content<'a>(path: &str, value: Option<&'a Value>) -> Result<String> {
    let wrong = || ApiError::invalid(path, format!("{path} must be a string or an array of text parts"));
    let parts = match value {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        _ => return Err(wrong()),
    };
    let part = |(index, part): (usize, &'a Value)| {
        let path = format!("{path}[{index}]");
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("input_text" | "output_text" | "text"), Some(text)) => Ok(text),
            (Some("refusal"), _) if part["refusal"].is_string() => Ok(part["refusal"].as_str().unwrap_or_default()),
            _ => Err(ApiError::invalid(&path, format!("{path} must be {{\"type\": \"input_text\", \"text\": …}}"))),
        }
    };
    Ok(parts.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?.join(BETWEEN_PARTS))
}

/// A tool, whose function is not in an object of its own here.
fn tool((index, value): (usize, &Value)) -> Result<Value> {
    let path = format!("tools[{index}]");
    let kind = value.get("type").and_then(Value::as_str);
    if kind != Some("function") {
        let path = format!("{path}.type");
        return Err(ApiError::invalid(&path, format!("{path} must be \"function\"; no other tool is served here")));
    }
    let mut function = value.as_object().cloned().unwrap_or_default();
    function.shift_remove("type");
    Ok(json!({"type": "function", "function": function}))
}

fn response_format(format: &Value) -> Result<Value> {
    let kind = format.get("type").and_then(Value::as_str);
    Ok(match kind {
        Some("json_schema") => {
            json!({"type": kind, "json_schema": {"name": format.get("name"), "schema": format.get("schema")}})
        }
        Some("text" | "json_object") => json!({"type": kind}),
        _ => {
            let path = "text.format.type";
            return Err(ApiError::invalid(
                path,
                format!("{path} must be \"text\", \"json_object\" or \"json_schema\""),
            ));
        }
    })
}
