//! The trainers of prefill methods. They measure what the rows of query blocks all over a prompt keep of their attention.

use super::capture::{Captured, Wanted};
use super::kept::Tally;
use super::minference::{self, Search};
use super::plan::Method;
use super::prompt::{Prompt, measured, wanted};
use super::sample_attention::{self, Thresholds, best, candidates, lengths};
use super::{LayerReport, TrainError, Trainer};
use std::ops::Range;

/// A row of a TOML file.
fn row<const N: usize>(fields: [(&str, toml::Value); N]) -> toml::Table {
    fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn whole(x: usize) -> toml::Value {
    toml::Value::Integer(x as i64)
}

impl Trainer<'_> {
    /// What is captured of a sequence: the blocks that are measured, and the rows that choose.
    pub(super) fn wanted_of_prompt(&self, sequence: usize) -> Wanted {
        let tokens = self.corpus.sequences()[sequence].len();
        let measured = self.measured(sequence).into_iter();
        match self.plan.method {
            Method::SampleAttention { .. } => wanted(measured.chain(sample_attention::choosers(tokens))),
            _ => wanted(measured.chain([minference::choosers(tokens)])),
        }
    }

    fn measured(&self, sequence: usize) -> Vec<Range<usize>> {
        let tokens = self.corpus.sequences()[sequence].len();
        measured(tokens, self.plan.queries, self.plan.seed.wrapping_add(sequence as u64))
    }

    /// One layer of the sequences that are held out, or of the others.
    fn prompts<'b>(
        &self,
        captured: &'b [Vec<Captured>],
        place: usize,
        held_out: bool,
    ) -> candle_core::Result<Vec<Prompt<'b>>> {
        let sequences = captured.iter().enumerate().filter(|(i, _)| self.corpus.held_out(*i) == held_out);
        sequences.map(|(i, layers)| Prompt::new(&layers[place], self.shape.window, self.measured(i))).collect()
    }

    /// `MInference`'s patterns layer by layer; returns how many layers were there already.
    pub(super) fn patterns(&mut self) -> Result<usize, TrainError> {
        let left: Vec<usize> = self.checked.layers.iter().copied().filter(|&layer| !self.file.has(layer)).collect();
        let kept = self.checked.layers.len() - left.len();
        for group in self.groups(&left, true) {
            let captured = self.capture(&group, |_| true, |_| true)?;
            self.progress.begins("fitting patterns", group.len());
            for (place, &layer) in group.iter().enumerate() {
                let failed = TrainError::compute(layer);
                let search = |held_out: bool| {
                    self.prompts(&captured, place, held_out)
                        .and_then(|prompts| Search::new(prompts, self.checked.count))
                };
                let assigned = search(false).and_then(|search| search.run()).map_err(&failed)?;
                let kept = search(true).and_then(|search| search.report(&assigned)).map_err(&failed)?;
                let head = |(head, pattern)| -> Result<toml::Table, TrainError> {
                    let reads = toml::Value::try_from(pattern).map_err(|e| TrainError::file(self.file.path(), e))?;
                    Ok(row([("layer", whole(layer)), ("head", whole(head)), ("reads", reads)]))
                };
                let rows = assigned.best.iter().enumerate().map(head).collect::<Result<Vec<_>, _>>()?;
                self.file.add_rows(layer, rows, [LayerReport { layer, kept, ..LayerReport::default() }]);
                self.file.save()?;
                self.advance()?;
            }
        }
        Ok(kept)
    }

    /// SampleAttention's thresholds, which serve all layers.
    pub(super) fn thresholds(&mut self) -> Result<usize, TrainError> {
        if !self.file.is_empty() {
            return Ok(self.checked.layers.len());
        }
        let lengths = lengths(self.corpus.length());
        let none = vec![vec![Tally::default(); candidates().len()]; lengths.len()];
        // By length and candidate: of all layers to choose by, of each to report.
        let (mut training, mut held_out) = (none.clone(), Vec::new());
        for group in self.groups(&self.checked.layers.clone(), true) {
            let captured = self.capture(&group, |_| true, |_| true)?;
            self.progress.begins("trying thresholds", group.len());
            for (place, &layer) in group.iter().enumerate() {
                let mut own = none.clone();
                for (held, to) in [(false, &mut training), (true, &mut own)] {
                    let failed = TrainError::compute(layer);
                    for prompt in self.prompts(&captured, place, held).map_err(&failed)? {
                        for (length, to) in lengths.iter().zip(&mut *to) {
                            let found = sample_attention::measure(&prompt, *length).map_err(&failed)?;
                            to.iter_mut().zip(&found).for_each(|(to, found)| to.add(found));
                        }
                    }
                }
                held_out.push((layer, own));
                self.advance()?;
            }
        }
        let chosen: Vec<usize> = training.iter().map(|tallies| best(tallies, self.checked.cra)).collect();
        let report = |(layer, own): (usize, Vec<Vec<Tally>>)| {
            let name =
                |length: usize, t: &Thresholds| format!("{length} tokens: {}, {}, {}", t.alpha_c, t.alpha_s, t.chunks);
            let of = |((length, tallies), &at): ((&usize, &Vec<Tally>), &usize)| {
                tallies[at].named(&name(*length, &candidates()[at]))
            };
            LayerReport {
                layer,
                kept: lengths.iter().zip(&own).zip(&chosen).map(of).collect(),
                ..LayerReport::default()
            }
        };
        let reports: Vec<LayerReport> = held_out.into_iter().map(report).collect();
        let bands = chosen.iter().enumerate().map(|(i, &at)| {
            let Thresholds { alpha_c, alpha_s, chunks } = candidates()[at];
            let [c, s] = [alpha_c, alpha_s].map(toml::Value::Float);
            let mut band = row([("alpha_c", c), ("alpha_s", s), ("chunks", whole(chunks))]);
            // What a length was tuned for serves up to the next.
            lengths.get(i + 1).map(|&next| band.insert("below".to_owned(), whole(next)));
            band
        });
        self.file.add_rows(0, bands.collect(), reports);
        self.file.save()?;
        Ok(0)
    }
}
