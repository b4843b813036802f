//! One forward pass over a flat batch: stores keys and values, runs each sequence's method, reports.

mod replay;

pub use replay::{Replay, replay};

use crate::audit;
use crate::layer::{AttentionShape, LayerAttention, Rotary};
use crate::method::{Carry, DecodeMethod, DecodeStep, KeyIndex, PrefillLayer, PrefillOutput};
use crate::report::{AttentionUsage, PhaseReport, Report};
use crate::spec::{AttentionSpec, Question};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;
use std::sync::Arc;
use taper_kernels::decode::{Decode, DecodeRow, Selection};
use taper_kernels::index::Part as IndexPart;
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kernels::philox::Stream;
use taper_kernels::prefill::Mask;
use taper_kernels::rotary::Rotation;
use taper_kv_cache::{BlockTable, KvError, KvPool};

/// The attention state of one sequence: its spec, its blocks, its report.
#[derive(Debug)]
pub struct Sequence {
    spec: Arc<AttentionSpec>,
    seed: u64,
    prompt: usize,
    /// Tokens of the prompt before the question; all where the question is nothing special.
    context: usize,
    len: usize,
    table: BlockTable,
    /// Choices of the step's layers so far whose sizes a device has yet to tell, and what their rows saw.
    unread: Vec<(Selection, Vec<Range<usize>>)>,
    /// What the prefill method keeps between chunks `[layers]`; empty before the first and after the last.
    carries: Vec<Carry>,
    report: Report,
}

impl Sequence {
    /// An empty sequence whose first `prompt_tokens` tokens are attended by the spec's prefill method and the others by
    /// its decode method. `seed` keys its random draws.
    pub fn new(spec: Arc<AttentionSpec>, seed: u64, prompt_tokens: usize) -> Self {
        Self {
            spec,
            seed,
            prompt: prompt_tokens,
            context: prompt_tokens,
            len: 0,
            table: BlockTable::default(),
            unread: Vec::new(),
            carries: Vec::new(),
            report: Report::default(),
        }
    }

    /// Takes the last `tokens` tokens of the prompt as the question, which the spec may want attended otherwise.
    #[must_use]
    pub fn with_question(mut self, tokens: usize) -> Self {
        if self.spec.question != Question::Prefill {
            self.context = self.prompt.saturating_sub(tokens);
        }
        self
    }

