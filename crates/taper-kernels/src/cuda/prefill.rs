//! Attention of many query rows: [`crate::prefill::prefill`] on a CUDA device, and the launch behind it.

mod launches;

use super::error::Result;
use super::ffi::{TaperMergeParams, TaperPrefillParams, taper_merge, taper_prefill};
use super::op::Op;
use super::stripes::DeviceStripes;
use crate::CUDA_HEAD_DIMS;
use crate::kv::{BLOCK_TOKENS, PagedKv};
use crate::prefill::{Blocks, HeadReads, Lists, Mask, Reads, Rows};
use bytemuck::Zeroable;
use candle_core::{DType, Device, Tensor};
use launches::{HeadLists, Key, Launch, launches};
use std::sync::Arc;

/// Words of a tile of the interface.
pub(super) const TILE_WORDS: usize = 8;
/// Rows that a tile has at most.
pub const TILE_ROWS: usize = 128;
/// Tiles and heads that keep all multiprocessors busy: where there are fewer, a tile's keys are read in parts, at most so many
/// and of at least so many blocks each.
const BUSY: usize = 264;
const PARTS_MAX: usize = 8;
const PART_BLOCKS: usize = 16;

/// At most 128 neighbouring rows of a launch that read alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// First row.
    pub row: u32,
    /// Rows, 1 to 128.
    pub rows: u32,
    /// Block table of their sequence.
    pub table: u32,
    /// Tokens of the sequence that the cache holds.
    pub tokens: u32,
    /// Least and greatest absolute position of the rows.
    pub positions: (u32, u32),
}

/// Rows on the device, cut into tiles: made once a step, for all layers.
#[derive(Debug)]
pub struct Tiles {
    pub(super) tiles: Tensor,
    pub(super) count: usize,
    /// Parts that each tile's keys are read in; it stands here once for each.
    parts: usize,
    /// Of each tile as it was given, the last position of its rows.
    pub(super) last: Vec<u32>,
    /// Lists of keys that a head has: one a tile, or tiles share some.
    lists: usize,
    positions: Tensor,
    rows: usize,
}

impl Tiles {
    /// Of rows at absolute `positions`, on the device of a tensor. A row outside all tiles is not written. Longest tiles
    /// are worked on first.
    ///
    /// # Errors
    /// A tile of no or more than 128 rows, or with rows beyond the positions.
    pub fn new(like: &Tensor, positions: &[u32], tiles: &[Tile]) -> Result<Self> {
        Self::cut(like, positions, tiles, 1, None)
    }

    /// The same, each tile's keys in so many parts: for launches without lists. With `lists`, which of how many lists of a
    /// head each tile reads, in place of one for each.
    fn cut(
        like: &Tensor,
        positions: &[u32],
        tiles: &[Tile],
        parts: usize,
        lists: Option<(&[u32], usize)>,
    ) -> Result<Self> {
        let op = Op::new("prefill-tiles", "like", like)?;
        let mut order: Vec<usize> = (0..tiles.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(tiles[i].positions.1));
        let mut words = Vec::with_capacity(tiles.len() * parts * TILE_WORDS);
        for i in order {
            let Tile { row, rows, table, tokens, positions: (first, last) } = tiles[i];
            let fits = (1..=TILE_ROWS as u32).contains(&rows) && (row + rows) as usize <= positions.len();
            op.check(
                fits,
                "tiles",
                format_args!("rows {row} and {rows} on"),
                format_args!("1 to 128 of {}", positions.len()),
            )?;
            let list = lists.map_or(i as u32, |(of, _)| of[i]);
            (0..parts as u32).for_each(|part| words.extend([row, rows, table, tokens, first, last, list, part]));
        }
        Ok(Self {
            tiles: op.kept(&words, [tiles.len() * parts, TILE_WORDS])?,
            count: tiles.len() * parts,
            parts,
            last: tiles.iter().map(|tile| tile.positions.1).collect(),
            lists: lists.map_or(tiles.len() * parts, |(_, count)| count),
            positions: op.kept(positions, [positions.len()])?,
            rows: positions.len(),
        })
    }

