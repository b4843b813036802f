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
                        // The others are options of the compiler's own, in `x-guidance`.
                        (
                            "pattern" | "whitespace_pattern" | "item_separator" | "key_separator",
                            Value::String(pattern),
                        ) => length(pattern),
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
            Value::Object(map) => {
                for (key, value) in map {
                    match (key.as_str(), value) {
                        // Keys of these are names, `allOf` among them if somebody likes.
                        ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(parts)) => {
                            parts.values().for_each(|part| self.meetings(part, root));
                        }
                        _ => self.meetings(value, root),
                    }
                }
            }
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
        // More lead as deep into one another as there are of them, and are refused anyway.
        if self.references <= REFERENCES {
            let (together, longest) = Terminals::of(grammar).most();
            self.together = self.together.max(together);
            self.expression = self.expression.max(longest);
        }
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

/// The rules and terminals of a grammar in Lark's format, by name.
#[derive(Default)]
struct Terminals<'a> {
    all: HashMap<&'a str, Terminal<'a>>,
    /// How long each is with all that it names, and how many `&` it has, once that is known.
    whole: HashMap<&'a str, (usize, usize)>,
    /// Of the longest regular expression.
    longest: usize,
}

/// What stands in one of them outside of texts.
#[derive(Default)]
struct Terminal<'a> {
    /// Whether it is compiled as one expression: a terminal, a rule with some of its attributes or with what is negated, or
    /// what is ignored.
    one: bool,
    /// Bytes of regular expressions, and one for each name and sign.
    length: usize,
    ands: usize,
    /// The terminals that it names. The compiler puts what they are in their places: of seventeen lines, each of which names
    /// the next one twice, it makes one expression of 2^17 parts.
    names: Vec<&'a str>,
}

impl<'a> Terminals<'a> {
    fn of(grammar: &'a str) -> Self {
        let mut found = Self::default();
        let (mut at, mut name, mut last) = (0, "", b'\n');
        // The latest name in each bracket that is open: a colon makes it another's, wherever in a line it stands.
        let mut open: Vec<Option<Begun>> = vec![None];
        while at < grammar.len() {
            let length = part(&grammar.as_bytes()[at..]);
            let text = grammar.get(at..at + length).unwrap_or_default();
            at += length;
            let own = found.all.entry(name).or_default();
            match text.as_bytes() {
                [] | [b' ' | b'\t' | b'\r'] | [b'#', ..] | [b'/', b'/', ..] => continue,
                b"%" if last == b'\n' => {
                    name = text;
                    found.all.entry(name).or_default().one = true;
                }
                // A colon after a text is JSON's.
                b":" if last != b'"' => {
                    if let Some(begun) = open.last_mut().and_then(Option::take) {
                        own.names.truncate(begun.names);
                        own.length = own.length.min(begun.length);
                        name = begun.name;
                        found.all.entry(name).or_default().one |= begun.one || is_terminal(name);
                    }
                }
                b"\n" | [b'"', ..] => {}
                [b'/', ..] => {
                    let length = length.saturating_sub(2);
                    found.longest = found.longest.max(length);
                    own.length += length;
                }
                [c, ..] => {
                    // What is negated is one expression, but where a number says how often something comes.
                    own.one |= last == b'~' && !c.is_ascii_digit();
                    own.ands += usize::from(*c == b'&');
                    match c {
                        b'[' | b'{' | b'(' => open.push(None),
                        b']' | b'}' | b')' if open.len() > 1 => drop(open.pop()),
                        b'a'..=b'z' | b'A'..=b'Z' | b'_' => {
                            let outer = open.len().checked_sub(2).and_then(|at| open[at].as_mut());
                            if let Some(begun) = outer.filter(|_| ONE.contains(&text)) {
                                begun.one = true;
                            }
                            let begun = Begun { name: text, names: own.names.len(), length: own.length, one: false };
                            open.last_mut().expect("the outermost is never closed").replace(begun);
                            own.names.extend(is_terminal(text).then_some(text));
                        }
                        _ => {}
                    }
                    own.length += 1;
                    match text {
                        "ignore" if last == b'%' => {
                            name = "%";
                            found.all.entry(name).or_default().one = true;
                        }
                        // A schema has its own limits.
                        "json" if last == b'%' => {
                            let mut schemas = serde_json::Deserializer::from_str(&grammar[at..]).into_iter::<Value>();
                            at += schemas.next().and_then(Result::ok).map_or(0, |_| schemas.byte_offset());
                        }
                        _ => {}
                    }
                }
            }
            last = text.as_bytes()[0];
        }
        found
    }

    /// How many patterns one text must fit at most, and how long the longest expression is.
    fn most(mut self) -> (usize, usize) {
        let mut ands = self.all.values().map(|own| own.ands).max().unwrap_or(0);
        let mut longest = self.longest;
        let names: Vec<&str> = self.all.iter().filter(|(_, own)| own.one).map(|(name, _)| *name).collect();
        for name in names {
            let whole = self.whole(name);
            (longest, ands) = (longest.max(whole.0), ands.max(whole.1));
        }
        (ands.saturating_add(usize::from(ands > 0)), longest)
    }

