//! From sums of probabilities to what is read: columns (keys that many rows read) and slashes (diagonals).

use super::selection::{Blocks, HeadReads, StripedRun};
use super::{Mask, Sums};
#[cfg(feature = "cuda")]
use crate::cuda::DeviceStripes;
use crate::kv::BLOCK_TOKENS;
use crate::parallel;
use candle_core::{Result, Tensor, bail};
use std::cmp::Ordering;
use std::ops::Range;

/// What one list of heads keeps. The rows of query block `b` read the key blocks `b - distance` for all distances, the
/// listed blocks and the single tokens, causally, and always their own block.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stripes {
    /// Key blocks, ascending.
    pub blocks: Vec<u32>,
    /// Key tokens, ascending.
    pub tokens: Vec<u32>,
    /// Blocks between a row's own and one that it reads, ascending.
    pub distances: Vec<u32>,
    /// Tokens of a block of `blocks` and `distances`, a multiple of 64.
    pub block_tokens: usize,
}

impl Stripes {
    /// What runs of rows read, each within one block of `block_tokens`.
    pub fn reads(&self, runs: &[Range<usize>]) -> HeadReads {
        let own: Vec<u32> = runs.iter().map(|run| (run.start / self.block_tokens) as u32).collect();
        let before = self.before(&own);
        let runs = own.into_iter().zip(before).map(|(own, keys)| StripedRun { own, keys }).collect();
        HeadReads {
            mask: Mask::Causal,
            blocks: Some(Blocks::Striped { stripes: Self { tokens: Vec::new(), ..self.clone() }, runs }),
            tokens: [self.tokens.iter().copied()].into_iter().collect(),
        }
    }

    /// The key blocks of 64 tokens, ascending, that the rows of block `own` read.
    pub(super) fn blocks_of(&self, own: u32) -> impl Iterator<Item = u32> {
        let each = (self.block_tokens / BLOCK_TOKENS) as u32;
        let near = self.distances.iter().rev().filter_map(move |&distance| own.checked_sub(distance));
        let listed = self.blocks.iter().copied().take_while(move |&block| block < own);
        let own = (!self.distances.contains(&0)).then_some(own);
        merge(near, listed).chain(own).flat_map(move |block| block * each..(block + 1) * each)
    }

    /// How many keys before each of some blocks their rows read: blocks that are listed or a distance away, by 64 at a time,
    /// and single tokens in no such block.
    fn before(&self, own: &[u32]) -> Vec<u32> {
        let end = own.iter().max().map_or(0, |&last| last as usize + 1);
        let words = end / 64 + 2;
        let bits = |ids: &mut dyn Iterator<Item = usize>| {
            let mut bits = vec![0u64; words];
            ids.for_each(|id| bits[id / 64] |= 1 << (id % 64));
            bits
        };
        let below = |ids: &[u32]| ids.iter().map(|&id| id as usize).take_while(|&id| id < end).collect::<Vec<_>>();
        let listed = bits(&mut below(&self.blocks).into_iter());
        // Turned round: the block a distance before `own` has bit `end - 1 - own + block` here.
        let near = bits(&mut below(&self.distances).into_iter().map(|distance| end - 1 - distance));
        let mut tokens = vec![0u32; end];
        for &token in self.tokens.iter().take_while(|&&token| (token as usize) < end * self.block_tokens) {
            tokens[token as usize / self.block_tokens] += 1;
        }
        let single = bits(&mut (0..end).filter(|&block| tokens[block] > 0));
        let of = |&own: &u32| {
            let (own, shift) = (own as usize, end - 1 - own as usize);
            let earlier = |at: usize| if own / 64 == at { (1 << (own % 64)) - 1 } else { u64::MAX };
            let read = |at: usize| {
                let (low, high) = (near[at + shift / 64], near.get(at + shift / 64 + 1).copied().unwrap_or(0));
                let near = if shift.is_multiple_of(64) { low } else { low >> (shift % 64) | high << (64 - shift % 64) };
                (listed[at] | near) & earlier(at)
            };
            let keys = |at: usize| {
                let read = read(at);
                let mut apart = single[at] & earlier(at) & !read;
                let mut keys = read.count_ones() * self.block_tokens as u32;
                while apart > 0 {
                    keys += tokens[at * 64 + apart.trailing_zeros() as usize];
                    apart &= apart - 1;
                }
                keys
            };
            (0..=own / 64).map(keys).sum()
        };
        let parts: Vec<&[u32]> = own.chunks(RUNS_A_UNIT).collect();
        parallel::map(parts.len(), |part| parts[part].iter().map(of).collect::<Vec<u32>>()).concat()
    }
}

/// Runs that a thread counts keys of at a time.
const RUNS_A_UNIT: usize = 256;

