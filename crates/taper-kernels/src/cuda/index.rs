//! Indices beside the cache: bounds and channels of keys, binary codes, clusters; what [`crate::index`] keeps, on a
//! CUDA device.

use super::batch::{Batch, Dims, Lists, WORDS};
use super::error::Result;
use super::ffi::{self, TaperAppendParams, TaperCodeParams, TaperHashScoreParams, TaperKeyClusterParams};
use super::ffi::{TaperNearestParams, TaperProbeParams};
use super::op::{Op, renews};
use super::project::Turns;
use crate::index::clusters::MOST_ON_DEVICE;
use crate::index::quantized;
use crate::kv::BLOCK_TOKENS;
use crate::lent::Lent;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// New tokens of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The sequence's block table.
    pub table: u32,
    /// First new token, and one past the last; that many are visible.
    pub tokens: (u32, u32),
}

/// What [`extend`] writes, each where wanted; of the keys' dtype, where nothing else is said.
#[derive(Clone, Copy, Default)]
pub struct Metadata<'a> {
    /// Channels of every key `[blocks, kv_heads, 64, width]`, and which `[kv_heads, width]`, u32.
    pub labels: Option<(&'a Tensor, &'a Tensor)>,
    /// Channel-wise minima, then maxima, of each page's visible keys `[blocks, kv_heads, pages of a block, 2 head_dim]`.
    pub pages: Option<&'a Tensor>,
    /// The largest norm of each page's visible rows, rounded up `[blocks, kv_heads, pages of a block, 1]`, f32.
    pub norms: Option<&'a Tensor>,
    /// 2 bits a channel of each block's visible keys, `[blocks, kv_heads, 1, 5 head_dim]`, u32: taper_gpu.h says how.
    pub quantized: Option<&'a Tensor>,
}

/// Spans as the interface takes them, each of which must have tokens, within one of so many tables of so many blocks.
fn span_words(op: &Op, spans: &[Span], (tables, stride): (usize, usize)) -> Result<Vec<u32>> {
    let limit = stride * BLOCK_TOKENS;
    let mut words = Vec::with_capacity(4 * spans.len());
    for &Span { table, tokens: (begin, end) } in spans {
        let fits = begin < end && end as usize <= limit && (table as usize) < tables;
        op.check(
            fits,
            "spans",
            format_args!("{begin} to {end} of table {table}"),
            format_args!("tokens below {limit}"),
        )?;
        words.extend([table, begin, end, 0]);
    }
    Ok(words)
}