    /// Tokens whose keys and values are cached.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt
    }

    /// Prompt tokens that the next step takes: at most `max_tokens`, unless the prefill method must see more at once. 0
    /// once the prompt is done.
    pub fn chunk(&self, max_tokens: usize) -> usize {
        match self.phase() {
            Phase::Context => self.spec.prefill.method.cut(self.len, self.context, max_tokens) - self.len,
            Phase::Question => (self.prompt - self.len).min(max_tokens),
            Phase::Answer => 0,
        }
    }

    /// What the next token belongs to.
    fn phase(&self) -> Phase {
        match self.len {
            len if len < self.context => Phase::Context,
            len if len < self.prompt => Phase::Question,
            _ => Phase::Answer,
        }
    }

    /// The blocks, for the pool to grow or release.
    pub fn table_mut(&mut self) -> &mut BlockTable {
        &mut self.table
    }

    /// The blocks.
    pub fn table(&self) -> &BlockTable {
        &self.table
    }

    /// A copy that shares the whole blocks so far, with draws of its own.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`].
    pub fn fork(&self, pool: &mut KvPool, seed: u64) -> std::result::Result<Self, KvError> {
        let table = pool.fork(&self.table, self.len)?;
        let (spec, carries, report) = (self.spec.clone(), self.carries.clone(), self.report.clone());
        Ok(Self { spec, seed, table, unread: Vec::new(), carries, report, ..*self })
    }

    /// A copy in another pool, which may be on another device.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], a pool for another model, or a prompt that is not all cached.
    pub fn move_to(&self, from: &KvPool, to: &mut KvPool, seed: u64) -> std::result::Result<Self, KvError> {
        if self.len < self.context {
            let message = format!("{} of {} prompt tokens are cached; the rest comes first", self.len, self.context);
            return Err(candle_core::Error::Msg(message).into());
        }
        let table = to.adopt(from, &self.table, self.len)?;
        let (spec, report) = (self.spec.clone(), self.report.clone());
        Ok(Self { spec, seed, table, unread: Vec::new(), carries: Vec::new(), report, ..*self })
    }

    /// From here on tokens are attended by the decode method of `spec`, and audited as often as it says.
    pub fn decode_by(&mut self, spec: &AttentionSpec) {
        let (decode, audit) = (spec.decode.clone(), spec.audit);
        self.spec = Arc::new(AttentionSpec { decode, audit, ..(*self.spec).clone() });
    }

    /// Lets the tokens after the first `tokens` go, as if they had never come. Those of the prompt stay.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if a shared block must be copied and there is none.
    pub fn truncate(&mut self, pool: &mut KvPool, tokens: usize) -> std::result::Result<(), KvError> {
        let tokens = tokens.clamp(self.prompt.min(self.len), self.len);
        pool.truncate(&mut self.table, tokens)?;
        self.len = tokens;
        Ok(())
    }

    /// Takes in what was put off: the device is waited for once a step.
    fn settle(&mut self) -> Result<()> {
        for (selection, visible) in std::mem::take(&mut self.unread) {
            let row = |visible: &Range<usize>| DecodeRow { table: &[], visible: visible.clone() };
            add_read(&mut self.report.decode, &selection, &visible.iter().map(row).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// What attention came to so far.
    pub fn usage(&self) -> AttentionUsage {
        self.report.usage(&self.spec, self.seed)
    }
}

/// The parts of a sequence, each attended in its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Context,
    Question,
    Answer,
}

/// A sequence's share of a flat batch.
#[derive(Debug)]
pub struct Span<'a> {
    /// The sequence.
    pub sequence: &'a mut Sequence,
    /// Its next tokens; all of the context, all of the question, or all after the prompt.
    pub tokens: usize,
}

/// Attention for one forward pass. Tokens of the batch are those of the spans, in order.
pub struct AttentionBatch<'a> {
    shape: AttentionShape,
    rotary: &'a dyn Rotary,
    pool: &'a mut KvPool,
    spans: Vec<Span<'a>>,
    slots: Vec<u32>,
    lengths: Vec<u32>,
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
        let (mut slots, mut lengths) = (Vec::new(), Vec::new());
        let mut spans = spans;
        for Span { sequence, tokens } in &mut spans {
            let end = sequence.len + *tokens;
            let limit = match sequence.phase() {
                Phase::Context => sequence.context,
                Phase::Question => sequence.prompt,
                Phase::Answer => end,
            };
            if end > limit {
                let message = format!("a span ends at {end}, beyond a part of the prompt that ends at {limit}");
                return Err(candle_core::Error::Msg(message).into());
            }
            pool.grow(&mut sequence.table, end)?;
            slots.extend((sequence.len..end).map(|token| sequence.table.slot(token)));
            lengths.extend((sequence.len..end).map(|token| sequence.prompt.max(token + 1) as u32));
        }
        Ok(Self { shape, rotary, pool, spans, slots, lengths })
    }

    /// Absolute positions of the batch's tokens, in order.
    pub fn positions(&self) -> Vec<u32> {
        self.spans.iter().flat_map(|s| s.sequence.len..s.sequence.len + s.tokens).map(|p| p as u32).collect()
    }

    /// Takes the tokens as cached. Call once every layer has attended.
    pub fn finish(self) {
        for Span { sequence, tokens } in self.spans {
            sequence.len += tokens;
            if sequence.len >= sequence.context {
                sequence.carries.clear();
            }
        }
    }
}

