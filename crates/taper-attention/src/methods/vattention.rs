//! vAttention: sinks, a window and the predicted top keys exactly; the rest from a sample whose size is the least that
//! keeps a promise on the output's relative error.

use super::quest::Quest;
use super::{Entry, parameter, predictor};
use crate::amount::{Amount, Auto, AutoAmount};
use crate::layer::AttentionShape;
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Most, Predictor, Rotations};
use crate::schema::{parse, schema_of};
use crate::spec::Chosen;
use candle_core::{DType, Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_kernels::budget::{Promise, Rule};
use taper_kernels::decode::{Certainty, DecodeRow, Sampling, foresee, sample, sample_certain};
use taper_kernels::index::{Part, norms};
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kv_cache::IndexShape;

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "vattention",
    summary: "Relative output error at most epsilon with probability at least 1 - delta, per head and token, as long as the \
              predictor misses no heavy key (or with the tail `hard`, whatever it misses), for as few keys as that takes; a head that \
              cannot keep it reads everything.",
    source: "vAttention, Algorithm 1, Lemma 4.2, Theorem 4.3; the rules ratio and chi2 are sharper forms of the same \
             bound, with the noise of the pilot taken off, and a sample is measured anew as it grows",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse(value, path)?;
        let top = predictor(&params.top, &format!("{path}.top"), artifacts)?;
        let json = json!(Params { top: top.json.clone(), ..params });
        let promise = |epsilon| Promise::new(params.rule.into(), epsilon, params.delta);
        let sampling = Sampling {
            promise: promise(params.epsilon),
            // Below 1 however near epsilon is to it.
            hopeless: promise((HOPELESS * params.epsilon).min((1.0 + params.epsilon) / 2.0).min(1f64.next_down())),
            pilot_tokens: params.pilot_tokens,
            pilot_share: params.pilot_share,
            dense_share: params.dense_share,
        };
        let Params { epsilon, sink, window, top_k, .. } = params;
        let Params { delta, tail, .. } = params;
        let on_output = tail == Tail::Hard || !matches!(params.rule, RuleName::Denominator);
        let method = VAttention { epsilon, delta, tail, on_output, sink, window, top_k, top, sampling };
        Ok((Arc::new(method), json))
    },
    artifacts: &[],
};

/// A head is given up before its keys are ranked if even so many times epsilon seems out of reach.
const HOPELESS: f64 = 1.5;

/// The promise, what is read exactly, and how the sample starts.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Params {
    /// Largest relative L2 error of a head's output.
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    epsilon: f64,
    /// Largest probability of a larger error.
    #[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))]
    delta: f64,
    /// Which bound turns the pilot sample into a budget, where the tail is `clt`; ignored where not.
    rule: RuleName,
    /// What the promise rests on.
    tail: Tail,
    /// Tokens at the start of the sequence, always read: a whole number, or a share of the context below 1.
    sink: Amount,
    /// Most recent tokens, always read, the query's own included: a whole number, or a share of the context below 1.
    #[schemars(extend("exclusiveMinimum" = 0))]
    window: Amount,
    /// Predicted keys read exactly: a whole number, a share of the context below 1, or "auto": those that cost less
    /// than sampling around them, half of what `dense_share` leaves beside sinks and window at most; 0.1 where `top`
    /// does not tell what shares of the attention mass keys hold (hash_attention, kmeans, saap), 0.02 where the tail is
    /// `hard`. Ignored where `top` has `probes`.
    top_k: AutoAmount,
    /// What predicts them.
    #[schemars(schema_with = "top_schema")]
    top: Value,
    /// Least size of the pilot sample.
    #[schemars(range(min = 2, max = 1_048_576))]
    pilot_tokens: usize,
    /// Least size of the pilot sample as a share of what it stands for, where the tail is `clt`; ignored where not.
    #[schemars(range(min = 0, max = 1))]
    pilot_share: f64,
    /// A head that would read this share of the context reads all of it.
    #[schemars(range(min = 0, max = 1))]
    dense_share: f64,
}

