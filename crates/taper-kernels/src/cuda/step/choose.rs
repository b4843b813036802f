//! Scores of keys or of what stands for them, and choices by them: [`crate::decode::scores`], [`crate::decode::top_k`],
//! [`crate::decode::top_p`] without the host.

use super::{Chosen, Step};
use crate::cuda::batch::{Batch, Lists};
use crate::cuda::error::Result;
use crate::cuda::op::Op;
use crate::cuda::quantized::{pick_quantized, quantized_scores};
use crate::cuda::score::{self, Between, How, Pages, Scores, View, select};
use crate::decode::{Decode, DecodeRow, Over, Selection, of_pages, sink_window};
use crate::kv::BLOCK_TOKENS;
use crate::lent::Lent;
use candle_core::Tensor;
use std::ops::Range;
use std::sync::Arc;

/// What keys or pages of them matter to each row and KV head, on the device.
#[derive(Debug, Clone)]
pub(crate) struct Scored {
    step: Arc<Step>,
    by: By,
    /// Which rows and KV heads it was wanted for `[R, kv_heads]`.
    wanted: Vec<bool>,
}

#[derive(Debug, Clone)]
enum By {
    /// Shares of the attention mass, by every query head's scores.
    Shares(Arc<Scores>),
    /// The same of pages by their bounds, which the choice scores: `[blocks, kv_heads, pages of a block, 2 head_dim]`.
    Bounds(Tensor),
    /// The same of pages that were whole before the rows' own tokens, by other queries than the rows'.
    Ahead(Tensor, Tensor),
    /// The same of tokens by their quantized keys, which the choice scores or has scored.
    Quantized(Tensor),
    /// What each KV head makes of tokens, `[R, kv_heads, tokens]`, f32.
    Groups(Lent),
}

impl Scored {
    /// By scores of a view of the keys; `q` as [`score::scores`] has it, none for the batch's own queries.
    pub(super) fn by_view(step: Arc<Step>, q: Option<&Tensor>, view: View, wanted: &[bool]) -> Result<Self> {
        let batch = step.batch();
        let scores = score::scores(&batch, q.unwrap_or(batch.q), view, scale(&batch))?;
        Ok(Self::by_scores(step, scores, wanted))
    }

    /// By quantized keys.
    pub(super) fn by_quantized(step: Arc<Step>, index: &Tensor, wanted: &[bool]) -> Self {
        Self { step, by: By::Quantized(index.clone()), wanted: wanted.to_vec() }
    }

    fn by_scores(step: Arc<Step>, scores: Scores, wanted: &[bool]) -> Self {
        Self { step, by: By::Shares(Arc::new(scores)), wanted: wanted.to_vec() }
    }

    /// By bounds of pages.
    pub(super) fn by_bounds(step: Arc<Step>, index: &Tensor, wanted: &[bool]) -> Self {
        Self { step, by: By::Bounds(index.clone()), wanted: wanted.to_vec() }
    }

    /// By bounds of the pages that were whole before the rows' tokens, and queries of the tokens before, in the cache's dtype.
    pub(super) fn by_bounds_ahead(step: Arc<Step>, index: &Tensor, earlier: Tensor, wanted: &[bool]) -> Self {
        Self { step, by: By::Ahead(index.clone(), earlier), wanted: wanted.to_vec() }
    }

    /// By what each KV head makes of its tokens.
    pub(super) fn by_group(step: Arc<Step>, importance: Lent, wanted: &[bool]) -> Self {
        Self { step, by: By::Groups(importance), wanted: wanted.to_vec() }
    }

    pub fn wanted(&self) -> &[bool] {
        &self.wanted
    }

    /// Tokens, or pages of them, that were looked at for each row and KV head.
    pub fn entries(&self) -> Vec<usize> {
        let heads = self.wanted.iter().enumerate();
        let of = |visible: usize| match self.by {
            By::Ahead(..) => (visible - 1) / self.page(),
            _ => visible.div_ceil(self.page()),
        };
        heads.map(|(i, wanted)| if *wanted { of(self.step.visible(i)) } else { 0 }).collect()
    }

