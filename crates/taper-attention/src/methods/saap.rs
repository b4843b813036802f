//! SAAP: keys in clusters learned offline, and a classifier that says which clusters hold a query's attention mass.

use super::Entry;
use crate::artifacts::{ArtifactFile, ArtifactKind, Loaded};
use crate::method::{Choice, DecodeMethod, DecodeStep, Predictor};
use crate::partition::Partition;
use crate::probing::{Params, Predicted, Predicting, Prober, Probing};
use crate::schema::{parse, schema_of};
use candle_core::Result;
use serde_json::json;
use std::sync::Arc;
use taper_kernels::index::clusters::Probes;
use taper_kernels::mlp::{self, Activation, Mlp, PerHead};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "saap",
    summary: "Sinks, a window, and of the rest the clusters in which a classifier expects the query's attention mass.",
    source: "Mazaré et al. 2025, arXiv:2502.08213, sections 4 and 5; keys clustered and queries classified before the \
             rotary embedding, class probabilities summed over the GQA group; the selectivity cap is ours",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse(value, path)?;
        let json = json!(params);
        Ok((Arc::new(Probing::new(&params, artifacts.get::<Saap>(&ARTIFACT, path)?)), json))
    },
    artifacts: &[ARTIFACT],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: DECODE.name,
    summary: "Clusters that a classifier expects attention mass in.",
    source: DECODE.source,
    schema: schema_of::<Predicted>,
    build: |value, path, artifacts| {
        let params: Predicted = parse(value, path)?;
        let json = json!(params);
        Ok((Arc::new(Predicting::new(&params, artifacts.get::<Saap>(&ARTIFACT, path)?)), json))
    },
    artifacts: &[ARTIFACT],
};

const ARTIFACT: ArtifactKind = ArtifactKind {
    file: "saap.safetensors",
    made_by: "taper train saap",
    read: |file| Ok(Arc::new(Saap::read(file)?) as Loaded),
};

/// The artefact: a partition of the keys before the rotary embedding, and for each layer `l` that has one
/// `layers.l.classifier.{0,1}.weight` `[kv_heads, out, in]` and `.bias` `[kv_heads, out]`, ReLU between, as many classes
/// as clusters; batch normalisation is folded in.
#[derive(Debug)]
struct Saap {
    partition: Partition,
    /// `[layers][kv_heads]`.
    classifiers: Vec<Option<PerHead<Mlp>>>,
}

impl Saap {
    fn read(file: &ArtifactFile) -> std::result::Result<Self, String> {
        let shape = file.model.shape;
        let (tensors, _) = file.tensors("saap")?;
        let partition = Partition::read("saap", &tensors, &shape, true)?;
        let mut classifiers = Vec::new();
        for layer in 0..shape.layers {
            let Some(centroids) = partition.layer(layer) else {
                classifiers.push(None);
                continue;
            };
            let sizes = (shape.head_dim, 2, centroids[0].clusters());
            let prefix = format!("layers.{layer}.classifier");
            classifiers.push(Some(tensors.perceptrons(&prefix, shape.kv_heads, sizes, Activation::Relu)?));
        }
        Ok(Self { partition, classifiers })
    }
}

impl Prober for Saap {
    fn probe(&self, step: &DecodeStep, fixed: (usize, usize), probes: Probes) -> Result<Choice> {
        let Some(classifiers) = &self.classifiers[step.layer] else { return Ok(step.dense()) };
        let logits = mlp::per_head(classifiers, step.batch.q, self.partition.turns(step).as_deref())?;
        self.partition.select(step, fixed, probes, &logits)
    }

    fn partition(&self) -> &Partition {
        &self.partition
    }
}