impl LayerAttention for AttentionBatch<'_> {
    fn length(&self, token: usize) -> u32 {
        self.lengths[token]
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (tokens, ..) = q.dims3()?;
        if tokens != self.slots.len() || layer >= self.shape.layers {
            bail!("attention: {tokens} tokens in layer {layer}; expected {} in {:?}", self.slots.len(), self.shape);
        }
        self.pool.append(layer, k, v, &self.slots).map_err(candle_core::Error::wrap)?;
        let mut outs = Vec::with_capacity(self.spans.len());
        let mut at = 0;
        for Span { sequence, tokens } in &mut self.spans {
            let q = q.narrow(0, at, *tokens)?;
            at += *tokens;
            let mut part = Part { shape: self.shape, rotary: self.rotary, pool: self.pool, layer };
            outs.push(match (sequence.phase(), sequence.spec.question) {
                (Phase::Context, _) => part.prefill(sequence, q, PrefillBy::Method)?,
                (Phase::Question, Question::Prefill | Question::Dense) => {
                    part.prefill(sequence, q, PrefillBy::Dense)?
                }
                (Phase::Question, Question::Decode) | (Phase::Answer, _) => part.decode(sequence, &q)?,
            });
        }
        if layer + 1 == self.shape.layers {
            self.spans.iter_mut().try_for_each(|span| span.sequence.settle())?;
        }
        if outs.len() == 1 { Ok(outs.swap_remove(0)) } else { Tensor::cat(&outs, 0) }
    }
}

/// What attends for a part of a prompt.
#[derive(Debug, Clone, Copy)]
enum PrefillBy {
    Method,
    Dense,
}

/// One span in one layer.
struct Part<'a> {
    shape: AttentionShape,
    rotary: &'a dyn Rotary,
    pool: &'a mut KvPool,
    layer: usize,
}

/// Rows after the prompt that are planned together; what a method scores for each takes memory.
const DECODE_ROWS: usize = 16;

