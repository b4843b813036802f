//! What rows chose in a layer, kept for their sequences' reports until a device has told what it came to.

use crate::method::Choice;
use crate::report::PhaseReport;
use candle_core::Result;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use taper_kernels::decode::{Budget, DecodeRow, HeadSelection, Selection};

/// Some of the rows that were chosen for together.
#[derive(Debug, Clone)]
pub(crate) struct Unread {
    of: Arc<Together>,
    rows: Range<usize>,
}

/// What rows that were chosen for together read in a layer.
#[derive(Debug)]
struct Together {
    layer: usize,
    /// Keys scored to choose `[R]`, and budgets `[R, q_heads]` of a method that samples, as far as the host knew.
    scored: Vec<usize>,
    budgets: Option<Vec<Budget>>,
    /// What the rows saw.
    visible: Vec<Range<usize>>,
    /// What each row and KV head read, where the host knows and somebody wants to.
    heads: Option<Vec<HeadSelection>>,
    /// What the device is to be asked; none where there is nothing to ask.
    choice: Option<Selection>,
    told: OnceLock<Told>,
}

/// What the choice came to.
#[derive(Debug)]
struct Told {
    /// Keys read `[R, kv_heads]`.
    counts: Vec<usize>,
    /// Keys scored to draw values `[R, kv_heads]`.
    scored: Option<Vec<usize>>,
    /// `[R, q_heads]`.
    budgets: Option<Vec<Budget>>,
}

impl Told {
    fn read(choice: &Selection, visible: &[Range<usize>]) -> Result<Self> {
        let row = |visible: &Range<usize>| DecodeRow { table: &[], visible: visible.clone() };
        let rows: Vec<DecodeRow> = visible.iter().map(row).collect();
        Ok(Self { counts: choice.counts(&rows)?, scored: choice.scored()?, budgets: choice.budgets()? })
    }
}

impl Together {
    /// Waits for the device, the first time.
    fn told(&self) -> Result<&Told> {
        match (self.told.get(), &self.choice) {
            (None, Some(choice)) => {
                let told = Told::read(choice, &self.visible)?;
                Ok(self.told.get_or_init(|| told))
            }
            (told, _) => told.ok_or_else(|| candle_core::Error::Msg("a choice of which nothing is known".into())),
        }
    }
}

impl Unread {
    /// All rows of a choice, which saw so many keys each; `traced`: whether somebody wants to know which they read.
    ///
    /// # Errors
    /// A choice of other rows.
    pub fn new(layer: usize, choice: &Choice, visible: Vec<Range<usize>>, traced: bool) -> Result<Self> {
        let (selection, rows) = (&choice.selection, 0..visible.len());
        let (told, waits) = (OnceLock::new(), selection.counts_wait());
        if !waits {
            let _ = told.set(Told::read(selection, &visible)?);
        }
        let of = Together {
            layer,
            scored: choice.keys_scored(visible.len()),
            budgets: choice.budgets.clone(),
            heads: traced.then(|| selection.heads().ok().map(<[HeadSelection]>::to_vec)).flatten(),
            choice: waits.then(|| selection.told()),
            visible,
            told,
        };
        Ok(Self { of: Arc::new(of), rows })
    }

    /// One of the rows.
    pub fn row(&self, row: usize) -> Self {
        Self { of: Arc::clone(&self.of), rows: row..row + 1 }
    }

    /// Whether a device has yet to tell what it came to.
    pub fn waits(&self) -> bool {
        self.of.told.get().is_none()
    }

    /// Takes it into a report. Waits for the device, where it has to.
    ///
    /// # Errors
    /// The device's.
    pub fn add_to(&self, report: &mut PhaseReport) -> Result<()> {
        let (of, told, rows) = (&*self.of, self.of.told()?, self.rows.clone());
        let part = |all: usize| {
            let each = all / of.visible.len().max(1);
            rows.start * each..rows.end * each
        };
        let (counts, visible) = (&told.counts[part(told.counts.len())], &of.visible[rows.clone()]);
        let kv_heads = counts.len() / visible.len().max(1);
        let read = counts.iter().sum::<usize>() as u64;
        let there = visible.iter().map(|visible| visible.len() * kv_heads).sum::<usize>() as u64;
        report.add(counts.len() as u64, read, there, counts.iter().copied().max().unwrap_or(0) as u64);
        let drawn = told.scored.as_ref().map_or(0, |scored| scored[part(scored.len())].iter().sum());
        report.add_scored((of.scored[rows.clone()].iter().sum::<usize>() + drawn) as u64);
        for budgets in [&of.budgets, &told.budgets].into_iter().flatten() {
            report.add_budgets(&budgets[part(budgets.len())]);
        }
        if let Some(trace) = &mut report.trace {
            let heads = of.heads.as_ref().map(|heads| &heads[part(heads.len())]);
            trace.add_rows(of.layer, heads, counts, visible);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::tests::Apart;
    use crate::report::Report;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_row_of_a_choice_reports_what_it_does_alone(
            seed in any::<u64>(),
            rows in 1usize..5,
            samples in any::<bool>(),
            traced in any::<bool>(),
        ) {
            let new = || Report::new(traced.then_some(1)).decode;
            let all = Apart::new(seed, rows, samples);
            let unread = |of: &Apart, at| Unread::new(1, &of.choice(at), of.visible.clone(), traced).unwrap();
            let together = unread(&all, 0);
            let (mut whole, mut split) = (new(), new());
            for row in 0..rows {
                let (mut report, mut alone) = (new(), new());
                together.row(row).add_to(&mut report).unwrap();
                unread(&all.row(row), row).add_to(&mut alone).unwrap();
                prop_assert_eq!(format!("{report:?}"), format!("{alone:?}"));
                together.row(row).add_to(&mut split).unwrap();
            }
            together.add_to(&mut whole).unwrap();
            prop_assert_eq!(format!("{whole:?}"), format!("{split:?}"));
        }
    }
}
