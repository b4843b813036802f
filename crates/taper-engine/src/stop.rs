//! Stop strings: finds them across token borders and holds back text that may be the start of one.

/// Passes text through until a stop string appears; no part of one is ever passed.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    /// So many bytes at the beginning of what is held came too early for a stop to end in them.
    early: usize,
}

impl StopMatcher {
    /// A matcher for these strings; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { stops, held: String::new(), early: 0 }
    }

    /// Adds text in which no stop string ends, though one that ends later may begin there; returns what is safe to pass on.
    pub fn push_early(&mut self, text: &str) -> String {
        self.held.push_str(text);
        self.early = self.held.len();
        self.pass()
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
            .filter_map(|stop| self.find(stop).map(|at| (at, stop)))
            .min_by_key(|(at, stop)| (at + stop.len(), *at));
        if let Some((at, stop)) = found {
            let stop = stop.clone();
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(stop));
        }
        (self.pass(), None)
    }

    /// Where a stop string is in what is held, not ending in what came too early.
    fn find(&self, stop: &str) -> Option<usize> {
        let mut from = (self.early + 1).saturating_sub(stop.len());
        while !self.held.is_char_boundary(from) {
            from += 1;
        }
        self.held.get(from..)?.find(stop).map(|at| from + at)
    }

    /// What of the text is no start of a stop string.
    fn pass(&mut self) -> String {
        let keep = self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0);
        let passed = self.held.len() - keep;
        self.early = self.early.saturating_sub(passed);
        let rest = self.held.split_off(passed);
        std::mem::replace(&mut self.held, rest)
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

    #[test]
    fn what_begins_too_early_to_end_is_a_stop_once_it_ends() {
        let mut m = StopMatcher::new(&["END".into(), "N".into()]);
        assert_eq!((m.push_early("END E"), m.push_early("N")), ("END ".into(), String::new()));
        assert_eq!(m.push("D"), (String::new(), Some("END".into())));
        let mut m = StopMatcher::new(&["END".into()]);
        assert_eq!((m.push_early("EN"), m.push("x"), m.finish()), (String::new(), ("ENx".into(), None), String::new()));
    }

    proptest! {
        /// Whatever the pieces, the result is that of a search in the whole text for what ends behind the early ones.
        #[test]
        fn pieces_do_not_matter(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            early in 0usize..4,
        ) {
            let whole: String = pieces.concat();
            let least: usize = pieces.iter().take(early).map(String::len).sum();
            let places = |s: &String| -> Vec<usize> {
                (0..whole.len()).filter(|at| whole.get(*at..).is_some_and(|rest| rest.starts_with(s.as_str()))).collect()
            };
            let found = stops.iter().flat_map(|s| places(s).into_iter().map(move |at| (at + s.len(), at, s)));
            let first = found.filter(|(end, ..)| *end > least).min_by_key(|(end, at, _)| (*end, *at));
            let mut m = StopMatcher::new(&stops);
            let (mut out, mut hit) = (String::new(), None);
            for (place, piece) in pieces.iter().enumerate() {
                let (text, stop) = if place < early { (m.push_early(piece), None) } else { m.push(piece) };
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
