//! Steps that read a sample: [`crate::decode::sample`] with its attention in one launch, draws alone, and a mean of drawn
//! values, all on a CUDA device and by the draws of the CPU.

use super::batch::{Batch, Dims, Lists, WORDS};
use super::error::Result;
use super::ffi::{self, TaperSampleParams, TaperSampledParams};
use super::op::{Op, team};
use super::readback::Readback;
use crate::budget::Rule;
use crate::decode::Sampling;
use crate::decode::sample::GROWTH;
use crate::kv::BLOCK_TOKENS;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

/// Names each row's draws; `layer` is the decoder layer, the head is the KV head, or for values the query head.
#[derive(Clone, Copy)]
pub struct Streams<'a> {
    /// The requests' seeds `[R]`, i64 of the same bits.
    pub seeds: &'a Tensor,
    /// Absolute positions of the queries `[R]`, u32.
    pub positions: &'a Tensor,
    /// Decoder layer.
    pub layer: u32,
}

/// Shapes whose scratch a thread keeps.
const SCRATCHES: usize = 8;

/// What scratch is found by.
type Shape = (usize, usize, usize);

thread_local! {
    static KEPT: RefCell<VecDeque<(Shape, Arc<Scratch>)>> = RefCell::default();
}

/// Counters and scratch of launches whose thread blocks meet: made once for a shape, for all layers of a step one after the
/// other.
#[derive(Debug)]
pub struct Scratch {
    /// `[2 + lists, 32]`, u32, like what follows with room for one list more.
    pub(super) sync: Tensor,
    /// `[1 + lists, team, group, 4]`, i64.
    pub(super) sums: Tensor,
    /// `[1 + lists, team, 256]`, u32.
    pub(super) bins: Tensor,
    lists: usize,
    team: usize,
    group: usize,
}

impl Scratch {
    /// For batches of `rows` and so many heads.
    ///
    /// # Errors
    /// Heads that do not fit each other, or a device error.
    pub fn new(like: &Tensor, rows: usize, q_heads: usize, list_heads: usize) -> Result<Self> {
        let op = Op::new("scratch", "like", like)?;
        let fits = list_heads > 0 && q_heads.is_multiple_of(list_heads);
        op.check(fits, "list_heads", list_heads, format_args!("a divisor of {q_heads}"))?;
        let (lists, team, group) = (rows * list_heads, team(list_heads), q_heads / list_heads);
        Ok(Self {
            sync: op.zeros((2 + lists, 32), DType::U32)?,
            sums: op.zeros((1 + lists, team, group, 4), DType::I64)?,
            bins: op.zeros((1 + lists, team, 256), DType::U32)?,
            lists,
            team,
            group,
        })
    }

    /// The same for launches of this thread one after the other, made once for a shape: they leave it as they found it.
    pub(super) fn kept(like: &Tensor, rows: usize, q_heads: usize, list_heads: usize) -> Result<Arc<Self>> {
        let key = (rows, q_heads, list_heads);
        let same = |(known, of): &&((usize, usize, usize), Arc<Self>)| {
            *known == key && of.sync.device().same_device(like.device())
        };
        let found = KEPT.with_borrow_mut(|kept| kept.iter().position(|of| same(&of)).and_then(|at| kept.remove(at)));
        let of = match found {
            Some((_, found)) => found,
            None => Arc::new(Self::new(like, rows, q_heads, list_heads)?),
        };
        // The least lately used go first.
        KEPT.with_borrow_mut(|kept| {
            kept.push_front((key, of.clone()));
            kept.truncate(SCRATCHES);
        });
        Ok(of)
    }

    pub(super) fn check(&self, op: &Op, lists: usize, group: usize) -> Result<()> {
        let got = format!("for {} lists of groups of {}", self.lists, self.group);
        op.check((self.lists, self.group) == (lists, group), "scratch", got, format_args!("{lists} lists of {group}"))
    }
}

/// Numbers that are told of a list.
pub(super) const NUMBERS: usize = 4;

/// What a sampled step did, beside its output; all on the device.
#[derive(Debug, Clone)]
pub struct Sampled {
    /// `[R, q_heads, head_dim]`, f32.
    pub out: Tensor,
    /// Natural logarithm of each head's estimated sum of exponentials `[R, q_heads]`, f32.
    pub(super) lse: Tensor,
    /// Of each list, u32 `[NUMBERS, lists or a few more]`: what it came to (1 sampled, 2 dense since no sample keeps
    /// the promise, 3 dense since there is too little to sample from), the keys that the sample stands for, the sampled
    /// keys that were read, 0 where everything was, and of [`sampled`] those of the first look, 0 where there was none.
    pub(super) numbers: Readback,
    pub(super) lists: usize,
    /// Keys of a list's sample at most.
    pub(super) most: usize,
}

