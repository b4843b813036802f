//! Choices that were made apart, and what they are as one.

use super::*;
use candle_core::Device;
use proptest::prelude::*;
use taper_kernels::decode::{HeadSelection, Keys, Sample, Values, scores};
use taper_kernels::kv::BLOCK_TOKENS;

const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const WIDTH: usize = 16;
/// The blocks of every row.
const TABLE: [u32; 3] = [2, 0, 1];

/// Numbers that look random, the same of one seed.
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn number(&mut self) -> f32 {
        self.below(2001) as f32 / 1000.0 - 1.0
    }

    fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }

    /// What a KV head reads of what a row sees.
    fn head(&mut self, visible: &Range<usize>) -> HeadSelection {
        match self.below(4) {
            0 => HeadSelection::Dense,
            1 => {
                let ids: Vec<u32> = visible.clone().step_by(1 + self.below(5)).map(|token| token as u32).collect();
                let weights = (0..GROUP * ids.len()).map(|_| 1.5 + self.number()).collect();
                HeadSelection::Values(Values { ids, weights })
            }
            _ => {
                let (mut keys, mut sampled) = (Keys::default(), Vec::new());
                let last = visible.end - 1;
                keys.ranges.push(last..last + 1);
                for token in visible.start as u32..last as u32 {
                    match self.below(4) {
                        0 => keys.ids.push(token),
                        1 => sampled.insert(self.below(sampled.len() + 1), token),
                        _ => {}
                    }
                }
                keys.sample = (!sampled.is_empty()).then(|| Sample {
                    counts: (0..GROUP).map(|_| self.below(sampled.len() + 1)).collect(),
                    log_weights: self.numbers(GROUP),
                    output: if self.below(3) == 0 { self.numbers(GROUP * WIDTH) } else { Vec::new() },
                    ids: sampled,
                });
                HeadSelection::Keys(keys)
            }
        }
    }
}

/// Rows that are chosen for apart from others.
#[derive(Debug)]
pub(crate) struct Apart {
    /// What they see.
    pub visible: Vec<Range<usize>>,
    heads: Vec<HeadSelection>,
    /// Heads whose scores were taken, where any were.
    wanted: Option<Vec<bool>>,
    scored: Vec<usize>,
    budgets: Option<Vec<Budget>>,
}

impl Apart {
    /// Of a method that samples, or of one that does not.
    pub fn new(seed: u64, rows: usize, samples: bool) -> Self {
        let mut draws = Draws(seed);
        let visible = |draws: &mut Draws| {
            let end = 1 + draws.below(TABLE.len() * BLOCK_TOKENS);
            draws.below(end)..end
        };
        let visible: Vec<_> = (0..rows).map(|_| visible(&mut draws)).collect();
        let heads = visible.iter().flat_map(|row| [(); KV_HEADS].map(|()| draws.head(row))).collect();
        let wanted =
            (draws.below(2) == 0).then(|| (0..rows * KV_HEADS).map(|_| draws.below(3) > 0).collect::<Vec<bool>>());
        let scored = (0..if draws.below(2) == 0 { rows } else { 0 }).map(|_| draws.below(99)).collect();
        let budget =
            |draws: &mut Draws| Budget { sampled: draws.below(9), dense: draws.below(2) == 0, ..Budget::default() };
        // None of those that the selection would tell.
        let told = if draws.below(3) == 0 { 0 } else { rows * KV_HEADS * GROUP };
        let budgets = samples.then(|| (0..told).map(|_| budget(&mut draws)).collect());
        Self { visible, heads, wanted, scored, budgets }
    }

    /// What is chosen for them; their queries begin at row `first`.
    pub fn choice(&self, first: usize) -> Choice {
        let score = |wanted: &Vec<bool>| with_rows(first, &self.visible, |batch| scores(batch, wanted).unwrap());
        Choice {
            selection: self.heads.clone().into(),
            scores: self.wanted.as_ref().map(score),
            scored: self.scored.clone(),
            budgets: self.budgets.clone(),
        }
    }

