//! What a request says of its attention, and the errors when it says something else.

use crate::artifacts::Artifacts;
use crate::dense_below;
use crate::method::{DecodeMethod, PrefillMethod};
use crate::methods;
use crate::speculate::{Drafting, Speculate};
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// A spec that cannot be accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SpecError {
    /// Where in the request, such as `attention.decode.epsilon`.
    pub path: String,
    /// What is wrong and what is valid.
    pub message: String,
    /// The file of the artefact that is missing, where that is what is wrong.
    pub artefact: Option<&'static str>,
}

impl SpecError {
    pub(crate) fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), artefact: None }
    }
}

/// What reading a spec gives.
pub(crate) type SpecResult<T> = Result<T, SpecError>;

/// How a request is attended: a method for its prompt, a method for its generated tokens, and how much of both is
/// audited against dense attention.
///
/// Serialises to the wire's form with every default filled in.
#[derive(Debug, Clone, Serialize)]
#[serde(into = "Value")]
pub struct AttentionSpec {
    pub(crate) prefill: Chosen<dyn PrefillMethod>,
    pub(crate) decode: Chosen<dyn DecodeMethod>,
    pub(crate) question: Question,
    pub(crate) question_tokens: Option<usize>,
    pub(crate) audit: f64,
    pub(crate) trace: bool,
    pub(crate) speculate: Option<Speculate>,
}

/// How the prompt's last part, the question, is attended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// As the rest of the prompt.
    #[default]
    Prefill,
    /// Densely.
    Dense,
    /// By the decode method, every row as a step of its own.
    Decode,
}

/// A method of the registry with its parameters.
#[derive(Debug)]
pub(crate) struct Chosen<M: ?Sized> {
    pub name: &'static str,
    /// The wire's form, with defaults.
    pub json: Value,
    pub method: Arc<M>,
}

impl<M: ?Sized> Clone for Chosen<M> {
    fn clone(&self) -> Self {
        Self { name: self.name, json: self.json.clone(), method: self.method.clone() }
    }
}

impl Default for AttentionSpec {
    /// Dense for both phases, no audit.
    fn default() -> Self {
        Self::from_json(&json!({}), "attention", &Artifacts::default()).expect("the default is valid")
    }
}

impl From<AttentionSpec> for Value {
    fn from(spec: AttentionSpec) -> Self {
        let mut json = json!({
            "prefill": spec.prefill.json,
            "decode": spec.decode.json,
            "question": spec.question,
            "audit": spec.audit,
        });
        if let Some(tokens) = spec.question_tokens {
            json["question_tokens"] = json!(tokens);
        }
        if spec.trace {
            json["trace"] = json!(true);
        }
        if let Some(speculate) = spec.speculate {
            json["speculate"] = speculate.into();
        }
        json
    }
}

/// The fields of a request that speak of attention, as they came.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wire<'a> {
    /// The `attention` object.
    pub attention: Option<&'a Value>,
    /// Short form: vAttention's epsilon.
    pub epsilon: Option<&'a Value>,
    /// Short form: vAttention's delta.
    pub delta: Option<&'a Value>,
    /// Short form: Delta Attention's gamma.
    pub gamma: Option<&'a Value>,
}

impl AttentionSpec {
    /// The first layer in which the decode method chooses by the queries of the token before; none where it does not.
    pub fn ahead_from(&self) -> Option<usize> {
        self.decode.method.ahead().then(|| self.decode.method.dense_layers())
    }

    /// Reads `{ "prefill": {…}, "decode": {…}, "question": "decode", "audit": 0.01, "trace": true, "speculate": {
    /// "method": {…}, "tokens": 4, "choose": "round", "lookup": 3 } }`; what is absent is dense, nothing special, no
    /// audit, no trace, and no drafts.
    ///
    /// # Errors
    /// An unknown field or method, a value out of range, or an artefact that is not here; `path` is where the object
    /// stands in the request.
    pub fn from_json(value: &Value, path: &str, artifacts: &Artifacts) -> Result<Self, SpecError> {
        let fields = fields(value, path)?;
        let dense = json!({ "method": "dense" });
        let (prefill, decode) = (format!("{path}.prefill"), format!("{path}.decode"));
        let mut spec = Self {
            prefill: methods::prefill(fields.get("prefill").unwrap_or(&dense), &prefill, artifacts)?,
            decode: answers(fields.get("decode").unwrap_or(&dense), &decode, artifacts)?,
            question: Question::default(),
            question_tokens: None,
            audit: 0.0,
            trace: false,
            speculate: None,
        };
        spec.take(fields, path, artifacts)?;
        Ok(spec)
    }

