//! Quest: pages of keys ranked by the largest score that their channel-wise bounds allow.

use super::Entry;
use crate::artifacts::Artifacts;
use crate::layer::AttentionShape;
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Most, Predictor, Rotations};
use crate::schema::schema_of;
use crate::spec::SpecResult;
use crate::top_k::{self, Fixed, Ranked, TopK, most_important, wanted};
use candle_core::{DType, Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use taper_kernels::index::{Part, bounds};
use taper_kernels::kv::PagedKv;
use taper_kv_cache::IndexShape;

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "quest",
    summary: "Sinks, a window, and of the rest the pages whose keys could score highest.",
    source: "Tang et al. 2024, arXiv:2406.10774, section 3; pages ranked by the softmax of their bounds, summed over the \
             GQA group; sinks and window in place of the first and the current page",
    schema: schema_of::<TopK<Quest>>,
    build: |value, path, artifacts| top_k::decode::<Quest>(value, path, artifacts),
    artifacts: &[],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: DECODE.name,
    summary: "Bounds of pages of keys.",
    source: DECODE.source,
    schema: schema_of::<Quest>,
    build: |value, path, artifacts| top_k::predictor::<Quest>(value, path, artifacts),
    artifacts: &[],
};

/// The pages.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(super) struct Quest {
    /// Tokens of a page.
    #[schemars(extend("enum" = [4, 8, 16, 32, 64]))]
    pub page: usize,
    /// Pages are chosen by the query of the token before, in the same layer, and the page that is being filled is read
    /// whatever the window; where that query is not known, as by drafts for a method that chooses nothing, by the token's own. On a CUDA
    /// device all layers' pages are then chosen at once. Nothing is faster by it on the CPU.
    pub ahead: bool,
}

impl Default for Quest {
    fn default() -> Self {
        Self { page: 16, ahead: false }
    }
}

impl Ranked for Quest {
    const FIXED: Fixed = Fixed { sink: 4, window: 64, dense_layers: 2 };

    fn predictor(&self, _: &str, _: &Artifacts) -> SpecResult<Arc<dyn Predictor>> {
        Ok(Arc::new(self.clone()))
    }
}

impl Predictor for Quest {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, most: Most) -> Result<Choice> {
        let (index, wanted, over) = (step.index(self)?, &wanted(step, most), most.over());
        if !self.ahead {
            return most_important(step, &bounds::importance(&step.batch, index, wanted, over)?, (sink, window), most);
        }
        let fixed = (sink, window.max(self.page));
        if let Some(all) = step.earlier.and_then(|earlier| earlier.all()) {
            let chosen = all.choose((&step.batch, step.layer), (wanted, over), fixed, (most.keys, most.noise))?;
            if let Some((selection, scored)) = chosen {
                return Ok(Choice { scored, ..selection.into() });
            }
        }
        let earlier = step.earlier.map_or_else(|| Ok(step.batch.q.clone()), |earlier| earlier.queries())?;
        let importance = bounds::importance_ahead(&step.batch, &earlier, index, wanted, over)?;
        most_important(step, &importance, fixed, most)
    }

    fn pays(&self) -> Option<f64> {
        Some(0.1)
    }

    fn ahead(&self) -> bool {
        self.ahead
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![self]
    }
}

impl KeyIndex for Quest {
    fn name(&self) -> String {
        format!("bounds of pages of {}", self.page)
    }

    fn shape(&self, shape: &AttentionShape, cache: DType) -> IndexShape {
        let (rows, width) = bounds::shape(self.page, shape.head_dim);
        IndexShape { rows, width, dtype: cache }
    }

    fn extend(&self, _: usize, index: &Tensor, kv: PagedKv, parts: &[Part], _: &Rotations) -> Result<()> {
        bounds::extend(index, kv.k, parts)
    }
}
