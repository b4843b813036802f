//! Attention methods as an evaluation names them.

use crate::error::EvalError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_attention::{Artifacts, AttentionSpec};

/// The half of a request that a method attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The prompt.
    Prefill,
    /// The generated tokens.
    Decode,
}

impl Phase {
    /// The name on the wire: `prefill` or `decode`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A method with its parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Method {
    /// For tables: the method and the parameters that were given.
    pub label: String,
    /// The wire's form, with every default; what tells methods apart.
    pub spec: Value,
}

impl Method {
    /// Reads a method as a request has it, such as `{"method": "streaming_llm", "window": 512}` or `"dense"`.
    ///
    /// # Errors
    /// [`EvalError::Method`] with the parameter at fault and what is valid, or [`EvalError::Artefact`].
    pub fn read(phase: Phase, value: &Value, artifacts: &Artifacts) -> Result<Self, EvalError> {
        let spec = attention(&json!({ phase.name(): value }), artifacts)?;
        let Value::Object(mut whole) = Value::from(spec) else {
            return Err(EvalError::Method { path: phase.name().into(), message: "is no object".into() });
        };
        let spec = whole.remove(phase.name()).unwrap_or_default();
        Ok(Self { label: label(value), spec })
    }

    /// The spec of a sequence; `rest` holds the fields of a request's `attention` beside the methods.
    ///
    /// # Errors
    /// As of [`read`](Self::read), for a method that was not read or a field of the rest.
    pub fn pair(
        prefill: &Self,
        decode: &Self,
        rest: &Value,
        artifacts: &Artifacts,
    ) -> Result<Arc<AttentionSpec>, EvalError> {
        let mut value = rest.clone();
        value["prefill"] = prefill.spec.clone();
        value["decode"] = decode.spec.clone();
        attention(&value, artifacts).map(Arc::new)
    }
}

fn attention(value: &Value, artifacts: &Artifacts) -> Result<AttentionSpec, EvalError> {
    AttentionSpec::from_json(value, "attention", artifacts).map_err(|error| {
        let (path, message) = (error.path.trim_start_matches("attention.").to_owned(), error.message);
        match error.artefact {
            None => EvalError::Method { path, message },
            Some(_) => EvalError::Artefact { path, message },
        }
    })
}

/// `delta gamma=64 base=(streaming_llm window=512)`.
fn label(value: &Value) -> String {
    let Value::Object(fields) = value else { return value.as_str().map_or_else(|| value.to_string(), str::to_owned) };
    let name = fields.get("method").and_then(Value::as_str).unwrap_or("?");
    let parts = fields.iter().filter(|(key, _)| *key != "method").map(|(key, value)| match value {
        Value::Object(_) => format!(" {key}=({})", label(value)),
        Value::String(text) => format!(" {key}={text}"),
        other => format!(" {key}={other}"),
    });
    name.to_owned() + &parts.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(phase: Phase, value: Value) -> Result<Method, EvalError> {
        Method::read(phase, &value, &Artifacts::default())
    }

    #[test]
    fn a_method_keeps_its_defaults_and_shows_what_was_given() {
        let value = json!({ "method": "delta", "gamma": 32, "base": { "method": "streaming_llm", "window": 512 } });
        let method = read(Phase::Prefill, value).unwrap();
        assert_eq!(method.label, "delta gamma=32 base=(streaming_llm window=512)");
        assert_eq!(method.spec["base"]["sink"], 4);
        let given =
            json!({ "method": "delta", "gamma": 32, "base": { "method": "streaming_llm", "window": 512, "sink": 4 } });
        assert_eq!(read(Phase::Prefill, given).unwrap().spec, method.spec);
        let dense = read(Phase::Decode, json!({ "method": "dense" })).unwrap();
        let pair = Method::pair(&method, &dense, &json!({ "audit": 0.5 }), &Artifacts::default()).unwrap();
        assert_eq!(pair.names(), ("delta", "dense"));
    }

    #[test]
    fn mistakes_name_the_parameter() {
        let error = |phase, value| read(phase, value).unwrap_err().to_string();
        let bad = error(Phase::Decode, json!({ "method": "streaming_llm", "window": 0 }));
        assert!(bad.starts_with("decode.window: "), "{bad}");
        assert!(error(Phase::Prefill, json!({ "method": "vattention" })).starts_with("prefill.method: "));
        assert_eq!(read(Phase::Prefill, json!("dense")).unwrap().label, "dense");
        assert!(error(Phase::Prefill, json!("no_such")).starts_with("prefill"));
        assert!(error(Phase::Prefill, json!(7)).starts_with("prefill: "));
    }
}