impl Sampled {
    fn number(&self, row: usize) -> Result<Tensor> {
        let each = self.lists.next_multiple_of(4);
        Ok(self.numbers.tensor((NUMBERS, each))?.get(row)?.narrow(0, 0, self.lists)?)
    }

    /// What each list came to `[R * kv_heads]`, u32: 1 sampled, 2 dense since no sample keeps the promise, 3 dense since
    /// there is too little to sample from.
    ///
    /// # Errors
    /// None that are known.
    pub fn state(&self) -> Result<Tensor> {
        self.number(0)
    }

    /// Keys that the sample stands for `[R * kv_heads]`, u32.
    ///
    /// # Errors
    /// None that are known.
    pub fn residual(&self) -> Result<Tensor> {
        self.number(1)
    }

    /// Sampled keys that were read `[R * kv_heads]`, u32; 0 where everything was.
    ///
    /// # Errors
    /// None that are known.
    pub fn counts(&self) -> Result<Tensor> {
        self.number(2)
    }

    /// Of [`sampled`], sampled keys of the first look `[R * kv_heads]`, u32; 0 where there was none.
    ///
    /// # Errors
    /// None that are known.
    pub fn first(&self) -> Result<Tensor> {
        self.number(3)
    }
}

/// Points of a list whose scores are kept: those that a sample's first few keys are among.
const FEW_POINTS: usize = 128;

/// Attends to what lists name exactly and to a sample of the rest, without replacement, of the least size for which every
/// head of the group keeps the promise. Lists name ascending, disjoint blocks and tokens, and no sample.
///
/// # Errors
/// Shapes or dtypes that differ.
///
/// # Source
/// As [`crate::decode::sample`], whose draws these are.
pub fn sampled(batch: &Batch, lists: &Lists, streams: Streams, how: &Sampling, scratch: &Scratch) -> Result<Sampled> {
    let op = Op::new("sampled", "q", batch.q)?;
    let rule = match how.promise.rule {
        Rule::Denominator => ffi::TAPER_DENOMINATOR,
        Rule::Lemma => ffi::TAPER_LEMMA,
        Rule::Tight => ffi::TAPER_TIGHT,
        Rule::Ratio => ffi::TAPER_RATIO,
        Rule::Chi2 => ffi::TAPER_CHI2,
    };
    let dims = batch.dims(&op)?;
    let Dims { rows, q_heads, head_dim, .. } = dims;
    let (count, group) = (rows * lists.heads, q_heads / lists.heads.max(1));
    scratch.check(&op, count, group)?;
    op.check(lists.heads_sampled.is_none(), "lists", "lists with a sample", "lists without one")?;
    let mut d = batch.params(&op, &dims, lists)?;
    let team = scratch.team;
    // A sample, and the points that it is of, reach no further than to where reading everything is the better bargain.
    let capacity = (how.dense_share.min(1.0) * batch.max_len as f64).ceil() as usize + BLOCK_TOKENS;
    let of = Sampled {
        out: op.empty((rows, q_heads, head_dim), DType::F32)?,
        lse: op.empty((rows, q_heads), DType::F32)?,
        // Each row begins on 16 bytes.
        numbers: Readback::new(&op, NUMBERS * count.next_multiple_of(4))?,
        lists: count,
        most: capacity,
    };
    // Room for the list that a thread block may try its code on.
    let room = count + 1;
    let parts = room * 3 * team * group;
    d.part_o = op.room("sampled-parts", parts * head_dim, DType::F32)?;
    d.part_lse = op.room("sampled-lse", parts, DType::F32)?;
    d.gather = 1;
    let promise = &how.promise;
    let mut p = TaperSampledParams {
        d,
        seeds: op.at("seeds", streams.seeds, DType::I64, [rows])?,
        positions: op.at("positions", streams.positions, DType::U32, [rows])?,
        out: op.at("out", &of.out, DType::F32, [rows, q_heads, head_dim])?,
        out_f32: 1,
        lse: op.at("lse", &of.lse, DType::F32, [rows, q_heads])?,
        sync: op.at("scratch", &scratch.sync, DType::U32, [2 + count, 32])?,
        scores: op.room("sampled-scores", room * FEW_POINTS * group, DType::F32)?,
        sums: op.room("sampled-sums", room * team * group * 4, DType::F32)?,
        state: op.at("state", &of.state()?, DType::U32, [count])?,
        residual: op.at("residual", &of.residual()?, DType::U32, [count])?,
        counts: op.at("counts", &of.counts()?, DType::U32, [count])?,
        first: op.at("first", &of.first()?, DType::U32, [count])?,
        capacity: op.int("max_len", capacity)?,
        rule,
        layer: streams.layer as i32,
        scouts: 1,
        epsilon: (promise.epsilon as f32).max(f32::MIN_POSITIVE),
        whole: promise.whole as f32,
        most: promise.most as f32,
        upper: promise.upper as f32,
        rest: promise.rest as f32,
        unseen: promise.unseen as f32,
        growth_share: GROWTH.0,
        growth_most: GROWTH.1,
        pilot_share: how.pilot_share,
        dense_share: how.dense_share,
        pilot_tokens: op.int("pilot_tokens", how.pilot_tokens)?,
        ..TaperSampledParams::zeroed()
    };
    for (i, &(vector, scalar)) in promise.splits.iter().enumerate().take(p.split_vector.len()) {
        (p.split_vector[i], p.split_scalar[i]) = (vector as f32, scalar as f32);
    }
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_sampled, &p) }?;
    Ok(of)
}

