//! Rows after the prompt: chosen for, of one sequence or of several, attended together, reported and audited.

use super::{Part, Started, audited, next_row, plain, row, visible};
use crate::audit;
use crate::method::{Choice, DecodeMethod, DecodeStep, Earlier, KeyIndex};
use crate::sequence::Sequence;
use crate::unread::Unread;
use candle_core::{Result, Tensor};
use std::ops::Range;
use taper_kernels::decode::{Decode, DecodeRow, attend, stacked};
use taper_kernels::index::Part as IndexPart;
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kernels::philox::Stream;
use taper_kv_cache::BlockTable;

/// Most rows of one sequence that keys are chosen for at a time: what a method scores for each takes memory.
const ROWS: usize = 16;
/// Most sequences that keys are chosen for at a time.
pub const DECODE_SEQUENCES: usize = 32;
/// Most rows that keys are chosen for at a time, times the keys of the longest. One row may have more.
pub const DECODE_TOKENS: usize = 1 << 21;

/// Most tokens that an index lacks, where a method lets it lack some.
const BEHIND: usize = 31;

/// How many of their newest tokens the indices of rows that see so many keys may lack.
pub(super) fn may_lack(method: &dyn DecodeMethod, keys: impl IntoIterator<Item = usize>) -> usize {
    keys.into_iter().map(|keys| method.may_lack(keys)).min().unwrap_or(0).min(BEHIND)
}

/// How many rows of a sequence of so many keys are chosen for at a time.
pub(super) fn rows_together(keys: usize) -> usize {
    (DECODE_TOKENS / keys.max(1)).clamp(1, ROWS)
}