    /// A terminal that leads back to itself is refused by the compiler.
    fn whole(&mut self, name: &'a str) -> (usize, usize) {
        if let Some(own) = self.all.remove(name) {
            let add = |(length, ands): (usize, usize), name| {
                let (more, others) = self.whole(name);
                (length.saturating_add(more), ands.saturating_add(others))
            };
            let whole = own.names.into_iter().fold((own.length, own.ands), add);
            self.whole.insert(name, whole);
        }
        self.whole.get(name).copied().unwrap_or_default()
    }
}

/// A name that may turn out to be that of what follows, and what there was before it.
struct Begun<'a> {
    name: &'a str,
    names: usize,
    length: usize,
    one: bool,
}

/// Attributes that make a rule one expression.
const ONE: [&str; 5] = ["lazy", "max_tokens", "stop", "suffix", "temperature"];

fn is_terminal(name: &str) -> bool {
    name.contains(|c: char| c.is_ascii_uppercase())
}

/// Bytes of what a grammar goes on with: a comment, a text, an expression, a mark in `<>`, a name, or a sign.
fn part(bytes: &[u8]) -> usize {
    let run = |goes_on: fn(&u8) -> bool| 1 + bytes.iter().skip(1).take_while(|c| goes_on(c)).count();
    match bytes {
        [b'#', ..] | [b'/', b'/', ..] => run(|c| *c != b'\n'),
        [quote @ (b'"' | b'/'), ..] => {
            let mut end = 1;
            while let Some(c) = bytes.get(end).filter(|c| *c != quote) {
                end += 1 + usize::from(*c == b'\\');
            }
            bytes.len().min(end + 1)
        }
        [b'<', ..] => {
            let end = run(|c| !c.is_ascii_whitespace() && !b"<>".contains(c));
            if bytes.get(end) == Some(&b'>') { end + 1 } else { 1 }
        }
        [b'A'..=b'Z', ..] | [b'_', b'A'..=b'Z', ..] => run(|c| matches!(c, b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-')),
        [b'a'..=b'z' | b'_', ..] => run(|c| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-')),
        [b':', b':', ..] => 2,
        _ => 1,
    }
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
            (named(&["a", "b", "allOf"]), 0),
            (json!({ "properties": { "allOf": { "allOf": [text, text] } } }), 2),
        ] {
            assert_eq!(together(&schema), found, "{schema}");
        }
    }

    #[test]
    fn terminals_are_as_long_as_what_they_name_and_fit_as_many_patterns() {
        let of = |grammar: &str| Terminals::of(grammar).most();
        let grammar = r#"start: B & D | "a & \" & b" // c & "d
            B: /x&\/&y/ & /z/"#;
        assert_eq!(of(grammar), (2, 8));
        assert_eq!(of("start: \"a"), (0, 0));
        // Of a rule each expression is one for itself, and so is every terminal's.
        assert_eq!(of("start: /abc/ /de/ B\nB: /abcdef/ \"ghi\"\n"), (0, 6));
        assert_eq!(of("B: C C\nC: D D\n  | E\nE: /abcd/\nD: (/abc/ & /x/)?\n"), (5, 2 + 2 * (4 + 2 * 8 + 4)));
        // So is a rule with attributes, and what is ignored.
        assert_eq!(of("B: /ab/\nstart[lazy]: B B B\n%ignore B B\nx: B B B B"), (0, 3 + 3 * 2));
        assert_eq!(of("B: /ab/\n%ignore B B"), (0, 3 + 2 * 2));
        // The name of another begins in the line that has its colon; what is named beside `%regex` is the first one's.
        assert_eq!(of("B: /ab/\nC.1: B\n  | %regex {\"substring\": \"x:\"} B\n"), (0, 8 + 2 * 2));
        // Of terminals that name the next one twice 2^n are written out; those that lead back to themselves are none.
        let twice: String = (0..900).map(|i| format!("A{i}: A{} A{}\n", i + 1, i + 1)).collect();
        assert_eq!(of(&format!("{twice}A900: \"a\"?")), (0, usize::MAX));
        assert!(of("B: C\nC: B").1 < 9);
        // A definition begins where it likes.
        for before in ["start: A -> x ", "start: [A] ", "%import common.WORD ", "start: %lark { "] {
            let grammar = format!("{before}A: /p/ & /q/ & /r/\nB: A A A");
            assert_eq!(of(&grammar), (7, 3 * (3 + 2) + 3), "{before}");
        }
        assert_eq!(of("start: \"a\" %ignore B B\nB: /ab/"), (0, 2 + 2 * 2));
        assert_eq!(of("start: %json {\"A\": [1, 2, 3]} B\nB: /ab/"), (0, 2));
        // What is negated is one expression; what is captured or comes some times is not; the name of a rule may begin with a line.
        assert_eq!(of("start: ~(/ab/ & /cd/ /ef/)").0, 2);
        assert_eq!(of("start: B ~ 3\nstart2[capture]: B B B B\n_x: B B\n_y[lazy]: B B B\nB: /abc/"), (0, 3 * (1 + 3)));
        assert_eq!(of("start: /a/ & /b/"), (2, 1));
        // Nothing hides between the quotes of comments and marks.
        for hides in ["# \"", "// \"", "start: <\">"] {
            assert_eq!(of(&format!("{hides}\nB: /x/ & /y/\n{hides}")).0, 2, "{hides}");
        }
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
