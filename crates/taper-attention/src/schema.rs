//! Checks a JSON object against the JSON Schema of a parameter struct, so that the types alone say what is valid:
//! the schema is the API's documentation and the source of every message.

mod document;

use crate::amount::{AMOUNT, AUTO, Amount};
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

/// Checks `{ "method": name, …parameters }` against a schema of the parameters: their names, and what each is. Properties that
/// hold methods are left to who reads those.
pub fn check_parameters(name: &str, fields: &Map<String, Value>, schema: &Value, path: &str) -> Result<(), SpecError> {
    let empty = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&empty);
    for (key, value) in fields.iter().filter(|(key, _)| *key != "method") {
        let Some(property) = properties.get(key) else {
            let known: Vec<&str> = properties.keys().map(String::as_str).collect();
            return Err(unknown_field(path, key, name, &known));
        };
        check(value, property, &format!("{path}.{key}"))?;
    }
    Ok(())
}

/// Reads a parameter struct from what was [checked](check_parameters); absent parameters take their defaults, and what is none
/// of the struct's is left out.
pub fn parse<P: JsonSchema + DeserializeOwned>(value: &Value, path: &str) -> Result<P, SpecError> {
    let schema = schema_of::<P>();
    let properties = schema["properties"].as_object().into_iter().flatten();
    let given = properties.filter_map(|(key, property)| Some((key.clone(), whole(value.get(key)?, property))));
    serde_json::from_value(Value::Object(given.collect())).map_err(|e| SpecError::new(path, e.to_string()))
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

/// Bytes of the longest name that is compared with known ones: the time that it takes grows with them, and requests choose them.
const NAME_BYTES: usize = 64;

/// The known name that a misspelt one is closest to, if any is close.
pub fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    if name.len() > NAME_BYTES {
        return None;
    }
    let lower = name.to_lowercase();
    let distance = |k: &str| strsim::damerau_levenshtein(&lower, k);
    // One slip in a short name, two in a long one; a swap of neighbours is one slip.
    known.iter().copied().filter(|k| distance(k) <= ((k.len() + 1) / 4).max(1)).min_by_key(|k| distance(k))
}

/// Whole numbers as serde wants them: JSON Schema takes 16.0 for 16, and some clients write it.
fn whole(value: &Value, schema: &Value) -> Value {
    match value {
        Value::Number(x) if x.is_f64() && schema["type"] == "integer" => {
            x.as_f64().map_or(value.clone(), |x| Value::from(x as u64))
        }
        Value::Array(items) => items.iter().map(|item| whole(item, &schema["items"])).collect(),
        Value::Object(fields) if schema["properties"].is_object() => {
            let of = |(key, value): (&String, &Value)| (key.clone(), whole(value, &schema["properties"][key]));
            Value::Object(fields.iter().map(of).collect())
        }
        _ => value.clone(),
    }
}

fn check(value: &Value, schema: &Value, path: &str) -> Result<(), SpecError> {
    let fail = |expected: String| Err(SpecError::new(path, format!("must be {expected}; got {value}")));
    if let Some(choices) = choices(schema) {
        // Whole numbers may be written with a point.
        let is = |choice: &Value| choice == value || choice.is_number() && choice.as_f64() == value.as_f64();
        return if choices.iter().any(is) { Ok(()) } else { fail(listed(&choices)) };
    }
    let auto = schema[AMOUNT] == AUTO;
    let amount = auto || schema[AMOUNT] == true;
    // Who goes through shares up to all would read a single token.
    if amount && value.is_f64() && value.as_f64() == Some(1.0) {
        return fail("a share of the context below 1, or 1, without a point, for one token".into());
    }
    if amount && !(auto && value == AUTO || value.as_f64().is_some_and(Amount::is_valid)) {
        let or = if auto { ", or \"auto\"" } else { "" };
        return fail(format!("a whole number of tokens up to 1048576, or a share of the context below 1{or}"));
    }
    match schema["type"].as_str() {
        Some("integer") if value.as_f64().is_none_or(|x| x.fract() != 0.0) => {
            fail(format!("a whole number{}", range(schema)))
        }
        Some("integer" | "number") => {
            let within = value.as_f64().is_some_and(|x| in_range(x, schema));
            let multiple = schema["multipleOf"].as_f64();
            let within = within && multiple.is_none_or(|of| value.as_f64().is_some_and(|x| x % of == 0.0));
            let kind = match multiple {
                Some(of) => &format!("a multiple of {of}"),
                None if schema["type"] == "integer" => "a whole number",
                None => "a number",
            };
            if within { Ok(()) } else { fail(format!("{kind}{}", range(schema))) }
        }
        Some("boolean") if !value.is_boolean() => fail("true or false".to_owned()),
        Some("string") if !value.is_string() => fail("a string".to_owned()),
        Some("object") if !value.is_object() => fail("an object".to_owned()),
        Some("object") if schema["properties"].is_object() => fields(value, schema, path),
        Some("array") => {
            let (least, most) = (schema["minItems"].as_u64().unwrap_or(0), schema["maxItems"].as_u64());
            match value.as_array() {
                Some(list) if list.len() as u64 >= least && most.is_none_or(|most| list.len() as u64 <= most) => {
                    let mut items = list.iter().enumerate();
                    items.try_for_each(|(i, item)| check(item, &schema["items"], &format!("{path}[{i}]")))
                }
                _ => fail(format!(
                    "a list of {least} to {} items",
                    most.map_or("any number of".into(), |m| m.to_string())
                )),
            }
        }
        _ => Ok(()),
    }
}

/// The fields of an object within a parameter: all of them, and no others.
fn fields(value: &Value, schema: &Value, path: &str) -> Result<(), SpecError> {
    let (Some(fields), Some(known)) = (value.as_object(), schema["properties"].as_object()) else { return Ok(()) };
    let names: Vec<&str> = known.keys().map(String::as_str).collect();
    if let Some(missing) = names.iter().find(|name| !fields.contains_key(**name)) {
        return Err(SpecError::new(format!("{path}.{missing}"), format!("is missing; expected {}", names.join(", "))));
    }
    for (key, value) in fields {
        let field = known.get(key).ok_or_else(|| unknown_field(path, key, "it", &names))?;
        check(value, field, &format!("{path}.{key}"))?;
    }
    Ok(())
}

/// The values of an enum, however the schema spells it.
fn choices(schema: &Value) -> Option<Vec<Value>> {
    match schema["enum"].as_array() {
        Some(list) => Some(list.clone()),
        None => schema["oneOf"].as_array()?.iter().map(|one| one.get("const").cloned()).collect(),
    }
}

fn listed(choices: &[Value]) -> String {
    format!("one of {}", choices.iter().map(Value::to_string).collect::<Vec<_>>().join(", "))
}

/// What a parameter may be, in words, where its schema bounds it.
pub fn valid_values(schema: &Value) -> Option<String> {
    match choices(schema) {
        Some(choices) => Some(listed(&choices)),
        None => Some(range(schema).trim_start().to_owned()).filter(|range| !range.is_empty()),
    }
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
