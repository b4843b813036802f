//! SAAP: clusters of the keys before the rotary embedding, and for each KV head a classifier that predicts in which of
//! them a query's far attention mass lies.
//!
//! Source: SAAP (Mazaré et al. 2025, arXiv:2502.08213), section 4 and appendix A. As there: spherical k-means of ten
//! rounds from random rows; two linear layers with batch normalisation and ReLU between and a softmax; the KL
//! divergence from the mass of each cluster; only queries whose best key is far. Ours: one classifier serves the query
//! heads of a group; far is what sinks and window leave, for the mass and for the choice of queries alike; a minibatch
//! is drawn from all sequences instead of one; the classifier begins as the centroids' own scores, and Adam at 1e-3 and
//! falling, for a thousand iterations instead of 40,000 at 1e-5; batch normalisation uses, in the artefact, the
//! statistics of all training queries.

use super::head::{Far, Head, softmax};
use super::net::{self, Columns, Course, Descent, Linear};
use super::recall::{Recall, Tally, descending};
use candle_core::{Result, Tensor, Var};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use taper_kernels::index::clusters::Centroids;
use taper_kernels::mlp::{Activation, Mlp};

/// What a classifier learns from.
#[derive(Debug, Clone, Default)]
pub(super) struct Samples {
    /// Queries before the rotary embedding `[n, head_dim]`.
    pub queries: Vec<f32>,
    /// The share of each cluster in their far attention mass `[n, clusters]`.
    pub targets: Vec<f32>,
}

/// Fewer queries that look far than this are too few to learn from.
const LEAST: usize = 200;

impl Samples {
    /// The queries of all heads that look far; all that have far keys where those are too few.
    ///
    /// # Errors
    /// candle's.
    pub fn of(heads: &[Head], far: &Far, centroids: &Centroids) -> Result<Self> {
        let found = Self::collect(heads, far, centroids, true)?;
        if found.queries.len() >= LEAST * centroids.dim() {
            Ok(found)
        } else {
            Self::collect(heads, far, centroids, false)
        }
    }

    fn collect(heads: &[Head], far: &Far, centroids: &Centroids, looking_far: bool) -> Result<Self> {
        let (d, clusters) = (centroids.dim(), centroids.clusters());
        let mut samples = Self::default();
        for head in heads {
            let own = centroids.assign(&head.keys(false));
            let targets = head.map(far, |row| {
                let target = |g: usize| {
                    let wanted = !row.far.is_empty() && (!looking_far || row.looks_far(g));
                    wanted.then(|| masses(&row.far_mass(g), &own[row.far.clone()], clusters))
                };
                (row.index, (0..row.heads()).map(target).collect::<Vec<_>>())
            })?;
            for g in 0..head.group {
                let queries = head.queries(g, false);
                for (row, targets) in &targets {
                    if let Some(target) = &targets[g] {
                        samples.queries.extend_from_slice(&queries[row * d..(row + 1) * d]);
                        samples.targets.extend_from_slice(target);
                    }
                }
            }
        }
        Ok(samples)
    }
}

/// The mass of each cluster, from that of keys and their clusters.
fn masses(mass: &[f32], own: &[u16], clusters: usize) -> Vec<f32> {
    let mut sums = vec![0f32; clusters];
    mass.iter().zip(own).for_each(|(mass, &c)| sums[usize::from(c)] += mass);
    sums
}

/// A trained classifier.
#[derive(Debug, Clone)]
pub(super) struct Classifier {
    /// The two layers, everything folded in.
    pub layers: [Linear; 2],
    /// The KL divergence of the last batches, in nats.
    #[cfg_attr(not(test), expect(dead_code, reason = "what tests look at"))]
    pub divergence: f32,
}

