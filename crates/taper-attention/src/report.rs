//! What a request's attention came to: density, budgets, audited errors.

use crate::spec::AttentionSpec;
use crate::speculate::Speculate;
use crate::trace::{Trace, TraceUsage};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use taper_kernels::decode::Budget;

/// Counts of one phase of one sequence, over all layers and heads.
#[derive(Debug, Clone, Default)]
pub(crate) struct PhaseReport {
    /// (query, key) pairs read and there: of prompts per query head, of answers per KV head.
    read: u64,
    there: u64,
    /// (query, head) pairs of the same, for the mean budget.
    queries: u64,
    most: u64,
    /// Query heads whose keys were chosen to keep a promise, and those of them that went dense.
    promised_heads: u64,
    dense_heads: u64,
    /// Keys, or what stands for some, that were scored to choose what is read.
    scored: u64,
    /// Shares of the attention mass that were kept, where a method measured them.
    kept: Kept,
    errors: Errors,
    /// All of it head by head and token by token, where the request wants that.
    pub trace: Option<Trace>,
}

/// Sum, number and least of some shares.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    sum: f64,
    count: u64,
    min: f32,
}

impl PhaseReport {
    /// Adds queries that read `read` of `there` pairs in all, at most `most` keys each.
    pub fn add(&mut self, queries: u64, read: u64, there: u64, most: u64) {
        self.queries += queries;
        self.read += read;
        self.there += there;
        self.most = self.most.max(most);
    }

    /// Adds what sampling came to.
    pub fn add_budgets(&mut self, budgets: &[Budget]) {
        self.promised_heads += budgets.iter().filter(|b| b.promised()).count() as u64;
        self.dense_heads += budgets.iter().filter(|b| b.dense).count() as u64;
    }

    /// Adds keys that were scored to choose.
    pub fn add_scored(&mut self, pairs: u64) {
        self.scored += pairs;
    }

    /// Adds measured shares of the attention mass.
    pub fn add_kept(&mut self, shares: &[f32]) {
        let kept = &mut self.kept;
        for &share in shares {
            kept.min = if kept.count == 0 { share } else { kept.min.min(share) };
            kept.sum += f64::from(share);
            kept.count += 1;
        }
    }

    /// Adds relative errors of audited heads, under a promise of (epsilon, delta) if there is one.
    pub fn add_errors(&mut self, errors: &[f32], promise: Option<(f64, f64)>) {
        errors.iter().for_each(|&error| self.errors.add(error, promise.map(|(epsilon, _)| epsilon)));
    }

    /// What a method of this name and wire's form came to, which promises (epsilon, delta) or nothing.
    fn usage(&self, (method, json): (&'static str, &Value), seed: u64, promise: Option<(f64, f64)>) -> PhaseUsage {
        let over = ["top", "base", "within"].iter().find_map(|field| json[field]["method"].as_str());
        let share = |a: u64, b: u64| if b == 0 { 1.0 } else { a as f64 / b as f64 };
        PhaseUsage {
            method,
            over: over.map(str::to_owned),
            density: share(self.read, self.there),
            budget_mean: if self.queries == 0 { 0.0 } else { self.read as f64 / self.queries as f64 },
            budget_max: self.most,
            scored: (self.scored > 0).then(|| share(self.scored, self.there)),
            seed: seed as i64,
            promise: promise.map(|(epsilon, delta)| PromiseUsage { epsilon, delta, heads: self.promised_heads }),
            dense_heads: promise.is_some().then_some(self.dense_heads),
            cra: (self.kept.count > 0)
                .then(|| CraUsage { mean: self.kept.sum / self.kept.count as f64, min: f64::from(self.kept.min) }),
            audit: self.errors.usage(promise.map(|(_, delta)| delta)),
        }
    }
}

/// The reports of both phases, and of drafts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    pub prefill: PhaseReport,
    pub decode: PhaseReport,
    pub drafts: PhaseReport,
    /// Drafts that a method made, and those that were looked up.
    pub made: GuessUsage,
    pub looked_up: GuessUsage,
}

/// What a request's attention came to: the body of `usage.attention`.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AttentionUsage {
    /// The prompt.
    pub prefill: PhaseUsage,
    /// The generated tokens; where drafts are checked, of every token that was checked, those that the answer does not have
    /// among them; and the question, where it is attended by the decode method.
    pub decode: PhaseUsage,
    /// What drafts came to; absent where the request wants none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationUsage>,
    /// Both phases head by head and token by token; absent where the request does not want that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<TraceUsage>,
}

impl AttentionUsage {
    /// The same, of a request whose seed is this one.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        let drafts = self.speculation.as_mut().and_then(|speculation| speculation.draft.as_mut());
        [&mut self.prefill, &mut self.decode].into_iter().chain(drafts).for_each(|phase| phase.seed = seed as i64);
        self
    }
}

