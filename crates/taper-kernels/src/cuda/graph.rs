//! A step as CUDA graphs: the launches of all layers, where they are the same in every step, are queued by a few calls.
//!
//! A step of rows that read ranges has [inputs](StepInputs) of its own, and its layers are not asked again: [`plain_step`]. Any
//! other goes through its layers each time, by a [tape](super::tape): [`repeated_step`]. Graphs are made when a step of their
//! kind comes for the second time.

use super::batch::{Batch, Lists, WORDS};
use super::decode::{Plan, forget_plans};
use super::error::Result;
use super::layer::append_joint_at;
use super::op::Op;
use super::product::takes_sixteen;
use super::tape::{self, Tape};
use super::words::Words;
use crate::GRAPH_BYTES;
use crate::decode::{DecodeRow, HeadSelection};
use crate::kv::{BLOCK_TOKENS, PagedKv};
use candle_core::{DType, Tensor, TensorId};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;

/// Most rows of such a step: where there are more, the host is not what limits.
const ROWS_MAX: usize = 32;
/// Tables are as wide as a multiple of so many blocks, so that a sequence's graph lasts.
const TABLE_BLOCKS: usize = 64;
/// Graphs that a thread keeps.
const GRAPHS: usize = 16;
/// Steps that a tape has to last for, or its kind has none for some steps: at first for so many, for twice as many each time that
/// this happens again, and for so many at most.
const STEPS_LEAST: usize = 8;
const STEPS_WITHOUT: (usize, usize) = (8, 256);

/// What the launches of a step read that is another in the next, at addresses that stay.
#[derive(Debug)]
pub struct StepInputs {
    /// The rows' residual stream `[R, hidden]`, f32: embeddings before a step, what the layers made of them after it.
    pub x: Tensor,
    /// Cosines and sines of each row's position `[R, head_dim]`, f32.
    pub angles: Tensor,
    /// Slots, tables and lists, one after the other, and what they are.
    words: Tensor,
    written: Vec<u32>,
    slots: Tensor,
    tables: Tensor,
    lists: Lists,
    /// Only lengths up to the tables' end are looked at.
    lens: Tensor,
}

impl StepInputs {
    fn new(op: &Op, x: &Tensor, angles: &Tensor, (stride, heads): (usize, usize)) -> Result<Self> {
        let rows = x.dim(0)?;
        let (tables, lists) = (rows * stride, rows * heads * WORDS);
        let slots = rows.next_multiple_of(4);
        let words = op.zeros(slots + tables + lists, DType::U32)?;
        let part = |start: usize, shape: (usize, usize)| words.narrow(0, start, shape.0 * shape.1)?.reshape(shape);
        Ok(Self {
            x: x.copy()?,
            angles: angles.copy()?,
            slots: words.narrow(0, 0, rows)?,
            tables: part(slots, (rows, stride))?,
            lists: Lists::over(part(slots + tables, (rows * heads, WORDS))?, rows, heads),
            lens: words.narrow(0, 0, rows)?,
            written: vec![0; words.elem_count()],
            words,
        })
    }

    fn write(&mut self, op: &Op, step: &PlainStep, lists: &[u32]) -> Result<()> {
        let PlainStep { x, angles, slots, rows, .. } = *step;
        let stride = self.tables.dim(1)?;
        let mut words = slots.to_vec();
        words.resize(slots.len().next_multiple_of(4), 0);
        for row in rows {
            let end = words.len() + stride;
            words.extend(&row.table[..row.visible.end.div_ceil(BLOCK_TOKENS)]);
            words.resize(end, 0);
        }
        words.extend(lists);
        op.check(words.len() == self.written.len(), "step", words.len(), self.written.len())?;
        let at: *mut u32 = op.at("step", &self.words, DType::U32, [words.len()])?;
        let mut sent = Words::new(op.cuda_stream().cu_stream());
        sent.copy_tensor(op, x, &self.x)?;
        sent.copy_tensor(op, angles, &self.angles)?;
        for run in changed(&self.written, &words) {
            let to = at.wrapping_add(run.start) as u64;
            // SAFETY: the words lie within the tensor, which is read by this step's launches behind it.
            unsafe { sent.write(to, bytemuck::cast_slice(&words[run])) };
        }
        sent.send(op)?;
        self.written = words;
        Ok(())
    }

