//! From a host's rule or selection to tiles, masks and lists for launches.

use super::super::error::Result;
use super::super::op::Op;
use super::super::stripes::{Chosen, block_lists};
use super::{KeyLists, TILE_ROWS, Tile, Tiles};
use crate::kv::BLOCK_TOKENS;
use crate::prefill::stripes::Stripes;
use crate::prefill::{Blocks, HeadReads, Mask, Reads, Rows, outside};
use candle_core::Tensor;
use std::ops::Range;

/// A mask as launches know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub sink: usize,
    pub window: usize,
}

/// What one tile and list of heads reads.
struct Read {
    key: Key,
    /// Absent: every block that the mask lets through.
    blocks: Option<Vec<u32>>,
    columns: Vec<u32>,
}

/// Tiles, and what each reads.
pub(super) struct Drawn<'a> {
    pub tiles: Vec<Tile>,
    /// The masks that occur.
    pub keys: Vec<Key>,
    /// `[heads][tiles]`; none where the device makes them, of stripes.
    reads: Vec<Vec<Read>>,
    stripes: Option<Vec<&'a Stripes>>,
}

impl<'a> Drawn<'a> {
    pub fn new(op: &Op, rows: &Rows, reads: &Reads<'a>, kv_heads: usize, q_heads: usize) -> Result<Self> {
        let whole;
        let (runs, heads) = match reads {
            Reads::Mask(mask) => {
                whole = [HeadReads::from(*mask)];
                (std::iter::once(0..rows.positions.len()).collect::<Vec<_>>(), &whole[..])
            }
            Reads::Selection(selection) => {
                let n = selection.heads().len();
                op.check(n == kv_heads || n == q_heads, "reads", n, format!("{kv_heads} or {q_heads} lists of heads"))?;
                let at = |limit: usize| rows.positions.partition_point(|&p| (p as usize) < limit);
                (selection.runs().iter().map(|run| at(run.start)..at(run.end)).collect(), selection.heads())
            }
        };
        let stripes = match reads {
            Reads::Selection(selection) if rows.window.is_none() => selection.heads().iter().map(striped).collect(),
            _ => None,
        };
        let (keys, lists) = match &stripes {
            Some(_) => (vec![Key { sink: 0, window: 0 }], Vec::new()),
            None => (Vec::new(), heads.iter().map(|_| Vec::new()).collect()),
        };
        let mut drawn = Self { tiles: Vec::new(), keys, reads: lists, stripes };
        let mut next = 0;
        for (run, span) in runs.iter().enumerate() {
            op.check(next >= span.start, "reads", format!("no run for row {next}"), "a run for every row")?;
            next = span.end.max(next);
            for cut in cuts(rows, heads, run, span.clone()) {
                drawn.tiles.push(tile(rows, cut.clone()));
                for (head, lists) in heads.iter().zip(&mut drawn.reads) {
                    let read = read(rows, head, run, cut.clone());
                    if !drawn.keys.contains(&read.key) {
                        drawn.keys.push(read.key);
                    }
                    lists.push(read);
                }
            }
        }
        let all = next == rows.positions.len();
        op.check(all, "reads", format!("no run for row {next}"), "a run for every row")?;
        Ok(drawn)
    }

    /// The mask, where it says all that is read.
    pub fn mask(&self) -> Option<Key> {
        let plain = |read: &Read| read.blocks.is_none() && read.columns.is_empty();
        match self.keys[..] {
            [key] if self.stripes.is_none() && self.reads.iter().flatten().all(plain) => Some(key),
            _ => None,
        }
    }

