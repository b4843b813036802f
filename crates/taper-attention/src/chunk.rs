//! A chunk of a prompt that goes through the layers in slices of its rows, with other work between any two of them.
//!
//! A method may choose by all of a chunk's queries, so a layer attends for none of its rows before all have their
//! queries, keys and values there. Everything else goes by rows. The chunk makes one pass more than there are layers: in
//! each a slice ends the layer before (attention, projections) and begins the next one (queries, keys, values). Between
//! two passes the method chooses.

use crate::batch::{prompt_audit, report_prompt};
use crate::layer::AttentionShape;
use crate::method::{Carry, PrefillChoice};
use crate::report::Report;
use crate::sequence::{Phase, Sequence};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kv_cache::{KvError, KvPool};

/// Least and most rows of a slice, on the CPU and on a device. With more, products with weights are no faster; a device takes
/// for fewer as long as for so many.
const SLICE_ROWS: [(usize, usize); 2] = [(1, 512), (1024, 4096)];

/// As many rows' work a choice is taken for: it looks at a few rows of the chunk, more than once.
const CHOICE_ROWS: usize = 256;

/// What a sequence keeps of a chunk that it has not taken in yet.
#[derive(Debug)]
pub(crate) struct Underway {
    tokens: usize,
    /// Layers of the model.
    layers: usize,
    /// The layer that the pass begins; as many as there are layers in the last pass.
    layer: usize,
    /// Rows that have made the pass.
    row: usize,
    /// The residual stream `[tokens, hidden]`, f32.
    hidden: Option<Tensor>,
    /// Queries `[tokens, q_heads, head_dim]`, f32 or the cache's dtype: of the layer that the pass begins up to `row`, of the
    /// one before from there.
    queries: Option<Tensor>,
    /// Cosines and sines `[tokens, head_dim]`, f32, of a model that keeps them on its device.
    angles: Option<Tensor>,
    /// What the method chose in the layer that the pass ends.
    choice: PrefillChoice,
    /// As the sequence's, with what the chunk added.
    carries: Vec<Carry>,
    report: Report,
}

impl Underway {
    fn new(sequence: &Sequence, tokens: usize, layers: usize) -> Self {
        let (mut carries, report) = (sequence.carries.clone(), sequence.report.clone());
        carries.resize(layers, Carry::default());
        let (layer, row, hidden, queries, angles, choice) = Default::default();
        Self { tokens, layers, layer, row, hidden, queries, angles, choice, carries, report }
    }

    /// The work of choosing once, in rows that make a pass.
    fn choice_work(&self) -> usize {
        CHOICE_ROWS.min(self.tokens)
    }

    /// All of the work.
    fn work(&self) -> usize {
        (self.layers + 1) * self.tokens + self.layers * self.choice_work()
    }

    /// Its tokens, and the work done, as so many of them through all layers.
    pub fn progress(&self) -> (usize, usize) {
        let done = self.layer * self.tokens + self.row + self.layer.min(self.layers) * self.choice_work();
        (self.tokens, (done as u128 * self.tokens as u128 / self.work() as u128) as usize)
    }

    fn through(&self) -> bool {
        self.layer > self.layers
    }
}

/// Rows of a chunk that end one layer and begin another.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The layer that they begin; none after the last one.
    pub begins: Option<usize>,
    /// The layer that they end; none before the first one.
    pub ends: Option<usize>,
    /// The rows, counted from the chunk's first.
    pub rows: Range<usize>,
    /// Its work, in rows that make a pass; the method's choice after a pass counts as some.
    pub work: usize,
}

/// A chunk while it is worked on. Until the sequence [takes it in](Sequence::take_in) nothing of it shows. Dropped without
/// a [pause](Self::pause), as where a step fails, it begins again.
pub struct Chunk<'a> {
    shape: AttentionShape,
    pool: &'a mut KvPool,
    sequence: &'a mut Sequence,
    work: Underway,
}

