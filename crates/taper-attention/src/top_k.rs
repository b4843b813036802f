//! The plainest use of a predictor: sinks, a window, and of the rest the keys predicted to matter most.

use crate::amount::Amount;
use crate::artifacts::Artifacts;
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Most, Predictor};
use crate::schema::parse;
use crate::spec::SpecResult;
use candle_core::Result;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_kernels::decode::{self, Importance};

/// What is read whatever is predicted: tokens at the start, the most recent ones, and everything in so many of the first layers.
pub(crate) struct Fixed {
    pub sink: usize,
    pub window: usize,
    pub dense_layers: usize,
}

/// Parameters of a predictor that is a decode method of its own as well.
pub(crate) trait Ranked: JsonSchema + Serialize + DeserializeOwned + Default {
    /// Defaults of the decode method.
    const FIXED: Fixed;

    /// The predictor; `path` is where the parameters stand in the request.
    fn predictor(&self, path: &str, artifacts: &Artifacts) -> SpecResult<Arc<dyn Predictor>>;
}

/// How many keys are read, and by whose prediction.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, bound = "P: Ranked")]
#[schemars(bound = "P: Ranked")]
pub(crate) struct TopK<P> {
    /// Keys chosen by prediction: a whole number, or a share of the context below 1.
    k: Amount,
    /// Tokens at the start of the sequence, always read.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, always read, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
    /// So many of the first layers read everything.
    #[schemars(range(min = 0, max = 1000))]
    dense_layers: usize,
    #[serde(flatten)]
    predictor: P,
}

impl<P: Ranked> Default for TopK<P> {
    fn default() -> Self {
        let Fixed { sink, window, dense_layers } = P::FIXED;
        Self { k: Amount::Share(0.05), sink, window, dense_layers, predictor: P::default() }
    }
}

/// Builds the decode method.
pub(crate) fn decode<P: Ranked>(
    value: &Value,
    path: &str,
    artifacts: &Artifacts,
) -> SpecResult<(Arc<dyn DecodeMethod>, Value)> {
    let params: TopK<P> = parse(value, path)?;
    let json = json!(params);
    let predictor = params.predictor.predictor(path, artifacts)?;
    let TopK { k, sink, window, dense_layers, .. } = params;
    Ok((Arc::new(Method { k, sink, window, dense_layers, predictor }), json))
}

/// Builds the predictor.
pub(crate) fn predictor<P: Ranked>(
    value: &Value,
    path: &str,
    artifacts: &Artifacts,
) -> SpecResult<(Arc<dyn Predictor>, Value)> {
    let params: P = parse(value, path)?;
    Ok((params.predictor(path, artifacts)?, json!(params)))
}

#[derive(Debug)]
struct Method {
    k: Amount,
    sink: usize,
    window: usize,
    dense_layers: usize,
    predictor: Arc<dyn Predictor>,
}

impl DecodeMethod for Method {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let keys = step.per_head(|row| self.k.of(row.visible.len()));
        self.predictor.select(step, self.sink, self.window, Most { keys: &keys, noise: None })
    }

    fn reads_all(&self, keys: usize) -> bool {
        self.sink + self.window + self.k.of(keys) >= keys
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.predictor.indices()
    }

    fn may_lack(&self, _: usize) -> usize {
        if self.predictor.may_lack_window() { self.window } else { 0 }
    }

    fn ahead(&self) -> bool {
        self.predictor.ahead()
    }

    fn dense_layers(&self) -> usize {
        self.dense_layers
    }

    fn host_only(&self) -> Option<String> {
        self.predictor.host_only()
    }
}

/// The sinks, the window, and of the rest the keys that matter most.
pub(crate) fn most_important(
    step: &DecodeStep,
    importance: &Importance,
    fixed: (usize, usize),
    most: Most,
) -> Result<Choice> {
    let selection = decode::top_paying(step.batch.rows, importance, fixed, most.keys, most.noise)?;
    Ok(Choice { scored: importance.entries(step.batch.rows.len()), ..selection.into() })
}

/// Which heads `[R, kv_heads]` do not read everything anyway.
pub(crate) fn wanted(step: &DecodeStep, most: Most) -> Vec<bool> {
    most.keys.iter().zip(step.per_head(|row| row.visible.len())).map(|(&k, visible)| k < visible).collect()
}
