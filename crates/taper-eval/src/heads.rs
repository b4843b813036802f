//! What a decode method's choice costs head by head: its error against dense attention on a model's own queries, keys and
//! values, over many draws.
//!
//! The model runs densely over a text; the last token's queries of some layers are then attended again and again by the
//! method, with another seed each time. Where a method promises an error of at most epsilon with probability at least
//! 1 − delta, every head is held to it: in n draws it may be over epsilon as often as the 99.9 % quantile of the binomial
//! distribution of (n, delta), which a promise kept exactly would pass 999 times in 1,000.

use crate::error::EvalError;
use crate::method::{Method, Phase};
use crate::table::{Style, draw};
use crate::train::capture::Capture;
use crate::train::{Corpus, Progress, TrainError};
use candle_core::{Device, Result, Tensor};
use serde_json::{Value, json};
use statrs::distribution::{Binomial, DiscreteCDF};
use std::sync::Arc;
use taper_attention::{Artifacts, AttentionShape, AttentionSpec, Replay, replay};
use taper_kernels::decode::Budget;
use taper_model::Model;

/// What is measured.
#[derive(Debug, Clone)]
pub struct HeadsPlan {
    /// Layers, ascending.
    pub layers: Vec<usize>,
    /// Decode methods.
    pub methods: Vec<Method>,
    /// Draws of each head and method.
    pub draws: usize,
    /// Whether every query head chooses for itself, rather than with those that share its KV head.
    pub alone: bool,
    /// Seed of the first draw.
    pub seed: u64,
    /// Texts, of those of the corpus.
    pub texts: usize,
    /// What methods learned offline.
    pub artifacts: Artifacts,
}

/// What one method came to over all heads of the wanted layers.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadsRow {
    /// Tokens of the context.
    pub length: usize,
    /// The method's label.
    pub method: String,
    /// Query heads measured, over all texts and layers.
    pub heads: usize,
    /// Keys read over keys there.
    pub density: f64,
    /// Root of the mean over heads of the mean squared relative error.
    pub rms: f64,
    /// 99th percentile of the relative error, over heads and draws.
    pub p99: f64,
    /// Of a method that makes a promise.
    pub promise: Option<Promised>,
    /// The squared relative error of each head, in the order of texts, layers and heads.
    pub squares: Vec<Estimate>,
}

/// A mean over some draws.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Its standard error; 0 of a single draw.
    pub error: f64,
}

/// How a promise was kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Promised {
    /// Share of draws over epsilon, the mean over heads.
    pub over: f64,
    /// That of the head with the most.
    pub most: f64,
    /// Which head that is.
    pub worst: Place,
    /// Heads over the quantile.
    pub broken: usize,
    /// Share of draws whose size the promise decided: neither the first look's nor everything.
    pub decided: f64,
    /// Share over epsilon among those; 0 where there are none.
    pub decided_over: f64,
    /// Share of the keys read that could have been spared among those, had it been known beforehand how large a sample each
    /// head's promise takes: one that delta of them err by more than epsilon with, and the first look's at least. Of heads
    /// alone: a group reads what its neediest one takes.
    pub spare: f64,
    /// Share of draws that read everything to keep the promise.
    pub dense: f64,
}

/// Where a query head stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    /// Of the texts.
    pub text: usize,
    /// Of the model's layers.
    pub layer: usize,
    /// Of the layer's query heads.
    pub head: usize,
}

/// Quantile at which a head's violations count as a promise broken.
const CONFIDENCE: f64 = 0.999;
/// Draws made together.
const TOGETHER: usize = 16;

