//! HiP: keys found by probing a hierarchy of chunks.
//!
//! Between the sinks and a window, the keys of each block of `block_q` queries are cut into chunks. A chunk is halved
//! again and again, by way of the half whose middle key scores higher, and its score is the best that was seen; the best
//! chunks are kept, cut into smaller ones, and so on by the `stages`. Queries are averaged in fours; a score is the
//! largest over these and over the query heads of a KV head, which share one choice.
//!
//! # Causality
//! Every row reads only what stands before it, but which of it depends on the queries of its whole block. Nothing later
//! has a say, and how a prompt is cut does not show: it is cut between blocks.

use super::Entry;
use crate::method::{PrefillChoice, PrefillLayer, PrefillMethod, cut_at_blocks};
use crate::schema::{parse, schema_of};
use crate::spec::SpecError;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use taper_kernels::prefill::{self, Hierarchy, Selection, probe, query_blocks};

pub(super) static PREFILL: Entry<dyn PrefillMethod> = Entry {
    name: "hip",
    summary: "The first tokens, a window, and the chunks between that a search by halves ranks highest.",
    source: "Lee et al. 2024, HiP Attention, arXiv:2406.09827 and arXiv:2502.08910; the default stages are those of \
             the authors' library (chunks of 256, 32, 8), and the preset delta-hip has those of Delta Attention's set-up (256, \
             8, 2); a choice for each KV head, where the reference makes one for all heads",
    schema: schema_of::<Params>,
    build: |value, path, _| {
        let params: Params = parse(value, path)?;
        let chunks: Vec<usize> = params.stages.iter().map(|stage| stage.chunk).collect();
        if let Some(bad) = chunks.iter().position(|chunk| !chunk.is_power_of_two()) {
            let message = format!("must be a power of two; got {}", chunks[bad]);
            return Err(SpecError::new(format!("{path}.stages[{bad}].chunk"), message));
        }
        if let Some(bad) = chunks.windows(2).position(|pair| pair[1] >= pair[0]) {
            let message = format!("must be below the stage before's {}; got {}", chunks[bad], chunks[bad + 1]);
            return Err(SpecError::new(format!("{path}.stages[{}].chunk", bad + 1), message));
        }
        let stage = |stage: &Stage| prefill::Stage { chunk: stage.chunk, keep: stage.keep };
        let hierarchy = Hierarchy {
            sink: params.sink,
            window: params.window,
            average: params.average,
            stages: params.stages.iter().map(stage).collect(),
            full_at: params.full_at,
        };
        let Params { block_q, dense_layers, .. } = params;
        Ok((Arc::new(Hip { hierarchy, block_q, dense_layers }), json!(params)))
    },
    artifacts: &[],
};

/// What every row reads, and how the rest is searched.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Params {
    /// Rows that share a choice of keys: a multiple of 64.
    #[schemars(range(min = 64, max = 512), extend("multipleOf" = 64))]
    block_q: usize,
    /// Neighbouring queries whose mean looks for keys.
    #[schemars(range(min = 1, max = 64))]
    average: usize,
    /// Tokens at the start of the sequence that are always read, rounded up to whole blocks of 64.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Tokens before a row's block that are always read, rounded up to whole blocks of 64.
    #[schemars(range(min = 0, max = 1_048_576))]
    window: usize,
    /// The search: from stage to stage smaller chunks of what the one before kept.
    #[schemars(length(min = 1, max = 8))]
    stages: Vec<Stage>,
    /// With fewer tokens than so many between sinks and window, every stage keeps proportionally less; 0 for never.
    #[schemars(range(min = 0, max = 1_048_576))]
    full_at: usize,
    /// So many of the first layers are dense.
    #[schemars(range(min = 0, max = 1024))]
    dense_layers: usize,
}

/// One stage of the search.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(inline)]
struct Stage {
    /// Tokens of a chunk: a power of two, below that of the stage before.
    #[schemars(range(min = 2, max = 4096))]
    chunk: usize,
    /// Tokens that are kept.
    #[schemars(range(min = 1, max = 1_048_576))]
    keep: usize,
}

impl Default for Params {
    fn default() -> Self {
        let stages = [(256, 32_768), (32, 8192), (8, 2048)].map(|(chunk, keep)| Stage { chunk, keep });
        Self {
            block_q: 64,
            average: 4,
            sink: 256,
            window: 1024,
            stages: stages.into(),
            full_at: 32_768,
            dense_layers: 3,
        }
    }
}

#[derive(Debug)]
struct Hip {
    hierarchy: Hierarchy,
    block_q: usize,
    dense_layers: usize,
}

impl PrefillMethod for Hip {
    fn choose(&self, chunk: &PrefillLayer) -> Result<PrefillChoice> {
        if chunk.layer < self.dense_layers {
            return Ok(PrefillChoice::default());
        }
        let runs = query_blocks(chunk.start..chunk.start + chunk.rows(), self.block_q);
        let (heads, scored) = probe(&chunk.select(&chunk.q, &chunk.positions()), &runs, &self.hierarchy)?;
        Ok(PrefillChoice { selection: Some(Selection::new(runs, heads)?), measured: None, scored })
    }

    fn cut(&self, start: usize, prompt: usize, max: usize) -> usize {
        cut_at_blocks(self.block_q, start, prompt, max)
    }
}
