//! A step of some rows that read ranges as a CUDA graph: all layers' launches, which are the same in every step, are queued by
//! one call.
//!
//! A step's graph is made when a step of its kind comes for the second time: its launches go once as they are, so that all
//! memory is there, and are captured the second time, into the same memory. What differs from step to step lies in
//! [`StepInputs`].

use super::batch::{Batch, Lists, WORDS};
use super::decode::{Plan, hold_partials};
use super::error::Result;
use super::layer::append_joint_at;
use super::op::{Op, record, recorded, repeat};
use super::product::takes_sixteen;
use crate::decode::{DecodeRow, HeadSelection};
use crate::kv::{BLOCK_TOKENS, PagedKv};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, sys};
use candle_core::{DType, Tensor, TensorId};
use std::cell::RefCell;
use std::collections::VecDeque;

/// Most rows of such a step, and most bytes that its launches make between its beginning and its end: where there are more, the
/// host is not what limits.
const ROWS_MAX: usize = 32;
const MADE_BYTES_MAX: usize = 128 << 20;
/// Tables are as wide as a multiple of so many blocks, so that a sequence's graph lasts.
const TABLE_BLOCKS: usize = 64;
/// Graphs that a thread keeps, and bytes of what they make.
const GRAPHS: usize = 16;
const KEPT_BYTES_MAX: usize = 512 << 20;

/// What the launches of a step read that is another in the next, at addresses that stay.
#[derive(Debug)]
pub struct StepInputs {
    /// The rows' residual stream `[R, hidden]`, f32: embeddings before a step, what the layers made of them after it.
    pub x: Tensor,
    /// Cosines and sines of each row's position `[R, head_dim]`, f32.
    pub angles: Tensor,
    /// Slots, tables and lists, one after the other.
    words: Tensor,
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
            words,
        })
    }

    fn write(&self, op: &Op, step: &PlainStep, lists: &[u32]) -> Result<()> {
        let PlainStep { x, angles, slots, rows, .. } = *step;
        self.x.slice_set(x, 0, 0)?;
        self.angles.slice_set(angles, 0, 0)?;
        let stride = self.tables.dim(1)?;
        let mut words = slots.to_vec();
        words.resize(slots.len().next_multiple_of(4), 0);
        for row in rows {
            let end = words.len() + stride;
            words.extend(&row.table[..row.visible.end.div_ceil(BLOCK_TOKENS)]);
            words.resize(end, 0);
        }
        words.extend(lists);
        op.write("step", &self.words, &words)
    }

    /// Rotates queries and keys of joint projections, stores keys and values and returns the queries.
    ///
    /// # Errors
    /// As of [`crate::kv::append_joint`].
    pub fn append(&self, kv: PagedKv, qkv: &Tensor) -> Result<Tensor> {
        append_joint_at(kv, qkv, &self.angles, &self.slots)
    }

    /// Attends for queries `[R, q_heads, head_dim]`; `plan` is made by the first layer. Returns `[R, q_heads, head_dim]` as the
    /// product with a weight of that dtype takes it.
    ///
    /// # Errors
    /// Shapes or dtypes that differ.
    pub fn attend(&self, kv: PagedKv, q: &Tensor, plan: &mut Option<Plan>, weight: DType) -> Result<Tensor> {
        let out = if takes_sixteen(q.dim(0)?) && weight == kv.k.dtype() { weight } else { DType::F32 };
        let max_len = self.tables.dim(1)? * BLOCK_TOKENS;
        let batch = Batch { q, kv, tables: &self.tables, row_tables: None, lens: &self.lens, max_len };
        let plan = match plan {
            Some(plan) => plan,
            None => plan.insert(Plan::new(self.lists.clone(), &batch)?),
        };
        Ok(plan.attend(&batch, None, out)?.0)
    }
}

/// What a graph was made for: the first weight and cache, rows, and the tables' width.
type Key = (TensorId, TensorId, usize, usize);

enum Known {
    /// A step of its kind has been, or could not be captured.
    Seen {
        refused: bool,
    },
    Graph {
        inputs: StepInputs,
        graph: CudaGraph,
        memory: Vec<Tensor>,
    },
}

impl Known {
    /// Bytes that it holds for what its launches make.
    fn bytes(&self) -> usize {
        if let Self::Graph { memory, .. } = self { bytes(memory) } else { 0 }
    }
}

fn bytes(memory: &[Tensor]) -> usize {
    memory.iter().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum()
}

thread_local! {
    static KNOWN: RefCell<VecDeque<(Key, Known)>> = RefCell::default();
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
    let (blocks, heads, head_dim) = step.kv.dims()?;
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
    let key = (step.weight.id(), step.kv.k.id(), rows, stride);

    let known = KNOWN.with_borrow_mut(|known| {
        let at = known.iter().position(|(of, _)| *of == key)?;
        known.remove(at)
    });
    let (next, out) = match known {
        None => (Known::Seen { refused: false }, None),
        Some((_, seen @ Known::Seen { refused: true })) => (seen, None),
        Some((_, Known::Seen { refused: false })) => {
            let inputs = StepInputs::new(&op, step.x, step.angles, (stride, heads))?;
            let partials = hold_partials(&op, (rows, heads), (step.q_heads, head_dim))?;
            // Once as it is: this is the step.
            inputs.write(&op, step, &lists)?;
            record();
            let ran = layers(&inputs);
            let memory = recorded();
            ran?;
            let out = inputs.x.copy()?;
            let small = bytes(&memory) <= MADE_BYTES_MAX;
            match small.then(|| capture(&op, &memory, || layers(&inputs))).flatten() {
                Some(graph) => {
                    let memory = memory.into_iter().chain(partials).collect();
                    (Known::Graph { inputs, graph, memory }, Some(out))
                }
                None => (Known::Seen { refused: true }, Some(out)),
            }
        }
        Some((_, Known::Graph { inputs, graph, memory })) => {
            inputs.write(&op, step, &lists)?;
            graph.launch().map_err(candle_core::Error::wrap)?;
            let out = inputs.x.clone();
            (Known::Graph { inputs, graph, memory }, Some(out))
        }
    };
    KNOWN.with_borrow_mut(|known| {
        known.push_front((key, next));
        known.truncate(GRAPHS);
        // The least lately used go first.
        let mut held = 0;
        known.retain(|(_, of)| {
            held += of.bytes();
            held <= KEPT_BYTES_MAX
        });
    });
    Ok(out)
}

/// The launches as a graph, which makes tensors of the memory given, in the order of their making; none if they cannot be
/// captured.
fn capture(op: &Op, memory: &[Tensor], layers: impl FnOnce() -> candle_core::Result<()>) -> Option<CudaGraph> {
    let stream = op.cuda_stream();
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).ok()?;
    repeat(memory.to_vec());
    let queued = layers();
    let all = recorded().is_empty();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    graph.ok().flatten().filter(|_| queued.is_ok() && all)
}
