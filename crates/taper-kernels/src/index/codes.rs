//! Binary codes of keys: their Hamming distance to a query's code stands for the dot product.
//!
//! Source: HashAttention (Desai et al. 2024, arXiv:2412.14468), section 4.

use super::{Extend, Lookup, Part, dims, for_each_part, map_spans};
use crate::decode::{Decode, Importance};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::mlp::{Mlp, PerHead};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch};
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};

/// Bits of a code.
pub const BITS: usize = 32;

/// Takes in rows of the keys `[blocks, kv_heads, 64, head_dim]`; the index is `[blocks, kv_heads, 64, codes]`, u32: a
/// code for each KV head, or one for each query head of its group, as there are `maps`.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn extend(index: &Tensor, k: &Tensor, parts: &[Part], maps: &PerHead<Mlp>) -> Result<()> {
    let dims = dims(index, k, parts)?;
    let (kv_heads, d, _) = dims;
    let codes = codes(index, maps, d, kv_heads)?;
    #[cfg(feature = "cuda")]
    if k.device().is_cuda() {
        return Ok(crate::cuda::step::extend_codes(index, k, parts, maps)?);
    }
    index.inplace_op2(
        k,
        &Extend(|index: &mut _, keys: &_| {
            let CpuStorage::U32(index) = index else { bail!("codes: the index is not u32") };
            with_kv_element!(k.dtype(), T => {
                let keys = T::slice(keys).expect("dtype matched");
                for_each_part(dims, keys, index, parts, |part, head, keys, rows| {
                    let new = part.rows.start * d..part.rows.end * d;
                    let keys: Vec<f32> = keys[new].iter().map(|x| x.to_f32()).collect();
                    for i in 0..codes {
                        let to = rows[part.rows.start * codes + i..].iter_mut().step_by(codes);
                        to.zip(signs(&maps[head * codes + i], &keys)).for_each(|(to, code)| *to = code);
                    }
                });
            });
            Ok(())
        }),
    )
}

/// Codes of a key, where the maps fit the index.
fn codes(index: &Tensor, maps: &[Mlp], d: usize, kv_heads: usize) -> Result<usize> {
    let (_, _, rows, codes) = index.dims4()?;
    let fits = |m: &Mlp| m.inputs() == d && m.outputs() == BITS;
    if rows != BLOCK_TOKENS || codes == 0 || maps.len() != kv_heads * codes || !maps.iter().all(fits) {
        bail!(
            "codes: index {:?} with {} maps; expected {kv_heads} or one a query head, {d} to 32",
            index.shape(),
            maps.len()
        );
    }
    Ok(codes)
}

/// The codes of rows `[rows, inputs]`: a bit for each output that is at least 0.
fn signs(map: &Mlp, x: &[f32]) -> Vec<u32> {
    let code = |y: &[f32]| y.iter().enumerate().fold(0, |code, (bit, &y)| code | u32::from(y >= 0.0) << bit);
    map.forward(x).chunks_exact(BITS).map(code).collect()
}

/// How many bits of a key's code equal the query's, summed over the group, for the rows and KV heads `wanted`
/// `[R, kv_heads]`. `queries` has one map a query head.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn importance(batch: &Decode, index: &Tensor, queries: &PerHead<Mlp>, wanted: &[bool]) -> Result<Importance> {
    let (rows, q_heads, kv_heads, d) = batch.dims()?;
    let (group, codes) = (q_heads / kv_heads, index.dim(3)?);
    let fits = queries.len() == q_heads && queries.iter().all(|m| m.inputs() == d && m.outputs() == BITS);
    if wanted.len() != rows * kv_heads || !fits || (codes != 1 && codes != group) {
        bail!("codes: {} maps, {} heads wanted of {rows} rows of {kv_heads}", queries.len(), wanted.len());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(Importance::of_scored(
            crate::cuda::step::equal_bits(batch, index, queries, wanted)?,
            crate::decode::Over::Sum,
        ));
    }
    let q = super::queries(batch)?;
    let (storage, _) = index.storage_and_layout();
    let Storage::Cpu(CpuStorage::U32(data)) = &*storage else {
        bail!("codes: index {:?}; expected u32", index.dtype())
    };
    let lookup = &Lookup::new(data, index, kv_heads)?;
    let isa = Isa::best();
    let own = parallel::map(rows * q_heads, |at| match wanted[at / group] {
        true => signs(&queries[at % q_heads], &q[at * d..][..d])[0],
        false => 0,
    });
    let head = |i: usize| {
        let (row, head, own) = (&batch.rows[i / kv_heads], i % kv_heads, &own[i * group..][..group]);
        let mut importance = vec![0f32; row.visible.len()];
        let parts = SharedMut::new(&mut importance);
        map_spans(row.visible.clone(), |tokens| {
            for (start, keys) in lookup.blocks(row.table, head, BLOCK_TOKENS, tokens) {
                // SAFETY: every token has its own element.
                let to = unsafe { parts.slice(start - row.visible.start, keys.len() / codes) };
                dispatch!(isa, equal_bits::<_>(own: &[u32], keys: &[u32], to: &mut [f32]));
            }
        });
        importance
    };
    Ok(Importance::new(1, parallel::map(rows * kv_heads, |i| wanted[i].then(|| head(i)))))
}