/// Takes new keys `[blocks, kv_heads, 64, head_dim]`, or values, into what stands for them. Pages of bounds and norms are of
/// one size. `first` is the lowest position in its sequence that any of them has, wherever the tables begin.
///
/// # Errors
/// Shapes or dtypes that differ, a span that is empty.
pub fn extend(k: &Tensor, tables: &Tensor, spans: &[Span], first: usize, to: &Metadata) -> Result<()> {
    let op = Op::new("index-extend", "k", k)?;
    let ((blocks, kv_heads, _, head_dim), dtype) = (k.dims4()?, k.dtype());
    let (table_count, stride) = tables.dims2()?;
    let words = span_words(&op, spans, (table_count, stride))?;
    let last_block = |span: &Span| (span.tokens.1 - 1) / BLOCK_TOKENS as u32;
    let blocks_of = |span: &Span| last_block(span) - span.tokens.0 / BLOCK_TOKENS as u32 + 1;
    let most = spans.iter().map(blocks_of).max().unwrap_or(0);
    if spans.is_empty() {
        return Ok(());
    }
    let at = op.kept(&words, [spans.len(), 4])?;
    let width = to.labels.map_or(Ok(0), |(labels, _)| labels.dim(3))?;
    let pages = to.pages.or(to.norms).map_or(Ok(1), |pages| pages.dim(2))?;
    op.check(pages > 0 && BLOCK_TOKENS.is_multiple_of(pages), "pages", pages, "a divisor of 64")?;
    let (one, words) = quantized::shape(head_dim);
    let p = TaperAppendParams {
        k: op.at("k", k, dtype, [blocks, kv_heads, BLOCK_TOKENS, head_dim])?,
        block_table: op.at("tables", tables, DType::U32, [table_count, stride])?,
        spans: op.at("spans", &at, DType::U32, [spans.len(), 4])?,
        channels: op.maybe("labels", to.labels.map(|l| l.1), DType::U32, [kv_heads, width])?,
        labels: op.maybe("labels", to.labels.map(|l| l.0), dtype, [blocks, kv_heads, BLOCK_TOKENS, width])?,
        pages: op.maybe("pages", to.pages, dtype, [blocks, kv_heads, pages, 2 * head_dim])?,
        norms: op.maybe("norms", to.norms, DType::F32, [blocks, kv_heads, pages, 1])?,
        quantized: op.maybe("quantized", to.quantized, DType::U32, [blocks, kv_heads, one, words])?,
        page: op.int("pages", BLOCK_TOKENS / pages)?,
        span_count: op.int("spans", spans.len())?,
        kv_heads: op.int("k", kv_heads)?,
        head_dim: op.int("k", head_dim)?,
        dtype: op.dtype("k", dtype)?,
        table_stride: op.int("tables", stride)?,
        max_blocks: most as i32,
        width: op.int("labels", width)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_append, &p) }?;
    renews(first);
    Ok(())
}

/// Where each of a step's tokens stands.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// Absolute positions `[T]`, u32.
    pub positions: &'a Tensor,
    /// The block table of each token's sequence `[T]`, u32.
    pub tables_of: &'a Tensor,
    /// Block tables `[tables, stride]`, u32.
    pub tables: &'a Tensor,
}

/// Codes of new keys into the index `[blocks, kv_heads, 64, heads / kv_heads · words]`, u32: bit i of word w is set where
/// element 32 w + i of `x` `[T, heads, 32 words]` is not negative.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn codes(x: &Tensor, at: &Tokens, index: &Tensor) -> Result<()> {
    let op = Op::new("codes", "x", x)?;
    let ((tokens, heads, width), dtype) = (x.dims3()?, x.dtype());
    let (blocks, kv_heads, _, wide) = index.dims4()?;
    let (tables, stride) = at.tables.dims2()?;
    let words = width / 32;
    let fits = width > 0 && width.is_multiple_of(32) && kv_heads > 0 && heads.is_multiple_of(kv_heads);
    op.check(fits && wide * kv_heads == heads * words, "index", format_args!("{wide} words"), "one code a head of x")?;
    let p = TaperCodeParams {
        x: op.at("x", x, dtype, [tokens, heads, width])?,
        positions: op.at("positions", at.positions, DType::U32, [tokens])?,
        token_table: op.at("tables_of", at.tables_of, DType::U32, [tokens])?,
        block_table: op.at("tables", at.tables, DType::U32, [tables, stride])?,
        codes: op.at("index", index, DType::U32, [blocks, kv_heads, BLOCK_TOKENS, wide])?,
        tokens: op.int("x", tokens)?,
        heads: op.int("x", heads)?,
        kv_heads: op.int("index", kv_heads)?,
        words: op.int("x", words)?,
        dtype: op.dtype("x", dtype)?,
        table_stride: op.int("tables", stride)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_codes, &p) }
}