impl Part<'_> {
    /// Several tokens of one sequence. `q` `[tokens, q_heads, head_dim]`.
    pub(super) fn decode(&mut self, sequence: &mut Sequence, q: &Tensor) -> Result<Tensor> {
        let tokens = q.dims()[0];
        let method = sequence.decode_method().method.clone();
        // Where an index sums tokens up, a row must not see those of the rows after it.
        let whole = |index: &&dyn KeyIndex| index.shape(&self.shape, self.pool.dtype()).rows == BLOCK_TOKENS;
        let together = match self.wanted(&*method).iter().all(whole) {
            true => rows_together(sequence.len + tokens),
            false => 1,
        };
        let mut outs = Vec::new();
        for first in (0..tokens).step_by(together) {
            let count = together.min(tokens - first);
            let positions = sequence.len + first..sequence.len + first + count;
            let seen: Vec<_> = positions.clone().map(|at| row(self.shape, sequence, at)).collect();
            let indices = self.indices(&*method, &seen, sequence.prompt, &[(&sequence.table, positions.end)])?;
            outs.push(self.decode_rows(sequence, &*method, &q.narrow(0, first, count)?, positions, &indices)?);
        }
        stacked(outs)
    }

    /// The indices that a method wants in this layer.
    fn wanted<'m>(&self, method: &'m dyn DecodeMethod) -> Vec<&'m dyn KeyIndex> {
        if self.layer < method.indexed_from() { Vec::new() } else { method.indices() }
    }

    /// A method's indices and their names, each over the first tokens of every table, but for what it may lack; `prompt` is the
    /// sequences' prompt length. None where what the rows read follows from what they see.
    pub(super) fn indices(
        &mut self,
        method: &dyn DecodeMethod,
        rows: &[DecodeRow],
        prompt: usize,
        tables: &[(&BlockTable, usize)],
    ) -> Result<Vec<(String, Tensor)>> {
        let mut tensors = Vec::new();
        if method.plain(rows, self.shape.kv_heads).is_some() {
            return Ok(tensors);
        }
        let behind = if self.catches_up { 0 } else { may_lack(method, rows.iter().map(|row| row.visible.len())) };
        for index in self.wanted(method) {
            let (name, shape) = (index.name(), index.shape(&self.shape, self.pool.dtype()));
            let rotation = self.rotations.of(prompt);
            let extend =
                |to: &Tensor, kv: PagedKv<'_>, parts: &[IndexPart]| index.extend(self.layer, to, kv, parts, rotation);
            let tensor = self.pool.index((&name, shape), self.layer, (tables, behind), extend);
            tensors.push((name, tensor.map_err(candle_core::Error::wrap)?));
        }
        Ok(tensors)
    }

    fn decode_rows(
        &self,
        sequence: &mut Sequence,
        method: &dyn DecodeMethod,
        q: &Tensor,
        positions: Range<usize>,
        indices: &[(String, Tensor)],
    ) -> Result<Tensor> {
        let (choice, out) =
            self.with_step(&rows_at(sequence, positions.clone()), q, (indices, None), |step| step.run(method))?;
        let seen = positions.clone().map(|position| visible(self.shape, position)).collect();
        self.report(sequence, Unread::new(self.layer, &choice, seen, sequence.traced())?)?;
        self.audit(sequence, method, (q, &out), positions, indices)?;
        Ok(out)
    }

    /// What the next token of a sequence reads, and the indices that choosing took: as its method chooses, or, among drafts,
    /// as the first of their round chose.
    fn choose(&mut self, sequence: &mut Sequence, at: usize, q: &Tensor) -> Result<(Choice, Vec<(String, Tensor)>)> {
        let next = sequence.len;
        if let Some((held, seen)) = sequence.round.held(self.layer, next) {
            let batch = Decode { q, kv: self.pool.layer(self.layer), rows: &[next_row(self.shape, sequence)] };
            if let Some(selection) = held.extended(&batch, seen)? {
                return Ok((selection.into(), Vec::new()));
            }
        }
        let (choice, indices) = self.choose_anew(&[&*sequence], at, q)?;
        // A choice that takes no looking at keys is no better for being kept.
        if sequence.keeps_choices() && plain(self.shape, sequence).is_none() {
            sequence.round.hold(self.layer, choice.selection.clone(), next + 1);
        }
        Ok((choice, indices))
    }

    /// One token of each sequence, chosen for and read together, from the row `first` of the batch on. `q`
    /// `[spans, q_heads, head_dim]`.
    pub(super) fn decode_alike(&mut self, spans: &mut [Started], first: usize, q: &Tensor) -> Result<Tensor> {
        let (mut choices, mut known) = (Vec::new(), Vec::new());
        let mut at = 0;
        while at < spans.len() {
            let count = self.chosen_together(&spans[at..]);
            let (here, q) = (&mut spans[at..at + count], q.narrow(0, at, count)?);
            let (choice, indices) = match &mut *here {
                [span] => self.choose(span.sequence, first + at, &q)?,
                here => {
                    let sequences: Vec<&Sequence> = here.iter().map(|span| &*span.sequence).collect();
                    self.choose_anew(&sequences, first + at, &q)?
                }
            };
            let seen = here.iter().map(|span| visible(self.shape, span.sequence.len)).collect();
            let traced = here.iter().any(|span| span.sequence.traced());
            let unread = Unread::new(self.layer, &choice, seen, traced)?;
            for (row, span) in here.iter_mut().enumerate() {
                self.report(span.sequence, unread.row(row))?;
            }
            choices.push((count, choice));
            known.push((at..at + count, indices));
            at += count;
        }
        let choice = match choices.len() {
            1 => choices.swap_remove(0).1,
            _ => Choice::join(choices, (self.shape.kv_heads, self.shape.q_heads)),
        };
        let rows: Vec<DecodeRow> = spans.iter().map(|span| next_row(self.shape, span.sequence)).collect();
        let batch = Decode { q, kv: self.pool.layer(self.layer), rows: &rows };
        let out = attend(&batch, &choice.selection, choice.scores.as_ref())?;
        for (rows, indices) in known {
            for i in rows {
                let sequence = &mut *spans[i].sequence;
                let (method, next) = (sequence.decode_method().method.clone(), sequence.len..sequence.len + 1);
                self.audit(sequence, &*method, (&q.narrow(0, i, 1)?, &out.narrow(0, i, 1)?), next, &indices)?;
            }
        }
        Ok(out)
    }

    /// How many of the first spans, of one row each by one method, are chosen for together: a draft that may keep to a choice
    /// is alone with it, and where a rotary embedding heeds the length so is every row.
    fn chosen_together(&self, spans: &[Started]) -> usize {
        let alone = |span: &Started| span.sequence.keeps_choices() || self.rotations.heed_length();
        // What nothing can be chosen for must not keep others from it.
        let whole = |span: &Started| visible(self.shape, span.sequence.len).start == 0;
        if alone(&spans[0]) {
            return 1;
        }
        let with_first = |span: &&Started| !alone(span) && whole(span) == whole(&spans[0]);
        // What choosing works with is as long for each as for the longest.
        let mut longest = 0;
        let fits = |(count, span): &(usize, &Started)| {
            longest = longest.max(span.sequence.len + 1);
            *count == 0 || (count + 1) * longest <= DECODE_TOKENS
        };
        let rows = spans.iter().take(DECODE_SEQUENCES).take_while(with_first);
        rows.enumerate().take_while(fits).count()
    }

    /// What the next token of each sequence reads by the method that they share, and the indices that choosing took. `at`: the
    /// batch's row that is the first of them.
    fn choose_anew(
        &mut self,
        sequences: &[&Sequence],
        at: usize,
        q: &Tensor,
    ) -> Result<(Choice, Vec<(String, Tensor)>)> {
        let method = sequences[0].decode_method().method.clone();
        let layer = self.layer;
        if layer >= method.dense_layers()
            && let Some(all) = self.all_layers(sequences, at)?
        {
            let indices = vec![all.index(layer)];
            let rows: Vec<_> = sequences.iter().map(|&sequence| (sequence, sequence.len)).collect();
            let choice = self.with_step(&rows, q, (&indices, Some(at)), |step| step.choose(&*method))?;
            return Ok((choice, indices));
        }
        let tables: Vec<_> = sequences.iter().map(|sequence| (&sequence.table, sequence.len + 1)).collect();
        let seen: Vec<_> = sequences.iter().map(|sequence| row(self.shape, sequence, sequence.len)).collect();
        let indices = self.indices(&*method, &seen, sequences[0].prompt, &tables)?;
        let rows: Vec<_> = sequences.iter().map(|&sequence| (sequence, sequence.len)).collect();
        let choice = self.with_step(&rows, q, (&indices, None), |step| step.choose(&*method))?;
        Ok((choice, indices))
    }

    /// Runs something on rows, each a sequence's token at a position; if they are chosen for in all layers at once, from that row
    /// of the batch on. Those of several sequences are turned alike: a rotary
    /// embedding that heeds the length has rows of one sequence only.
    fn with_step<T>(
        &self,
        rows: &[(&Sequence, usize)],
        q: &Tensor,
        (indices, ahead): (&[(String, Tensor)], Option<usize>),
        run: impl FnOnce(&DecodeStep) -> Result<T>,
    ) -> Result<T> {
        let streams: Vec<Stream> = rows.iter().map(|&(sequence, at)| self.stream(sequence.seed, at)).collect();
        let seen: Vec<DecodeRow> = rows.iter().map(|&(sequence, at)| row(self.shape, sequence, at)).collect();
        let before = |some: Range<usize>| self.queries_before(rows, q, some);
        let all = ahead.and_then(|at| self.ahead.iter().find(|ahead| ahead.at == at)).map(|ahead| &ahead.of);
        let asks = rows.first().is_some_and(|(sequence, _)| sequence.decode_method().method.ahead());
        run(&DecodeStep {
            batch: Decode { q, kv: self.pool.layer(self.layer), rows: &seen },
            earlier: asks.then(|| Earlier::new(&before, rows.len(), all)),
            layer: self.layer,
            kv_heads: self.shape.kv_heads,
            streams: &streams,
            indices,
            rotation: self.rotations.of(rows[0].0.prompt),
        })
    }

    /// The queries of the tokens before some of the rows; a row's own of `q` where that is not known.
    fn queries_before(&self, rows: &[(&Sequence, usize)], q: &Tensor, some: Range<usize>) -> Result<Tensor> {
        let of = |(row, &(sequence, at)): (usize, &(&Sequence, usize))| {
            let before = at.checked_sub(1).filter(|&before| self.was_asked(sequence, before));
            let known = before.map(|before| sequence.queries.at(self.layer, before)).transpose()?.flatten();
            known.map_or_else(|| q.narrow(0, row, 1), Ok)
        };
        stacked(rows.iter().enumerate().take(some.end).skip(some.start).map(of).collect::<Result<_>>()?)
    }

    /// Whether a token's query counts for the one after it: not where its row read what it read whatever the queries, since
    /// a step of such rows on a device hands over none.
    pub(super) fn was_asked(&self, sequence: &Sequence, position: usize) -> bool {
        let row = [row(self.shape, sequence, position)];
        let plain = || sequence.spec.decode.method.plain(&row, self.shape.kv_heads).is_some();
        position < sequence.first_decoded() || !plain()
    }

    /// Takes what rows chose into the report.
    pub(super) fn report(&self, sequence: &mut Sequence, unread: Unread) -> Result<()> {
        if self.puts_off || unread.waits() {
            sequence.unread.push(unread);
            return Ok(());
        }
        unread.add_to(sequence.decode_report())
    }

    /// Compares with dense attention what of some rows' outputs the request wants compared.
    fn audit(
        &self,
        sequence: &mut Sequence,
        method: &dyn DecodeMethod,
        (q, out): (&Tensor, &Tensor),
        positions: Range<usize>,
        indices: &[(String, Tensor)],
    ) -> Result<()> {
        let wanted = |&row: &usize| audited(self.shape, sequence, positions.start + row);
        let audited: Vec<usize> = (0..positions.len()).filter(wanted).collect();
        if audited.is_empty() {
            return Ok(());
        }
        let rows = rows_at(sequence, positions.clone());
        let errors = self.with_step(&rows, q, (indices, None), |step| audit::decode(step, out, &audited))?;
        let report = sequence.decode_report();
        report.add_errors(&errors, method.promise());
        if let Some(trace) = &mut report.trace {
            for (&row, errors) in audited.iter().zip(errors.chunks(self.shape.q_heads)) {
                trace.add_errors(positions.start + row, errors);
            }
        }
        Ok(())
    }
}

/// A sequence's rows at positions.
fn rows_at(sequence: &Sequence, positions: Range<usize>) -> Vec<(&Sequence, usize)> {
    positions.map(|position| (sequence, position)).collect()
}