impl Classifier {
    /// Learns to predict the samples' targets, from where the centroids `[clusters, d]` stand; `None` if it was told to end
    /// early.
    ///
    /// # Errors
    /// candle's.
    pub fn train(samples: &Samples, centroids: &[f32], d: usize, course: &mut Course) -> Result<Option<Self>> {
        let Course { hidden, schedule, device, .. } = *course;
        let n = samples.queries.len() / d;
        let clusters = samples.targets.len() / n.max(1);
        let columns = Columns::of(&samples.queries, d);
        let mut inputs = samples.queries.clone();
        columns.standardise(&mut inputs);
        let (first, second, bias) = start(centroids, &columns, hidden, course.rng);
        let var = |values: Vec<f32>, shape: (usize, usize)| Var::from_tensor(&Tensor::from_vec(values, shape, device)?);
        // Normalisation takes any bias of the first layer off again, so it has none.
        let (first, second, bias) =
            (var(first, (hidden, d))?, var(second, (clusters, hidden))?, var(bias, (1, clusters))?);
        let (gain, shift) = (net::constant(1.0, &[1, hidden], device)?, net::constant(0.0, &[1, hidden], device)?);
        let vars = [&first, &gain, &shift, &second, &bias].map(Clone::clone).to_vec();
        let mut descent = Descent::new(vars, schedule)?;
        let entropy = |target: &[f32]| target.iter().filter(|p| **p > 0.0).map(|p| -p * p.ln()).sum();
        let entropies: Vec<f32> = samples.targets.chunks_exact(clusters).map(entropy).collect();
        let (mut divergence, recent) = (0.0, 0.05f32);
        let batch = schedule.batch.min(n);
        for iteration in 0..schedule.iterations {
            let drawn: Vec<usize> = (0..batch).map(|_| course.rng.random_range(0..n)).collect();
            let rows = |from: &[f32], width: usize| {
                let rows: Vec<f32> = drawn.iter().flat_map(|i| &from[i * width..(i + 1) * width]).copied().collect();
                Tensor::from_vec(rows, (batch, width), device)
            };
            let (x, target) = (rows(&inputs, d)?, rows(&samples.targets, clusters)?);
            let h = net::batch_norm(&x.matmul(&first.t()?)?, &gain, &shift)?.relu()?;
            let out = h.matmul(&second.t()?)?.broadcast_add(&bias)?;
            // The cross entropy; targets add up to 1.
            let fit = (&out * &target)?.sum_all()?;
            let loss = ((out.log_sum_exp(1)?.sum_all()? - fit)? / batch as f64)?;
            descent.step(&loss)?;
            let entropy: f32 = drawn.iter().map(|&i| entropies[i]).sum();
            let now = loss.to_scalar::<f32>()? - entropy / batch as f32;
            divergence = if iteration == 0 { now } else { divergence + recent * (now - divergence) };
            if !(course.step)() {
                return Ok(None);
            }
        }
        let mut layer = (net::numbers(&first)?, vec![0.0; hidden]);
        let h = Tensor::from_vec(inputs, (n, d), device)?.matmul(&first.t()?)?;
        let statistics = Columns::of(&net::numbers(&h)?, hidden);
        net::fold_norm(&mut layer, &statistics, &net::numbers(&gain)?, &net::numbers(&shift)?);
        columns.fold_into(&mut layer);
        let layers = [layer, (net::numbers(&second)?, net::numbers(&bias)?)];
        Ok(Some(Self { layers, divergence }))
    }

    /// As a running model has it.
    ///
    /// # Errors
    /// Layers that do not fit, which training does not make.
    pub fn mlp(&self) -> Result<Mlp> {
        Mlp::new(self.layers.to_vec(), Activation::Relu)
    }
}

/// Weights to begin with, for standardised queries: first layer `[hidden, d]`, second layer `[clusters, hidden]` and its
/// bias. Two units for each dimension, one for either sign, carry the query through, and the second layer scores it by
/// the centroids, so that training begins with what k-means would choose. Further units are drawn at random and have no
/// say yet. Without units enough for that, all are drawn.
fn start(centroids: &[f32], columns: &Columns, hidden: usize, rng: &mut ChaCha8Rng) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let d = columns.mean.len();
    let clusters = centroids.len() / d;
    let spread = (3.0 / d as f64).sqrt();
    let mut first: Vec<f32> = (0..hidden * d).map(|_| rng.random_range(-spread..=spread) as f32).collect();
    let mut second = vec![0f32; clusters * hidden];
    if hidden < 2 * d {
        let spread = 0.1 * (3.0 / hidden as f64).sqrt();
        second.iter_mut().for_each(|w| *w = rng.random_range(-spread..=spread) as f32);
        return (first, second, vec![0.0; clusters]);
    }
    let scale = 1.0 / (d as f32).sqrt();
    for i in 0..d {
        for (unit, sign) in [(i, 1.0), (d + i, -1.0)] {
            first[unit * d..(unit + 1) * d].fill(0.0);
            first[unit * d + i] = sign;
            (0..clusters).for_each(|c| {
                second[c * hidden + unit] = sign * scale * centroids[c * d + i] * columns.deviation[i];
            });
        }
    }
    let score = |c: &[f32]| scale * c.iter().zip(&columns.mean).map(|(c, m)| c * m).sum::<f32>();
    (first, second, centroids.chunks_exact(d).map(score).collect())
}