    /// Of neighbouring positions of one sequence, the `table`-th, 128 rows a tile.
    ///
    /// # Errors
    /// A device error.
    pub fn span(like: &Tensor, positions: std::ops::Range<u32>, table: u32) -> Result<Self> {
        let tile = |row: u32| {
            let rows = (positions.len() as u32 - row).min(TILE_ROWS as u32);
            let first = positions.start + row;
            Tile { row, rows, table, tokens: positions.end, positions: (first, first + rows - 1) }
        };
        let tiles: Vec<Tile> = (0..positions.len() as u32).step_by(TILE_ROWS).map(tile).collect();
        let positions: Vec<u32> = positions.clone().collect();
        Self::new(like, &positions, &tiles)
    }
}

/// Key lists of each tile, or run of rows, and list of heads, on the device. `begins` and `counts` `[heads, tiles]` slice
/// `ids`, u32.
#[derive(Debug, Clone)]
pub struct KeyLists {
    /// Lists of heads: a divisor of the launch's query heads.
    pub heads: usize,
    /// First id of each list.
    pub begins: Tensor,
    /// Ids of each list.
    pub counts: Tensor,
    /// Ids, ascending in each list.
    pub ids: Tensor,
}

impl KeyLists {
    /// Of each head and tile, with this much room for each tile's list, yet unwritten.
    pub(super) fn with_room(op: &Op, heads: usize, room: impl ExactSizeIterator<Item = usize> + Clone) -> Result<Self> {
        let tiles = room.len();
        let (begins, total) = places(op, heads, room)?;
        let (counts, ids) = (op.empty((heads, tiles), DType::U32)?, op.empty(total, DType::U32)?);
        Ok(Self { heads, begins: op.kept(&begins, [heads, tiles])?, counts, ids })
    }

    /// The lists of each list of heads. Waits for the device.
    ///
    /// # Errors
    /// A device error.
    pub fn read_back(&self) -> Result<Vec<Lists>> {
        let (begins, counts) = (self.begins.to_vec2::<u32>()?, self.counts.to_vec2::<u32>()?);
        let ids = self.ids.to_vec1::<u32>()?;
        let one = |(&begin, &count): (&u32, &u32)| ids[begin as usize..][..count as usize].iter().copied();
        Ok(begins.iter().zip(&counts).map(|(begins, counts)| begins.iter().zip(counts).map(one).collect()).collect())
    }

    /// Those of some lists of heads.
    fn some(&self, heads: &[usize]) -> Result<Self> {
        let some = Picked::new(heads, self.heads, self.ids.device())?;
        let (begins, counts) = (some.of(&self.begins, 0)?, some.of(&self.counts, 0)?);
        Ok(Self { heads: heads.len(), begins, counts, ids: self.ids.clone() })
    }
}

/// Which of lists of heads are wanted, on the device; none: all of them, in their order.
pub(super) struct Picked(Option<Tensor>);

impl Picked {
    pub fn new(which: &[usize], all: usize, device: &Device) -> Result<Self> {
        if which.iter().copied().eq(0..all) {
            return Ok(Self(None));
        }
        let which: Vec<u32> = which.iter().map(|&list| list as u32).collect();
        Ok(Self(Some(Tensor::new(which, device)?)))
    }

