//! Answers that fit a grammar: JSON by a schema, a regular expression, one of some texts, or any context-free grammar.
//!
//! Which tokens may come next is llguidance's to say, token by token; the sampler draws among them. So a
//! grammar holds whatever attention does, and a request without one pays nothing.

mod limits;

use crate::text::Text;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::Arc;

/// White space between two parts of JSON: a space, or a line's end and what the next line is indented by. Without a
/// bound some models would go on with nothing else.
const SPACES: &str = r"[ ]|\r?\n[ \t]{0,20}";

/// Stack for compiling, of which as much is used as references lead into one another.
const STACK: usize = 256 << 20;
/// Bytes of a token above which no grammar takes it: the tree of all tokens is walked by recursion, a byte a step.
const WORD: usize = 1000;
/// Most characters of a message about a grammar.
const MESSAGE: usize = 400;

/// What an answer must be.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    /// JSON that fits a JSON schema (draft 2020-12, and older ones by their `$schema`).
    Json(Value),
    /// Text that a regular expression matches from its beginning to its end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text by a context-free grammar in Lark's format, from its rule `start`.
    Lark(String),
}

/// A grammar that cannot be kept to, in words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

impl GrammarError {
    /// What a compiler says that also tells of its own insides.
    fn of(error: impl std::fmt::Display) -> Self {
        let text = error.to_string();
        let said = text.split("\n<").next().unwrap_or_default().trim();
        if said.starts_with("panic") {
            tracing::error!(error = text, "a grammar made its compiler panic");
            return Self("is more than can be compiled".into());
        }
        // In words of who wrote the grammar, not of its compiler.
        for (its, ours) in [
            ("NoExtensionBias", "no text fits it any further"),
            (
                "Current row has",
                "it allows too much at one place: a schema of fewer properties, or simpler rules, would do",
            ),
        ] {
            if said.contains(its) {
                return Self(ours.into());
            }
        }
        let mut brief: String = said.chars().take(MESSAGE).collect();
        if brief.len() < said.len() {
            brief.push('…');
        }
        Self(brief)
    }
}

/// Compiles grammars for the vocabulary of one model.
pub(crate) struct Grammars(ParserFactory);

/// A compiled grammar, and how far an answer has come in it. Clones share what they find out on the way, under a lock, and how
/// much of that there may be.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    /// Comes as far, and finds out for itself, once there are drafts: texts that are not the answer's use up nothing of its own.
    drafts: Option<Box<Matcher>>,
}

impl Grammars {
    /// The texts of `vocab` tokens, in a tree.
    pub(crate) fn new(text: &dyn Text, vocab: usize) -> Result<Self, GrammarError> {
        let ends: Vec<u32> = text.eos().iter().copied().filter(|&token| (token as usize) < vocab).collect();
        let [end, ..] = ends[..] else {
            return Err(GrammarError("the model has no token that ends an answer".into()));
        };
        let word = |token: u32| word(text.token_bytes(token), text.special(token));
        let words: Vec<Vec<u8>> = (0..vocab as u32).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(vocab as u32, end), &words).with_eos_tokens(&ends);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(GrammarError::of)?;
        // What is wrong with a grammar goes to who sent it.
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        // A state takes a kilobyte or two, an answer has its own, and a mask of so many items some milliseconds.
        (limits.max_lexer_states, limits.step_max_items, limits.step_lexer_fuel) = (20_000, 20_000, 100_000);
        limits.max_grammar_size = 100_000;
        Ok(Self(factory))
    }

    /// Compiles what an answer must be.
    pub(crate) fn compile(&self, shape: &Shape) -> Result<Grammar, GrammarError> {
        limits::check(shape)?;
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("taper-grammar".into()).stack_size(STACK);
            let compiling = thread.spawn_scoped(scope, || self.compiled(shape)).map_err(GrammarError::of)?;
            compiling.join().unwrap_or_else(|_| Err(GrammarError("is more than can be compiled".into())))
        })
    }

    fn compiled(&self, shape: &Shape) -> Result<Grammar, GrammarError> {
        let top = match shape {
            Shape::Json(schema) => TopLevelGrammar::from_json_schema(with_few_spaces(schema)),
            Shape::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            Shape::Choice(texts) if texts.is_empty() => return Err(GrammarError("there is no text to choose".into())),
            Shape::Choice(texts) => TopLevelGrammar::from_lark(one_of(texts)),
            Shape::Lark(grammar) => TopLevelGrammar::from_lark(grammar.clone()),
        };
        let matcher = Matcher::new(self.0.create_parser(top));
        match matcher.get_error() {
            Some(error) => Err(GrammarError::of(error)),
            None => Ok(Grammar { matcher, drafts: None }),
        }
    }
}

/// A token's text as a grammar takes it, which is none for one that no grammar allows.
fn word(text: Vec<u8>, special: bool) -> Vec<u8> {
    match special {
        _ if text.len() > WORD => Vec::new(),
        // No answer's text: the grammar names them apart.
        true => [&[TokTrie::SPECIAL_TOKEN_MARKER], &text[..]].concat(),
        false => text,
    }
}

