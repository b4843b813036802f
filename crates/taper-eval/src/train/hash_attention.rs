//! HashAttention: perceptrons whose signs are codes, trained so that a query's best keys have codes like its own.
//!
//! Source: HashAttention (Desai et al. 2024, arXiv:2412.14468), section 4: three layers with SiLU between, 32 outputs; the
//! cross entropy of "is among the true top 32 keys outside sinks and window" with the sigmoid of the product of the tanh
//! of both outputs, positives weighted; Adam from 1e-3. Ours: one map of the keys for each KV head; both classes weigh
//! the same; of a sequence a batch of rows and a sample of keys, their best ones among them, is looked at; the tanh
//! sharpens tenfold and the learning rate falls over training.

use super::head::{Far, Head, Row};
use super::net::{self, Columns, Course, Descent, Linear};
use super::recall::{Recall, Tally, descending, greatest, rank};
use candle_core::{Result, Tensor, Var};
use candle_nn::ops::silu;
use rand::Rng;
use taper_kernels::index::codes::BITS;
use taper_kernels::mlp::{Activation, Mlp};

/// The keys that a query should find.
pub(super) const TOP: usize = 32;

/// Keys of a batch, beside the best ones of its rows; and of those at most so many.
const KEYS: usize = 512;

/// How much steeper the tanh is at the end.
const SHARPENED: f64 = 10.0;

/// Products of codes, from -32 to 32, are divided by this to be logits.
const SCALE: f64 = 4.0;

/// The maps of one KV head's group.
#[derive(Debug, Clone)]
pub(super) struct Maps {
    /// Of each query head.
    pub query: Vec<[Linear; 3]>,
    /// Of the keys.
    pub key: [Linear; 3],
}

/// One sequence as training looks at it.
struct Lesson {
    head_dim: usize,
    /// Standardised `[group][rows, d]`.
    queries: Vec<Vec<f32>>,
    /// Standardised `[tokens, d]`.
    keys: Vec<f32>,
    /// The far keys of each row, and the best of them for each query head `[rows]`.
    rows: Vec<(std::ops::Range<usize>, Vec<Vec<u32>>)>,
}

/// Perceptrons side by side: `[maps, n, inputs]` to `[maps, n, 32]`.
struct Perceptrons(Vec<(Var, Var)>);