    /// What a tensor has of them along a dimension.
    pub fn of(&self, all: &Tensor, dim: usize) -> Result<Tensor> {
        Ok(self.0.as_ref().map_or_else(|| Ok(all.clone()), |which| all.index_select(which, dim))?)
    }
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

/// What a device chose to read for each list of heads and run of rows, or tile, `[heads, runs]`.
#[derive(Debug)]
pub struct RunLists {
    /// Blocks of 64 tokens.
    pub blocks: KeyLists,
    /// Single tokens that stand in none of the blocks.
    pub columns: Option<KeyLists>,
}

impl RunLists {
    /// What each list of heads reads; `before` `[heads][runs]` are the keys before a run's first block. In a model with a window
    /// of its own the host has to know the lists, for what rows see of them: then this waits for the device.
    pub(crate) fn into_reads(self, before: Vec<Vec<u32>>, window: Option<usize>) -> Result<Vec<HeadReads>> {
        if window.is_none() {
            return Ok(DeviceReads::Lists(self).into_reads(before));
        }
        let blocks = self.blocks.read_back()?;
        let columns = self.columns.map_or(Ok(Vec::new()), |columns| columns.read_back())?;
        let mut columns = columns.into_iter();
        let of = |blocks| HeadReads { tokens: columns.next().unwrap_or_default(), ..HeadReads::blocks(blocks) };
        Ok(blocks.into_iter().map(of).collect())
    }
}

/// What a device chose for lists of heads, and keeps.
#[derive(Debug)]
pub enum DeviceReads {
    /// Blocks, and single tokens, of each run of rows.
    Lists(RunLists),
    /// Columns and diagonals.
    Stripes(DeviceStripes),
}

impl DeviceReads {
    /// Tokens of the block from which on a run's rows, which lie within it, read everything.
    pub(crate) fn block_tokens(&self) -> usize {
        match self {
            Self::Lists(_) => BLOCK_TOKENS,
            Self::Stripes(stripes) => stripes.block_tokens(),
        }
    }

