//! Oracle top-p: the fewest keys that hold a share of the attention mass. Reads every key: a yardstick.

use super::{Entry, read};
use crate::method::{Choice, DecodeMethod, DecodeStep};
use crate::schema::schema_of;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use taper_kernels::decode::{Over, importance, scores, top_p};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "oracle_top_p",
    summary: "Sinks, a window, and of the rest the fewest keys with which all that is read holds the share p of the mass.",
    source: "the adaptive upper bound that vAttention (section 5) compares with; p is of the whole mass, sinks and \
             window included, as the mean over the GQA group",
    schema: schema_of::<OracleTopP>,
    build: |value, path, _| read::<OracleTopP>(value, path).map(|(method, json)| (method as _, json)),
    artifacts: &[],
};

/// How much of the attention mass is read.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct OracleTopP {
    /// Share of the attention mass; 1 is dense.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    p: f64,
    /// Tokens at the start of the sequence, always read.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, always read, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
}

impl Default for OracleTopP {
    fn default() -> Self {
        Self { p: 0.95, sink: 4, window: 64 }
    }
}

impl DecodeMethod for OracleTopP {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let scores = scores(&step.batch, &step.per_head(|_| self.p < 1.0))?;
        let group = step.group()?;
        let selection =
            top_p(step.batch.rows, &importance(&scores, Over::Sum), self.sink, self.window, self.p as f32, group)?;
        Ok(Choice { scores: Some(scores), ..selection.into() })
    }
}
