//! Needles in a haystack: RULER's `niah` family.

use super::Draft;
use crate::prose::Prose;
use crate::words::{Keys, uuid};
use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::HashSet;

/// The line that RULER repeats.
pub const NOISE: &str = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

/// What the needles lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Haystack {
    /// [`NOISE`], line by line.
    Noise,
    /// Prose, one paragraph.
    Prose,
    /// Needles with other keys, line by line.
    Needles,
}

/// What a needle's value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// Seven digits.
    Number,
    /// A UUID; in a haystack of needles the keys are UUIDs too.
    Uuid,
}

/// One task of the family.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub haystack: Haystack,
    /// Keys that have needles.
    pub keys: usize,
    /// Needles of each key.
    pub values: usize,
    /// Keys that are asked for.
    pub queries: usize,
    pub value: Value,
}

/// Draws keys and values that never repeat.
struct Draws {
    kind: Kind,
    rng: ChaCha8Rng,
    keys: Keys,
    values: HashSet<String>,
}

impl Draws {
    fn key(&mut self) -> String {
        match (self.kind.haystack, self.kind.value) {
            (Haystack::Needles, Value::Uuid) => uuid(&mut self.rng),
            _ => self.keys.draw(&mut self.rng),
        }
    }

    fn value(&mut self) -> String {
        loop {
            let value = match self.kind.value {
                Value::Number => self.rng.random_range(1_000_000..10_000_000u32).to_string(),
                Value::Uuid => uuid(&mut self.rng),
            };
            if self.values.insert(value.clone()) {
                return value;
            }
        }
    }

    fn needle(&self, key: &str, value: &str) -> String {
        format!("One of the special magic {} for {key} is: {value}.", plural(self.kind.value))
    }
}

fn plural(value: Value) -> &'static str {
    match value {
        Value::Number => "numbers",
        Value::Uuid => "uuids",
    }
}

/// The question over a haystack of `units` sentences or lines beside the needles. More units keep needles and answer
/// and the haystack's beginning as they are.
pub fn draft(kind: Kind, units: usize, rng: ChaCha8Rng) -> Draft {
    let mut hay_rng = rng.clone();
    hay_rng.set_stream(1);
    let mut draws = Draws { kind, rng, keys: Keys::new(), values: HashSet::new() };
    let keys: Vec<(String, Vec<String>)> =
        (0..kind.keys).map(|_| (draws.key(), (0..kind.values).map(|_| draws.value()).collect())).collect();
    let mut needles: Vec<String> = keys
        .iter()
        .flat_map(|(key, values)| values.iter().map(|value| draws.needle(key, value)).collect::<Vec<_>>())
        .collect();
    needles.shuffle(&mut draws.rng);
    // A depth is a share of the haystack, so that it stays as the haystack grows.
    let mut depths: Vec<f64> = needles.iter().map(|_| draws.rng.random()).collect();
    depths.sort_by(f64::total_cmp);
    let mut asked: Vec<usize> = (0..kind.keys).collect();
    asked.shuffle(&mut draws.rng);
    asked.truncate(kind.queries);

    draws.rng = hay_rng.clone();
    let hay: Vec<String> = match kind.haystack {
        Haystack::Noise => vec![NOISE.to_owned(); units],
        Haystack::Prose => Prose::new(hay_rng).take(units).to_vec(),
        Haystack::Needles => (0..units)
            .map(|_| {
                let (key, value) = (draws.key(), draws.value());
                draws.needle(&key, &value)
            })
            .collect(),
    };
    let separator = if kind.haystack == Haystack::Prose { " " } else { "\n" };
    let context = insert(hay, &needles, &depths).join(separator);

    let names: Vec<&str> = asked.iter().map(|&i| keys[i].0.as_str()).collect();
    let wanted: Vec<String> = asked.iter().flat_map(|&i| keys[i].1.clone()).collect();
    let draft = words(kind, &context, &listed(&names), wanted.len() == 1);
    Draft { wanted, ..draft }
}

/// Puts `needles[i]` before the line at the share `depths[i]` of the lines; depths ascend.
pub fn insert(lines: Vec<String>, needles: &[String], depths: &[f64]) -> Vec<String> {
    let count = lines.len();
    let mut out = Vec::with_capacity(count + needles.len());
    let mut next = needles.iter().zip(depths.iter().map(|depth| (depth * (count + 1) as f64) as usize)).peekable();
    for (at, line) in lines.into_iter().enumerate() {
        while let Some((needle, _)) = next.next_if(|&(_, place)| place <= at) {
            out.push(needle.clone());
        }
        out.push(line);
    }
    out.extend(next.map(|(needle, _)| needle.clone()));
    out
}

/// `a`, `a, and b`, `a, b, and c`: as RULER lists keys.
fn listed(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [first @ .., last] => format!("{}, and {last}", first.join(", ")),
    }
}

/// RULER's wording, for one value that is wanted or for several.
fn words(kind: Kind, context: &str, query: &str, one: bool) -> Draft {
    let values = plural(kind.value);
    let value = values.trim_end_matches('s');
    let wanted = Vec::new();
    if one {
        return Draft {
            context: format!(
                "A special magic {value} is hidden within the following text. Make sure to memorize it. I will quiz \
                 you about the {value} afterwards.\n{context}"
            ),
            question: format!("\nWhat is the special magic {value} for {query} mentioned in the provided text?"),
            prefix: format!(" The special magic {value} for {query} mentioned in the provided text is"),
            wanted,
        };
    }
    Draft {
        context: format!(
            "Some special magic {values} are hidden within the following text. Make sure to memorize it. I will quiz \
             you about the {values} afterwards.\n{context}"
        ),
        question: format!("\nWhat are all the special magic {values} for {query} mentioned in the provided text?"),
        prefix: format!(" The special magic {values} for {query} mentioned in the provided text are"),
        wanted,
    }
}
