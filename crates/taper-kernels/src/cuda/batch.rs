//! Query rows of a batch on the device, and what each of their heads reads.

use super::error::Result;
use super::layer::cast;
use super::op::Op;
use super::readback::Readback;
use super::tape;
use crate::decode::{Decode, DecodeRow, HeadSelection, Keys, Sample, Values};
use crate::kv::{BLOCK_TOKENS, PagedKv};
use crate::lent::Lent;
use crate::{CUDA_GROUP_MAX, CUDA_HEAD_DIMS};
use candle_core::{DType, Tensor};

/// Query rows, each of any sequence: [`Decode`] with everything on the device.
///
/// What tables and lengths say is not read on the host: blocks must lie within the cache, and a row's table must cover its
/// length.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// Queries `[R, q_heads, head_dim]`, in the cache's dtype, bf16 or f16; head_dim is 64 or 128.
    pub q: &'a Tensor,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The rows' block tables `[R, stride]`, or more, u32.
    pub tables: &'a Tensor,
    /// Visible tokens of each row `[R]`, u32, at least 1.
    pub lens: &'a Tensor,
    /// The most of them, at least.
    pub max_len: usize,
}

/// Sizes of a batch, checked against each other.
#[derive(Clone, Copy)]
pub(super) struct Dims {
    pub rows: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub blocks: usize,
    pub tables: usize,
    pub stride: usize,
    pub dtype: DType,
}

impl Batch<'_> {
    pub(super) fn dims(&self, op: &Op) -> Result<Dims> {
        let (rows, q_heads, head_dim) = self.q.dims3()?;
        let (blocks, kv_heads, kv_dim) = self.kv.dims()?;
        let (tables, stride) = self.tables.dims2()?;
        let group = q_heads / kv_heads.max(1);
        let fits =
            head_dim == kv_dim && kv_heads > 0 && group * kv_heads == q_heads && (1..=CUDA_GROUP_MAX).contains(&group);
        op.check(
            fits && CUDA_HEAD_DIMS.contains(&head_dim) && rows > 0,
            "q",
            format_args!("{:?}", self.q.dims()),
            format_args!("[rows, 1 to {CUDA_GROUP_MAX} times {kv_heads}, {kv_dim}], head_dim 64 or 128"),
        )?;
        let limit = stride * BLOCK_TOKENS;
        op.check(self.max_len > 0 && self.max_len <= limit, "max_len", self.max_len, format_args!("1 to {limit}"))?;
        op.check(tables >= rows, "tables", tables, format_args!("at least {rows}"))?;
        Ok(Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype: self.kv.k.dtype() })
    }
}

/// Tables are as wide as a multiple of so many blocks.
const TABLE_BLOCKS: usize = 16;

/// A [`Decode`] copied to the device.
#[derive(Debug)]
pub(super) struct Upload {
    q: Tensor,
    tables: Tensor,
    lens: Tensor,
    max_len: usize,
}

impl Upload {
    pub fn new(op: &Op, decode: &Decode) -> Result<Self> {
        let blocks = |row: &DecodeRow| row.visible.end.div_ceil(BLOCK_TOKENS);
        // Operations are told of somewhat longer rows than there are, so that steps one after the other differ in what
        // is copied alone.
        let stride = decode.rows.iter().map(blocks).max().unwrap_or(1).next_multiple_of(TABLE_BLOCKS);
        let mut tables = vec![0u32; decode.rows.len() * stride];
        for (row, to) in decode.rows.iter().zip(tables.chunks_exact_mut(stride)) {
            to[..blocks(row)].copy_from_slice(&row.table[..blocks(row)]);
        }
        let lens: Vec<u32> = decode.rows.iter().map(|row| row.visible.end as u32).collect();
        Ok(Self {
            q: cast(op, decode.q, decode.kv.k.dtype())?,
            tables: op.kept(&tables, [decode.rows.len(), stride])?,
            max_len: stride * BLOCK_TOKENS,
            lens: op.kept(&lens, [lens.len()])?,
        })
    }

    pub fn batch<'a>(&'a self, kv: PagedKv<'a>) -> Batch<'a> {
        Batch { q: &self.q, kv, tables: &self.tables, lens: &self.lens, max_len: self.max_len }
    }
}

/// Words of a work list of the interface.
pub(super) const WORDS: usize = 16;

