//! The command line of `taper train`.

use crate::args::{Layers, hidden, layers, positive, seed, share, whole};
use crate::settings::ModelArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Settings of a model that training has no use for.
pub(crate) const UNUSED: [&str; 8] =
    ["attention", "presets", "artifacts", "chat_template", "kv_memory", "kv_offload", "kv_offload_dir", "kv_dtype"];

#[derive(Debug, Args)]
pub struct TrainArgs {
    #[command(subcommand)]
    pub what: Train,
}

#[derive(Debug, Subcommand)]
#[command(after_help = "The model runs densely over text; every eighth sequence is held out, and a table says how much
of its attention mass the keys that the method would read hold (of decode methods: of that on far keys). Without --text the text is generated prose, which
has little to say about the model's use. Ctrl-C ends the run; finished layers are in the file, and --resume keeps them.

Examples:
  taper train saap --text book.txt --out artefacts --layers 1-29
  taper train kmeans --rope --out artefacts --clusters 512
  taper train double_sparsity --text texts/ --out artefacts
  taper train sample_attention --text texts/ --out artefacts --length 8192 --queries 512 --cra 0.97
  taper serve --artifacts artefacts --attention '{\"decode\": {\"method\": \"saap\"}}'")]
pub enum Train {
    /// The channels by which Double Sparsity ranks keys
    #[command(name = "double_sparsity")]
    DoubleSparsity {
        #[command(flatten)]
        common: TrainCommon,
        /// Channels of a KV head [default: a quarter of its width]
        #[arg(long, value_name = "N", value_parser = whole)]
        channels: Option<usize>,
    },
    /// Clusters of keys
    #[command(name = "kmeans")]
    KMeans {
        #[command(flatten)]
        common: TrainCommon,
        /// Cluster keys after the rotary embedding
        #[arg(long)]
        rope: bool,
        /// Clusters of a KV head [default: four times the root of --length, as a power of two]
        #[arg(long, value_name = "N", value_parser = whole)]
        clusters: Option<usize>,
    },
    /// SAAP's clusters of keys and its classifier of queries
    #[command(name = "saap")]
    Saap {
        #[command(flatten)]
        common: TrainCommon,
        /// Clusters of a KV head [default: four times the root of --length, as a power of two]
        #[arg(long, value_name = "N", value_parser = whole)]
        clusters: Option<usize>,
        #[command(flatten)]
        network: NetworkArgs,
    },
    /// HashAttention's maps from queries and keys to codes
    #[command(name = "hash_attention")]
    HashAttention {
        #[command(flatten)]
        common: TrainCommon,
        #[command(flatten)]
        network: NetworkArgs,
    },
    /// A pattern of MInference for every query head
    #[command(name = "minference")]
    MInference {
        #[command(flatten)]
        common: TrainCommon,
        /// Keys that a row reads on average, whatever the pattern [default: an eighth of --length, at least 512]
        #[arg(long, value_name = "N", value_parser = whole)]
        keys: Option<usize>,
    },
    /// SampleAttention's thresholds, for prompts of --length and of each half of it
    #[command(name = "sample_attention")]
    SampleAttention {
        #[command(flatten)]
        common: TrainCommon,
        /// Share of the attention mass that rows keep on average
        #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = share::<f64>)]
        cra: f64,
    },
}

#[derive(Debug, Args)]
#[command(mut_args(|arg| hidden(arg, &UNUSED)))]
pub struct TrainCommon {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to learn from: a file, or a folder of .txt and .md files; may be repeated [default: generated prose]
    #[arg(long, value_name = "FILE|FOLDER")]
    pub text: Vec<PathBuf>,
    /// Folder that the artefact is written to
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Layers, such as 3,7-9 [default: all]
    #[arg(long, value_name = "LAYERS", value_parser = layers)]
    pub layers: Option<Layers>,
    /// Tokens of a sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = positive)]
    pub length: usize,
    /// Most sequences
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = positive)]
    pub sequences: usize,
    /// Most queries of a sequence and head; of minference and sample_attention in whole blocks of 64
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = positive)]
    pub queries: usize,
    /// Decode methods: tokens at the start that are read whatever is learned [default: 1 of kmeans and saap; 4; 128 of
    /// hash_attention]
    #[arg(long, value_name = "TOKENS", value_parser = whole)]
    pub sink: Option<usize>,
    /// Decode methods: recent tokens that are read whatever is learned [default: 2047 of kmeans and saap, at most a
    /// quarter of --length; 64 and 128, at most a sixteenth]
    #[arg(long, value_name = "TOKENS", value_parser = whole)]
    pub window: Option<usize>,
    /// Seed of generated text, clusters and networks
    #[arg(long, default_value_t = 1, value_parser = seed)]
    pub seed: u64,
    /// Memory for captured queries and keys; the more, the fewer passes over the text
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub memory: String,
    /// Keep the finished layers of the file that is there
    #[arg(long)]
    pub resume: bool,
    /// Write the table of what was measured
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
pub struct NetworkArgs {
    /// Width of hidden layers [default: four times a head's of saap, 128 of hash_attention]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub hidden: Option<usize>,
    /// Steps of training [default: 1000 of saap, 1500 of hash_attention]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub iterations: Option<usize>,
    /// Queries of a step of saap [default: 1000], rows of one of hash_attention [default: 64]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub batch: Option<usize>,
    /// Learning rate at the start [default: 1e-3]
    #[arg(long, value_name = "RATE", value_parser = share::<f64>)]
    pub learning_rate: Option<f64>,
}