    /// The scores of all tokens of the batch's own queries, if that is what it is.
    pub(super) fn of_tokens(&self, batch: &Decode) -> Option<(&Arc<Step>, &Scores)> {
        match &self.by {
            By::Shares(scores) if scores.page == 1 && self.step.q == batch.q.id() => Some((&self.step, scores)),
            _ => None,
        }
    }

    fn page(&self) -> usize {
        match &self.by {
            By::Shares(scores) => scores.page,
            By::Bounds(index) | By::Ahead(index, _) => BLOCK_TOKENS / index.dims()[2],
            By::Groups(_) | By::Quantized(_) => 1,
        }
    }

    /// The entries between that matter most: of each list as many as `k` `[lists]`, u32, says, at most `most`, and, if
    /// there is `noise`, only what is cheaper to read than to sample around.
    fn choose(
        &self,
        op: &Op,
        between: Between,
        (most, k, noise): (usize, &Tensor, Option<f32>),
        over: Over,
    ) -> Result<Lists> {
        let batch = self.step.batch();
        let longest = self.step.lens.iter().copied().max().unwrap_or(0);
        let scored;
        let numbers = match &self.by {
            By::Shares(scores) => scores.of(),
            By::Groups(importance) => (&**importance, None, 1),
            By::Bounds(index) => {
                let heads = (batch.q.dims()[1], batch.kv.k.dims()[1]);
                if score::picks(batch.max_len, self.page(), heads) {
                    let by = Pages::Own(index);
                    return one(score::pick_pages(op, &batch, by, between, (most, k, noise), (longest, over))?);
                }
                scored = score::scores(&batch, batch.q, View::Pages(index), scale(&batch))?;
                scored.of()
            }
            By::Ahead(index, earlier) => {
                let (lens, heads) = (self.whole(op)?, (batch.q.dims()[1], batch.kv.k.dims()[1]));
                let batch = Batch { q: earlier, lens: &lens, ..batch };
                if score::picks(batch.max_len, self.page(), heads) {
                    let by = Pages::Earlier(index);
                    return one(score::pick_pages(op, &batch, by, between, (most, k, noise), (longest, over))?);
                }
                scored = score::scores(&batch, batch.q, View::Pages(index), scale(&batch))?;
                return select(
                    op,
                    &batch,
                    scored.of(),
                    between,
                    &How::by_count(op, most, k, scored.of().0.dim(2)?)?.paying(noise, over),
                );
            }
            By::Quantized(index) => {
                if let Some(noise) = noise.filter(|noise| *noise > 0.0) {
                    return pick_quantized(op, &batch, index, between, (most, k, noise), (longest, over));
                }
                scored = quantized_scores(&batch, index, scale(&batch))?;
                scored.of()
            }
        };
        select(op, &batch, numbers, between, &How::by_count(op, most, k, numbers.0.dim(2)?)?.paying(noise, over))
    }

    /// The tokens of pages that were whole before each row's own `[R]`, u32; at least one, which a row that sees no such page
    /// does not look at.
    fn whole(&self, op: &Op) -> Result<Tensor> {
        let page = self.page();
        let lens: Vec<u32> =
            self.step.lens.iter().map(|&n| (n.saturating_sub(1) / page * page).max(1) as u32).collect();
        op.kept(&lens, [lens.len()])
    }

    /// The ranges that each row and KV head reads whatever is chosen; none where it reads everything: where nothing is
    /// known of its keys, or `all(head, keys between)` says so.
    fn fixed(
        &self,
        rows: &[DecodeRow],
        (sink, window): (usize, usize),
        all: impl Fn(usize, usize) -> bool,
    ) -> Vec<Option<[Range<usize>; 2]>> {
        let kv_heads = self.step.kv_heads;
        let head = |(i, wanted): (usize, &bool)| {
            let ranges = sink_window(&rows[i / kv_heads].visible, sink, window).filter(|_| *wanted)?;
            (!all(i, ranges[1].start - ranges[0].end)).then_some(ranges)
        };
        self.wanted.iter().enumerate().map(head).collect()
    }