fn top_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    parameter("predictor", "What predicts the top keys.")
}

impl Default for Params {
    fn default() -> Self {
        Self {
            epsilon: 0.1,
            delta: 0.1,
            rule: RuleName::Chi2,
            tail: Tail::Clt,
            sink: Amount::Tokens(128),
            window: Amount::Tokens(128),
            top_k: AutoAmount::Auto(Auto::Auto),
            top: json!({ "method": "quantized_keys" }),
            pilot_tokens: 64,
            pilot_share: 0.01,
            dense_share: 0.5,
        }
    }
}

/// Which bound turns the pilot sample into a budget.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum RuleName {
    /// The output's error, with the quantile of its squared norm from the sample's covariance.
    Chi2,
    /// The output's error, with a scalar quantile: more cautious than chi2.
    Ratio,
    /// Numerator and denominator apart, exact inequality: more cautious than ratio.
    Tight,
    /// Numerator and denominator apart as in the paper: the most cautious.
    Lemma,
    /// The denominator alone: cheap, and no promise on the output.
    Denominator,
}

impl From<RuleName> for Rule {
    fn from(name: RuleName) -> Self {
        match name {
            RuleName::Chi2 => Rule::Chi2,
            RuleName::Ratio => Rule::Ratio,
            RuleName::Tight => Rule::Tight,
            RuleName::Lemma => Rule::Lemma,
            RuleName::Denominator => Rule::Denominator,
        }
    }
}

/// Predicted keys that are read where nothing tells which of them pay: a predictor's ranking misses keys that no sample
/// shows, and with a tenth as many keys are read in all as with 0.02, for answers like dense attention's
/// (`bench/fidelity.md`).
const RANKED: Amount = Amount::Share(0.1);

/// The same beside the tail `hard`, which relies on no ranking.
const BESIDE_HARD: Amount = Amount::Share(0.02);

/// What the promise rests on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum Tail {
    /// The central limit theorem: holds if the predictor misses no heavy key.
    Clt,
    /// Bounds of pages of keys and values: holds whatever the predictor misses, for far more keys.
    Hard,
}

/// Tokens of a page, where bounds are kept.
const PAGE: usize = 16;

/// The largest norm of the values of each page.
#[derive(Debug)]
struct ValueNorms;

impl KeyIndex for ValueNorms {
    fn name(&self) -> String {
        format!("norms of pages of {PAGE}")
    }

    fn shape(&self, _: &AttentionShape, _: DType) -> IndexShape {
        IndexShape { rows: BLOCK_TOKENS / PAGE, width: 1, dtype: DType::F32 }
    }

    fn extend(&self, _: usize, index: &Tensor, kv: PagedKv, parts: &[Part], _: &Rotations) -> Result<()> {
        norms::extend(index, kv.v, parts)
    }
}

/// The bounds of each page's keys.
static BOUNDS: Quest = Quest { page: PAGE, ahead: false };

#[derive(Debug)]
struct VAttention {
    epsilon: f64,
    delta: f64,
    tail: Tail,
    /// Whether the promise is on the output, not on the normaliser alone.
    on_output: bool,
    sink: Amount,
    window: Amount,
    top_k: AutoAmount,
    top: Chosen<dyn Predictor>,
    sampling: Sampling,
}

impl VAttention {
    /// How much of what makes a key worth reading a predicted one must be expected to hold, if only such keys are read.
    fn pays(&self) -> Option<f64> {
        let auto = matches!(self.top_k, AutoAmount::Auto(_)) && self.tail == Tail::Clt;
        self.top.method.pays().filter(|_| auto)
    }

