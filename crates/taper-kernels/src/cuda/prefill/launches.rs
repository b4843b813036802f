//! From a rule or a selection to launches: heads that come to their keys in the same way, tiles of one mask, and lists.

use super::super::error::Result;
use super::super::op::Op;
use super::{DeviceReads, DeviceStripes, KeyLists, RunLists, TILE_ROWS, Tile, Tiles};
use crate::kv::BLOCK_TOKENS;
use crate::prefill::{Blocks, HeadReads, Mask, Reads, Rows, outside, rows_of};
use std::ops::Range;

/// A mask as launches know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub sink: usize,
    pub window: usize,
}

/// Tiles and heads that are attended for in one launch.
pub(super) struct Launch<'a> {
    pub tiles: Vec<Tile>,
    /// Query heads, ascending.
    pub heads: Vec<u32>,
    pub key: Key,
    pub lists: HeadLists<'a>,
    /// As in [`Sparse`](super::Sparse).
    pub head_pairs: bool,
}

/// What the lists of heads of a launch read of what its mask lets through.
pub(super) enum HeadLists<'a> {
    /// All of it.
    All,
    /// Lists in host memory `[lists][tiles]`.
    Host(Vec<Vec<Read>>),
    /// Some of the lists that a device keeps, and the run of each tile.
    Device(&'a RunLists, Vec<usize>, Vec<u32>),
    /// Some of the lists of heads whose columns and diagonals a device keeps.
    Stripes(&'a DeviceStripes, Vec<usize>),
}

/// What one tile and list of heads reads.
pub(super) struct Read {
    /// Absent: every block that the mask lets through.
    blocks: Option<Vec<u32>>,
    columns: Vec<u32>,
}

/// How a list of heads comes to what it reads: those alike are launched together.
#[derive(Clone, Copy, PartialEq)]
enum Way<'a> {
    Rule(Mask),
    Host(Mask),
    Device(&'a DeviceReads),
}

impl<'a> Way<'a> {
    fn of(head: &'a HeadReads) -> Self {
        match &head.blocks {
            None => Way::Rule(head.mask),
            Some(Blocks::Device { reads, .. }) => Way::Device(reads),
            Some(Blocks::Striped { .. } | Blocks::Listed(_)) => Way::Host(head.mask),
        }
    }

    fn mask(&self) -> Mask {
        match *self {
            Way::Rule(mask) | Way::Host(mask) => mask,
            Way::Device(_) => Mask::Causal,
        }
    }
}

/// The launches that read what `reads` says: every row and head is in one of them.
pub(super) fn launches<'a>(
    op: &Op,
    rows: &Rows,
    reads: &Reads<'a>,
    kv_heads: usize,
    q_heads: usize,
) -> Result<Vec<Launch<'a>>> {
    let selection = match *reads {
        Reads::Mask(mask) => {
            let heads: Vec<u32> = (0..q_heads as u32).collect();
            return group(op, rows, &[], Way::Rule(mask), &[], heads, q_heads / kv_heads);
        }
        Reads::Selection(selection) => selection,
    };
    let n = selection.heads().len();
    op.check(n == kv_heads || n == q_heads, "reads", n, format_args!("{kv_heads} or {q_heads} lists of heads"))?;
    let runs: Vec<Range<usize>> = selection.runs().iter().map(|run| rows_of(rows.positions, run)).collect();
    let mut next = 0;
    for run in &runs {
        op.check(next >= run.start, "reads", format_args!("no run for row {next}"), "a run for every row")?;
        next = run.end.max(next);
    }
    let all = next == rows.positions.len();
    op.check(all, "reads", format_args!("no run for row {next}"), "a run for every row")?;
    let mut ways: Vec<(Way, Vec<usize>)> = Vec::new();
    for (list, head) in selection.heads().iter().enumerate() {
        let way = Way::of(head);
        match ways.iter_mut().find(|(known, _)| *known == way) {
            Some((_, lists)) => lists.push(list),
            None => ways.push((way, vec![list])),
        }
    }
    let each = q_heads / n;
    let mut launches = Vec::new();
    for (way, lists) in ways {
        let heads = lists.iter().flat_map(|list| (list * each..(list + 1) * each).map(|head| head as u32)).collect();
        let reads: Vec<&HeadReads> = lists.iter().map(|&list| &selection.heads()[list]).collect();
        launches.extend(group(op, rows, &runs, way, &reads, heads, each)?);
    }
    Ok(launches)
}

