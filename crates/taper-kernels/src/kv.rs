//! The paged KV cache's layout, and writing to it.

use crate::CUDA_HEAD_DIMS;
use crate::memory;
use crate::parallel::{self, SharedMut};
use crate::simd::Simd;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, InplaceOp2, Layout, Result, Tensor, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Tokens of a block: one kernel tile.
pub const BLOCK_TOKENS: usize = 64;

/// One layer's keys and values, each `[blocks, kv_heads, 64, head_dim]`, contiguous, f32, f16 or bf16.
#[derive(Debug, Clone, Copy)]
pub struct PagedKv<'a> {
    /// Keys.
    pub k: &'a Tensor,
    /// Values.
    pub v: &'a Tensor,
}

impl PagedKv<'_> {
    /// (blocks, kv_heads, head_dim).
    ///
    /// # Errors
    /// If keys and values differ in shape or dtype, or a block does not hold 64 tokens.
    pub fn dims(&self) -> Result<(usize, usize, usize)> {
        let (blocks, kv_heads, rows, head_dim) = self.k.dims4()?;
        if rows != BLOCK_TOKENS || self.k.dims() != self.v.dims() || self.k.dtype() != self.v.dtype() {
            bail!(
                "paged KV: keys {:?} {:?}, values {:?} {:?}; expected one shape [blocks, kv_heads, 64, head_dim]",
                self.k.shape(),
                self.k.dtype(),
                self.v.shape(),
                self.v.dtype()
            );
        }
        Ok((blocks, kv_heads, head_dim))
    }
}

/// An element type of the KV cache on the CPU.
pub trait KvElement: Copy + Send + Sync + 'static {
    /// Which dtype it is.
    const DTYPE: DType;
    /// Widens, exactly.
    fn to_f32(self) -> f32;
    /// The storage's elements, if they are of this type.
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
    /// The same, to write.
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    /// Widens one vector of elements.
    ///
    /// # Safety
    /// `p` covers `V::LANES` elements and `V`'s instruction set exists.
    unsafe fn load<V: Simd>(p: *const Self) -> V;
    /// Rounds a row to the element type; both are of one length.
    fn round(from: &[f32], to: &mut [Self]);
}

macro_rules! kv_element {
    ($type:ty, $variant:ident, $load:ident, $to:expr, $round:expr) => {
        impl KvElement for $type {
            const DTYPE: DType = DType::$variant;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                if let CpuStorage::$variant(x) = storage { Some(x) } else { None }
            }
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                if let CpuStorage::$variant(x) = storage { Some(x) } else { None }
            }
            #[inline(always)]
            unsafe fn load<V: Simd>(p: *const Self) -> V {
                unsafe { V::$load(p) }
            }
            fn round(from: &[f32], to: &mut [Self]) {
                ($round)(to, from)
            }
        }
    };
}
kv_element!(f32, F32, load, |x| x, <[f32]>::copy_from_slice);
kv_element!(f16, F16, load_f16, f16::to_f32, HalfFloatSliceExt::convert_from_f32_slice);
kv_element!(bf16, BF16, load_bf16, bf16::to_f32, HalfFloatSliceExt::convert_from_f32_slice);

/// Runs an expression with `$T` bound to the KV element type of a dtype.
macro_rules! with_kv_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => candle_core::bail!("KV cache dtype {other:?}; expected f32, f16 or bf16"),
        }
    };
}
pub(crate) use with_kv_element;

/// A pool of zeros, f32, f16, bf16, u32 or i16. On the CPU the memory comes from the system untouched, page by page as
/// it is written.
///
/// # Errors
/// Another dtype, or a device without the memory.
pub fn zeros(dims: (usize, usize, usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    let len = dims.0 * dims.1 * dims.2 * dims.3;
    if !device.is_cpu() {
        return Tensor::zeros(dims, dtype, device);
    }
    match dtype {
        DType::U32 => Tensor::from_vec(memory::zeros::<u32>(len), dims, device),
        DType::I16 => Tensor::from_vec(memory::zeros::<i16>(len), dims, device),
        _ => with_kv_element!(dtype, T => Tensor::from_vec(memory::zeros::<T>(len), dims, device)),
    }
}

/// Writes rows `[T, kv_heads, head_dim]` (f32) into a pool `[blocks, kv_heads, 64, head_dim]` at `slots`
/// (`block * 64 + row`), rounding to the pool's dtype.
///
/// # Errors
/// A shape or dtype that differs, or a slot beyond the pool.
pub fn append(pool: &Tensor, rows: &Tensor, slots: &[u32]) -> Result<()> {
    let (blocks, kv_heads, _, head_dim) = pool.dims4()?;
    let (tokens, row_heads, row_dim) = rows.dims3()?;
    if (row_heads, row_dim) != (kv_heads, head_dim) || tokens != slots.len() {
        bail!("append: rows {:?} at {} slots into a pool of {kv_heads} heads of {head_dim}", rows.shape(), slots.len());
    }
    if let Some(slot) = slots.iter().find(|&&s| s as usize >= blocks * BLOCK_TOKENS) {
        bail!("append: slot {slot} in a pool of {blocks} blocks");
    }
    #[cfg(feature = "cuda")]
    if pool.device().is_cuda() {
        return Ok(crate::cuda::append(pool, &rows.contiguous()?, slots)?);
    }
    pool.inplace_op2(&rows.contiguous()?, &Append { kv_heads, head_dim, slots })
}

struct Append<'a> {
    kv_heads: usize,
    head_dim: usize,
    slots: &'a [u32],
}

