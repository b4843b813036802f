//! The two seams that a method implements. A method decides what is read; the operations of taper-kernels read it.

use crate::batch::All;
use crate::layer::AttentionShape;
use candle_core::{DType, Result, Tensor, bail};
use std::ops::Range;
use taper_kernels::decode::{Budget, Decode, DecodeRow, Over, Scores, Selection, attend};
use taper_kernels::index::Part;
use taper_kernels::kv::PagedKv;
use taper_kernels::philox::Stream;
use taper_kernels::prefill::{self, Mask, Reads, Rows, Selection as PrefillSelection};
use taper_kernels::rotary::Rotation;
use taper_kv_cache::IndexShape;

/// How a prompt's rows attend. In each layer a chunk of a prompt is chosen for at once, and attended at once or slice by
/// slice of its rows: that does not show.
pub trait PrefillMethod: std::fmt::Debug + Send + Sync {
    /// Chooses for all rows of a chunk in one layer. Unless a method knows better, they read everything.
    ///
    /// # Errors
    /// A device error.
    fn choose(&self, _chunk: &PrefillLayer) -> Result<PrefillChoice> {
        Ok(PrefillChoice::default())
    }

    /// Attends for the chunk's next rows, by what was chosen for it. `carry` is what the method kept from the rows before,
    /// of this chunk or the one before.
    ///
    /// # Errors
    /// A device error.
    fn attend(&self, rows: &PrefillLayer, choice: &PrefillChoice, _carry: &mut Carry) -> Result<PrefillOutput> {
        rows.attend_choice(choice)
    }

    /// Where the chunk of a prompt that begins at `start` ends: `max` tokens on, unless the method must see more at once.
    fn cut(&self, start: usize, prompt: usize, max: usize) -> usize {
        prompt.min(start.saturating_add(max))
    }

    /// How many of the first `cached` tokens a prompt may take over from another prompt of the method: those whose rows
    /// attend alike however long the prompt is, and after which the method can go on without a [`Carry`]. Both are
    /// multiples of 64. None, unless a method knows better.
    fn reuse(&self, _prompt: usize, _cached: usize) -> usize {
        0
    }
}

/// A [cut](PrefillMethod::cut) for methods that choose by all rows of a block: no block is cut apart.
pub(crate) fn cut_at_blocks(block: usize, start: usize, prompt: usize, max: usize) -> usize {
    let end = start.saturating_add(max) / block * block;
    end.max((start / block + 1) * block).min(prompt)
}

/// What a prefill method keeps of one layer from some rows of a prompt to the next, so that the cuts do not show.
#[derive(Debug, Clone, Default)]
pub struct Carry {
    /// The method's own.
    pub rows: Option<Tensor>,
    base: Option<Box<Carry>>,
}

impl Carry {
    /// That of the method underneath.
    pub fn base(&mut self) -> &mut Carry {
        self.base.get_or_insert_default()
    }
}

/// What a prefill method chose for a chunk in one layer.
#[derive(Debug, Default)]
pub struct PrefillChoice {
    /// What its rows read; absent, everything.
    pub selection: Option<PrefillSelection>,
    /// The chunk's last rows, whose attention mass was measured: the first one's absolute position, and the natural
    /// logarithm of each row's sum of exponentials over all keys `[R, q_heads]`, f32.
    pub measured: Option<(usize, Tensor)>,
    /// Products of a query, or a mean of some, with a key, or a mean of some, that choosing took over all query heads.
    pub scored: u64,
}

/// Shares of the dense probability that rows keep, from the logarithms of what is read and of all `[R, q_heads]`.
pub(crate) fn kept(read: &Tensor, all: &Tensor) -> Result<Vec<f32>> {
    let shares: Vec<f32> = (read - all)?.exp()?.flatten_all()?.to_vec1()?;
    // Rounding alone would make more than everything of it.
    Ok(shares.into_iter().map(|share| if share > 1.0 { 1.0 } else { share }).collect())
}

/// Consecutive rows of one sequence's prompt in one layer, a chunk or a slice of one; the chunk's keys and values are in
/// the cache.
#[derive(Clone)]
pub struct PrefillLayer<'a> {
    /// Queries `[T, q_heads, head_dim]`, f32 or, on a device, the cache's dtype, after rotary embedding.
    pub q: Tensor,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The sequence's blocks.
    pub table: &'a [u32],
    /// Which layer of the model it is.
    pub layer: usize,
    /// Absolute position of the first row; the rows are consecutive.
    pub start: usize,
    /// Tokens of the whole prompt.
    pub prompt: usize,
    /// The model's own sliding window.
    pub window: Option<usize>,
}