/// A run, and which of its rows.
type Cut = (usize, Range<usize>);

/// The launches of heads that come to their keys in one way, `each` query heads a list: one for each mask that tiles have.
fn group<'a>(
    op: &Op,
    rows: &Rows,
    runs: &[Range<usize>],
    way: Way<'a>,
    lists: &[&'a HeadReads],
    heads: Vec<u32>,
    each: usize,
) -> Result<Vec<Launch<'a>>> {
    // A rule is the same in all runs.
    let whole = 0..rows.positions.len();
    let spans = if matches!(way, Way::Rule(_)) { std::slice::from_ref(&whole) } else { runs };
    let mut keys: Vec<(Key, Vec<Cut>)> = Vec::new();
    for (run, span) in spans.iter().enumerate() {
        let single = !matches!(way, Way::Rule(_)) && lists.iter().any(|list| !list.tokens(run).is_empty());
        for cut in cuts(rows, way.mask(), single, span.clone()) {
            let key = mask(way.mask(), rows.window, rows.positions[cut.start] as usize).0;
            match keys.iter_mut().find(|(known, _)| *known == key) {
                Some((_, cuts)) => cuts.push((run, cut)),
                None => keys.push((key, vec![(run, cut)])),
            }
        }
    }
    let launch = |(key, mut cuts): (Key, Vec<Cut>)| {
        let halves = |stripes: &DeviceStripes| stripes.block_tokens() == BLOCK_TOKENS && !each.is_multiple_of(2);
        if matches!(way, Way::Device(DeviceReads::Stripes(stripes)) if halves(stripes)) {
            join_halves(rows, &mut cuts);
        }
        let tiles: Vec<Tile> = cuts.iter().map(|(_, cut)| tile(rows, cut.clone())).collect();
        let whole = HeadReads::from(way.mask());
        let lists = match way {
            Way::Rule(_) => {
                let reads: Vec<Read> = cuts.iter().map(|(run, cut)| read(rows, &whole, *run, cut.clone())).collect();
                if reads.iter().all(|read| read.columns.is_empty()) {
                    HeadLists::All
                } else {
                    HeadLists::Host(vec![reads])
                }
            }
            Way::Host(_) => {
                let of =
                    |head: &&HeadReads| cuts.iter().map(|(run, cut)| read(rows, head, *run, cut.clone())).collect();
                HeadLists::Host(lists.iter().map(of).collect())
            }
            Way::Device(all) => {
                let which = |head: &&HeadReads| match &head.blocks {
                    Some(Blocks::Device { list, .. }) => Ok(*list),
                    _ => Err(op.error("reads", "lists", "a device's")),
                };
                let which = lists.iter().map(which).collect::<Result<_>>()?;
                match all {
                    DeviceReads::Lists(all) => {
                        HeadLists::Device(all, which, cuts.iter().map(|(run, _)| *run as u32).collect())
                    }
                    DeviceReads::Stripes(all) => HeadLists::Stripes(all, which),
                }
            }
        };
        // Half a tile is idle where runs are short: two heads that read alike fill it.
        let short = tiles.iter().all(|tile| tile.rows as usize <= TILE_ROWS / 2);
        let head_pairs = short && each.is_multiple_of(2) && !matches!(lists, HeadLists::All);
        Ok(Launch { tiles, heads: heads.clone(), key, lists, head_pairs })
    };
    keys.into_iter().map(launch).collect()
}

impl HeadLists<'_> {
    /// Which of how many lists of a head each tile reads, where they are not its own.
    pub fn of_tiles(&self) -> Option<(&[u32], usize)> {
        match self {
            Self::Device(all, _, of_tiles) => Some((of_tiles, all.blocks.begins.dims()[1])),
            _ => None,
        }
    }

    /// Lists of blocks and of single tokens on the device; none where the mask says it all.
    pub fn upload(&self, op: &Op, tiles: &Tiles) -> Result<(Option<KeyLists>, Option<KeyLists>)> {
        match self {
            Self::All => Ok((None, None)),
            Self::Host(reads) => {
                let all = || reads.iter().flatten();
                let listed = all().any(|read| read.blocks.is_some());
                let single = all().any(|read| !read.columns.is_empty());
                let blocks = |read: &Read| read.blocks.clone().unwrap_or_default();
                Ok((
                    listed.then(|| flat(op, reads, blocks)).transpose()?,
                    single.then(|| flat(op, reads, |read: &Read| read.columns.clone())).transpose()?,
                ))
            }
            Self::Device(all, which, _) => {
                let some = |lists: &KeyLists| lists.some(which);
                Ok((Some(some(&all.blocks)?), all.columns.as_ref().map(some).transpose()?))
            }
            Self::Stripes(stripes, which) => {
                let RunLists { blocks, columns } = stripes.lists(tiles, which)?;
                Ok((Some(blocks), columns))
            }
        }
    }
}

