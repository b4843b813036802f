//! The online softmax of one line of 64 scores; every attention kernel's second step.

use crate::kv::BLOCK_TOKENS;
use crate::simd::{Simd, exp};

/// Turns a line of 64 scores into weights relative to the running maximum; rescales the sum and the output so far when
/// the maximum rises. A line of -inf alone becomes zeros; so does one of NaN, and the sum NaN.
///
/// # Safety
/// `V`'s instruction set exists.
#[inline(always)]
pub unsafe fn softmax_line<V: Simd>(scores: &mut [f32], max: &mut f32, sum: &mut f32, out: &mut [f32]) {
    assert_eq!(scores.len(), BLOCK_TOKENS);
    unsafe {
        let mut top = V::load(scores.as_ptr());
        for at in (V::LANES..BLOCK_TOKENS).step_by(V::LANES) {
            top = top.max(V::load(scores.as_ptr().add(at)));
        }
        let top = top.max_lane().max(*max);
        if top == f32::NEG_INFINITY {
            // No maximum shows what is NaN.
            if scores.iter().any(|score| score.is_nan()) {
                *sum = f32::NAN;
            }
            scores.fill(0.0);
            return;
        }
        if top > *max {
            let rescale = (*max - top).exp();
            *sum *= rescale;
            out.iter_mut().for_each(|o| *o *= rescale);
            *max = top;
        }
        let mut total = V::splat(0.0);
        for at in (0..BLOCK_TOKENS).step_by(V::LANES) {
            let p = scores.as_mut_ptr().add(at);
            let weight = exp(V::load(p).sub(V::splat(top)));
            total = total.add(weight);
            weight.store(p);
        }
        *sum += total.sum();
    }
}
