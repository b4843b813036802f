//! Typed, ranged reading of a JSON object's fields; each read field is ticked off, so that the rest are the unknown
//! ones.

use crate::error::ApiError;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

type Result<T> = std::result::Result<T, ApiError>;

/// The fields of one object. `null` counts as absent, as OpenAI's clients expect.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// What stands before a field's name in errors: empty, or `stream_options.`.
    prefix: String,
    seen: BTreeSet<&'static str>,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>, prefix: &str) -> Self {
        Self { map, prefix: prefix.to_string(), seen: BTreeSet::new() }
    }

    /// The field's path for errors.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A field's value, whoever reads it.
    pub(crate) fn peek(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name)
    }

    /// A field of any type.
    pub(crate) fn get(&mut self, name: &'static str) -> Option<&'a Value> {
        self.seen.insert(name);
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// Fields that nothing has read.
    pub(crate) fn unread(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str).filter(|name| !self.seen.contains(name))
    }

    /// Refuses what nothing has read: in an object of a few fields it is misspelt.
    pub(crate) fn finish(&self) -> Result<()> {
        let Some(name) = self.unread().find(|name| !self.map[*name].is_null()) else { return Ok(()) };
        let path = self.path(name);
        let known: Vec<&str> = self.seen.iter().copied().collect();
        Err(ApiError::invalid(&path, format!("{path} is not known; known: {}", known.join(", "))))
    }

    fn wrong(&self, name: &str, wanted: &str, value: &Value) -> ApiError {
        let path = self.path(name);
        ApiError::invalid(&path, format!("{path} must be {wanted}, not {}", brief(value)))
    }

    pub(crate) fn bool(&mut self, name: &'static str) -> Result<Option<bool>> {
        self.get(name).map(|v| v.as_bool().ok_or_else(|| self.wrong(name, "true or false", v))).transpose()
    }

    pub(crate) fn text(&mut self, name: &'static str) -> Result<Option<&'a str>> {
        self.get(name).map(|v| v.as_str().ok_or_else(|| self.wrong(name, "a string", v))).transpose()
    }

    /// A whole number in a range.
    pub(crate) fn int(&mut self, name: &'static str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        // Some clients write 16.0 for 16.
        let whole = value.as_i64().or_else(|| {
            let float = value.as_f64()?;
            (float.fract() == 0.0 && float.abs() < 9e15).then_some(float as i64)
        });
        let wanted = match (*range.start(), *range.end()) {
            (i64::MIN, i64::MAX) => "an integer of 64 bits".to_string(),
            (start, i64::MAX) => format!("an integer of at least {start}"),
            (start, end) => format!("an integer in [{start}, {end}]"),
        };
        match whole.filter(|n| range.contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong(name, &wanted, value)),
        }
    }

    /// A whole number of 64 bits, signed or not; a negative one becomes what it is modulo 2^64, and -1 is none, as in vLLM and
    /// llama.cpp.
    pub(crate) fn seed(&mut self, name: &'static str) -> Result<Option<u64>> {
        let seed = match self.get(name).and_then(Value::as_u64) {
            None => self.int(name, i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
            seed => seed,
        };
        Ok(seed.filter(|&seed| seed != u64::MAX))
    }

    /// A number for which `valid` holds; `range` says in words when it does.
    pub(crate) fn number(
        &mut self,
        name: &'static str,
        range: &str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f32>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_f64().filter(|&n| valid(n)) {
            Some(n) => Ok(Some(n as f32)),
            None => Err(self.wrong(name, &format!("a number in {range}"), value)),
        }
    }

    pub(crate) fn object(&mut self, name: &'static str) -> Result<Option<&'a Map<String, Value>>> {
        self.get(name).map(|v| v.as_object().ok_or_else(|| self.wrong(name, "an object", v))).transpose()
    }

    pub(crate) fn array(&mut self, name: &'static str) -> Result<Option<&'a Vec<Value>>> {
        self.get(name).map(|v| v.as_array().ok_or_else(|| self.wrong(name, "an array", v))).transpose()
    }
}

/// The number that people wrote: 0.9 rather than 0.8999999761581421.
pub(crate) fn exact(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(x.into())
}

/// A value in an error message: short, and never a whole prompt.
pub(crate) fn brief(value: &Value) -> String {
    match value {
        Value::String(s) if s.chars().count() > 40 => {
            format!("{:?}…", s.chars().take(40).collect::<String>())
        }
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
        other => other.to_string(),
    }
}
