//! The tasks, named after RULER's (Hsieh et al. 2024, arXiv:2404.06654), with its wording and answer prefixes; the
//! generators and the haystacks are ours.
//!
//! | here | RULER | haystack | asked for |
//! | --- | --- | --- | --- |
//! | single_1 | niah_single_1 | one repeated line | the number of the only key |
//! | single_2 | niah_single_2 | prose | the number of the only key |
//! | single_3 | niah_single_3 | prose | the UUID of the only key |
//! | multikey_1 | niah_multikey_1 | prose with 4 keys | the number of one of them |
//! | multikey_2 | niah_multikey_2 | nothing but keys and numbers | the number of one key |
//! | multikey_3 | niah_multikey_3 | nothing but UUIDs and UUIDs | the UUID of one UUID |
//! | multivalue | niah_multivalue | prose, one key, 4 numbers | all four |
//! | multiquery | niah_multiquery | prose, 4 keys | the numbers of all four |
//! | variable_tracking | vt | one repeated line, a chain of 5 assignments | all variables of the chain |
//! | common_words | cwe | a list of words, ten of them 30 times, the others 3 times | those ten |
//! | frequent_words | fwe | made-up words, frequency falling as rank^-2 | the three most frequent after the dots |

mod needles;
mod tracking;
mod words;

use crate::error::EvalError;
use crate::fit::largest;
use crate::text::PromptText;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A kind of question about a long context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
#[expect(missing_docs, reason = "the table of this module says what each is")]
pub enum Task {
    Single1,
    Single2,
    Single3,
    MultiKey1,
    MultiKey2,
    MultiKey3,
    MultiValue,
    MultiQuery,
    VariableTracking,
    CommonWords,
    FrequentWords,
}

/// One question with what answers it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The user's turn: context and question.
    pub user: String,
    /// How the assistant's turn begins.
    pub prefix: String,
    /// The strings that a right answer contains.
    pub wanted: Vec<String>,
    /// Tokens of the prompt: both turns in the model's chat template.
    pub tokens: Vec<u32>,
    /// How many of them come after the context: the question and what follows it.
    pub question_tokens: usize,
}

/// A question before it is tokenized.
struct Draft {
    /// The instructions and the haystack.
    context: String,
    /// The question, from its line break.
    question: String,
    prefix: String,
    wanted: Vec<String>,
}

impl Task {
    /// Every task, in the order of the tables.
    pub const ALL: [Self; 11] = [
        Self::Single1,
        Self::Single2,
        Self::Single3,
        Self::MultiKey1,
        Self::MultiKey2,
        Self::MultiKey3,
        Self::MultiValue,
        Self::MultiQuery,
        Self::VariableTracking,
        Self::CommonWords,
        Self::FrequentWords,
    ];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Single1 => "single_1",
            Self::Single2 => "single_2",
            Self::Single3 => "single_3",
            Self::MultiKey1 => "multikey_1",
            Self::MultiKey2 => "multikey_2",
            Self::MultiKey3 => "multikey_3",
            Self::MultiValue => "multivalue",
            Self::MultiQuery => "multiquery",
            Self::VariableTracking => "variable_tracking",
            Self::CommonWords => "common_words",
            Self::FrequentWords => "frequent_words",
        }
    }

    /// Most tokens of an answer: RULER's numbers.
    pub fn answer_tokens(self) -> usize {
        match self {
            Self::VariableTracking => 30,
            Self::CommonWords => 120,
            Self::FrequentWords => 50,
            _ => 128,
        }
    }

    /// Makes a question whose prompt and answer together take up to `length` tokens: the prompt is as long as fits,
    /// within 1% or, where that is more, one line of the haystack. Equal arguments give equal questions.
    ///
    /// # Errors
    /// [`EvalError::Length`] if the question alone is longer, or what the tokenizer says.
    pub fn sample(self, length: usize, seed: u64, index: usize, text: &dyn PromptText) -> Result<Sample, EvalError> {
        let limit = length.saturating_sub(self.answer_tokens());
        let least = self.least_units();
        let build = |units: usize| {
            let draft = self.draft(units, length, self.rng(length, seed, index));
            let user = draft.context.clone() + &draft.question;
            Ok((text.prompt(&user, &draft.prefix)?, user, draft))
        };
        let Some((tokens, user, draft)) = largest(least, limit, |(tokens, ..): &(Vec<u32>, _, _)| tokens.len(), build)?
        else {
            let least = build(least)?.0.len() + self.answer_tokens();
            return Err(EvalError::Length { length, task: self.name(), least });
        };
        // The question begins where the prompt parts from one that ends with the context.
        let bare = text.prompt(&draft.context, "")?;
        let shared = tokens.iter().zip(&bare).take_while(|(a, b)| a == b).count();
        let question_tokens = tokens.len() - shared;
        Ok(Sample { user, prefix: draft.prefix, wanted: draft.wanted, tokens, question_tokens })
    }

    /// Draws that no other question shares.
    fn rng(self, length: usize, seed: u64, index: usize) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&(index as u64).to_le_bytes());
        key[16..24].copy_from_slice(&(length as u64).to_le_bytes());
        key[24] = self as u8;
        ChaCha8Rng::from_seed(key)
    }

    /// The question over a haystack of so many units: sentences, lines, words.
    fn draft(self, units: usize, length: usize, rng: ChaCha8Rng) -> Draft {
        match self {
            Self::VariableTracking => tracking::draft(units, rng),
            Self::CommonWords => words::common(units, length, rng),
            Self::FrequentWords => words::frequent(units, length, rng),
            _ => needles::draft(self.needles(), units, rng),
        }
    }

    fn least_units(self) -> usize {
        match self {
            Self::CommonWords => words::LEAST_WORDS,
            Self::FrequentWords => words::LEAST_CODED,
            _ => 5,
        }
    }

    fn needles(self) -> needles::Kind {
        use needles::{Haystack, Kind, Value};
        let plain = Kind { haystack: Haystack::Prose, keys: 1, values: 1, queries: 1, value: Value::Number };
        match self {
            Self::Single1 => Kind { haystack: Haystack::Noise, ..plain },
            Self::Single3 => Kind { value: Value::Uuid, ..plain },
            Self::MultiKey1 => Kind { keys: 4, ..plain },
            Self::MultiKey2 => Kind { haystack: Haystack::Needles, ..plain },
            Self::MultiKey3 => Kind { haystack: Haystack::Needles, value: Value::Uuid, ..plain },
            Self::MultiValue => Kind { values: 4, ..plain },
            Self::MultiQuery => Kind { keys: 4, queries: 4, ..plain },
            _ => plain,
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<Task> for &'static str {
    fn from(task: Task) -> Self {
        task.name()
    }
}

impl FromStr for Task {
    type Err = EvalError;

    fn from_str(name: &str) -> Result<Self, EvalError> {
        Self::ALL.into_iter().find(|task| task.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name);
            let hint = taper_attention::nearest(name, &names);
            EvalError::Task {
                name: name.to_owned(),
                hint: hint.map_or(String::new(), |near| format!(", did you mean {near}?")),
                known: names.join(", "),
            }
        })
    }
}

impl TryFrom<String> for Task {
    type Error = EvalError;

    fn try_from(name: String) -> Result<Self, EvalError> {
        name.parse()
    }
}

#[cfg(test)]
mod tests;
