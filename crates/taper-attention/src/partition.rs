//! Keys in clusters learned offline: what SAAP and k-means share.

use crate::artifacts::Tensors;
use crate::layer::AttentionShape;
use crate::method::{Choice, DecodeStep, KeyIndex, Rotations};
use candle_core::{DType, Result, Tensor};
use taper_kernels::index::Part;
use taper_kernels::index::clusters::{self, Centroids, Probes};
use taper_kernels::kv::{BLOCK_TOKENS, PagedKv};
use taper_kernels::mlp::PerHead;
use taper_kernels::rotary::Rotation;
use taper_kv_cache::IndexShape;

/// Centroids of every layer and KV head: `layers.l.centroids` `[kv_heads, clusters, head_dim]` for each layer `l` that has
/// them.
#[derive(Debug)]
pub(crate) struct Partition {
    /// Name of the index.
    name: &'static str,
    layers: Vec<Option<PerHead<Centroids>>>,
    /// Whether keys are clustered as they were before the rotary embedding.
    unrotated: bool,
}

impl Partition {
    pub fn read(
        name: &'static str,
        tensors: &Tensors,
        shape: &AttentionShape,
        unrotated: bool,
    ) -> std::result::Result<Self, String> {
        let mut layers = Vec::new();
        for layer in 0..shape.layers {
            let tensor = format!("layers.{layer}.centroids");
            if tensors.shape(&tensor).is_none() {
                layers.push(None);
                continue;
            }
            let (found, rows) = tensors.numbers(&tensor, &[shape.kv_heads, 0, shape.head_dim])?;
            let heads = rows.chunks_exact(found[1] * shape.head_dim).map(|rows| Centroids::new(rows, shape.head_dim));
            let heads = heads.collect::<Result<PerHead<_>>>().map_err(|e| format!("`{tensor}`: {e}"))?;
            layers.push(Some(heads));
        }
        if layers.iter().all(Option::is_none) {
            return Err("holds no layer: `layers.0.centroids` and the like are missing".to_owned());
        }
        Ok(Self { name, layers, unrotated })
    }

    /// The centroids of a layer `[kv_heads]`, if it has any.
    pub fn layer(&self, layer: usize) -> Option<&PerHead<Centroids>> {
        self.layers[layer].as_ref()
    }

    /// How many a head of a layer has at most, if there are any.
    pub fn clusters(&self, layer: usize) -> Option<usize> {
        self.layer(layer)?.iter().map(Centroids::clusters).max()
    }

    /// More clusters than a device ranks at once.
    pub fn host_only(&self) -> Option<String> {
        let most = self.layers.iter().flatten().flat_map(|heads| heads.iter()).map(Centroids::clusters).max()?;
        let what = || format!("an artefact of {most} clusters, more than {},", clusters::MOST_ON_DEVICE);
        (most > clusters::MOST_ON_DEVICE).then(what)
    }

    /// What is to be taken off queries `[R]`, so that they are as keys were clustered.
    pub fn turns(&self, step: &DecodeStep) -> Option<Vec<Rotation>> {
        self.unrotated.then(|| step.turns())
    }

    /// Sinks, window, and the clusters that come first by `logits` `[R, q_heads, clusters]`.
    pub fn select(&self, step: &DecodeStep, fixed: (usize, usize), probes: Probes, logits: &Tensor) -> Result<Choice> {
        let selection = clusters::select(&step.batch, step.index(self)?, logits, fixed, probes)?;
        let (rows, q_heads, clusters) = logits.dims3()?;
        Ok(Choice { scored: vec![q_heads / step.group()? * clusters; rows], ..selection.into() })
    }
}

impl KeyIndex for Partition {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn shape(&self, _: &AttentionShape, _: DType) -> IndexShape {
        IndexShape { rows: BLOCK_TOKENS, width: 1, dtype: DType::I16 }
    }

    fn extend(&self, layer: usize, index: &Tensor, kv: PagedKv, parts: &[Part], rotation: &Rotations) -> Result<()> {
        let Some(centroids) = self.layer(layer) else { return Ok(()) };
        clusters::extend(index, kv.k, parts, centroids, self.unrotated.then_some(rotation))
    }
}