    /// Rotates queries and keys of joint projections, stores keys and values and returns the queries.
    ///
    /// # Errors
    /// As of [`crate::kv::append_joint`].
    pub fn append(&self, kv: PagedKv, qkv: &Tensor) -> Result<Tensor> {
        append_joint_at(kv, qkv, &self.angles, &self.slots, None)
    }

    /// Attends for queries `[R, q_heads, head_dim]`; `plan` is made by the first layer. Returns `[R, q_heads, head_dim]` as the
    /// product with a weight of that dtype takes it.
    ///
    /// # Errors
    /// Shapes or dtypes that differ.
    pub fn attend(&self, kv: PagedKv, q: &Tensor, plan: &mut Option<Plan>, weight: DType) -> Result<Tensor> {
        let out = if takes_sixteen(q.dim(0)?) && weight == kv.k.dtype() { weight } else { DType::F32 };
        let max_len = self.tables.dim(1)? * BLOCK_TOKENS;
        let batch = Batch { q, kv, tables: &self.tables, lens: &self.lens, max_len };
        let plan = match plan {
            Some(plan) => plan,
            None => plan.insert(Plan::shared(self.lists.clone(), &batch)?),
        };
        Ok(plan.attend(&batch, None, out)?.0)
    }
}

/// Words that are as they were, between two that are not, that are sent all the same.
const SENT_BETWEEN: usize = 16;

/// Where words differ, as few ranges.
fn changed(before: &[u32], now: &[u32]) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for at in (0..now.len()).filter(|&at| before[at] != now[at]) {
        match ranges.last_mut().filter(|last| at - last.end <= SENT_BETWEEN) {
            Some(last) => last.end = at + 1,
            None => ranges.push(at..at + 1),
        }
    }
    ranges
}

/// What a graph was made for: the first weight and cache, rows, and what they read.
type Key = (TensorId, TensorId, usize, Reads);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// Ranges, by tables of this width.
    Ranges(usize),
    /// What the layers choose, by something of this name.
    Chosen(u64),
}

enum Known {
    /// A step of its kind has been; so many are to come before a tape is made, and for so many had been without one before.
    Seen {
        left: usize,
        without: usize,
    },
    Ranges(StepInputs, Tape),
    /// The residual stream and angles, how many steps have gone by the tape, and for how many there was none before.
    Chosen([Tensor; 2], Tape, usize, usize),
}

impl Known {
    const FIRST: Self = Self::Seen { left: 0, without: 0 };

    /// Behind a tape that did not last.
    fn without(before: usize) -> Self {
        let (first, most) = STEPS_WITHOUT;
        let steps = (2 * before).clamp(first, most);
        Self::Seen { left: steps, without: steps }
    }

    /// Bytes that it holds for what its launches make.
    fn bytes(&self) -> usize {
        match self {
            Self::Seen { .. } => 0,
            Self::Ranges(_, tape) | Self::Chosen(_, tape, ..) => tape.bytes,
        }
    }
}

thread_local! {
    static KNOWN: RefCell<VecDeque<(Key, Known)>> = RefCell::default();
    static STEPS: Cell<usize> = const { Cell::new(0) };
}

/// Steps of this thread that were queued as graphs.
pub fn graph_steps() -> usize {
    STEPS.get()
}

/// What is known of a kind of step, which [`keep`] takes back.
fn known(key: Key) -> Option<Known> {
    KNOWN.with_borrow_mut(|known| {
        let at = known.iter().position(|(of, _)| *of == key)?;
        known.remove(at).map(|(_, known)| known)
    })
}

