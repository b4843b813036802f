//! The indices of [`crate::index`] on the device: rows taken in, and keys looked up. They lie as the CPU's do.

use super::project::{self as through, centroids, forward, key_products, turns_at};
use super::{Chosen, Scored, Step};
use crate::cuda::error::Result;
use crate::cuda::index::{self as kernels, Limits, Metadata, Span, Tokens};
use crate::cuda::layer::cast;
use crate::cuda::op::Op;
use crate::cuda::project::{self, Turns, cached_rows};
use crate::cuda::score::{Between, View};
use crate::decode::{Decode, HeadSelection, sink_window};
use crate::index::Part;
use crate::index::clusters::{Centroids, Probes};
use crate::kv::BLOCK_TOKENS;
use crate::mlp::{Mlp, PerHead};
use crate::rotary::Rotations;
use candle_core::{DType, Tensor};

/// Takes parts in, as sequences of one block each.
fn extend(op: &Op, x: &Tensor, parts: &[Part], to: &Metadata) -> Result<()> {
    let span =
        |(i, part): (usize, &Part)| Span { table: i as u32, tokens: (part.rows.start as u32, part.rows.end as u32) };
    parts.chunks(PARTS_AT_ONCE).try_for_each(|parts| {
        let spans: Vec<Span> = parts.iter().enumerate().map(span).collect();
        let first = parts.iter().map(|part| part.start + part.rows.start).min().unwrap_or(0);
        kernels::extend(x, &tables(op, parts)?, &spans, first, to)
    })
}

/// Parts that a launch takes in: its grid has a layer for each.
const PARTS_AT_ONCE: usize = 65_535;

/// The parts' blocks as tables of one block each.
fn tables(op: &Op, parts: &[Part]) -> Result<Tensor> {
    let blocks: Vec<u32> = parts.iter().map(|part| part.block).collect();
    op.kept(&blocks, [blocks.len(), 1])
}

/// [`crate::index::bounds::extend`], whose checks the caller has made.
pub(crate) fn extend_bounds(index: &Tensor, k: &Tensor, parts: &[Part]) -> Result<()> {
    extend(&Op::new("bounds", "k", k)?, k, parts, &Metadata { pages: Some(index), ..Metadata::default() })
}

/// [`crate::index::norms::extend`], whose checks the caller has made.
pub(crate) fn extend_norms(index: &Tensor, v: &Tensor, parts: &[Part]) -> Result<()> {
    extend(&Op::new("norms", "v", v)?, v, parts, &Metadata { norms: Some(index), ..Metadata::default() })
}

/// [`crate::index::labels::extend`], whose checks the caller has made.
pub(crate) fn extend_labels(index: &Tensor, k: &Tensor, parts: &[Part], channels: &[Vec<u32>]) -> Result<()> {
    let op = Op::new("labels", "k", k)?;
    let channels = op.kept(&channels.concat(), [channels.len(), index.dim(3)?])?;
    extend(&op, k, parts, &Metadata { labels: Some((index, &channels)), ..Metadata::default() })
}

/// [`crate::index`]'s quantized keys, whose checks the caller has made.
pub(crate) fn extend_quantized(index: &Tensor, k: &Tensor, parts: &[Part]) -> Result<()> {
    extend(&Op::new("quantized", "k", k)?, k, parts, &Metadata { quantized: Some(index), ..Metadata::default() })
}

/// Tokens that are projected at a time: what that takes of memory, but for turns, does not grow with the sequence.
const TOKENS_AT_ONCE: usize = 8192;

/// New keys of some parts, on their way into an index of something for each.
struct Rows {
    /// Whether they are single rows of blocks, as steps bring them, not whole blocks, as prompts do: what an index
    /// makes of a key must not depend on the keys that come with it.
    single: bool,
    /// Their slots `[T]`, and their positions.
    slots: Tensor,
    positions: Vec<usize>,
    /// Their rows in blocks `[T]`, and the block of each: tables of one block.
    rows: Tensor,
    table_of: Tensor,
    tables: Tensor,
}

