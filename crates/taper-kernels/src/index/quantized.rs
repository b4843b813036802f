//! Keys at two bits a channel: with what the codes stand for a sixth of their bytes in bf16 or f16, and a good guess of
//! every score.
//!
//! Source: KIVI (Liu et al. 2024, arXiv:2402.02750), section 3, which quantises keys channel by channel in groups of
//! tokens; a group is a block here. Twilight (Lin et al. 2025, arXiv:2502.02770), section 4, scores quantised keys to
//! choose among them.

mod dots;

use self::dots::TOGETHER;
use super::{Extend, Lookup, Part, dims, for_each_part, queries};
use crate::decode::{Decode, DecodeRow, Importance, Kept, Over, pass};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::parallel;
use crate::simd::{Isa, Simd, WHOLE, dispatch};
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use half::bf16;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Channels of a key in a word.
const CHANNELS: usize = 16;

/// Where the codes of a word's channels lie: those of four channels side by side are a byte apart, and those of each pair two
/// bytes, which is how vectors of bytes and matrix fragments of 16-bit floats take them.
const BITS: [u32; CHANNELS] = {
    let (mut bits, mut c) = ([0; CHANNELS], 0);
    while c < CHANNELS {
        bits[c] = 8 * [0, 2, 1, 3][c % 4] + 2 * (c / 4) as u32;
        c += 1;
    }
    bits
};

/// Rows and width of the index of keys so wide, in u32: of a block and head `words = head_dim / 16`, rounded up, for
/// each of its 64 tokens, `[words, 64]`; then for each channel, as bf16, the key of code 0 and what each step adds,
/// `[2, 16 words]`.
pub fn shape(head_dim: usize) -> (usize, usize) {
    let words = head_dim.div_ceil(CHANNELS);
    (1, words * (BLOCK_TOKENS + CHANNELS))
}

/// Takes in rows of the keys `[blocks, kv_heads, 64, head_dim]` into an index of [`shape`], u32. A block's channels
/// span from the least to the largest of the rows it has so far, in four parts of which each stands for its middle.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn extend(index: &Tensor, k: &Tensor, parts: &[Part]) -> Result<()> {
    let dims = dims(index, k, parts)?;
    let d = dims.1;
    if (index.dim(2)?, index.dim(3)?) != shape(d) {
        bail!("quantized keys: index {:?} for keys {:?}", index.shape(), k.shape());
    }
    #[cfg(feature = "cuda")]
    if k.device().is_cuda() {
        return Ok(crate::cuda::step::extend_quantized(index, k, parts)?);
    }
    let isa = Isa::best();
    index.inplace_op2(
        k,
        &Extend(|index: &mut _, keys: &_| {
            let CpuStorage::U32(index) = index else { bail!("quantized keys: the index is not u32") };
            with_kv_element!(k.dtype(), T => {
                let keys = T::slice(keys).expect("dtype matched");
                for_each_part(dims, keys, index, parts, |part, _, keys, words| {
                    let keys = &keys[..part.rows.end * d];
                    dispatch!(isa, quantize::<_, T: KvElement>(keys: &[T], d: usize, words: &mut [u32]));
                });
            });
            Ok(())
        }),
    )
}

