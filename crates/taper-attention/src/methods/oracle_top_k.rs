//! Oracle top-k: the keys of largest true weight. Reads every key, so it is a yardstick and no way to go faster.

use super::Entry;
use crate::amount::Amount;
use crate::method::{Choice, DecodeMethod, DecodeStep, Predictor};
use crate::schema::{parse, schema_of};
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use taper_kernels::decode::{importance, scores, top_k};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "oracle_top_k",
    summary: "Sinks, a window, and of the rest the k keys with the largest true weight.",
    source: "the upper bound that vAttention (section 5) and others compare with; weights summed over the GQA group",
    schema: schema_of::<OracleTopK>,
    build: |value, path, _| {
        let method: OracleTopK = parse("oracle_top_k", value, path)?;
        let json = json!(method);
        Ok((Arc::new(method), json))
    },
    artifacts: &[],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: "oracle",
    summary: "The true weights: reads every key.",
    source: DECODE.source,
    schema: schema_of::<Oracle>,
    build: |value, path, _| Ok((Arc::new(parse::<Oracle>("oracle", value, path)?), json!({}))),
    artifacts: &[],
};

/// How many keys are read.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct OracleTopK {
    /// Keys chosen by weight: a whole number, or a share of the context below 1.
    k: Amount,
    /// Tokens at the start of the sequence, always read.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, always read, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
}

impl Default for OracleTopK {
    fn default() -> Self {
        Self { k: Amount::Share(0.05), sink: 4, window: 64 }
    }
}

impl DecodeMethod for OracleTopK {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        Oracle {}.select(step, self.sink, self.window, &step.per_head(|row| self.k.of(row.visible.len())))
    }
}

/// Takes no parameters.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct Oracle {}

impl Predictor for Oracle {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, k: &[usize]) -> Result<Choice> {
        let visible = step.per_head(|row| row.visible.len());
        let wanted: Vec<bool> = k.iter().zip(visible).map(|(&k, visible)| k < visible).collect();
        let scores = scores(&step.batch, &wanted)?;
        let selection = top_k(step.batch.rows, &importance(&scores), sink, window, k);
        Ok(Choice { selection, scores: Some(scores), budgets: None })
    }
}