/// What a way of choosing clusters makes of queries: a line of scores over the clusters for each.
pub(super) enum Chooser<'a> {
    /// The centroids themselves.
    Centroids,
    /// A classifier.
    Classifier(&'a Mlp),
}

/// Clusters of keys, before or after the rotary embedding, and a way to choose among them.
pub(super) struct Way<'a> {
    pub name: &'static str,
    pub rotated: bool,
    pub centroids: &'a Centroids,
    pub chooser: Chooser<'a>,
}

impl Way<'_> {
    /// The probability of each cluster, summed over the group `[rows, clusters]`: what methods choose by.
    fn preferences(&self, head: &Head) -> Vec<f32> {
        let clusters = self.centroids.clusters();
        let mut sum = vec![0f32; head.rows() * clusters];
        for g in 0..head.group {
            let queries = head.queries(g, self.rotated);
            let mut lines = match self.chooser {
                Chooser::Classifier(mlp) => mlp.forward(&queries),
                Chooser::Centroids => {
                    let scale = 1.0 / (head.head_dim() as f32).sqrt();
                    self.centroids.scores(&queries).into_iter().map(|x| x * scale).collect()
                }
            };
            lines.chunks_exact_mut(clusters).for_each(softmax);
            sum.iter_mut().zip(lines).for_each(|(sum, x)| *sum += x);
        }
        sum
    }
}

/// Recall of far attention mass by the clusters that each way chooses, and by those of the first way's that hold most of
/// it for each key (`oracle clusters`); on queries that look far.
///
/// # Errors
/// candle's.
pub(super) fn recalls(heads: &[Head], far: &Far, ways: &[Way]) -> Result<Vec<Recall>> {
    let mut tallies = vec![Tally::default(); ways.len() + 1];
    for head in heads {
        let own: Vec<Vec<u16>> = ways.iter().map(|way| way.centroids.assign(&head.keys(way.rotated))).collect();
        let preferences: Vec<Vec<f32>> = ways.iter().map(|way| way.preferences(head)).collect();
        let measured = head.map(far, |row| {
            let mut tallies = vec![Tally::default(); ways.len() + 1];
            let looking: Vec<usize> = (0..row.heads()).filter(|&g| row.looks_far(g)).collect();
            if looking.is_empty() {
                return tallies;
            }
            let all: Vec<Vec<f32>> = (0..row.heads()).map(|g| row.far_mass(g)).collect();
            for (w, way) in ways.iter().enumerate() {
                let clusters = way.centroids.clusters();
                let own = &own[w][row.far.clone()];
                let sizes = masses(&vec![1.0; own.len()], own, clusters);
                let mass: Vec<Vec<f32>> = all.iter().map(|mass| masses(mass, own, clusters)).collect();
                let held =
                    |g: usize| (0..clusters).map(|c| (f64::from(sizes[c]), f64::from(mass[g][c]))).collect::<Vec<_>>();
                let order = descending(&preferences[w][row.index * clusters..(row.index + 1) * clusters]);
                looking.iter().for_each(|&g| tallies[w].add_clusters(&order, &held(g)));
                if w == 0 {
                    let density = |c: usize| mass.iter().map(|m| m[c]).sum::<f32>() / sizes[c].max(1.0);
                    let order = descending(&(0..clusters).map(density).collect::<Vec<_>>());
                    looking.iter().for_each(|&g| tallies[ways.len()].add_clusters(&order, &held(g)));
                }
            }
            tallies
        })?;
        for row in measured {
            tallies.iter_mut().zip(&row).for_each(|(to, tally)| to.add(tally));
        }
    }
    let names = ways.iter().map(|way| way.name).chain(["oracle clusters"]);
    Ok(tallies.into_iter().zip(names).map(|(tally, name)| tally.named(name)).collect())
}
