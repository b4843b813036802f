//! What is refused before it is compiled, since it would take the compiler too long, too deep, or all memory.

use super::{GrammarError, Shape};
use serde_json::Value;
use std::collections::HashMap;

/// Most bytes of a grammar, schemas of other authors included.
const BYTES: usize = 256 << 10;
/// Most bytes of one regular expression: compiling takes memory with their square.
const EXPRESSION: usize = 16 << 10;
/// Most references of a schema to its parts, and rules of a grammar: each may lead to the next, and compiling follows them.
const REFERENCES: usize = 1000;
/// Most patterns of names in a schema: each is compared with every other.
const NAMES: usize = 64;
/// Most patterns and formats that one text has to fit at once, by `allOf` or by `&`: whether any text fits is found by
/// trying, and each one more takes four times as long and as much memory.
const TOGETHER: usize = 8;
/// Parts of a schema that are looked at to find those, and references that are followed into one another.
const VISITS: usize = 100_000;
const DEPTH: usize = 16;

/// Fails with what there is too much of.
pub(super) fn check(shape: &Shape) -> Result<(), GrammarError> {
    let mut found = Found::default();
    match shape {
        Shape::Json(schema) => {
            found.schema(schema);
            found.bytes = schema.to_string().len();
        }
        Shape::Regex(pattern) => (found.bytes, found.expression) = (pattern.len(), pattern.len()),
        Shape::Choice(texts) => found.bytes = texts.iter().map(|text| text.len() + 4).sum(),
        Shape::Lark(grammar) => found.lark(grammar),
    }
    for (number, most, what) in [
        (found.names, NAMES, "patternProperties"),
        (found.bytes, BYTES, "bytes"),
        (found.expression, EXPRESSION, "bytes in one regular expression"),
        (found.references, REFERENCES, "references or rules"),
        (found.together, TOGETHER, "patterns that one text must fit"),
        (found.visits, VISITS, "parts of `allOf`"),
    ] {
        if number > most {
            return Err(GrammarError(format!("has {number} {what}; at most {most} are taken")));
        }
    }
    Ok(())
}

/// How much there is of what takes long.
#[derive(Default)]
struct Found {
    bytes: usize,
    /// Of the longest regular expression.
    expression: usize,
    references: usize,
    names: usize,
    together: usize,
    visits: usize,
}

impl Found {
    fn schema(&mut self, schema: &Value) {
        self.count(schema);
        self.meetings(schema, schema);
    }

    /// Counts references, patterns of names, and the longest pattern.
    fn count(&mut self, schema: &Value) {
        match schema {
            Value::Object(map) => {
                for (key, value) in map {
                    self.references += usize::from(matches!(key.as_str(), "$ref" | "$dynamicRef"));
                    let length = |pattern: &str| pattern.len();
                    self.expression = self.expression.max(match (key.as_str(), value) {
                        ("pattern", Value::String(pattern)) => length(pattern),
                        ("patternProperties", Value::Object(names)) => {
                            self.names += names.len();
                            names.keys().map(|name| length(name)).max().unwrap_or(0)
                        }
                        _ => 0,
                    });
                    self.count(value);
                }
            }
            Value::Array(list) => list.iter().for_each(|value| self.count(value)),
            _ => {}
        }
    }

    /// Finds every `allOf` that stands in no other.
    fn meetings(&mut self, schema: &Value, root: &Value) {
        match schema {
            Value::Object(map) if map.contains_key("allOf") => {
                let mut meeting = Meeting { root, place: String::new(), at: HashMap::new(), visits: self.visits };
                meeting.visit(schema, 0);
                self.visits = meeting.visits;
                self.together = self.together.max(meeting.at.into_values().max().unwrap_or(0));
            }
            Value::Object(map) => map.values().for_each(|value| self.meetings(value, root)),
            Value::Array(list) => list.iter().for_each(|value| self.meetings(value, root)),
            _ => {}
        }
    }

    /// A grammar in Lark's format.
    fn lark(&mut self, grammar: &str) {
        // Colons in JSON stand after a name in quotes, those of rules do not.
        let rules = |text: &str| text.matches(':').count() - text.matches("\":").count();
        self.references += rules(grammar);
        for rule in grammar.split("%json").skip(1) {
            let mut schemas = serde_json::Deserializer::from_str(rule).into_iter::<Value>();
            if let Some(Ok(schema)) = schemas.next() {
                if schema.is_object() {
                    // Nor are those within its texts rules. Nothing that is one can stand in an object: a rule is no JSON.
                    self.references -= rules(&rule[..schemas.byte_offset()]);
                }
                let mut own = Self::default();
                own.schema(&schema);
                self.references += own.references;
                self.names = self.names.max(own.names);
                self.expression = self.expression.max(own.expression);
                self.together = self.together.max(own.together);
                self.visits += own.visits;
            }
        }
        self.bytes = grammar.len();
        let (ands, longest) = operators(grammar);
        self.together = self.together.max(ands + usize::from(ands > 0));
        self.expression = self.expression.max(longest);
    }
}

/// The patterns and formats that each place of a value is held to by a schema, whichever of its branches.
struct Meeting<'a> {
    root: &'a Value,
    place: String,
    at: HashMap<String, usize>,
    visits: usize,
}

