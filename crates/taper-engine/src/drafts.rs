//! Tokens guessed ahead of an answer: made one by one by steps of a method, or found in the text.

use crate::sampler::Sampler;

/// Guesses that the answer's next step or steps make, or that stand behind its tokens. The step that checks them draws what
/// the answer goes on with as ever, and goes on drawing as long as that is what was guessed: the answer is what it would
/// have been without.
#[derive(Default)]
pub(crate) struct Drafts {
    /// How many there will be; 0: the next token is drawn without.
    pub wanted: usize,
    /// How many there are.
    pub made: usize,
    /// Whether they were found in the text.
    pub looked_up: bool,
    /// Draws them with the numbers that the answer's own tokens will be drawn with.
    pub sampler: Option<Sampler>,
}

impl Drafts {
    /// Whether the next step makes one.
    pub fn growing(&self) -> bool {
        self.made < self.wanted
    }
}

/// Most tokens of a run that are compared: longer ones are as good.
const LONGEST: usize = 64;
/// Most tokens of equal runs that are compared in all, so that no text takes long; what is further back is not found then.
const COMPARED: usize = 1 << 18;

/// What followed the last tokens of a text where they stood in it before; the text is a prompt and what came after it.
///
/// Of all places before which at least `least` tokens (1 to [`LONGEST`]) are the text's last, it takes the one with the most, and
/// of equal ones the latest. As many tokens follow as were the same, at most `most`: a long run of equal tokens is more likely
/// to go on. What follows the text's own end is taken to begin again where the place is, as a run that repeats itself does.
pub(crate) fn look_up((prompt, answer): (&[u32], &[u32]), least: usize, most: usize) -> Vec<u32> {
    let tokens = prompt.len() + answer.len();
    let at = |place: usize| if place < prompt.len() { prompt[place] } else { answer[place - prompt.len()] };
    if most == 0 || tokens == 0 {
        return Vec::new();
    }
    let last = at(tokens - 1);
    let (mut found, mut longest, mut compared) = (0, 0, 0);
    for place in (1..tokens).rev().filter(|place| at(place - 1) == last) {
        let same = (1..=LONGEST.min(place)).take_while(|back| at(place - back) == at(tokens - back)).count();
        if same > longest {
            (found, longest) = (place, same);
        }
        compared += same;
        if same == LONGEST || compared > COMPARED {
            break;
        }
    }
    if longest < least {
        return Vec::new();
    }
    (0..longest.min(most)).map(|i| at(found + i % (tokens - found))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_followed_the_longest_run_is_taken() {
        let found = |text: &str, least, most| {
            let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
            // Wherever the prompt ends.
            let all: Vec<Vec<u32>> = (0..=tokens.len()).map(|end| look_up(tokens.split_at(end), least, most)).collect();
            assert!(all.iter().all(|found| found == &all[0]), "{text}");
            all[0].iter().map(|&token| char::from(token as u8)).collect::<String>()
        };
        // As many as were the same, or as are wanted.
        assert_eq!(found("the key is 7f3a. The key is ", 3, 15), "7f3a. The ");
        assert_eq!(found("the key is 7f3a. The key is ", 3, 4), "7f3a");
        assert_eq!(found("abcde-bc", 2, 15), "de");
        // The longest run before the latest, and of equal ones the latest.
        assert_eq!(found("xabc1 abc2 xabc", 3, 1), "1");
        assert_eq!(found("abc1 abc2 abc", 3, 1), "2");
        // Too few are the same, or none at all.
        assert_eq!(found("abc1 xbc", 3, 4), "");
        assert_eq!(found("abcdef", 1, 4), "");
        assert_eq!((found("", 1, 4), found("a", 1, 4), found("aa", 1, 0)), Default::default());
        // Runs that repeat themselves.
        assert_eq!(found("aaaaa", 1, 4), "aaaa");
        assert_eq!(found("xyzxyzxyzx", 3, 8), "yzxyzxy");
    }

    proptest! {
        #[test]
        fn drafts_follow_an_equal_run(text in prop::collection::vec(0u32..4, 0..40), least in 1usize..6, most in 0usize..9) {
            let found = look_up(text.split_at(text.len() / 2), least, most);
            let runs = (1..text.len()).map(|place| {
                text[..place].iter().rev().zip(text.iter().rev()).take_while(|(a, b)| a == b).count()
            });
            let longest = runs.max().unwrap_or(0);
            // There are drafts if and only if there is a run that is long enough; they are as many as it has tokens.
            prop_assert_eq!(found.len(), if longest < least { 0 } else { longest.min(most) });
            // The run with the drafts after it stands in the text that goes on with the drafts.
            let whole = [&text[..], &found].concat();
            let run = &whole[text.len() - longest..];
            prop_assert!(found.is_empty() || whole[..whole.len() - 1].windows(run.len()).any(|part| part == run));
        }
    }
}
