//! What is measured on held-out text: how much of the attention mass a way of choosing keys finds, at equal numbers of
//! keys read.
//!
//! Measured on queries that look far, over their far keys alone: what sinks and window hold is read by every method.

use super::head::Row;
use super::kept::{self, Kept};
use crate::table::{Style, draw};
use serde::{Deserialize, Serialize};

/// Shares of the far keys that are read.
pub const SHARES: [f64; 4] = [1.0 / 32.0, 1.0 / 16.0, 1.0 / 8.0, 1.0 / 4.0];

/// What one way of choosing found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recall {
    /// The way.
    pub name: String,
    /// Queries (row and query head) that were measured.
    pub queries: u64,
    /// Mean share of the far attention mass in the keys read, for each of [`SHARES`]; `null` in a file where scores were no
    /// numbers.
    #[serde(deserialize_with = "each_finite_or_nan")]
    pub mass: [f64; 4],
}

/// JSON knows no NaN: it is written as `null`.
fn each_finite_or_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<[f64; 4], D::Error> {
    Ok(<[Option<f64>; 4]>::deserialize(from)?.map(|x| x.unwrap_or(f64::NAN)))
}

/// What was measured of a layer on held-out text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// The layer.
    pub layer: usize,
    /// Of a decode method: the ways of choosing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recalls: Vec<Recall>,
    /// Of a prefill method: the ways of reading.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Kept>,
}

/// Sums of one way of choosing.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    mass: [f64; 4],
    queries: u64,
}

impl Tally {
    pub fn add(&mut self, other: &Self) {
        self.mass.iter_mut().zip(other.mass).for_each(|(to, x)| *to += x);
        self.queries += other.queries;
    }

    pub fn named(self, name: &str) -> Recall {
        let mass = self.mass.map(|sum| sum / self.queries.max(1) as f64);
        Recall { name: name.to_owned(), queries: self.queries, mass }
    }

    /// A query whose clusters are read in `order`; of the last one as many keys as are still allowed, so that the number
    /// of keys is exactly that of any other way. `clusters` holds (keys, mass) of each.
    pub fn add_clusters(&mut self, order: &[usize], clusters: &[(f64, f64)]) {
        let keys: f64 = clusters.iter().map(|(keys, _)| keys).sum();
        for (sum, share) in self.mass.iter_mut().zip(SHARES) {
            let mut left = share * keys;
            for &c in order {
                let (keys, mass) = clusters[c];
                if keys > left {
                    *sum += if keys > 0.0 { mass * left / keys } else { 0.0 };
                    break;
                }
                *sum += mass;
                left -= keys;
            }
        }
        self.queries += 1;
    }

    /// A query whose keys are read in `order`, the best quarter of them at least; `mass` holds each key's.
    pub fn add_keys(&mut self, order: &[usize], mass: &[f32]) {
        for (sum, share) in self.mass.iter_mut().zip(SHARES) {
            let keys = share * mass.len() as f64;
            let whole = keys as usize;
            *sum += order[..whole].iter().map(|&i| f64::from(mass[i])).sum::<f64>();
            *sum += order.get(whole).map_or(0.0, |&i| f64::from(mass[i]) * (keys - whole as f64));
        }
        self.queries += 1;
    }
}

/// The places of a line by descending value; of equal ones the first comes first.
pub(super) fn descending(line: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..line.len()).collect();
    order.sort_by(|&a, &b| line[b].total_cmp(&line[a]));
    order
}

/// The places of a line's greatest values, in any order; of equal ones the first are taken.
pub(super) fn greatest(line: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..line.len()).collect();
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, |&a, &b| line[b].total_cmp(&line[a]).then(a.cmp(&b)));
    }
    order.truncate(count);
    order
}

/// What a ranking of a row's far keys finds, and the best ranking that serves all heads of the group.
pub(super) fn rank(row: &Row, importance: impl Fn(&Row) -> Vec<f32>) -> (Tally, Tally) {
    let (mut own, mut oracle) = (Tally::default(), Tally::default());
    let looking: Vec<usize> = (0..row.heads()).filter(|&g| row.looks_far(g)).collect();
    if looking.is_empty() {
        return (own, oracle);
    }
    let mass: Vec<Vec<f32>> = (0..row.heads()).map(|g| row.far_mass(g)).collect();
    let sums: Vec<f32> = (0..row.far.len()).map(|i| mass.iter().map(|mass| mass[i]).sum()).collect();
    let (order, best) = (descending(&importance(row)), descending(&sums));
    for g in looking {
        own.add_keys(&order, &mass[g]);
        oracle.add_keys(&best, &mass[g]);
    }
    (own, oracle)
}

/// Each way's mean over the layers, weighted by their queries.
pub fn mean(reports: &[LayerReport]) -> Vec<Recall> {
    let mut all: Vec<(String, Tally)> = Vec::new();
    for recall in reports.iter().flat_map(|report| &report.recalls) {
        let tally = Tally { mass: recall.mass.map(|m| m * recall.queries as f64), queries: recall.queries };
        match all.iter_mut().find(|(name, _)| *name == recall.name) {
            Some((_, sum)) => sum.add(&tally),
            None => all.push((recall.name.clone(), tally)),
        }
    }
    all.into_iter().map(|(name, tally)| tally.named(&name)).collect()
}

