//! Oracle top-k: the keys of largest true weight. Reads every key, so it is a yardstick and no way to go faster.

use super::Entry;
use crate::artifacts::Artifacts;
use crate::method::{Choice, DecodeMethod, DecodeStep, Most, Predictor};
use crate::schema::schema_of;
use crate::spec::SpecResult;
use crate::top_k::{self, Fixed, Ranked, TopK, wanted};
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use taper_kernels::decode::{importance, scores, top_paying};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "oracle_top_k",
    summary: "Sinks, a window, and of the rest the k keys with the largest true weight.",
    source: "the upper bound that vAttention (section 5) and others compare with; weights summed over the GQA group",
    schema: schema_of::<TopK<Oracle>>,
    build: |value, path, artifacts| top_k::decode::<Oracle>(value, path, artifacts),
    artifacts: &[],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: "oracle",
    summary: "The true weights: reads every key.",
    source: DECODE.source,
    schema: schema_of::<Oracle>,
    build: |value, path, artifacts| top_k::predictor::<Oracle>(value, path, artifacts),
    artifacts: &[],
};

/// Takes no parameters.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
struct Oracle {}

impl Ranked for Oracle {
    const FIXED: Fixed = Fixed { sink: 4, window: 64, dense_layers: 0 };

    fn predictor(&self, _: &str, _: &Artifacts) -> SpecResult<Arc<dyn Predictor>> {
        Ok(Arc::new(self.clone()))
    }
}

impl Predictor for Oracle {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, most: Most) -> Result<Choice> {
        let scores = scores(&step.batch, &wanted(step, most))?;
        let selection =
            top_paying(step.batch.rows, &importance(&scores, most.over()), (sink, window), most.keys, most.noise)?;
        Ok(Choice { scores: Some(scores), ..selection.into() })
    }

    fn pays(&self) -> Option<f64> {
        Some(1.0)
    }
}
