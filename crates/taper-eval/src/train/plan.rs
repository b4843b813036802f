//! What to train, checked against the model and the text.

use super::corpus::Corpus;
use super::defaults::{DOUBLE_SPARSITY, Defaults, HASH_ATTENTION, KMEANS, MINFERENCE, Net, SAAP, SAMPLE_ATTENTION};
use super::error::TrainError;
use super::head::Far;
use super::net::Schedule;
use taper_attention::AttentionShape;

/// A method that has something to learn, with what can be set of it. `None` is the [default](super::default_of).
#[derive(Debug, Clone, PartialEq)]
pub enum Method {
    /// The channels by which keys are ranked.
    DoubleSparsity {
        /// Channels of a KV head.
        channels: Option<usize>,
    },
    /// Clusters of keys.
    KMeans {
        /// Whether keys are clustered after the rotary embedding.
        rope: bool,
        /// Clusters of a KV head.
        clusters: Option<usize>,
    },
    /// Clusters of keys, and a classifier of queries.
    Saap {
        /// As of k-means.
        clusters: Option<usize>,
        /// The classifier.
        network: Network,
    },
    /// Maps from queries and keys to codes.
    HashAttention {
        /// The maps.
        network: Network,
    },
    /// A pattern for every query head of prompts.
    MInference {
        /// Keys that a row reads on average, whatever the pattern.
        keys: Option<usize>,
    },
    /// Thresholds of the share of columns and diagonals that prompts read, by their length.
    SampleAttention {
        /// Mean share of the attention mass that prompts' rows keep, above 0, up to 1.
        cra: f64,
    },
}

impl Method {
    /// Whether it attends for prompts, whose rows have neither sinks nor a window apart.
    pub(super) fn is_prefill(&self) -> bool {
        self.defaults().near.is_none()
    }

    fn defaults(&self) -> Defaults {
        match self {
            Self::DoubleSparsity { .. } => DOUBLE_SPARSITY,
            Self::KMeans { .. } => KMEANS,
            Self::Saap { .. } => SAAP,
            Self::HashAttention { .. } => HASH_ATTENTION,
            Self::MInference { .. } => MINFERENCE,
            Self::SampleAttention { .. } => SAMPLE_ATTENTION,
        }
    }
}

/// Size and training of a network. `None` is the method's default.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Network {
    /// Width of the hidden layers.
    pub hidden: Option<usize>,
    /// Steps of training.
    pub iterations: Option<usize>,
    /// Queries, or rows, of a step.
    pub batch: Option<usize>,
    /// Learning rate at the start.
    pub learning_rate: Option<f64>,
}

impl Network {
    /// Width and training of it, what is not given as by default.
    fn check(&self, usual: Net, head_dim: usize) -> Result<(usize, Schedule), TrainError> {
        let hidden = within("hidden", self.hidden.unwrap_or(usual.hidden(head_dim)), 1, HIDDEN_MAX)?;
        let learning_rate = self.learning_rate.unwrap_or(usual.learning_rate);
        if !(learning_rate > 0.0 && learning_rate <= 1.0) {
            let message = format!("{learning_rate} is not valid; valid are numbers above 0, up to 1");
            return Err(TrainError::option("learning-rate", message));
        }
        let schedule = Schedule {
            iterations: within("iterations", self.iterations.unwrap_or(usual.iterations), 1, 1 << 30)?,
            batch: within("batch", self.batch.unwrap_or(usual.batch), 2, 1 << 20)?,
            learning_rate,
        };
        Ok((hidden, schedule))
    }
}

/// What to train.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The method.
    pub method: Method,
    /// Layers; `None` is all.
    pub layers: Option<Vec<usize>>,
    /// Most rows of a sequence whose queries are kept, drawn at random; of prefill methods whole query blocks of 64, evenly
    /// apart.
    pub queries: usize,
    /// Of decode methods: tokens at the start that count as sinks: read whatever is learned.
    pub sink: Option<usize>,
    /// Of decode methods: most recent tokens, read whatever is learned; unless given at most half of the model's own window.
    pub window: Option<usize>,
    /// Seed of all draws.
    pub seed: u64,
    /// Bytes that the captured queries and keys may take; at least one layer is captured at a time.
    pub memory_bytes: u64,
    /// Whether finished layers of a file that is there are kept.
    pub resume: bool,
}

/// A plan with every default filled in.
#[derive(Debug, Clone)]
pub(super) struct Checked {
    /// The name of the method, which is that of the file.
    pub name: &'static str,
    pub layers: Vec<usize>,
    pub far: Far,
    /// Channels, clusters or keys.
    pub count: usize,
    /// Share of the attention mass to be kept.
    pub cra: f64,
    pub hidden: usize,
    pub schedule: Schedule,
    /// All options in words, by which runs are told apart.
    pub options: String,
}

/// Limits of what an option may be.
const HIDDEN_MAX: usize = 1 << 16;

