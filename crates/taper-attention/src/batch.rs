//! One forward pass over a flat batch: stores keys and values, runs each sequence's method, reports.

mod ahead;
mod decode;
mod replay;
mod rotations;

pub use decode::{DECODE_SEQUENCES, DECODE_TOKENS};
pub use replay::{Replay, replay};

use crate::audit;
use crate::layer::{AttentionShape, LayerAttention, PlainStep, Repeats, Rotary};
use crate::method::{Carry, PrefillLayer, PrefillOutput};
use crate::methods::is_dense;
use crate::report::{PhaseReport, Report};
use crate::sequence::{By, Held, Phase, Sequence};
use crate::spec::AttentionSpec;
use crate::unread::Unread;
use ahead::Ahead;
pub(crate) use ahead::All;
use candle_core::{Result, Tensor, bail};
use decode::may_lack;
use rotations::StepRotations;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use taper_kernels::decode::{DecodeRow, Selection, stacked};
use taper_kernels::philox::Stream;
use taper_kernels::prefill::Mask;
use taper_kv_cache::{KvError, KvPool};

/// A sequence's share of a flat batch.
#[derive(Debug)]
pub struct Span<'a> {
    /// The sequence.
    pub sequence: &'a mut Sequence,
    /// Its next tokens; all of the context, all of the question, or all after the prompt.
    pub tokens: usize,
}

/// For each span, of a sequence and so many tokens, the first one that it is read together with: itself, or one before it.
/// Those that are sorted by it, in a stable way, are neighbours, as an [`AttentionBatch`] wants them.
pub fn leaders<'a>(spans: impl IntoIterator<Item = (&'a Sequence, usize)>) -> Vec<usize> {
    let mut leaders: Vec<(usize, (&Sequence, usize))> = Vec::new();
    let leader = |(place, span)| match leaders.iter().find(|(_, leader)| alike(*leader, span)) {
        Some((leader, _)) => *leader,
        None => {
            leaders.push((place, span));
            place
        }
    };
    spans.into_iter().enumerate().map(leader).collect()
}

/// Whether both are one row, by the same decode method, which reads all of both or of neither whatever the queries.
fn alike(a: (&Sequence, usize), b: (&Sequence, usize)) -> bool {
    let row = |(sequence, tokens): (&Sequence, usize)| tokens == 1 && sequence.attended_by() == By::DecodeMethod;
    let reads_all = |(sequence, _): (&Sequence, usize)| sequence.decode_method().method.reads_all(sequence.len + 1);
    row(a) && row(b) && a.0.decodes_as(b.0) && reads_all(a) == reads_all(b)
}

/// Attention for one forward pass. Tokens of the batch are those of the spans, in order.
///
/// A batch that is dropped before [`finish`](Self::finish) leaves its sequences as they were, but for room in the cache.
pub struct AttentionBatch<'a> {
    shape: AttentionShape,
    rotations: StepRotations<'a>,
    pool: &'a mut KvPool,
    spans: Vec<Started<'a>>,
    slots: Vec<u32>,
    lengths: Vec<u32>,
    /// Whether indices that may lack some tokens take them in, all of the batch together.
    catches_up: bool,
    /// Whether the reports are to have nothing of it yet.
    puts_off: bool,
    /// What is chosen in all layers at once, by the batch's row that it begins with.
    ahead: Vec<Ahead>,
}

/// A span, and what of its sequence the step changes, as it was before.
struct Started<'a> {
    sequence: &'a mut Sequence,
    tokens: usize,
    report: Report,
    carries: Vec<Carry>,
    unread: Vec<Unread>,
}

impl<'a> AttentionBatch<'a> {
    /// Makes room in the cache for every span.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], with room made for the spans before the one that failed; [`KvError::Device`] for a
    /// span that straddles the end of its prompt, or the beginning of the question.
    pub fn new(
        shape: AttentionShape,
        rotary: &'a dyn Rotary,
        pool: &'a mut KvPool,
        spans: Vec<Span<'a>>,
    ) -> std::result::Result<Self, KvError> {
        pool.begin_step();
        // Of the spans before one that fails, sequences are as they were once this is dropped.
        let (slots, lengths, started) = (Vec::new(), Vec::new(), Vec::with_capacity(spans.len()));
        let rotations = StepRotations::new(rotary, spans.iter().map(|span| span.sequence.prompt));
        let (catches_up, puts_off, ahead) = (false, false, Vec::new());
        let mut batch = Self { shape, rotations, pool, spans: started, slots, lengths, catches_up, puts_off, ahead };
        for Span { sequence, tokens } in spans {
            let end = sequence.len + tokens;
            let limit = match sequence.phase() {
                Phase::Context => sequence.context,
                Phase::Question => sequence.prompt,
                Phase::Answer => end,
            };
            if end > limit {
                let message = format!("a span ends at {end}, beyond a part of the prompt that ends at {limit}");
                return Err(candle_core::Error::Msg(message).into());
            }
            batch.pool.grow(&mut sequence.table, end)?;
            // What a step ahead took in that nobody asked for.
            batch.pool.unindex(&sequence.table, sequence.len);
            sequence.queries.cut(sequence.len);
            batch.slots.extend((sequence.len..end).map(|token| sequence.table.slot(token)));
            batch.lengths.extend((sequence.len..end).map(|token| sequence.prompt.max(token + 1) as u32));
            let (report, carries) = (sequence.report.clone(), sequence.carries.clone());
            let unread = std::mem::take(&mut sequence.unread);
            batch.spans.push(Started { sequence, tokens, report, carries, unread });
        }
        batch.spans.iter_mut().for_each(|span| span.sequence.underway = None);
        batch.catches_up = batch.spans.iter().any(|span| batch.falls_behind(span));
        Ok(batch)
    }

