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
    /// Where the tokens begin that one thread writes, and where the last ones end: of each block of the pool those that come
    /// one behind the other; or all, where they are few or a block comes again.
    fn bounds(&self) -> Vec<usize> {
        let (tokens, block) = (self.slots.len(), |token: usize| self.slots[token] as usize / BLOCK_TOKENS);
        if tokens < BLOCK_TOKENS {
            return vec![0, tokens];
        }
        let begins = |token: &usize| *token == 0 || block(*token) != block(token - 1);
        let mut bounds: Vec<usize> = (0..tokens).filter(begins).collect();
        let mut blocks: Vec<usize> = bounds.iter().map(|&token| block(token)).collect();
        blocks.sort_unstable();
        if blocks.windows(2).any(|two| two[0] == two[1]) {
            return vec![0, tokens];
        }
        bounds.push(tokens);
        bounds
    }

    fn write<T: KvElement>(&self, pool: &mut [T], rows: &[f32]) {
        let (pool, bounds) = (SharedMut::new(pool), self.bounds());
        let (d, width) = (self.head_dim, self.kv_heads * self.head_dim);
        let write = |(): &mut (), unit: usize| {
            for token in bounds[unit]..bounds[unit + 1] {
                let (block, row) =
                    (self.slots[token] as usize / BLOCK_TOKENS, self.slots[token] as usize % BLOCK_TOKENS);
                for (head, from) in rows[token * width..][..width].chunks_exact(d).enumerate() {
                    let at = ((block * self.kv_heads + head) * BLOCK_TOKENS + row) * d;
                    // SAFETY: each block belongs to one unit.
                    T::round(from, unsafe { pool.slice(at, d) });
                }
            }
        };
        parallel::for_each(bounds.len() - 1, || (), write);
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

/// Where a layer's queries go besides.
#[derive(Debug, Clone, Copy)]
pub struct Keep<'a> {
    /// For each token memory for its queries of all layers `[layers, q_heads, head_dim]`, of the cache's dtype, if they are kept.
    pub rows: &'a [Option<Tensor>],
    /// The layer.
    pub layer: usize,
}

/// Writes the keys and values of joint projections `qkv` `[T, (q_heads + 2 kv_heads) head_dim]`, queries first, into the cache
/// at `slots`, queries and keys rotated by each token's `angles` `[T, head_dim]`, cosines then sines, f32; returns queries
/// `[T, q_heads, head_dim]` of the cache's dtype. None where there is no such operation: it takes a CUDA device, 16 bits
/// everywhere, and a head_dim of 64 or 128. Where some are to be kept they are written there too.
///
/// # Errors
/// A shape that differs, or a slot beyond the cache.
pub fn append_joint(
    kv: PagedKv,
    qkv: &Tensor,
    angles: &Tensor,
    slots: &[u32],
    keep: Option<Keep>,
) -> Result<Option<Tensor>> {
    let (blocks, _, head_dim) = kv.dims()?;
    let sixteen = |t: &Tensor| matches!(t.dtype(), DType::BF16 | DType::F16);
    if !qkv.device().is_cuda() || !sixteen(kv.k) || !sixteen(qkv) || !CUDA_HEAD_DIMS.contains(&head_dim) {
        return Ok(None);
    }
    if let Some(slot) = slots.iter().find(|&&s| s as usize >= blocks * BLOCK_TOKENS) {
        bail!("append: slot {slot} in a cache of {blocks} blocks");
    }
    #[cfg(feature = "cuda")]
    return Ok(Some(crate::cuda::append_joint(kv, qkv, angles, slots, keep)?));
    #[cfg(not(feature = "cuda"))]
    bail!("append: {angles:?}, {keep:?} on a CUDA device without the feature")
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;
    use std::ops::Range;

    #[test]
    fn rows_are_where_their_slots_say() {
        let (heads, d, blocks) = (3, 8, 9);
        let at = |block: u32, rows: Range<u32>| rows.map(move |row| block * BLOCK_TOKENS as u32 + row);
        let whole: Vec<u32> = at(7, 50..64).chain(at(2, 0..64)).chain(at(8, 0..64)).chain(at(0, 0..5)).collect();
        // One block comes again, and one row of it.
        let again: Vec<u32> = at(3, 0..40).chain(at(1, 0..64)).chain(at(3, 39..64)).collect();
        for (slots, units) in [(whole.clone(), 4), (again, 1), (whole[..63].to_vec(), 1), (Vec::new(), 1)] {
            let rows = Numbers(31).tensor(&[slots.len(), heads, d]);
            assert_eq!(Append { kv_heads: heads, head_dim: d, slots: &slots }.bounds().len() - 1, units);
            let pool = zeros((blocks, heads, BLOCK_TOKENS, d), DType::F32, &Device::Cpu).unwrap();
            append(&pool, &rows, &slots).unwrap();
            let mut expected = vec![0f32; blocks * heads * BLOCK_TOKENS * d];
            let rows = rows.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for (i, from) in rows.chunks_exact(d).enumerate() {
                let (slot, head) = (slots[i / heads] as usize, i % heads);
                let at = ((slot / BLOCK_TOKENS * heads + head) * BLOCK_TOKENS + slot % BLOCK_TOKENS) * d;
                expected[at..at + d].copy_from_slice(from);
            }
            assert_eq!(pool.flatten_all().unwrap().to_vec1::<f32>().unwrap(), expected);
        }
    }
}
