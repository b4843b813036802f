//! From sums to chosen columns and diagonals and to lists of keys, without the host: [`crate::prefill::stripes`] on a
//! CUDA device.

use super::error::Result;
use super::ffi::{
    self, TaperBeforeParams, TaperColumnsParams, TaperGroupSelectParams, TaperSelectParams, TaperStripesParams,
};
use super::op::Op;
use super::prefill::{DeviceReads, KeyLists, Picked, RunLists, TILE_WORDS, Tiles};
use super::score::largest;
use crate::kv::BLOCK_TOKENS;
use crate::prefill::stripes::{Counts, Shares};
use crate::prefill::{HeadReads, Sums};
use bytemuck::Zeroable;
use candle_core::{D, DType, Tensor};
use std::ops::Range;

/// Numbers chosen for each list of heads: `ids` `[heads, room]` and how many of them count `[heads]`, u32.
#[derive(Clone, Copy)]
pub struct Chosen<'a> {
    /// Numbers, in any order.
    pub ids: &'a Tensor,
    /// How many.
    pub counts: &'a Tensor,
}

/// What a chosen slash stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slash {
    /// The blocks so many, and one more, before a row's own; block 0 is chosen besides. SampleAttention, `merge_index`.
    TwoBlocks,
    /// The blocks that the tokens so many before the rows of a block lie in. MInference, the vertical-slash pattern.
    Diagonals,
}

/// What is chosen for each list of heads, of key blocks and of blocks back, as bitmaps `[heads, 2, words]`, u32, over a
/// sequence of so many `blocks`.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn stripe_bits(columns: Option<Chosen>, slashes: Chosen, slash: Slash, blocks: usize) -> Result<Tensor> {
    let op = Op::new("stripe_bits", "slashes", slashes.ids)?;
    let (heads, slash_room) = slashes.ids.dims2()?;
    let words = blocks.div_ceil(32);
    let bitmaps = op.empty((heads, 2, words), DType::U32)?;
    let column_room = columns.map_or(Ok(0), |columns| columns.ids.dim(1))?;
    let (column_ids, column_counts) = columns.map(|columns| (columns.ids, columns.counts)).unzip();
    let p = TaperStripesParams {
        columns: op.maybe("columns", column_ids, DType::U32, [heads, column_room])?,
        column_counts: op.maybe("columns", column_counts, DType::U32, [heads])?,
        slashes: op.at("slashes", slashes.ids, DType::U32, [heads, slash_room])?,
        slash_counts: op.at("slashes", slashes.counts, DType::U32, [heads])?,
        bitmaps: op.at("bitmaps", &bitmaps, DType::U32, bitmaps.dims())?,
        heads: op.int("slashes", heads)?,
        words: op.int("blocks", words)?,
        column_stride: op.int("columns", column_room)?,
        slash_stride: op.int("slashes", slash_room)?,
        slash: match slash {
            Slash::TwoBlocks => ffi::TAPER_TWO_BLOCKS,
            Slash::Diagonals => ffi::TAPER_DIAGONALS,
        },
        each: 1,
        ..TaperStripesParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_stripes, &p) }?;
    Ok(bitmaps)
}

/// The blocks of 64 that each tile and list of heads reads by [`stripe_bits`], whose blocks have `block_tokens`: the tile's
/// own, the chosen columns before those, and those that lie as far back as a slash says. `halves`, where blocks are of 64:
/// rows 64 and on of a tile are the next query block's, and blocks that only one of the two reads are marked.
///
/// # Errors
/// Shapes or dtypes that differ, tiles beyond the sequence.
///
/// # Source
/// SampleAttention, `merge_index`.
pub fn block_lists(tiles: &Tiles, (bitmaps, block_tokens): (&Tensor, usize), halves: bool) -> Result<KeyLists> {
    let op = Op::new("block_lists", "bitmaps", bitmaps)?;
    let (heads, _, words) = bitmaps.dims3()?;
    let each = block_tokens / BLOCK_TOKENS;
    let fits = each > 0 && block_tokens.is_multiple_of(BLOCK_TOKENS) && (each == 1 || !halves);
    op.check(fits, "block_tokens", block_tokens, "a multiple of 64, and 64 beside halves")?;
    let most = tiles.last.iter().copied().max().unwrap_or(0) as usize;
    let tokens = words * 32 * block_tokens;
    op.check(most < tokens, "bitmaps", format_args!("{tokens} tokens"), format_args!("more than {most}"))?;
    let room = |&last: &u32| last as usize / BLOCK_TOKENS + 1;
    let of = KeyLists::with_room(&op, heads, tiles.last.iter().map(room))?;
    let p = TaperStripesParams {
        tiles: op.at::<u32>("tiles", &tiles.tiles, DType::U32, [tiles.count, TILE_WORDS])?.cast(),
        list_begin: op.at("begins", &of.begins, DType::U32, [heads, tiles.count])?,
        bitmaps: op.at("bitmaps", bitmaps, DType::U32, [heads, 2, words])?,
        blocks: op.at("ids", &of.ids, DType::U32, of.ids.dims())?,
        counts: op.at("counts", &of.counts, DType::U32, [heads, tiles.count])?,
        heads: op.int("bitmaps", heads)?,
        tile_count: op.int("tiles", tiles.count)?,
        words: op.int("bitmaps", words)?,
        halves: halves.into(),
        each: op.int("block_tokens", each)?,
        ..TaperStripesParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_stripes, &p) }?;
    Ok(of)
}