/// Two ascending sequences as one, each number once.
fn merge(a: impl Iterator<Item = u32>, b: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
    let (mut a, mut b) = (a.peekable(), b.peekable());
    std::iter::from_fn(move || {
        let next = match (a.peek(), b.peek()) {
            (Some(&a), Some(&b)) => a.min(b),
            (Some(&one), None) | (None, Some(&one)) => one,
            (None, None) => return None,
        };
        a.next_if_eq(&next);
        b.next_if_eq(&next);
        Some(next)
    })
}

/// The fewest entries of `mass` whose sum reaches the share `alpha` of all, the one that reaches it included, ascending;
/// of equals the first. None for `alpha <= 0`, all for `alpha >= 1` and where the sums are no numbers.
///
/// # Source
/// SampleAttention, `find_k`.
pub fn find_k(mass: &[f32], alpha: f64) -> Vec<u32> {
    if alpha <= 0.0 {
        return Vec::new();
    }
    let total: f64 = mass.iter().map(|&m| f64::from(m)).sum();
    let mut order = heaviest_first(mass);
    let mut sum = 0.0;
    let reached = order.iter().position(|&i| {
        sum += f64::from(mass[i as usize]);
        sum >= alpha * total
    });
    if let Some(last) = reached.filter(|_| alpha < 1.0) {
        order.truncate(last + 1);
    }
    order.sort_unstable();
    order
}

/// The first `forced` entries of `mass` and the heaviest others, `keep` in all if that is more, ascending; of equals the
/// first.
///
/// # Source
/// MInference, the vertical-slash pattern.
pub fn top(mass: &[f32], keep: usize, forced: usize) -> Vec<u32> {
    let forced = forced.min(mass.len());
    let others = keep.clamp(forced, mass.len()) - forced;
    let mut order: Vec<u32> = (forced as u32..mass.len() as u32).collect();
    // Which they are matters, their order does not.
    if (1..order.len()).contains(&others) {
        order.select_nth_unstable_by(others - 1, |&a, &b| heavier(mass, a, b).then(a.cmp(&b)));
    }
    order.truncate(others);
    order.extend(0..forced as u32);
    order.sort_unstable();
    order
}

/// Indices by falling mass, NaN first; of equals the first.
fn heaviest_first(mass: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..mass.len() as u32).collect();
    order.sort_by(|&a, &b| heavier(mass, a, b));
    order
}

fn heavier(mass: &[f32], a: u32, b: u32) -> Ordering {
    mass[b as usize].abs().total_cmp(&mass[a as usize].abs())
}

/// What share of the mass columns and slashes keep, and in blocks of how many tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shares {
    /// Of the columns.
    pub columns: f64,
    /// Of the slashes.
    pub slashes: f64,
    /// Tokens of a block, a multiple of 64.
    pub block_tokens: usize,
}

/// SampleAttention's choice for each KV head, of what runs of rows within one block read: the sums of its group, added up by
/// blocks of keys and by blocks of diagonals, each cut to the fewest that reach their share. A slash `b` stands for the diagonals
/// `b` blocks down to the next, which cross two key blocks of a query block; block 0 is always kept. `window` is the model's own.
///
/// # Errors
/// A device error, query heads that are not a multiple of the KV heads, a block that is not a multiple of 64.
///
/// # Source
/// SampleAttention, Algorithm 1: `find_k` and `merge_index`.
pub fn by_share(
    sums: &Sums,
    kv_heads: usize,
    shares: &Shares,
    runs: &[Range<usize>],
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] window: Option<usize>,
) -> Result<Vec<HeadReads>> {
    let block_tokens = shares.block_tokens;
    if block_tokens == 0 || !block_tokens.is_multiple_of(BLOCK_TOKENS) {
        bail!("stripes: blocks of {block_tokens} tokens; expected a multiple of {BLOCK_TOKENS}");
    }
    // A device adds blocks up itself: what goes to the host, if anything does, is smaller by as much.
    let each = if sums.columns.device().is_cpu() { 1 } else { block_tokens };
    let (columns, slashes) = (added_up(&sums.columns, each)?, added_up(&sums.diagonals, each)?);
    #[cfg(feature = "cuda")]
    if kept_on_device(sums, window) {
        return Ok(DeviceStripes::by_share((&columns, &slashes), kv_heads, shares)?.into_reads(runs)?);
    }
    let (columns, slashes) = (Table::of(&columns)?, Table::of(&slashes)?);
    let mut all = Vec::with_capacity(kv_heads);
    for heads in columns.groups(kv_heads)? {
        let columns = find_k(&columns.by_block(heads.clone(), block_tokens / each), shares.columns);
        let slashes = find_k(&slashes.by_block(heads, block_tokens / each), shares.slashes);
        let blocks = merge(std::iter::once(0), columns.into_iter()).collect();
        let distances = merge(slashes.clone().into_iter(), slashes.into_iter().map(|b| b + 1)).collect();
        all.push(Stripes { blocks, tokens: Vec::new(), distances, block_tokens }.reads(runs));
    }
    Ok(all)
}