impl Append<'_> {
    fn write<T: KvElement>(&self, pool: &mut [T], rows: &[f32]) {
        let (pool, width) = (SharedMut::new(pool), self.kv_heads * self.head_dim);
        // One thread takes all of a few tokens.
        let heads = if self.slots.len() < BLOCK_TOKENS { self.kv_heads } else { 1 };
        parallel::for_each(
            self.kv_heads / heads,
            || (),
            |(), unit| {
                for (row, &slot) in rows.chunks_exact(width).zip(self.slots) {
                    let (block, offset) = (slot as usize / BLOCK_TOKENS, slot as usize % BLOCK_TOKENS);
                    for head in unit * heads..(unit + 1) * heads {
                        let at = ((block * self.kv_heads + head) * BLOCK_TOKENS + offset) * self.head_dim;
                        // SAFETY: each head belongs to one unit.
                        let to = unsafe { pool.slice(at, self.head_dim) };
                        let from = &row[head * self.head_dim..][..self.head_dim];
                        T::round(from, to);
                    }
                }
            },
        );
    }
}

impl InplaceOp2 for Append<'_> {
    fn name(&self) -> &'static str {
        "kv-append"
    }

    fn cpu_fwd(&self, pool: &mut CpuStorage, _: &Layout, rows: &CpuStorage, rows_at: &Layout) -> Result<()> {
        let Some(rows) = f32::slice(rows) else { bail!("append: rows {:?}; expected f32", rows.dtype()) };
        let rows = &rows[rows_at.start_offset()..][..rows_at.shape().elem_count()];
        with_kv_element!(pool.dtype(), T => self.write::<T>(T::slice_mut(pool).expect("dtype matched"), rows));
        Ok(())
    }
}

/// Writes the keys and values of joint projections `qkv` `[T, (q_heads + 2 kv_heads) head_dim]`, queries first, into the cache
/// at `slots`, queries and keys rotated by each token's `angles` `[T, head_dim]`, cosines then sines, f32; returns queries
/// `[T, q_heads, head_dim]` of the cache's dtype. None where there is no such operation: it takes a CUDA device, 16 bits
/// everywhere, and a head_dim of 64 or 128.
///
/// # Errors
/// A shape that differs, or a slot beyond the cache.
pub fn append_joint(kv: PagedKv, qkv: &Tensor, angles: &Tensor, slots: &[u32]) -> Result<Option<Tensor>> {
    let (blocks, _, head_dim) = kv.dims()?;
    let sixteen = |t: &Tensor| matches!(t.dtype(), DType::BF16 | DType::F16);
    if !qkv.device().is_cuda() || !sixteen(kv.k) || !sixteen(qkv) || !CUDA_HEAD_DIMS.contains(&head_dim) {
        return Ok(None);
    }
    if let Some(slot) = slots.iter().find(|&&s| s as usize >= blocks * BLOCK_TOKENS) {
        bail!("append: slot {slot} in a cache of {blocks} blocks");
    }
    #[cfg(feature = "cuda")]
    return Ok(Some(crate::cuda::append_joint(kv, qkv, angles, slots)?));
    #[cfg(not(feature = "cuda"))]
    bail!("append: {angles:?} on a CUDA device without the feature")
}

/// Copies block `from` over block `to` within a pool `[blocks, …]`.
///
/// # Errors
/// A block beyond the pool.
pub fn copy_block(pool: &Tensor, from: u32, to: u32) -> Result<()> {
    let blocks = pool.dim(0)?;
    if from.max(to) as usize >= blocks {
        bail!("copy_block: {from} to {to} in a pool of {blocks} blocks");
    }
    #[cfg(feature = "cuda")]
    if pool.device().is_cuda() {
        return Ok(crate::cuda::copy_block(pool, from, to)?);
    }
    let stride = pool.elem_count() / blocks;
    pool.inplace_op1(&CopyBlock { stride, from: from as usize, to: to as usize })
}

struct CopyBlock {
    stride: usize,
    from: usize,
    to: usize,
}

impl InplaceOp1 for CopyBlock {
    fn name(&self) -> &'static str {
        "kv-copy-block"
    }

    fn cpu_fwd(&self, pool: &mut CpuStorage, _: &Layout) -> Result<()> {
        let from = self.from * self.stride..(self.from + 1) * self.stride;
        let to = self.to * self.stride;
        match pool {
            CpuStorage::U32(pool) => pool.copy_within(from, to),
            CpuStorage::I16(pool) => pool.copy_within(from, to),
            _ => with_kv_element!(pool.dtype(), T => T::slice_mut(pool).expect("dtype matched").copy_within(from, to)),
        }
        Ok(())
    }
}
