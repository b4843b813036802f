//! What an answer must be: OpenAI's `response_format` and vLLM's `structured_outputs`.

use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, brief};
use serde_json::{Map, Value, json};
use taper_engine::{Grammar, Shape};

type Result<T> = std::result::Result<T, ApiError>;

/// Fields of `structured_outputs` that say what an answer must be; a request has one of them.
const SHAPES: &str = "json, json_object, regex, choice, grammar";

/// What the request says, and where it does; none where the answer may be anything.
pub(crate) fn read(fields: &mut Fields<'_>) -> Result<Option<(Shape, String)>> {
    let format = response_format(fields)?;
    let outputs = fields.object("structured_outputs")?.map(structured_outputs).transpose()?;
    match (format, outputs) {
        (Some(_), Some((_, path))) => {
            Err(ApiError::invalid(&path, format!("{path} and response_format both say what the answer must be")))
        }
        (format, outputs) => Ok(format.or(outputs)),
    }
}

/// Its grammar; `path` is the field that asks for it.
pub(crate) fn compile(app: &App, shape: &Shape, path: &str) -> Result<Grammar> {
    app.engine.grammar(shape).map_err(|error| ApiError::invalid(path, format!("{path}: {error}")))
}

/// What `response_format` asks for, and the path of it.
fn response_format(fields: &mut Fields<'_>) -> Result<Option<(Shape, String)>> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    let mut format = Fields::new(format, "response_format.");
    match format.text("type")? {
        Some("text") => Ok(None),
        // llama.cpp takes a schema beside it.
        Some("json_object") => match format.get("schema") {
            Some(schema) => {
                let path = format.path("schema");
                Ok(Some((Shape::Json(checked(schema, &path)?), path)))
            }
            None => Ok(Some((any_object(), "response_format".into()))),
        },
        Some("json_schema") => {
            let path = format.path("json_schema");
            let named = format.object("json_schema")?;
            let named = named.ok_or_else(|| ApiError::invalid(&path, format!("{path} is missing")))?;
            let mut named = Fields::new(named, &format!("{path}."));
            let path = named.path("schema");
            let schema = named.get("schema");
            let schema = schema.ok_or_else(|| ApiError::invalid(&path, format!("{path} is missing")))?;
            Ok(Some((Shape::Json(checked(schema, &path)?), path)))
        }
        other => {
            let path = format.path("type");
            let what = other.map_or("missing".into(), |other| brief(&json!(other)));
            let message = format!("{path} must be \"text\", \"json_object\" or \"json_schema\"; it is {what}");
            Err(ApiError::invalid(&path, message))
        }
    }
}

fn any_object() -> Shape {
    Shape::Json(json!({"type": "object"}))
}

fn checked(schema: &Value, path: &str) -> Result<Value> {
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(schema.clone()),
        other => Err(ApiError::invalid(path, format!("{path} must be a JSON schema, not {}", brief(other)))),
    }
}

fn structured_outputs(map: &Map<String, Value>) -> Result<(Shape, String)> {
    let mut fields = Fields::new(map, "structured_outputs.");
    let mut found: Vec<(Shape, String)> = Vec::new();
    let compact = fields.bool("disable_any_whitespace")?.unwrap_or(false);
    let spaces = fields.text("whitespace_pattern")?;
    if let Some(schema) = fields.get("json") {
        let path = fields.path("json");
        // vLLM takes a schema as text too.
        let text = schema.as_str().map(serde_json::from_str::<Value>);
        let schema = match text {
            Some(Ok(schema)) => schema,
            Some(Err(error)) => return Err(ApiError::invalid(&path, format!("{path} is not JSON: {error}"))),
            None => schema.clone(),
        };
        found.push((Shape::Json(checked(&schema, &path)?), path));
    }
    if fields.bool("json_object")? == Some(true) {
        found.push((any_object(), fields.path("json_object")));
    }
    if let Some(pattern) = fields.text("regex")? {
        found.push((Shape::Regex(pattern.into()), fields.path("regex")));
    }
    if let Some(choices) = fields.array("choice")? {
        let path = fields.path("choice");
        let texts = choices.iter().map(|choice| choice.as_str().map(String::from)).collect::<Option<Vec<_>>>();
        let texts = texts.filter(|texts| !texts.is_empty() && texts.iter().all(|text| !text.is_empty()));
        let wrong =
            || ApiError::invalid(&path, format!("{path} must be an array of strings, none empty, at least one"));
        found.push((Shape::Choice(texts.ok_or_else(wrong)?), path));
    }
    if let Some(grammar) = fields.text("grammar")? {
        if grammar.contains("::=") {
            let path = fields.path("grammar");
            let message =
                format!("{path} must be in Lark's format, `name: …` for a rule, `start` first; `::=` is another one's");
            return Err(ApiError::invalid(&path, message));
        }
        found.push((Shape::Lark(grammar.into()), fields.path("grammar")));
    }
    if let Some(name) = fields.unread().find(|name| !map[*name].is_null()) {
        let path = fields.path(name);
        let message = format!("{path} is not supported; known: {SHAPES}, disable_any_whitespace, whitespace_pattern");
        return Err(ApiError::invalid(&path, message));
    }
    let mut found = found.into_iter();
    let (Some((mut shape, path)), None) = (found.next(), found.next()) else {
        let message = format!("structured_outputs must have exactly one of {SHAPES}");
        return Err(ApiError::invalid("structured_outputs", message));
    };
    if compact || spaces.is_some() {
        let name = if compact { "disable_any_whitespace" } else { "whitespace_pattern" };
        let Shape::Json(Value::Object(schema)) = &mut shape else {
            let name = fields.path(name);
            return Err(ApiError::invalid(&name, format!("{name} is for JSON by a schema that is an object")));
        };
        let options = schema.entry("x-guidance").or_insert_with(|| json!({}));
        if let Some(options) = options.as_object_mut() {
            match spaces {
                Some(pattern) if !compact => options.insert("whitespace_pattern".into(), json!(pattern)),
                _ => options.insert("whitespace_flexible".into(), json!(false)),
            };
        }
    }
    Ok((shape, path))
}