    fn check(&self, op: &Op, rows: &[DecodeRow]) -> Result<()> {
        op.check(
            self.step.fits(rows),
            "importance",
            format_args!("of rows that see {:?} tokens", self.step.lens),
            "that of these rows",
        )
    }
}

/// The lists of one layer.
fn one(mut layers: Vec<Lists>) -> Result<Lists> {
    Ok(layers.swap_remove(0))
}

/// What products of queries and keys are multiplied by.
fn scale(batch: &Batch) -> f32 {
    1.0 / (batch.q.dims()[2] as f32).sqrt()
}

/// [`crate::decode::scores`]; none where none is wanted.
pub(crate) fn scores(batch: &Decode, wanted: &[bool]) -> Result<Option<Scored>> {
    let wanted = super::wanted(batch.rows, wanted);
    if !wanted.contains(&true) {
        return Ok(None);
    }
    let op = Op::new("scores", "q", batch.q)?;
    Scored::by_view(Step::new(&op, batch)?, None, View::Rows(batch.kv.k), &wanted).map(Some)
}

/// Entries or draws that there is room for where `most` are wanted: up to a quarter more, so that the choices of many steps are
/// the same launches as a sequence grows.
pub(super) fn room_for(most: usize) -> usize {
    most.next_multiple_of((most.next_power_of_two() / 8).max(64))
}

/// [`crate::decode::top_paying`].
pub(crate) fn top_paying(
    rows: &[DecodeRow],
    (importance, over): (&Scored, Over),
    fixed: (usize, usize),
    (k, noise): (&[usize], Option<f32>),
) -> Result<Selection> {
    let (step, page) = (&importance.step, importance.page());
    let op = Op::new("top_k", "q", step.batch().q)?;
    let Some(taken) = Taken::new(&op, rows, importance, fixed, (k, noise))? else {
        return Ok(Selection::dense(rows.len(), step.kv_heads));
    };
    let Taken { between, most, ks, noise, fixed, take } = taken;
    let lists = importance.choose(&op, between, (most, &ks, noise), over)?;
    // Pages over the ends of what lies between count for what of them does, and how many pay, only the choice knows.
    let count = |(i, fixed): (usize, &Option<[Range<usize>; 2]>)| match fixed {
        None => step.visible(i),
        Some(ranges) => ranges.iter().map(Range::len).sum::<usize>() + take[i],
    };
    let counts = (page == 1 && noise.is_none()).then(|| fixed.iter().enumerate().map(count).collect());
    Ok(Chosen::Keys(step.clone(), lists, counts).into())
}

/// What each list takes of what there is for it.
struct Taken {
    between: Between,
    /// The most, and how many of each list `[R * kv_heads]`, u32.
    most: usize,
    ks: Tensor,
    /// In squared shares of entries.
    noise: Option<f32>,
    /// What is read besides; none where all is.
    fixed: Vec<Option<[Range<usize>; 2]>>,
    take: Vec<usize>,
}

impl Taken {
    /// None where all lists read everything.
    fn new(
        op: &Op,
        rows: &[DecodeRow],
        importance: &Scored,
        fixed: (usize, usize),
        (k, noise): (&[usize], Option<f32>),
    ) -> Result<Option<Self>> {
        let (step, page) = (&importance.step, importance.page());
        importance.check(op, rows)?;
        op.check(
            k.len() == importance.wanted.len(),
            "k",
            k.len(),
            format_args!("{} numbers", importance.wanted.len()),
        )?;
        let fixed = importance.fixed(rows, fixed, |i, between| k[i] >= between);
        if fixed.iter().all(Option::is_none) {
            return Ok(None);
        }
        // Entries that each list takes: no more than there are between its ranges.
        let take = |(fixed, k): (&Option<[Range<usize>; 2]>, &usize)| {
            let Some([before, after]) = fixed else { return 0 };
            k.div_ceil(page).min(after.start.div_ceil(page) - before.end / page)
        };
        let take: Vec<usize> = fixed.iter().zip(k).map(take).collect();
        let ks: Vec<u32> = take.iter().map(|&k| k as u32).collect();
        let most = room_for(take.iter().copied().max().unwrap_or(0));
        let between = Between::of(op, &step.lens, &fixed, page)?;
        let noise = noise.map(|noise| of_pages(noise, page));
        Ok(Some(Self { between, most, ks: op.kept(&ks, [ks.len()])?, noise, fixed, take }))
    }
}