/// The same, not into an index: codes `[T, heads, words]`, u32, of `x` `[T, heads, 32 words]`.
///
/// # Errors
/// A dtype other than bf16 and f16, a width that is not a multiple of 32.
pub fn signs(x: &Tensor) -> Result<Tensor> {
    let op = Op::new("signs", "x", x)?;
    let ((tokens, heads, width), dtype) = (x.dims3()?, x.dtype());
    op.check(width > 0 && width.is_multiple_of(32), "x", format_args!("{width} wide"), "a multiple of 32")?;
    let out = op.empty((tokens, heads, width / 32), DType::U32)?;
    let p = TaperCodeParams {
        x: op.at("x", x, dtype, [tokens, heads, width])?,
        codes: op.at("out", &out, DType::U32, [tokens, heads, width / 32])?,
        tokens: op.int("x", tokens)?,
        heads: op.int("x", heads)?,
        kv_heads: op.int("x", heads)?,
        words: op.int("x", width / 32)?,
        dtype: op.dtype("x", dtype)?,
        ..TaperCodeParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_codes, &p) }?;
    Ok(out)
}

/// How many bits of each key's code equal the query's less those that differ, summed over the group
/// `[R, kv_heads, entries]`, f32; `q` are codes `[R, q_heads, words]`, u32.
///
/// # Errors
/// Shapes that differ.
pub fn agreement(batch: &Batch, q: &Tensor, index: &Tensor) -> Result<Lent> {
    let op = Op::new("agreement", "index", index)?;
    let Dims { rows, q_heads, kv_heads, blocks, tables, stride, .. } = batch.dims(&op)?;
    let (words, wide) = (q.dim(2)?, index.dim(3)?);
    let group = q_heads / kv_heads;
    let expected = format!("{words} or {}", group * words);
    op.check(wide == words || wide == group * words, "index", format_args!("{wide} words"), expected)?;
    let entries = batch.max_len.next_multiple_of(BLOCK_TOKENS);
    let out = op.lent((rows, kv_heads, entries), DType::F32)?;
    let p = TaperHashScoreParams {
        q: op.at("q", q, DType::U32, [rows, q_heads, words])?,
        codes: op.at("index", index, DType::U32, [blocks, kv_heads, BLOCK_TOKENS, wide])?,
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        lens: op.at("lens", batch.lens, DType::U32, [rows])?,
        out: op.at("out", &out, DType::F32, [rows, kv_heads, entries])?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        words: op.int("q", words)?,
        per_head: (wide != words).into(),
        table_stride: op.int("tables", stride)?,
        max_len: op.int("max_len", batch.max_len)?,
        stride: op.int("max_len", entries)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_hash_score, &p) }?;
    Ok(out)
}

/// The cluster of each new key into the index `[blocks, kv_heads, 64]`, i16 of the same bits: that of the largest of its products
/// `[kv_heads, T, clusters]`, f32, with all centroids, the first of equals.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn nearest(products: &Tensor, at: &Tokens, index: &Tensor) -> Result<()> {
    let op = Op::new("nearest", "products", products)?;
    let (kv_heads, tokens, clusters) = products.dims3()?;
    let (tables, stride) = at.tables.dims2()?;
    let p = TaperNearestParams {
        products: op.at("products", products, DType::F32, [kv_heads, tokens, clusters])?,
        positions: op.at("positions", at.positions, DType::U32, [tokens])?,
        token_table: op.at("tables_of", at.tables_of, DType::U32, [tokens])?,
        block_table: op.at("tables", at.tables, DType::U32, [tables, stride])?,
        ids: op.at("index", index, DType::I16, [index.dim(0)?, kv_heads, BLOCK_TOKENS])?,
        tokens: op.int("products", tokens)?,
        kv_heads: op.int("products", kv_heads)?,
        clusters: op.int("products", clusters)?,
        table_stride: op.int("tables", stride)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_saap_nearest, &p) }
}