/// What speculation came to.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SpeculationUsage {
    /// Tokens drafted.
    pub drafted: u64,
    /// Those that the answer has.
    pub accepted: u64,
    /// Their share; 0 of none.
    pub acceptance: f64,
    /// The drafts' attention; absent where no method makes any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<PhaseUsage>,
    /// Those of all drafts that were looked up in the text; absent where the request wants none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookup: Option<GuessUsage>,
}

/// What guesses from one source came to.
#[derive(Debug, Clone, Copy, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GuessUsage {
    /// Tokens drafted.
    pub drafted: u64,
    /// Those that the answer has.
    pub accepted: u64,
}

/// One phase of [`AttentionUsage`].
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PhaseUsage {
    /// The method.
    pub method: &'static str,
    /// What it is over: the predictor of `vattention`'s `top`, `delta`'s `base`, the method `within` which `santa` draws.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over: Option<String>,
    /// Share of (query, key) pairs attended to, the causal pairs within the model's window as the whole; 1 if there were none.
    pub density: f64,
    /// Keys, or what stands for some of them (a mean, a page's bounds, a code, a centroid), that were scored to choose what is
    /// read, as a share of the (query, key) pairs; absent where none was. Above 1 where pairs were scored more than once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scored: Option<f64>,
    /// Keys read per query, layer and KV head, on average.
    pub budget_mean: f64,
    /// The most keys that one query read in one layer and KV head.
    pub budget_max: u64,
    /// Seed of the method's random draws; a request with it draws the same.
    pub seed: i64,
    /// What the method promised; absent where that is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub promise: Option<PromiseUsage>,
    /// Query heads (per layer and token) that read everything to keep the promise; absent where none is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_heads: Option<u64>,
    /// Share of attention mass that the keys read hold, of the queries that the method sampled to choose by (the last ones of a
    /// prompt or of a part of it) and of no others, which may keep less; absent where it samples none. Under `delta` it is the
    /// base's, also of rows that are attended densely. `audit` measures queries
    /// drawn at random.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cra: Option<CraUsage>,
    /// Errors against dense attention; absent if nothing was audited, as of what is attended densely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditUsage>,
}

impl PhaseUsage {
    /// Whether a query read anything: of what none did there is no density.
    pub fn has_read(&self) -> bool {
        self.budget_max > 0
    }
}

/// A promise: a relative error of at most epsilon with a probability of at least 1 − delta, of each head.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PromiseUsage {
    /// The relative error that a head may have.
    pub epsilon: f64,
    /// The share of heads whose error may be larger.
    pub delta: f64,
    /// Query heads (per layer and token) whose keys were chosen to keep it. What sees no more keys than are read anyway is not
    /// among them.
    pub heads: u64,
}

/// Cumulative residual attention, of sampled queries: the share of a query's attention mass that the keys read hold.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CraUsage {
    /// Over the sampled queries, query heads and layers.
    pub mean: f64,
    /// The least of those; of all queries it may be lower.
    pub min: f64,
}

/// Relative errors ‖o − o_dense‖₂ / ‖o_dense‖₂ of audited heads.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AuditUsage {
    /// Heads audited (per layer and token; of a token all of them in all layers, or none).
    pub heads: u64,
    /// Mean relative error.
    pub error_mean: f64,
    /// 99th percentile of the relative error, at most 5 % too high.
    pub error_p99: f64,
    /// Largest relative error.
    pub error_max: f64,
    /// Share of heads whose error is over epsilon; absent where the method promises none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub over_epsilon: Option<f64>,
    /// What the method promises that share to be at most; absent where it promises nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<f64>,
}

/// What is kept of the relative errors of audited heads: enough for [`AuditUsage`], however many there are.
#[derive(Debug, Clone, Default)]
struct Errors {
    count: u64,
    sum: f64,
    max: f32,
    /// Errors over epsilon, where one is promised.
    over: Option<u64>,
    /// Errors by size: `BUCKETS_PER_OCTAVE` buckets to a factor of two, the smallest for 0, the largest for NaN.
    buckets: BTreeMap<i16, u64>,
}

/// A bucket's ends differ by a factor of 2^(1/16), 1.044.
const BUCKETS_PER_OCTAVE: f32 = 16.0;

impl Errors {
    fn add(&mut self, error: f32, epsilon: Option<f64>) {
        self.count += 1;
        self.sum += f64::from(error);
        self.max = if self.max >= error || self.max.is_nan() { self.max } else { error };
        if let Some(epsilon) = epsilon {
            let over = error.is_nan() || f64::from(error) > epsilon;
            *self.over.get_or_insert(0) += u64::from(over);
        }
        let octaves = (error.log2() * BUCKETS_PER_OCTAVE).ceil();
        let bucket = if error.is_nan() { i16::MAX } else { (octaves as i16).min(i16::MAX - 1) };
        *self.buckets.entry(bucket).or_insert(0) += 1;
    }