/// The methods, each that promises something with every pair of epsilon and delta in place of its own.
///
/// # Errors
/// A value out of range, by the parameter's name.
pub fn with_promises(
    methods: &[Value],
    epsilons: &[f64],
    deltas: &[f64],
    artifacts: &Artifacts,
) -> std::result::Result<Vec<Method>, EvalError> {
    let mut all = Vec::new();
    for value in methods {
        let method = Method::read(Phase::Decode, value, artifacts)?;
        if method.spec.get("epsilon").is_none() || (epsilons.is_empty() && deltas.is_empty()) {
            all.push(method);
            continue;
        }
        let own = |name: &str| vec![method.spec[name].as_f64().unwrap_or_default()];
        let or_own = |given: &[f64], name| if given.is_empty() { own(name) } else { given.to_vec() };
        for epsilon in or_own(epsilons, "epsilon") {
            for delta in or_own(deltas, "delta") {
                let mut value = value.clone();
                (value["epsilon"], value["delta"]) = (json!(epsilon), json!(delta));
                all.push(Method::read(Phase::Decode, &value, artifacts)?);
            }
        }
    }
    Ok(all)
}

/// Measures; a row for each method. `corpus` holds texts of the length wanted.
///
/// # Errors
/// An option that does not fit the model, or a step that failed.
pub fn heads(
    model: &Model,
    corpus: &Corpus,
    plan: &HeadsPlan,
    progress: &mut dyn Progress,
) -> std::result::Result<Vec<HeadsRow>, TrainError> {
    let shape = model.attention_shape();
    if let Some(layer) = plan.layers.iter().find(|&&layer| layer >= shape.layers) {
        return Err(TrainError::option("layers", format!("{layer} is none of the model's {}", shape.layers)));
    }
    corpus.check_fits(model)?;
    let length = corpus.length();
    let specs = plan.methods.iter().map(|m| spec(m, &plan.artifacts)).collect::<std::result::Result<Vec<_>, _>>()?;
    let mut all: Vec<Vec<Tally>> = vec![Vec::new(); specs.len()];
    let mut capture = Capture::new(model, length)?;
    for (index, tokens) in corpus.sequences().iter().take(plan.texts).enumerate() {
        progress.begins(&format!("text {index}"), plan.layers.len() * specs.len());
        // Of each layer the last token's, and the one's before it.
        let mut queries = vec![[Vec::new(), Vec::new()]; plan.layers.len()];
        let (last, width) = (tokens.len() - 1, shape.q_heads * shape.head_dim);
        let mut see = |layer: usize, start: usize, q: &[f32], _: &[f32]| {
            let place = plan.layers.iter().position(|&wanted| wanted == layer).expect("only wanted layers are shown");
            for (back, to) in queries[place].iter_mut().enumerate() {
                if let Some(at) = last.checked_sub(back).filter(|at| (start..start + q.len() / width).contains(at)) {
                    *to = q[(at - start) * width..][..width].to_vec();
                }
            }
        };
        let mut sequence = capture.hold(tokens, &plan.layers, &mut see, &|| progress.stopped())?;
        for (&layer, q) in plan.layers.iter().zip(&queries) {
            for (spec, tallies) in specs.iter().zip(&mut all) {
                if progress.stopped() {
                    return Err(TrainError::Stopped);
                }
                sequence.decode_by(spec);
                let mut attend = |q: &Tensor, seeds: &[u64]| {
                    let q = q.to_device(model.device())?.chunk(q.dim(0)?, 0)?;
                    replay((shape, model.rotary(), capture.pool()), &sequence, layer, (&q[0], q.get(1)), seeds)
                };
                let drawn = head_by_head(&shape, plan, q, &mut attend).map_err(TrainError::compute(layer))?;
                let placed = |(head, tally)| Tally { place: Place { text: index, layer, head }, ..tally };
                tallies.extend(drawn.into_iter().enumerate().map(placed));
                progress.advance();
            }
        }
        capture.pool().release(sequence.table_mut());
    }
    let rows = plan.methods.iter().zip(&all).map(|(method, tallies)| summed(length, method.label.clone(), tallies));
    Ok(rows.collect())
}

fn spec(method: &Method, artifacts: &Artifacts) -> std::result::Result<Arc<AttentionSpec>, TrainError> {
    let dense = Method { label: "dense".into(), spec: json!({ "method": "dense" }) };
    Method::pair(&dense, method, &json!({}), artifacts).map_err(|e| TrainError::option("decode", e.to_string()))
}