/// What a prefill method gives back.
pub struct PrefillOutput {
    /// `[T, q_heads, head_dim]`, f32.
    pub out: Tensor,
    /// Keys that each row read.
    pub keys: KeyCounts,
    /// Shares of the attention mass that the keys read hold, where a method measured any: one a (row, query head).
    pub kept: Vec<f32>,
}

/// How many keys each row and list of query heads read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyCounts {
    /// Lists of equally many neighbouring query heads.
    lists: usize,
    /// `[T, lists]`.
    counts: Vec<usize>,
}

impl PrefillLayer<'_> {
    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.q.dims()[0]
    }

    /// Attends for all rows under a mask.
    ///
    /// # Errors
    /// A device error.
    pub fn attend(&self, mask: Mask) -> Result<PrefillOutput> {
        self.attend_rows(&self.q, &self.positions(), mask)
    }

    /// Attends for queries `[R, q_heads, head_dim]` at the positions given, ascending.
    ///
    /// # Errors
    /// A device error.
    pub fn attend_rows<'a>(&self, q: &Tensor, positions: &[u32], reads: impl Into<Reads<'a>>) -> Result<PrefillOutput> {
        Ok(self.attend_lse(q, positions, reads.into())?.0)
    }

    /// The same, and the natural logarithm of each row's sum of exponentials `[R, q_heads]`, f32.
    ///
    /// # Errors
    /// A device error.
    pub fn attend_lse(&self, q: &Tensor, positions: &[u32], reads: Reads) -> Result<(PrefillOutput, Tensor)> {
        let (out, lse) = prefill::prefill(&self.select(q, positions), reads)?;
        let (lists, counts) = match reads {
            Reads::Mask(mask) => (1, positions.iter().map(|&p| mask.count(p as usize, self.window)).collect()),
            Reads::Selection(selection) => (selection.heads().len(), selection.counts(positions, self.window)),
        };
        let keys = KeyCounts { lists, counts };
        Ok((PrefillOutput { out, keys, kept: Vec::new() }, lse))
    }

    /// Attends for all rows by what was chosen for their chunk, and measures what the measured ones among them keep.
    ///
    /// # Errors
    /// A device error.
    pub fn attend_choice(&self, choice: &PrefillChoice) -> Result<PrefillOutput> {
        let reads = choice.selection.as_ref().map_or(Mask::Causal.into(), Reads::from);
        let (mut output, lse) = self.attend_lse(&self.q, &self.positions(), reads)?;
        if let Some((first, all)) = &choice.measured {
            let end = self.start + self.rows();
            let from = (*first).clamp(self.start, end);
            if from < end {
                let (read, all) =
                    (lse.narrow(0, from - self.start, end - from)?, all.narrow(0, from - first, end - from)?);
                output.kept = kept(&read, &all)?;
            }
        }
        Ok(output)
    }

    /// Queries at positions, as the operations of taper-kernels take them.
    pub fn select<'a>(&'a self, q: &'a Tensor, positions: &'a [u32]) -> Rows<'a> {
        Rows { q, kv: self.kv, table: self.table, positions, window: self.window }
    }

    /// Pairs of a query head's row at these positions and a key that it sees.
    pub fn pairs(&self, positions: &[u32]) -> u64 {
        let keys: usize = positions.iter().map(|&p| Mask::Causal.count(p as usize, self.window)).sum();
        (keys * self.q.dims()[1]) as u64
    }

    /// Absolute positions of the rows.
    pub fn positions(&self) -> Vec<u32> {
        (self.start..self.start + self.rows()).map(|p| p as u32).collect()
    }

    /// KV heads.
    pub fn kv_heads(&self) -> usize {
        self.kv.k.dims()[1]
    }
}

impl KeyCounts {
    /// Over so many query heads.
    pub fn read(&self, heads: usize) -> u64 {
        (self.counts.iter().sum::<usize>() * (heads / self.lists.max(1))) as u64
    }

    /// The most that one row read with one head.
    pub fn most(&self) -> u64 {
        self.counts.iter().copied().max().unwrap_or(0) as u64
    }

    /// Over all rows, by KV head, each of which serves `group` query heads.
    pub fn by_head(&self, kv_heads: usize, group: usize) -> Vec<u64> {
        let mut sums = vec![0; self.lists];
        self.counts.chunks(self.lists.max(1)).for_each(|row| row.iter().zip(&mut sums).for_each(|(c, sum)| *sum += c));
        // A list stands for one KV head, for a part of one, or for several.
        let of = |head: usize| {
            let lists = head * self.lists / kv_heads..((head + 1) * self.lists).div_ceil(kv_heads);
            (sums[lists.clone()].iter().sum::<usize>() * group / lists.len().max(1)) as u64
        };
        (0..kv_heads).map(of).collect()
    }