fn within(option: &'static str, value: usize, least: usize, most: usize) -> Result<usize, TrainError> {
    let message = || format!("{value} is not valid; valid are {least} to {most}");
    if (least..=most).contains(&value) { Ok(value) } else { Err(TrainError::option(option, message())) }
}

impl Plan {
    pub(super) fn check(&self, shape: &AttentionShape, corpus: &Corpus) -> Result<Checked, TrainError> {
        let length = corpus.length();
        within("queries", self.queries, 1, usize::MAX)?;
        let layers = self.layers(shape)?;
        let far = self.far(shape, length)?;

        let training = (0..corpus.sequences().len()).filter(|&i| !corpus.held_out(i));
        let keys: usize = training.map(|i| corpus.sequences()[i].len()).sum();
        let defaults = self.method.defaults();
        let count = |option, wanted: Option<usize>, most| {
            within(option, wanted.unwrap_or(defaults.count(shape, length, keys)), 1, most)
        };
        let (name, count, network) = match &self.method {
            Method::DoubleSparsity { channels } => {
                let channels = count("channels", *channels, shape.head_dim)?;
                if layers.len() != shape.layers {
                    return Err(TrainError::option(
                        "layers",
                        "double_sparsity takes all layers: its file has no other form",
                    ));
                }
                ("double_sparsity", channels, Network::default())
            }
            Method::KMeans { rope, clusters } => {
                let name = if *rope { "kmeans-rope" } else { "kmeans" };
                (name, count("clusters", *clusters, keys.min(1 << 16))?, Network::default())
            }
            Method::Saap { clusters, network } => ("saap", count("clusters", *clusters, keys.min(1 << 16))?, *network),
            Method::HashAttention { network } => ("hash_attention", 0, *network),
            Method::MInference { keys } => ("minference", count("keys", *keys, length)?, Network::default()),
            Method::SampleAttention { .. } => ("sample_attention", 0, Network::default()),
        };
        let cra = match self.method {
            Method::SampleAttention { cra } if cra > 0.0 && cra <= 1.0 => cra,
            Method::SampleAttention { cra } => {
                let message = format!("{cra} is not valid; valid are numbers above 0, up to 1");
                return Err(TrainError::option("cra", message));
            }
            _ => 1.0,
        };
        let (hidden, schedule) = match defaults.network {
            Some(net) => network.check(net, shape.head_dim)?,
            None => Default::default(),
        };
        let mut options = format!("length {length}, queries {}", self.queries);
        if !self.method.is_prefill() {
            options += &format!(", sink {}, window {}", far.sink, far.window);
        }
        options += &match &self.method {
            Method::MInference { .. } => format!(", keys {count}"),
            Method::SampleAttention { cra } => format!(", cra {cra}, layers {layers:?}"),
            Method::DoubleSparsity { .. } => format!(", channels {count}"),
            Method::KMeans { .. } => format!(", clusters {count}"),
            Method::Saap { .. } | Method::HashAttention { .. } => {
                let Schedule { iterations, batch, learning_rate } = schedule;
                let clusters = if count > 0 { format!(", clusters {count}") } else { String::new() };
                format!(
                    "{clusters}, hidden {hidden}, iterations {iterations}, batch {batch}, learning rate {learning_rate}"
                )
            }
        };
        Ok(Checked { name, layers, far, count, cra, hidden, schedule, options })
    }

    /// Keys that are read whatever is learned: of prompts none apart, else such that there is a key between.
    fn far(&self, shape: &AttentionShape, length: usize) -> Result<Far, TrainError> {
        let Some((sink, window)) = self.method.defaults().near else {
            for (option, given) in [("sink", self.sink), ("window", self.window)] {
                if given.is_some() {
                    return Err(TrainError::option(option, "is of decode methods; this one attends for prompts"));
                }
            }
            return Ok(Far { sink: 0, window: 0, visible: shape.window });
        };
        let visible = length.min(shape.window.unwrap_or(length));
        let Some(most) = visible.checked_sub(2) else {
            return Err(TrainError::option("length", format!("{length} is not valid; it must be at least 2")));
        };
        let sink = within("sink", self.sink.unwrap_or(sink.of(length).min(most)), 0, most)?;
        // What is not given fits what is.
        let usual = window.of(length).min(visible / 2).clamp(1, most + 1 - sink);
        let window = within("window", self.window.unwrap_or(usual), 1, most + 1 - sink)?;
        Ok(Far { sink, window, visible: shape.window })
    }

    fn layers(&self, shape: &AttentionShape) -> Result<Vec<usize>, TrainError> {
        let mut layers = self.layers.clone().unwrap_or_else(|| (0..shape.layers).collect());
        layers.sort_unstable();
        layers.dedup();
        match layers.iter().find(|&&layer| layer >= shape.layers) {
            Some(layer) => {
                let message = format!("the model has no layer {layer}; valid are 0 to {}", shape.layers - 1);
                Err(TrainError::option("layers", message))
            }
            None if layers.is_empty() => Err(TrainError::option("layers", "names no layer")),
            None => Ok(layers),
        }
    }
}