    /// Takes over what an `attention` object at a path says besides its methods.
    fn take(&mut self, fields: &Map<String, Value>, path: &str, artifacts: &Artifacts) -> Result<(), SpecError> {
        if let Some(value) = fields.get("question") {
            self.question = question(value, path)?;
        }
        if let Some(tokens) = fields.get("question_tokens") {
            self.question_tokens = Some(question_tokens(tokens, path)?);
            if self.question == Question::Prefill {
                let message = "goes with `question`: \"dense\" or \"decode\"; without it the prompt's end is attended as the rest";
                return Err(SpecError::new(format!("{path}.question_tokens"), message));
            }
        }
        if let Some(audit) = fields.get("audit") {
            self.audit = audit_rate(audit, &format!("{path}.audit"))?;
        }
        if let Some(value) = fields.get("trace") {
            self.trace = trace(value, path)?;
        }
        if let Some(value) = fields.get("speculate") {
            self.speculate = Speculate::from_json(value, path, artifacts)?;
        }
        Ok(())
    }

    /// A request's spec: the server's preset, over it the `attention` object, over that the short forms.
    ///
    /// `epsilon` and `delta` choose vAttention for decode over the preset's parameters; `gamma` chooses Delta for
    /// prefill over the preset's base.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), and a short form that contradicts the object.
    pub fn resolve(preset: &Self, wire: &Wire, artifacts: &Artifacts) -> Result<Self, SpecError> {
        let mut spec = preset.clone();
        let nothing = Map::new();
        let object = wire.attention.map_or(Ok(&nothing), |value| fields(value, "attention"))?;
        spec.take(object, "attention", artifacts)?;
        let short = [("epsilon", wire.epsilon), ("delta", wire.delta)];
        let decode = merge("vattention", "decode", object.get("decode"), &spec.decode.json, &short, |_| json!({}))?;
        if let Some(decode) = decode {
            spec.decode = answers(&decode.0, &decode.1, artifacts).map_err(|e| to_short_form(e, &short, &decode.1))?;
        }
        let short = [("gamma", wire.gamma)];
        let over = |preset: &Value| match preset["method"].as_str() {
            Some("dense") => json!({}),
            _ => json!({ "base": preset }),
        };
        let prefill = merge("delta", "prefill", object.get("prefill"), &spec.prefill.json, &short, over)?;
        if let Some(prefill) = prefill {
            spec.prefill = methods::prefill(&prefill.0, &prefill.1, artifacts)
                .map_err(|e| to_short_form(e, &short, &prefill.1))?;
        }
        Ok(spec)
    }

    /// How many tokens of a prompt's end are the question; `found` says it where the request does not.
    ///
    /// # Errors
    /// More than the prompt has, or a number that is missing.
    pub fn question_of(&self, prompt: usize, found: impl FnOnce() -> Option<usize>) -> Result<usize, SpecError> {
        let error = |message: String| SpecError::new("attention.question_tokens", message);
        match (self.question, self.question_tokens) {
            (Question::Prefill, _) => Ok(0),
            (_, Some(tokens)) if tokens > prompt => {
                Err(error(format!("is {tokens}, but the prompt has {prompt} tokens")))
            }
            (_, Some(tokens)) => Ok(tokens),
            (_, None) => found().ok_or_else(|| {
                error("is missing: here attention.question needs it, since no message marks the question".into())
            }),
        }
    }

    /// Whether the request wants to see head by head and token by token what was read.
    pub fn traced(&self) -> bool {
        self.trace
    }

    /// Where drafts come from, if there are any.
    pub fn drafting(&self) -> Drafting {
        self.speculate.as_ref().map(Speculate::drafting).unwrap_or_default()
    }

    /// (prefill, decode): the names of the methods.
    pub fn names(&self) -> (&'static str, &'static str) {
        (self.prefill.name, self.decode.name)
    }
}

/// The method of generated tokens, with what goes without saying where it runs.
fn answers(value: &Value, path: &str, artifacts: &Artifacts) -> SpecResult<Chosen<dyn DecodeMethod>> {
    Ok(dense_below::by_default(methods::decode(value, path, artifacts)?, artifacts.dense_below()))
}

