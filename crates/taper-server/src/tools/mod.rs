//! Functions that a chat may call: `tools`, `tool_choice`, `parallel_tool_calls`, and the answer's `tool_calls`.
//!
//! The chat template tells the model of them. A call that is asked for is held to its format and schema by a grammar; one that
//! the model may choose to make is found in what it says.

mod object;
mod parser;

use parser::{Parser, Said};

use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, brief};
use rand::Rng;
use rand::distr::Alphanumeric;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};
use taper_engine::{CallFormat, Shape, Text, json_rule};

type Result<T> = std::result::Result<T, ApiError>;

/// Most functions of one request.
const MOST: usize = 128;
/// For how long the one is looked for whose schema makes no grammar.
const CULPRIT: Duration = Duration::from_secs(1);

/// One function.
#[derive(Debug, Clone, PartialEq)]
struct Function {
    name: String,
    /// JSON schema of its arguments.
    parameters: Value,
}

/// Whether functions are called.
#[derive(Debug, Clone, PartialEq)]
enum Wish {
    Never,
    Auto,
    Required,
    Named(String),
}

/// The functions of a request, none of which is a request without.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tools {
    functions: Vec<Function>,
    /// As they came, for the template.
    raw: Vec<Value>,
    wish: Wish,
    /// Whether the functions are not all that the model is told of.
    some: bool,
    /// Whether one answer may call several times.
    parallel: bool,
}

impl Tools {
    /// Reads them.
    pub(crate) fn read(fields: &mut Fields<'_>) -> Result<Option<Self>> {
        let raw = fields.array("tools")?.cloned().unwrap_or_default();
        let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        if raw.len() > MOST {
            return Err(ApiError::invalid("tools", format!("tools has {} functions; at most {MOST}", raw.len())));
        }
        let mut functions = raw.iter().enumerate().map(function).collect::<Result<Vec<_>>>()?;
        if let Some(twice) =
            functions.iter().enumerate().find(|(i, f)| functions[..*i].iter().any(|g| g.name == f.name))
        {
            let path = format!("tools[{}].function.name", twice.0);
            return Err(ApiError::invalid(&path, format!("{path} is {:?}, as another one's is", twice.1.name)));
        }
        let (wish, allowed) = wish(fields)?;
        if let Some(name) =
            allowed.iter().flatten().find(|name| !functions.iter().any(|function| function.name == **name))
        {
            return Err(ApiError::invalid(
                "tool_choice",
                format!("tool_choice allows {name:?}, which is none of tools"),
            ));
        }
        let wish = match (wish, functions.is_empty()) {
            (Wish::Never | Wish::Auto, true) => return Ok(None),
            (_, true) => return Err(ApiError::invalid("tool_choice", "tool_choice needs tools")),
            (wish, false) => wish,
        };
        if let Wish::Named(name) = &wish
            && !functions.iter().any(|function| function.name == *name)
        {
            return Err(ApiError::invalid(
                "tool_choice",
                format!("tool_choice names {name:?}, which is none of tools"),
            ));
        }
        // The model is told of all of them nonetheless.
        functions.retain(|function| allowed.as_ref().is_none_or(|allowed| allowed.contains(&function.name)));
        Ok(Some(Self { functions, raw, wish, some: allowed.is_some(), parallel }))
    }

    /// The first function whose schema makes no grammar, of those that can be looked at in a while.
    pub(crate) fn culprit(&self, app: &App) -> Option<ApiError> {
        let until = Instant::now() + CULPRIT;
        let mut looked_at = self.functions.iter().take_while(|_| Instant::now() < until);
        looked_at.find_map(|Function { name, parameters }| {
            let error = app.engine.grammar(&Shape::Json(parameters.clone())).err()?;
            let named = |tool: &Value| tool.pointer("/function/name").is_some_and(|own| own == name.as_str());
            let path = format!("tools[{}].function.parameters", self.raw.iter().position(named)?);
            Some(ApiError::invalid(&path, format!("{path}: {error}")))
        })
    }

    /// Whether any may be called: of others the model is told all the same, so that a conversation keeps its beginning.
    pub(crate) fn callable(&self) -> bool {
        self.wish != Wish::Never
    }

    /// Whether the answer is calls and nothing else.
    pub(crate) fn forced(&self) -> bool {
        self.wish != Wish::Auto
    }

    /// What the chat template reads.
    pub(crate) fn for_template(&self) -> Value {
        Value::Array(self.raw.clone())
    }

    /// What finds the calls in one choice's text.
    pub(crate) fn calls_in(&self, format: CallFormat) -> Calls {
        let known = self.raw.iter().filter_map(|tool| tool.pointer("/function/name")?.as_str().map(String::from));
        let only = self.some.then(|| self.functions.iter().map(|function| function.name.clone()).collect());
        let most = if self.parallel { usize::MAX } else { 1 };
        let parser = Parser::new(format, known.collect(), only, most, self.forced());
        Calls { format, parser, text: String::new(), calls: Vec::new() }
    }