/// The draws of one query head.
#[derive(Debug, Clone, Default)]
struct Tally {
    place: Place,
    errors: Vec<f32>,
    read: u64,
    there: u64,
    /// Epsilon and delta of a method that promises something.
    promise: Option<(f64, f64)>,
    over: u64,
    dense: u64,
    /// Error and budget of the draws whose size the promise decided.
    decided: Vec<(f32, Budget)>,
}

/// The draws of every query head of one layer, by the last token's queries and, if there is a token before, that one's.
fn head_by_head(
    shape: &AttentionShape,
    plan: &HeadsPlan,
    queries: &[Vec<f32>; 2],
    attend: &mut dyn FnMut(&Tensor, &[u64]) -> Result<Replay>,
) -> Result<Vec<Tally>> {
    let AttentionShape { q_heads, kv_heads, head_dim: d, .. } = *shape;
    let group = q_heads / kv_heads;
    let mut tallies = vec![Tally::default(); q_heads];
    // Alone, a query head stands in the place of every other that shares its KV head.
    for turn in 0..if plan.alone { group } else { 1 } {
        let source = |head: usize| if plan.alone { head / group * group + turn } else { head };
        let known = || queries.iter().filter(|q| !q.is_empty());
        let rows = known().flat_map(|q| (0..q_heads).flat_map(move |head| &q[source(head) * d..][..d]));
        let rows: Vec<f32> = rows.copied().collect();
        let q = Tensor::from_vec(rows, (known().count(), q_heads, d), &Device::Cpu)?;
        let seeds: Vec<u64> = (0..plan.draws as u64).map(|draw| plan.seed.wrapping_add(draw)).collect();
        for seeds in seeds.chunks(TOGETHER) {
            let drawn = attend(&q, seeds)?;
            for draw in 0..seeds.len() {
                for head in (0..q_heads).filter(|head| !plan.alone || head % group == 0) {
                    tallies[source(head)].add(&drawn, draw * q_heads + head, draw * kv_heads + head / group);
                }
            }
            let first = &drawn.errors[..q_heads];
            if drawn.budgets.is_none() && drawn.errors.chunks(q_heads).all(|errors| errors == first) {
                break; // Nothing was drawn: the method has no use for a seed.
            }
        }
    }
    Ok(tallies)
}

impl Tally {
    /// Takes in a draw, at its places among errors and budgets, and among the keys.
    fn add(&mut self, drawn: &Replay, head: usize, kv_head: usize) {
        let error = drawn.errors[head];
        self.errors.push(error);
        self.read += drawn.keys[kv_head] as u64;
        self.there += drawn.visible as u64;
        self.promise = drawn.promise;
        let Some((epsilon, _)) = drawn.promise else { return };
        self.over += u64::from(over(error, epsilon));
        if let Some(budget) = drawn.budgets.as_ref().map(|budgets| budgets[head]) {
            self.dense += u64::from(budget.dense);
            if budget.pilot > 0 && !budget.dense && budget.sampled > budget.pilot {
                self.decided.push((error, budget));
            }
        }
    }

    /// Decided draws over epsilon.
    fn decided_over(&self) -> u64 {
        let epsilon = self.promise.map_or(f64::INFINITY, |(epsilon, _)| epsilon);
        self.decided.iter().filter(|(error, _)| over(*error, epsilon)).count() as u64
    }

    /// Keys that decided draws read beyond what the promise takes, by the errors that they came to: a squared error goes with
    /// 1 / sampled − 1 / residual.
    fn spare(&self) -> f64 {
        let Some((epsilon, delta)) = self.promise else { return 0.0 };
        let mut errors: Vec<f32> = self.decided.iter().map(|(error, _)| *error).collect();
        errors.sort_by(f32::total_cmp);
        let kept = ((1.0 - delta) * errors.len() as f64).ceil() as usize;
        let Some(quantile) = errors.get(kept.saturating_sub(1)).filter(|error| error.is_finite()) else { return 0.0 };
        let slack = (f64::from(*quantile) / epsilon).powi(2);
        let spare = |budget: &Budget| {
            let [sampled, pilot, residual] = [budget.sampled, budget.pilot, budget.residual].map(|keys| keys as f64);
            let enough = 1.0 / ((1.0 / sampled - 1.0 / residual) / slack + 1.0 / residual);
            sampled - enough.max(pilot)
        };
        self.decided.iter().map(|(_, budget)| spare(budget)).sum()
    }