/// Lists of pages of several layers, chosen at once; none where all read everything.
#[derive(Debug)]
pub(crate) struct LayersChosen(Option<Vec<Lists>>);

impl LayersChosen {
    /// [`crate::index::bounds::Ahead::of`].
    pub fn of(&self, layer: usize, batch: &Decode) -> Result<Selection> {
        let Some(lists) = &self.0 else { return Ok(Selection::dense(batch.rows.len(), batch.kv.k.dim(1)?)) };
        let op = Op::new("ahead", "q", batch.q)?;
        let found = lists.get(layer).ok_or_else(|| op.error("layer", layer, format_args!("below {}", lists.len())))?;
        Ok(Chosen::Keys(Step::new(&op, batch)?, found.clone(), None).into())
    }
}

/// [`crate::index::bounds::choose_ahead`]; none where pages are too many for one launch.
pub(crate) fn choose_ahead(
    batch: &Decode,
    (queries, first, bounds): (&[Tensor], usize, &[Tensor]),
    (wanted, over): (&[bool], Over),
    fixed: (usize, usize),
    (k, noise): (&[usize], Option<f32>),
) -> Result<Option<LayersChosen>> {
    let op = Op::new("ahead", "q", batch.q)?;
    let Some(index) = bounds.first() else { return Err(op.error("bounds", 0, "at least one layer's")) };
    let step = Step::new(&op, batch)?;
    let longest = step.lens.iter().copied().max().unwrap_or(0);
    // By the rows' own queries as far as anything is asked of it here.
    let scored = Scored {
        by: By::Ahead(index.clone(), step.batch().q.clone()),
        wanted: super::wanted(batch.rows, wanted),
        step: step.clone(),
    };
    let of = step.batch();
    if !score::picks(of.max_len, scored.page(), (step.q_heads, step.kv_heads)) {
        return Ok(None);
    }
    let Some(taken) = Taken::new(&op, batch.rows, &scored, fixed, (k, noise))? else {
        return Ok(Some(LayersChosen(None)));
    };
    let lens = scored.whole(&op)?;
    let of = Batch { lens: &lens, ..of };
    let Taken { between, most, ks, noise, .. } = taken;
    let pages = Pages::Layers { queries, first, bounds };
    Ok(Some(LayersChosen(Some(score::pick_pages(&op, &of, pages, between, (most, &ks, noise), (longest, over))?))))
}

/// [`crate::decode::top_p`].
pub(crate) fn top_p(rows: &[DecodeRow], importance: &Scored, fixed: (usize, usize), p: f32) -> Result<Selection> {
    let step = &importance.step;
    let batch = step.batch();
    let op = Op::new("top_p", "q", batch.q)?;
    importance.check(&op, rows)?;
    let own;
    let scores = match &importance.by {
        By::Shares(scores) => &**scores,
        By::Quantized(index) => {
            own = quantized_scores(&batch, index, scale(&batch))?;
            &own
        }
        _ => return Err(op.error("importance", "not a share of the attention mass", "one by scores")),
    };
    let fixed = importance.fixed(rows, fixed, |_, _| p >= 1.0);
    if fixed.iter().all(Option::is_none) {
        return Ok(Selection::dense(rows.len(), step.kv_heads));
    }
    let between = Between::of(&op, &step.lens, &fixed, 1)?;
    let lists = score::top_p(&batch, scores, between, p, batch.max_len)?;
    Ok(Chosen::Keys(step.clone(), lists, None).into())
}