impl Rows {
    /// Runs `take` for the parts, some at a time.
    fn each(op: &Op, parts: &[Part], take: impl Fn(&Self) -> Result<()>) -> Result<()> {
        let (whole, some): (Vec<Part>, Vec<Part>) = parts.iter().cloned().partition(|p| p.rows == (0..BLOCK_TOKENS));
        [(whole, false), (some, true)].iter().try_for_each(|(parts, single)| {
            parts.chunks(TOKENS_AT_ONCE / BLOCK_TOKENS).try_for_each(|parts| take(&Self::of(op, parts, *single)?))
        })
    }

    fn of(op: &Op, parts: &[Part], single: bool) -> Result<Self> {
        let tokens = || parts.iter().enumerate().flat_map(|(i, part)| part.rows.clone().map(move |row| (i, part, row)));
        let rows: Vec<u32> = tokens().map(|(.., row)| row as u32).collect();
        let slots: Vec<u32> = tokens().map(|(_, part, row)| part.block * BLOCK_TOKENS as u32 + row as u32).collect();
        let table_of: Vec<u32> = tokens().map(|(i, ..)| i as u32).collect();
        let blocks: Vec<u32> = parts.iter().map(|part| part.block).collect();
        // One copy, of which each begins on 16 bytes.
        let mut words = Vec::new();
        let mut place = |of: &[u32]| {
            let start = words.len();
            words.extend(of);
            words.resize(words.len().next_multiple_of(4), 0);
            (start, of.len())
        };
        let [slots, rows, table_of, blocks] = [&slots, &rows, &table_of, &blocks].map(|of| place(of));
        let words = op.kept(&words, [words.len()])?;
        let part = |(start, len): (usize, usize)| words.narrow(0, start, len);
        Ok(Self {
            single,
            slots: part(slots)?,
            positions: tokens().map(|(_, part, row)| part.start + row).collect(),
            rows: part(rows)?,
            table_of: part(table_of)?,
            tables: part(blocks)?.reshape((blocks.1, 1))?,
        })
    }

    /// Keys `[T, kv_heads, head_dim]`, f32, by `unrotate` as they were before the rotary embedding.
    fn keys(&self, op: &Op, k: &Tensor, unrotate: Option<&Rotations>) -> Result<Tensor> {
        cached_rows(k, &self.slots, self.turns(op, k, unrotate)?.as_ref())
    }

    /// What `unrotate` takes off them.
    fn turns(&self, op: &Op, k: &Tensor, unrotate: Option<&Rotations>) -> Result<Option<Turns>> {
        let width = k.dim(3)?;
        unrotate.map(|of| turns_at(op, of, (&self.positions, width), !self.single)).transpose()
    }

    fn tokens(&self) -> Tokens<'_> {
        Tokens { positions: &self.rows, tables_of: &self.table_of, tables: &self.tables }
    }
}

/// [`crate::index::codes::extend`], whose checks the caller has made.
pub(crate) fn extend_codes(index: &Tensor, k: &Tensor, parts: &[Part], maps: &PerHead<Mlp>) -> Result<()> {
    let op = Op::new("codes", "k", k)?;
    Rows::each(&op, parts, |rows| {
        // Rounding keeps the sign, which is all that a code keeps.
        let keys = &rows.keys(&op, k, None)?;
        let keys = if rows.single { through::Rows::Single(keys, None) } else { through::Rows::Whole(keys) };
        let codes = forward(&op, (maps, DType::F32), keys, maps.len(), DType::BF16)?;
        kernels::codes(&codes, &rows.tokens(), index)
    })
}

/// [`crate::index::clusters::extend`], whose checks the caller has made.
pub(crate) fn extend_clusters(
    index: &Tensor,
    k: &Tensor,
    parts: &[Part],
    of: &PerHead<Centroids>,
    unrotate: Option<&Rotations>,
) -> Result<()> {
    let op = Op::new("clusters", "k", k)?;
    let ids = index.squeeze(3)?;
    Rows::each(&op, parts, |rows| {
        if rows.single {
            let turns = rows.turns(&op, k, unrotate)?;
            let first = rows.positions.iter().copied().min().unwrap_or(0);
            return kernels::key_clusters(k, (&rows.slots, first), turns.as_ref(), &centroids(&op, of)?, &ids);
        }
        let products = key_products(&op, of, &rows.keys(&op, k, unrotate)?)?;
        kernels::nearest(&products, &rows.tokens(), &ids)
    })
}

