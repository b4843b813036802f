//! Random sampling: sinks, a window, and a uniform sample that stands for the rest.

use super::{Entry, read};
use crate::amount::Amount;
use crate::method::{Choice, DecodeMethod, DecodeStep};
use crate::schema::schema_of;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use taper_kernels::decode::{Selection, sample_some};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "random_sample",
    summary: "Sinks, a window, and a uniform sample of the rest, weighted to stand for all of it.",
    source: "the baseline of vAttention (section 5); drawn without replacement among the keys left out, so numerator and \
             denominator are unbiased",
    schema: schema_of::<RandomSample>,
    build: |value, path, _| read::<RandomSample>(value, path).map(|(method, json)| (method as _, json)),
    artifacts: &[],
};

/// How many keys are sampled.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct RandomSample {
    /// Sampled keys: a whole number, or a share of the context below 1.
    rate: Amount,
    /// Tokens at the start of the sequence, always read.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, always read, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
}

impl Default for RandomSample {
    fn default() -> Self {
        Self { rate: Amount::Share(0.05), sink: 4, window: 64 }
    }
}

impl DecodeMethod for RandomSample {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let fixed = Selection::sink_window(step.batch.rows, step.kv_heads, self.sink, self.window);
        let sizes = step.per_head(|row| self.rate.of(row.visible.len()));
        Ok(sample_some(&step.batch, &fixed, &sizes, step.streams)?.into())
    }
}