    /// Lists of blocks and of single tokens for the launch with one mask; none where the mask says it all.
    pub fn upload(&self, op: &Op, key: Key, tiles: &Tiles) -> Result<(Option<KeyLists>, Option<KeyLists>)> {
        if let Some(stripes) = &self.stripes {
            return Ok((Some(of_stripes(op, stripes, tiles)?), None));
        }
        let all = || self.reads.iter().flatten();
        let listed = !all().all(|read| read.key == key && read.blocks.is_none());
        let single = all().any(|read| read.key == key && !read.columns.is_empty());
        let lists = |ids: &dyn Fn(&Read, &Tile) -> Vec<u32>| -> Result<KeyLists> {
            let (mut begins, mut counts, mut flat) = (Vec::new(), Vec::new(), Vec::new());
            for heads in &self.reads {
                for (read, tile) in heads.iter().zip(&self.tiles) {
                    begins.push(flat.len() as u32);
                    if read.key == key {
                        flat.extend(ids(read, tile));
                    }
                    counts.push(flat.len() as u32 - begins[begins.len() - 1]);
                }
            }
            op.check(u32::try_from(flat.len()).is_ok(), "reads", flat.len(), "fewer than 2³² ids in all lists")?;
            let shape = [self.reads.len(), self.tiles.len()];
            Ok(KeyLists {
                heads: self.reads.len(),
                begins: op.upload(&begins, shape)?,
                counts: op.upload(&counts, shape)?,
                ids: op.upload(&flat, [flat.len()])?,
            })
        };
        let blocks = |read: &Read, tile: &Tile| read.blocks.clone().unwrap_or_else(|| within(read.key, tile));
        Ok((
            listed.then(|| lists(&blocks)).transpose()?,
            single.then(|| lists(&|read: &Read, _: &Tile| read.columns.clone())).transpose()?,
        ))
    }
}

/// The stripes of a list of heads, where the device can make the lists of them: nothing else is read, block 0 always is, and
/// distances come from slashes, two neighbours each.
fn striped(head: &HeadReads) -> Option<&Stripes> {
    let (Mask::Causal, Some(Blocks::Striped { stripes, .. })) = (head.mask, &head.blocks) else { return None };
    let none = (0..head.tokens.len()).all(|run| head.tokens.get(run).is_empty());
    let slashes = slashes(stripes);
    let of = |slash: u32| slashes.binary_search(&slash).is_ok();
    let covered = stripes.distances.iter().all(|&d| of(d) || d > 0 && of(d - 1));
    let plain = none && stripes.block_tokens == BLOCK_TOKENS && stripes.blocks.first() == Some(&0);
    (plain && covered).then_some(stripes)
}

/// The distances after which the next is there too.
fn slashes(stripes: &Stripes) -> Vec<u32> {
    stripes.distances.windows(2).filter(|pair| pair[1] == pair[0] + 1).map(|pair| pair[0]).collect()
}

/// Lists of blocks, made on the device.
fn of_stripes(op: &Op, stripes: &[&Stripes], tiles: &Tiles) -> Result<KeyLists> {
    let heads = stripes.len();
    let chosen = |of: Vec<Vec<u32>>| -> Result<(Tensor, Tensor)> {
        let room = of.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let counts: Vec<u32> = of.iter().map(|ids| ids.len() as u32).collect();
        let ids: Vec<u32> =
            of.into_iter().flat_map(|ids| ids.into_iter().chain(std::iter::repeat(0)).take(room)).collect();
        Ok((op.upload(&ids, [1, heads, room])?, op.upload(&counts, [1, heads])?))
    };
    let (columns, column_counts) = chosen(stripes.iter().map(|stripes| stripes.blocks.clone()).collect())?;
    let (far, far_counts) = chosen(stripes.iter().map(|stripes| slashes(stripes)).collect())?;
    let columns = Chosen { ids: &columns, counts: &column_counts };
    let tokens = tiles.last.iter().max().map_or(0, |&last| last as usize + 1);
    block_lists(tiles, columns, Chosen { ids: &far, counts: &far_counts }, &[tokens as u32], tokens)
}