impl Perceptrons {
    fn new(course: &mut Course, maps: usize, d: usize) -> Result<Self> {
        let hidden = course.hidden;
        let layer = |(inputs, outputs): (usize, usize)| {
            let weight = net::uniform(course, &[maps, outputs, inputs], (3.0 / inputs as f64).sqrt())?;
            Ok((weight, net::constant(0.0, &[maps, 1, outputs], course.device)?))
        };
        Ok(Self([(d, hidden), (hidden, hidden), (hidden, BITS)].into_iter().map(layer).collect::<Result<_>>()?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for (i, (weight, bias)) in self.0.iter().enumerate() {
            x = net::linear(&if i > 0 { silu(&x)? } else { x }, weight, bias)?;
        }
        Ok(x)
    }

    fn vars(&self) -> impl Iterator<Item = Var> + '_ {
        self.0.iter().flat_map(|(weight, bias)| [weight.clone(), bias.clone()])
    }

    /// The maps one by one, for inputs that are not standardised.
    fn folded(&self, columns: &[Columns]) -> Result<Vec<[Linear; 3]>> {
        let map = |(m, columns): (usize, &Columns)| {
            let linear = |i: usize| -> Result<Linear> {
                let (weight, bias) = &self.0[i];
                Ok((net::numbers(&weight.get(m)?)?, net::numbers(&bias.get(m)?)?))
            };
            let mut layers = [linear(0)?, linear(1)?, linear(2)?];
            columns.fold_into(&mut layers[0]);
            Ok(layers)
        };
        columns.iter().enumerate().map(map).collect()
    }
}

impl Maps {
    /// Learns from the sequences of one KV head; `None` if it was told to end early.
    ///
    /// # Errors
    /// candle's.
    pub fn train(heads: &[Head], far: &Far, course: &mut Course) -> Result<Option<Self>> {
        let schedule = course.schedule;
        let (d, group) = (heads[0].head_dim(), heads[0].group);
        let all = |of: &dyn Fn(&Head) -> Vec<f32>| Columns::of(&heads.iter().flat_map(of).collect::<Vec<_>>(), d);
        let key_columns = all(&|head| head.keys(true));
        let query_columns: Vec<Columns> = (0..group).map(|g| all(&|head| head.queries(g, true))).collect();
        let lessons = heads.iter().map(|head| Lesson::new(head, far, &query_columns, &key_columns));
        let lessons = lessons.collect::<Result<Vec<_>>>()?;
        let lessons: Vec<&Lesson> = lessons.iter().filter(|lesson| !lesson.rows.is_empty()).collect();
        let (query, key) = (Perceptrons::new(course, group, d)?, Perceptrons::new(course, 1, d)?);
        let mut descent = Descent::new(query.vars().chain(key.vars()).collect(), schedule)?;
        for iteration in 0..schedule.iterations {
            let lesson = lessons[course.rng.random_range(0..lessons.len())];
            let sharp = SHARPENED.powf(iteration as f64 / schedule.iterations as f64);
            let batch = lesson.batch(course)?;
            let code = |maps: &Perceptrons, x: &Tensor| (maps.forward(x)? * sharp)?.tanh();
            let (q, k) = (code(&query, &batch.queries)?, code(&key, &batch.keys)?);
            let logits = (q.flatten(0, 1)?.matmul(&k.squeeze(0)?.t()?)? / SCALE)?;
            // The cross entropy: softplus(x) − x where the key is a best one, softplus(x) where it is not.
            let entropy = ((net::softplus(&logits)? - (&logits * &batch.labels)?)? * &batch.weights)?;
            descent.step(&entropy.sum_all()?)?;
            if !(course.step)() {
                return Ok(None);
            }
        }
        let key = key.folded(&[key_columns])?.swap_remove(0);
        Ok(Some(Self { query: query.folded(&query_columns)?, key }))
    }

    /// The codes of rows `[n, d]`.
    fn codes(map: &[Linear; 3], x: &[f32]) -> Result<Vec<u32>> {
        let code = |y: &[f32]| y.iter().enumerate().fold(0, |code, (bit, &y)| code | u32::from(y >= 0.0) << bit);
        Ok(Mlp::new(map.to_vec(), Activation::Silu)?.forward(x).chunks_exact(BITS).map(code).collect())
    }
}

/// What one iteration looks at.
struct Batch {
    /// `[group, rows, d]`.
    queries: Tensor,
    /// `[1, keys, d]`.
    keys: Tensor,
    /// 1 where the key is among the query's best `[group · rows, keys]`.
    labels: Tensor,
    /// What a pair weighs: nothing where the key is not a far one; each class half of all.
    weights: Tensor,
}

impl Lesson {
    fn new(head: &Head, far: &Far, query_columns: &[Columns], key_columns: &Columns) -> Result<Self> {
        let standard = |mut x: Vec<f32>, columns: &Columns| {
            columns.standardise(&mut x);
            x
        };
        let rows = head.map(far, |row| {
            let best = |g: usize| {
                let best = greatest(row.far_scores(g), TOP).into_iter();
                best.map(|i| (row.far.start + i) as u32).collect::<Vec<_>>()
            };
            (row.far.clone(), (0..row.heads()).map(best).collect())
        })?;
        Ok(Self {
            head_dim: head.head_dim(),
            queries: (0..head.group).map(|g| standard(head.queries(g, true), &query_columns[g])).collect(),
            keys: standard(head.keys(true), key_columns),
            rows,
        })
    }