/// What each row and list of heads reads, on the device: two ranges, blocks of 64 tokens, single tokens, and a sample of
/// which each query head reads a prefix with its own weight. With as many lists as KV heads each serves its group.
#[derive(Debug, Clone)]
pub struct Lists {
    pub(super) work: Tensor,
    /// The same for the host, where an operation has written them.
    pub(super) told: Option<Readback>,
    pub(super) block_ids: Option<Lent>,
    pub(super) token_ids: Option<Lent>,
    /// Each of `token_ids` stands for a page of 2^token_shift tokens, of which a list names a run of tokens.
    pub(super) token_shift: u32,
    /// Natural log weights beside `token_ids`.
    pub(super) token_ln_weights: Option<Tensor>,
    /// Sampled tokens that each query head reads, and their natural log weight `[rows, q_heads]`.
    pub(super) heads_sampled: Option<(Tensor, Tensor)>,
    pub(super) rows: usize,
    pub(super) heads: usize,
    /// Whether every list's second range ends where its row does, so that the lists can be [extended](Self::extended).
    pub(super) open: bool,
    /// Tokens of each list beyond those of `told`.
    pub(super) since: usize,
}

impl Lists {
    /// Reads two ranges of tokens for each row, the same for every list of heads: (begin, end) pairs, empty where end is
    /// not beyond begin. `lens` are the visible tokens.
    ///
    /// # Errors
    /// A device error.
    pub fn ranges(like: &Tensor, heads: usize, rows: &[([(u32, u32); 2], u32)]) -> Result<Self> {
        let op = Op::new("lists", "like", like)?;
        let mut made = Draft::default();
        for &(ranges, len) in rows {
            for _ in 0..heads {
                made.begin(len);
                ranges.iter().for_each(|&(begin, end)| made.range(begin, end));
            }
        }
        made.finish(&op, rows.len(), heads)
    }

    /// Lists of ranges alone, whose words are the tensor's `[rows * heads, 16]`.
    pub(super) fn over(work: Tensor, rows: usize, heads: usize) -> Self {
        let (told, block_ids, token_ids, token_ln_weights, heads_sampled) = (None, None, None, None, None);
        let (token_shift, open, since) = (0, false, 0);
        Self {
            work,
            told,
            block_ids,
            token_ids,
            token_shift,
            token_ln_weights,
            heads_sampled,
            rows,
            heads,
            open,
            since,
        }
    }

    /// The same for rows that see `since` tokens more, all of which they read; none of lists that are not open.
    pub(super) fn extended(&self, op: &Op, since: usize) -> Result<Option<Self>> {
        if !self.open {
            return Ok(None);
        }
        let mut more = [0u32; WORDS];
        (more[END + 1], more[LEN]) = (since as u32, since as u32);
        op.apart()?;
        let work = self.work.broadcast_add(&op.kept(&more, [1, WORDS])?)?;
        Ok(Some(Self { work, since: self.since + since, ..self.clone() }))
    }

    /// The words of the lists of a host selection that reads ranges alone, at most two a list; none of another.
    pub(super) fn range_words(rows: &[DecodeRow], selection: &[HeadSelection]) -> Option<Vec<u32>> {
        let heads = selection.len() / rows.len().max(1);
        let mut made = Draft::default();
        for (i, head) in selection.iter().enumerate() {
            if matches!(head, HeadSelection::Keys(keys) if keys.ranges.len() > 2) {
                return None;
            }
            made.head(&rows[i / heads], head);
        }
        let ranges = |list: &[u32; WORDS]| list[TOKEN_COUNT] == 0 && list[SAMPLE_COUNT] == 0 && list[END] > 0;
        made.work.iter().all(ranges).then(|| made.work.concat())
    }

    /// Themselves without the ids, of which [`counts`](Self::counts) needs none.
    pub(super) fn words(&self) -> Self {
        let work = self.work.clone();
        Self { told: self.told.clone(), since: self.since, ..Self::over(work, self.rows, self.heads) }
    }

    /// Words of so many lists, for an operation that writes them all.
    pub(super) fn told(op: &Op, count: usize) -> Result<(Option<Readback>, Tensor)> {
        let told = Readback::new(op, count * WORDS)?;
        let work = told.tensor((count, WORDS))?;
        Ok((Some(told), work))
    }

    /// Whether they are for so many rows of so many heads.
    pub(super) fn fits(&self, op: &Op, rows: usize, heads: usize) -> Result<()> {
        let got = format_args!("{} rows of {}", self.rows, self.heads);
        op.check((self.rows, self.heads) == (rows, heads), "lists", got, format_args!("{rows} rows of {heads}"))
    }