/// The cluster of single keys of a cache `[blocks, kv_heads, 64, head_dim]`, bf16 or f16, each in its slot
/// (block * 64 + row) `[T]`, u32, turned back, by products in f32 with `centroids` `[kv_heads, clusters, head_dim]`, f32. Into the
/// index as [`nearest`]. `first` is the lowest position in its sequence that any of them has.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn key_clusters(
    k: &Tensor,
    (slots, first): (&Tensor, usize),
    turns: Option<&Turns>,
    centroids: &Tensor,
    index: &Tensor,
) -> Result<()> {
    let op = Op::new("key_clusters", "k", k)?;
    let ((blocks, kv_heads, _, head_dim), (_, clusters, _)) = (k.dims4()?, centroids.dims3()?);
    let tokens = slots.dim(0)?;
    let [cos, sin] = Turns::at(turns, &op, tokens, head_dim)?;
    let p = TaperKeyClusterParams {
        k: op.at::<u8>("k", k, k.dtype(), [blocks, kv_heads, BLOCK_TOKENS, head_dim])?.cast_const().cast(),
        centroids: op.at("centroids", centroids, DType::F32, [kv_heads, clusters, head_dim])?,
        slots: op.at("slots", slots, DType::U32, [tokens])?,
        cos,
        sin,
        ids: op.at("index", index, DType::I16, [blocks, kv_heads, BLOCK_TOKENS])?,
        tokens: op.int("slots", tokens)?,
        kv_heads: op.int("k", kv_heads)?,
        head_dim: op.int("k", head_dim)?,
        clusters: op.int("centroids", clusters)?,
        dtype: op.dtype("k", k.dtype())?,
    };
    // SAFETY: every address was checked against the shapes given beside it; slots are the caller's, of its cache.
    unsafe { op.launch(ffi::taper_saap_key_clusters, &p) }?;
    renews(first);
    Ok(())
}

/// How many clusters [`probe`] takes.
#[derive(Clone, Copy)]
pub struct Limits<'a> {
    /// Clusters at most.
    pub clusters: usize,
    /// Tokens at most, or at least, of each list `[R * kv_heads]`, u32.
    pub tokens: &'a Tensor,
    /// Whether it is the fewest clusters that hold at least as many tokens, not as many as hold no more.
    pub at_least: bool,
}

/// Adds to lists of two ranges the tokens between them that belong to the likeliest clusters: by the softmax of `logits`
/// `[R, q_heads, clusters]`, f32, summed over the group, ties going to the earlier, as many as the limits say. `index`
/// `[blocks, kv_heads, 64]`, i16 of the same bits. At most 4,096 clusters.
///
/// # Errors
/// Shapes or dtypes that differ.
///
/// # Source
/// As [`crate::index::clusters::select`].
pub fn probe(batch: &Batch, logits: &Tensor, index: &Tensor, lists: Lists, limits: Limits) -> Result<Lists> {
    let op = Op::new("probe", "logits", logits)?;
    let Dims { rows, q_heads, kv_heads, blocks, tables, stride, .. } = batch.dims(&op)?;
    let clusters = logits.dim(2)?;
    let most = MOST_ON_DEVICE;
    op.check(
        (1..=most).contains(&clusters),
        "logits",
        format_args!("of {clusters} clusters"),
        format_args!("1 to {most}"),
    )?;
    let (count, capacity) = (rows * kv_heads, batch.max_len);
    lists.fits(&op, rows, kv_heads)?;
    let ids = op.lent(count * capacity, DType::U32)?;
    let (told, work) = Lists::told(&op, count)?;
    let p = TaperProbeParams {
        logits: op.at("logits", logits, DType::F32, [rows, q_heads, clusters])?,
        ids: op.at("index", index, DType::I16, [blocks, kv_heads, BLOCK_TOKENS])?,
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        limits: op.at("limits", limits.tokens, DType::U32, [count])?,
        lists: op.at("lists", &lists.work, DType::U32, [count, WORDS])?,
        work: op.at("lists", &work, DType::U32, [count, WORDS])?,
        token_ids: op.at("ids", &ids, DType::U32, [count * capacity])?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        clusters: op.int("logits", clusters)?,
        table_stride: op.int("tables", stride)?,
        most: op.int("limits", limits.clusters.min(clusters))?,
        at_least: limits.at_least.into(),
        capacity: op.int("max_len", capacity)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_saap_probe, &p) }?;
    Ok(Lists { work, told, token_ids: Some(ids), ..lists })
}
