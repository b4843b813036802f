//! Quantised keys: all keys ranked by their scores at two bits a channel, without anything learned.

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
use taper_kernels::index::{Part, quantized};
use taper_kernels::kv::PagedKv;
use taper_kv_cache::IndexShape;

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "quantized_keys",
    summary: "Sinks, a window, and of the rest the keys that score highest at two bits a channel.",
    source: "Liu et al. 2024 (KIVI), arXiv:2402.02750, section 3, for the keys' quantisation, channel by channel within each block of 64 \
             tokens, to the middles of quarters, not to the ends; Lin et al. 2025 (Twilight), arXiv:2502.02770, section 4, for choosing \
             by quantised keys, there four bits and top-p; scores divided by how far off they may be, softmax summed over the GQA group",
    schema: schema_of::<TopK<QuantizedKeys>>,
    build: |value, path, artifacts| top_k::decode::<QuantizedKeys>(value, path, artifacts),
    artifacts: &[],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: DECODE.name,
    summary: "Scores of all keys at two bits a channel.",
    source: DECODE.source,
    schema: schema_of::<QuantizedKeys>,
    build: |value, path, artifacts| top_k::predictor::<QuantizedKeys>(value, path, artifacts),
    artifacts: &[],
};

/// Takes no parameters.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
struct QuantizedKeys {}

impl Ranked for QuantizedKeys {
    const FIXED: Fixed = Fixed { sink: 4, window: 64, dense_layers: 2 };

    fn predictor(&self, _: &str, _: &Artifacts) -> SpecResult<Arc<dyn Predictor>> {
        Ok(Arc::new(self.clone()))
    }
}

impl Predictor for QuantizedKeys {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, most: Most) -> Result<Choice> {
        let importance = quantized::importance(&step.batch, step.index(self)?, &wanted(step, most), most.over())?;
        most_important(step, &importance, (sink, window), most)
    }

    fn pays(&self) -> Option<f64> {
        // As the oracle: less reads more and keeps no more promises (bench/promise.md, bench/fidelity.md).
        Some(1.0)
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![self]
    }
}

impl KeyIndex for QuantizedKeys {
    fn name(&self) -> String {
        "quantized keys".to_owned()
    }

    fn shape(&self, shape: &AttentionShape, _: DType) -> IndexShape {
        let (rows, width) = quantized::shape(shape.head_dim);
        IndexShape { rows, width, dtype: DType::U32 }
    }

    fn extend(&self, _: usize, index: &Tensor, kv: PagedKv, parts: &[Part], _: &Rotations) -> Result<()> {
        quantized::extend(index, kv.k, parts)
    }
}
