//! Words to count: RULER's `cwe` (common words) and `fwe` (frequent words).

use super::Draft;
use crate::words::{distinct, letters};
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use std::collections::HashSet;

/// Common words, and how often each stands in the list.
const COMMON: usize = 10;
const COMMON_REPEATS: usize = 30;
const OTHER_REPEATS: usize = 3;
/// The same for prompts too short for those, as RULER has it below 4,096 tokens.
const SHORT_COMMON_REPEATS: usize = 6;
const SHORT_OTHER_REPEATS: usize = 1;

const COMMON_CONTEXT: &str = "Below is a numbered list of words. In these words, some appear more often than others. \
                              Memorize the ones that appear most often.\n";
const COMMON_QUESTION: &str = "\nQuestion: What are the 10 most common words in the above list?";
const COMMON_PREFIX: &str = " Answer: The top 10 words that appear most often in the list are:";

/// Fewest different words of a list.
pub const LEAST_WORDS: usize = COMMON + 5;

/// The question over a list with `units` different words.
pub fn common(units: usize, length: usize, mut rng: ChaCha8Rng) -> Draft {
    let (often, seldom) =
        if length < 4096 { (SHORT_COMMON_REPEATS, SHORT_OTHER_REPEATS) } else { (COMMON_REPEATS, OTHER_REPEATS) };
    let wording = [COMMON_CONTEXT, COMMON_QUESTION, COMMON_PREFIX].concat();
    let (common, others) = distinct(&mut rng, COMMON, units - COMMON, &wording);
    let mut list: Vec<&String> = [vec![&common; often], vec![&others; seldom]].concat().into_iter().flatten().collect();
    list.shuffle(&mut rng);
    let numbered: Vec<String> = list.iter().enumerate().map(|(i, word)| format!("{}. {word}", i + 1)).collect();
    Draft {
        context: COMMON_CONTEXT.to_owned() + &numbered.join(" "),
        question: COMMON_QUESTION.into(),
        prefix: COMMON_PREFIX.into(),
        wanted: common,
    }
}

/// Fewest coded words of a text: the fourth still stands there more often than the fifth.
pub const LEAST_CODED: usize = 150;
/// Letters of a coded word.
const CODED_LETTERS: usize = 6;

/// The question over a text of about `units` coded words; the most frequent of all are dots, to be ignored.
pub fn frequent(units: usize, length: usize, mut rng: ChaCha8Rng) -> Draft {
    let size = (length / 50).max(8);
    let mut seen = HashSet::new();
    let mut vocabulary = vec!["...".to_owned()];
    while vocabulary.len() < size {
        let word = letters(&mut rng, b'a', CODED_LETTERS);
        if seen.insert(word.clone()) {
            vocabulary.push(word);
        }
    }
    // Frequencies fall as the zeta distribution with exponent 2 says.
    let zeta = std::f64::consts::PI.powi(2) / 6.0;
    let count = |rank: usize| (units as f64 / (rank * rank) as f64 / zeta) as usize;
    let mut text: Vec<&str> =
        vocabulary.iter().enumerate().flat_map(|(i, word)| vec![word.as_str(); count(i + 1)]).collect();
    text.shuffle(&mut rng);
    Draft {
        context: format!(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently \
             appeared coded words. {}",
            text.join(" ")
        ),
        question: "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most \
                   frequently appeared words in the above coded text?"
            .into(),
        prefix: " Answer: According to the coded text above, the three most frequently appeared words are:".into(),
        wanted: vocabulary[1..4].to_vec(),
    }
}