    /// What each list of heads reads; `before` `[heads][runs]` are the keys before a run's first block.
    pub(super) fn into_reads(self, before: Vec<Vec<u32>>) -> Vec<HeadReads> {
        let reads = Arc::new(self);
        let of = |(list, before): (usize, Vec<u32>)| {
            let blocks = Blocks::Device { reads: reads.clone(), list, before };
            HeadReads { mask: Mask::Causal, blocks: Some(blocks), tokens: Lists::default() }
        };
        before.into_iter().enumerate().map(of).collect()
    }
}

impl PartialEq for DeviceReads {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for DeviceReads {}

/// What a launch reads of the cache. Without lists: everything that is causal and within the window.
#[derive(Clone, Copy, Default)]
pub struct Sparse<'a> {
    /// Rows see the first `sink` tokens and the last `window`; 0: no window.
    pub sink: usize,
    /// See `sink`.
    pub window: usize,
    /// Blocks of 64 tokens, causally and within the window.
    pub blocks: Option<&'a KeyLists>,
    /// Single tokens that stand in none of the blocks, causally, whatever the window.
    pub columns: Option<&'a KeyLists>,
    /// The query heads of the launch, u32; absent, all. Others' outputs stay as they are.
    pub heads: Option<&'a Tensor>,
    /// Tiles have at most 64 rows, and two neighbouring heads of the launch, which share a list, are worked on at once.
    pub head_pairs: bool,
}

/// Attends; returns outputs `[T, q_heads, head_dim]` and the natural logarithm of each row's sum of exponentials
/// `[T, q_heads]`, f32. A row that reads nothing gives 0 and -inf.
///
/// `q` `[T, q_heads, head_dim]` has the cache's dtype; `tables` `[tables, stride]`, u32. Blocks that tables and lists name
/// must lie within the cache; those of a list beyond the tile's last position are not read.
///
/// # Errors
/// Shapes or dtypes that differ; head_dim other than 64 and 128.
pub fn prefill_tiles(
    q: &Tensor,
    kv: PagedKv,
    tables: &Tensor,
    tiles: &Tiles,
    reads: &Sparse,
) -> Result<(Tensor, Tensor)> {
    let op = Op::new("prefill", "q", q)?;
    let (_, q_heads, head_dim) = q.dims3()?;
    let parts = tiles.parts;
    let out = op.empty((tiles.rows, q_heads * parts, head_dim), DType::F32)?;
    let lse = op.empty((tiles.rows, q_heads * parts), DType::F32)?;
    attend_into(&op, q, kv, tables, tiles, reads, (&out, &lse))?;
    if parts == 1 { Ok((out, lse)) } else { merge(&op, &out, &lse, parts, op.dtype("kv", kv.k.dtype())?) }
}

/// The same, to outputs that are there: of the launch's heads.
fn attend_into(
    op: &Op,
    q: &Tensor,
    kv: PagedKv,
    tables: &Tensor,
    tiles: &Tiles,
    reads: &Sparse,
    (out, lse): (&Tensor, &Tensor),
) -> Result<()> {
    let (rows, q_heads, head_dim) = q.dims3()?;
    let (blocks, kv_heads, kv_dim) = kv.dims()?;
    let (table_count, stride) = tables.dims2()?;
    let dtype = kv.k.dtype();
    op.check(
        head_dim == kv_dim && kv_heads > 0 && q_heads.is_multiple_of(kv_heads) && CUDA_HEAD_DIMS.contains(&head_dim),
        "q",
        format_args!("{:?}", q.dims()),
        format_args!("[rows, a multiple of {kv_heads}, {kv_dim}], head_dim 64 or 128"),
    )?;
    op.check(tiles.rows == rows, "tiles", tiles.rows, format_args!("{rows} rows"))?;
    let parts = tiles.parts;
    let alone = parts == 1 || reads.blocks.is_none() && reads.columns.is_none();
    op.check(alone, "tiles", format_args!("{parts} parts"), "one, or no lists")?;
    if tiles.count == 0 {
        return Ok(());
    }
    let heads = reads.heads.map_or(Ok(q_heads), |heads| heads.dim(0))?;
    let pool = [blocks, kv_heads, BLOCK_TOKENS, head_dim];
    let lists = |parameter: &'static str, lists: Option<&KeyLists>| -> Result<_> {
        let Some(l) = lists else { return Ok((std::ptr::null(), std::ptr::null(), std::ptr::null(), 0)) };
        let fits = l.heads > 0 && heads.is_multiple_of(l.heads);
        op.check(fits, parameter, format_args!("{} lists of heads", l.heads), format_args!("a divisor of {heads}"))?;
        let shape = [l.heads, tiles.lists];
        Ok((
            op.at::<u32>(parameter, &l.begins, DType::U32, shape)?.cast_const(),
            op.at::<u32>(parameter, &l.counts, DType::U32, shape)?.cast_const(),
            op.at::<u32>(parameter, &l.ids, DType::U32, l.ids.dims())?.cast_const(),
            l.heads,
        ))
    };
    let (csr_begin, csr_counts, csr_blocks, csr_heads) = lists("blocks", reads.blocks)?;
    let (column_begin, column_counts, column_ids, column_heads) = lists("columns", reads.columns)?;
    let p = TaperPrefillParams {
        q: op.at("q", q, dtype, [rows, q_heads, head_dim])?,
        k: op.at("kv.k", kv.k, dtype, pool)?,
        v: op.at("kv.v", kv.v, dtype, pool)?,
        block_table: op.at("tables", tables, DType::U32, [table_count, stride])?,
        positions: op.at("tiles", &tiles.positions, DType::U32, [tiles.rows])?,
        tiles: op.at("tiles", &tiles.tiles, DType::U32, [tiles.count, TILE_WORDS])?,
        csr_begin,
        csr_blocks,
        out: op.at("out", out, DType::F32, [tiles.rows, q_heads * parts, head_dim])?,
        lse: op.at("lse", lse, DType::F32, [tiles.rows, q_heads * parts])?,
        blocks: blocks as i64,
        tile_count: op.int("tiles", tiles.count)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("kv", head_dim)?,
        dtype: op.dtype("kv", dtype)?,
        table_stride: op.int("tables", stride)?,
        csr_heads: op.int("blocks", csr_heads)?,
        sink: op.int("sink", reads.sink)?,
        window: op.int("window", reads.window)?,
        scale: 1.0 / (head_dim as f32).sqrt(),
        csr_counts,
        column_begin,
        column_counts,
        column_ids,
        column_heads: op.int("columns", column_heads)?,
        splits: if parts > 1 { op.int("tiles", parts)? } else { 0 },
        list_stride: op.int("tiles", tiles.lists)?,
        heads: op.maybe("heads", reads.heads, DType::U32, [heads])?,
        head_count: op.int("heads", heads)?,
        head_pairs: reads.head_pairs.into(),
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_prefill, &p) }
}

