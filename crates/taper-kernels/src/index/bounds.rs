//! Channel-wise minima and maxima of pages of keys: they bound every score of the page.
//!
//! Source: Quest (Tang et al. 2024, arXiv:2406.10774), section 3.2.

use super::{Extend, Lookup, Part, dims, for_each_part};
use crate::decode::{Decode, DecodeRow, HeadScores, Importance, Kept, Over, Page, Selection, pass};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::simd::{Isa, Simd, dispatch};
use candle_core::{Result, Storage, Tensor, bail};
use std::ops::Range;

/// Rows and width of the index of pages of `page` tokens: minima, then maxima.
pub fn shape(page: usize, head_dim: usize) -> (usize, usize) {
    (BLOCK_TOKENS / page, 2 * head_dim)
}

/// Takes in rows of the keys `[blocks, kv_heads, 64, head_dim]`; the index is of the keys' dtype, so bounds are exact.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn extend(index: &Tensor, k: &Tensor, parts: &[Part]) -> Result<()> {
    let dims = dims(index, k, parts)?;
    let (pages, width) = (index.dim(2)?, index.dim(3)?);
    if width != 2 * dims.1 || index.dtype() != k.dtype() || pages == 0 || !BLOCK_TOKENS.is_multiple_of(pages) {
        bail!("bounds: index {:?} {:?} for keys {:?} {:?}", index.shape(), index.dtype(), k.shape(), k.dtype());
    }
    let (d, page) = (dims.1, BLOCK_TOKENS / pages);
    #[cfg(feature = "cuda")]
    if k.device().is_cuda() {
        return Ok(crate::cuda::step::extend_bounds(index, k, parts)?);
    }
    index.inplace_op2(
        k,
        &Extend(|index: &mut _, keys: &_| {
            with_kv_element!(k.dtype(), T => {
                let (keys, index) = (T::slice(keys).expect("dtype matched"), T::slice_mut(index).expect("dtype matched"));
                for_each_part(dims, keys, index, parts, |part, _, keys, rows| {
                    for row in part.rows.clone() {
                        let key = &keys[row * d..(row + 1) * d];
                        let (low, high) = rows[row / page * 2 * d..][..2 * d].split_at_mut(d);
                        if row % page == 0 {
                            low.copy_from_slice(key);
                            high.copy_from_slice(key);
                            continue;
                        }
                        for ((low, high), &x) in low.iter_mut().zip(high).zip(key) {
                            // NaN once is NaN from then on.
                            if x.to_f32() < low.to_f32() || x.to_f32().is_nan() {
                                *low = x;
                            }
                            if x.to_f32() > high.to_f32() || x.to_f32().is_nan() {
                                *high = x;
                            }
                        }
                    }
                });
            });
            Ok(())
        }),
    )
}

/// The share of attention mass that each page would hold if its keys scored as high as the bounds allow, over the
/// group, for the rows and KV heads `wanted` `[R, kv_heads]`.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn importance(batch: &Decode, index: &Tensor, wanted: &[bool], over: Over) -> Result<Importance> {
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        check(batch, index, wanted)?;
        return Ok(Importance::of_scored(crate::cuda::step::bounds(batch, index, wanted)?, over));
    }
    let (page, heads) = scores(batch, index, wanted)?;
    Ok(Importance::of_scores(page, heads.len(), |i| heads[i].as_ref(), over))
}

/// The same by queries `earlier` `[R, q_heads, head_dim]` of the tokens before the rows' own, of the pages that were whole
/// before these: of the page that a row's own token is written to nothing is asked, nor what has its share.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn importance_ahead<'a>(
    batch: &Decode<'a>,
    earlier: &Tensor,
    index: &Tensor,
    wanted: &[bool],
    over: Over,
) -> Result<Importance> {
    let (rows, _, kv_heads, _) = batch.dims()?;
    if earlier.dims() != batch.q.dims() || wanted.len() != rows * kv_heads {
        bail!("bounds: earlier queries {:?}, {} heads wanted of {:?}", earlier.dims(), wanted.len(), batch.q.dims());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        check(batch, index, wanted)?;
        return Ok(Importance::of_scored(crate::cuda::step::bounds_ahead(batch, earlier, index, wanted)?, over));
    }
    let page = BLOCK_TOKENS / index.dim(2)?.max(1);
    // A row that sees no such page keeps a token, which nobody looks at.
    let pages: Vec<Range<usize>> = batch.rows.iter().map(|row| whole(&row.visible, page)).collect();
    let seen = |(row, pages): (&DecodeRow<'a>, &Range<usize>)| {
        let Range { start, end } = *pages;
        DecodeRow { table: row.table, visible: start..end.max(start + 1) }
    };
    let whole: Vec<DecodeRow> = batch.rows.iter().zip(&pages).map(seen).collect();
    let wanted: Vec<bool> =
        wanted.iter().enumerate().map(|(i, wanted)| *wanted && !pages[i / kv_heads].is_empty()).collect();
    importance(&Decode { q: earlier, kv: batch.kv, rows: &whole }, index, &wanted, over)
}