    /// What the answer must be, if a call is asked for or what is said otherwise must fit `format`; none where it may
    /// be anything.
    pub(crate) fn shape(&self, text: &dyn Text, format: Option<Shape>) -> Result<Option<Shape>> {
        let answer = match (&self.wish, format) {
            (Wish::Auto, None) => return Ok(None),
            (Wish::Auto, Some(Shape::Json(schema))) => Some(json_rule(&schema)),
            (Wish::Auto, Some(_)) => {
                let message = "beside tools an answer can only be held to JSON";
                return Err(ApiError::invalid("structured_outputs", message));
            }
            (_, Some(_)) => {
                let message =
                    "tool_choice asks for a call, and response_format or structured_outputs for something else";
                return Err(ApiError::invalid("tool_choice", message));
            }
            (_, None) => None,
        };
        let mut lark = String::from(if answer.is_some() { "start: answer | calls\n" } else { "start: calls\n" });
        if let Some(answer) = answer {
            lark.push_str(&format!("answer: {answer}\n"));
        }
        lark.push_str(&self.calls(text));
        Ok(Some(Shape::Lark(lark)))
    }

    /// The rules of calls as the model writes them.
    fn calls(&self, text: &dyn Text) -> String {
        // A mark may be a token of its own, which no text is.
        let mark = |mark: &str| text.mark(mark).map_or_else(|| quoted(mark), |token| format!("<[{token}]>"));
        let format = text.call_format();
        let wanted = self.functions.iter().enumerate().filter(|(_, function)| match &self.wish {
            Wish::Named(name) => function.name == *name,
            _ => true,
        });
        let (mut alternatives, mut rules) = (Vec::new(), String::new());
        for (index, Function { name, parameters }) in wanted {
            let open = match format {
                CallFormat::MistralNamed => format!("{} {} {}", mark("[TOOL_CALLS]"), quoted(name), mark("[ARGS]")),
                CallFormat::Llama => quoted(&format!("{{\"name\": {}, \"parameters\": ", json!(name))),
                CallFormat::Tagged | CallFormat::Mistral => {
                    quoted(&format!("{{\"name\": {}, \"arguments\": ", json!(name)))
                }
            };
            let close = if format == CallFormat::MistralNamed { "" } else { "\"}\"" };
            rules.push_str(&format!(
                "call{index}: {open} args{index} {close}\nargs{index}: {}\n",
                json_rule(parameters)
            ));
            alternatives.push(format!("call{index}"));
        }
        let call = format!("call: {}\n", alternatives.join(" | "));
        let several = |separator: &str| match self.parallel && !matches!(self.wish, Wish::Named(_)) {
            true => format!("one ({separator} one)*"),
            false => "one".into(),
        };
        let calls = match format {
            CallFormat::Tagged => {
                let one = format!("one: {} \"\\n\" call \"\\n\" {}\n", mark("<tool_call>"), mark("</tool_call>"));
                format!("calls: {}\n{one}", several("\"\\n\""))
            }
            CallFormat::Llama => "calls: call\n".into(),
            CallFormat::Mistral => {
                format!("calls: {} \"[\" {} \"]\"\none: call\n", mark("[TOOL_CALLS]"), several("\", \""))
            }
            CallFormat::MistralNamed => format!("calls: {}\none: call\n", several("")),
        };
        calls + &call + &rules
    }
}

/// The calls of one choice, as they come.
#[derive(Debug)]
pub(crate) struct Calls {
    format: CallFormat,
    parser: Parser,
    /// What is said beside them.
    text: String,
    calls: Vec<Call>,
}

#[derive(Debug)]
struct Call {
    id: String,
    name: String,
    arguments: String,
}

/// What a stream tells of a choice next.
#[derive(Debug)]
pub(crate) enum Told {
    /// Text for the reader.
    Text(String),
    /// A call begins, the answer's `index`th.
    Call { index: usize, id: String, name: String },
    /// More of its arguments.
    Arguments { index: usize, text: String },
}

impl Told {
    /// The delta of a chat's chunk.
    pub(crate) fn delta(&self) -> Value {
        match self {
            Self::Text(text) => json!({"content": text}),
            Self::Call { index, id, name } => {
                let function = json!({"name": name, "arguments": ""});
                json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]})
            }
            Self::Arguments { index, text } => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
            }
        }
    }
}