    /// The row alone.
    pub fn row(&self, row: usize) -> Self {
        let part = |all: usize| {
            let each = all / self.visible.len();
            row * each..(row + 1) * each
        };
        Self {
            visible: self.visible[part(self.visible.len())].to_vec(),
            heads: self.heads[part(self.heads.len())].to_vec(),
            wanted: self.wanted.as_ref().map(|wanted| wanted[part(wanted.len())].to_vec()),
            scored: self.scored[part(self.scored.len())].to_vec(),
            budgets: self.budgets.as_ref().map(|budgets| budgets[part(budgets.len())].to_vec()),
        }
    }
}

/// Runs something on rows that see so much, whose queries begin at row `first`.
fn with_rows<T>(first: usize, visible: &[Range<usize>], run: impl FnOnce(&Decode) -> T) -> T {
    let tensor = |seed: u64, dims: (usize, usize, usize, usize)| {
        let all = Draws(seed).numbers(dims.0 * dims.1 * dims.2 * dims.3);
        Tensor::from_vec(all, dims, &Device::Cpu).unwrap()
    };
    let cache = (TABLE.len(), KV_HEADS, BLOCK_TOKENS, WIDTH);
    let (k, v) = (tensor(1, cache), tensor(2, cache));
    let q = tensor(3, (first + visible.len(), KV_HEADS * GROUP, WIDTH, 1)).squeeze(3).unwrap();
    let q = q.narrow(0, first, visible.len()).unwrap();
    let rows: Vec<DecodeRow> =
        visible.iter().map(|visible| DecodeRow { table: &TABLE, visible: visible.clone() }).collect();
    run(&Decode { q: &q, kv: PagedKv { k: &k, v: &v }, rows: &rows })
}

/// What comes of a choice: outputs of each row, keys read of each row and KV head, and keys scored of each row.
fn comes_to(choice: &Choice, first: usize, visible: &[Range<usize>]) -> (Vec<Vec<f32>>, Vec<usize>, Vec<usize>) {
    with_rows(first, visible, |batch| {
        let out = attend(batch, &choice.selection, choice.scores.as_ref()).unwrap();
        let out = out.flatten_from(1).unwrap().to_vec2().unwrap();
        (out, choice.selection.counts(batch.rows).unwrap(), choice.keys_scored(visible.len()))
    })
}

proptest! {
    #[test]
    fn choices_that_are_joined_are_what_each_is_apart(
        seeds in prop::collection::vec((any::<u64>(), 1usize..4), 1..5),
        samples in any::<bool>(),
    ) {
        let parts: Vec<_> = seeds.into_iter().map(|(seed, rows)| Apart::new(seed, rows, samples)).collect();
        let (mut choices, mut visible, mut budgets) = (Vec::new(), Vec::new(), Vec::new());
        let (mut out, mut counts, mut scored) = (Vec::new(), Vec::new(), Vec::new());
        let tells = parts.iter().any(|part| part.budgets.as_ref().is_some_and(|budgets| !budgets.is_empty()));
        for part in &parts {
            let (first, rows) = (visible.len(), part.visible.len());
            let choice = part.choice(first);
            let (part_out, part_counts, part_scored) = comes_to(&choice, first, &part.visible);
            out.extend(part_out);
            counts.extend(part_counts);
            scored.extend(part_scored);
            visible.extend(part.visible.clone());
            budgets.extend(part.budgets.clone().unwrap_or_default());
            // Those that the selection tells say nothing, where others are told.
            budgets.resize(if tells { visible.len() * KV_HEADS * GROUP } else { 0 }, Budget::default());
            choices.push((rows, choice));
        }
        let joined = Choice::join(choices, (KV_HEADS, KV_HEADS * GROUP));
        prop_assert_eq!(comes_to(&joined, 0, &visible), (out, counts, scored));
        prop_assert_eq!(joined.budgets, samples.then_some(budgets));
    }
}