/// Formats of text that are held to; others are words of advice to whoever reads an answer.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// The schema without formats that nobody here knows.
fn with_known_formats(schema: &Value) -> Value {
    // What these hold are values, not schemas.
    const VALUES: [&str; 4] = ["const", "default", "enum", "examples"];
    let unknown =
        |key: &str, value: &Value| key == "format" && value.as_str().is_some_and(|format| !FORMATS.contains(&format));
    let kept = |(key, value): (&String, &Value)| {
        let value = if VALUES.contains(&key.as_str()) { value.clone() } else { with_known_formats(value) };
        (key.clone(), value)
    };
    match schema {
        Value::Object(map) => map.iter().filter(|(key, value)| !unknown(key, value)).map(kept).collect(),
        Value::Array(list) => list.iter().map(with_known_formats).collect(),
        other => other.clone(),
    }
}

/// The schema, with little white space in its JSON unless it says itself how much, and without unknown formats.
fn with_few_spaces(schema: &Value) -> Value {
    let mut schema = match with_known_formats(schema) {
        Value::Bool(true) => json!({}),
        other => other,
    };
    if let Some(map) = schema.as_object_mut()
        && let Some(options) = map.entry("x-guidance").or_insert_with(|| json!({})).as_object_mut()
        && !["whitespace_pattern", "whitespace_flexible"].iter().any(|name| options.contains_key(*name))
    {
        options.insert("whitespace_pattern".into(), json!(SPACES));
    }
    schema
}

/// The body of a rule, in Lark's format, of JSON that fits a schema.
pub fn json_rule(schema: &Value) -> String {
    format!("%json {}", with_few_spaces(schema))
}

/// A grammar of one of some texts.
fn one_of(texts: &[String]) -> String {
    // Lark writes strings as JSON does.
    let texts: Vec<String> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    format!("start: {}", texts.join(" | "))
}

impl Grammar {
    /// The same for an answer of its own, beside others on other threads.
    pub fn apart(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), drafts: None }
    }

    /// The same for drafts of the answer's next tokens.
    pub(crate) fn for_drafts(&mut self) -> Self {
        let drafts = self.drafts.get_or_insert_with(|| Box::new(self.matcher.deep_clone()));
        Self { matcher: Matcher::clone(drafts), drafts: None }
    }

    /// Takes all hope from the tokens that may not come next; once the answer is whole, from all but those that end it.
    pub(crate) fn mask(&mut self, logits: &mut [f32]) -> Result<(), GrammarError> {
        let allowed = self.matcher.compute_mask_or_eos().map_err(GrammarError::of)?;
        let words = allowed.as_slice();
        for (token, logit) in logits.iter_mut().enumerate() {
            let word = words.get(token / 32).copied().unwrap_or(0);
            if word >> (token % 32) & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Goes on by a token that may come.
    pub(crate) fn take(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.done() {
            return Ok(());
        }
        // Where drafts have used up what they may find out, the next ones begin with what the answer has.
        if self.drafts.as_mut().is_some_and(|drafts| drafts.consume_token(token).is_err()) {
            self.drafts = None;
        }
        self.matcher.consume_token(token).map_err(GrammarError::of)
    }

    /// Whether nothing can follow.
    pub(crate) fn done(&self) -> bool {
        self.matcher.is_stopped()
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("done", &self.done()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub::{StubText, VOCAB};

    /// What was an `x` eight letters ago decides: of each row of letters the lexer has a state of its own.
    #[test]
    fn no_grammar_takes_a_token_as_long_as_a_page() {
        let of = |length: usize, special| word(vec![b'a'; length], special).len();
        assert_eq!([of(WORD, false), of(WORD, true), of(WORD + 1, false), of(WORD + 1, true)], [WORD, WORD + 1, 0, 0]);
        // As deep as that a tree can be built, and walked on a thread of usual size.
        let words: Vec<Vec<u8>> =
            (1..=WORD).map(|length| vec![b'a'; length]).chain([vec![TokTrie::SPECIAL_TOKEN_MARKER]]).collect();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, WORD as u32), &words);
        assert_eq!(trie.token(WORD as u32 - 1).len(), WORD);
    }

    #[test]
    fn drafts_use_up_nothing_of_an_answers_grammar() {
        let mut grammars = Grammars::new(&StubText, VOCAB).unwrap();
        grammars.0.limits_mut().max_lexer_states = 150;
        let mut answer = grammars.compile(&Shape::Regex("[xy]*x[xy]{8}z".into())).unwrap();
        let letter = |draw: u32| u32::from(if draw.count_ones().is_multiple_of(2) { b'x' } else { b'y' });
        let mut failed = 0;
        for round in 0..60u32 {
            let mut draft = answer.for_drafts();
            let drafted = (0..12).try_for_each(|i| {
                draft.mask(&mut vec![0.0; VOCAB])?;
                draft.take(letter((round * 12 + i).wrapping_mul(2_654_435_761) >> 7))
            });
            failed += usize::from(drafted.is_err());
            // The answer is one letter again and again.
            answer.mask(&mut vec![0.0; VOCAB]).unwrap();
            answer.take(u32::from(b'x')).unwrap();
        }
        assert!(failed > 0, "drafts alone come to their limit");
        assert!(failed < 60, "and go on");
    }
}
