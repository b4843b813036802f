//! How many rows go through the model together, once that was too many for the memory that there is.
//!
//! A cache that was asked for, and not measured, may leave a device less memory than a step of many requests takes. The step is
//! made of several passes then, and so are those after it, unless it was a single request that there was too little for.

use std::ops::Range;

/// After so many steps without a failure twice as many rows are tried: what lacked may be there again.
const CALM: usize = 10_000;

/// The most rows of several requests in one pass, if that is bounded.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Passes {
    most: Option<usize>,
    /// Steps since that changed.
    since: usize,
}

impl Passes {
    /// Cuts requests of so many rows each, in their order, into passes; one that has more than the most goes alone.
    pub fn cut(&self, rows: &[usize]) -> Vec<Range<usize>> {
        let most = self.most.unwrap_or(usize::MAX);
        let (mut passes, mut start, mut sum) = (Vec::new(), 0, 0_usize);
        for (place, &rows) in rows.iter().enumerate() {
            if rows > 0 && sum > 0 && sum.saturating_add(rows) > most {
                passes.push(start..place);
                (start, sum) = (place, 0);
            }
            sum += rows;
        }
        passes.push(start..rows.len());
        passes
    }

    /// There was no memory for so many rows of several requests together.
    pub fn lacked(&mut self, rows: usize) {
        let most = (rows / 2).min(self.most.unwrap_or(usize::MAX)).max(1);
        if self.most != Some(most) {
            tracing::warn!(
                rows,
                "too little memory for a step of so many rows; at most {most} go together, from now on unless one lacks it alone"
            );
        }
        (self.most, self.since) = (Some(most), 0);
    }

    /// A step was done.
    pub fn done(&mut self) {
        self.since += 1;
        if self.since >= CALM {
            (self.most, self.since) = (self.most.and_then(|most| most.checked_mul(2)), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_cut_by_rows_in_their_order() {
        let mut passes = Passes::default();
        let rows = [1, 0, 3, 9, 0, 1, 1, 1];
        assert_eq!(passes.cut(&rows).len(), 1, "all together");
        passes.lacked(9);
        assert_eq!(passes.cut(&rows), [0..3, 3..5, 5..8], "at most four, but for one that has more");
        passes.lacked(16);
        assert_eq!(passes.most, Some(4), "that was known");
        passes.lacked(2);
        passes.lacked(1);
        assert_eq!(passes.cut(&rows), [0..2, 2..3, 3..5, 5..6, 6..7, 7..8]);
        assert_eq!(passes.cut(&[]).len(), 1);
        (1..CALM).for_each(|_| passes.done());
        assert_eq!(passes.most, Some(1));
        passes.done();
        assert_eq!(passes.most, Some(2));
    }
}