/// Whether what is chosen by these sums can stay on their device: in a model with a window of its own the host has to
/// know it, for what rows see of it.
#[cfg(feature = "cuda")]
fn kept_on_device(sums: &Sums, window: Option<usize>) -> bool {
    sums.columns.device().is_cuda() && window.is_none()
}

/// How many columns and slashes a head keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Keys.
    pub columns: usize,
    /// Diagonals.
    pub slashes: usize,
}

/// MInference's vertical-slash choice for each query head asked for, of what runs of rows within one block of 64 read:
/// the heaviest keys, and every block that one of the heaviest diagonals touches. Among them are always the `forced` first
/// keys of the sequence and diagonals next to the query. `window` is the model's own.
///
/// # Errors
/// A device error, a head that is not there.
///
/// # Source
/// MInference, Algorithm 2.
pub fn by_count(
    sums: &Sums,
    heads: &[(usize, Counts)],
    forced: Counts,
    runs: &[Range<usize>],
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] window: Option<usize>,
) -> Result<Vec<HeadReads>> {
    if heads.is_empty() {
        return Ok(Vec::new());
    }
    #[cfg(feature = "cuda")]
    if kept_on_device(sums, window) {
        return Ok(DeviceStripes::by_count(sums, heads, forced)?.into_reads(runs)?);
    }
    let wanted = |of: fn(&Counts) -> usize| heads.iter().map(|(head, counts)| (*head, of(counts))).collect::<Vec<_>>();
    let columns = tops(&sums.columns, &wanted(|counts| counts.columns), forced.columns)?;
    let slashes = tops(&sums.diagonals, &wanted(|counts| counts.slashes), forced.slashes)?;
    let of = |(tokens, offsets): (Vec<u32>, Vec<u32>)| {
        // Diagonal o of a query block of 64 rows crosses the blocks o / 64 back and, unless they line up, one more.
        let block = BLOCK_TOKENS as u32;
        let (mut near, mut far): (Vec<u32>, Vec<u32>) = offsets.iter().map(|o| (o / block, o.div_ceil(block))).unzip();
        near.dedup();
        far.dedup();
        let distances = merge(near.into_iter(), far.into_iter()).collect();
        Stripes { blocks: Vec::new(), tokens, distances, block_tokens: BLOCK_TOKENS }.reads(runs)
    };
    Ok(columns.into_iter().zip(slashes).map(of).collect())
}

/// [`top`] of some lists of `mass` `[lists, n]`: which, and how many to keep.
fn tops(mass: &Tensor, wanted: &[(usize, usize)], forced: usize) -> Result<Vec<Vec<u32>>> {
    #[cfg(feature = "cuda")]
    if mass.device().is_cuda() {
        return Ok(crate::cuda::top(mass, wanted, forced)?);
    }
    let one =
        |&(list, keep): &(usize, usize)| Ok(top(&mass.narrow(0, list, 1)?.flatten_all()?.to_vec1()?, keep, forced));
    wanted.iter().map(one).collect()
}

/// Sums `[heads, n]` over every `each` neighbours, the last over what there is.
fn added_up(sums: &Tensor, each: usize) -> Result<Tensor> {
    let (heads, n) = sums.dims2()?;
    if each == 1 {
        return Ok(sums.clone());
    }
    let count = n.div_ceil(each);
    sums.pad_with_zeros(1, 0, count * each - n)?.reshape((heads, count, each))?.sum(2)
}

/// Sums `[heads, n]` on the host.
struct Table {
    mass: Vec<f32>,
    heads: usize,
    n: usize,
}

impl Table {
    fn of(sums: &Tensor) -> Result<Self> {
        let (heads, n) = sums.dims2()?;
        Ok(Self { mass: sums.flatten_all()?.to_vec1()?, heads, n })
    }

    /// The query heads of each KV head.
    fn groups(&self, kv_heads: usize) -> Result<impl Iterator<Item = Range<usize>> + use<>> {
        if kv_heads == 0 || !self.heads.is_multiple_of(kv_heads) {
            bail!("stripes: sums of {} heads for {kv_heads} KV heads", self.heads);
        }
        let group = self.heads / kv_heads;
        Ok((0..kv_heads).map(move |head| head * group..(head + 1) * group))
    }