/// Outputs and logarithms from those of parts `[T, q_heads parts, head_dim]` and `[T, q_heads parts]`, all f32.
fn merge(op: &Op, part_o: &Tensor, part_lse: &Tensor, parts: usize, dtype: i32) -> Result<(Tensor, Tensor)> {
    let (rows, width, head_dim) = part_o.dims3()?;
    let q_heads = width / parts;
    let (out, lse) = (op.empty((rows, q_heads, head_dim), DType::F32)?, op.empty((rows, q_heads), DType::F32)?);
    let units: Vec<u32> = (0..=rows * q_heads).map(|list| (list * parts) as u32).collect();
    let units = op.kept(&units, [units.len()])?;
    let heads = op.int("q", q_heads)?;
    let m = TaperMergeParams {
        part_o: op.at("parts", part_o, DType::F32, [rows, width, head_dim])?,
        part_lse: op.at("parts", part_lse, DType::F32, [rows, width])?,
        list_units: op.at("units", &units, DType::U32, [rows * q_heads + 1])?,
        out: op.at("out", &out, DType::F32, [rows, q_heads, head_dim])?,
        lse: op.at("lse", &lse, DType::F32, [rows, q_heads])?,
        rows: op.int("q", rows)?,
        q_heads: heads,
        list_heads: heads,
        head_dim: op.int("q", head_dim)?,
        dtype,
        out_f32: 1,
        ..TaperMergeParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_merge, &m) }?;
    Ok((out, lse))
}

/// [`crate::prefill::prefill`]: queries in f32 are rounded to the cache's dtype, outputs are f32. One launch for each
/// way in which lists of heads come to what they read.
pub(crate) fn prefill(rows: &Rows, reads: Reads) -> Result<(Tensor, Tensor)> {
    let op = Op::new("prefill", "q", rows.q)?;
    let (count, q_heads, head_dim) = rows.q.dims3()?;
    if count == 0 {
        let none = |width: usize| op.empty((1, width), DType::F32)?.narrow(0, 0, 0);
        return Ok((none(q_heads * head_dim)?.reshape((0, q_heads, head_dim))?, none(q_heads)?));
    }
    let launches = launches(&op, rows, &reads, rows.kv.dims()?.1, q_heads)?;
    let q = rows.q.to_dtype(rows.kv.k.dtype())?.contiguous()?;
    let needed = rows.positions[count - 1] as usize / BLOCK_TOKENS + 1;
    let tables = op.kept(&rows.table[..needed], [1, needed])?;
    if let [Launch { tiles, key: Key { sink, window }, lists: HeadLists::All, .. }] = &launches[..] {
        let (sink, window) = (*sink, *window);
        let blocks = if window == 0 { needed } else { needed.min((sink + window) / BLOCK_TOKENS + 3) };
        let parts = (BUSY / (tiles.len() * q_heads).max(1)).min(blocks / PART_BLOCKS).clamp(1, PARTS_MAX);
        let tiles = Tiles::cut(&q, rows.positions, tiles, parts, None)?;
        return prefill_tiles(&q, rows.kv, &tables, &tiles, &Sparse { sink, window, ..Sparse::default() });
    }
    let (out, lse) = (op.empty((count, q_heads, head_dim), DType::F32)?, op.empty((count, q_heads), DType::F32)?);
    for launch in &launches {
        let tiles = Tiles::cut(&q, rows.positions, &launch.tiles, 1, launch.lists.of_tiles())?;
        let heads = match launch.heads.len() {
            all if all == q_heads => None,
            some => Some(op.kept(&launch.heads, [some])?),
        };
        let (blocks, columns) = launch.lists.upload(&op, &tiles)?;
        let reads = Sparse {
            sink: launch.key.sink,
            window: launch.key.window,
            blocks: blocks.as_ref(),
            columns: columns.as_ref(),
            heads: heads.as_ref(),
            head_pairs: launch.head_pairs,
        };
        attend_into(&op, &q, rows.kv, &tables, &tiles, &reads, (&out, &lse))?;
    }
    Ok((out, lse))
}
