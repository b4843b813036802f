//! Reading whole clusters: the decode method that SAAP and k-means share, whichever way they rank clusters.

use crate::method::{Choice, DecodeMethod, DecodeStep, HostOnly, KeyIndex, Predictor};
use crate::partition::Partition;
use candle_core::Result;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
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
pub(crate) trait Prober: Predictor {
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

impl<P: Prober> DecodeMethod for Probing<P> {
    fn select(&self, step: &DecodeStep) -> Result<Choice> {
        let Params { probes, sink, window, max_selectivity, .. } = self.params;
        let all = self.prober.partition().layer(step.layer).and_then(|heads| heads.iter().map(|h| h.clusters()).max());
        if all.is_none_or(|all| probes >= all && max_selectivity >= 1.0) {
            return Ok(step.dense());
        }
        let most = |visible: usize| (max_selectivity * visible as f64) as usize;
        step.by_share(
            |row| most(row.visible.len()),
            |step, most| self.prober.probe(step, (sink, window), Probes::Clusters(probes, most)),
        )
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.prober.indices()
    }

    fn dense_layers(&self) -> usize {
        self.params.dense_layers
    }

    fn host_only(&self) -> Option<HostOnly> {
        self.prober.host_only()
    }
}