/// The first `want` keys of each list's permutation that the list leaves out `[R * heads, want]`, u32, and how many there
/// are `[R * heads]`: a larger sample begins with the smaller.
///
/// # Errors
/// Shapes or dtypes that differ, rows of more than 1.8 million tokens.
pub fn draw(lists: &Lists, streams: Streams, max_len: usize, want: usize) -> Result<(Tensor, Tensor)> {
    draw_each(lists, streams, max_len, want, (None, None))
}

/// The keys of a sampled step's samples `[R * heads, most]`, u32, beside `lists`, which the step was given: of each list as
/// many as it read, where it read a sample. Those are the first so many that the list leaves out, whose last is among the points
/// that the sample was of.
pub(super) fn sampled_keys(lists: &Lists, streams: Streams, max_len: usize, of: &Sampled) -> Result<Tensor> {
    Ok(draw_each(lists, streams, max_len, of.most, (Some(&of.counts()?), Some(&of.state()?)))?.0)
}

/// The same of as many keys of each list as `wants` `[R * heads]`, u32, says, at most `most`, and where `states` are given of
/// those alone that are sampled; what lies behind them is unwritten.
pub(super) fn draw_each(
    lists: &Lists,
    streams: Streams,
    max_len: usize,
    most: usize,
    (wants, states): (Option<&Tensor>, Option<&Tensor>),
) -> Result<(Tensor, Tensor)> {
    let op = Op::new("draw", "lists", &lists.work)?;
    let count = lists.rows * lists.heads;
    op.check(most > 0 && max_len > 0, "want", most, "at least 1")?;
    let (ids, counts) = (op.empty((count, most), DType::U32)?, op.empty(count, DType::U32)?);
    let p = TaperSampleParams {
        work: op.at("lists", &lists.work, DType::U32, [count, WORDS])?,
        block_ids: op.pool("lists", lists.block_ids.as_deref())?,
        token_ids: op.pool("lists", lists.token_ids.as_deref())?,
        seeds: op.at("seeds", streams.seeds, DType::I64, [lists.rows])?,
        positions: op.at("positions", streams.positions, DType::U32, [lists.rows])?,
        wants: op.maybe("wants", wants, DType::U32, [count])?,
        states: op.maybe("states", states, DType::U32, [count])?,
        ids: op.at("ids", &ids, DType::U32, [count, most])?,
        counts: op.at("counts", &counts, DType::U32, [count])?,
        layer: streams.layer,
        rows: op.int("lists", lists.rows)?,
        list_heads: op.int("lists", lists.heads)?,
        capacity: op.int("want", most)?,
        want: op.int("want", most)?,
        max_len: op.int("max_len", max_len)?,
        state: ffi::TAPER_SAMPLED as u32,
        token_shift: lists.token_shift as i32,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_sample, &p) }?;
    Ok((ids, counts))
}