    /// Puts the rows of `other`, which has one list, in the place of some.
    pub fn replace(&mut self, rows: &[u32], other: &Self) {
        for (&row, &count) in rows.iter().zip(&other.counts) {
            let row = row as usize * self.lists;
            self.counts[row..row + self.lists].fill(count);
        }
    }
}

/// What generated tokens read.
pub trait DecodeMethod: std::fmt::Debug + Send + Sync {
    /// Chooses the keys of every row and KV head.
    ///
    /// # Errors
    /// A device error.
    fn select(&self, step: &DecodeStep) -> Result<Choice>;

    /// What the method promises, if anything: (epsilon, delta), a relative error of at most epsilon with probability at
    /// least 1 - delta, for each query head.
    fn promise(&self) -> Option<(f64, f64)> {
        None
    }

    /// Whether a row that sees so many keys reads all of them, or does not draw from them, whatever its query. A device
    /// has another way for such rows, so that they are not chosen for together with others: a row's outputs do not
    /// depend on them.
    fn reads_all(&self, _keys: usize) -> bool {
        false
    }

    /// What must be known of the keys before [`select`](Self::select).
    fn indices(&self) -> Vec<&dyn KeyIndex> {
        Vec::new()
    }

    /// How many of the newest of so many keys that a row sees its indices may lack: it reads those whatever it chooses, and
    /// chooses alike without them.
    fn may_lack(&self, _keys: usize) -> usize {
        0
    }

    /// Whether it chooses by the queries of the tokens before ([`DecodeStep::earlier`]).
    fn ahead(&self) -> bool {
        false
    }

    /// So many of the first layers are dense.
    fn dense_layers(&self) -> usize {
        0
    }

    /// The first layer in which it asks for its indices.
    fn indexed_from(&self) -> usize {
        self.dense_layers()
    }

    /// What rows read, where that follows from what they see alone and is the same in every layer.
    fn plain(&self, _rows: &[DecodeRow], _kv_heads: usize) -> Option<Selection> {
        None
    }

    /// What of it only the operations in host memory can do; nothing, for most.
    fn host_only(&self) -> Option<String> {
        None
    }
}

/// What a method keeps of every key, beside the cache: a function of the cached keys and their positions alone, so that
/// it may be built at any time, shared with its blocks and thrown away.
pub trait KeyIndex: std::fmt::Debug + Send + Sync {
    /// Equal names stand for equal content.
    fn name(&self) -> String;

    /// What is stored for each block and KV head, over a cache of the dtype given.
    fn shape(&self, shape: &AttentionShape, cache: DType) -> IndexShape;

    /// Takes in rows of one layer's cache. `rotation` is the rotary embedding of a position.
    ///
    /// # Errors
    /// A device error.
    fn extend(&self, layer: usize, index: &Tensor, kv: PagedKv, parts: &[Part], rotation: &Rotations) -> Result<()>;
}

pub use taper_kernels::rotary::Rotations;

/// Query rows of one layer that share a method.
pub struct DecodeStep<'a> {
    /// The rows; their keys and values are in the cache.
    pub batch: Decode<'a>,
    /// For a method that chooses [ahead](DecodeMethod::ahead), the layer's queries of the tokens before.
    pub earlier: Option<Earlier<'a>>,
    /// The layer.
    pub layer: usize,
    /// KV heads of the layer.
    pub kv_heads: usize,
    /// Keys of the rows' random draws `[R]`; `head` is left to the operation.
    pub streams: &'a [Stream],
    /// The method's indices by name, up to date but for what [they may lack](DecodeMethod::may_lack).
    pub indices: &'a [(String, Tensor)],
    /// The rotary embedding of the rows' sequences.
    pub rotation: &'a Rotations<'a>,
}

