//! Pages of all layers chosen before the first layer's are read, on a device, where the tokens before have left their queries
//! there.

use super::{AttentionBatch, By, Part, Started, plain, visible};
use crate::layer::AttentionShape;
use crate::method::{DecodeMethod, KeyIndex};
use crate::sequence::Sequence;
use candle_core::{Result, Tensor};
use std::cell::RefCell;
use taper_kernels::decode::{Decode, Over, Selection};
use taper_kernels::index::{Part as IndexPart, bounds};
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kv_cache::KvPool;

/// Rows that are chosen for together, in all layers.
pub(super) struct Ahead {
    /// The batch's row that they begin with.
    pub at: usize,
    pub of: All,
}

/// What rows are chosen for by in all layers at once, and what came of it.
#[derive(Debug)]
pub(crate) struct All {
    /// The first layer that is chosen in.
    first: usize,
    /// The index's name, and its tensor of each layer from the first on.
    name: String,
    bounds: Vec<Tensor>,
    /// Of each row the queries of the token before `[layers, q_heads, head_dim]`.
    queries: Vec<Tensor>,
    made: RefCell<Option<Made>>,
}

/// What was asked for, and given.
#[derive(Debug)]
struct Made {
    fixed: (usize, usize),
    keys: Vec<usize>,
    noise: Option<f32>,
    pages: bounds::Ahead,
}

impl All {
    /// The index of a layer.
    pub(super) fn index(&self, layer: usize) -> (String, Tensor) {
        (self.name.clone(), self.bounds[layer - self.first].clone())
    }

    /// What the batch's rows read in a layer, and pages that were looked at for each: chosen by the first layer that asks, for
    /// all. None where there is no operation for it.
    pub(crate) fn choose(
        &self,
        (batch, layer): (&Decode, usize),
        (wanted, over): (&[bool], Over),
        fixed: (usize, usize),
        (keys, noise): (&[usize], Option<f32>),
    ) -> Result<Option<(Selection, Vec<usize>)>> {
        let mut made = self.made.borrow_mut();
        let known = |made: &Made| made.fixed == fixed && made.keys == keys && made.noise == noise;
        if !made.as_ref().is_some_and(known) {
            let layers = bounds::Layers { queries: &self.queries, first: self.first, bounds: &self.bounds };
            let pages = bounds::choose_ahead(batch, layers, (wanted, over), fixed, (keys, noise))?;
            *made = pages.map(|pages| Made { fixed, keys: keys.to_vec(), noise, pages });
        }
        let chosen = made
            .as_ref()
            .map(|made| -> Result<_> { Ok((made.pages.of(layer - self.first, batch)?, made.pages.scored.clone())) });
        chosen.transpose()
    }
}

/// Of a sequence's first so many tokens, how many at the end are on no whole page of an index.
fn beyond_whole(index: &dyn KeyIndex, (shape, pool): (&AttentionShape, &KvPool), tokens: usize) -> usize {
    tokens % (BLOCK_TOKENS / index.shape(shape, pool.dtype()).rows)
}

/// The one index of a method that chooses ahead and by nothing else.
fn only_index(method: &dyn DecodeMethod) -> Option<&dyn KeyIndex> {
    let mut indices = method.indices();
    let one = indices.len() == 1 && method.ahead() && method.dense_layers() == method.indexed_from();
    indices.pop().filter(|_| one)
}

/// The queries of the token before a sequence's next one in all layers, where it chooses by them.
fn queries_before(sequence: &Sequence) -> Result<Option<Tensor>> {
    let known = sequence.len.checked_sub(1).filter(|_| !sequence.drafting);
    Ok(known.map(|position| sequence.queries.in_all_layers(position)).transpose()?.flatten())
}

impl AttentionBatch<'_> {
    /// Where each token's queries go on their way, on a device; empty where none are kept so.
    pub(super) fn kept_queries(&mut self) -> Result<Vec<Option<Tensor>>> {
        let cache = self.pool.layer(0).k.clone();
        let single = |span: &Started| {
            span.tokens == 1 && span.sequence.attended_by() == By::DecodeMethod && span.sequence.keeps_queries()
        };
        if cache.device().is_cpu() || !self.spans.iter().any(single) {
            return Ok(Vec::new());
        }
        let mut all = Vec::with_capacity(self.slots.len());
        for span in &mut self.spans {
            match single(span) {
                true => {
                    let position = span.sequence.len;
                    all.push(Some(span.sequence.queries.memory(position, &self.shape, &cache)?));
                }
                false => all.resize(all.len() + span.tokens, None),
            }
        }
        Ok(all)
    }

    /// What tells steps apart whose rows choose ahead: whether they do so in all layers at once, and whether an index takes
    /// tokens in.
    pub(super) fn ahead_of(&self, spans: &[Started]) -> Option<bool> {
        let index = only_index(&*spans[0].sequence.decode_method().method)?;
        let known = |span: &Started| matches!(queries_before(span.sequence), Ok(Some(_)));
        let lacks = |span: &Started| {
            let (table, tokens) = (&span.sequence.table, span.sequence.len);
            self.pool.index_lacks(&index.name(), self.shape.layers - 1, (table, tokens))
                > beyond_whole(index, (&self.shape, self.pool), tokens)
        };
        spans.iter().all(known).then(|| spans.iter().any(lacks))
    }
}

impl Part<'_> {
    /// What the next token of each sequence is chosen for by in all layers, the first of which is the row `at` of the batch;
    /// none where that is not known for each before the first layer, or a method looks at more.
    pub(super) fn all_layers(&mut self, sequences: &[&Sequence], at: usize) -> Result<Option<&All>> {
        let method = sequences[0].decode_method().method.clone();
        let Some(index) = only_index(&*method).filter(|_| !self.pool.layer(0).k.device().is_cpu()) else {
            return Ok(None);
        };
        if let Some(found) = self.ahead.iter().position(|ahead| ahead.at == at) {
            return Ok(Some(&self.ahead[found].of));
        }
        let fits = |sequence: &&Sequence| {
            let before = sequence.len.saturating_sub(1);
            let whole = visible(self.shape, sequence.len).start == 0 && plain(self.shape, sequence).is_none();
            whole && self.was_asked(sequence, before)
        };
        if self.layer != method.dense_layers() || !sequences.iter().all(fits) {
            return Ok(None);
        }
        let queries = sequences.iter().map(|sequence| queries_before(sequence)).collect::<Result<Option<Vec<_>>>>()?;
        let Some(queries) = queries else { return Ok(None) };
        let (name, shape) = (index.name(), index.shape(&self.shape, self.pool.dtype()));
        let rotation = self.rotations.of(sequences[0].prompt);
        let mut bounds = Vec::new();
        for layer in self.layer..self.shape.layers {
            let lack = |sequence: &&&Sequence| {
                let table = (&sequence.table, sequence.len);
                self.pool.index_lacks(&name, layer, table) > beyond_whole(index, (&self.shape, self.pool), sequence.len)
            };
            let tables: Vec<_> =
                sequences.iter().filter(lack).map(|sequence| (&sequence.table, sequence.len)).collect();
            let extend =
                |to: &Tensor, kv: PagedKv<'_>, parts: &[IndexPart]| index.extend(layer, to, kv, parts, rotation);
            let tensor = self.pool.index((&name, shape), layer, (&tables, 0), extend);
            bounds.push(tensor.map_err(candle_core::Error::wrap)?);
        }
        let of = All { first: self.layer, name, bounds, queries, made: RefCell::default() };
        self.ahead.push(Ahead { at, of });
        Ok(self.ahead.last().map(|ahead| &ahead.of))
    }
}
