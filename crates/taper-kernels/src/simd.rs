//! Vectors of f32 for the CPU kernels: one trait, three instruction sets, chosen once at run time.
//!
//! A kernel is written once over [`Simd`] as an `#[inline(always)]` function and entered through [`dispatch!`], which
//! compiles it for each instruction set.

#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;
use half::{bf16, f16};
use std::cmp::Ordering;

/// The instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust, vectorised as the compiler sees fit.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F.
    Avx512,
}

impl Isa {
    /// The best one that this machine has.
    pub fn best() -> Self {
        static BEST: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
        *BEST.get_or_init(|| *Isa::available().last().expect("portable is always there"))
    }

    /// All that this machine can run, worst first.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let beside = is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if is_x86_feature_detected!("avx2") && beside && is_x86_feature_detected!("popcnt") {
                all.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f") {
                    all.push(Isa::Avx512);
                }
            }
        }
        all
    }

    /// Whether it has products of bytes that are added up four to a lane (AVX-512's VNNI).
    pub fn adds_byte_products(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512 {
            return is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni");
        }
        false
    }
}

/// A vector of f32 lanes.
///
/// # Safety
/// The methods may only run where the instruction set exists; pointers must cover `LANES` elements.
pub trait Simd: Copy {
    /// Elements of a vector.
    const LANES: usize;
    /// Vectors that the instruction set names.
    const REGISTERS: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    unsafe fn load_f16(p: *const f16) -> Self;
    unsafe fn load_bf16(p: *const bf16) -> Self;
    /// `self * b + c`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    unsafe fn add(self, o: Self) -> Self;
    unsafe fn sub(self, o: Self) -> Self;
    unsafe fn mul(self, o: Self) -> Self;
    unsafe fn max(self, o: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// `self * 2^n` where `x` is not below `limit`, else 0, whatever `self` and `n`; `n` is whole and in [-126, 127].
    unsafe fn power(self, n: Self, x: Self, limit: Self) -> Self;
    /// `self + x` where `x` is not below `limit`, else `self`.
    unsafe fn add_from(self, x: Self, limit: Self) -> Self;
    /// A bit for each lane that is not below `limit`: NaN is not.
    unsafe fn not_below(self, limit: Self) -> u32;
    /// Stores the lanes of which `lanes` has the bit side by side at `p`, where there is room for all of a vector.
    unsafe fn compress(self, lanes: u32, p: *mut f32);
    /// Stores the lowest byte of each lane, side by side.
    unsafe fn store_bytes(self, p: *mut u8);
    unsafe fn sum(self) -> f32;
    /// The sum of each of four vectors.
    unsafe fn sum4(x: [Self; 4]) -> [f32; 4];
    unsafe fn max_lane(self) -> f32;
}

/// Added to a number within a few millions it rounds that to a whole one, whose low bits are the sum's.
pub(crate) const WHOLE: f32 = 12_582_912.0;

/// `exp(x)` for `x <= 0` with a relative error below 3e-7; exactly 0 below -87 and for -inf. NaN stays NaN.
#[inline(always)]
pub unsafe fn exp<V: Simd>(x: V) -> V {
    unsafe {
        let n = x.mul_add(V::splat(std::f32::consts::LOG2_E), V::splat(WHOLE)).sub(V::splat(WHOLE));
        // ln 2 in two parts, so that n ln 2 loses nothing of the remainder.
        let r = n.mul_add(V::splat(-0.693_359_4), x);
        let r = n.mul_add(V::splat(2.121_944_4e-4), r);
        // The largest relative error over the remainders is as small as five terms can make it.
        let mut p = V::splat(8.312_501e-3);
        for c in [4.189_033e-2, 1.666_711_6e-1, 4.999_923e-1, 1.0, 1.0] {
            p = p.mul_add(r, V::splat(c));
        }
        p.power(n, x, V::splat(-87.0))
    }
}

/// exp(score − max), in place.
#[inline(always)]
pub(crate) unsafe fn exp_line<V: Simd>(line: &mut [f32], max: f32) {
    let mut chunks = line.chunks_exact_mut(V::LANES);
    for chunk in &mut chunks {
        unsafe { exp(V::load(chunk.as_ptr()).sub(V::splat(max))).store(chunk.as_mut_ptr()) };
    }
    chunks.into_remainder().iter_mut().for_each(|score| *score = (*score - max).exp());
}

/// The dot product of two slices of one length.
#[inline(always)]
pub unsafe fn dot<V: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let whole = a.len() - a.len() % V::LANES;
    unsafe {
        let mut acc = V::splat(0.0);
        for c in (0..whole).step_by(V::LANES) {
            acc = V::load(a.as_ptr().add(c)).mul_add(V::load(b.as_ptr().add(c)), acc);
        }
        acc.sum() + (whole..a.len()).map(|c| a[c] * b[c]).sum::<f32>()
    }
}