    /// The mean of the squared errors.
    fn square(&self) -> Estimate {
        let draws = self.errors.len() as f64;
        let squares = || self.errors.iter().map(|e| f64::from(*e).powi(2));
        let mean = squares().sum::<f64>() / draws;
        let variance = squares().map(|square| (square - mean).powi(2)).sum::<f64>() / (draws - 1.0).max(1.0);
        Estimate { mean, error: (variance / draws).sqrt() }
    }
}

fn summed(length: usize, method: String, tallies: &[Tally]) -> HeadsRow {
    let sum = |of: fn(&Tally) -> u64| tallies.iter().map(of).sum::<u64>();
    let share = |a: u64, b: u64| if b == 0 { 0.0 } else { a as f64 / b as f64 };
    let draws = sum(|t| t.errors.len() as u64);
    let squares: Vec<Estimate> = tallies.iter().map(Tally::square).collect();
    let rms = (squares.iter().map(|square| square.mean).sum::<f64>() / tallies.len().max(1) as f64).sqrt();
    let mut errors: Vec<f32> = tallies.iter().flat_map(|t| t.errors.iter().copied()).collect();
    errors.sort_by(f32::total_cmp);
    let p99 = errors.get((errors.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0.0);
    let rate = |t: &Tally| share(t.over, t.errors.len() as u64);
    let worst = tallies.iter().max_by(|a, b| rate(a).total_cmp(&rate(b)));
    let promise = worst.and_then(|t| Some((t, t.promise?.1))).map(|(worst, delta)| Promised {
        over: tallies.iter().map(rate).sum::<f64>() / tallies.len().max(1) as f64,
        most: rate(worst),
        worst: worst.place,
        broken: tallies.iter().filter(|t| t.over > most_violations(t.errors.len() as u64, delta)).count(),
        decided: share(sum(|t| t.decided.len() as u64), draws),
        decided_over: share(sum(Tally::decided_over), sum(|t| t.decided.len() as u64)),
        spare: tallies.iter().map(Tally::spare).sum::<f64>() / sum(|t| t.read).max(1) as f64,
        dense: share(sum(|t| t.dense), draws),
    });
    let density = share(sum(|t| t.read), sum(|t| t.there));
    HeadsRow { length, method, heads: tallies.len(), density, rms, p99: p99.into(), promise, squares }
}

/// Whether an error breaks a promise of epsilon.
fn over(error: f32, epsilon: f64) -> bool {
    error.is_nan() || f64::from(error) > epsilon
}

/// Violations in `draws` that a promise of `delta` kept exactly has at most, with probability [`CONFIDENCE`].
fn most_violations(draws: u64, delta: f64) -> u64 {
    Binomial::new(delta, draws).map_or(draws, |binomial| binomial.inverse_cdf(CONFIDENCE))
}

/// One row a method and length.
pub fn heads_table(rows: &[HeadsRow], style: Style) -> String {
    let names = ["length", "decode", "heads", "density", "error rms", "error p99"];
    let promised = ["over epsilon", "most", "text/layer/head", "broken", "decided", "over, decided", "spare", "dense"];
    let any = rows.iter().any(|row| row.promise.is_some());
    let head = names.into_iter().chain(if any { &promised[..] } else { &[] }.iter().copied());
    let mut lines = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for row in rows {
        let mut line = vec![row.length.to_string(), row.method.clone(), row.heads.to_string()];
        line.extend([row.density, row.rms, row.p99].map(|x| format!("{x:.4}")));
        if let Some(p) = &row.promise {
            let percent = |share: f64| format!("{:.2} %", 100.0 * share);
            let Place { text, layer, head } = p.worst;
            line.extend([percent(p.over), percent(p.most), format!("{text}/{layer}/{head}"), p.broken.to_string()]);
            line.extend([p.decided, p.decided_over, p.spare, p.dense].map(percent));
        } else if any {
            line.extend(vec![String::new(); promised.len()]);
        }
        lines.push(line);
    }
    draw(&lines, style)
}

#[cfg(test)]
mod tests;
