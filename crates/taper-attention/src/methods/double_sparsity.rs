//! Double Sparsity: keys ranked by their scores over a few channels, chosen offline.

use super::Entry;
use crate::artifacts::{ArtifactFile, ArtifactKind, Artifacts, Loaded};
use crate::layer::AttentionShape;
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Most, Predictor, Rotations};
use crate::schema::schema_of;
use crate::spec::SpecResult;
use crate::top_k::{self, Fixed, Ranked, TopK, most_important, wanted};
use candle_core::{DType, Result, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use taper_kernels::index::{Part, labels};
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kv_cache::IndexShape;

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "double_sparsity",
    summary: "Sinks, a window, and of the rest the keys that score highest over a few channels.",
    source: "Yang et al. 2024, arXiv:2408.07092, section 3; one list of channels for each KV head, labels as wide as the \
             cache, softmax over the channels' scores summed over the GQA group",
    schema: schema_of::<TopK<DoubleSparsity>>,
    build: |value, path, artifacts| top_k::decode::<DoubleSparsity>(value, path, artifacts),
    artifacts: &[ARTIFACT],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: DECODE.name,
    summary: "Scores over a few channels.",
    source: DECODE.source,
    schema: schema_of::<DoubleSparsity>,
    build: |value, path, artifacts| top_k::predictor::<DoubleSparsity>(value, path, artifacts),
    artifacts: &[ARTIFACT],
};

const ARTIFACT: ArtifactKind = ArtifactKind {
    file: "double_sparsity.safetensors",
    made_by: "taper train double_sparsity",
    read: |file| Ok(Arc::new(Channels::read(file)?) as Loaded),
};

/// Takes no parameters.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
struct DoubleSparsity {}

impl Ranked for DoubleSparsity {
    const FIXED: Fixed = Fixed { sink: 4, window: 64, dense_layers: 2 };

    fn predictor(&self, path: &str, artifacts: &Artifacts) -> SpecResult<Arc<dyn Predictor>> {
        Ok(artifacts.get::<Channels>(&ARTIFACT, path)?)
    }
}

/// The artefact: `channels` `[layers, kv_heads, r]`, whole numbers below head_dim.
#[derive(Debug)]
struct Channels {
    /// `[layers][kv_heads][r]`.
    layers: Vec<Vec<Vec<u32>>>,
    width: usize,
}

impl Channels {
    fn read(file: &ArtifactFile) -> std::result::Result<Self, String> {
        let shape = file.model.shape;
        let (tensors, _) = file.tensors("double_sparsity")?;
        let (found, channels) = tensors.indices("channels", &[shape.layers, shape.kv_heads, 0], shape.head_dim)?;
        let width = found[2];
        let heads = |layer: &[u32]| layer.chunks_exact(width).map(<[u32]>::to_vec).collect();
        Ok(Self { layers: channels.chunks_exact(shape.kv_heads * width).map(heads).collect(), width })
    }
}

impl Predictor for Channels {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, most: Most) -> Result<Choice> {
        let channels = &self.layers[step.layer];
        let importance =
            labels::importance(&step.batch, step.index(self)?, channels, &wanted(step, most), most.over())?;
        most_important(step, &importance, (sink, window), most)
    }

    fn pays(&self) -> Option<f64> {
        Some(0.1)
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![self]
    }

    fn host_only(&self) -> Option<String> {
        let what = || format!("an artefact of {} channels, not {:?},", self.width, labels::ON_DEVICE);
        (!labels::ON_DEVICE.contains(&self.width)).then(what)
    }
}

impl KeyIndex for Channels {
    fn name(&self) -> String {
        "double_sparsity labels".to_owned()
    }

    fn shape(&self, _: &AttentionShape, cache: DType) -> IndexShape {
        IndexShape { rows: BLOCK_TOKENS, width: self.width, dtype: cache }
    }

    fn extend(&self, layer: usize, index: &Tensor, kv: PagedKv, parts: &[Part], _: &Rotations) -> Result<()> {
        labels::extend(index, kv.k, parts, &self.layers[layer])
    }
}