/// Eight lanes of plain Rust.
#[derive(Clone, Copy)]
pub struct Portable8([f32; 8]);

impl Portable8 {
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }

    /// Itself where `x` is not below `limit`, else 0.
    #[inline(always)]
    fn from(self, x: Self, limit: Self) -> Self {
        Self(std::array::from_fn(|i| if x.0[i] < limit.0[i] { 0.0 } else { self.0[i] }))
    }
}

impl Simd for Portable8 {
    const LANES: usize = 8;
    const REGISTERS: usize = 16;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(p.cast::<[f32; 8]>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        unsafe { Self(p.cast::<[f16; 8]>().read_unaligned().map(f16::to_f32)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        unsafe { Self(p.cast::<[bf16; 8]>().read_unaligned().map(bf16::to_f32)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        unsafe { self.mul(b).add(c) }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        self.zip(o, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    unsafe fn power(self, n: Self, x: Self, limit: Self) -> Self {
        let scaled = self.zip(n, |a, n| a * f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23));
        scaled.from(x, limit)
    }
    #[inline(always)]
    unsafe fn add_from(self, x: Self, limit: Self) -> Self {
        unsafe { self.add(x.from(x, limit)) }
    }
    #[inline(always)]
    unsafe fn not_below(self, limit: Self) -> u32 {
        (0..8).fold(0, |bits, i| bits | u32::from(self.0[i].partial_cmp(&limit.0[i]) != Some(Ordering::Less)) << i)
    }
    #[inline(always)]
    unsafe fn compress(self, lanes: u32, p: *mut f32) {
        let mut end = 0;
        for i in 0..8 {
            unsafe { p.add(end).write(self.0[i]) };
            end += (lanes >> i & 1) as usize;
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut u8) {
        unsafe { p.cast::<[u8; 8]>().write(self.0.map(|x| x.to_bits() as u8)) };
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    unsafe fn sum4(x: [Self; 4]) -> [f32; 4] {
        x.map(|x| unsafe { x.sum() })
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
}

/// Implements [`Simd`] for an x86 vector type from its intrinsics.
#[cfg(target_arch = "x86_64")]
macro_rules! simd_x86 {
    ($type:ty, $lanes:literal, $registers:literal, $splat:ident, $load:ident, $store:ident, $f16:expr, $bf16:expr,
     $fma:ident, $add:ident,
     $sub:ident, $mul:ident, $max:ident, $abs:expr, $power:expr, $add_from:expr, $not_below:expr, $compress:expr, $store_bytes:expr, $sum:expr, $sum4:expr,
     $max_lane:expr) => {
        impl Simd for $type {
            const LANES: usize = $lanes;
            const REGISTERS: usize = $registers;
            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(p: *const f32) -> Self {
                unsafe { $load(p) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut f32) {
                unsafe { $store(p, self) }
            }
            #[inline(always)]
            unsafe fn load_f16(p: *const f16) -> Self {
                unsafe { $f16(p) }
            }
            #[inline(always)]
            unsafe fn load_bf16(p: *const bf16) -> Self {
                unsafe { $bf16(p) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, b: Self, c: Self) -> Self {
                unsafe { $fma(self, b, c) }
            }
            #[inline(always)]
            unsafe fn add(self, o: Self) -> Self {
                unsafe { $add(self, o) }
            }
            #[inline(always)]
            unsafe fn sub(self, o: Self) -> Self {
                unsafe { $sub(self, o) }
            }
            #[inline(always)]
            unsafe fn mul(self, o: Self) -> Self {
                unsafe { $mul(self, o) }
            }
            #[inline(always)]
            unsafe fn max(self, o: Self) -> Self {
                unsafe { $max(self, o) }
            }
            #[inline(always)]
            unsafe fn abs(self) -> Self {
                unsafe { $abs(self) }
            }
            #[inline(always)]
            unsafe fn power(self, n: Self, x: Self, limit: Self) -> Self {
                unsafe { $power(self, n, x, limit) }
            }
            #[inline(always)]
            unsafe fn add_from(self, x: Self, limit: Self) -> Self {
                unsafe { $add_from(self, x, limit) }
            }
            #[inline(always)]
            unsafe fn not_below(self, limit: Self) -> u32 {
                unsafe { $not_below(self, limit) }
            }
            #[inline(always)]
            unsafe fn compress(self, lanes: u32, p: *mut f32) {
                unsafe { $compress(self, lanes, p) }
            }
            #[inline(always)]
            unsafe fn store_bytes(self, p: *mut u8) {
                unsafe { $store_bytes(self, p) }
            }
            #[inline(always)]
            unsafe fn sum(self) -> f32 {
                unsafe { $sum(self) }
            }
            #[inline(always)]
            unsafe fn sum4(x: [Self; 4]) -> [f32; 4] {
                unsafe { $sum4(x) }
            }
            #[inline(always)]
            unsafe fn max_lane(self) -> f32 {
                unsafe { $max_lane(self) }
            }
        }
    };
}

/// For eight lanes, bits of which are set: which those are, and then anything.
#[cfg(target_arch = "x86_64")]
static COMPRESSED: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut lanes = 0;
    while lanes < 256 {
        let (mut lane, mut end) = (0, 0);
        while lane < 8 {
            table[lanes][end] = lane as u8;
            end += lanes >> lane & 1;
            lane += 1;
        }
        lanes += 1;
    }
    table
};

#[cfg(target_arch = "x86_64")]
simd_x86!(
    __m256,
    8,
    16,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    |p: *const f16| _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
    |p: *const bf16| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))),
    _mm256_fmadd_ps,
    _mm256_add_ps,
    _mm256_sub_ps,
    _mm256_mul_ps,
    _mm256_max_ps,
    |x| _mm256_andnot_ps(_mm256_set1_ps(-0.0), x),
    |y, n, x, limit| {
        let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
        _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit), _mm256_mul_ps(y, _mm256_castsi256_ps(power)))
    },
    |y, x, limit| _mm256_add_ps(y, _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, limit), x)),
    |x, limit| _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit)) as u32,
    |x, lanes: u32, p| {
        let places = _mm_loadl_epi64(COMPRESSED.as_ptr().add(lanes as usize).cast());
        _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(places)))
    },
    |x, p: *mut u8| {
        let x = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(255));
        let x = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
        _mm_storel_epi64(p.cast(), _mm_packus_epi16(x, x))
    },
    |x| {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    },
    sum4_avx2,
    |x| {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
);