impl<'a> Chunk<'a> {
    /// Goes on with the sequence's chunk, or begins one of its next tokens; makes room for all of it in the cache.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`]; [`KvError::Device`] for tokens that the prefill method does not attend, or others than
    /// those of the chunk that is underway.
    pub fn new(
        shape: AttentionShape,
        pool: &'a mut KvPool,
        sequence: &'a mut Sequence,
        tokens: usize,
    ) -> std::result::Result<Self, KvError> {
        let work = match sequence.underway.take() {
            Some(work) => work,
            None => Underway::new(sequence, tokens, shape.layers),
        };
        let end = sequence.len + tokens;
        if work.tokens != tokens || sequence.phase() != Phase::Context || end > sequence.context || tokens == 0 {
            let message =
                format!("a chunk up to {end} where {} tokens up to {} are due", work.tokens, sequence.context);
            return Err(candle_core::Error::Msg(message).into());
        }
        pool.grow(&mut sequence.table, end)?;
        Ok(Self { shape, pool, sequence, work })
    }

    /// The work of so many tokens through all layers, in rows that make a pass.
    pub fn work(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.work.work()).div_ceil(self.work.tokens)
    }

    /// The rows that go on next, so many at most, give or take a block; none once the chunk is through.
    pub fn next(&self, most: usize) -> Option<Slice> {
        let Underway { tokens, layer, row, .. } = self.work;
        if self.work.through() {
            return None;
        }
        // They end where blocks do: a method's tiles are not cut.
        let first = self.sequence.len + row;
        let (least, limit) = SLICE_ROWS[usize::from(!self.pool.layer(0).k.device().is_cpu())];
        let end = (first + most.clamp(least, limit)).next_multiple_of(BLOCK_TOKENS) - self.sequence.len;
        let (rows, begins) = (row..end.min(tokens), (layer < self.shape.layers).then_some(layer));
        let choice = if rows.end == tokens && begins.is_some() { self.work.choice_work() } else { 0 };
        Some(Slice { begins, ends: layer.checked_sub(1), work: rows.len() + choice, rows })
    }

    /// Absolute positions of rows.
    pub fn positions(&self, rows: &Range<usize>) -> Vec<u32> {
        let start = self.sequence.len;
        (start + rows.start..start + rows.end).map(|p| p as u32).collect()
    }

    /// Tokens of the whole prompt, which a rotary embedding may heed.
    pub fn prompt(&self) -> usize {
        self.sequence.prompt
    }

    /// Whether it has gone through all layers.
    pub fn is_through(&self) -> bool {
        self.work.through()
    }

    /// The residual stream of rows `[rows, hidden]`, f32: a view, and what is written to it stays.
    ///
    /// # Errors
    /// Before the first pass.
    pub fn hidden(&self, rows: &Range<usize>) -> Result<Tensor> {
        match &self.work.hidden {
            Some(hidden) => hidden.narrow(0, rows.start, rows.len()),
            None => bail!("a chunk has no hidden states before its first pass"),
        }
    }

    /// Writes the residual stream of rows `[rows, hidden]`, f32.
    ///
    /// # Errors
    /// Another width than before, a device error.
    pub fn set_hidden(&mut self, rows: &Range<usize>, hidden: &Tensor) -> Result<()> {
        set(&mut self.work.hidden, self.work.tokens, hidden, rows.start)
    }

    /// Cosines and sines of a slice's positions `[rows, head_dim]`, f32, as they were [set](Self::set_angles) in the first pass.
    ///
    /// # Errors
    /// A device error.
    pub fn angles(&self, slice: &Slice) -> Result<Option<Tensor>> {
        let of = |angles: &Tensor| angles.narrow(0, slice.rows.start, slice.rows.len());
        self.work.angles.as_ref().filter(|_| slice.ends.is_some()).map(of).transpose()
    }

    /// Keeps them for the passes to come.
    ///
    /// # Errors
    /// A device error.
    pub fn set_angles(&mut self, slice: &Slice, angles: &Tensor) -> Result<()> {
        set(&mut self.work.angles, self.work.tokens, angles, slice.rows.start)
    }

    /// Attends for a slice in the layer that it ends; returns `[rows, q_heads, head_dim]`.
    ///
    /// # Errors
    /// A device error, a slice that ends none.
    pub fn attend(&mut self, slice: &Slice) -> Result<Tensor> {
        let (Some(layer), Some(queries)) = (slice.ends, &self.work.queries) else {
            bail!("a chunk has nothing to attend before its first pass")
        };
        let q = queries.narrow(0, slice.rows.start, slice.rows.len())?;
        let rows = self.sequence.prompt_layer(&self.shape, self.pool, layer, (q, slice.rows.start));
        let spec = self.sequence.spec.clone();
        let output = spec.prefill.method.attend(&rows, &self.work.choice, &mut self.work.carries[layer])?;
        let audit = (prompt_audit(&spec), self.sequence.seed);
        report_prompt(&self.shape, &rows, audit, output, &mut self.work.report.prefill)
    }

    /// Takes a slice as done whose residual stream is as it should be, and for the layer that it begins queries, keys and
    /// values.
    ///
    /// # Errors
    /// Other shapes than [`LayerAttention::attend`](crate::LayerAttention::attend) takes, a device error; then the chunk must
    /// be dropped.
    pub fn put(&mut self, slice: &Slice, qkv: Option<(Tensor, Tensor, Tensor)>) -> Result<()> {
        if let (Some(layer), Some((q, k, v))) = (slice.begins, qkv) {
            self.pool.append(layer, &k, &v, &self.slots(slice)).map_err(candle_core::Error::wrap)?;
            set(&mut self.work.queries, self.work.tokens, &q, slice.rows.start)?;
            self.sequence.keep_queries(layer, self.sequence.len + slice.rows.start, &q)?;
        }
        self.done(slice)
    }

    /// The same with joint projections, as [`LayerAttention::attend_joint`](crate::LayerAttention::attend_joint) takes them;
    /// false, and nothing is done, where cache and device have no operation for them.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_joint(&mut self, slice: &Slice, qkv: &Tensor, angles: &Tensor) -> Result<bool> {
        let Some(layer) = slice.begins else { bail!("a chunk's last pass begins no layer") };
        let stored =
            self.pool.append_joint(layer, qkv, angles, &self.slots(slice), None).map_err(candle_core::Error::wrap)?;
        let Some(q) = stored else { return Ok(false) };
        set(&mut self.work.queries, self.work.tokens, &q, slice.rows.start)?;
        self.sequence.keep_queries(layer, self.sequence.len + slice.rows.start, &q)?;
        self.done(slice)?;
        Ok(true)
    }

    /// Where keys and values of a slice go (`block * 64 + row`).
    fn slots(&self, slice: &Slice) -> Vec<u32> {
        let start = self.sequence.len;
        (start + slice.rows.start..start + slice.rows.end).map(|token| self.sequence.table.slot(token)).collect()
    }

    /// Goes on behind a slice.
    fn done(&mut self, slice: &Slice) -> Result<()> {
        self.work.row = slice.rows.end;
        if self.work.row == self.work.tokens {
            self.work.row = 0;
            self.work.layer += 1;
            self.choose(slice.begins)?;
        }
        Ok(())
    }

    /// All rows have begun a layer: the method chooses for them.
    fn choose(&mut self, layer: Option<usize>) -> Result<()> {
        self.work.choice = PrefillChoice::default();
        if let (Some(layer), Some(queries)) = (layer, &self.work.queries) {
            let rows = self.sequence.prompt_layer(&self.shape, self.pool, layer, (queries.clone(), 0));
            self.work.choice = self.sequence.spec.prefill.method.choose(&rows)?;
            self.work.report.prefill.add_scored(self.work.choice.scored);
        }
        Ok(())
    }

    /// Ends the work for now.
    pub fn pause(self) {
        self.sequence.underway = Some(self.work);
    }
}

impl Sequence {
    /// Takes the tokens of a chunk that is through as cached.
    pub fn take_in(&mut self, pool: &mut KvPool) {
        if let Some(work) = self.underway.take_if(|work| work.through()) {
            self.carries = work.carries;
            self.advance(pool, work.tokens, work.report);
        }
    }
}

/// Writes rows into a tensor of so many, which is made with the first.
fn set(all: &mut Option<Tensor>, tokens: usize, rows: &Tensor, first: usize) -> Result<()> {
    let all = match all {
        Some(all) => all,
        None => {
            let mut dims = rows.dims().to_vec();
            dims[0] = tokens;
            all.insert(Tensor::zeros(dims, rows.dtype(), rows.device())?)
        }
    };
    all.slice_set(&rows.contiguous()?, 0, first)
}
