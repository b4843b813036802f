//! SAAP: keys in clusters learned offline, and a classifier that says which clusters hold a query's attention mass.

use super::Entry;
use super::partition::Partition;
use crate::artifacts::{ArtifactFile, ArtifactKind, Loaded};
use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Predictor};
use crate::schema::{parse, schema_of};
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use taper_kernels::decode::Selection;
use taper_kernels::index::clusters::Probes;
use taper_kernels::mlp::{Activation, Mlp};

pub(super) static DECODE: Entry<dyn DecodeMethod> = Entry {
    name: "saap",
    summary: "Sinks, a window, and of the rest the clusters in which a classifier expects the query's attention mass.",
    source: "Mazaré et al. 2025, arXiv:2502.08213, sections 4 and 5; keys clustered and queries classified before the \
             rotary embedding, class probabilities summed over the GQA group; the selectivity cap is ours",
    schema: schema_of::<Params>,
    build: |value, path, artifacts| {
        let params: Params = parse("saap", value, path)?;
        let json = json!(params);
        Ok((Arc::new(Probing::new(&params, artifacts.get::<Saap>(&ARTIFACT, path)?)), json))
    },
    artifacts: &[ARTIFACT],
};

pub(super) static PREDICTOR: Entry<dyn Predictor> = Entry {
    name: DECODE.name,
    summary: "Clusters that a classifier expects attention mass in.",
    source: DECODE.source,
    schema: schema_of::<Nothing>,
    build: |value, path, artifacts| {
        let params: Nothing = parse("saap", value, path)?;
        Ok((artifacts.get::<Saap>(&ARTIFACT, path)?, json!(params)))
    },
    artifacts: &[ARTIFACT],
};

const ARTIFACT: ArtifactKind = ArtifactKind {
    file: "saap.safetensors",
    made_by: "taper train saap",
    read: |file| Ok(Arc::new(Saap::read(file)?) as Loaded),
};

/// Takes no parameters.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct Nothing {}

/// How many clusters are read, and what is read whatever they are.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(super) struct Params {
    /// Clusters that are read; as many as there are is dense.
    #[schemars(range(min = 0, max = 65_536))]
    probes: usize,
    /// Tokens at the start of the sequence, always read.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, always read, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
    /// Fewer clusters are read where they would hold more than this share of the context.
    #[schemars(range(min = 0, max = 1))]
    max_selectivity: f64,
    /// So many of the first layers read everything.
    #[schemars(range(min = 0, max = 1000))]
    dense_layers: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self { probes: 32, sink: 1, window: 2047, max_selectivity: 1.0, dense_layers: 1 }
    }
}

/// What reads clusters.
pub(super) trait Prober: Predictor {
    /// Reads sinks, window, and the clusters it prefers.
    fn probe(&self, step: &DecodeStep, fixed: (usize, usize), probes: Probes) -> Result<Choice>;

    /// The clusters.
    fn partition(&self) -> &Partition;
}

/// The decode method of a [`Prober`].
#[derive(Debug)]
pub(super) struct Probing<P> {
    params: Params,
    prober: Arc<P>,
}

impl<P: Prober> Probing<P> {
    pub fn new(params: &Params, prober: Arc<P>) -> Self {
        Self { params: params.clone(), prober }
    }
}

impl<P: Prober> DecodeMethod for Probing<P> {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let Params { probes, sink, window, max_selectivity, .. } = self.params;
        let all = self.prober.partition().layer(step.layer).and_then(|heads| heads.iter().map(|h| h.clusters()).max());
        if all.is_none_or(|all| probes >= all && max_selectivity >= 1.0) {
            return Ok(step.dense());
        }
        // The cap is a share of each row's context, so rows of different lengths go one by one.
        let limit = |visible: usize| (max_selectivity * visible as f64) as usize;
        let visible = step.batch.rows[0].visible.len();
        if step.batch.rows.iter().all(|row| limit(row.visible.len()) == limit(visible)) {
            return self.prober.probe(step, (sink, window), Probes::Clusters(probes, limit(visible)));
        }
        let mut selection = Vec::new();
        for row in 0..step.batch.rows.len() {
            let visible = step.batch.rows[row].visible.len();
            let probes = Probes::Clusters(probes, limit(visible));
            let choice = step.row(row, |step| self.prober.probe(step, (sink, window), probes))?;
            selection.extend(choice.selection.0);
        }
        Ok(Selection(selection).into())
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.prober.indices()
    }

    fn dense_layers(&self) -> usize {
        self.params.dense_layers
    }
}

/// The artefact: a partition of the keys before the rotary embedding, and for each layer `l` that has one
/// `layers.l.classifier.{0,1}.weight` `[kv_heads, out, in]` and `.bias` `[kv_heads, out]`, ReLU between, as many classes
/// as clusters; batch normalisation is folded in.
#[derive(Debug)]
struct Saap {
    partition: Partition,
    /// `[layers][kv_heads]`.
    classifiers: Vec<Option<Vec<Mlp>>>,
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
            let (heads, d, clusters) = (shape.kv_heads, shape.head_dim, centroids[0].clusters());
            let name = |depth: usize, part: &str| format!("layers.{layer}.classifier.{depth}.{part}");
            let (found, first) = tensors.numbers(&name(0, "weight"), &[heads, 0, d])?;
            let hidden = found[1];
            let (_, first_bias) = tensors.numbers(&name(0, "bias"), &[heads, hidden])?;
            let (_, second) = tensors.numbers(&name(1, "weight"), &[heads, clusters, hidden])?;
            let (_, second_bias) = tensors.numbers(&name(1, "bias"), &[heads, clusters])?;
            let of = |all: &[f32], head: usize| {
                let size = all.len() / heads;
                all[head * size..(head + 1) * size].to_vec()
            };
            let mlp = |head: usize| {
                let layers =
                    vec![(of(&first, head), of(&first_bias, head)), (of(&second, head), of(&second_bias, head))];
                Mlp::new(layers, Activation::Relu).map_err(|e| e.to_string())
            };
            classifiers.push(Some((0..heads).map(mlp).collect::<std::result::Result<Vec<_>, _>>()?));
        }
        Ok(Self { partition, classifiers })
    }
}

impl Prober for Saap {
    fn probe(&self, step: &DecodeStep, fixed: (usize, usize), probes: Probes) -> Result<Choice> {
        let classifiers = self.classifiers[step.layer].as_deref();
        let share =
            |head: usize, queries: &[f32]| classifiers.expect("asked only where there are any")[head].forward(queries);
        Ok(self.partition.select(step, fixed, probes, share)?.into())
    }

    fn partition(&self) -> &Partition {
        &self.partition
    }
}

impl Predictor for Saap {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, k: &[usize]) -> Result<Choice> {
        self.probe(step, (sink, window), Probes::Keys(k))
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![&self.partition]
    }
}