fn keep(key: Key, next: Known) {
    KNOWN.with_borrow_mut(|known| {
        known.push_front((key, next));
        known.truncate(GRAPHS);
        // The least lately used go first.
        let mut held = 0;
        known.retain(|(_, of)| {
            held += of.bytes();
            held <= GRAPH_BYTES
        });
    });
}

/// Goes through the layers by the thread's tape, which it has no longer then: the tape, where a step can go by it.
fn by_tape(op: &Op, layers: impl FnOnce() -> candle_core::Result<()>) -> Result<Option<Tape>> {
    /// Ends it if the layers fail or panic.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            tape::give_up();
        }
    }
    let _end = End;
    forget_plans();
    let ran = layers();
    forget_plans();
    ran?;
    tape::take().map_or(Ok(None), |tape| tape.finish(op))
}

/// A step whose tokens are rows that each read ranges, the same in every layer.
#[derive(Debug, Clone, Copy)]
pub struct PlainStep<'a> {
    /// The rows' embeddings `[R, hidden]`, f32.
    pub x: &'a Tensor,
    /// Cosines and sines of each row's position `[R, head_dim]`, f32.
    pub angles: &'a Tensor,
    /// Where each row's keys and values go (`block * 64 + row`).
    pub slots: &'a [u32],
    /// What each row sees, itself included.
    pub rows: &'a [DecodeRow<'a>],
    /// What each row and KV head reads of it `[R, kv_heads]`; what is more than two ranges has no graph.
    pub selection: &'a [HeadSelection],
    /// The first layer's cache.
    pub kv: PagedKv<'a>,
    /// Query heads of a layer.
    pub q_heads: usize,
    /// The first layer's first weight, which says whose layers they are.
    pub weight: &'a Tensor,
}

/// Runs all layers of such a step by its graph and returns `[R, hidden]`, f32, of which the next step makes its own; none, and
/// nothing is done, where there is no graph yet. `layers` queues the launches, which read the inputs given and no others, and
/// make tensors by this library's operations alone.
///
/// # Errors
/// A slot or block beyond the cache, and whatever `layers` says.
pub fn plain_step(
    step: &PlainStep,
    mut layers: impl FnMut(&StepInputs) -> candle_core::Result<()>,
) -> Result<Option<Tensor>> {
    let op = Op::new("plain_step", "x", step.x)?;
    let (blocks, heads, _) = step.kv.dims()?;
    let rows = step.rows.len();
    if rows == 0 || rows > ROWS_MAX || step.slots.len() != rows {
        return Ok(None);
    }
    let wide = |row: &DecodeRow| row.visible.end.div_ceil(BLOCK_TOKENS);
    let within = |row: &DecodeRow| row.table[..wide(row)].iter().all(|&block| (block as usize) < blocks);
    let inside = step.slots.iter().all(|&slot| (slot as usize) < blocks * BLOCK_TOKENS);
    op.check(inside && step.rows.iter().all(within), "rows", "beyond the cache", format_args!("{blocks} blocks"))?;
    op.check(step.selection.len() == rows * heads, "selection", step.selection.len(), rows * heads)?;
    let Some(lists) = Lists::range_words(step.rows, step.selection) else { return Ok(None) };
    let stride = step.rows.iter().map(wide).max().unwrap_or(1).next_multiple_of(TABLE_BLOCKS);
    let key = (step.weight.id(), step.kv.k.id(), rows, Reads::Ranges(stride));
    let (next, out) = match known(key) {
        Some(Known::Seen { left: 0, .. }) => {
            let mut inputs = StepInputs::new(&op, step.x, step.angles, (stride, heads))?;
            // Once as it is: this is the step.
            inputs.write(&op, step, &lists)?;
            tape::record(&op);
            let tape = by_tape(&op, || layers(&inputs))?;
            let out = inputs.x.copy()?;
            match tape {
                Some(tape) => (Known::Ranges(inputs, tape), Some(out)),
                None => (Known::Seen { left: usize::MAX, without: 0 }, Some(out)),
            }
        }
        Some(Known::Ranges(mut inputs, tape)) => {
            inputs.write(&op, step, &lists)?;
            tape.queue(&op)?;
            STEPS.set(STEPS.get() + 1);
            let out = inputs.x.clone();
            (Known::Ranges(inputs, tape), Some(out))
        }
        Some(Known::Seen { left, without }) => (Known::Seen { left: left - 1, without }, None),
        None | Some(Known::Chosen(..)) => (Known::FIRST, None),
    };
    keep(key, next);
    Ok(out)
}

