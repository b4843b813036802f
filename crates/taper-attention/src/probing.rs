//! Reading whole clusters: the decode method and the predictor that SAAP and k-means share, whichever way they rank clusters.

use crate::method::{Choice, DecodeMethod, DecodeStep, KeyIndex, Most, Predictor};
use crate::partition::Partition;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use taper_kernels::decode::DecodeRow;
use taper_kernels::index::clusters::Probes;

/// How many clusters are read, and what is read whatever they are.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct Params {
    /// Clusters that are read; as many as there are is dense.
    #[schemars(range(min = 0, max = 65_536))]
    probes: usize,
    /// Tokens at the start of the sequence, always read.
    #[schemars(range(min = 0, max = 1_048_576))]
    sink: usize,
    /// Most recent tokens, always read, the query's own included.
    #[schemars(range(min = 1, max = 1_048_576))]
    window: usize,
    /// Fewer clusters are read where they would hold more than this share of the context: 1 for no cap.
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

/// What ranks clusters and reads them.
pub(crate) trait Prober: std::fmt::Debug + Send + Sync {
    /// Reads sinks, window, and the clusters it prefers.
    fn probe(&self, step: &DecodeStep, fixed: (usize, usize), probes: Probes) -> Result<Choice>;

    /// The clusters.
    fn partition(&self) -> &Partition;
}

/// The decode method of a [`Prober`].
#[derive(Debug)]
pub(crate) struct Probing<P> {
    params: Params,
    prober: Arc<P>,
}

impl<P: Prober> Probing<P> {
    pub fn new(params: &Params, prober: Arc<P>) -> Self {
        Self { params: params.clone(), prober }
    }
}

/// Reads so many of the clusters that a prober prefers, fewer where they would hold more than a share of the context.
fn probe(
    prober: &impl Prober,
    step: &DecodeStep,
    fixed: (usize, usize),
    (probes, max_selectivity): (usize, f64),
) -> Result<Choice> {
    if prober.partition().clusters(step.layer).is_none_or(|all| probes >= all && max_selectivity >= 1.0) {
        return Ok(step.dense());
    }
    step.by_share(cap(max_selectivity), |step, most| prober.probe(step, fixed, Probes::Clusters(probes, *most)))
}

/// The most keys that the clusters which a row reads hold between them.
fn cap(max_selectivity: f64) -> impl Fn(&DecodeRow) -> usize {
    move |row| match max_selectivity {
        ..1.0 => (max_selectivity * row.visible.len() as f64) as usize,
        _ => usize::MAX,
    }
}

impl<P: Prober> DecodeMethod for Probing<P> {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let Params { probes, sink, window, max_selectivity, .. } = self.params;
        probe(&*self.prober, step, (sink, window), (probes, max_selectivity))
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![self.prober.partition()]
    }

    fn dense_layers(&self) -> usize {
        self.params.dense_layers
    }

    fn host_only(&self) -> Option<String> {
        self.prober.partition().host_only()
    }
}

/// How many clusters a predictor chooses.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct Predicted {
    /// Clusters that are chosen, in place of as many keys as are asked for (`top_k`), which then is ignored; 0 to go by the keys.
    #[schemars(range(min = 0, max = 65_536))]
    probes: usize,
    /// Fewer clusters are chosen where they would hold more than this share of the context: 1 for no cap. Ignored where `probes`
    /// is 0.
    #[schemars(range(min = 0, max = 1))]
    max_selectivity: f64,
}

impl Default for Predicted {
    fn default() -> Self {
        Self { probes: 0, max_selectivity: 1.0 }
    }
}

/// The predictor of a [`Prober`].
#[derive(Debug)]
pub(crate) struct Predicting<P> {
    params: Predicted,
    prober: Arc<P>,
}

impl<P: Prober> Predicting<P> {
    pub fn new(params: &Predicted, prober: Arc<P>) -> Self {
        Self { params: params.clone(), prober }
    }
}

impl<P: Prober> Predictor for Predicting<P> {
    fn select(&self, step: &DecodeStep, sink: usize, window: usize, most: Most) -> Result<Choice> {
        match self.params {
            Predicted { probes: 0, .. } => self.prober.probe(step, (sink, window), Probes::Keys(most.keys)),
            Predicted { probes, max_selectivity } => {
                probe(&*self.prober, step, (sink, window), (probes, max_selectivity))
            }
        }
    }

    fn cap(&self, row: &DecodeRow) -> usize {
        if self.params.probes > 0 { cap(self.params.max_selectivity)(row) } else { usize::MAX }
    }

    fn expected(&self, step: &DecodeStep, k: Vec<usize>) -> Vec<usize> {
        let Predicted { probes, max_selectivity } = self.params;
        match self.prober.partition().clusters(step.layer) {
            // Clusters hold about as many keys each.
            Some(all) if probes > 0 => {
                let share = max_selectivity.min(probes as f64 / all as f64);
                step.per_head(|row| (share * row.visible.len() as f64) as usize)
            }
            _ => k,
        }
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        vec![self.prober.partition()]
    }

    fn host_only(&self) -> Option<String> {
        self.prober.partition().host_only()
    }
}