    /// The most predicted keys of `n` that are read exactly, beside the `fixed` that always are.
    fn most(&self, n: usize, fixed: usize) -> usize {
        match self.top_k {
            AutoAmount::Amount(amount) => amount.of(n),
            // As many are left for a sample: with more the head would soon be dense.
            AutoAmount::Auto(_) if self.pays().is_some() => {
                ((self.sampling.dense_share * n as f64) as usize).saturating_sub(fixed) / 2
            }
            AutoAmount::Auto(_) if self.tail == Tail::Hard => BESIDE_HARD.of(n),
            AutoAmount::Auto(_) => RANKED.of(n),
        }
    }

    /// What the predictor chose beside sinks and window, and a sample that relies on its having missed nothing heavy.
    fn sample(&self, step: &DecodeStep, (sink, window): (usize, usize)) -> Result<Choice> {
        let noise = self.pays().map(|pays| self.sampling.noise() * (pays * pays) as f32);
        let keys = step.per_head(|row| self.most(row.visible.len(), sink + window));
        let keys = self.top.method.expected(step, keys);
        let foreseen = foresee(&step.batch, (sink, window), &keys, step.streams, &self.sampling)?;
        let exact = self.top.method.select(step, sink, window, Most { keys: &foreseen.keys(keys), noise })?;
        let (selection, budgets) =
            sample(&step.batch, &exact.selection, &foreseen, exact.scores.as_ref(), step.streams, &self.sampling)?;
        Ok(Choice { selection, budgets: Some(budgets), ..exact })
    }

    /// The same, and a sample that does not rely on it.
    fn sample_certain(&self, step: &DecodeStep, (sink, window): (usize, usize)) -> Result<Choice> {
        let keys = step.per_head(|row| self.most(row.visible.len(), sink + window));
        let exact = self.top.method.select(step, sink, window, Most { keys: &keys, noise: None })?;
        let how = Certainty {
            epsilon: self.epsilon,
            delta: self.delta,
            pilot_tokens: self.sampling.pilot_tokens,
            dense_share: self.sampling.dense_share,
        };
        let pages = (step.index(&BOUNDS)?, step.index(&ValueNorms)?);
        let (selection, budgets) =
            sample_certain(&step.batch, &exact.selection, exact.scores.as_ref(), step.streams, pages, &how)?;
        let pages = step.per_head(|row| row.visible.len().div_ceil(PAGE));
        let group = budgets.len() / pages.len().max(1);
        // Pages are looked at for heads that have a first look; a device tells of those later, and all count.
        let looked = |head: usize| budgets.get(head * group).is_none_or(|budget| budget.pilot > 0);
        let mut scored = exact.scored;
        scored.resize(step.batch.rows.len(), 0);
        for (head, pages) in pages.into_iter().enumerate().filter(|(head, _)| looked(*head)) {
            scored[head / step.kv_heads] += pages;
        }
        Ok(Choice { selection, budgets: Some(budgets), scored, ..exact })
    }
}

impl DecodeMethod for VAttention {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let fixed = |row: &DecodeRow| (self.sink.of(row.visible.len()), self.window.of(row.visible.len()));
        let share = |row: &DecodeRow| (fixed(row), self.top.method.cap(row));
        step.by_share(share, |step, &(fixed, _)| match self.tail {
            Tail::Clt => self.sample(step, fixed),
            Tail::Hard => self.sample_certain(step, fixed),
        })
    }

    fn reads_all(&self, keys: usize) -> bool {
        let fixed = self.sink.of(keys) + self.window.of(keys);
        fixed + self.most(keys, fixed) >= keys
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        let mut indices = self.top.method.indices();
        if self.tail == Tail::Hard {
            indices.extend([&BOUNDS as &dyn KeyIndex, &ValueNorms]);
        }
        indices
    }

    fn may_lack(&self, keys: usize) -> usize {
        // What is certain follows from the bounds of all keys.
        let may = self.tail == Tail::Clt && self.top.method.may_lack_window();
        if may { self.window.of(keys) } else { 0 }
    }

    fn ahead(&self) -> bool {
        self.top.method.ahead()
    }

    fn promise(&self) -> Option<(f64, f64)> {
        self.on_output.then_some((self.epsilon, self.delta))
    }
}
