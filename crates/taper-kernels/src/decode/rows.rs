//! The two products of decode attention over rows gathered from the cache: queries by keys, and weights by values.

use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::simd::{Simd, prefetch};

/// Running maximum, sum and weighted values of one query head, as they lie in a buffer: `[max, sum, values…]`.
pub(super) struct Partial;

impl Partial {
    pub const fn width(head_dim: usize) -> usize {
        2 + head_dim
    }
}

/// Rows of keys or values, wherever they lie.
#[derive(Clone, Copy)]
pub(crate) struct Gathered<'a, T> {
    pub rows: &'a [*const T],
    /// Rows to be read after them: asked for a few at a time, since memory brings only so many at once.
    pub ahead: &'a [*const T],
}

/// Scaled dot products of every query `[group, d]` with every row, into lines `stride` apart.
///
/// # Safety
/// Keys cover `d` elements each; every line of `out` covers the keys; `V`'s instruction set exists.
#[inline(always)]
pub(crate) unsafe fn dots<V: Simd, T: KvElement>(
    q: &[f32],
    d: usize,
    mut keys: Gathered<T>,
    scale: f32,
    mut out: *mut f32,
    stride: usize,
) {
    // At most three queries by as many keys as leave registers for what is multiplied.
    let group = q.len() / d;
    let queries = group.div_ceil(group.div_ceil(3));
    for q in q.chunks(queries * d) {
        unsafe {
            match q.len() / d {
                3 if V::REGISTERS < 32 => dots_of::<V, T, 3, 3>(q, d, keys, scale, out, stride),
                3 => dots_of::<V, T, 3, 4>(q, d, keys, scale, out, stride),
                2 => dots_of::<V, T, 2, 4>(q, d, keys, scale, out, stride),
                _ => dots_of::<V, T, 1, 4>(q, d, keys, scale, out, stride),
            }
            // May pass the end after the last lines; never read there.
            out = out.wrapping_add(queries * stride);
            keys.ahead = &[];
        }
    }
}

/// `G` (at most 3) queries by all keys, `K` (at most 4) of them at a time.
#[inline(always)]
unsafe fn dots_of<V: Simd, T: KvElement, const G: usize, const K: usize>(
    q: &[f32],
    d: usize,
    Gathered { rows: keys, ahead }: Gathered<T>,
    scale: f32,
    out: *mut f32,
    stride: usize,
) {
    let asked = ahead.len().div_ceil((keys.len() / K).max(1));
    let (tiles, rest) = keys.as_chunks::<K>();
    for (t, keys) in tiles.iter().enumerate() {
        ahead.iter().skip(t * asked).take(asked).for_each(|&row| prefetch(row, d));
        unsafe { tile::<V, T, G, K>(q, d, keys, scale, out.add(K * t), stride) };
    }
    for (t, &key) in rest.iter().enumerate() {
        unsafe { tile::<V, T, G, 1>(q, d, &[key], scale, out.add(K * tiles.len() + t), stride) };
    }
}

/// `G` queries by `K` keys: as many sums in registers. A key's score does not depend on its neighbours.
#[inline(always)]
unsafe fn tile<V: Simd, T: KvElement, const G: usize, const K: usize>(
    q: &[f32],
    d: usize,
    keys: &[*const T; K],
    scale: f32,
    out: *mut f32,
    stride: usize,
) {
    let whole = d - d % V::LANES;
    unsafe {
        let mut acc = [[V::splat(0.0); K]; G];
        for c in (0..whole).step_by(V::LANES) {
            let mut q_c = [V::splat(0.0); G];
            for (g, q_c) in q_c.iter_mut().enumerate() {
                *q_c = V::load(q.as_ptr().add(g * d + c));
            }
            for (i, key) in keys.iter().enumerate() {
                let k = T::load::<V>(key.add(c));
                for (acc, q_c) in acc.iter_mut().zip(q_c) {
                    acc[i] = k.mul_add(q_c, acc[i]);
                }
            }
        }
        // Not a loop: it would keep the sums in memory.
        let line = |g: usize| (acc[g], &q[g * d..(g + 1) * d], out.wrapping_add(g * stride));
        finish::<V, T, K>(line(0), keys, scale);
        if G > 1 {
            finish::<V, T, K>(line(1), keys, scale);
        }
        if G > 2 {
            finish::<V, T, K>(line(2), keys, scale);
        }
    }
}

