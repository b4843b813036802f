//! The largest haystack whose prompt fits a number of tokens.

use crate::error::EvalError;

/// A prompt close enough to the limit to stop looking: this share of it.
const ENOUGH: f64 = 0.997;

/// Looks for the largest number of units, from `least`, whose prompt has at most `limit` tokens, and returns that
/// prompt. `build` makes the prompt of so many units; its tokens grow with them, near enough in proportion.
///
/// `None` if even `least` units are too many; the error is `build`'s.
pub fn largest<T>(
    least: usize,
    limit: usize,
    tokens: impl Fn(&T) -> usize,
    mut build: impl FnMut(usize) -> Result<T, EvalError>,
) -> Result<Option<T>, EvalError> {
    let mut best = build(least)?;
    let (mut low, mut low_tokens) = (least, tokens(&best));
    if low_tokens > limit {
        return Ok(None);
    }
    // The least number known to be too many, and its tokens.
    let mut high: Option<(usize, usize)> = None;
    let mut slope = None;
    while (low_tokens as f64) < ENOUGH * limit as f64 && high.is_none_or(|(high, _)| high > low + 1) {
        let guess = match (high, slope) {
            (Some((high, high_tokens)), _) => {
                let share = (limit - low_tokens) as f64 / (high_tokens - low_tokens).max(1) as f64;
                low + ((high - low) as f64 * share) as usize
            }
            // A little less than the straight line says, so that most guesses fit.
            (None, Some(slope)) => low + ((limit - low_tokens) as f64 / slope * 0.999) as usize,
            (None, None) => 2 * low + 1,
        };
        let most = high.map_or(usize::MAX, |(high, _)| high - 1);
        let next = guess.clamp(low + 1, most);
        let built = build(next)?;
        let count = tokens(&built);
        if count > limit {
            high = Some((next, count));
        } else {
            slope = Some(((count.saturating_sub(low_tokens)) as f64 / (next - low) as f64).max(0.01));
            (best, low, low_tokens) = (built, next, count);
        }
    }
    Ok(Some(best))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_full_or_the_next_unit_is_too_much(
            least in 1usize..50, unit in 1usize..90, fixed in 0usize..300, more in 0usize..40_000, bumpy in 0usize..5,
        ) {
            let cost = |units: usize| fixed + units * unit + units % 7 * bumpy % unit;
            let limit = cost(least) + more;
            let mut calls = 0;
            let found = largest(least, limit, |&(_, t)| t, |units| {
                calls += 1;
                Ok((units, cost(units)))
            });
            let (units, tokens) = found.unwrap().unwrap();
            prop_assert!(tokens <= limit && units >= least);
            prop_assert!(tokens as f64 >= ENOUGH * limit as f64 || cost(units + 1) > limit);
            prop_assert!(calls < 40, "{calls}");
        }
    }

    #[test]
    fn too_little_room_is_no_prompt() {
        assert!(largest(5, 99, |&t| t, |units| Ok(units * 20)).unwrap().is_none());
    }
}
