//! What a request says of drafts: tokens guessed ahead of its answer, which its own method takes or leaves. The answer is
//! the same, and may come sooner.

use crate::artifacts::Artifacts;
use crate::method::DecodeMethod;
use crate::methods;
use crate::spec::{Chosen, SpecError, SpecResult, whole_number};
use serde::Serialize;
use serde_json::{Value, json};

/// Where a request's drafts come from, as it says.
#[derive(Debug, Clone)]
pub(crate) struct Speculate {
    /// What attends for drafts; `None` where all are looked up.
    pub method: Option<Chosen<dyn DecodeMethod>>,
    /// Tokens drafted at a time, at most.
    pub tokens: usize,
    /// How often the method's drafts choose.
    pub choose: Choose,
    /// As [`Drafting::lookup`].
    pub lookup: usize,
}

/// How often drafts choose what they read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Choose {
    /// Every one afresh.
    Token,
    /// The first after a check, for all up to the next: they read what it chose and all tokens since.
    #[default]
    Round,
}

/// Where drafts come from, without the method that attends for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafting {
    /// Tokens drafted at a time, at most; 0 where none are.
    pub tokens: usize,
    /// How many tokens at the text's end must stand in it before for what follows there to be drafted; 0 where nothing is
    /// looked up.
    pub lookup: usize,
    /// Whether a method drafts where nothing is looked up or found.
    pub by_method: bool,
}

/// Most tokens drafted at a time.
pub(crate) const MOST_DRAFTS: u64 = 15;
/// Most tokens that a request may want to be the same before it takes what followed them.
pub(crate) const MOST_LOOKUP: u64 = 64;

impl Speculate {
    /// Reads `{ "method": {…}, "tokens": 4, "choose": "round", "lookup": 3 }`, of which `method` or `lookup` must be there,
    /// or null.
    pub fn from_json(value: &Value, path: &str, artifacts: &Artifacts) -> SpecResult<Option<Self>> {
        let path = format!("{path}.speculate");
        let example =
            "an object such as {\"method\": {\"method\": \"quest\"}, \"tokens\": 4} or {\"lookup\": 3}, or null";
        let fields = match value {
            Value::Null => return Ok(None),
            Value::Object(fields) => fields,
            other => return Err(SpecError::new(path, format!("must be {example}; got {other}"))),
        };
        let known = ["method", "tokens", "choose", "lookup"];
        if let Some(key) = fields.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(crate::schema::unknown_field(&path, key, "speculate", &known));
        }
        let at = |field: &str| format!("{path}.{field}");
        let whole = |field: &str, range, default| {
            fields.get(field).map_or(Ok(default), |value| whole_number(value, range, || at(field)))
        };
        let method =
            fields.get("method").map(|method| methods::decode(method, &at("method"), artifacts)).transpose()?;
        let (tokens, lookup) = (whole("tokens", (1, MOST_DRAFTS), 4)?, whole("lookup", (0, MOST_LOOKUP), 0)?);
        if method.is_none() && lookup == 0 {
            let message = format!("is missing, and nothing is looked up; speculate must be {example}");
            return Err(SpecError::new(at("method"), message));
        }
        let choose = match fields.get("choose").map(|choose| (choose.as_str(), choose)) {
            None => Choose::default(),
            Some((Some("token"), _)) => Choose::Token,
            Some((Some("round"), _)) => Choose::Round,
            Some((_, other)) => {
                return Err(SpecError::new(at("choose"), format!("must be one of \"token\", \"round\"; got {other}")));
            }
        };
        Ok(Some(Self { method, tokens, choose, lookup }))
    }

    pub fn drafting(&self) -> Drafting {
        Drafting { tokens: self.tokens, lookup: self.lookup, by_method: self.method.is_some() }
    }
}

impl From<Speculate> for Value {
    fn from(speculate: Speculate) -> Self {
        let Speculate { method, tokens, choose, lookup } = speculate;
        let mut json = json!({ "tokens": tokens, "lookup": lookup });
        if let Some(method) = method {
            json["method"] = method.json;
            json["choose"] = json!(choose);
        }
        json
    }
}