    /// Of them; `delta` is the share that may be over epsilon, where one is promised.
    fn usage(&self, delta: Option<f64>) -> Option<AuditUsage> {
        let wanted = (self.count * 99).div_ceil(100);
        let mut seen = 0;
        let (&bucket, _) = self.buckets.iter().find(|(_, count)| {
            seen += *count;
            seen >= wanted
        })?;
        let end = (f32::from(bucket) / BUCKETS_PER_OCTAVE).exp2();
        Some(AuditUsage {
            heads: self.count,
            error_mean: self.sum / self.count as f64,
            error_p99: f64::from(if bucket == i16::MAX { f32::NAN } else { end.min(self.max) }),
            error_max: f64::from(self.max),
            over_epsilon: self.over.map(|over| over as f64 / self.count as f64),
            delta,
        })
    }
}

impl Report {
    /// Of nothing yet; `traced` says of how many tokens the prompt is, where a trace is wanted.
    pub fn new(traced: Option<usize>) -> Self {
        let phase = || PhaseReport { trace: traced.map(Trace::new), ..PhaseReport::default() };
        Self { prefill: phase(), decode: phase(), ..Self::default() }
    }

    /// Forgets the rows from a position on, where they are kept one by one.
    pub fn truncate(&mut self, tokens: usize) {
        if let Some(trace) = &mut self.decode.trace {
            trace.truncate(tokens);
        }
    }

    /// Takes so many drafts, of which some were right, in; all of them were looked up or none.
    pub fn drafted(&mut self, drafts: u64, right: u64, looked_up: bool) {
        let guesses = if looked_up { &mut self.looked_up } else { &mut self.made };
        guesses.drafted += drafts;
        guesses.accepted += right;
    }

    fn speculation(&self, speculate: &Speculate, seed: u64) -> SpeculationUsage {
        let Self { made, looked_up, .. } = self;
        let (drafted, accepted) = (made.drafted + looked_up.drafted, made.accepted + looked_up.accepted);
        SpeculationUsage {
            drafted,
            accepted,
            acceptance: accepted as f64 / drafted.max(1) as f64,
            draft: speculate
                .method
                .as_ref()
                .map(|method| self.drafts.usage((method.name, &method.json), seed, method.method.promise())),
            lookup: (speculate.lookup > 0).then_some(*looked_up),
        }
    }

    pub fn usage(&self, spec: &AttentionSpec, seed: u64) -> AttentionUsage {
        AttentionUsage {
            prefill: self.prefill.usage((spec.prefill.name, &spec.prefill.json), seed, None),
            decode: self.decode.usage((spec.decode.name, &spec.decode.json), seed, spec.decode.method.promise()),
            speculation: spec.speculate.as_ref().map(|speculate| self.speculation(speculate, seed)),
            trace: self.prefill.trace.as_ref().zip(self.decode.trace.as_ref()).map(|(p, d)| TraceUsage::new(p, d)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_is_told_with_how_many_heads_it_was_made_for() {
        let mut report = PhaseReport::default();
        let budget = |dense| Budget { residual: 100, sampled: 50, pilot: 10, dense };
        let few = Budget { residual: 20, sampled: 20, pilot: 0, dense: false };
        report.add_budgets(&[budget(true), budget(false), budget(false), Budget::default(), few]);
        let over = serde_json::json!({ "top": { "method": "quest" } });
        let promised = report.usage(("vattention", &over), 7, Some((0.1, 0.2)));
        assert_eq!(promised.over.as_deref(), Some("quest"));
        let promise = PromiseUsage { epsilon: 0.1, delta: 0.2, heads: 3 };
        assert_eq!((promised.promise, promised.dense_heads), (Some(promise), Some(1)));
        let plain = report.usage(("quest", &Value::Null), 7, None);
        assert_eq!((plain.promise, plain.dense_heads, plain.over), (None, None, None));
    }

    #[test]
    fn percentiles_and_shares_are_those_of_the_errors() {
        let of = |errors: &[f32], epsilon| {
            let mut all = Errors::default();
            errors.iter().for_each(|&e| all.add(e, epsilon));
            all.usage(None)
        };
        let errors: Vec<f32> = (1..=200).rev().map(|i| i as f32 / 1000.0).collect();
        let audit = of(&errors, Some(0.1505)).unwrap();
        assert_eq!((audit.heads, audit.over_epsilon), (200, Some(0.25)));
        assert!((audit.error_mean - 0.1005).abs() < 1e-6 && (audit.error_max - 0.2).abs() < 1e-6);
        assert!((0.198..=0.198 * 1.05).contains(&audit.error_p99), "{}", audit.error_p99);
        assert!(of(&[], None).is_none());
        let zero = of(&[0.0; 5], None).unwrap();
        assert_eq!((zero.error_p99, zero.error_max, zero.over_epsilon), (0.0, 0.0, None));
        let infinite = of(&[f32::INFINITY, 1.0], Some(0.5)).unwrap();
        assert_eq!((infinite.error_max, infinite.over_epsilon), (f64::INFINITY, Some(1.0)));
        let nan = of(&[1.0, f32::NAN, 0.1], Some(0.5)).unwrap();
        assert!(nan.error_max.is_nan() && nan.error_p99.is_nan() && nan.over_epsilon == Some(2.0 / 3.0));
    }
}