    /// The tokens that each list reads whatever its sample `[rows, heads]`, ascending, but for those of no weight. Waits for
    /// the device: for tests and reports.
    ///
    /// # Errors
    /// A device error.
    pub fn read_back(&self) -> Result<Vec<Vec<u32>>> {
        tape::leave()?;
        let work = self.work.to_vec2::<u32>()?;
        let pool = |ids: Option<&Tensor>| ids.map_or(Ok(Vec::new()), |ids| ids.flatten_all()?.to_vec1::<u32>());
        let (blocks, tokens) = (pool(self.block_ids.as_deref())?, pool(self.token_ids.as_deref())?);
        let weights = match &self.token_ln_weights {
            Some(weights) => weights.to_vec1::<f32>()?,
            None => Vec::new(),
        };
        let weighs = |i: &u32| weights.get(*i as usize).is_none_or(|&weight| weight != f32::NEG_INFINITY);
        let one = |w: &Vec<u32>| {
            let slice = |ids: &[u32], first: usize| ids[w[first] as usize..][..w[first + 1] as usize].to_vec();
            let whole = |block: u32| block * BLOCK_TOKENS as u32..((block + 1) * BLOCK_TOKENS as u32).min(w[LEN]);
            let mut read: Vec<u32> = (w[BEGIN]..w[END]).chain(w[BEGIN + 1]..w[END + 1]).collect();
            if w[BLOCK_COUNT] > 0 {
                read.extend(slice(&blocks, BLOCK_FIRST).into_iter().flat_map(whole));
            }
            if w[TOKEN_COUNT] > 0 {
                let run = w[TOKEN_FIRST]..w[TOKEN_FIRST] + w[TOKEN_COUNT];
                let (shift, within) = (self.token_shift, (1 << self.token_shift) - 1);
                read.extend(run.filter(weighs).map(|i| (tokens[(i >> shift) as usize] << shift) + (i & within)));
            }
            read.sort_unstable();
            read
        };
        Ok(work.iter().map(one).collect())
    }

    /// Keys that each list reads `[rows * heads]`, but for samples. Waits for the device.
    pub(super) fn counts(&self) -> Result<Vec<usize>> {
        let (words, since) = match &self.told {
            Some(told) => (told.read()?, self.since),
            None => {
                tape::leave()?;
                (self.work.flatten_all()?.to_vec1::<u32>()?, 0)
            }
        };
        let one = |w: &[u32]| {
            let ranges = [0, 1].map(|i| w[END + i].saturating_sub(w[BEGIN + i])).iter().sum::<u32>();
            (ranges + w[TOKEN_COUNT]) as usize + w[BLOCK_COUNT] as usize * BLOCK_TOKENS + since
        };
        Ok(words.chunks_exact(WORDS).map(one).collect())
    }

    /// The lists of a host selection, which the caller has checked; heads with given weights read nothing.
    pub(super) fn upload(op: &Op, rows: &[DecodeRow], selection: &[HeadSelection], group: usize) -> Result<Self> {
        let heads = selection.len() / rows.len().max(1);
        let mut made = Draft::default();
        let (mut counts, mut ln_weights) = (Vec::new(), Vec::new());
        for (i, head) in selection.iter().enumerate() {
            match made.head(&rows[i / heads], head) {
                Some(sample) => {
                    counts.extend(sample.counts.iter().map(|&count| count as u32));
                    ln_weights.extend(&sample.log_weights);
                }
                None => {
                    counts.extend(std::iter::repeat_n(0, group));
                    ln_weights.extend(std::iter::repeat_n(0f32, group));
                }
            }
        }
        let mut lists = made.finish(op, rows.len(), heads)?;
        if counts.iter().any(|&count| count > 0) {
            let shape = [rows.len(), heads * group];
            lists.heads_sampled = Some((op.kept(&counts, shape)?, op.kept(&ln_weights, shape)?));
        }
        Ok(lists)
    }

    /// A list for each query head, of the values with given weights in a host selection; none if it has none. All other
    /// heads read nothing.
    pub(super) fn upload_values(
        op: &Op,
        rows: &[DecodeRow],
        selection: &[HeadSelection],
        group: usize,
    ) -> Result<Option<Self>> {
        let heads = selection.len() / rows.len().max(1);
        let mut made = Draft::default();
        let mut weights = Vec::new();
        for (i, head) in selection.iter().enumerate() {
            for g in 0..group {
                made.begin(rows[i / heads].visible.end as u32);
                let HeadSelection::Values(Values { ids, weights: given }) = head else { continue };
                let own = ids.iter().zip(&given[g * ids.len()..]).filter(|(_, w)| **w > 0.0);
                made.tokens(own.clone().map(|(&id, _)| id));
                weights.extend(own.map(|(_, w)| w.ln()));
            }
        }
        if weights.is_empty() {
            return Ok(None);
        }
        let mut lists = made.finish(op, rows.len(), heads * group)?;
        lists.token_ln_weights = Some(op.upload(&weights, [weights.len()])?);
        Ok(Some(lists))
    }
}