    /// Whether an index of a row's method that may lack some of its tokens would lack more than those.
    fn falls_behind(&self, Started { sequence, tokens, .. }: &Started) -> bool {
        let (method, keys) = (&sequence.decode_method().method, sequence.len + tokens);
        let behind = may_lack(&**method, [visible(self.shape, keys.saturating_sub(1)).len()]);
        if behind == 0 || sequence.attended_by() != By::DecodeMethod || plain(self.shape, sequence).is_some() {
            return false;
        }
        let lacks = |name: &str| self.pool.index_lacks(name, self.shape.layers - 1, (&sequence.table, keys));
        method.indices().iter().any(|index| lacks(&index.name()) > behind)
    }

    /// Leaves what its choices come to, all of it, to [`Sequence::settle`] or [`hold`](Self::hold).
    pub fn put_off(&mut self) {
        self.puts_off = true;
    }

    /// Absolute positions of the batch's tokens, in order.
    pub fn positions(&self) -> Vec<u32> {
        self.spans.iter().flat_map(|s| s.sequence.len..s.sequence.len + s.tokens).map(|p| p as u32).collect()
    }

    /// Takes the tokens as cached. Call once every layer has attended, and best once the step's results are there: what only
    /// a device knows of the choices is read here.
    ///
    /// # Errors
    /// The device's; then the step has not been.
    pub fn finish(mut self) -> Result<()> {
        Sequence::settle(self.spans.iter_mut().map(|span| &mut *span.sequence))?;
        self.advance();
        Ok(())
    }

    /// The same before the step's results are there: what was [put off](Self::put_off) is left to [`Sequence::settle`].
    pub fn advance(mut self) {
        for Started { sequence, tokens, report, .. } in std::mem::take(&mut self.spans) {
            let report = std::mem::replace(&mut sequence.report, report);
            sequence.advance(self.pool, tokens, report);
        }
    }

    /// What was [put off](Self::put_off) of each span, for [`Sequence::follow`]: sequences stay as they were, as if
    /// nobody had asked for the step. What indices took in of its tokens stays until another batch is made of the
    /// sequence.
    pub fn hold(mut self) -> Vec<Held> {
        let held = |Started { sequence, report, carries, unread, .. }| {
            let sequence: &mut Sequence = sequence;
            (sequence.report, sequence.carries) = (report, carries);
            Held(std::mem::replace(&mut sequence.unread, unread))
        };
        std::mem::take(&mut self.spans).into_iter().map(held).collect()
    }

    /// Whether every token is a row of its own that its sequence's decode method attends for, and none is audited.
    pub fn generates(&self) -> bool {
        let row = |Started { sequence, tokens, .. }: &Started| {
            let row = *tokens == 1 && sequence.attended_by() == By::DecodeMethod;
            row && !audited(self.shape, sequence, sequence.len)
        };
        self.spans.iter().all(row)
    }

    /// The cache, for other work of the same step.
    pub fn pool(&mut self) -> &mut KvPool {
        self.pool
    }

    /// One layer's share of the batch for a sequence.
    fn part(&mut self, layer: usize) -> (Part<'_>, &mut [Started<'a>]) {
        let Self { shape, rotations, pool, catches_up, puts_off, ahead, spans, .. } = self;
        (Part { shape: *shape, rotations, pool, layer, catches_up: *catches_up, puts_off: *puts_off, ahead }, spans)
    }
}

impl Drop for AttentionBatch<'_> {
    fn drop(&mut self) {
        for Started { sequence, report, carries, unread, .. } in self.spans.drain(..) {
            (sequence.report, sequence.carries, sequence.unread) = (report, carries, unread);
            self.pool.unindex(&sequence.table, sequence.len);
        }
    }
}

