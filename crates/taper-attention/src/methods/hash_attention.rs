//! HashAttention: keys ranked by the Hamming distance of learned binary codes.

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
use taper_kernels::index::{Part, codes};
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kernels::mlp::{Activation, Mlp, PerHead};
use taper_kv_cache::IndexShape;

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "hash_attention",
    summary: "Sinks, a window, and of the rest the keys whose learned code is nearest to the query's.",
    source: "Desai et al. 2024, arXiv:2412.14468, section 4; 32 bits, equal bits summed over the GQA group",
    schema: schema_of::<TopK<HashAttention>>,
    build: |value, path, artifacts| top_k::decode::<HashAttention>(value, path, artifacts),
    artifacts: &[ARTIFACT],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: DECODE.name,
    summary: "Distances of learned binary codes.",
    source: DECODE.source,
    schema: schema_of::<HashAttention>,
    build: |value, path, artifacts| top_k::predictor::<HashAttention>(value, path, artifacts),
    artifacts: &[ARTIFACT],
};

const ARTIFACT: ArtifactKind = ArtifactKind {
    file: "hash_attention.safetensors",
    made_by: "taper train hash_attention",
    read: |file| Ok(Arc::new(Maps::read(file)?) as Loaded),
};

/// Takes no parameters.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
struct HashAttention {}

impl Ranked for HashAttention {
    const FIXED: Fixed = Fixed { sink: 128, window: 128, dense_layers: 0 };

    fn predictor(&self, path: &str, artifacts: &Artifacts) -> SpecResult<Arc<dyn Predictor>> {
        Ok(artifacts.get::<Maps>(&ARTIFACT, path)?)
    }
}

/// The artefact: for each layer `l`, `layers.l.query.{0,1,2}.weight` `[q_heads, out, in]` and `.bias` `[q_heads, out]`,
/// and the same of `key`, with kv_heads or q_heads maps. SiLU between the three layers; 32 outputs, whose signs are the
/// code; queries and keys after the rotary embedding. A layer that the file lacks is attended densely.
#[derive(Debug)]
struct Maps {
    layers: Vec<Option<LayerMaps>>,
    /// Codes of a key: one, or one for each query head of the group.
    codes: usize,
}

#[derive(Debug)]
struct LayerMaps {
    query: PerHead<Mlp>,
    key: PerHead<Mlp>,
}

impl Maps {
    fn read(file: &ArtifactFile) -> std::result::Result<Self, String> {
        let shape = file.model.shape;
        let (tensors, _) = file.tensors("hash_attention")?;
        let mut codes = None;
        let mut layers = Vec::new();
        for layer in 0..shape.layers {
            let Some(found) = tensors.shape(&format!("layers.{layer}.key.0.weight")) else {
                layers.push(None);
                continue;
            };
            let maps = found.first().copied().unwrap_or(0);
            if maps != shape.q_heads && maps != shape.kv_heads {
                let (kv, q) = (shape.kv_heads, shape.q_heads);
                return Err(format!("`layers.{layer}.key.0.weight` has {maps} maps; expected {kv} or {q}"));
            }
            if *codes.get_or_insert(maps / shape.kv_heads) != maps / shape.kv_heads {
                return Err("the layers have different numbers of key maps".to_owned());
            }
            let sizes = (shape.head_dim, 3, codes::BITS);
            let read =
                |of: &str, maps| tensors.perceptrons(&format!("layers.{layer}.{of}"), maps, sizes, Activation::Silu);
            layers.push(Some(LayerMaps { query: read("query", shape.q_heads)?, key: read("key", maps)? }));
        }
        let codes = codes.ok_or("holds no layer: `layers.0.key.0.weight` and the like are missing")?;
        Ok(Self { layers, codes })
    }
}

impl Predictor for Maps {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, most: Most) -> Result<Choice> {
        let Some(maps) = &self.layers[step.layer] else { return Ok(step.dense()) };
        let importance = codes::importance(&step.batch, step.index(self)?, &maps.query, &wanted(step, most))?;
        most_important(step, &importance, (sink, window), most)
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![self]
    }

    fn may_lack_window(&self) -> bool {
        true
    }
}

impl KeyIndex for Maps {
    fn name(&self) -> String {
        "hash_attention codes".to_owned()
    }

    fn shape(&self, _: &AttentionShape, _: DType) -> IndexShape {
        IndexShape { rows: BLOCK_TOKENS, width: self.codes, dtype: DType::U32 }
    }

    fn extend(&self, layer: usize, index: &Tensor, kv: PagedKv, parts: &[Part], _: &Rotations) -> Result<()> {
        match &self.layers[layer] {
            Some(maps) => codes::extend(index, kv.k, parts, &maps.key),
            None => Ok(()),
        }
    }
}