/// Lists in the making, on the host.
#[derive(Default)]
pub(super) struct Draft {
    work: Vec<[u32; WORDS]>,
    tokens: Vec<u32>,
    ranges: usize,
}

// Places of a work list's words.
const BEGIN: usize = 0;
const END: usize = 2;
const BLOCK_FIRST: usize = 4;
const BLOCK_COUNT: usize = 5;
const TOKEN_FIRST: usize = 6;
const TOKEN_COUNT: usize = 7;
const SAMPLE_FIRST: usize = 8;
const SAMPLE_COUNT: usize = 9;
const LEN: usize = 12;

/// The words of a list of tokens alone: where in the pool they begin, how many they are, and what its row sees.
pub(super) fn tokens_of(first: usize, count: usize, len: usize) -> [u32; WORDS] {
    let mut list = [0; WORDS];
    (list[TOKEN_FIRST], list[TOKEN_COUNT], list[LEN]) = (first as u32, count as u32, len as u32);
    list
}

impl Draft {
    pub fn begin(&mut self, len: u32) {
        let mut list = [0; WORDS];
        list[LEN] = len;
        self.work.push(list);
        self.ranges = 0;
    }

    fn last(&mut self) -> &mut [u32; WORDS] {
        self.work.last_mut().expect("a list was begun")
    }

    pub fn range(&mut self, begin: u32, end: u32) {
        let at = self.ranges;
        let list = self.last();
        (list[BEGIN + at], list[END + at]) = (begin, end);
        self.ranges += 1;
    }

    /// All of a row, and an empty range behind it for what may come.
    pub fn whole(&mut self, len: u32) {
        self.range(0, len);
        self.range(len, len);
    }

    /// The list of a row and head, and its sample; one with given weights reads nothing.
    fn head<'s>(&mut self, row: &DecodeRow, head: &'s HeadSelection) -> Option<&'s Sample> {
        let visible = &row.visible;
        self.begin(visible.end as u32);
        match head {
            HeadSelection::Dense => {
                self.range(visible.start as u32, visible.end as u32);
                None
            }
            HeadSelection::Keys(keys) => {
                self.keys(keys);
                keys.sample.as_ref().inspect(|sample| self.sample(&sample.ids))
            }
            HeadSelection::Values(_) => None,
        }
    }

    /// Two ranges as they are, further ones by their tokens, and the single tokens.
    pub fn keys(&mut self, keys: &Keys) {
        let (whole, rest) = keys.ranges.split_at(keys.ranges.len().min(2));
        whole.iter().for_each(|r| self.range(r.start as u32, r.end as u32));
        let more = rest.iter().flat_map(|r| r.start as u32..r.end as u32);
        self.tokens(more.chain(keys.ids.iter().copied()));
    }

    fn tokens(&mut self, ids: impl Iterator<Item = u32>) {
        let first = self.tokens.len();
        self.tokens.extend(ids);
        let count = self.tokens.len() - first;
        let list = self.last();
        (list[TOKEN_FIRST], list[TOKEN_COUNT]) = (first as u32, count as u32);
    }

    fn sample(&mut self, ids: &[u32]) {
        let first = self.tokens.len();
        self.tokens.extend(ids);
        let list = self.last();
        (list[SAMPLE_FIRST], list[SAMPLE_COUNT]) = (first as u32, ids.len() as u32);
    }

    /// Gives list `i` a sample of `counts[i]` tokens, which will stand behind the tokens so far, `stride` apart.
    pub fn samples(&mut self, counts: &[usize], stride: usize) {
        let behind = self.tokens.len();
        for (i, (list, &count)) in self.work.iter_mut().zip(counts).enumerate() {
            (list[SAMPLE_FIRST], list[SAMPLE_COUNT]) = ((behind + i * stride) as u32, count as u32);
        }
    }

    /// The lists, which nothing may write to: see [`Lists::writable`].
    pub fn finish(self, op: &Op, rows: usize, heads: usize) -> Result<Lists> {
        let token_ids = (!self.tokens.is_empty()).then(|| op.kept(&self.tokens, [self.tokens.len()])).transpose()?;
        let token_ids = token_ids.map(Lent::from);
        let work = op.kept(self.work.as_flattened(), [rows * heads, WORDS])?;
        let open = self.work.iter().all(|list| list[END + 1] == list[LEN]);
        Ok(Lists { token_ids, open, ..Lists::over(work, rows, heads) })
    }
}
