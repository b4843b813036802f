//! Words for keys and lists: a hand-picked stock, stretched to any number.

use rand::Rng;
use rand::seq::SliceRandom;
use std::collections::HashSet;

const NOUNS: &str = include_str!("words/nouns.txt");
const ADJECTIVES: &str = include_str!("words/adjectives.txt");
const VERBS: &str = include_str!("words/verbs.txt");

fn split(text: &'static str) -> Vec<&'static str> {
    text.split_whitespace().collect()
}

/// Draws keys such as `quiet-lake`, each one once.
pub struct Keys {
    adjectives: Vec<&'static str>,
    nouns: Vec<&'static str>,
    used: HashSet<String>,
}

impl Keys {
    /// A fresh set.
    pub fn new() -> Self {
        Self { adjectives: split(ADJECTIVES), nouns: split(NOUNS), used: HashSet::new() }
    }

    /// A key that was not drawn before. After half a million of them they get a number.
    pub fn draw(&mut self, rng: &mut impl Rng) -> String {
        let pick = |rng: &mut dyn FnMut(usize) -> usize, words: &[&str]| words[rng(words.len())].to_owned();
        let mut below = |n: usize| rng.random_range(0..n);
        for _ in 0..64 {
            let key = pick(&mut below, &self.adjectives) + "-" + &pick(&mut below, &self.nouns);
            if self.used.insert(key.clone()) {
                return key;
            }
        }
        let key =
            format!("{}-{}-{}", pick(&mut below, &self.adjectives), pick(&mut below, &self.nouns), self.used.len());
        self.used.insert(key.clone());
        key
    }
}

/// Draws `common` words and then `others`, all different; no common word is a part of any other word, so that finding
/// it in an answer means what it says; nor is any word a part of `wording`.
///
/// The stock has some two thousand words; past it come joined ones such as `quiet-lake`.
pub fn distinct(rng: &mut impl Rng, common: usize, others: usize, wording: &str) -> (Vec<String>, Vec<String>) {
    let mut stock: Vec<&str> = [NOUNS, ADJECTIVES, VERBS].into_iter().flat_map(split).collect();
    stock.retain(|word| !wording.contains(word));
    stock.shuffle(rng);
    let inside = |a: &str, b: &str| a.contains(b) || b.contains(a);
    let mut chosen: Vec<&str> = Vec::new();
    let mut rest = Vec::new();
    for word in stock {
        if chosen.len() < common && !chosen.iter().any(|other| inside(word, other)) {
            chosen.push(word);
        } else {
            rest.push(word);
        }
    }
    let clean = |word: &str| !chosen.iter().any(|common| inside(word, common));
    let mut words: Vec<String> = rest.into_iter().filter(|word| clean(word)).take(others).map(str::to_owned).collect();
    let mut keys = Keys::new();
    while words.len() < others {
        let word = keys.draw(rng);
        if clean(&word) {
            words.push(word);
        }
    }
    (chosen.into_iter().map(str::to_owned).collect(), words)
}

/// A word of `letters` random letters from `first`: `a` or `A`.
pub fn letters(rng: &mut impl Rng, first: u8, letters: usize) -> String {
    (0..letters).map(|_| char::from(first + rng.random_range(0..26u8))).collect()
}

/// A random UUID, version 4.
pub fn uuid(rng: &mut impl Rng) -> String {
    let bits = rng.random::<u128>() & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn the_stock_is_clean() {
        let all: Vec<&str> = [NOUNS, ADJECTIVES, VERBS].into_iter().flat_map(split).collect();
        assert!(all.len() > 2000, "{}", all.len());
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        assert!(all.iter().all(|w| w.bytes().all(|b| b.is_ascii_lowercase())));
    }

    #[test]
    fn keys_never_repeat() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut keys = Keys::new();
        let drawn: HashSet<String> = (0..5000).map(|_| keys.draw(&mut rng)).collect();
        assert_eq!(drawn.len(), 5000);
    }

    #[test]
    fn no_word_hides_a_common_one() {
        for seed in 0..20 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let (common, others) = distinct(&mut rng, 10, 4000, "the most common");
            assert_eq!((common.len(), others.len()), (10, 4000));
            assert!(!common.contains(&"common".to_owned()) && !others.contains(&"common".to_owned()));
            for (i, a) in common.iter().enumerate() {
                assert!(!common[..i].iter().chain(&others).any(|b| b.contains(a.as_str()) || a.contains(b.as_str())));
            }
        }
    }

    #[test]
    fn uuids_are_of_version_4() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..100 {
            let id = uuid(&mut rng);
            assert_eq!(id.len(), 36);
            assert_eq!(&id[14..15], "4");
            assert!("89ab".contains(&id[19..20]), "{id}");
        }
    }
}
