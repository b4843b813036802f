//! The command line of `taper train`.

use crate::args::{Layers, hidden, layers, positive, seed, share, whole};
use crate::settings::ModelArgs;
use clap::{Arg, Args, Subcommand};
use std::path::PathBuf;
use taper_eval::train::default_of;

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
    #[command(name = "double_sparsity", mut_args(|arg| with_default(arg, "double_sparsity")))]
    DoubleSparsity {
        /// Channels of a KV head
        #[arg(long, value_name = "N", value_parser = whole)]
        channels: Option<usize>,
        #[command(flatten)]
        near: NearArgs,
        #[command(flatten, next_help_heading = COMMON)]
        common: TrainCommon,
    },
    /// Clusters of keys
    #[command(name = "kmeans", mut_args(|arg| with_default(arg, "kmeans")))]
    KMeans {
        /// Cluster keys after the rotary embedding
        #[arg(long)]
        rope: bool,
        /// Clusters of a KV head
        #[arg(long, value_name = "N", value_parser = whole)]
        clusters: Option<usize>,
        #[command(flatten)]
        near: NearArgs,
        #[command(flatten, next_help_heading = COMMON)]
        common: TrainCommon,
    },
    /// SAAP's clusters of keys and its classifier of queries
    #[command(name = "saap", mut_args(|arg| with_default(arg, "saap")))]
    Saap {
        /// Clusters of a KV head
        #[arg(long, value_name = "N", value_parser = whole)]
        clusters: Option<usize>,
        #[command(flatten)]
        network: NetworkArgs,
        #[command(flatten)]
        near: NearArgs,
        #[command(flatten, next_help_heading = COMMON)]
        common: TrainCommon,
    },
    /// HashAttention's maps from queries and keys to codes
    #[command(name = "hash_attention", mut_args(|arg| with_default(arg, "hash_attention")))]
    HashAttention {
        #[command(flatten)]
        network: NetworkArgs,
        #[command(flatten)]
        near: NearArgs,
        #[command(flatten, next_help_heading = COMMON)]
        common: TrainCommon,
    },
    /// A pattern of MInference for every query head
    #[command(name = "minference", mut_args(|arg| with_default(arg, "minference")))]
    MInference {
        /// Keys that a row reads on average, whatever the pattern
        #[arg(long, value_name = "N", value_parser = whole)]
        keys: Option<usize>,
        #[command(flatten, next_help_heading = COMMON)]
        common: TrainCommon,
    },
    /// SampleAttention's thresholds, for prompts of --length and of each half of it
    #[command(name = "sample_attention")]
    SampleAttention {
        /// Share of the attention mass that rows keep on average
        #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = share::<f64>)]
        cra: f64,
        #[command(flatten, next_help_heading = COMMON)]
        common: TrainCommon,
    },
}

/// What stands above the options of all methods in a method's help.
const COMMON: &str = "Options of all methods";

/// Says what a method takes where an option is not given.
fn with_default(arg: Arg, method: &str) -> Arg {
    let Some(default) = default_of(method, arg.get_id().as_str()) else { return arg };
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    arg.help(format!("{help} [default: {default}]"))
}

#[derive(Debug, Args)]
#[command(mut_args(|arg| hidden(arg, &UNUSED)))]
pub struct TrainCommon {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to learn from: a file, or a folder of .txt and .md files, without linked folders outside it; may be repeated [default: generated prose]
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
    /// Most queries of a sequence and head; of methods for prompts in whole blocks of 64
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = positive)]
    pub queries: usize,
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

/// What decode methods read whatever is learned.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct NearArgs {
    /// Tokens at the start that are read whatever is learned
    #[arg(long, value_name = "TOKENS", value_parser = whole)]
    pub sink: Option<usize>,
    /// Recent tokens that are read whatever is learned
    #[arg(long, value_name = "TOKENS", value_parser = whole)]
    pub window: Option<usize>,
}

#[derive(Debug, Clone, Args)]
pub struct NetworkArgs {
    /// Width of hidden layers
    #[arg(long, value_name = "N", value_parser = whole)]
    pub hidden: Option<usize>,
    /// Steps of training
    #[arg(long, value_name = "N", value_parser = whole)]
    pub iterations: Option<usize>,
    /// What a step of training learns from
    #[arg(long, value_name = "N", value_parser = whole)]
    pub batch: Option<usize>,
    /// Learning rate at the start
    #[arg(long, value_name = "RATE", value_parser = share::<f64>)]
    pub learning_rate: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::CommandFactory;

    #[test]
    fn a_methods_help_has_its_own_options_and_defaults_and_nothing_of_others() {
        let mut cli = Cli::command();
        let train = cli.find_subcommand_mut("train").unwrap();
        let methods: Vec<String> = train.get_subcommands().map(|method| method.get_name().to_owned()).collect();
        for (own, line) in [
            ("double_sparsity", "--sink <TOKENS> Tokens at the start that are read whatever is learned [default: 4,"),
            ("kmeans", "--window <TOKENS> Recent tokens that are read whatever is learned [default: 2047,"),
            ("saap", "--batch <N> What a step of training learns from [default: 1000 queries]"),
            ("hash_attention", "--hidden <N> Width of hidden layers [default: 128]"),
            ("minference", "--keys <N> Keys that a row reads on average"),
            ("sample_attention", "--cra <SHARE> Share of the attention mass that rows keep on average [default: 0.95]"),
        ] {
            let help = train.find_subcommand_mut(own).unwrap().render_help().to_string();
            let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
            let (head, common) = words.split_once(COMMON).unwrap();
            assert!(head.contains(line) && common.contains("--out <DIR>"), "{help}");
            // Every number of a method's own says what it is by default.
            let numbers = [
                "sink",
                "window",
                "hidden",
                "iterations",
                "batch",
                "learning_rate",
                "channels",
                "clusters",
                "keys",
                "cra",
            ];
            let options = train.find_subcommand(own).unwrap().get_arguments();
            for option in options.filter(|option| numbers.contains(&option.get_id().as_str())) {
                let help = option.get_help().map(ToString::to_string).unwrap_or_default();
                assert!(
                    help.contains("[default: ") || !option.get_default_values().is_empty(),
                    "{own}: {option}: {help}"
                );
            }
            let prefill = ["minference", "sample_attention"].contains(&own);
            assert_eq!(head.contains("--sink"), !prefill, "{help}");
            for other in methods.iter().filter(|other| *other != own) {
                assert!(!help.contains(other.as_str()), "{own} tells of {other}: {help}");
            }
        }
    }
}