/// A row for each layer and way, and for the mean of all layers.
pub fn table(reports: &[LayerReport], style: Style) -> String {
    let lines =
        if reports.iter().any(|report| !report.kept.is_empty()) { of_kept(reports) } else { of_recalls(reports) };
    draw(&lines, style)
}

fn of_recalls(reports: &[LayerReport]) -> Vec<Vec<String>> {
    let mut lines = vec![vec!["layer".to_owned(), "chosen by".into(), "queries".into()]];
    lines[0].extend(SHARES.iter().map(|share| format!("1/{:.0} of keys", 1.0 / share)));
    let mut add = |layer: &str, recall: &Recall| {
        let mut line = vec![layer.to_owned(), recall.name.clone(), recall.queries.to_string()];
        line.extend(recall.mass.iter().map(|mass| format!("{:.1} %", mass * 100.0)));
        lines.push(line);
    };
    for report in reports {
        report.recalls.iter().for_each(|recall| add(&report.layer.to_string(), recall));
    }
    if reports.len() > 1 {
        mean(reports).iter().for_each(|recall| add("all", recall));
    }
    lines
}

fn of_kept(reports: &[LayerReport]) -> Vec<Vec<String>> {
    let mut lines = vec![["layer", "read", "queries", "density", "mass kept", "least"].map(str::to_owned).to_vec()];
    let mut add = |layer: &str, kept: &Kept| {
        let shares = [kept.density, kept.mean, kept.min].map(|share| format!("{:.1} %", share * 100.0));
        lines.push([vec![layer.to_owned(), kept.name.clone(), kept.queries.to_string()], shares.to_vec()].concat());
    };
    for report in reports {
        report.kept.iter().for_each(|kept| add(&report.layer.to_string(), kept));
    }
    if reports.len() > 1 {
        kept::mean(reports.iter().flat_map(|report| &report.kept)).iter().for_each(|kept| add("all", kept));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_numbers_of_keys_are_read_of_clusters_of_any_size() {
        let mut tally = Tally::default();
        // 64 keys: budgets 2, 4, 8 and 16.
        tally.add_clusters(&[1, 0, 2], &[(10.0, 0.5), (4.0, 0.3), (50.0, 0.2)]);
        let recall = tally.named("x");
        let expected = [0.15, 0.3, 0.3 + 0.5 * 0.4, 0.8 + 0.2 * 2.0 / 50.0];
        assert!(recall.mass.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{recall:?}");
        // Empty clusters cost nothing.
        let mut tally = Tally::default();
        tally.add_clusters(&[0, 1], &[(0.0, 0.0), (64.0, 1.0)]);
        assert_eq!(tally.named("x").mass, SHARES);
    }

    #[test]
    fn keys_in_order_hold_the_share_that_they_hold() {
        let mut mass = vec![0.0; 48];
        (mass[7], mass[3]) = (0.6, 0.4);
        let mut tally = Tally::default();
        tally.add_keys(&descending(&mass), &mass);
        let recall = tally.named("x");
        // 1.5, 3, … keys.
        assert!((recall.mass[0] - 0.8).abs() < 1e-6 && (recall.mass[1] - 1.0).abs() < 1e-6, "{recall:?}");
        let line = [1.0, 3.0, 3.0, 2.0, 3.0];
        assert_eq!(descending(&line), [1, 2, 4, 3, 0]);
        for count in 0..7 {
            let (mut some, mut first) = (greatest(&line, count), descending(&line));
            first.truncate(count);
            some.sort_unstable();
            first.sort_unstable();
            assert_eq!(some, first, "{count}");
        }
    }

    #[test]
    fn tables_end_with_the_mean() {
        let recall = |queries, mass| Recall { name: "oracle".into(), queries, mass: [mass; 4] };
        let report = |layer, queries, mass| {
            let recalls = vec![recall(queries, mass)];
            LayerReport { layer, recalls, ..LayerReport::default() }
        };
        let reports = [report(3, 10, 0.5), report(4, 30, 0.9)];
        assert!((mean(&reports)[0].mass[0] - 0.8).abs() < 1e-12);
        let text = table(&reports, Style::Text);
        assert!(text.starts_with("layer  chosen by  queries  1/32 of keys") && text.contains("all"), "{text}");
        assert!(table(&reports, Style::Markdown).lines().nth(1).unwrap().starts_with("| --- |"));
        let kept = |min| Kept { name: "a_shape".into(), queries: 5, density: 0.25, mean: 0.75, min };
        let report = |layer, min| LayerReport { layer, kept: vec![kept(min)], ..LayerReport::default() };
        let text = table(&[report(0, 0.5), report(1, 0.25)], Style::Text);
        assert!(text.ends_with("all    a_shape  10       25.0 %   75.0 %     25.0 %\n"), "{text}");
    }
}