/// What lists of heads read of a prompt by columns and diagonals that a device chose and keeps.
#[derive(Debug)]
pub struct DeviceStripes {
    /// `[lists, 2, words]`, of [`stripe_bits`].
    bitmaps: Tensor,
    /// Tokens of their blocks.
    block_tokens: usize,
    /// Single tokens `[lists, room]`, ascending, and how many count `[lists]`, u32.
    tokens: Option<(Tensor, Tensor)>,
}

impl DeviceStripes {
    /// [`by_share`](crate::prefill::stripes::by_share): of sums by block `[q_heads, blocks]` the fewest, over each KV
    /// head's group, that hold their share of the columns' and of the slashes' mass.
    pub(crate) fn by_share((columns, slashes): (&Tensor, &Tensor), kv_heads: usize, shares: &Shares) -> Result<Self> {
        let op = Op::new("by_share", "columns", columns)?;
        let (heads, blocks) = columns.dims2()?;
        let fits = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        op.check(fits, "columns", format_args!("{heads} heads"), format_args!("a multiple of {kv_heads}"))?;
        let (column_ids, column_counts) = fewest(&op, columns, kv_heads, shares.columns)?;
        let (slash_ids, slash_counts) = fewest(&op, slashes, kv_heads, shares.slashes)?;
        let columns = Chosen { ids: &column_ids, counts: &column_counts };
        let slashes = Chosen { ids: &slash_ids, counts: &slash_counts };
        let bitmaps = stripe_bits(Some(columns), slashes, Slash::TwoBlocks, blocks)?;
        Ok(Self { bitmaps, block_tokens: shares.block_tokens, tokens: None })
    }

    /// [`by_count`](crate::prefill::stripes::by_count), a list for each of the `heads`.
    pub(crate) fn by_count(sums: &Sums, heads: &[(usize, Counts)], forced: Counts) -> Result<Self> {
        let op = Op::new("by_count", "columns", &sums.columns)?;
        let wanted =
            |of: fn(&Counts) -> usize| -> Vec<_> { heads.iter().map(|(head, of_head)| (*head, of(of_head))).collect() };
        let tokens = heaviest(&op, &sums.columns, &wanted(|counts| counts.columns), forced.columns)?;
        let (ids, counts) = heaviest(&op, &sums.diagonals, &wanted(|counts| counts.slashes), forced.slashes)?;
        let blocks = sums.diagonals.dim(1)?.div_ceil(BLOCK_TOKENS);
        let bitmaps = stripe_bits(None, Chosen { ids: &ids, counts: &counts }, Slash::Diagonals, blocks)?;
        Ok(Self { bitmaps, block_tokens: BLOCK_TOKENS, tokens: Some(tokens) })
    }