/// What pages of several layers are chosen by at once.
#[derive(Debug, Clone, Copy)]
pub struct Layers<'a> {
    /// Of each row the queries of the token before, in the cache's dtype `[layers, q_heads, head_dim]`.
    pub queries: &'a [Tensor],
    /// The first of the layers.
    pub first: usize,
    /// The bounds of each, from the first one on.
    pub bounds: &'a [Tensor],
}

/// Pages that were chosen in several layers at once.
#[derive(Debug)]
pub struct Ahead {
    /// Pages that were looked at in each row and layer, over all KV heads.
    pub scored: Vec<usize>,
    #[cfg(feature = "cuda")]
    layers: crate::cuda::step::LayersChosen,
}

impl Ahead {
    /// What the batch's rows read in a layer, counted from the first.
    ///
    /// # Errors
    /// A layer that is not there; a device error.
    pub fn of(&self, _layer: usize, _batch: &Decode) -> Result<Selection> {
        #[cfg(feature = "cuda")]
        return Ok(self.layers.of(_layer, _batch)?);
        #[cfg(not(feature = "cuda"))]
        bail!("bounds: pages of several layers are chosen on a CUDA device alone")
    }
}

/// As [`importance_ahead`] and [`top_paying`](crate::decode::top_paying) in one, for several layers at once, of which `batch` is
/// any; none where there is no such operation.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn choose_ahead(
    _batch: &Decode,
    _layers: Layers,
    (_wanted, _over): (&[bool], Over),
    _fixed: (usize, usize),
    _k: (&[usize], Option<f32>),
) -> Result<Option<Ahead>> {
    #[cfg(feature = "cuda")]
    if let (true, [index, ..]) = (_batch.q.device().is_cuda(), _layers.bounds) {
        check(_batch, index, _wanted)?;
        let of = (_layers.queries, _layers.first, _layers.bounds);
        let Some(layers) = crate::cuda::step::choose_ahead(_batch, of, (_wanted, _over), _fixed, _k)? else {
            return Ok(None);
        };
        let (page, kv_heads) = (BLOCK_TOKENS / index.dim(2)?, _batch.kv.k.dim(1)?);
        let choosable = _batch.rows.iter().all(|row| row.visible.start == 0);
        let of = |(row, wanted): (&DecodeRow, &[bool])| {
            let heads = wanted.iter().filter(|wanted| **wanted && choosable).count();
            heads * (row.visible.end.saturating_sub(1) / page)
        };
        let scored = _batch.rows.iter().zip(_wanted.chunks(kv_heads)).map(of).collect();
        return Ok(Some(Ahead { scored, layers }));
    }
    Ok(None)
}

/// What a row sees of the pages that are whole without its own token.
fn whole(visible: &Range<usize>, page: usize) -> Range<usize> {
    let Range { start, end } = *visible;
    start..(end.saturating_sub(1) / page * page).max(start)
}

fn check(batch: &Decode, index: &Tensor, wanted: &[bool]) -> Result<()> {
    let (rows, _, kv_heads, d) = batch.dims()?;
    if wanted.len() != rows * kv_heads || index.dim(3)? != 2 * d {
        bail!("bounds: index {:?}, {} heads wanted of {rows} rows of {kv_heads}", index.shape(), wanted.len());
    }
    Ok(())
}

/// The page's size, and the largest scores that the bounds allow.
fn scores(batch: &Decode, index: &Tensor, wanted: &[bool]) -> Result<(usize, Vec<Option<HeadScores>>)> {
    let (_, q_heads, kv_heads, d) = batch.dims()?;
    let (page, group) = (BLOCK_TOKENS / index.dim(2)?, q_heads / kv_heads);
    check(batch, index, wanted)?;
    let q = super::queries(batch)?;
    let (storage, _) = index.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("bounds: only the CPU is built in") };
    let pages = |row: &DecodeRow| row.visible.start / page..row.visible.end.div_ceil(page);
    let spans: Vec<_> = batch.rows.iter().flat_map(|row| std::iter::repeat_n(pages(row), kv_heads)).collect();
    let (isa, scale) = (Isa::best(), 1.0 / (d as f32).sqrt());
    let heads = with_kv_element!(index.dtype(), T => {
        let lookup = &Lookup::new(T::slice(storage).expect("dtype matched"), index, kv_heads)?;
        let write = |i: usize, pages: Range<usize>, out: *mut f32, stride: usize| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            let queries = &q[(row * q_heads + head * group) * d..][..group * d];
            let first = pages.start;
            for (start, bounds) in lookup.blocks(batch.rows[row].table, head, BLOCK_TOKENS / page, pages) {
                // The pass gives each run its part of every line.
                let line = out.wrapping_add(start - first);
                dispatch!(isa, highest::<_, T: KvElement>(
                    queries: &[f32], d: usize, bounds: &[T], scale: f32, line: *mut f32, stride: usize
                ));
            }
        };
        // SAFETY: the blocks of a run hold every one of its pages.
        unsafe { pass(isa, &spans, wanted, (group, Kept::Scores), write) }
    });
    Ok((page, heads))
}