impl Meeting<'_> {
    fn visit(&mut self, schema: &Value, depth: usize) {
        self.visits += 1;
        match schema {
            _ if self.visits > VISITS => {}
            Value::Array(list) => list.iter().for_each(|part| self.visit(part, depth)),
            Value::Object(map) => map.iter().for_each(|(key, value)| self.keyword(key, value, depth)),
            _ => {}
        }
    }

    fn keyword(&mut self, key: &str, value: &Value, depth: usize) {
        match (key, value) {
            ("pattern" | "format", Value::String(_)) => *self.at.entry(self.place.clone()).or_default() += 1,
            ("$ref", Value::String(target)) if depth < DEPTH => {
                if let Some(part) = target.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer)) {
                    self.visit(part, depth + 1);
                }
            }
            ("properties" | "patternProperties", Value::Object(parts)) => {
                parts.iter().for_each(|(name, part)| self.within(name, part, depth));
            }
            ("items" | "prefixItems" | "additionalProperties" | "contains", part) => self.within("*", part, depth),
            ("propertyNames", part) => self.within("name", part, depth),
            ("$defs" | "definitions" | "const" | "default" | "enum" | "examples", _) => {}
            (_, part) => self.visit(part, depth),
        }
    }

    /// A part of the value at this place.
    fn within(&mut self, step: &str, part: &Value, depth: usize) {
        let length = self.place.len();
        self.place.push('/');
        self.place.push_str(step);
        self.visit(part, depth);
        self.place.truncate(length);
    }
}

/// How many `&` of a grammar stand outside of texts and regular expressions, and how long the longest of those is.
fn operators(grammar: &str) -> (usize, usize) {
    let (mut ands, mut longest, mut rest) = (0, 0, grammar.chars().peekable());
    while let Some(c) = rest.next() {
        match c {
            '&' => ands += 1,
            '/' if rest.peek() == Some(&'/') => drop(rest.find(|&c| c == '\n')),
            '"' | '/' => {
                let mut length = 0;
                while let Some(inside) = rest.next().filter(|&inside| inside != c) {
                    length += inside.len_utf8();
                    if inside == '\\' {
                        length += rest.next().map_or(0, char::len_utf8);
                    }
                }
                longest = if c == '/' { longest.max(length) } else { longest };
            }
            _ => {}
        }
    }
    (ands, longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn together(schema: &Value) -> usize {
        let mut found = Found::default();
        found.schema(schema);
        found.together
    }

    #[test]
    fn patterns_that_meet_are_counted_by_the_place_of_a_value() {
        let text = json!({ "type": "string", "pattern": "a" });
        let named = |names: &[&str]| -> Value {
            let parts = names.iter().map(|name| (name.to_string(), text.clone()));
            json!({ "properties": parts.collect::<serde_json::Map<_, _>>() })
        };
        for (schema, found) in [
            (named(&["a", "b", "c"]), 0),
            (json!({ "allOf": [named(&["a", "b", "c", "d"]), named(&["e", "f", "g"])] }), 1),
            (json!({ "allOf": [named(&["a", "b"]), named(&["b", "c"])] }), 2),
            (json!({ "allOf": [text, text, { "allOf": [text, { "format": "date" }] }], "pattern": "b" }), 5),
            (json!({ "items": { "allOf": [{ "items": text }, { "items": text }] } }), 2),
            (json!({ "$defs": { "t": { "allOf": [text, text] } }, "allOf": [{ "$ref": "#/$defs/t" }, text] }), 3),
            (json!({ "$defs": { "t": { "allOf": [{ "$ref": "#/$defs/t" }, text] } }, "$ref": "#/$defs/t" }), DEPTH + 1),
            (json!({ "allOf": [{ "const": { "pattern": "a" } }, text] }), 1),
        ] {
            assert_eq!(together(&schema), found, "{schema}");
        }
    }

    #[test]
    fn operators_are_those_outside_of_texts_and_expressions() {
        let grammar = r#"start: A & B | "a & \" & b" // c & "d
            A: /x&\/&y/ & /z/"#;
        assert_eq!(operators(grammar), (2, 6));
        assert_eq!(operators("start: \"a"), (0, 0));
    }

    #[test]
    fn colons_within_schemas_are_no_rules() {
        let of = |grammar: &str| {
            let mut found = Found::default();
            found.lark(grammar);
            found.references
        };
        let schema = json!({ "description": "e.g. 10:00:00Z, \"a:b\": \u{3a}", "$ref": "#/x:y", "pattern": "(?:a:b)" });
        assert_eq!(of(&format!("start: a | b\na: %json {schema}\nb: \"x\"\n")), 3 + 1);
        assert_eq!(of("start: a\na: %json {\n"), 2, "no JSON");
        // What only looks like a schema hides nothing.
        assert_eq!(of("start: A\nA: (/z/ | \"%json\")\nb: c // \"\n"), 3);
        assert_eq!(of("start: a\n# %json \"\na: b\nb: \"x\"\n"), 3);
        assert_eq!(of("start: a\n# %json [\"\na: b\nb: \"x\"]\n"), 3);
        assert_eq!(of("start: a\na: %json {\"x\": \"\\u003a\\u003a\\u003a\"}\nb: a\n"), 3);
    }
}