impl LayerAttention for AttentionBatch<'_> {
    fn length(&self, token: usize) -> u32 {
        self.lengths[token]
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.check(layer, q.dims3()?.0)?;
        self.pool.append(layer, k, v, &self.slots).map_err(candle_core::Error::wrap)?;
        self.attend_stored(layer, q, &[])
    }

    fn attend_joint(&mut self, layer: usize, qkv: &Tensor, angles: &Tensor) -> Result<Option<Tensor>> {
        self.check(layer, qkv.dim(0)?)?;
        let keep = self.kept_queries()?;
        let to = (!keep.is_empty()).then_some(&keep[..]);
        let stored = self.pool.append_joint(layer, qkv, angles, &self.slots, to).map_err(candle_core::Error::wrap)?;
        stored.map(|q| self.attend_stored(layer, &q, &keep)).transpose()
    }

    fn plain_step(&self) -> Option<PlainStep<'_>> {
        if !self.generates() {
            return None;
        }
        let selections: Option<Vec<_>> = self.spans.iter().map(|span| plain(self.shape, span.sequence)).collect();
        Some(PlainStep {
            selection: Selection::join(selections?),
            layers: (0..self.shape.layers).map(|layer| self.pool.layer(layer)).collect(),
            slots: &self.slots,
            rows: self.spans.iter().map(|span| next_row(self.shape, span.sequence)).collect(),
        })
    }

    fn repeats(&self) -> Option<Repeats> {
        let held = |span: &Started| span.sequence.traced() || span.sequence.keeps_choices();
        if !self.generates() || self.spans.iter().any(held) {
            return None;
        }
        let mut hash = DefaultHasher::new();
        self.catches_up.hash(&mut hash);
        for runs in self.spans.chunk_by(|a, b| alike((&*a.sequence, a.tokens), (&*b.sequence, b.tokens))) {
            let chosen = runs[0].sequence.decode_method();
            (runs.len(), &chosen.name, chosen.json.to_string()).hash(&mut hash);
            self.ahead_of(runs).hash(&mut hash);
        }
        Some(Repeats { kind: hash.finish(), k: self.pool.layer(0).k.clone() })
    }

    fn attended(&mut self) -> Result<()> {
        for layer in 0..self.shape.layers {
            let (part, spans) = self.part(layer);
            for Started { sequence, .. } in spans {
                let Some(selection) = plain(part.shape, sequence) else { bail!("attended: a step that is not plain") };
                let seen = [visible(part.shape, sequence.len)];
                let unread = Unread::new(layer, &selection.into(), seen.to_vec(), sequence.traced())?;
                part.report(sequence, unread)?;
            }
        }
        Ok(())
    }
}

/// What a sequence's token at a position sees.
fn row(shape: AttentionShape, sequence: &Sequence, position: usize) -> DecodeRow<'_> {
    DecodeRow { table: sequence.table.blocks(), visible: visible(shape, position) }
}

/// A sequence's next token.
fn next_row(shape: AttentionShape, sequence: &Sequence) -> DecodeRow<'_> {
    row(shape, sequence, sequence.len)
}

/// What it reads by its decode method, where that is plain.
fn plain(shape: AttentionShape, sequence: &Sequence) -> Option<Selection> {
    plain_at(shape, sequence, sequence.len)
}

/// The same of its token at a position.
fn plain_at(shape: AttentionShape, sequence: &Sequence, position: usize) -> Option<Selection> {
    sequence.decode_method().method.plain(&[row(shape, sequence, position)], shape.kv_heads)
}

/// Whether a sequence's token at a position, for which its decode method attends, is compared with dense attention: not with
/// itself.
fn audited(shape: AttentionShape, sequence: &Sequence, position: usize) -> bool {
    sequence.audits(position) && !plain_at(shape, sequence, position).is_some_and(|selection| selection.is_dense())
}

/// The tokens that one at a position sees, itself included.
fn visible(shape: AttentionShape, position: usize) -> Range<usize> {
    let tokens = position + 1;
    tokens.saturating_sub(shape.window.unwrap_or(tokens))..tokens
}

