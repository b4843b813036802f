//! One query over and over: what a decode method's draws come to.

use super::{Part, Sequence, StepRotations, row};
use crate::audit;
use crate::layer::{AttentionShape, Rotary};
use crate::method::{DecodeStep, Earlier};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;
use taper_kernels::decode::{Budget, Decode, DecodeRow, Selection, attend};
use taper_kernels::philox::Stream;
use taper_kv_cache::KvPool;

/// What came of some draws.
pub struct Replay {
    /// Relative errors ‖o − o_dense‖₂ / ‖o_dense‖₂ `[draws, q_heads]`; 0 where both norms are.
    pub errors: Vec<f32>,
    /// Keys read `[draws, kv_heads]`.
    pub keys: Vec<usize>,
    /// Keys that there are.
    pub visible: usize,
    /// Budgets `[draws, q_heads]` of a method that samples to keep a promise.
    pub budgets: Option<Vec<Budget>>,
    /// What the method promises: (epsilon, delta).
    pub promise: Option<(f64, f64)>,
}

/// Attends by the sequence's decode method for its last cached token in one layer, with queries `q`
/// `[1, q_heads, head_dim]`, f32, after the rotary embedding, once for each seed. A method that chooses by the queries of the
/// token before is given these, alike, or finds the last token's own. The sequence is left as it is.
///
/// # Errors
/// An empty sequence, queries of another shape, a layer that is not there; a device error.
pub fn replay(
    (shape, rotary, pool): (AttentionShape, &dyn Rotary, &mut KvPool),
    sequence: &Sequence,
    layer: usize,
    (q, before): (&Tensor, Option<&Tensor>),
    seeds: &[u64],
) -> Result<Replay> {
    let end = sequence.len;
    let fits = |q: &Tensor| q.dims() == [1, shape.q_heads, shape.head_dim];
    if end == 0 || layer >= shape.layers || !fits(q) || !before.is_none_or(fits) {
        let before = before.map(Tensor::dims);
        bail!(
            "replay: queries {:?}, before {before:?}, in layer {layer} of a sequence of {end} tokens; the model has {shape:?}",
            q.dims()
        );
    }
    let rotations = &StepRotations::new(rotary, [sequence.prompt]);
    let mut part = Part { shape, rotations, pool, layer, catches_up: true, puts_off: false, ahead: &mut Vec::new() };
    let method = sequence.spec.decode.method.clone();
    let indices = part.indices(&*method, &[], sequence.prompt, &[(&sequence.table, end)])?;
    let row = row(shape, sequence, end - 1);
    let kv = part.pool.layer(layer);
    let dense = Decode { q, kv, rows: std::slice::from_ref(&row) };
    let dense = attend(&dense, &Selection::dense(1, shape.kv_heads), None)?;
    let (rows, streams): (Vec<DecodeRow>, Vec<Stream>) =
        seeds.iter().map(|&seed| (row.clone(), part.stream(seed, end - 1))).unzip();
    let before = |some: Range<usize>| before.unwrap_or(q).repeat((some.len(), 1, 1));
    let q = &q.repeat((seeds.len(), 1, 1))?;
    let step = DecodeStep {
        batch: Decode { q, kv, rows: &rows },
        earlier: method.ahead().then(|| Earlier::new(&before, rows.len(), None)),
        layer,
        kv_heads: shape.kv_heads,
        streams: &streams,
        indices: &indices,
        rotation: rotations.of(sequence.prompt),
    };
    let (choice, out) = step.run(&*method)?;
    let errors = audit::errors(&out, &dense.repeat((seeds.len(), 1, 1))?)?;
    let keys = choice.selection.counts(&rows)?;
    let budgets = match choice.selection.budgets()? {
        Some(budgets) => Some(budgets),
        None => choice.budgets,
    };
    Ok(Replay { errors, keys, visible: row.visible.len(), budgets, promise: method.promise() })
}
