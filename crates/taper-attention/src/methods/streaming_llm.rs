//! StreamingLLM: the first tokens and the most recent ones, as a mask with true positions.

use super::{Entry, read};
use crate::method::{
    Carry, Choice, DecodeMethod, DecodeStep, PrefillChoice, PrefillLayer, PrefillMethod, PrefillOutput,
};
use crate::schema::schema_of;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use taper_kernels::decode::{DecodeRow, Selection};
use taper_kernels::prefill::Mask;

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "streaming_llm",
    summary: "The first tokens (attention sinks) and a sliding window.",
    source: "Xiao et al. 2023, arXiv:2309.17453, section 3; nothing is evicted and positions stay true",
    schema: schema_of::<StreamingLlm>,
    build: |value, path, _| read::<StreamingLlm>(value, path).map(|(method, json)| (method as _, json)),
    artifacts: &[],
};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: PREFILL.name,
    summary: PREFILL.summary,
    source: PREFILL.source,
    schema: schema_of::<StreamingLlm>,
    build: |value, path, _| read::<StreamingLlm>(value, path).map(|(method, json)| (method as _, json)),
    artifacts: &[],
};

/// Which tokens every query reads.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct StreamingLlm {
    /// Tokens at the start of the sequence.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
}

impl Default for StreamingLlm {
    fn default() -> Self {
        Self { sink: 4, window: 2048 }
    }
}

impl PrefillMethod for StreamingLlm {
    fn attend(&self, rows: &PrefillLayer, _: &PrefillChoice, _: &mut Carry) -> Result<PrefillOutput> {
        rows.attend(Mask::SinkWindow { sink: self.sink, window: self.window })
    }

    fn reuse(&self, _: usize, cached: usize) -> usize {
        cached
    }
}

impl DecodeMethod for StreamingLlm {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        Ok(Selection::sink_window(step.batch.rows, step.kv_heads, self.sink, self.window).into())
    }

    fn plain(&self, rows: &[DecodeRow], kv_heads: usize) -> Option<Selection> {
        Some(Selection::sink_window(rows, kv_heads, self.sink, self.window))
    }
}
