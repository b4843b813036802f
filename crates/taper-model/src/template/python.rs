//! Values in Python's spelling: templates were written against `str()` and `json.dumps`.

use super::meter::charge_deep;
use minijinja::formatting::FormatStyle;
use minijinja::value::{Kwargs, Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};
use std::collections::BTreeMap;
use std::fmt::Write;

/// `json.dumps`'s arguments.
pub(super) struct JsonStyle {
    pub(super) ascii: bool,
    pub(super) indent: Option<usize>,
    /// Between entries, and after a key.
    pub(super) separators: Option<Vec<String>>,
    pub(super) sorted: bool,
}

/// Prints a value where a template prints it.
pub(super) fn format(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    charge_deep(state, value, 0)?;
    out.write_str(&text(value)).map_err(|_| Error::new(ErrorKind::WriteFailure, "output"))
}

/// Python's `%` with a text on its left: one value, a tuple's, or a mapping's by their names.
pub(super) fn percent(format: &str, value: &Value) -> Result<Value, Error> {
    // Numbers are for the format to write; of the rest it knows no spelling but the engine's.
    let spelt = |value: Value| match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Seq | ValueKind::Map => Value::from(text(&value)),
        _ => value,
    };
    let args: Vec<Value> = if value.downcast_object_ref::<Tuple>().is_some() {
        value.try_iter()?.map(spelt).collect()
    } else if value.kind() == ValueKind::Map && format.contains("%(") {
        let entry = |key: Value| Ok((key.clone(), spelt(value.get_item(&key)?)));
        vec![Value::from(value.try_iter()?.map(entry).collect::<Result<BTreeMap<Value, Value>, Error>>()?)]
    } else {
        vec![spelt(value.clone())]
    };
    minijinja::formatting::format(FormatStyle::Printf, format, &args).map(Value::from)
}

/// The `join` filter: of texts as `str()` has them, or of those of an attribute.
pub(super) fn join(
    state: &mut State<'_, '_>,
    value: &Value,
    between: Option<Value>,
    attribute: Option<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let between = between.or(named.get("d")?).filter(|between| !between.is_none());
    let attribute = attribute.or(named.get("attribute")?).filter(|attribute| !attribute.is_none());
    named.assert_all_used()?;
    let items = match attribute {
        Some(attribute) => {
            let attribute = Value::from(Kwargs::from_iter([("attribute", attribute)]));
            state.apply_filter("map", &[value.clone(), attribute])?
        }
        None => value.clone(),
    };
    let parts: Vec<String> = match items.as_str() {
        Some(text) => text.chars().map(String::from).collect(),
        None => items.try_iter()?.map(|item| text(&item)).collect(),
    };
    Ok(parts.join(&between.as_ref().map(text).unwrap_or_default()))
}

/// A value as `str()` has it.
pub(super) fn text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Seq | ValueKind::Map => {
            // What JSON cannot hold, such as a macro, prints as the engine would.
            match serde_json::to_value(value) {
                Ok(value) => repr(&value),
                Err(_) => value.to_string(),
            }
        }
        _ => value.to_string(),
    }
}

/// The `tojson` filter.
pub(super) fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let style = super::json_style(&kwargs)?;
    let value =
        serde_json::to_value(value).map_err(|e| Error::new(ErrorKind::BadSerialization, "tojson").with_source(e))?;
    let (item, key) = match &style.separators {
        Some(pair) if pair.len() == 2 => (pair[0].clone(), pair[1].clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be two strings")),
        // Python drops the space where a line break follows.
        None => (if style.indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer { out: String::new(), style: &style, item, key };
    writer.write(&value, 0);
    Ok(Value::from_safe_string(writer.out))
}

struct Writer<'a> {
    out: String,
    style: &'a JsonStyle,
    item: String,
    key: String,
}

impl Writer<'_> {
    fn write(&mut self, value: &serde_json::Value, depth: usize) {
        match value {
            serde_json::Value::Null => self.out.push_str("null"),
            serde_json::Value::Bool(b) => self.out.push_str(if *b { "true" } else { "false" }),
            serde_json::Value::Number(n) => self.out.push_str(&number(n)),
            serde_json::Value::String(s) => self.string(s),
            serde_json::Value::Array(items) => {
                self.list('[', ']', items.iter(), depth, |writer, item| writer.write(item, depth + 1));
            }
            serde_json::Value::Object(map) => {
                let mut entries: Vec<(&String, &serde_json::Value)> = map.iter().collect();
                if self.style.sorted {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.list('{', '}', entries.into_iter(), depth, |writer, (key, value)| {
                    writer.string(key);
                    writer.out.push_str(&writer.key.clone());
                    writer.write(value, depth + 1);
                });
            }
        }
    }

    fn list<T>(
        &mut self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        each: impl Fn(&mut Self, T),
    ) {
        self.out.push(open);
        let empty = items.len() == 0;
        for (i, item) in items.enumerate() {
            if i > 0 {
                self.out.push_str(&self.item.clone());
            }
            self.line(depth + 1);
            each(self, item);
        }
        if !empty {
            self.line(depth);
        }
        self.out.push(close);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || self.style.ascii && !c.is_ascii() => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        // Writing to a string cannot fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python's `repr` of what JSON can hold.
fn repr(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => "None".to_owned(),
        serde_json::Value::Bool(b) => if *b { "True" } else { "False" }.to_owned(),
        serde_json::Value::Number(n) => number(n),
        serde_json::Value::String(s) => {
            let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
            let mut out = String::from(quote);
            for character in s.chars() {
                match character {
                    '\\' => out.push_str("\\\\"),
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    c if c == quote => out.extend(['\\', c]),
                    c => out.push(c),
                }
            }
            out.push(quote);
            out
        }
        serde_json::Value::Array(items) => {
            format!("[{}]", items.iter().map(repr).collect::<Vec<_>>().join(", "))
        }
        serde_json::Value::Object(map) => {
            let entry = |(key, value): (&String, &serde_json::Value)| {
                format!("{}: {}", repr(&serde_json::Value::String(key.clone())), repr(value))
            };
            format!("{{{}}}", map.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Python's spelling of a number: floats in the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn number(number: &serde_json::Number) -> String {
    let Some(float) = number.as_f64().filter(|_| number.is_f64()) else { return number.to_string() };
    let scientific = format!("{float:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if float != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ if float.fract() == 0.0 => format!("{float:.1}"),
        _ => format!("{float}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_read_as_python_prints_them() {
        for (value, text) in [
            (json!(1), "1"),
            (json!(1.0), "1.0"),
            (json!(0.1), "0.1"),
            (json!(-2.5), "-2.5"),
            (json!(1e16), "1e+16"),
            (json!(123456789012345.0), "123456789012345.0"),
            (json!(0.0001), "0.0001"),
            (json!(0.00001), "1e-05"),
            (json!(1.5e-7), "1.5e-07"),
            (json!(0.0), "0.0"),
        ] {
            let serde_json::Value::Number(n) = value else { panic!("a number") };
            assert_eq!(number(&n), text);
        }
    }

    #[test]
    fn lists_and_texts_read_as_python_prints_them() {
        let value = json!({"a": [1, true, null], "b": "it's", "c": "say \"it's\""});
        assert_eq!(repr(&value), r#"{'a': [1, True, None], 'b': "it's", 'c': 'say "it\'s"'}"#);
    }
}
