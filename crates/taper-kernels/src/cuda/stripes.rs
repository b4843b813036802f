//! From chosen columns and diagonals to lists of keys, without the host: [`crate::prefill::stripes::Stripes`] on a CUDA device.

use super::error::Result;
use super::ffi::{self, TaperColumnsParams, TaperStripesParams};
use super::op::Op;
use super::prefill::{KeyLists, TILE_WORDS, Tiles};
use super::score::largest;
use crate::kv::BLOCK_TOKENS;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// Numbers chosen for each slice of rows and head: `ids` `[slices, heads, room]` and how many of them count
/// `[slices, heads]`, u32.
#[derive(Clone, Copy)]
pub struct Chosen<'a> {
    /// Numbers, in any order.
    pub ids: &'a Tensor,
    /// How many.
    pub counts: &'a Tensor,
}

/// The blocks that each tile and list of heads reads: block 0, the tile's own, the chosen `columns` before those, and for
/// each chosen slash s those that lie s and s + 1 blocks before a row's own. `slice_ends` `[slices]` ascend: rows below one
/// follow its choice, and rows beyond the last do too. `tokens`: of the longest row. `exact`: a slash stands for s blocks alone,
/// block 0 must be chosen, and blocks that only one half of a tile's two query blocks reads are marked.
///
/// # Errors
/// Shapes or dtypes that differ, no slice.
///
/// # Source
/// SampleAttention, `merge_index`.
pub fn block_lists(
    tiles: &Tiles,
    columns: Chosen,
    slashes: Chosen,
    slice_ends: &[u32],
    tokens: usize,
    exact: bool,
) -> Result<KeyLists> {
    let op = Op::new("block_lists", "columns", columns.ids)?;
    let (slices, heads, column_room) = columns.ids.dims3()?;
    let slash_room = slashes.ids.dim(2)?;
    let ascends = slices > 0 && slice_ends.len() == slices && slice_ends.is_sorted_by(|a, b| a < b);
    op.check(ascends, "slice_ends", format_args!("{slice_ends:?}"), format_args!("{slices}, ascending"))?;
    let most = tiles.last.iter().copied().max().unwrap_or(0) as usize;
    op.check(most < tokens, "tokens", tokens, format_args!("more than {most}"))?;
    let words = tokens.div_ceil(BLOCK_TOKENS).div_ceil(32);
    let room = |&last: &u32| last as usize / BLOCK_TOKENS + 1;
    let (begins, total) = places(&op, heads, tiles.last.iter().map(room))?;
    let of = KeyLists {
        heads,
        begins: op.kept(&begins, [heads, tiles.count])?,
        counts: op.empty((heads, tiles.count), DType::U32)?,
        ids: op.empty(total, DType::U32)?,
    };
    let bitmaps = op.empty((slices, heads, 2, words), DType::U32)?;
    let ends = op.kept(slice_ends, [slices])?;
    let p = TaperStripesParams {
        columns: op.at("columns", columns.ids, DType::U32, [slices, heads, column_room])?,
        column_counts: op.at("columns", columns.counts, DType::U32, [slices, heads])?,
        slashes: op.at("slashes", slashes.ids, DType::U32, [slices, heads, slash_room])?,
        slash_counts: op.at("slashes", slashes.counts, DType::U32, [slices, heads])?,
        slice_ends: op.at("slice_ends", &ends, DType::U32, [slices])?,
        tiles: op.at::<u32>("tiles", &tiles.tiles, DType::U32, [tiles.count, TILE_WORDS])?.cast(),
        list_begin: op.at("begins", &of.begins, DType::U32, [heads, tiles.count])?,
        bitmaps: op.at("bitmaps", &bitmaps, DType::U32, bitmaps.dims())?,
        blocks: op.at("ids", &of.ids, DType::U32, of.ids.dims())?,
        counts: op.at("counts", &of.counts, DType::U32, [heads, tiles.count])?,
        slices: op.int("columns", slices)?,
        heads: op.int("columns", heads)?,
        tile_count: op.int("tiles", tiles.count)?,
        words: op.int("tokens", words)?,
        column_stride: op.int("columns", column_room)?,
        slash_stride: op.int("slashes", slash_room)?,
        overlap: 1,
        exact: exact.into(),
        halves: exact.into(),
        reserved: 0,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_stripes, &p) }?;
    Ok(of)
}

/// [`crate::prefill::stripes::top`] of some lists of masses `[lists, n]`: which, how many to keep, and how many of the first.
/// Waits for the device, since the host counts what rows read.
pub(crate) fn top(mass: &Tensor, wanted: &[(usize, usize, usize)]) -> Result<Vec<Vec<u32>>> {
    let op = Op::new("top", "mass", mass)?;
    let (lists, n) = mass.dims2()?;
    let (mut begins, mut ks) = (vec![0; lists], vec![0; lists]);
    for &(list, keep, forced) in wanted {
        op.check(list < lists, "list", list, format_args!("less than {lists}"))?;
        let forced = forced.min(n);
        (begins[list], ks[list]) = (forced as u32, (keep.clamp(forced, n) - forced) as u32);
    }
    let capacity = ks.iter().copied().max().unwrap_or(0).max(1) as usize;
    let (ids, _) = largest(&op, mass, [&begins, &vec![n as u32; lists], &ks], capacity)?;
    let ids = ids.to_vec2::<u32>()?;
    let of = |&(list, ..): &(usize, usize, usize)| {
        (0..begins[list]).chain(ids[list].iter().copied().take(ks[list] as usize)).collect()
    };
    Ok(wanted.iter().map(of).collect())
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
    let (begins, total) = places(&op, heads, tiles.last.iter().map(|_| room))?;
    let of = KeyLists {
        heads,
        begins: op.kept(&begins, [heads, tiles.count])?,
        counts: op.empty((heads, tiles.count), DType::U32)?,
        ids: op.empty(total, DType::U32)?,
    };
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
        overlap: 1,
        ..TaperColumnsParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_drop_columns, &p) }?;
    Ok(of)
}

/// Where each head's list of each tile begins, one after the other with this much room, and the room of all.
pub(super) fn places(op: &Op, heads: usize, room: impl Iterator<Item = usize> + Clone) -> Result<(Vec<u32>, usize)> {
    let all = heads * room.clone().sum::<usize>();
    op.check(u32::try_from(all).is_ok(), "tiles", format_args!("{all} ids in all lists"), "fewer than 2³²")?;
    let mut total = 0;
    let begins = (0..heads).flat_map(|_| room.clone()).map(|room| {
        total += room;
        (total - room) as u32
    });
    Ok((begins.collect(), total))
}