fn tile(rows: &Rows, span: Range<usize>) -> Tile {
    let position = |row: usize| rows.positions[row];
    Tile {
        row: span.start as u32,
        rows: span.len() as u32,
        table: 0,
        tokens: rows.positions.last().map_or(0, |&p| p + 1),
        positions: (position(span.start), position(span.end - 1)),
    }
}

/// Blocks that a mask lets some row of a tile read.
fn within(key: Key, tile: &Tile) -> Vec<u32> {
    let (first, last) = tile.positions;
    let end = last / BLOCK_TOKENS as u32 + 1;
    if key.window == 0 {
        return (0..end).collect();
    }
    let from = (first + 1).saturating_sub(key.window as u32) / BLOCK_TOKENS as u32;
    let sinks = (key.sink.div_ceil(BLOCK_TOKENS) as u32).min(from);
    (0..sinks).chain(from..end).collect()
}

/// The launch's mask for a row, and sinks that only single tokens can express: those that the model's own window has taken
/// some of.
fn mask(mask: Mask, model_window: Option<usize>, position: usize) -> (Key, Range<usize>) {
    let lowest = (position + 1).saturating_sub(model_window.unwrap_or(position + 1));
    match mask {
        Mask::Causal => (Key { sink: 0, window: model_window.unwrap_or(0) }, 0..0),
        Mask::SinkWindow { sink, window } => {
            let window = window.max(1).min(model_window.unwrap_or(usize::MAX)).min(i32::MAX as usize / 2);
            if lowest == 0 {
                return (Key { sink: sink.min(i32::MAX as usize / 2), window }, 0..0);
            }
            let start = (position + 1).saturating_sub(window).max(lowest);
            (Key { sink: 0, window }, lowest.min(start)..sink.clamp(lowest.min(start), start))
        }
    }
}

/// Cuts a run's rows into tiles whose rows have one mask, and one choice of single tokens but for causality.
fn cuts(rows: &Rows, heads: &[HeadReads], run: usize, span: Range<usize>) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    let same = |a: usize, b: usize| {
        heads.iter().all(|head| {
            let at = |row: usize| mask(head.mask, rows.window, rows.positions[row] as usize);
            let (one, two) = (at(a), at(b));
            let alike = one.0 == two.0 && one.1 == two.1;
            alike && (one.0.window == 0 || head.tokens(run).is_empty())
        })
    };
    for row in span {
        match out.last_mut() {
            Some(last) if last.len() < TILE_ROWS && same(last.start, row) => last.end = row + 1,
            _ => out.push(row..row + 1),
        }
    }
    out
}

/// What a tile's rows read of one list of heads. Single tokens are not masked by windows, so those that a window hides are
/// left out here; tiles with windows and tokens have one row.
fn read(rows: &Rows, head: &HeadReads, run: usize, span: Range<usize>) -> Read {
    let (first, last) = (rows.positions[span.start] as usize, rows.positions[span.end - 1] as usize);
    let (key, sinks) = mask(head.mask, rows.window, first);
    let (blocks, tokens) = head.lists(run);
    let end = (last / BLOCK_TOKENS + 1) as u32;
    let visible = head.mask.keys(first, rows.window);
    let seen = |&token: &u32| {
        let token = token as usize;
        token <= last && (key.window == 0 || visible.iter().any(|keys| keys.contains(&token)))
    };
    let mut columns: Vec<u32> = sinks.map(|t| t as u32).collect();
    let Some(blocks) = blocks else { return Read { key, blocks: None, columns } };
    let blocks: Vec<u32> = blocks.iter().copied().take_while(|&block| block < end).collect();
    // Sinks that are single tokens hold only within the listed blocks.
    columns.retain(|token| blocks.binary_search(&(token / BLOCK_TOKENS as u32)).is_ok());
    let mut extra = Vec::new();
    outside(tokens, &blocks, &mut extra);
    columns.extend(extra.iter().filter(|&token| seen(token)));
    columns.sort_unstable();
    Read { key, blocks: Some(blocks), columns }
}