#[cfg(target_arch = "x86_64")]
simd_x86!(
    __m512,
    16,
    32,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    |p: *const f16| _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())),
    |p: *const bf16| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))),
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_sub_ps,
    _mm512_mul_ps,
    _mm512_max_ps,
    |x| _mm512_abs_ps(x),
    |y, n, x, limit| _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), y, n),
    |y, x, limit| _mm512_mask_add_ps(y, _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), y, x),
    |x, limit| u32::from(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit)),
    |x, lanes: u32, p| _mm512_storeu_ps(p, _mm512_maskz_compress_ps(lanes as u16, x)),
    |x, p: *mut u8| _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(x))),
    |x| _mm512_reduce_add_ps(x),
    sum4_avx512,
    |x| _mm512_reduce_max_ps(x)
);

/// # Safety
/// AVX2 exists.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sum4_avx2([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
    unsafe {
        let x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        std::mem::transmute::<__m128, [f32; 4]>(x)
    }
}

/// # Safety
/// AVX-512 F exists.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sum4_avx512([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
    unsafe {
        // Quarters of a vector hold two lanes' sums of a and b in turn, of c and d, then one lane's of each of the four.
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        let x =
            _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
        let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)));
        let x = _mm256_add_ps(_mm512_castps512_ps256(x), high);
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        std::mem::transmute::<__m128, [f32; 4]>(x)
    }
}