/// The fields of an `attention` object.
fn fields<'a>(value: &'a Value, path: &str) -> Result<&'a Map<String, Value>, SpecError> {
    let known = ["prefill", "decode", "question", "question_tokens", "audit", "trace", "speculate"];
    let Value::Object(fields) = value else {
        return Err(SpecError::new(path, format!("must be an object with any of {}", known.join(", "))));
    };
    if let Some(key) = fields.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(crate::schema::unknown_field(path, key, "attention", &known));
    }
    Ok(fields)
}

fn question(value: &Value, path: &str) -> Result<Question, SpecError> {
    match value.as_str() {
        Some("prefill") => Ok(Question::Prefill),
        Some("dense") => Ok(Question::Dense),
        Some("decode") => Ok(Question::Decode),
        _ => {
            let message = format!("must be one of \"prefill\", \"dense\", \"decode\"; got {value}");
            Err(SpecError::new(format!("{path}.question"), message))
        }
    }
}

fn question_tokens(value: &Value, path: &str) -> Result<usize, SpecError> {
    whole_number(value, (1, 1_048_576), || format!("{path}.question_tokens"))
}

/// A whole number in a range, however it is written.
pub(crate) fn whole_number(
    value: &Value,
    (least, most): (u64, u64),
    path: impl FnOnce() -> String,
) -> SpecResult<usize> {
    match value.as_f64() {
        Some(x) if x.fract() == 0.0 && (least as f64..=most as f64).contains(&x) => Ok(x as usize),
        _ => {
            let message = format!("must be a whole number at least {least} and at most {most}; got {value}");
            Err(SpecError::new(path(), message))
        }
    }
}

fn trace(value: &Value, path: &str) -> SpecResult<bool> {
    value
        .as_bool()
        .ok_or_else(|| SpecError::new(format!("{path}.trace"), format!("must be true or false; got {value}")))
}

fn audit_rate(value: &Value, path: &str) -> Result<f64, SpecError> {
    match value {
        Value::Bool(audit) => Ok(f64::from(u8::from(*audit))),
        Value::Number(n) if n.as_f64().is_some_and(|x| (0.0..=1.0).contains(&x)) => Ok(n.as_f64().unwrap_or(0.0)),
        other => Err(SpecError::new(
            path,
            format!("must be a share of tokens between 0 and 1, or true for all of them; got {other}"),
        )),
    }
}

/// One phase's method object and the path that errors should name: the request's own with short forms added, or the
/// preset's with short forms over it, or `None` where the request says nothing of the phase.
fn merge(
    method: &str,
    phase: &str,
    object: Option<&Value>,
    preset: &Value,
    short: &[(&str, Option<&Value>)],
    over: impl Fn(&Value) -> Value,
) -> Result<Option<(Value, String)>, SpecError> {
    let given: Vec<(&str, &Value)> = short.iter().filter_map(|(name, value)| Some((*name, (*value)?))).collect();
    let path = format!("attention.{phase}");
    let mut chosen = match object {
        Some(object) => methods::whole(object).into_owned(),
        None if given.is_empty() => return Ok(None),
        None if preset["method"] == method => preset.clone(),
        None => over(preset),
    };
    if given.is_empty() {
        return Ok(Some((chosen, path)));
    }
    if object.is_none() {
        chosen["method"] = json!(method);
    } else if chosen["method"] != method {
        let (name, _) = given[0];
        let message =
            format!("chooses {method} for {phase}, but {path} chooses {}; give one of them", chosen["method"]);
        return Err(SpecError::new(name, message));
    }
    for (name, value) in given {
        if object.is_some_and(|o| o.get(name).is_some_and(|v| v.as_f64() != value.as_f64())) {
            let message = format!("is {value}, but {path}.{name} is {}; give one of them", chosen[name]);
            return Err(SpecError::new(name, message));
        }
        chosen[name] = value.clone();
    }
    Ok(Some((chosen, path)))
}

/// An error at a parameter that came by a short form names the short form.
fn to_short_form(error: SpecError, short: &[(&str, Option<&Value>)], path: &str) -> SpecError {
    match short.iter().find(|(name, value)| value.is_some() && error.path == format!("{path}.{name}")) {
        Some((name, _)) => SpecError { path: (*name).to_owned(), ..error },
        None => error,
    }
}

#[cfg(test)]
mod tests;