/// A step whose tokens are rows that read what each layer chooses.
#[derive(Debug, Clone, Copy)]
pub struct RepeatedStep<'a> {
    /// The rows' embeddings `[R, hidden]`, f32.
    pub x: &'a Tensor,
    /// Cosines and sines of each row's position `[R, head_dim]`, f32.
    pub angles: &'a Tensor,
    /// A number for how they choose.
    pub kind: u64,
    /// The first layer's keys, and its first weight, which say whose cache and layers they are.
    pub k: &'a Tensor,
    /// As said.
    pub weight: &'a Tensor,
}

/// Runs all layers of such a step and returns `[R, hidden]`, f32, of which the next step makes its own; none, and nothing is
/// done, where there has been no step of its kind before. `layers` goes through them, in place, with the residual stream and
/// the angles that it is given, and does all that a step does on the host; what they queue is queued by a few calls, where it is
/// what it was before.
///
/// # Errors
/// Whatever `layers` says, and the device.
pub fn repeated_step(
    step: &RepeatedStep,
    layers: impl FnOnce(&Tensor, &Tensor) -> candle_core::Result<()>,
) -> Result<Option<Tensor>> {
    let op = Op::new("repeated_step", "x", step.x)?;
    let rows = step.x.dim(0)?;
    if rows == 0 || rows > ROWS_MAX {
        return Ok(None);
    }
    let key = (step.weight.id(), step.k.id(), rows, Reads::Chosen(step.kind));
    let (inputs, steps, without) = match known(key) {
        Some(Known::Seen { left: 0, without }) => {
            let inputs = [step.x.copy()?, step.angles.copy()?];
            tape::record(&op);
            (inputs, 0, without)
        }
        Some(Known::Chosen(inputs, tape, steps, without)) => {
            let copies = [(step.x, &inputs[0]), (step.angles, &inputs[1])];
            tape::follow(tape, copies.map(|(from, to)| [from.clone(), to.clone()]).to_vec());
            (inputs, steps + 1, without)
        }
        Some(Known::Seen { left, without }) => {
            keep(key, Known::Seen { left: left - 1, without });
            return Ok(None);
        }
        None | Some(Known::Ranges(..)) => {
            keep(key, Known::FIRST);
            return Ok(None);
        }
    };
    let tape = by_tape(&op, || layers(&inputs[0], &inputs[1]));
    let tape = tape.inspect_err(|_| keep(key, Known::without(without)))?;
    let out = inputs[0].clone();
    let next = match tape {
        Some(tape) => {
            STEPS.set(STEPS.get() + usize::from(steps > 0));
            Known::Chosen(inputs, tape, steps, without)
        }
        None if steps < STEPS_LEAST => Known::without(without),
        None => Known::FIRST,
    };
    keep(key, next);
    Ok(Some(out))
}

#[cfg(test)]
mod tests {
    use super::changed;

    #[test]
    fn words_are_sent_where_they_differ_and_between_when_few_lie_there() {
        let before = vec![7u32; 100];
        let mut now = before.clone();
        assert!(changed(&before, &now).is_empty());
        for at in [0, 3, 20, 37, 99] {
            now[at] = 1;
        }
        assert_eq!(changed(&before, &now), [0..38, 99..100]);
        now[20] = 7;
        assert_eq!(changed(&before, &now), [0..4, 37..38, 99..100]);
    }
}