/// The keys `[rows, d]` of a block.
///
/// # Safety
/// `V`'s instruction set exists.
#[inline(always)]
unsafe fn quantize<V: Simd, T: KvElement>(keys: &[T], d: usize, words: &mut [u32]) {
    let (codes, ends) = words.split_at_mut(d.div_ceil(CHANNELS) * BLOCK_TOKENS);
    codes.fill(0);
    // A word's channels of every key.
    let mut wide = [[0.0f32; CHANNELS]; BLOCK_TOKENS];
    let (base, steps) = ends.split_at_mut(ends.len() / 2);
    for (w, line) in codes.chunks_exact_mut(BLOCK_TOKENS).enumerate() {
        let first = w * CHANNELS;
        let rows = keys.len() / d;
        for (key, to) in keys.chunks_exact(d).zip(&mut wide) {
            if let Some(key) = key.get(first..first + CHANNELS) {
                for (from, to) in key.chunks_exact(V::LANES).zip(to.chunks_exact_mut(V::LANES)) {
                    // SAFETY: both are as long as a vector.
                    unsafe { T::load::<V>(from.as_ptr()).store(to.as_mut_ptr()) };
                }
            } else {
                to.fill(0.0);
                to.iter_mut().zip(&key[first..]).for_each(|(to, x)| *to = x.to_f32());
            }
        }
        // NaN once is NaN from then on.
        let (mut low, mut high) = ([f32::INFINITY; CHANNELS], [f32::NEG_INFINITY; CHANNELS]);
        for key in &wide[..rows] {
            for c in 0..CHANNELS {
                low[c] = if key[c] < low[c] || key[c].is_nan() { key[c] } else { low[c] };
                high[c] = if key[c] > high[c] || key[c].is_nan() { key[c] } else { high[c] };
            }
        }
        let step: [f32; CHANNELS] = std::array::from_fn(|c| (high[c] - low[c]) * 0.25);
        let bounds: [[f32; CHANNELS]; 3] =
            std::array::from_fn(|i| std::array::from_fn(|c| low[c] + (i + 1) as f32 * step[c]));
        for (word, key) in line.iter_mut().zip(&wide[..rows]) {
            let mut code = [0u32; CHANNELS];
            for bound in &bounds {
                for c in 0..CHANNELS {
                    code[c] += u32::from(key[c] >= bound[c]);
                }
            }
            *word = (0..CHANNELS).fold(0, |word, c| word | code[c] << BITS[c]);
        }
        for (i, pair) in (first / 2..).zip((0..CHANNELS).step_by(2)) {
            let pack = |x: [f32; 2]| x.iter().rev().fold(0, |w, &x| w << 16 | u32::from(bf16::from_f32(x).to_bits()));
            base[i] = pack([0, 1].map(|j| low[pair + j] + 0.5 * step[pair + j]));
            steps[i] = pack([0, 1].map(|j| step[pair + j]));
        }
    }
}

/// The share of attention mass that each key would hold by its quantised scores, brought nearer to one another by how
/// far off they may be, `over` the group its sum or its largest, for the rows and KV heads `wanted` `[R, kv_heads]`.
///
/// A score is off by a sum of many channels' errors, each anywhere within half a step: nearly normal, of variance sum
/// (q step)² / 12, the mean over [`MEASURED`] blocks. In a sharp head that is several units, and the heaviest key may
/// seem to hold nothing. Of two keys whose scores are so uncertain the share to expect is, to 0.02, that by scores over
/// sqrt(1 + pi variance / 4) (MacKay 1992, on a classifier's moderated outputs). Of many keys that flattens more than
/// what is to be expected; it is a rule of thumb, which loses no key that copies UUIDs (bench/fidelity.md).
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn importance(batch: &Decode, index: &Tensor, wanted: &[bool], over: Over) -> Result<Importance> {
    let (rows, q_heads, kv_heads, d) = batch.dims()?;
    if wanted.len() != rows * kv_heads || (index.dim(2)?, index.dim(3)?) != shape(d) {
        bail!("quantized keys: index {:?}, {} heads wanted of {rows} rows of {kv_heads}", index.shape(), wanted.len());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(Importance::of_scored(crate::cuda::step::quantized(batch, index, wanted)?, over));
    }
    let group = q_heads / kv_heads;
    let q = queries(batch)?;
    let (storage, _) = index.storage_and_layout();
    let Storage::Cpu(CpuStorage::U32(data)) = &*storage else {
        bail!("quantized keys: index {:?}; expected u32 on the CPU", index.dtype())
    };
    let lookup = &Lookup::new(data, index, kv_heads)?;
    let spans: Vec<_> = batch.rows.iter().flat_map(|row| std::iter::repeat_n(row.visible.clone(), kv_heads)).collect();
    let (isa, scale) = (Isa::best(), 1.0 / (d as f32).sqrt());
    let scales = parallel::map(rows * kv_heads, |i| match wanted[i] {
        true => {
            let (row, queries) = (&batch.rows[i / kv_heads], &q[i * group * d..][..group * d]);
            self::scales((lookup, d), row, i % kv_heads, queries, scale)
        }
        false => Vec::new(),
    });
    let write = |i: usize, tokens: Range<usize>, out: *mut f32, stride: usize| {
        let (row, head) = (i / kv_heads, i % kv_heads);
        let queries = &mut Queries::new(&q[(row * q_heads + head * group) * d..][..group * d], d, &scales[i]);
        for (of, words) in lookup.whole_blocks(batch.rows[row].table, head, BLOCK_TOKENS, tokens.clone()) {
            let line = out.wrapping_add(of.start - tokens.start);
            let of = of.start % BLOCK_TOKENS..(of.end - 1) % BLOCK_TOKENS + 1;
            dispatch!(isa, score::<_>(
                isa: Isa, words: &[u32], queries: &mut Queries, of: Range<usize>, line: *mut f32, stride: usize
            ));
        }
    };
    // SAFETY: the blocks of a run hold every one of its tokens.
    let heads = unsafe { pass(isa, &spans, wanted, (group, Kept::Shares), write) };
    Ok(Importance::of_scores(1, heads.len(), |i| heads[i].as_ref(), over))
}