/// How many bits of the query heads' codes `own` equal those of each key, summed over the heads. A key has one code, or
/// one for each head; there are at most a block of keys.
#[inline(always)]
unsafe fn equal_bits<V: Simd>(own: &[u32], keys: &[u32], to: &mut [f32]) {
    if keys.len() == to.len() {
        // As long as a block, so that loops over it are vectors.
        let (mut all, mut apart) = ([0u32; BLOCK_TOKENS], [0u32; BLOCK_TOKENS]);
        all[..keys.len()].copy_from_slice(keys);
        for own in own.chunks(CODES_TOGETHER) {
            add_apart(own, &all, &mut apart);
        }
        let bits = (own.len() * BITS) as u32;
        to.iter_mut().zip(apart).for_each(|(to, apart)| *to = (bits - apart) as f32);
        return;
    }
    match own.len() {
        2 => equal_bits_of::<2>(own, keys, to),
        3 => equal_bits_of::<3>(own, keys, to),
        4 => equal_bits_of::<4>(own, keys, to),
        group => {
            for (to, keys) in to.iter_mut().zip(keys.chunks_exact(group)) {
                let apart: u32 = own.iter().zip(keys).map(|(own, key)| (own ^ key).count_ones()).sum();
                *to = ((group * BITS) as u32 - apart) as f32;
            }
        }
    }
}

/// Codes whose differing bits are counted by bytes, without one that overflows.
const CODES_TOGETHER: usize = 31;

/// Adds up in how many bits the codes `own` differ from each key's. Bits are counted by pairs, fours and bytes: vectors have
/// no instruction for it.
#[inline(always)]
fn add_apart(own: &[u32], keys: &[u32; BLOCK_TOKENS], apart: &mut [u32; BLOCK_TOKENS]) {
    let mut bytes = [0u32; BLOCK_TOKENS];
    for own in own {
        for (bytes, key) in bytes.iter_mut().zip(keys) {
            let x = own ^ key;
            let pairs = x.wrapping_sub((x >> 1) & 0x5555_5555);
            let fours = (pairs & 0x3333_3333).wrapping_add((pairs >> 2) & 0x3333_3333);
            *bytes = bytes.wrapping_add(fours.wrapping_add(fours >> 4) & 0x0f0f_0f0f);
        }
    }
    for (apart, bytes) in apart.iter_mut().zip(bytes) {
        let halves = (bytes & 0x00ff_00ff).wrapping_add((bytes >> 8) & 0x00ff_00ff);
        *apart = apart.wrapping_add((halves & 0xffff).wrapping_add(halves >> 16));
    }
}

/// The same for groups that are usual, without a loop over the group.
#[inline(always)]
fn equal_bits_of<const G: usize>(own: &[u32], keys: &[u32], to: &mut [f32]) {
    let (keys, _) = keys.as_chunks::<G>();
    for (to, key) in to.iter_mut().zip(keys) {
        let mut apart = 0;
        for g in 0..G {
            apart += (own[g] ^ key[g]).count_ones();
        }
        *to = ((G * BITS) as u32 - apart) as f32;
    }
}
