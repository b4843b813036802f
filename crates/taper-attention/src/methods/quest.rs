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
}

impl Default for Quest {
    fn default() -> Self {
        Self { page: 16 }
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
        let importance = bounds::importance(&step.batch, step.index(self)?, &wanted(step, most), most.over())?;
        most_important(step, &importance, (sink, window), most)
    }

    fn pays(&self) -> Option<f64> {
        Some(0.1)
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