/// [`crate::index::bounds::importance_ahead`], whose checks the caller has made.
pub(crate) fn bounds_ahead(batch: &Decode, earlier: &Tensor, index: &Tensor, wanted: &[bool]) -> Result<Scored> {
    let op = Op::new("bounds", "q", batch.q)?;
    let earlier = cast(&op, earlier, batch.kv.k.dtype())?;
    Ok(Scored::by_bounds_ahead(Step::new(&op, batch)?, index, earlier, &super::wanted(batch.rows, wanted)))
}

/// [`crate::index::bounds::importance`], whose checks the caller has made.
pub(crate) fn bounds(batch: &Decode, index: &Tensor, wanted: &[bool]) -> Result<Scored> {
    let op = Op::new("bounds", "q", batch.q)?;
    Ok(Scored::by_bounds(Step::new(&op, batch)?, index, &super::wanted(batch.rows, wanted)))
}

/// [`crate::index::labels::importance`], whose checks the caller has made.
pub(crate) fn labels(batch: &Decode, index: &Tensor, channels: &[Vec<u32>], wanted: &[bool]) -> Result<Scored> {
    let op = Op::new("labels", "q", batch.q)?;
    let step = Step::new(&op, batch)?;
    let channels = op.kept(&channels.concat(), [channels.len(), index.dim(3)?])?;
    let q = project::channels(step.batch().q, &channels)?;
    Scored::by_view(step.clone(), Some(&q), View::Rows(index), &super::wanted(batch.rows, wanted))
}

/// Importance by quantized keys, whose checks the caller has made.
pub(crate) fn quantized(batch: &Decode, index: &Tensor, wanted: &[bool]) -> Result<Scored> {
    let op = Op::new("quantized", "q", batch.q)?;
    Ok(Scored::by_quantized(Step::new(&op, batch)?, index, &super::wanted(batch.rows, wanted)))
}

/// [`crate::index::codes::importance`], whose checks the caller has made.
pub(crate) fn equal_bits(batch: &Decode, index: &Tensor, maps: &PerHead<Mlp>, wanted: &[bool]) -> Result<Scored> {
    let op = Op::new("codes", "q", batch.q)?;
    let step = Step::new(&op, batch)?;
    let made = forward(&op, (maps, DType::F32), through::Rows::Single(batch.q, None), step.q_heads, DType::BF16)?;
    let codes = kernels::signs(&made)?;
    let importance = kernels::agreement(&step.batch(), &codes, index)?;
    Ok(Scored::by_group(step, importance, &super::wanted(batch.rows, wanted)))
}

/// [`crate::index::clusters::select`], whose checks the caller has made.
pub(crate) fn probe(
    batch: &Decode,
    index: &Tensor,
    logits: &Tensor,
    (sink, window): (usize, usize),
    probes: Probes,
) -> Result<Chosen> {
    let op = Op::new("clusters", "q", batch.q)?;
    let step = Step::new(&op, batch)?;
    let heads = step.lens.len() * step.kv_heads;
    if !super::choosable(batch.rows) {
        return Ok(Chosen::Host(vec![HeadSelection::Dense; heads]));
    }
    let fixed = |i: usize| {
        let ranges = sink_window(&batch.rows[i / step.kv_heads].visible, sink, window)?;
        let all = matches!(probes, Probes::Keys(k) if k[i] >= ranges[1].start - ranges[0].end);
        (!all).then_some(ranges)
    };
    let fixed: Vec<_> = (0..heads).map(fixed).collect();
    let limit = |i: usize| match probes {
        Probes::Clusters(_, most) => most.min(u32::MAX as usize) as u32,
        Probes::Keys(k) => k[i].min(u32::MAX as usize) as u32,
    };
    let (clusters, at_least) = match probes {
        Probes::Clusters(clusters, _) => (clusters, false),
        Probes::Keys(_) => (usize::MAX, true),
    };
    let tokens = op.kept(&(0..heads).map(limit).collect::<Vec<_>>(), [heads])?;
    let lists = Between::of(&op, &step.lens, &fixed, 1)?.lists;
    let limits = Limits { clusters, tokens: &tokens, at_least };
    let lists = kernels::probe(&step.batch(), logits, &index.squeeze(3)?, lists, limits)?;
    Ok(Chosen::Keys(step.clone(), lists, None))
}
