//! k-means: keys in clusters, and the clusters whose centroids the query is nearest to are read.

use super::Entry;
use crate::artifacts::{ArtifactFile, ArtifactKind, Artifacts, Loaded};
use crate::method::{Choice, DecodeMethod, DecodeStep, Predictor};
use crate::partition::Partition;
use crate::probing::{self, Predicting, Prober, Probing};
use crate::schema::{parse, schema_of};
use crate::spec::SpecResult;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use taper_kernels::index::clusters::{self, Probes};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "kmeans",
    summary: "Sinks, a window, and of the rest the clusters whose centroids fit the query best.",
    source: "the k-means baselines of SAAP (Mazaré et al. 2025, arXiv:2502.08213, section 6), with and without rotary \
             embedding; softmax over the centroids' scores summed over the GQA group",
    schema: schema_of::<Decode>,
    build: |value, path, artifacts| {
        let params: Decode = parse(value, path)?;
        let json = json!(params);
        let predictor = params.kmeans.load(path, artifacts)?;
        Ok((Arc::new(Probing::new(&params.probing, predictor)), json))
    },
    artifacts: &[ROTATED, UNROTATED],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: DECODE.name,
    summary: "Centroids of clusters of keys.",
    source: DECODE.source,
    schema: schema_of::<Top>,
    build: |value, path, artifacts| {
        let params: Top = parse(value, path)?;
        let json = json!(params);
        Ok((Arc::new(Predicting::new(&params.predicted, params.kmeans.load(path, artifacts)?)), json))
    },
    artifacts: &[ROTATED, UNROTATED],
};

const ROTATED: ArtifactKind = ArtifactKind {
    file: "kmeans-rope.safetensors",
    made_by: "taper train kmeans --rope",
    read: |file| Ok(Arc::new(Clusters::read(file, "kmeans-rope", false)?) as Loaded),
};

const UNROTATED: ArtifactKind = ArtifactKind {
    file: "kmeans.safetensors",
    made_by: "taper train kmeans",
    read: |file| Ok(Arc::new(Clusters::read(file, "kmeans", true)?) as Loaded),
};

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Decode {
    #[serde(flatten)]
    probing: probing::Params,
    #[serde(flatten)]
    kmeans: KMeans,
}

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Top {
    #[serde(flatten)]
    predicted: probing::Predicted,
    #[serde(flatten)]
    kmeans: KMeans,
}

/// What is clustered.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct KMeans {
    /// Whether keys and queries are compared after the rotary embedding; before it they cluster better.
    rope: bool,
}

impl KMeans {
    fn load(&self, path: &str, artifacts: &Artifacts) -> SpecResult<Arc<Clusters>> {
        artifacts.get(if self.rope { &ROTATED } else { &UNROTATED }, path)
    }
}

/// The artefact: a partition.
#[derive(Debug)]
struct Clusters(Partition);

impl Clusters {
    fn read(file: &ArtifactFile, method: &'static str, unrotated: bool) -> std::result::Result<Self, String> {
        let (tensors, _) = file.tensors(method)?;
        Partition::read(method, &tensors, &file.model.shape, unrotated).map(Self)
    }
}

impl Prober for Clusters {
    fn probe(&self, step: &DecodeStep, fixed: (usize, usize), probes: Probes) -> Result<Choice> {
        let Some(centroids) = self.0.layer(step.layer) else { return Ok(step.dense()) };
        let logits = clusters::products(centroids, step.batch.q, self.0.turns(step).as_deref())?;
        self.0.select(step, fixed, probes, &logits)
    }

    fn partition(&self) -> &Partition {
        &self.0
    }
}
