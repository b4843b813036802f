//! How much of prompts' attention a way of reading keeps, and for how many keys.

use crate::results::finite_or_nan;
use serde::{Deserialize, Serialize};

/// What one way of reading came to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// The way.
    pub name: String,
    /// Queries (row and query head) that were measured.
    pub queries: u64,
    /// Share of the keys that they read.
    pub density: f64,
    /// Mean share of their attention mass in these keys; `null` in a file where scores were no numbers.
    #[serde(deserialize_with = "finite_or_nan")]
    pub mean: f64,
    /// The least of them.
    #[serde(deserialize_with = "finite_or_nan")]
    pub min: f64,
}

/// Sums of one way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tally {
    queries: u64,
    sum: f64,
    min: f64,
    read: u64,
    there: u64,
}

impl Default for Tally {
    fn default() -> Self {
        Self { queries: 0, sum: 0.0, min: 1.0, read: 0, there: 0 }
    }
}

impl Tally {
    /// A query that keeps a share of its mass by reading so many of the keys that there are.
    pub fn see(&mut self, share: f64, read: u64, there: u64) {
        // Rounding alone would make more than everything of it, and no number of scores that are none.
        let share = if share > 1.0 { 1.0 } else { share };
        self.queries += 1;
        self.sum += share;
        self.min = if share < self.min || share.is_nan() { share } else { self.min };
        self.read += read;
        self.there += there;
    }

    pub fn add(&mut self, other: &Self) {
        self.queries += other.queries;
        self.sum += other.sum;
        self.min = if other.min < self.min || other.min.is_nan() { other.min } else { self.min };
        self.read += other.read;
        self.there += other.there;
    }

    /// Mean share.
    pub fn mean(&self) -> f64 {
        self.sum / self.queries.max(1) as f64
    }

    /// Share of the keys that were read.
    pub fn density(&self) -> f64 {
        self.read as f64 / self.there.max(1) as f64
    }

    pub fn named(&self, name: &str) -> Kept {
        let (density, mean) = (self.density(), self.mean());
        Kept { name: name.to_owned(), queries: self.queries, density, mean, min: self.min }
    }
}

/// Each way's mean over layers, weighted by their queries: the same rows of every layer, so that densities are too.
pub(super) fn mean<'a>(all: impl IntoIterator<Item = &'a Kept>) -> Vec<Kept> {
    let mut sums: Vec<Kept> = Vec::new();
    for kept in all {
        let Some(sum) = sums.iter_mut().find(|sum| sum.name == kept.name) else {
            sums.push(kept.clone());
            continue;
        };
        let (a, b) = (sum.queries as f64, kept.queries as f64);
        let weighted = |x: f64, y: f64| (x * a + y * b) / (a + b).max(1.0);
        sum.density = weighted(sum.density, kept.density);
        sum.mean = weighted(sum.mean, kept.mean);
        sum.min = sum.min.min(kept.min);
        sum.queries += kept.queries;
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tallies_add_up_and_layers_are_weighted_by_their_queries() {
        let (mut one, mut other) = (Tally::default(), Tally::default());
        one.see(0.5, 10, 40);
        other.see(1.0 + 1e-9, 30, 60);
        other.see(0.9, 20, 100);
        let mut both = one;
        both.add(&other);
        let kept = both.named("x");
        assert_eq!((kept.queries, kept.min, kept.density), (3, 0.5, 0.3));
        assert!((kept.mean - 0.8).abs() < 1e-12);
        let layers = [one.named("x"), other.named("x"), other.named("y")];
        let all = mean(&layers);
        assert!(all.len() == 2 && (all[0].mean - kept.mean).abs() < 1e-12 && all[0].min == 0.5, "{all:?}");
        assert_eq!(all[1], layers[2]);
        one.see(f64::NAN, 1, 1);
        assert!(one.named("x").min.is_nan() && one.mean().is_nan());
    }
}