    /// The mass of each block, over some heads.
    fn by_block(&self, heads: Range<usize>, block_tokens: usize) -> Vec<f32> {
        let mut blocks = vec![0f64; self.n.div_ceil(block_tokens)];
        for head in heads {
            for (at, &mass) in self.mass[head * self.n..][..self.n].iter().enumerate() {
                blocks[at / block_tokens] += f64::from(mass);
            }
        }
        blocks.into_iter().map(|mass| mass as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What stripes say, key by key.
    fn read(stripes: &Stripes, row: usize, key: usize) -> bool {
        let (own, block) = (row / stripes.block_tokens, key / stripes.block_tokens);
        let listed = stripes.blocks.contains(&(block as u32)) || stripes.tokens.contains(&(key as u32));
        let near = own >= block && stripes.distances.contains(&((own - block) as u32));
        key <= row && (listed || near || own == block)
    }

    proptest! {
        #[test]
        fn find_k_takes_the_fewest_that_reach_the_share(
            mass in prop::collection::vec(0u8..20, 1..40), alpha in 0.01f64..0.99
        ) {
            let mass: Vec<f32> = mass.into_iter().map(f32::from).collect();
            let total: f32 = mass.iter().sum();
            let kept = find_k(&mass, alpha);
            let sum: f32 = kept.iter().map(|&i| mass[i as usize]).sum();
            prop_assert!(f64::from(sum) >= alpha * f64::from(total) - 1e-6);
            let least = kept.iter().map(|&i| mass[i as usize]).fold(f32::INFINITY, f32::min);
            prop_assert!(total == 0.0 || f64::from(sum - least) < alpha * f64::from(total) + 1e-6);
            // Nothing heavier is left out, and of equals the first are kept.
            for i in (0..mass.len() as u32).filter(|i| !kept.contains(i)) {
                prop_assert!(kept.iter().all(|&k| mass[k as usize] > mass[i as usize]
                    || mass[k as usize] == mass[i as usize] && k < i));
            }
            prop_assert!(kept.is_sorted());
            prop_assert_eq!(find_k(&mass, 0.0).len(), 0);
            prop_assert_eq!(find_k(&mass, 1.0).len(), mass.len());
        }

        #[test]
        fn top_keeps_the_forced_and_the_heaviest(
            mass in prop::collection::vec(0u8..20, 1..40), keep in 0usize..50, forced in 0usize..50
        ) {
            let mass: Vec<f32> = mass.into_iter().map(f32::from).collect();
            let kept = top(&mass, keep, forced);
            prop_assert_eq!(kept.len(), keep.max(forced).min(mass.len()));
            prop_assert!((0..forced.min(mass.len()) as u32).all(|i| kept.contains(&i)));
            let lightest = kept.iter().filter(|&&i| i as usize >= forced).map(|&i| mass[i as usize]).fold(f32::INFINITY, f32::min);
            prop_assert!((0..mass.len() as u32).filter(|i| !kept.contains(i)).all(|i| mass[i as usize] <= lightest));
        }

        #[test]
        fn lists_are_what_stripes_say(
            blocks in prop::collection::btree_set(0u32..8, 0..5),
            tokens in prop::collection::btree_set(0u32..500, 0..20),
            distances in prop::collection::btree_set(0u32..8, 0..5),
            each in 1usize..3, start in 0usize..200, rows in 1usize..300
        ) {
            let stripes = Stripes {
                blocks: blocks.into_iter().collect(),
                tokens: tokens.into_iter().collect(),
                distances: distances.into_iter().collect(),
                block_tokens: each * BLOCK_TOKENS,
            };
            let runs = super::super::query_blocks(start..start + rows, stripes.block_tokens);
            let reads = stripes.reads(&runs);
            let lists: Vec<(Vec<u32>, Vec<u32>)> = (0..runs.len())
                .map(|run| reads.lists(run))
                .map(|(blocks, tokens)| (blocks.unwrap().into_owned(), tokens.to_vec()))
                .collect();
            let starts: Vec<usize> = runs.iter().map(|run| run.start).collect();
            let selection = super::super::Selection::new(runs, vec![reads]).unwrap();
            let positions: Vec<u32> = (start as u32..(start + rows) as u32).collect();
            let counts = selection.counts(&positions, None);
            for (row, count) in (start..start + rows).zip(counts) {
                prop_assert_eq!(count, (0..=row).filter(|&key| read(&stripes, row, key)).count(), "row {}", row);
                let (blocks, tokens) = &lists[starts.partition_point(|&start| start <= row) - 1];
                prop_assert!(blocks.is_sorted_by(|a, b| a < b), "{:?}", blocks);
                for key in 0..=row {
                    let listed = blocks.contains(&((key / BLOCK_TOKENS) as u32)) || tokens.contains(&(key as u32));
                    prop_assert_eq!(listed, read(&stripes, row, key), "row {}, key {}", row, key);
                }
            }
        }
    }

    #[test]
    fn sums_that_are_no_numbers_keep_everything() {
        assert_eq!(find_k(&[1.0, f32::NAN, 2.0], 0.5), [0, 1, 2]);
        assert_eq!(top(&[1.0, f32::NAN, 2.0], 1, 0), [1]);
    }
}