    /// What each list of heads reads in runs of rows, each within one block. Waits for the device, for how many keys those are.
    pub(crate) fn into_reads(self, runs: &[Range<usize>]) -> Result<Vec<HeadReads>> {
        let op = Op::new("before", "bitmaps", &self.bitmaps)?;
        let (lists, _, words) = self.bitmaps.dims3()?;
        if runs.is_empty() {
            return Ok(DeviceReads::Stripes(self).into_reads(vec![Vec::new(); lists]));
        }
        let own: Vec<u32> = runs.iter().map(|run| (run.start / self.block_tokens) as u32).collect();
        let most = own.iter().copied().max().unwrap_or(0) as usize;
        op.check(most < 32 * words, "runs", format_args!("block {most}"), format_args!("less than {}", 32 * words))?;
        let own = op.kept(&own, [runs.len()])?;
        let before = op.empty((lists, runs.len()), DType::U32)?;
        let (tokens, counts) = self.tokens.as_ref().map(|(tokens, counts)| (tokens, counts)).unzip();
        let room = tokens.map_or(Ok(0), |tokens| tokens.dim(1))?;
        let p = TaperBeforeParams {
            bitmaps: op.at("bitmaps", &self.bitmaps, DType::U32, [lists, 2, words])?,
            tokens: op.maybe("tokens", tokens, DType::U32, [lists, room])?,
            token_counts: op.maybe("tokens", counts, DType::U32, [lists])?,
            own: op.at("runs", &own, DType::U32, [runs.len()])?,
            before: op.at("before", &before, DType::U32, [lists, runs.len()])?,
            heads: op.int("bitmaps", lists)?,
            runs: op.int("runs", runs.len())?,
            words: op.int("bitmaps", words)?,
            token_stride: op.int("tokens", room)?,
            block_tokens: op.int("block_tokens", self.block_tokens)?,
        };
        // SAFETY: every address was checked against the shapes given beside it.
        unsafe { op.launch(ffi::taper_before, &p) }?;
        let before = op.read("before", &before)?.chunks(runs.len()).map(<[u32]>::to_vec).collect();
        Ok(DeviceReads::Stripes(self).into_reads(before))
    }

    /// Tokens of the blocks within one of which each tile lies; where they are 64, each half of it.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// What each tile reads, by some of the lists of heads; blocks of 64 that one half of a tile reads alone are marked.
    ///
    /// # Errors
    /// A device error, tiles beyond the sequence.
    pub fn lists(&self, tiles: &Tiles, which: &[usize]) -> Result<RunLists> {
        let some = Picked::new(which, self.bitmaps.dim(0)?, self.bitmaps.device())?;
        let (bitmaps, halves) = (some.of(&self.bitmaps, 0)?, self.block_tokens == BLOCK_TOKENS);
        let blocks = block_lists(tiles, (&bitmaps, self.block_tokens), halves)?;
        let columns = match &self.tokens {
            Some((ids, counts)) => Some(drop_columns(tiles, &some.of(ids, 0)?, &some.of(counts, 0)?, &blocks)?),
            None => None,
        };
        Ok(RunLists { blocks, columns })
    }
}

/// The fewest of `mass` `[q_heads, entries]`, added up over each KV head's group, that hold the share `alpha` of it, of
/// equals the first: ids `[kv_heads, entries]`, ascending, and how many `[kv_heads]`, u32.
fn fewest(op: &Op, mass: &Tensor, kv_heads: usize, alpha: f64) -> Result<(Tensor, Tensor)> {
    let (q_heads, entries) = mass.dims2()?;
    let mass = mass.contiguous()?;
    let (ids, counts) = (op.empty((kv_heads, entries), DType::U32)?, op.empty(kv_heads, DType::U32)?);
    // All, what weighs nothing too, or none at all.
    let by_count = alpha <= 0.0 || alpha >= 1.0;
    let p = TaperGroupSelectParams {
        base: TaperSelectParams {
            scores: op.at("mass", &mass, DType::F32, [q_heads, entries])?,
            ids: op.at("ids", &ids, DType::U32, [kv_heads, entries])?,
            counts: op.at("counts", &counts, DType::U32, [kv_heads])?,
            lists: op.int("kv_heads", kv_heads)?,
            stride: op.int("mass", entries)?,
            capacity: op.int("mass", entries)?,
            entries: op.int("mass", entries)?,
            k: if alpha >= 1.0 { op.int("mass", entries)? } else { 0 },
            ..TaperSelectParams::zeroed()
        },
        group: op.int("mass", q_heads / kv_heads)?,
        reduce: ffi::TAPER_SUM_OF_GROUP,
        mass: if by_count { ffi::TAPER_BY_COUNT } else { ffi::TAPER_BY_SCORE },
        share: alpha as f32,
        ..TaperGroupSelectParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_select_group, &p) }?;
    Ok((ids, counts))
}