/// Adds up the lanes of a query's sums with its keys, and what is no whole vector of them, and writes the scores.
#[inline(always)]
unsafe fn finish<V: Simd, T: KvElement, const K: usize>(
    (acc, q, out): ([V; K], &[f32], *mut f32),
    keys: &[*const T; K],
    scale: f32,
) {
    unsafe {
        let mut scores = V::sum4([acc[0], acc[1 % K], acc[2 % K], acc[3 % K]]);
        let whole = q.len() - q.len() % V::LANES;
        for (c, q) in q.iter().enumerate().skip(whole) {
            for (score, key) in scores.iter_mut().zip(keys) {
                *score += (*key.add(c)).to_f32() * q;
            }
        }
        let mut scaled = [0f32; K];
        scaled.iter_mut().zip(scores).for_each(|(scaled, score)| *scaled = score * scale);
        out.cast::<[f32; K]>().write_unaligned(scaled);
    }
}

/// Adds rows, at most a block, to the partials `[group, 2 + d]`, weighted by lines `[group, 64]`.
///
/// # Safety
/// Rows cover `d` elements each; `V`'s instruction set exists.
#[inline(always)]
pub(super) unsafe fn add_values<V: Simd, T: KvElement>(
    weights: &[f32],
    mut values: Gathered<T>,
    d: usize,
    partial: &mut [f32],
) {
    let width = Partial::width(d);
    for (weights, partial) in weights.chunks(4 * BLOCK_TOKENS).zip(partial.chunks_mut(4 * width)) {
        unsafe {
            match weights.len() / BLOCK_TOKENS {
                4 => add_values_of::<V, T, 4>(weights, values, d, partial),
                3 => add_values_of::<V, T, 3>(weights, values, d, partial),
                2 => add_values_of::<V, T, 2>(weights, values, d, partial),
                _ => add_values_of::<V, T, 1>(weights, values, d, partial),
            }
        }
        values.ahead = &[];
    }
}

#[inline(always)]
unsafe fn add_values_of<V: Simd, T: KvElement, const G: usize>(
    weights: &[f32],
    mut values: Gathered<T>,
    d: usize,
    partial: &mut [f32],
) {
    let whole = d - d % V::LANES;
    let width = Partial::width(d);
    unsafe {
        let mut c = 0;
        while c < whole {
            match (whole - c) / V::LANES {
                1 => add_columns::<V, T, G, 1>(weights, values, &mut c, width, partial),
                2 => add_columns::<V, T, G, 2>(weights, values, &mut c, width, partial),
                _ if G == 4 => add_columns::<V, T, G, 2>(weights, values, &mut c, width, partial),
                4.. if V::REGISTERS >= 32 || G < 3 => {
                    add_columns::<V, T, G, 4>(weights, values, &mut c, width, partial)
                }
                _ => add_columns::<V, T, G, 3>(weights, values, &mut c, width, partial),
            }
            values.ahead = &[];
        }
        for (t, &value) in values.rows.iter().enumerate() {
            for c in whole..d {
                for g in 0..G {
                    partial[g * width + 2 + c] += weights[g * BLOCK_TOKENS + t] * (*value.add(c)).to_f32();
                }
            }
        }
    }
}

/// `C` vectors of columns from `column` on, which moves past them, of `G` heads, accumulated in registers.
#[inline(always)]
unsafe fn add_columns<V: Simd, T: KvElement, const G: usize, const C: usize>(
    weights: &[f32],
    Gathered { rows: values, ahead }: Gathered<T>,
    column: &mut usize,
    width: usize,
    partial: &mut [f32],
) {
    let (c, d) = (*column, width - Partial::width(0));
    *column += C * V::LANES;
    unsafe {
        let at = |g: usize, i: usize| g * width + 2 + c + i * V::LANES;
        let mut acc = [[V::splat(0.0); C]; G];
        for (g, acc) in acc.iter_mut().enumerate() {
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = V::load(partial.as_ptr().add(at(g, i)));
            }
        }
        for (t, &value) in values.iter().enumerate() {
            if let Some(&row) = ahead.get(t) {
                prefetch(row, d);
            }
            let mut weight = [V::splat(0.0); G];
            for (g, weight) in weight.iter_mut().enumerate() {
                *weight = V::splat(*weights.get_unchecked(g * BLOCK_TOKENS + t));
            }
            for i in 0..C {
                let v = T::load::<V>(value.add(c + i * V::LANES));
                for (acc, weight) in acc.iter_mut().zip(weight) {
                    acc[i] = weight.mul_add(v, acc[i]);
                }
            }
        }
        for (g, acc) in acc.iter().enumerate() {
            for (i, acc) in acc.iter().enumerate() {
                acc.store(partial.as_mut_ptr().add(at(g, i)));
            }
        }
    }
}