    fn batch(&self, course: &mut Course) -> Result<Batch> {
        let (d, count, rng) = (self.head_dim, course.schedule.batch, &mut *course.rng);
        let rows: Vec<usize> = (0..count).map(|_| rng.random_range(0..self.rows.len())).collect();
        let end = rows.iter().map(|&row| self.rows[row].0.end).max().unwrap_or(1).max(1);
        let mut best: Vec<u32> = rows.iter().flat_map(|&row| self.rows[row].1.concat()).collect();
        best.sort_unstable();
        best.dedup();
        let drawn = rand::seq::index::sample(rng, best.len(), KEYS.min(best.len()));
        let mut keys: Vec<u32> = drawn.iter().map(|i| best[i]).collect();
        keys.extend((0..KEYS).map(|_| rng.random_range(0..end) as u32));
        keys.sort_unstable();
        keys.dedup();
        let group = self.queries.len();
        let (mut labels, mut weights) = (Vec::new(), Vec::new());
        for g in 0..group {
            for &row in &rows {
                let (far, best) = &self.rows[row];
                labels.extend(keys.iter().map(|key| f32::from(u8::from(best[g].contains(key)))));
                weights.extend(keys.iter().map(|&key| f32::from(u8::from(far.contains(&(key as usize))))));
            }
        }
        let pairs: f32 = weights.iter().sum();
        let positive: f32 = labels.iter().sum();
        let (yes, no) = (0.5 / positive.max(1.0), 0.5 / (pairs - positive).max(1.0));
        weights.iter_mut().zip(&labels).for_each(|(weight, label)| *weight *= if *label > 0.0 { yes } else { no });
        let take = |from: &[f32], i: usize| from[i * d..(i + 1) * d].to_vec();
        let queries: Vec<f32> =
            self.queries.iter().flat_map(|from| rows.iter().flat_map(move |&row| take(from, row))).collect();
        let taken: Vec<f32> = keys.iter().flat_map(|&key| take(&self.keys, key as usize)).collect();
        let pairs = (group * count, keys.len());
        Ok(Batch {
            queries: Tensor::from_vec(queries, (group, count, d), course.device)?,
            keys: Tensor::from_vec(taken, (1, keys.len(), d), course.device)?,
            labels: Tensor::from_vec(labels, pairs, course.device)?,
            weights: Tensor::from_vec(weights, pairs, course.device)?,
        })
    }
}

/// Recall of far attention mass, and of each query's true best keys, by the keys whose codes have most bits in common
/// with those of the group's queries.
///
/// # Errors
/// candle's.
pub(super) fn recalls(heads: &[(Head, &Maps)], far: &Far) -> Result<Vec<Recall>> {
    let (mut own, mut oracle, mut top) = (Tally::default(), Tally::default(), Tally::default());
    for (head, maps) in heads {
        let keys = Maps::codes(&maps.key, &head.keys(true))?;
        let queries = (0..head.group).map(|g| Maps::codes(&maps.query[g], &head.queries(g, true)));
        let queries = queries.collect::<Result<Vec<_>>>()?;
        let measured = head.map(far, |row| {
            let importance = |row: &Row| -> Vec<f32> {
                let equal =
                    |key: &u32| queries.iter().map(|q| BITS as u32 - (q[row.index] ^ key).count_ones()).sum::<u32>();
                keys[row.far.clone()].iter().map(|key| equal(key) as f32).collect()
            };
            let mut top = Tally::default();
            let order = descending(&importance(row));
            for g in (0..row.heads()).filter(|&g| row.looks_far(g)) {
                let mut best = vec![0f32; row.far.len()];
                let count = TOP.min(best.len());
                greatest(row.far_scores(g), count).into_iter().for_each(|i| best[i] = 1.0 / count as f32);
                top.add_keys(&order, &best);
            }
            (rank(row, importance), top)
        })?;
        for ((a, b), c) in measured {
            own.add(&a);
            oracle.add(&b);
            top.add(&c);
        }
    }
    Ok(vec![own.named("codes"), oracle.named("oracle keys"), top.named("codes, of the top 32")])
}