/// What the pages of each row and KV head allow at most.
pub(crate) struct PageBounds {
    /// `[R, kv_heads]`; empty where it was not wanted.
    heads: Vec<Vec<Page>>,
}

impl PageBounds {
    /// From an index of bounds and one of norms, of pages of one size.
    ///
    /// # Errors
    /// Shapes or dtypes that differ.
    pub fn new(batch: &Decode, bounds: &Tensor, norms: &Tensor, wanted: &[bool]) -> Result<Self> {
        let (page, heads) = scores(batch, bounds, wanted)?;
        let (_, q_heads, kv_heads, _) = batch.dims()?;
        let (storage, _) = norms.storage_and_layout();
        let Storage::Cpu(candle_core::CpuStorage::F32(data)) = &*storage else {
            bail!("norms: expected f32 on the CPU")
        };
        if norms.dims()[2..] != [BLOCK_TOKENS / page, 1] {
            bail!("norms {:?} beside bounds {:?}", norms.shape(), bounds.shape());
        }
        let lookup = Lookup::new(data, norms, kv_heads)?;
        let of = |(i, head): (usize, Option<HeadScores>)| {
            let (row, Some(head)) = (&batch.rows[i / kv_heads], head) else { return Vec::new() };
            let first = row.visible.start / page;
            let pages = first..row.visible.end.div_ceil(page);
            pages
                .map(|p| Page {
                    start: (p * page).max(row.visible.start),
                    end: ((p + 1) * page).min(row.visible.end),
                    scores: (0..q_heads / kv_heads).map(|g| head.of(g)[p - first]).collect(),
                    norm: lookup.block(row.table, i % kv_heads, p * page)[p % (BLOCK_TOKENS / page)],
                })
                .collect()
        };
        Ok(Self { heads: heads.into_iter().enumerate().map(of).collect() })
    }

    /// Those of one row and KV head.
    pub fn of(&self, head: usize) -> &[Page] {
        &self.heads[head]
    }
}

/// The largest scaled dot product that a key within the bounds of each page `[pages, 2 d]` can have with each query
/// `[group, d]`, into lines `stride` apart.
///
/// # Safety
/// Every line of `out` covers the pages; `V`'s instruction set exists.
#[inline(always)]
unsafe fn highest<V: Simd, T: KvElement>(
    queries: &[f32],
    d: usize,
    bounds: &[T],
    scale: f32,
    mut out: *mut f32,
    stride: usize,
) {
    let together = 3;
    for queries in queries.chunks(together * d) {
        unsafe {
            match queries.len() / d {
                3 => highest_of::<V, T, 3>(queries, d, bounds, scale, out, stride),
                2 => highest_of::<V, T, 2>(queries, d, bounds, scale, out, stride),
                _ => highest_of::<V, T, 1>(queries, d, bounds, scale, out, stride),
            }
        }
        // May pass the end after the last lines; never read there.
        out = out.wrapping_add(together * stride);
    }
}

/// `G` (at most 3) queries.
#[inline(always)]
unsafe fn highest_of<V: Simd, T: KvElement, const G: usize>(
    queries: &[f32],
    d: usize,
    bounds: &[T],
    scale: f32,
    out: *mut f32,
    stride: usize,
) {
    let whole = d - d % V::LANES;
    for (at, bounds) in bounds.chunks_exact(2 * d).enumerate() {
        let (low, high) = bounds.split_at(d);
        unsafe {
            let mut acc = [V::splat(0.0); G];
            for c in (0..whole).step_by(V::LANES) {
                let (low, high) = (T::load::<V>(low.as_ptr().add(c)), T::load::<V>(high.as_ptr().add(c)));
                for (g, acc) in acc.iter_mut().enumerate() {
                    let q = V::load(queries.as_ptr().add(g * d + c));
                    *acc = acc.add(q.mul(low).max(q.mul(high)));
                }
            }
            let mut sums = V::sum4([acc[0], acc[1 % G], acc[2 % G], acc[3 % G]]);
            if whole < d {
                for (sum, q) in sums.iter_mut().zip(queries.chunks_exact(d)) {
                    *sum += (whole..d).map(|c| (q[c] * low[c].to_f32()).max(q[c] * high[c].to_f32())).sum::<f32>();
                }
            }
            // Not a loop: it would keep the sums in memory.
            out.add(at).write(sums[0] * scale);
            if G > 1 {
                out.add(stride + at).write(sums[1] * scale);
            }
            if G > 2 {
                out.add(2 * stride + at).write(sums[2] * scale);
            }
        }
    }
}