/// Of some lists of `mass` `[lists, n]`, which and how many to keep, the first `forced` and the heaviest others: ids, ascending
/// `[wanted, room]`, and how many `[wanted]`, u32.
fn heaviest(op: &Op, mass: &Tensor, wanted: &[(usize, usize)], forced: usize) -> Result<(Tensor, Tensor)> {
    let (lists, n) = mass.dims2()?;
    for &(list, _) in wanted {
        op.check(list < lists, "head", list, format_args!("less than {lists}"))?;
    }
    let which: Vec<u32> = wanted.iter().map(|&(list, _)| list as u32).collect();
    let mass = mass.index_select(&op.kept(&which, [which.len()])?, 0)?;
    let (lists, forced) = (which.len(), forced.min(n));
    let ks: Vec<u32> = wanted.iter().map(|&(_, keep)| (keep.clamp(forced, n) - forced) as u32).collect();
    let capacity = ks.iter().copied().max().unwrap_or(0).max(1) as usize;
    let ends = [&vec![forced as u32; lists][..], &vec![n as u32; lists], &ks];
    let (others, _) = largest(op, &mass, ends, capacity)?;
    let counts: Vec<u32> = ks.iter().map(|k| k + forced as u32).collect();
    let counts = op.kept(&counts, [lists])?;
    if forced == 0 {
        return Ok((others, counts));
    }
    let first = Tensor::arange(0, forced as u32, mass.device())?.unsqueeze(0)?.repeat((lists, 1))?;
    Ok((Tensor::cat(&[&first, &others], D::Minus1)?.contiguous()?, counts))
}

/// [`crate::prefill::stripes::top`] of some lists of masses `[lists, n]`: which, and how many to keep. Waits for the device.
pub(crate) fn top(mass: &Tensor, wanted: &[(usize, usize)], forced: usize) -> Result<Vec<Vec<u32>>> {
    let (ids, counts) = heaviest(&Op::new("top", "mass", mass)?, mass, wanted, forced)?;
    let (ids, counts) = (ids.to_vec2::<u32>()?, counts.to_vec1::<u32>()?);
    Ok(ids.into_iter().zip(counts).map(|(ids, count)| ids.into_iter().take(count as usize).collect()).collect())
}

/// Single tokens of each head `[heads, room]`, ascending, `counts` `[heads]` of them, as lists of each tile: without those
/// in a block that the tile reads anyway, and those beyond its rows.
///
/// # Errors
/// Shapes or dtypes that differ, a number of heads that is not a multiple of the blocks' lists.
///
/// # Source
/// MInference, vertical lines beside slashes: each key once.
pub fn drop_columns(tiles: &Tiles, tokens: &Tensor, counts: &Tensor, blocks: &KeyLists) -> Result<KeyLists> {
    let op = Op::new("drop_columns", "tokens", tokens)?;
    let (heads, room) = tokens.dims2()?;
    let fits = blocks.heads > 0 && heads.is_multiple_of(blocks.heads);
    op.check(fits, "tokens", format_args!("{heads} heads"), format_args!("a multiple of {}", blocks.heads))?;
    let of = KeyLists::with_room(&op, heads, tiles.last.iter().map(|_| room))?;
    let listed = [blocks.heads, tiles.count];
    let p = TaperColumnsParams {
        columns: op.at("tokens", tokens, DType::U32, [heads, room])?,
        counts: op.at("counts", counts, DType::U32, [heads])?,
        tiles: op.at::<u32>("tiles", &tiles.tiles, DType::U32, [tiles.count, TILE_WORDS])?.cast(),
        list_begin: op.at("blocks", &blocks.begins, DType::U32, listed)?,
        list_counts: op.at("blocks", &blocks.counts, DType::U32, listed)?,
        blocks: op.at("blocks", &blocks.ids, DType::U32, blocks.ids.dims())?,
        column_begin: op.at("begins", &of.begins, DType::U32, [heads, tiles.count])?,
        column_ids: op.at("ids", &of.ids, DType::U32, of.ids.dims())?,
        column_counts: op.at("counts", &of.counts, DType::U32, [heads, tiles.count])?,
        heads: op.int("tokens", heads)?,
        list_heads: op.int("blocks", blocks.heads)?,
        tile_count: op.int("tiles", tiles.count)?,
        column_stride: op.int("tokens", room)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_drop_columns, &p) }?;
    Ok(of)
}