impl DecodeStep<'_> {
    /// What holds of a row, for each of its KV heads `[R, kv_heads]`.
    pub fn per_head<T: Clone>(&self, of: impl Fn(&DecodeRow) -> T) -> Vec<T> {
        self.batch.rows.iter().flat_map(|row| std::iter::repeat_n(of(row), self.kv_heads)).collect()
    }

    /// Query heads that share a KV head.
    ///
    /// # Errors
    /// Queries of another shape.
    pub fn group(&self) -> Result<usize> {
        Ok(self.batch.q.dims3()?.1 / self.kv_heads)
    }

    /// Everything, for all rows.
    pub fn dense(&self) -> Choice {
        Selection::dense(self.batch.rows.len(), self.kv_heads).into()
    }

    /// Chooses together for neighbours for which `of` gives the same: for what is a share of a row's context.
    ///
    /// # Errors
    /// What `choose` says.
    pub fn by_share<T: PartialEq>(
        &self,
        of: impl Fn(&DecodeRow) -> T,
        choose: impl Fn(&DecodeStep, &T) -> Result<Choice>,
    ) -> Result<Choice> {
        let each: Vec<T> = self.batch.rows.iter().map(of).collect();
        let (mut parts, mut first) = (Vec::new(), 0);
        for run in each.chunk_by(T::eq) {
            let rows = first..first + run.len();
            first = rows.end;
            parts.push((run.len(), self.rows(rows, |step| choose(step, &run[0]))?));
        }
        Ok(match parts.len() {
            1 => parts.swap_remove(0).1,
            _ => Choice::join(parts, (self.kv_heads, self.kv_heads * self.group()?)),
        })
    }

    /// The step of some of the rows.
    fn rows<T>(&self, rows: Range<usize>, run: impl FnOnce(&DecodeStep) -> Result<T>) -> Result<T> {
        if rows.len() == self.batch.rows.len() {
            return run(self);
        }
        let q = self.batch.q.narrow(0, rows.start, rows.len())?;
        let earlier = self.earlier.map(|earlier| earlier.some(&rows));
        let batch = Decode { q: &q, kv: self.batch.kv, rows: &self.batch.rows[rows.clone()] };
        run(&DecodeStep { batch, earlier, streams: &self.streams[rows], ..*self })
    }

    /// Runs a method: what it chose, and the outputs `[R, q_heads, head_dim]`.
    ///
    /// # Errors
    /// A device error.
    pub(crate) fn run(&self, method: &dyn DecodeMethod) -> Result<(Choice, Tensor)> {
        let choice = self.choose(method)?;
        let out = attend(&self.batch, &choice.selection, choice.scores.as_ref())?;
        Ok((choice, out))
    }

    /// What a method chooses.
    ///
    /// # Errors
    /// A device error.
    pub(crate) fn choose(&self, method: &dyn DecodeMethod) -> Result<Choice> {
        if self.layer < method.dense_layers() { Ok(self.dense()) } else { method.select(self) }
    }

    /// An index that the method declared.
    ///
    /// # Errors
    /// One that it did not.
    pub fn index(&self, index: &dyn KeyIndex) -> Result<&Tensor> {
        let name = index.name();
        match self.indices.iter().find(|(known, _)| *known == name) {
            Some((_, tensor)) => Ok(tensor),
            None => bail!("the method did not declare the index {name}"),
        }
    }

    /// The rotary embedding of each row's query `[R]`.
    pub fn turns(&self) -> Vec<Rotation> {
        self.batch.rows.iter().map(|row| self.rotation.at(row.visible.end - 1)).collect()
    }
}

/// The queries of the tokens before rows.
#[derive(Clone, Copy)]
pub struct Earlier<'a> {
    of: &'a dyn Fn(Range<usize>) -> Result<Tensor>,
    /// The first of the rows that `of` knows, and how many.
    rows: (usize, usize),
    /// On a device, those of all layers, where all are known.
    all: Option<&'a All>,
}

impl<'a> Earlier<'a> {
    /// `of` gives those of some of so many rows.
    pub(crate) fn new(of: &'a dyn Fn(Range<usize>) -> Result<Tensor>, rows: usize, all: Option<&'a All>) -> Self {
        Self { of, rows: (0, rows), all }
    }

    fn some(self, rows: &Range<usize>) -> Self {
        Self { rows: (self.rows.0 + rows.start, rows.len()), all: None, ..self }
    }

    /// They `[R, q_heads, head_dim]`, and a row's own where that of the token before is not known.
    ///
    /// # Errors
    /// A device error.
    pub fn queries(&self) -> Result<Tensor> {
        (self.of)(self.rows.0..self.rows.0 + self.rows.1)
    }

    /// What is chosen in all layers at once, where they are known in all.
    pub(crate) fn all(&self) -> Option<&'a All> {
        self.all
    }
}