impl Part<'_> {
    fn stream(&self, seed: u64, position: usize) -> Stream {
        Stream { seed, layer: self.layer as u32, head: 0, position: position as u32 }
    }

    fn prefill(&self, sequence: &mut Sequence, q: Tensor, by: PrefillBy) -> Result<Tensor> {
        let rows = q.dims()[0];
        let layer = PrefillLayer {
            q,
            kv: self.pool.layer(self.layer),
            table: sequence.table.blocks(),
            layer: self.layer,
            start: sequence.len,
            prompt: sequence.context,
            window: self.shape.window,
        };
        let output = match by {
            PrefillBy::Dense => layer.attend(Mask::Causal)?,
            PrefillBy::Method => {
                sequence.carries.resize(self.shape.layers, Carry::default());
                sequence.spec.prefill.method.attend(&layer, &mut sequence.carries[self.layer])?
            }
        };
        let there: usize = (layer.start..layer.start + rows).map(|p| Mask::Causal.count(p, self.shape.window)).sum();
        let report = &mut sequence.report.prefill;
        let PrefillOutput { out, keys, kept, scored } = output;
        let (read, most) = (keys.iter().map(|k| k.read).sum(), keys.iter().map(|k| k.most).max().unwrap_or(0));
        let heads = self.shape.q_heads as u64;
        report.add(rows as u64 * heads, read, there as u64 * heads, most);
        report.add_kept(&kept);
        report.add_scored(scored);
        let audited: Vec<usize> = (0..rows)
            .filter(|row| audit::wanted(&self.stream(sequence.seed, layer.start + row), sequence.spec.audit))
            .collect();
        if !audited.is_empty() {
            report.add_errors(&audit::prefill(&layer, &out, &audited)?, None);
        }
        Ok(out)
    }

    fn decode(&mut self, sequence: &mut Sequence, q: &Tensor) -> Result<Tensor> {
        let tokens = q.dims()[0];
        let method = sequence.spec.decode.method.clone();
        // Where an index sums tokens up, a row must not see those of the rows after it.
        let whole = |index: &&dyn KeyIndex| index.shape(&self.shape, self.pool.dtype()).rows == BLOCK_TOKENS;
        let together = if self.wanted(&*method).iter().all(whole) { DECODE_ROWS } else { 1 };
        let mut outs = Vec::new();
        for first in (0..tokens).step_by(together) {
            let count = together.min(tokens - first);
            let positions = sequence.len + first..sequence.len + first + count;
            let indices = self.indices(sequence, &*method, positions.end)?;
            outs.push(self.decode_rows(sequence, &*method, &q.narrow(0, first, count)?, positions, &indices)?);
        }
        if outs.len() == 1 { Ok(outs.swap_remove(0)) } else { Tensor::cat(&outs, 0) }
    }

    /// The indices that a method wants in this layer.
    fn wanted<'m>(&self, method: &'m dyn DecodeMethod) -> Vec<&'m dyn KeyIndex> {
        if self.layer < method.dense_layers() { Vec::new() } else { method.indices() }
    }

    /// They and their names, over the first `end` tokens of a sequence.
    fn indices(&mut self, sequence: &Sequence, method: &dyn DecodeMethod, end: usize) -> Result<Vec<(String, Tensor)>> {
        let mut tensors = Vec::new();
        for index in self.wanted(method) {
            let (name, shape) = (index.name(), index.shape(&self.shape, self.pool.dtype()));
            let rotation = |position: usize| rotation(self.rotary, sequence.prompt, position);
            let extend =
                |to: &Tensor, kv: PagedKv<'_>, parts: &[IndexPart]| index.extend(self.layer, to, kv, parts, &rotation);
            let tensor = self.pool.index((&name, shape), self.layer, (&sequence.table, end), extend);
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
        let visible = |end: usize| end.saturating_sub(self.shape.window.unwrap_or(end))..end;
        let row = |p: usize| DecodeRow { table: sequence.table.blocks(), visible: visible(p + 1) };
        let rows: Vec<DecodeRow> = positions.clone().map(row).collect();
        let streams: Vec<Stream> = positions.map(|p| self.stream(sequence.seed, p)).collect();
        let prompt = sequence.prompt;
        let step = DecodeStep {
            batch: Decode { q, kv: self.pool.layer(self.layer), rows: &rows },
            layer: self.layer,
            kv_heads: self.shape.kv_heads,
            streams: &streams,
            indices,
            rotation: &|position| rotation(self.rotary, prompt, position),
        };
        let (choice, out) = step.run(method)?;
        let report: &mut PhaseReport = &mut sequence.report.decode;
        report.add_scored(choice.keys_scored() as u64);
        if let Some(budgets) = &choice.budgets {
            report.add_budgets(budgets);
        }
        match choice.selection.counts_wait() {
            true => sequence.unread.push((choice.selection, rows.iter().map(|row| row.visible.clone()).collect())),
            false => add_read(report, &choice.selection, &rows)?,
        }
        let audited: Vec<usize> =
            (0..rows.len()).filter(|&row| audit::wanted(&streams[row], sequence.spec.audit)).collect();
        if !audited.is_empty() {
            let epsilon = method.promise().map(|(epsilon, _)| epsilon);
            sequence.report.decode.add_errors(&audit::decode(&step, &out, &audited)?, epsilon);
        }
        Ok(out)
    }
}

/// Takes what rows read in one layer into a report.
fn add_read(report: &mut PhaseReport, selection: &Selection, rows: &[DecodeRow]) -> Result<()> {
    let counts = selection.counts(rows)?;
    let kv_heads = counts.len() / rows.len().max(1);
    let read = counts.iter().sum::<usize>() as u64;
    let there = rows.iter().map(|row| row.visible.len() * kv_heads).sum::<usize>() as u64;
    report.add(counts.len() as u64, read, there, counts.iter().copied().max().unwrap_or(0) as u64);
    Ok(())
}

/// The rotary embedding of a token, in a sequence whose prompt is so long.
fn rotation(rotary: &dyn Rotary, prompt: usize, position: usize) -> Rotation {
    let length = if rotary.heeds_length() { prompt.max(position + 1) } else { 0 };
    Rotation::new(position, &rotary.frequencies(length), rotary.factor())
}

#[cfg(test)]
mod tests;
