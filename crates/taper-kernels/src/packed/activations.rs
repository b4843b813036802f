//! What weights are multiplied with: activations rounded to 8 bits.

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{BLOCK, TOGETHER};
use crate::parallel::{self, SharedMut};
use crate::simd::Isa;

/// Activations `[T, inputs]` rounded to 8 bits in blocks of 32. A group of tokens lies side by side, `[T / group, blocks, group]`,
/// so that those of a tile are at fixed distances; the last group is filled up with zeros.
pub struct Activations {
    blocks: usize,
    /// Tokens of a group: eight, or fewer where there are no more, whose activations then lie in as few lines.
    group: usize,
    /// 32 a block.
    pub q: Vec<i8>,
    /// What a step is worth.
    pub scale: Vec<f32>,
    /// The sum of the rounded activations in steps.
    pub total: Vec<i32>,
    /// The same of both halves.
    pub halves: Vec<[i32; 2]>,
    /// The sum of all in units.
    pub sum: Vec<f32>,
}

impl Activations {
    pub fn round(isa: Isa, x: &[f32], inputs: usize) -> Self {
        let (tokens, blocks) = (x.len() / inputs, inputs / BLOCK);
        let together = TOGETHER.min(tokens.next_power_of_two());
        let (size, groups) = (blocks * together, tokens.div_ceil(together));
        let mut q = vec![0i8; groups * size * BLOCK];
        let (mut scale, mut sum) = (vec![0f32; groups * size], vec![0f32; groups * size]);
        let (mut total, mut halves) = (vec![0i32; groups * size], vec![[0i32; 2]; groups * size]);
        let (q_out, scale_out) = (SharedMut::new(&mut q), SharedMut::new(&mut scale));
        let (total_out, sum_out) = (SharedMut::new(&mut total), SharedMut::new(&mut sum));
        let halves_out = SharedMut::new(&mut halves);
        #[cfg(target_arch = "x86_64")]
        let round = if isa == Isa::Portable { round } else { avx2::round };
        let _ = isa;
        parallel::for_each(
            groups,
            || (),
            |(), group| {
                // SAFETY: each group has its own part.
                let (q, scale, total, halves, sum) = unsafe {
                    (
                        q_out.slice(group * size * BLOCK, size * BLOCK),
                        scale_out.slice(group * size, size),
                        total_out.slice(group * size, size),
                        halves_out.slice(group * size, size),
                        sum_out.slice(group * size, size),
                    )
                };
                let (q, _) = q.as_chunks_mut::<BLOCK>();
                let tokens = x[group * together * inputs..].chunks_exact(inputs).take(together);
                for (t, x) in tokens.enumerate() {
                    for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
                        let at = block * together + t;
                        // SAFETY: the other instruction sets include AVX2.
                        (scale[at], halves[at]) = unsafe { round(x, &mut q[at]) };
                        total[at] = halves[at][0] + halves[at][1];
                        sum[at] = total[at] as f32 * scale[at];
                    }
                }
            },
        );
        Self { blocks, group: together, q, scale, total, halves, sum }
    }

    /// The place of a token's block.
    pub fn at(&self, token: usize, block: usize) -> usize {
        (token / self.group * self.blocks + block) * self.group + token % self.group
    }
}

/// Rounds a block: what a step is worth, and the sums of the steps of both halves.
unsafe fn round(x: &[f32; BLOCK], q: &mut [i8; BLOCK]) -> (f32, [i32; 2]) {
    let largest = x.iter().fold(0f32, |a, x| a.max(x.abs()));
    let (step, inverse) = step(largest, x.iter().all(|x| x.is_finite()));
    for (q, x) in q.iter_mut().zip(x) {
        *q = (x * inverse).round_ties_even() as i8;
    }
    let sum = |half: &[i8]| half.iter().map(|q| i32::from(*q)).sum();
    (step, [sum(&q[..BLOCK / 2]), sum(&q[BLOCK / 2..])])
}

/// What a step of a block is worth, and steps in a unit. A block with NaN or infinity makes its products NaN, as floats would.
#[inline(always)]
pub fn step(largest: f32, finite: bool) -> (f32, f32) {
    let step = if finite { largest / 127.0 } else { f32::NAN };
    (step, if step > 0.0 { 1.0 / step } else { 0.0 })
}
