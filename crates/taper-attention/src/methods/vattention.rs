//! vAttention: sinks, a window and the predicted top keys exactly; the rest from a sample whose size is the least that
//! keeps a promise on the output's relative error.

use super::{Entry, predictor};
use crate::amount::Amount;
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Predictor};
use crate::schema::{parse, schema_of};
use crate::spec::Chosen;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_kernels::budget::{Promise, Rule};
use taper_kernels::decode::{Budget, Sampling, foresee, sample};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "vattention",
    summary: "Relative output error at most epsilon with probability at least 1 - delta, per head and token, for as \
              few keys as that takes; a head that cannot keep it reads everything.",
    source: "vAttention, Algorithm 1, Lemma 4.2, Theorem 4.3; the rules ratio and chi2 are sharper forms of the same \
             bound, with the noise of the pilot taken off",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse("vattention", value, path)?;
        let top = predictor(&params.top, &format!("{path}.top"), artifacts)?;
        let json = json!(Params { top: top.json.clone(), ..params });
        let promise = |epsilon| Promise::new(params.rule.into(), epsilon, params.delta);
        let sampling = Sampling {
            promise: promise(params.epsilon),
            hopeless: promise((HOPELESS * params.epsilon).min((1.0 + params.epsilon) / 2.0)),
            pilot_tokens: params.pilot_tokens,
            pilot_share: params.pilot_share,
            dense_share: params.dense_share,
        };
        let Params { epsilon, sink, window, top_k, .. } = params;
        Ok((Arc::new(VAttention { epsilon, sink, window, top_k, top, sampling }), json))
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
    /// Which bound turns the pilot sample into a budget.
    rule: RuleName,
    /// Tokens at the start of the sequence, always read.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, always read, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
    /// Predicted keys read exactly: a whole number, or a share of the context below 1.
    top_k: Amount,
    /// What predicts them.
    #[schemars(schema_with = "top_schema")]
    top: Value,
    /// Least size of the pilot sample.
    #[schemars(range(min = 2, max = 1_048_576))]
    pilot_tokens: usize,
    /// Least size of the pilot sample as a share of what it stands for.
    #[schemars(range(min = 0, max = 1))]
    pilot_share: f64,
    /// A head that would read this share of the context reads all of it.
    #[schemars(range(min = 0, max = 1))]
    dense_share: f64,
}

fn top_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "object", "description": "What predicts the top keys.", "x-method-of": "predictor" })
}

impl Default for Params {
    fn default() -> Self {
        Self {
            epsilon: 0.1,
            delta: 0.1,
            rule: RuleName::Chi2,
            sink: 128,
            window: 128,
            top_k: Amount::Share(0.02),
            top: json!({ "method": "oracle" }),
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

#[derive(Debug)]
struct VAttention {
    epsilon: f64,
    sink: usize,
    window: usize,
    top_k: Amount,
    top: Chosen<dyn Predictor>,
    sampling: Sampling,
}

impl DecodeMethod for VAttention {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let k = step.per_head(|row| self.top_k.of(row.visible.len()));
        let hopeless = foresee(&step.batch, (self.sink, self.window), &k, step.streams, &self.sampling)?;
        let k: Vec<usize> = k.iter().zip(&hopeless).map(|(&k, &dense)| if dense { usize::MAX } else { k }).collect();
        let exact = self.top.method.select(step, self.sink, self.window, &k)?;
        let (selection, mut budgets) =
            sample(&step.batch, &exact.selection, exact.scores.as_ref(), step.streams, &self.sampling)?;
        let residual = step.per_head(|row| row.visible.len().saturating_sub(self.sink + self.window));
        let group = budgets.len() / hopeless.len();
        for ((budgets, residual), _) in budgets.chunks_mut(group).zip(residual).zip(&hopeless).filter(|(_, h)| **h) {
            budgets.fill(Budget { residual, sampled: residual, dense: true });
        }
        Ok(Choice { selection, scores: exact.scores, budgets: Some(budgets) })
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.top.method.indices()
    }

    fn epsilon(&self) -> Option<f64> {
        Some(self.epsilon)
    }
}
