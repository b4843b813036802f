//! One forward pass over a flat batch: stores keys and values, runs each sequence's method, reports.

use crate::audit;
use crate::layer::{AttentionShape, LayerAttention};
use crate::method::{Carry, DecodeStep, PrefillLayer};
use crate::report::{AttentionUsage, PhaseReport, Report};
use crate::spec::AttentionSpec;
use candle_core::{Result, Tensor, bail};
use std::sync::Arc;
use taper_kernels::decode::{Decode, DecodeRow, attend};
use taper_kernels::philox::Stream;
use taper_kernels::prefill::Mask;
use taper_kv_cache::{BlockTable, KvError, KvPool};

/// The attention state of one sequence: its spec, its blocks, its report.
#[derive(Debug)]
pub struct Sequence {
    spec: Arc<AttentionSpec>,
    seed: u64,
    prompt: usize,
    len: usize,
    table: BlockTable,
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
            len: 0,
            table: BlockTable::default(),
            carries: Vec::new(),
            report: Report::default(),
        }
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

    /// Prompt tokens that the next prefill chunk takes: at most `max_tokens`. 0 once the prompt is done.
    pub fn chunk(&self, max_tokens: usize) -> usize {
        self.prompt.saturating_sub(self.len).min(max_tokens)
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
        Ok(Self { spec, seed, table, carries, report, ..*self })
    }

    /// What attention came to so far.
    pub fn usage(&self) -> AttentionUsage {
        self.report.usage(&self.spec, self.seed)
    }
}

/// A sequence's share of a flat batch.
#[derive(Debug)]
pub struct Span<'a> {
    /// The sequence.
    pub sequence: &'a mut Sequence,
    /// Its next tokens; either all of the prompt or all after it.
    pub tokens: usize,
}

/// Attention for one forward pass. Tokens of the batch are those of the spans, in order.
pub struct AttentionBatch<'a> {
    shape: AttentionShape,
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
    /// span that straddles the end of its prompt.
    pub fn new(
        shape: AttentionShape,
        pool: &'a mut KvPool,
        spans: Vec<Span<'a>>,
    ) -> std::result::Result<Self, KvError> {
        let (mut slots, mut lengths) = (Vec::new(), Vec::new());
        let mut spans = spans;
        for Span { sequence, tokens } in &mut spans {
            let end = sequence.len + *tokens;
            if sequence.len < sequence.prompt && end > sequence.prompt {
                let prompt = sequence.prompt;
                return Err(
                    candle_core::Error::Msg(format!("a span ends at {end}, beyond a prompt of {prompt}")).into()
                );
            }
            pool.grow(&mut sequence.table, end)?;
            slots.extend((sequence.len..end).map(|token| sequence.table.slot(token)));
            lengths.extend((sequence.len..end).map(|token| sequence.prompt.max(token + 1) as u32));
        }
        Ok(Self { shape, pool, spans, slots, lengths })
    }

    /// Absolute positions of the batch's tokens, in order.
    pub fn positions(&self) -> Vec<u32> {
        self.spans.iter().flat_map(|s| s.sequence.len..s.sequence.len + s.tokens).map(|p| p as u32).collect()
    }

    /// Takes the tokens as cached. Call once every layer has attended.
    pub fn finish(self) {
        for Span { sequence, tokens } in self.spans {
            sequence.len += tokens;
            if sequence.len >= sequence.prompt {
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
            let part = Part { shape: self.shape, pool: self.pool, layer };
            outs.push(if sequence.len < sequence.prompt {
                part.prefill(sequence, q)?
            } else {
                part.decode(sequence, &q)?
            });
        }
        if outs.len() == 1 { Ok(outs.swap_remove(0)) } else { Tensor::cat(&outs, 0) }
    }
}

/// One span in one layer.
struct Part<'a> {
    shape: AttentionShape,
    pool: &'a KvPool,
    layer: usize,
}

impl Part<'_> {
    fn stream(&self, seed: u64, position: usize) -> Stream {
        Stream { seed, layer: self.layer as u32, head: 0, position: position as u32 }
    }

    fn prefill(&self, sequence: &mut Sequence, q: Tensor) -> Result<Tensor> {
        let (rows, heads) = (q.dims()[0], self.shape.kv_heads as u64);
        let layer = PrefillLayer {
            q,
            kv: self.pool.layer(self.layer),
            table: sequence.table.blocks(),
            start: sequence.len,
            prompt: sequence.prompt,
            window: self.shape.window,
        };
        sequence.carries.resize(self.shape.layers, Carry::default());
        let output = sequence.spec.prefill.method.attend(&layer, &mut sequence.carries[self.layer])?;
        let there: usize = (layer.start..layer.start + rows).map(|p| Mask::Causal.count(p, self.shape.window)).sum();
        let report = &mut sequence.report.prefill;
        let (read, most) = (output.keys.iter().sum::<u64>(), output.keys.iter().copied().max().unwrap_or(0));
        report.add(rows as u64 * heads, read * heads, there as u64 * heads, most);
        let audited: Vec<usize> = (0..rows)
            .filter(|row| audit::wanted(&self.stream(sequence.seed, layer.start + row), sequence.spec.audit))
            .collect();
        if !audited.is_empty() {
            report.add_errors(&audit::prefill(&layer, &output.out, &audited)?, None);
        }
        Ok(output.out)
    }

    fn decode(&self, sequence: &mut Sequence, q: &Tensor) -> Result<Tensor> {
        let (tokens, kv_heads) = (q.dims()[0], self.shape.kv_heads);
        let positions = sequence.len..sequence.len + tokens;
        let visible = |end: usize| end.saturating_sub(self.shape.window.unwrap_or(end))..end;
        let rows: Vec<DecodeRow> =
            positions.clone().map(|p| DecodeRow { table: sequence.table.blocks(), visible: visible(p + 1) }).collect();
        let streams: Vec<Stream> = positions.map(|p| self.stream(sequence.seed, p)).collect();
        let step = DecodeStep {
            batch: Decode { q, kv: self.pool.layer(self.layer), rows: &rows },
            kv_heads,
            streams: &streams,
        };
        let choice = sequence.spec.decode.method.select(&step)?;
        let out = attend(&step.batch, &choice.selection, choice.scores.as_ref())?;
        let counts = choice.selection.counts(&rows);
        let report: &mut PhaseReport = &mut sequence.report.decode;
        let read = counts.iter().sum::<usize>() as u64;
        let there = rows.iter().map(|row| row.visible.len() * kv_heads).sum::<usize>() as u64;
        report.add(counts.len() as u64, read, there, counts.iter().copied().max().unwrap_or(0) as u64);
        report.add_scored(choice.scores.as_ref().map_or(0, |scores| scores.keys() as u64));
        if let Some(budgets) = &choice.budgets {
            report.add_budgets(budgets);
        }
        let audited: Vec<usize> =
            (0..tokens).filter(|&row| audit::wanted(&streams[row], sequence.spec.audit)).collect();
        if !audited.is_empty() {
            report.add_errors(&audit::decode(&step, &out, &audited)?, sequence.spec.decode.method.epsilon());
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests;