/// Blocks that tell how far off scores are, evenly spread over those that are visible; `kQuantizedMeasured` on a device.
const MEASURED: usize = 4;

/// What the scores of each query `[group, d]` of a row and KV head are multiplied by: `scale`, and less the less sure they are.
fn scales((lookup, d): (&Lookup<u32>, usize), row: &DecodeRow, head: usize, q: &[f32], scale: f32) -> Vec<f32> {
    let blocks = row.visible.start / BLOCK_TOKENS..row.visible.end.div_ceil(BLOCK_TOKENS);
    let mut squares = vec![0.0; d];
    for i in 0..MEASURED {
        let block = blocks.start + (2 * i + 1) * blocks.len() / (2 * MEASURED);
        let words = lookup.block(row.table, head, block * BLOCK_TOKENS);
        let steps = &words[words.len() - d.div_ceil(CHANNELS) * CHANNELS / 2..];
        squares.iter_mut().zip(steps.iter().flat_map(|&word| both(word))).for_each(|(s, step)| *s += step * step);
    }
    let of = |q: &[f32]| {
        let sum: f32 = q.iter().zip(&squares).map(|(q, square)| q * q * square).sum();
        let variance = sum * scale * scale / (12 * MEASURED) as f32;
        scale / (1.0 + std::f32::consts::FRAC_PI_4 * variance).sqrt()
    };
    q.chunks_exact(d).map(of).collect()
}

