//! The command line.

use crate::args::{count, positive, seed};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Prompts are drawn from common English words, one token each for most tokenizers; lengths are in such words. Rates use the
token counts that the server states where it states any. TTFT is from sending a request to its first text, ITL the time
between texts, TPOT (end - first text) / (tokens - 1); calls of functions and what a model thinks count as text. Lengths of A:B are equally likely; those of MEDIAN~SPREAD are
log-normal, where SPREAD is the deviation of the logarithm: of 500~1, one in six is over 1,359 and one in 44 over 3,694.

Examples:
  taper bench serve --url http://127.0.0.1:8080/v1 --clients 8 --requests 32 --prompt 512 --output 64
  taper bench serve --url http://127.0.0.1:8080/v1 --rate 2.5 --requests 200 --prompt 500~1 --output 16:256 \\
      --shared-prefix 64 --cancel 0.1 --goodput ttft=2000,tpot=100 --json load.json --plot load.svg"
)]
pub struct BenchServeArgs {
    /// The server's base, with its version; an address alone gets /v1
    #[arg(long, default_value = "http://127.0.0.1:8080/v1")]
    pub url: String,
    /// The model to ask for [default: the first that the server lists]
    #[arg(long)]
    pub model: Option<String>,
    /// Chat or plain completions
    #[arg(long, value_enum, default_value_t = Endpoint::Chat)]
    pub endpoint: Endpoint,
    /// Requests in all
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = positive)]
    pub requests: usize,
    /// Closed loop: so many clients, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = positive, conflicts_with = "rate")]
    pub clients: usize,
    /// Open loop: requests a second on average, at random times
    #[arg(long, value_name = "RATE")]
    pub rate: Option<f64>,
    /// Words of a prompt: a number, a range of them, A:B, or a long tail about a median, MEDIAN~SPREAD
    #[arg(long, value_name = "WORDS", default_value = "512")]
    pub prompt: String,
    /// Most tokens of an answer, in the same ways
    #[arg(long, value_name = "TOKENS", default_value = "64")]
    pub output: String,
    /// So many words at every prompt's beginning are the same
    #[arg(long, value_name = "WORDS", default_value_t = 0, value_parser = count)]
    pub shared_prefix: usize,
    /// A share of the clients leaves in the middle of the answer; the times have none of theirs
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub cancel: f64,
    /// Requests before the load, which are not counted
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count)]
    pub warm_up: usize,
    /// Fields for every request's body, such as '{"ignore_eos": true, "epsilon": 0.1}'
    #[arg(long, value_name = "JSON", default_value = "{}")]
    pub extra: String,
    /// Milliseconds that a good request stays under: any of ttft, itl, tpot, e2e, as ttft=2000,tpot=100
    #[arg(long, value_name = "TARGET")]
    pub goodput: Option<String>,
    /// The environment variable that holds the server's key
    #[arg(long, value_name = "NAME", default_value = "OPENAI_API_KEY")]
    pub key_env: String,
    /// Seconds that a request may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    pub timeout: u32,
    /// Seed of prompts, lengths and times
    #[arg(long, default_value_t = 0, value_parser = seed)]
    pub seed: u64,
    /// Where figures and every request go, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Where the plot goes, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// /chat/completions
    Chat,
    /// /completions
    Completions,
}