/// What a decode method chose.
pub struct Choice {
    /// The keys that are read.
    pub selection: Selection,
    /// The scores of keys, where choosing took them.
    pub scores: Option<Scores>,
    /// Keys, or what stands for some (bounds of a page, a code, a centroid), that were scored to choose besides, over all KV
    /// heads `[R]`; empty for none.
    pub scored: Vec<usize>,
    /// Budgets `[R, q_heads]` of a method that samples; empty where the selection tells.
    pub budgets: Option<Vec<Budget>>,
}

impl From<Selection> for Choice {
    fn from(selection: Selection) -> Self {
        Self { selection, scores: None, scored: Vec::new(), budgets: None }
    }
}

impl Choice {
    /// Keys scored to choose, over all KV heads, in each of so many rows.
    pub fn keys_scored(&self, rows: usize) -> Vec<usize> {
        let mut scored = self.scores.as_ref().map_or_else(|| vec![0; rows], |scores| scores.keys(rows));
        scored.iter_mut().zip(&self.scored).for_each(|(sum, scored)| *sum += scored);
        scored
    }

    /// The choices of rows that were made apart, so many each, as one; rows have so many KV heads and query heads.
    pub(crate) fn join(parts: Vec<(usize, Self)>, (kv_heads, q_heads): (usize, usize)) -> Self {
        let any_scores = parts.iter().any(|(_, part)| part.scores.is_some());
        let told = |(_, part): &(usize, Self)| part.budgets.as_ref().is_none_or(Vec::is_empty);
        let (samples, all_told) = (parts.iter().any(|(_, part)| part.budgets.is_some()), parts.iter().all(told));
        let (mut selections, mut scores, mut budgets, mut scored) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut rows = 0;
        for (count, part) in parts {
            selections.push(part.selection);
            scores.push(part.scores.unwrap_or_else(|| Scores::none(count * kv_heads)));
            budgets.extend(part.budgets.unwrap_or_default());
            scored.extend(part.scored);
            rows += count;
            scored.resize(rows, 0);
            if !all_told {
                budgets.resize(rows * q_heads, Budget::default());
            }
        }
        Self {
            selection: Selection::join(selections),
            scores: any_scores.then(|| Scores::join(scores)),
            scored,
            budgets: samples.then_some(budgets),
        }
    }
}

/// How many keys a predictor chooses.
#[derive(Debug, Clone, Copy)]
pub struct Most<'a> {
    /// So many `[R, kv_heads]`. A head for which they are all there is reads everything, and nothing is spent on it.
    pub keys: &'a [usize],
    /// Of them those that are cheaper to read than to sample around, by what that costs
    /// ([`Sampling::noise`](taper_kernels::decode::Sampling::noise)); none where nothing is sampled, and for a
    /// predictor that cannot tell what [`pays`](Predictor::pays).
    pub noise: Option<f32>,
}

impl Most<'_> {
    /// How shares of a group's heads become one: each is to be told well where the rest is sampled, since the neediest decides.
    pub(crate) fn over(&self) -> Over {
        if self.noise.is_some() { Over::Max } else { Over::Sum }
    }
}

/// Predicts which keys hold the most attention mass.
pub trait Predictor: std::fmt::Debug + Send + Sync {
    /// The sinks, the window, and of the rest the keys that should matter most.
    ///
    /// # Errors
    /// A device error.
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, most: Most) -> Result<Choice>;

    /// Where what it predicts is a share of the attention mass: how much of the share that would make a key, or a page,
    /// worth reading it must be expected to hold. The less a prediction tells, the less that is:
    /// `bench/promise-history.md` has how it was found.
    fn pays(&self) -> Option<f64> {
        None
    }

    /// About how many keys `[R, kv_heads]` it chooses where `k` are asked for: others where its parameters say how many.
    fn expected(&self, _step: &DecodeStep, k: Vec<usize>) -> Vec<usize> {
        k
    }

    /// The most keys that it chooses for a row, whatever is asked for, where it has such a limit. Rows of different limits are
    /// chosen for apart.
    fn cap(&self, _row: &DecodeRow) -> usize {
        usize::MAX
    }

    /// As of a [`DecodeMethod`].
    fn indices(&self) -> Vec<&dyn KeyIndex> {
        Vec::new()
    }

    /// Whether its indices may lack keys of the window: it chooses alike without them, and to take several in together takes
    /// less than to do so one by one.
    fn may_lack_window(&self) -> bool {
        false
    }

    /// As of a [`DecodeMethod`].
    fn ahead(&self) -> bool {
        false
    }

    /// As of a [`DecodeMethod`].
    fn host_only(&self) -> Option<String> {
        None
    }
}

#[cfg(test)]
pub(crate) mod tests;
