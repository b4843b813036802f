//! Attention of many query rows: [`crate::prefill::prefill`] on a CUDA device, and the launch behind it.

mod tiles;

use super::error::Result;
use super::ffi::{TaperMergeParams, TaperPrefillParams, TaperSparsePrefillParams, taper_merge, taper_prefill_sparse};
use super::op::Op;
use crate::kv::{BLOCK_TOKENS, PagedKv};
use crate::prefill::{Reads, Rows};
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};
use tiles::{Drawn, Key};

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
    positions: Tensor,
    rows: usize,
    /// Which row of the queries each row is; absent, itself.
    q_rows: Option<Tensor>,
}

impl Tiles {
    /// Of rows at absolute `positions`, on the device of a tensor. A row outside all tiles is not written. Longest tiles
    /// are worked on first. With `q_rows`, row i reads and, unless outputs are f32, writes row `q_rows[i]`.
    ///
    /// # Errors
    /// A tile of no or more than 128 rows, or with rows beyond the positions.
    pub fn new(like: &Tensor, positions: &[u32], tiles: &[Tile], q_rows: Option<&[u32]>) -> Result<Self> {
        Self::in_parts(like, positions, tiles, q_rows, 1)
    }

    /// The same, each tile's keys in so many parts: for launches without lists, whose outputs are f32.
    fn in_parts(
        like: &Tensor,
        positions: &[u32],
        tiles: &[Tile],
        q_rows: Option<&[u32]>,
        parts: usize,
    ) -> Result<Self> {
        let op = Op::new("prefill-tiles", "like", like)?;
        let mut order: Vec<usize> = (0..tiles.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(tiles[i].positions.1));
        let mut words = Vec::with_capacity(tiles.len() * parts * TILE_WORDS);
        for i in order {
            let Tile { row, rows, table, tokens, positions: (first, last) } = tiles[i];
            let fits = (1..=TILE_ROWS as u32).contains(&rows) && (row + rows) as usize <= positions.len();
            op.check(fits, "tiles", format!("rows {row} and {rows} on"), format!("1 to 128 of {}", positions.len()))?;
            (0..parts as u32).for_each(|part| words.extend([row, rows, table, tokens, first, last, i as u32, part]));
        }
        if let Some(q_rows) = q_rows {
            op.check(q_rows.len() == positions.len(), "q_rows", q_rows.len(), positions.len())?;
        }
        Ok(Self {
            tiles: op.kept(&words, [tiles.len() * parts, TILE_WORDS])?,
            count: tiles.len() * parts,
            parts,
            last: tiles.iter().map(|tile| tile.positions.1).collect(),
            positions: op.kept(positions, [positions.len()])?,
            rows: positions.len(),
            q_rows: q_rows.map(|rows| op.kept(rows, [rows.len()])).transpose()?,
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
        Self::new(like, &positions, &tiles, None)
    }
}

/// Key lists of each tile and list of heads, on the device. `begins` and `counts` `[heads, tiles]` slice `ids`, u32.
#[derive(Debug)]
pub struct KeyLists {
    /// Lists of heads: 1, the KV heads or the query heads.
    pub heads: usize,
    /// First id of each list.
    pub begins: Tensor,
    /// Ids of each list.
    pub counts: Tensor,
    /// Ids, ascending in each list.
    pub ids: Tensor,
}

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
    /// All tiles of a head before the next head, for lists of each head's own.
    pub head_major: bool,
    /// Rows at multiples of this absolute position are also written in f32 to `anchors`; 0: none.
    pub anchor_stride: usize,
    /// `[.., q_heads, head_dim]`, f32, by position / anchor_stride.
    pub anchors: Option<&'a Tensor>,
}

/// Attends; returns outputs `[T, q_heads, head_dim]` of the dtype asked for, f32 or the cache's, and the natural logarithm
/// of each row's sum of exponentials `[T, q_heads]`, f32. A row that reads nothing gives 0 and -inf.
///
/// `q` `[T, q_heads, head_dim]` has the cache's dtype; `tables` `[tables, stride]`, u32. Blocks that tables and lists name
/// must lie within the cache and at or before the tile's last position.
///
/// # Errors
/// Shapes or dtypes that differ; head_dim other than 64 and 128.
pub fn prefill_tiles(
    q: &Tensor,
    kv: PagedKv,
    tables: &Tensor,
    tiles: &Tiles,
    reads: &Sparse,
    out_dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let op = Op::new("prefill", "q", q)?;
    let (q_rows, q_heads, head_dim) = q.dims3()?;
    let (blocks, kv_heads, kv_dim) = kv.dims()?;
    let (table_count, stride) = tables.dims2()?;
    let dtype = kv.k.dtype();
    op.check(
        head_dim == kv_dim && kv_heads > 0 && q_heads.is_multiple_of(kv_heads) && matches!(head_dim, 64 | 128),
        "q",
        format!("{:?}", q.dims()),
        format!("[rows, a multiple of {kv_heads}, {kv_dim}], head_dim 64 or 128"),
    )?;
    let by_row = out_dtype == DType::F32;
    op.check(by_row || out_dtype == dtype, "out", format!("{out_dtype:?}"), format!("F32 or {dtype:?}"))?;
    op.check(tiles.q_rows.is_some() || tiles.rows == q_rows, "tiles", tiles.rows, format!("{q_rows} rows"))?;
    let parts = tiles.parts;
    let alone = parts == 1 || by_row && reads.blocks.is_none() && reads.columns.is_none();
    op.check(alone, "tiles", format!("{parts} parts"), "one, of f32 outputs without lists")?;
    let out = op.empty((if by_row { tiles.rows } else { q_rows }, q_heads * parts, head_dim), out_dtype)?;
    let lse = op.empty((tiles.rows, q_heads * parts), DType::F32)?;
    if tiles.count == 0 {
        return Ok((out, lse));
    }
    let pool = [blocks, kv_heads, BLOCK_TOKENS, head_dim];
    let lists = |parameter: &'static str, lists: Option<&KeyLists>| -> Result<_> {
        let Some(l) = lists else { return Ok((std::ptr::null(), std::ptr::null(), std::ptr::null(), 0)) };
        let fits = [1, kv_heads, q_heads].contains(&l.heads);
        op.check(fits, parameter, format!("{} lists of heads", l.heads), format!("1, {kv_heads} or {q_heads}"))?;
        let shape = [l.heads, tiles.count];
        Ok((
            op.at::<u32>(parameter, &l.begins, DType::U32, shape)?.cast_const(),
            op.at::<u32>(parameter, &l.counts, DType::U32, shape)?.cast_const(),
            op.at::<u32>(parameter, &l.ids, DType::U32, l.ids.dims())?.cast_const(),
            l.heads,
        ))
    };
    let (csr_begin, csr_counts, csr_blocks, csr_heads) = lists("blocks", reads.blocks)?;
    let (column_begin, column_counts, column_ids, column_heads) = lists("columns", reads.columns)?;
    let base = TaperPrefillParams {
        q: op.at("q", q, dtype, [q_rows, q_heads, head_dim])?,
        k: op.at("kv.k", kv.k, dtype, pool)?,
        v: op.at("kv.v", kv.v, dtype, pool)?,
        block_table: op.at("tables", tables, DType::U32, [table_count, stride])?,
        q_rows: op.maybe("tiles", tiles.q_rows.as_ref(), DType::U32, [tiles.rows])?,
        positions: op.at("tiles", &tiles.positions, DType::U32, [tiles.rows])?,
        tiles: op.at("tiles", &tiles.tiles, DType::U32, [tiles.count, TILE_WORDS])?,
        csr_begin,
        csr_blocks,
        out: op.at("out", &out, out_dtype, out.dims())?,
        lse: op.at("lse", &lse, DType::F32, [tiles.rows, q_heads * parts])?,
        anchor_out: match reads.anchors {
            Some(anchors) => op.at("anchors", anchors, DType::F32, [anchors.dim(0)?, q_heads, head_dim])?,
            None => std::ptr::null_mut(),
        },
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
        anchor_stride: if reads.anchors.is_some() { op.int("anchor_stride", reads.anchor_stride)? } else { 0 },
        out_f32: by_row.into(),
        overlap: 1,
        scale: 1.0 / (head_dim as f32).sqrt(),
        ..TaperPrefillParams::zeroed()
    };
    let p = TaperSparsePrefillParams {
        base,
        csr_counts,
        column_begin,
        column_counts,
        column_ids,
        column_heads: op.int("columns", column_heads)?,
        head_major: reads.head_major.into(),
        splits: if parts > 1 { op.int("tiles", parts)? } else { 0 },
        ..TaperSparsePrefillParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    op.launched(unsafe { taper_prefill_sparse(&p, op.stream()) })?;
    if parts == 1 { Ok((out, lse)) } else { merge(&op, &out, &lse, parts, p.base.dtype) }
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
        overlap: 1,
        ..TaperMergeParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    op.launched(unsafe { taper_merge(&m, op.stream()) })?;
    Ok((out, lse))
}

/// [`crate::prefill::prefill`]: queries in f32 are rounded to the cache's dtype, outputs are f32. One launch for each kind of
/// mask that the lists of heads have.
pub(crate) fn prefill(rows: &Rows, reads: Reads) -> Result<(Tensor, Tensor)> {
    let op = Op::new("prefill", "q", rows.q)?;
    let (count, q_heads, head_dim) = rows.q.dims3()?;
    if count == 0 {
        let none = |width: usize| op.empty((1, width), DType::F32)?.narrow(0, 0, 0);
        return Ok((none(q_heads * head_dim)?.reshape((0, q_heads, head_dim))?, none(q_heads)?));
    }
    let kv_heads = rows.kv.dims()?.1;
    let drawn = Drawn::new(&op, rows, &reads, kv_heads, q_heads)?;
    let q = rows.q.to_dtype(rows.kv.k.dtype())?.contiguous()?;
    let needed = rows.positions[count - 1] as usize / BLOCK_TOKENS + 1;
    let tables = op.kept(&rows.table[..needed], [1, needed])?;
    let parts = match drawn.mask() {
        Some(Key { sink, window }) => {
            let blocks = if window == 0 { needed } else { needed.min((sink + window) / BLOCK_TOKENS + 3) };
            (BUSY / (drawn.tiles.len() * q_heads).max(1)).min(blocks / PART_BLOCKS).clamp(1, PARTS_MAX)
        }
        None => 1,
    };
    let tiles = Tiles::in_parts(&q, rows.positions, &drawn.tiles, None, parts)?;
    let mut total: Option<(Tensor, Tensor)> = None;
    for &key in &drawn.keys {
        let (blocks, columns) = drawn.upload(&op, key, &tiles)?;
        let Key { sink, window } = key;
        let reads = Sparse { sink, window, blocks: blocks.as_ref(), columns: columns.as_ref(), ..Sparse::default() };
        let (out, lse) = prefill_tiles(&q, rows.kv, &tables, &tiles, &reads, DType::F32)?;
        // A head reads by one mask alone; in the other launches it gives 0 and -inf.
        total = Some(match total {
            None => (out, lse),
            Some((sum, most)) => ((sum + out)?, most.maximum(&lse)?),
        });
    }
    total.ok_or_else(|| op.error("reads", "no list of heads", "at least one"))
}