/// Lists that the host knows `[lists][tiles]`.
fn flat(op: &Op, reads: &[Vec<Read>], ids: impl Fn(&Read) -> Vec<u32>) -> Result<KeyLists> {
    let (mut begins, mut counts, mut flat) = (Vec::new(), Vec::new(), Vec::new());
    for read in reads.iter().flatten() {
        begins.push(flat.len() as u32);
        flat.extend(ids(read));
        counts.push(flat.len() as u32 - begins[begins.len() - 1]);
    }
    op.check(u32::try_from(flat.len()).is_ok(), "reads", flat.len(), "fewer than 2³² ids in all lists")?;
    let shape = [reads.len(), reads.first().map_or(0, Vec::len)];
    Ok(KeyLists {
        heads: reads.len(),
        begins: op.upload(&begins, shape)?,
        counts: op.upload(&counts, shape)?,
        ids: op.upload(&flat, [flat.len()])?,
    })
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

/// Cuts a run's rows into tiles whose rows have one mask, and one choice of single tokens but for causality, if there are any.
fn cuts(rows: &Rows, of: Mask, single: bool, span: Range<usize>) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    let at = |row: usize| mask(of, rows.window, rows.positions[row] as usize);
    let same = |a: usize, b: usize| at(a) == at(b) && (at(a).0.window == 0 || !single);
    for row in span {
        match out.last_mut() {
            Some(last) if last.len() < TILE_ROWS && same(last.start, row) => last.end = row + 1,
            _ => out.push(row..row + 1),
        }
    }
    out
}

/// Makes one tile of two query blocks that follow one another, the first a whole one: the device's lists tell them apart.
fn join_halves(rows: &Rows, cuts: &mut Vec<Cut>) {
    let at = |row: usize| rows.positions[row] as usize;
    let whole = |cut: &Range<usize>| cut.len() == BLOCK_TOKENS && at(cut.start).is_multiple_of(BLOCK_TOKENS);
    let mut joined: Vec<Cut> = Vec::with_capacity(cuts.len());
    for (run, cut) in cuts.drain(..) {
        match joined.last_mut() {
            Some((_, last))
                if whole(last)
                    && last.end == cut.start
                    && at(last.start) + BLOCK_TOKENS == at(cut.start)
                    && at(cut.end - 1) < at(cut.start) + BLOCK_TOKENS =>
            {
                last.end = cut.end;
            }
            _ => joined.push((run, cut)),
        }
    }
    *cuts = joined;
}

/// What a tile's rows read of one list of heads. Single tokens are not masked by windows, so those that a window hides are
/// left out here; tiles with windows and tokens have one row.
fn read(rows: &Rows, head: &HeadReads, run: usize, span: Range<usize>) -> Read {
    let (first, last) = (rows.positions[span.start] as usize, rows.positions[span.end - 1] as usize);
    let (key, sinks) = mask(head.mask, rows.window, first);
    let mut columns: Vec<u32> = sinks.map(|t| t as u32).collect();
    let (blocks, tokens) = head.lists(run);
    let Some(blocks) = blocks else { return Read { blocks: None, columns } };
    let end = (last / BLOCK_TOKENS + 1) as u32;
    let visible = head.mask.keys(first, rows.window);
    let seen = |&token: &u32| {
        let token = token as usize;
        token <= last && (key.window == 0 || visible.iter().any(|keys| keys.contains(&token)))
    };
    let blocks: Vec<u32> = blocks.iter().copied().take_while(|&block| block < end).collect();
    // Sinks that are single tokens hold only within the listed blocks.
    columns.retain(|token| blocks.binary_search(&(token / BLOCK_TOKENS as u32)).is_ok());
    let mut extra = Vec::new();
    outside(tokens, &blocks, &mut extra);
    columns.extend(extra.iter().filter(|&token| seen(token)));
    columns.sort_unstable();
    Read { blocks: Some(blocks), columns }
}