/// Asks for the cache lines of `len` elements ahead of their use, into the second cache: the first one waits for few lines at
/// a time, so that rows at random places would come half as fast. The pointer is not read.
#[inline(always)]
pub fn prefetch<T>(p: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..len * size_of::<T>()).step_by(64) {
        // SAFETY: a prefetch of any address is harmless, and SSE is always there.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast::<i8>().wrapping_add(line)) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (p, len);
}

/// Calls a kernel `fn name<V: Simd, T…>(args)` for the instruction set given, each copy compiled with its features.
macro_rules! dispatch {
    ($isa:expr, $kernel:ident :: <_ $(, $g:ident : $bound:path)*> ($($arg:ident : $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c,popcnt")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn avx2<$($g: $bound),*>($($arg: $type),*) {
            unsafe { $kernel::<core::arch::x86_64::__m256 $(, $g)*>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx2,fma,f16c,popcnt")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn avx512<$($g: $bound),*>($($arg: $type),*) {
            unsafe { $kernel::<core::arch::x86_64::__m512 $(, $g)*>($($arg),*) }
        }
        // SAFETY: an Isa is one of what the machine has; the kernel's own contract is the caller's.
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Isa::Avx2 => unsafe { avx2::<$($g),*>($($arg),*) },
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Isa::Avx512 => unsafe { avx512::<$($g),*>($($arg),*) },
            _ => unsafe { $kernel::<$crate::simd::Portable8 $(, $g)*>($($arg),*) },
        }
    }};
}
pub(crate) use dispatch;

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(always)]
    unsafe fn exp_all<V: Simd>(x: &[f32], y: &mut [f32]) {
        for i in (0..x.len()).step_by(V::LANES) {
            unsafe { exp(V::load(x[i..].as_ptr())).store(y[i..].as_mut_ptr()) }
        }
    }

    #[test]
    fn exp_agrees_with_f64_on_every_instruction_set() {
        let low = [-86.999, -87.0, -87.001, -1e3, -1e9, -1e30, f32::MIN];
        let x: Vec<f32> = (0..16_000)
            .map(|i| -(i as f32) * 0.0054)
            .chain(low)
            .chain([f32::NEG_INFINITY; 8])
            .chain([f32::NAN])
            .collect();
        for isa in Isa::available() {
            let mut out = vec![f32::NAN; x.len()];
            let (a, b) = (x.as_slice(), out.as_mut_slice());
            dispatch!(isa, exp_all::<_>(a: &[f32], b: &mut [f32]));
            for (&x, &y) in x.iter().zip(&out) {
                if x.is_nan() {
                    assert!(y.is_nan(), "{isa:?}: exp(NaN) = {y}");
                } else {
                    let exact = if x < -87.0 { 0.0 } else { f64::from(x).exp() };
                    assert!((f64::from(y) - exact).abs() <= 3e-7 * exact, "{isa:?}: exp({x}) = {y}, exactly {exact}");
                }
            }
        }
    }
}
