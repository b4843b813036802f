//! A small f32 matrix product for tiles that fit in the cache; the inner loop of prefill attention.

use crate::simd::Simd;

/// Operands of [`gemm`]: row-major, strides in elements.
pub struct Gemm {
    /// `[m, k]`, rows `lda` apart.
    pub a: *const f32,
    /// Row stride of `a`.
    pub lda: usize,
    /// `[k, n]`, rows `ldb` apart.
    pub b: *const f32,
    /// Row stride of `b`.
    pub ldb: usize,
    /// `[m, n]`, rows `ldc` apart.
    pub c: *mut f32,
    /// Row stride of `c`.
    pub ldc: usize,
    /// Rows of `a` and `c`.
    pub m: usize,
    /// Columns of `b` and `c`; a multiple of two vectors.
    pub n: usize,
    /// Columns of `a`, rows of `b`.
    pub k: usize,
}

/// `c = a b`, or `c += a b` if `ACCUMULATE`.
///
/// # Safety
/// The pointers cover their matrices and `c` overlaps neither `a` nor `b`; `V`'s instruction set exists.
#[inline(always)]
pub unsafe fn gemm<V: Simd, const ACCUMULATE: bool>(g: &Gemm) {
    assert!(g.n.is_multiple_of(2 * V::LANES));
    let mut row = 0;
    while row < g.m {
        let rows = (g.m - row).min(6);
        for col in (0..g.n).step_by(2 * V::LANES) {
            unsafe {
                match rows {
                    6 => tile::<V, 6, ACCUMULATE>(g, row, col),
                    5 => tile::<V, 5, ACCUMULATE>(g, row, col),
                    4 => tile::<V, 4, ACCUMULATE>(g, row, col),
                    3 => tile::<V, 3, ACCUMULATE>(g, row, col),
                    2 => tile::<V, 2, ACCUMULATE>(g, row, col),
                    _ => tile::<V, 1, ACCUMULATE>(g, row, col),
                }
            }
        }
        row += rows;
    }
}

/// `R` rows by two vectors of columns, accumulated in registers.
#[inline(always)]
unsafe fn tile<V: Simd, const R: usize, const ACCUMULATE: bool>(g: &Gemm, row: usize, col: usize) {
    unsafe {
        let c = |r: usize| g.c.add((row + r) * g.ldc + col);
        let mut acc = [[V::splat(0.0); 2]; R];
        if ACCUMULATE {
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = [V::load(c(r)), V::load(c(r).add(V::LANES))];
            }
        }
        let mut b = g.b.add(col);
        let a = g.a.add(row * g.lda);
        for k in 0..g.k {
            let (b0, b1) = (V::load(b), V::load(b.add(V::LANES)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = V::splat(*a.add(r * g.lda + k));
                acc[0] = x.mul_add(b0, acc[0]);
                acc[1] = x.mul_add(b1, acc[1]);
            }
            b = b.add(g.ldb);
        }
        for (r, acc) in acc.iter().enumerate() {
            acc[0].store(c(r));
            acc[1].store(c(r).add(V::LANES));
        }
    }
}
