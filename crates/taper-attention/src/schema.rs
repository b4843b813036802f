//! Checks a JSON object against the JSON Schema of a parameter struct, so that the types alone say what is valid:
//! the schema is the API's documentation and the source of every message.

mod document;

use crate::amount::{AMOUNT, Amount};
use crate::spec::SpecError;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The JSON Schema of a parameter struct.
pub fn schema_of<P: JsonSchema>() -> Value {
    let settings = schemars::generate::SchemaSettings::draft2020_12().with(|s| {
        s.inline_subschemas = true;
        s.meta_schema = None;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<P>().to_value();
    if let Some(object) = schema.as_object_mut() {
        object.remove("title");
        object.entry("properties").or_insert_with(|| Value::Object(Map::new()));
    }
    schema
}

/// Checks `{ "method": name, …parameters }` against the struct's schema and reads it; absent parameters take their
/// defaults. Properties that hold methods are checked only for being objects.
pub fn parse<P: JsonSchema + DeserializeOwned>(name: &str, value: &Value, path: &str) -> Result<P, SpecError> {
    let Value::Object(fields) = value else { return Err(SpecError::new(path, "must be an object")) };
    let schema = schema_of::<P>();
    let properties = schema["properties"].as_object().cloned().unwrap_or_default();
    let mut parameters = Map::new();
    for (key, value) in fields.iter().filter(|(key, _)| *key != "method") {
        let Some(property) = properties.get(key) else {
            let known: Vec<&str> = properties.keys().map(String::as_str).collect();
            return Err(unknown_field(path, key, name, &known));
        };
        check(value, property, &format!("{path}.{key}"))?;
        let value = if property["type"] == "integer" { whole(value) } else { value.clone() };
        parameters.insert(key.clone(), value);
    }
    serde_json::from_value(Value::Object(parameters)).map_err(|e| SpecError::new(path, e.to_string()))
}

/// An unknown field, with the nearest known name if there is one.
pub fn unknown_field(path: &str, key: &str, owner: &str, known: &[&str]) -> SpecError {
    let takes = match known {
        [] => format!("{owner} takes no parameters"),
        known => format!("{owner} takes {}", known.join(", ")),
    };
    let hint = nearest(key, known).map_or(String::new(), |name| format!(", did you mean `{name}`?"));
    SpecError::new(format!("{path}.{key}"), format!("unknown field `{key}`{hint}; {takes}"))
}

/// The known name that a misspelt one is closest to, if any is close.
pub fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let distance = |k: &str| strsim::damerau_levenshtein(&lower, k);
    // One slip in a short name, two in a long one; a swap of neighbours is one slip.
    known.iter().copied().filter(|k| distance(k) <= ((k.len() + 1) / 4).max(1)).min_by_key(|k| distance(k))
}

/// A whole number as serde wants it: JSON Schema takes 16.0 for 16, and some clients write it.
fn whole(value: &Value) -> Value {
    match value.as_f64() {
        Some(x) if value.is_f64() => Value::from(x as u64),
        _ => value.clone(),
    }
}

fn check(value: &Value, schema: &Value, path: &str) -> Result<(), SpecError> {
    let fail = |expected: String| Err(SpecError::new(path, format!("must be {expected}; got {value}")));
    if let Some(choices) = choices(schema) {
        let listed = || choices.iter().map(|c| format!("\"{c}\"")).collect::<Vec<_>>().join(", ");
        let known = value.as_str().is_some_and(|v| choices.contains(&v));
        return if known { Ok(()) } else { fail(format!("one of {}", listed())) };
    }
    if let Some(numbers) = schema["enum"].as_array() {
        let known = numbers.iter().any(|n| n.as_f64() == value.as_f64());
        let listed: Vec<String> = numbers.iter().map(Value::to_string).collect();
        return if known { Ok(()) } else { fail(format!("one of {}", listed.join(", "))) };
    }
    if schema[AMOUNT] == true && !value.as_f64().is_some_and(Amount::is_valid) {
        return fail("a whole number of tokens up to 1048576, or a share of the context below 1".to_owned());
    }
    match schema["type"].as_str() {
        Some("integer") if value.as_f64().is_none_or(|x| x.fract() != 0.0) => {
            fail(format!("a whole number{}", range(schema)))
        }
        Some("integer" | "number") => {
            let within = value.as_f64().is_some_and(|x| in_range(x, schema));
            let kind = if schema["type"] == "integer" { "a whole number" } else { "a number" };
            if within { Ok(()) } else { fail(format!("{kind}{}", range(schema))) }
        }
        Some("boolean") if !value.is_boolean() => fail("true or false".to_owned()),
        Some("string") if !value.is_string() => fail("a string".to_owned()),
        Some("object") if !value.is_object() => fail("an object".to_owned()),
        _ => Ok(()),
    }
}

/// The values of a string enum, however the schema spells it.
fn choices(schema: &Value) -> Option<Vec<&str>> {
    if let Some(list) = schema["enum"].as_array() {
        return list.iter().map(Value::as_str).collect();
    }
    schema["oneOf"].as_array()?.iter().map(|one| one["const"].as_str()).collect()
}

fn in_range(x: f64, schema: &Value) -> bool {
    let bound = |key: &str| schema[key].as_f64();
    bound("minimum").is_none_or(|b| x >= b)
        && bound("maximum").is_none_or(|b| x <= b)
        && bound("exclusiveMinimum").is_none_or(|b| x > b)
        && bound("exclusiveMaximum").is_none_or(|b| x < b)
}

fn range(schema: &Value) -> String {
    let bounds = [
        ("minimum", "at least"),
        ("exclusiveMinimum", "greater than"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "less than"),
    ];
    let said: Vec<String> =
        bounds.iter().filter_map(|(key, words)| Some(format!("{words} {}", schema[*key].as_f64()?))).collect();
    if said.is_empty() { String::new() } else { format!(" {}", said.join(" and ")) }
}