/// Two bf16 of a word.
#[inline(always)]
fn both(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// A group's queries, and what a block makes of them.
struct Queries {
    /// `[group, channels]`, times what scores are multiplied by; as many channels as the words have: zero beyond the head's own.
    q: Vec<f32>,
    /// Words of a token.
    words: usize,
    /// Each query's channels times the block's steps `[group, channels]`.
    products: Vec<f32>,
    /// The same of four channels in units of which each is a whole number, rounded by [`WHOLE`], a byte each, where their codes
    /// lie `[group, 4 words]`.
    weights: Vec<u32>,
    /// The query's product with the block's base, and the unit.
    ends: Vec<(f32, f32)>,
    /// Sums of codes by weights, of [`TOGETHER`] queries at a time.
    dots: Vec<[i32; BLOCK_TOKENS]>,
}

impl Queries {
    /// Of queries `[group, d]` whose scores are multiplied by `scales` `[group]`.
    fn new(q: &[f32], d: usize, scales: &[f32]) -> Self {
        let (group, words) = (q.len() / d, d.div_ceil(CHANNELS));
        let channels = words * CHANNELS;
        let mut wide = vec![0.0; group * channels];
        for ((to, q), scale) in wide.chunks_exact_mut(channels).zip(q.chunks_exact(d)).zip(scales) {
            to.iter_mut().zip(q).for_each(|(to, q)| *to = q * scale);
        }
        let (products, weights) = (vec![0.0; group * channels], vec![0; 4 * words * group]);
        let (ends, dots) = (vec![(0.0, 0.0); group], vec![[0; BLOCK_TOKENS]; TOGETHER.min(group)]);
        Self { q: wide, words, products, weights, ends, dots }
    }

    /// Gets ready for a block of such `base` and `steps`.
    ///
    /// # Safety
    /// `V`'s instruction set exists, both cover all channels.
    #[inline(always)]
    unsafe fn meet<V: Simd>(&mut self, base: *const bf16, steps: *const bf16) {
        for first in (0..self.ends.len()).step_by(TOGETHER) {
            unsafe {
                match self.ends.len() - first {
                    1 => self.meet_some::<V, 1>(first, base, steps),
                    2 => self.meet_some::<V, 2>(first, base, steps),
                    3 => self.meet_some::<V, 3>(first, base, steps),
                    _ => self.meet_some::<V, TOGETHER>(first, base, steps),
                }
            }
        }
        // Bytes in the order of channels so far.
        for weight in &mut self.weights {
            let four = u32::from_le(*weight);
            *weight = four & 0xff00_00ff | four >> 8 & 0xff00 | four << 8 & 0x00ff_0000;
        }
    }

    /// The products and ends of `N` queries, side by side since each is a chain of steps that wait for one another.
    ///
    /// # Safety
    /// As of `meet`.
    #[inline(always)]
    unsafe fn meet_some<V: Simd, const N: usize>(&mut self, first: usize, base: *const bf16, steps: *const bf16) {
        let channels = self.words * CHANNELS;
        // So that sums of half the channels stay below 2^15.
        let most = (i16::MAX as usize / (6 * 4 * self.words)).min(127) as f32;
        let span = first * channels..(first + N) * channels;
        let (q, products) = (self.q[span.clone()].as_ptr(), self.products[span].as_mut_ptr());
        let weights = self.weights[4 * first * self.words..].as_mut_ptr().cast::<u8>();
        // SAFETY: the spans have the channels of `N` queries, of which there are whole vectors.
        unsafe {
            let (mut sums, mut largest) = ([V::splat(0.0); N], [V::splat(f32::MIN_POSITIVE); N]);
            for c in (0..channels).step_by(V::LANES) {
                let (base, step) = (V::load_bf16(base.add(c)), V::load_bf16(steps.add(c)));
                for g in 0..N {
                    let q = V::load(q.add(g * channels + c));
                    sums[g] = q.mul_add(base, sums[g]);
                    let product = q.mul(step);
                    largest[g] = largest[g].max(product.abs());
                    product.store(products.add(g * channels + c));
                }
            }
            let (mut parts, sums) = (largest, V::sum4([sums[0], sums[1 % N], sums[2 % N], sums[3 % N]]));
            for ((end, part), sum) in self.ends[first..first + N].iter_mut().zip(&mut parts).zip(sums) {
                let largest = part.max_lane();
                *part = V::splat(most / largest);
                *end = (sum, largest / most);
            }
            for c in (0..channels).step_by(V::LANES) {
                for (g, part) in parts.iter().enumerate() {
                    let (product, to) = (V::load(products.add(g * channels + c)), weights.add(g * channels + c));
                    product.mul_add(*part, V::splat(WHOLE)).store_bytes(to);
                }
            }
        }
    }
}

/// The scaled scores of each query with the keys `of` a block into lines `stride` apart. Codes are multiplied by whole
/// numbers, so that what the instruction sets differ by is the rounding of one sum a block.
///
/// # Safety
/// `V`'s instruction set exists; every line of `out` covers the keys.
#[inline(always)]
unsafe fn score<V: Simd>(
    isa: Isa,
    words: &[u32],
    queries: &mut Queries,
    of: Range<usize>,
    out: *mut f32,
    stride: usize,
) {
    let (words, ends) = words.split_at(queries.words * BLOCK_TOKENS);
    let (base, steps) = ends.split_at(ends.len() / 2);
    unsafe { queries.meet::<V>(base.as_ptr().cast(), steps.as_ptr().cast()) };
    let (group, each) = (queries.ends.len(), 4 * queries.words);
    for first in (0..group).step_by(TOGETHER) {
        let (weights, dots) = (&queries.weights[first * each..], &mut queries.dots[..TOGETHER.min(group - first)]);
        dots::dots(isa, words, weights, dots);
        for (g, dots) in (first..).zip(dots) {
            let (sum, unit) = queries.ends[g];
            // SAFETY: the caller's.
            let to =
                unsafe { std::slice::from_raw_parts_mut(out.add(g * stride).cast::<MaybeUninit<f32>>(), of.len()) };
            for (to, &mut dot) in to.iter_mut().zip(&mut dots[of.clone()]) {
                to.write(dot as f32 * unit + sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;
    use half::f16;

    /// An index's block as it is read: what each channel's codes stand for `[d]`, and each token's codes `[64, d]`.
    fn read(words: &[u32], d: usize) -> (Vec<(f32, f32)>, Vec<Vec<u32>>) {
        let n = d.div_ceil(CHANNELS);
        let ends: Vec<f32> = words[n * BLOCK_TOKENS..]
            .iter()
            .flat_map(|w| [*w as u16, (*w >> 16) as u16].map(|b| bf16::from_bits(b).to_f32()))
            .collect();
        let code = |t: usize, c: usize| words[c / CHANNELS * BLOCK_TOKENS + t] >> BITS[c % CHANNELS] & 3;
        let codes = (0..BLOCK_TOKENS).map(|t| (0..d).map(|c| code(t, c)).collect()).collect();
        ((0..d).map(|c| (ends[c], ends[n * CHANNELS + c])).collect(), codes)
    }

    fn quantized<T: KvElement>(isa: Isa, keys: &[T], d: usize) -> Vec<u32> {
        let mut words = vec![7; shape(d).1];
        let to = &mut words[..];
        dispatch!(isa, quantize::<_, T: KvElement>(keys: &[T], d: usize, to: &mut [u32]));
        words
    }

    fn scored(isa: Isa, q: &[f32], words: &[u32], scale: f32) -> [f32; BLOCK_TOKENS] {
        let scales = [scale];
        let queries = &mut Queries::new(q, q.len(), &scales);
        let mut scores = [0.0; BLOCK_TOKENS];
        let (of, line, stride) = (0..BLOCK_TOKENS, scores.as_mut_ptr(), 0);
        dispatch!(isa, score::<_>(
            isa: Isa, words: &[u32], queries: &mut Queries, of: Range<usize>, line: *mut f32, stride: usize
        ));
        scores
    }

    #[test]
    fn keys_of_16_bits_are_quantized_as_what_they_stand_for() {
        let mut numbers = Numbers(72);
        for (d, rows) in [(8, 3), (16, 64), (40, 33), (128, 64)] {
            let keys: Vec<f32> = (0..rows * d).map(|_| numbers.normal()).collect();
            for isa in Isa::available() {
                let (half, bf): (Vec<f16>, Vec<bf16>) =
                    keys.iter().map(|&key| (f16::from_f32(key), bf16::from_f32(key))).unzip();
                let wide = |keys: &mut dyn Iterator<Item = f32>| quantized(Isa::Portable, &keys.collect::<Vec<_>>(), d);
                assert_eq!(quantized(isa, &half, d), wide(&mut half.iter().map(|key| key.to_f32())), "{isa:?} {d}");
                assert_eq!(quantized(isa, &bf, d), wide(&mut bf.iter().map(|key| key.to_f32())), "{isa:?} {d}");
            }
        }
    }

    #[test]
    fn places_of_codes_are_all_of_a_word() {
        assert_eq!(BITS.iter().fold(0u32, |all, bit| all | 3 << bit), u32::MAX);
    }

    #[test]
    fn a_key_is_within_half_a_step_of_what_stands_for_it() {
        let mut numbers = Numbers(71);
        for (d, rows) in [(1, 64), (8, 1), (16, 2), (40, 63), (64, 64), (128, 17)] {
            let keys: Vec<f32> = (0..rows * d).map(|i| numbers.normal() * (1 + i % d) as f32).collect();
            let words = quantized(Isa::Portable, &keys, d);
            let (ends, codes) = read(&words, d);
            for (row, codes) in codes.iter().enumerate() {
                for (c, (&code, (base, step))) in codes.iter().zip(&ends).enumerate() {
                    if row >= rows {
                        assert_eq!(code, 0);
                        continue;
                    }
                    let key = keys[row * d + c];
                    let apart = (base + code as f32 * step - key).abs();
                    // The ends are rounded to bf16.
                    let rounded = (base.abs() + 3.0 * step) / 256.0;
                    assert!(apart <= step / 2.0 + rounded, "{d} {rows}: {key} is {base} + {code} x {step}");
                }
            }
            for isa in Isa::available() {
                assert_eq!(quantized(isa, &keys, d), words, "{isa:?}");
            }
        }
    }

    #[test]
    fn scores_are_those_of_the_quantized_keys_by_every_instruction_set() {
        let mut numbers = Numbers(72);
        for d in [1, 8, 16, 40, 64, 128, 256] {
            let keys: Vec<f32> = (0..BLOCK_TOKENS * d).map(|_| numbers.normal() + 2.0).collect();
            let q: Vec<f32> = (0..d).map(|c| numbers.normal() * (1 + c % 3) as f32).collect();
            let words = quantized(Isa::best(), &keys, d);
            let (ends, codes) = read(&words, d);
            let scores = scored(Isa::Portable, &q, &words, 0.25);
            let steps = |(q, (_, step)): (&f32, &(f32, f32))| (q * step).abs();
            let largest = q.iter().zip(&ends).map(steps).fold(0.0, f32::max);
            for (row, codes) in codes.iter().enumerate() {
                let channel = |(q, (code, (base, step))): (&f32, (&u32, &(f32, f32)))| {
                    f64::from(*q) * (f64::from(*base) + f64::from(*code) * f64::from(*step))
                };
                let exact: f64 = q.iter().zip(codes.iter().zip(&ends)).map(channel).sum::<f64>() * 0.25;
                // Weights are whole numbers of 1/127 of the largest, 1/85 where there are 256; codes at most 3.
                let limit = 0.25 * f64::from(largest) * 3.0 * d as f64 / 2.0 / 85.0;
                assert!((f64::from(scores[row]) - exact).abs() <= limit + 1e-4, "{d}: {} {exact}", scores[row]);
            }
            for isa in Isa::available() {
                let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * d as f32;
                assert!(scored(isa, &q, &words, 0.25).iter().zip(&scores).all(near), "{isa:?} {d}");
            }
        }
    }

    #[test]
    fn a_query_scores_alone_as_in_any_group_and_a_key_as_in_any_part_of_a_block() {
        let mut numbers = Numbers(74);
        for (d, group) in [(64, 1), (16, 2), (64, 3), (40, 4), (128, 5), (8, 7), (16, 9)] {
            let keys: Vec<f32> = (0..BLOCK_TOKENS * d).map(|_| numbers.normal()).collect();
            let q: Vec<f32> = (0..group * d).map(|_| numbers.normal()).collect();
            let scales: Vec<f32> = (1..=group).map(|g| 0.1 * g as f32).collect();
            let words = &quantized(Isa::best(), &keys, d)[..];
            for isa in Isa::available() {
                for of in [0..64, 0..1, 63..64, 5..38] {
                    const UNTOUCHED: f32 = 1234.5;
                    let (queries, stride) = (&mut Queries::new(&q, d, &scales), of.len() + 1);
                    let mut scores = vec![UNTOUCHED; group * stride];
                    let (part, line) = (of.clone(), scores.as_mut_ptr());
                    dispatch!(isa, score::<_>(
                        isa: Isa, words: &[u32], queries: &mut Queries, part: Range<usize>, line: *mut f32, stride: usize
                    ));
                    for (g, scores) in scores.chunks(stride).enumerate() {
                        let alone = scored(isa, &q[g * d..][..d], words, scales[g]);
                        assert_eq!(scores[..of.len()], alone[of.clone()], "{isa:?} {d}: {g} of {group}, {of:?}");
                        assert_eq!(scores[of.len()], UNTOUCHED);
                    }
                }
            }
        }
    }

    #[test]
    fn scores_are_nearer_to_one_another_the_further_off_four_blocks_say_they_are() {
        let (mut numbers, d, kv_heads, blocks) = (Numbers(73), 24, 2, 12);
        // Each block's steps are its own.
        let mut data = Vec::new();
        for block in 0..blocks * kv_heads {
            let keys: Vec<f32> = (0..BLOCK_TOKENS * d).map(|_| numbers.normal() * (1 + block) as f32).collect();
            data.extend(quantized(Isa::best(), &keys, d));
        }
        let index =
            Tensor::from_vec(data.clone(), (blocks, kv_heads, 1, shape(d).1), &candle_core::Device::Cpu).unwrap();
        let lookup = Lookup::new(&data, &index, kv_heads).unwrap();
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let q: Vec<f32> = (0..3 * d).map(|_| 0.2 * numbers.normal()).collect();
        for (visible, measured) in [
            (0..1, [0, 0, 0, 0]),
            (0..130, [0, 1, 1, 2]),
            (0..12 * 64, [1, 4, 7, 10]),
            (0..9 * 64 + 1, [1, 3, 6, 8]),
            (70..600, [2, 4, 6, 8]),
        ] {
            for head in 0..kv_heads {
                let row = DecodeRow { table: &table, visible: visible.clone() };
                let found = scales((&lookup, d), &row, head, &q, 0.5);
                for (found, q) in found.iter().zip(q.chunks_exact(d)) {
                    let of = |block: usize| -> f64 {
                        let at = (table[block] as usize * kv_heads + head) * shape(d).1;
                        let (ends, _) = read(&data[at..][..shape(d).1], d);
                        q.iter().zip(ends).map(|(q, (_, step))| (f64::from(*q) * f64::from(step)).powi(2) / 12.0).sum()
                    };
                    let variance = 0.25 * measured.map(of).iter().sum::<f64>() / 4.0;
                    let exact = 0.5 / (1.0 + std::f64::consts::PI * variance / 4.0).sqrt();
                    assert!((f64::from(*found) - exact).abs() < 1e-5 * exact, "{visible:?} {head}: {found} {exact}");
                    assert!(exact < 0.45, "or it says nothing");
                }
            }
        }
    }

    #[test]
    fn sums_of_the_largest_weights_and_codes_fit() {
        for d in [128, 160, 240, 256] {
            // Tokens take turns between the ends of every channel: codes 0 and 3.
            let keys: Vec<f32> = (0..BLOCK_TOKENS * d).map(|i| (i / d % 2) as f32).collect();
            let words = quantized(Isa::best(), &keys, d);
            for isa in Isa::available() {
                let scores = scored(isa, &vec![1.0; d], &words, 1.0);
                for (t, score) in scores.iter().enumerate() {
                    let exact = d as f32 * if t % 2 == 0 { 0.125 } else { 0.875 };
                    assert!((score - exact).abs() < 1e-3 * exact, "{isa:?} {d}: {score} {exact}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none_and_what_is_equal_is_exact() {
        for isa in Isa::available() {
            let words = quantized(isa, &[2.5; 3 * 16], 16);
            assert_eq!(scored(isa, &[1.0; 16], &words, 1.0)[..3], [40.0; 3], "{isa:?}");
            assert_eq!(scored(isa, &[0.0; 16], &words, 1.0)[..3], [0.0; 3], "{isa:?}");
            let mut keys = [1.0; 3 * 16];
            keys[20] = f32::NAN;
            let words = quantized(isa, &keys, 16);
            assert!(scored(isa, &[1.0; 16], &words, 1.0).iter().all(|s| s.is_nan()), "{isa:?}");
            let words = quantized(isa, &[1.0; 3 * 16], 16);
            let mut q = [1.0; 16];
            q[3] = f32::INFINITY;
            assert!(!scored(isa, &q, &words, 1.0)[0].is_finite(), "{isa:?}");
        }
    }
}