impl AttentionBatch<'_> {
    /// Whether so many tokens of a layer are those of the batch.
    fn check(&self, layer: usize, tokens: usize) -> Result<()> {
        if tokens != self.slots.len() || layer >= self.shape.layers {
            bail!("attention: {tokens} tokens in layer {layer}; expected {} in {:?}", self.slots.len(), self.shape);
        }
        Ok(())
    }

    /// Attends in a layer whose keys and values are stored; `kept` is where each token's queries were written to on their way,
    /// empty for none.
    fn attend_stored(&mut self, layer: usize, q: &Tensor, kept: &[Option<Tensor>]) -> Result<Tensor> {
        let (mut part, mut spans) = self.part(layer);
        let mut outs = Vec::new();
        let mut at = 0;
        while let [first, ..] = &*spans {
            let by = first.sequence.attended_by();
            // Neighbours that generate a token by the same method are attended together.
            let with_first = |span: &&Started| alike((&*first.sequence, first.tokens), (&*span.sequence, span.tokens));
            let count = spans.iter().take_while(with_first).count().max(1);
            let (here, rest) = spans.split_at_mut(count);
            let tokens = here.iter().map(|span| span.tokens).sum();
            let q = q.narrow(0, at, tokens)?;
            part.keep_queries(here, &q, kept.get(at..at + tokens).unwrap_or_default())?;
            outs.push(match here {
                [span] if by != By::DecodeMethod => part.prefill(span.sequence, q, by)?,
                [span] if span.tokens > 1 => part.decode(span.sequence, &q)?,
                spans => part.decode_alike(spans, at, &q)?,
            });
            at += tokens;
            spans = rest;
        }
        stacked(outs)
    }
}

/// One span in one layer.
struct Part<'a> {
    shape: AttentionShape,
    rotations: &'a StepRotations<'a>,
    pool: &'a mut KvPool,
    layer: usize,
    /// As of the batch.
    catches_up: bool,
    /// Whether the reports are to have nothing of it yet.
    puts_off: bool,
    /// As of the batch.
    ahead: &'a mut Vec<Ahead>,
}

impl Part<'_> {
    /// What keys a row's random draws.
    fn stream(&self, seed: u64, position: usize) -> Stream {
        Stream { seed, layer: self.layer as u32, head: 0, position: position as u32 }
    }

    /// Keeps the queries of spans' rows for methods that choose by the token before; those in `kept` lie there already.
    fn keep_queries(&self, spans: &mut [Started], q: &Tensor, kept: &[Option<Tensor>]) -> Result<()> {
        let mut at = 0;
        for Started { sequence, tokens, .. } in spans {
            match kept.get(at) {
                Some(Some(_)) if self.layer < sequence.spec.decode.method.dense_layers() => {}
                Some(Some(_)) => sequence.queries.written(self.layer, sequence.len)?,
                _ => sequence.keep_queries(self.layer, sequence.len, &q.narrow(0, at, *tokens)?)?,
            }
            at += *tokens;
        }
        Ok(())
    }

    fn prefill(&self, sequence: &mut Sequence, q: Tensor, by: By) -> Result<Tensor> {
        sequence.carries.resize(self.shape.layers, Carry::default());
        // Taken out while the rest of the sequence is read; a step that fails puts both back.
        let mut carry = std::mem::take(&mut sequence.carries[self.layer]);
        let mut report = std::mem::take(&mut sequence.report.prefill);
        let rows = sequence.prompt_layer(&self.shape, self.pool, self.layer, (q, 0));
        let output = match by {
            By::Dense | By::DecodeMethod => rows.attend(Mask::Causal)?,
            By::PrefillMethod => {
                let method = &sequence.spec.prefill.method;
                let choice = method.choose(&rows)?;
                report.add_scored(choice.scored);
                method.attend(&rows, &choice, &mut carry)?
            }
        };
        let audit = if by == By::PrefillMethod { prompt_audit(&sequence.spec) } else { 0.0 };
        let out = report_prompt(&self.shape, &rows, (audit, sequence.seed), output, &mut report)?;
        (sequence.carries[self.layer], sequence.report.prefill) = (carry, report);
        Ok(out)
    }
}

/// The share of the rows that a spec's prefill method attends which is compared with dense attention: not with itself.
pub(crate) fn prompt_audit(spec: &AttentionSpec) -> f64 {
    if is_dense(&spec.prefill) { 0.0 } else { spec.audit }
}

/// Takes what rows of a prompt read into a report, and compares a share of them, drawn by the seed, with dense attention;
/// returns their outputs.
pub(crate) fn report_prompt(
    shape: &AttentionShape,
    rows: &PrefillLayer,
    (share, seed): (f64, u64),
    output: PrefillOutput,
    report: &mut PhaseReport,
) -> Result<Tensor> {
    let positions = rows.start..rows.start + rows.rows();
    let there: usize = positions.clone().map(|p| Mask::Causal.count(p, shape.window)).sum();
    let PrefillOutput { out, keys, kept } = output;
    let heads = shape.q_heads as u64;
    report.add(positions.len() as u64 * heads, keys.read(shape.q_heads), there as u64 * heads, keys.most());
    if let Some(trace) = &mut report.trace {
        trace.add_prompt(shape, rows.layer, &keys, there as u64);
    }
    report.add_kept(&kept);
    let wanted = |row: &usize| audit::wanted(seed, rows.start + row, share);
    let audited: Vec<usize> = (0..positions.len()).filter(wanted).collect();
    if !audited.is_empty() {
        report.add_errors(&audit::prefill(rows, &out, &audited)?, None);
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
