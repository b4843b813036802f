//! Stop strings: finds them across token borders and holds back text that may be the start of one.

/// Passes text through until a stop string appears; no part of one is ever passed.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
}

impl StopMatcher {
    /// A matcher for these strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { stops, held: String::new() }
    }

    /// Adds text; returns what is safe to pass on, and the stop string if one was completed.
    ///
    /// Of several the one that is complete first counts, then the longest: so it does not matter how the text is cut.
    /// After a match the rest of the text is dropped.
    pub fn push(&mut self, text: &str) -> (String, Option<String>) {
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .filter(|stop| stop.len() <= self.held.len())
            .filter_map(|stop| self.held.find(stop.as_str()).map(|at| (at, stop)))
            .min_by_key(|(at, stop)| (at + stop.len(), *at));
        if let Some((at, stop)) = found {
            let stop = stop.clone();
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(stop));
        }
        let keep = self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The text held back, at the end of a stream in which no stop string came.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest proper start of `stop` that ends `text`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|&n| stop.is_char_boundary(n) && text.ends_with(&stop[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_stop_string_across_pieces_is_held_back_and_cut() {
        let mut m = StopMatcher::new(&["END".into()]);
        assert_eq!(m.push("one E"), ("one ".into(), None));
        assert_eq!(m.push("N"), (String::new(), None));
        assert_eq!(m.push("D two"), (String::new(), Some("END".into())));
    }

    #[test]
    fn a_false_start_is_passed_on() {
        let mut m = StopMatcher::new(&["END".into()]);
        assert_eq!(m.push("E"), (String::new(), None));
        assert_eq!(m.push("x"), ("Ex".into(), None));
        assert_eq!(m.push("EN"), (String::new(), None));
        assert_eq!(m.finish(), "EN");
    }

    #[test]
    fn the_first_complete_one_counts_then_the_longest() {
        let mut m = StopMatcher::new(&["cd".into(), "bcd".into()]);
        assert_eq!(m.push("abcde"), ("a".into(), Some("bcd".into())));
        let stops = ["abc".into(), "b".into()];
        assert_eq!(StopMatcher::new(&stops).push("abc"), ("a".into(), Some("b".into())));
        assert_eq!(StopMatcher::new(&stops).push("ab"), ("a".into(), Some("b".into())));
    }

    proptest! {
        /// Whatever the pieces, the result is that of a search in the whole text.
        #[test]
        fn pieces_do_not_matter(pieces in prop::collection::vec("[abé]{0,4}", 0..12), stops in prop::collection::vec("[abé]{1,4}", 0..4)) {
            let whole: String = pieces.concat();
            let found = stops.iter().filter_map(|s| whole.find(s.as_str()).map(|at| (at + s.len(), at, s)));
            let first = found.min_by_key(|(end, at, _)| (*end, *at));
            let mut m = StopMatcher::new(&stops);
            let (mut out, mut hit) = (String::new(), None);
            for piece in &pieces {
                let (text, stop) = m.push(piece);
                out.push_str(&text);
                hit = stop;
                if hit.is_some() { break; }
            }
            if hit.is_none() {
                out.push_str(&m.finish());
            }
            prop_assert_eq!(hit.as_ref(), first.map(|(_, _, stop)| stop));
            prop_assert_eq!(out.as_str(), first.map_or(whole.as_str(), |(_, at, _)| &whole[..at]));
        }
    }
}