impl Calls {
    /// Takes more of the choice's text; returns what became certain.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Told> {
        let said = self.parser.push(text);
        self.take(said)
    }

    /// The rest, at the choice's end.
    pub(crate) fn finish(&mut self) -> Vec<Told> {
        let said = self.parser.finish();
        self.take(said)
    }

    fn take(&mut self, said: Vec<Said>) -> Vec<Told> {
        let tell = |said| match said {
            Said::Text(text) => {
                self.text.push_str(&text);
                Told::Text(text)
            }
            Said::Call { name } => {
                let call = Call { id: id(self.format), name, arguments: String::new() };
                let told = Told::Call { index: self.calls.len(), id: call.id.clone(), name: call.name.clone() };
                self.calls.push(call);
                told
            }
            Said::Arguments(text) => {
                let index = self.calls.len().saturating_sub(1);
                self.calls.last_mut().into_iter().for_each(|call| call.arguments.push_str(&text));
                Told::Arguments { index, text }
            }
        };
        said.into_iter().map(tell).collect()
    }

    /// The whole message.
    pub(crate) fn message(&self) -> Value {
        let none = self.text.is_empty() && (self.forced() || !self.calls.is_empty());
        let content = if none { Value::Null } else { json!(self.text) };
        let mut message = json!({"role": "assistant", "content": content});
        if !self.calls.is_empty() {
            let calls = self.calls.iter().map(|Call { id, name, arguments }| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            });
            message["tool_calls"] = calls.collect();
        }
        message
    }

    /// Says in a choice that is over that it was for these calls.
    pub(crate) fn finished(&self, choice: &mut Value) {
        if !self.calls.is_empty() && self.whole() && choice["finish_reason"] == "stop" {
            choice["finish_reason"] = json!("tool_calls");
        }
    }

    /// Whether there is nothing but calls, be it that none came.
    pub(crate) fn forced(&self) -> bool {
        self.parser.forced
    }

    /// Whether the last call came to its end: a stop string may have cut it short.
    pub(crate) fn whole(&self) -> bool {
        !self.parser.within()
    }
}

/// A name for a call. Mistral's templates take nine letters and digits and nothing else.
fn id(format: CallFormat) -> String {
    let random = |n| (0..n).map(|_| char::from(rand::rng().sample(Alphanumeric))).collect::<String>();
    match format {
        CallFormat::Mistral | CallFormat::MistralNamed => random(9),
        CallFormat::Tagged | CallFormat::Llama => format!("call_{}", random(24)),
    }
}

/// A string as Lark writes it.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// Whether functions are called; and the only ones that may be, if not all.
fn wish(fields: &mut Fields<'_>) -> Result<(Wish, Option<Vec<String>>)> {
    let wrong = |value: &Value| {
        let message = format!(
            "tool_choice must be \"none\", \"auto\", \"required\" or {{\"type\": \"function\", \"function\": {{\"name\": …}}}}, or {{\"type\": \"allowed_tools\", …}}, not {}",
            brief(value)
        );
        ApiError::invalid("tool_choice", message)
    };
    let Some(value) = fields.get("tool_choice") else { return Ok((Wish::Auto, None)) };
    let mode = |mode: &Value| match mode.as_str() {
        Some("none") => Ok(Wish::Never),
        Some("auto") => Ok(Wish::Auto),
        Some("required") => Ok(Wish::Required),
        _ => Err(wrong(value)),
    };
    match value {
        Value::String(_) => Ok((mode(value)?, None)),
        Value::Object(map) if map.get("type").is_some_and(|kind| kind == "allowed_tools") => {
            let name = |tool: &Value| tool.pointer("/function/name").and_then(Value::as_str).map(String::from);
            let tools = value.pointer("/allowed_tools/tools").and_then(Value::as_array);
            let names = tools.and_then(|tools| tools.iter().map(name).collect::<Option<Vec<_>>>());
            let names = names.filter(|names| !names.is_empty()).ok_or_else(|| wrong(value))?;
            Ok((mode(value.pointer("/allowed_tools/mode").unwrap_or(&json!("auto")))?, Some(names)))
        }
        Value::Object(map) if map.get("type").and_then(Value::as_str) == Some("function") => {
            let name = value.pointer("/function/name").and_then(Value::as_str);
            name.map(|name| (Wish::Named(name.into()), None)).ok_or_else(|| wrong(value))
        }
        other => Err(wrong(other)),
    }
}

fn function((index, value): (usize, &Value)) -> Result<Function> {
    let path = format!("tools[{index}]");
    let must = |path: &str, what: &str, value: Option<&Value>| {
        let is = value.map_or("missing".into(), brief);
        ApiError::invalid(path, format!("{path} must be {what}; it is {is}"))
    };
    let map = value.as_object().ok_or_else(|| must(&path, "an object", Some(value)))?;
    let kind = map.get("type");
    if kind.and_then(Value::as_str) != Some("function") {
        return Err(must(&format!("{path}.type"), "\"function\"", kind));
    }
    let path = format!("{path}.function");
    let function = map.get("function").and_then(Value::as_object);
    let function: &Map<String, Value> = function.ok_or_else(|| must(&path, "an object", map.get("function")))?;
    let sound = |name: &&str| {
        (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
    };
    let name = function.get("name").and_then(Value::as_str).filter(sound).ok_or_else(|| {
        must(&format!("{path}.name"), "1 to 64 letters, digits, dots, dashes and underscores", function.get("name"))
    })?;
    let parameters = match function.get("parameters").filter(|value| !value.is_null()) {
        None => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Some(Value::Object(map)) if map.is_empty() => json!({"type": "object"}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        other => return Err(must(&format!("{path}.parameters"), "a JSON schema of an object", other)),
    };
    Ok(Function { name: name.into(), parameters })
}
