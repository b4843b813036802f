//! `taper bench model`: how long a model's steps take, with random weights made on the spot.

use crate::args::positive;
use crate::{config, eval, load};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::PathBuf;
use taper_attention::{Artifacts, Sizes};
use taper_engine::{DeviceChoice, runs_on_cuda};
use taper_eval::{DType, EvalError, Phase, StepPlan, StepRow, step_caption, step_table, steps};
use taper_model::{Model, ModelConfig};

/// Which shape, and which steps.
#[derive(Debug, Args)]
#[command(
    after_help = "A step is timed from token ids to logits in host memory; its cache is filled with random rows, and what methods learn is random too.
The floor is the bytes of the weights, and of the keys and values that were read, over the bandwidth.

Examples:
  taper bench model --shape smollm2-135m --random --context 2048 --bandwidth 0.04
  taper bench model --shape llama-3.1-8b --random --device cuda --context 2048,32768,131072 --decode vattention
  taper bench model --shape llama-3.1-8b --random --device cuda --context 131072 --offloaded 0.95 --decode vattention"
)]
pub struct BenchModelArgs {
    /// The shape: llama-3.1-8b, mistral-7b or smollm2-135m
    #[arg(long, value_name = "NAME")]
    pub shape: String,
    /// Random weights, as a shape has no others, said or not
    #[arg(long)]
    pub random: bool,
    /// What computes: cpu, cuda or cuda:N, of a build with that feature [default: cuda where there is one, else cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Type of the weights: f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub dtype: String,
    /// Type of cached keys and values: f32, f16 or bf16
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub kv_dtype: String,
    /// Tokens of the contexts
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "2048", value_parser = positive)]
    pub context: Vec<usize>,
    /// Sequences of a step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub batch: u16,
    /// How generated tokens are attended, besides densely; may be repeated
    #[arg(long, value_name = "NAME|JSON")]
    pub decode: Vec<String>,
    /// Time a prompt of each context as well, attended like this; may be repeated
    #[arg(long, value_name = "NAME|JSON")]
    pub prefill: Vec<String>,
    /// Most prompt tokens of a step
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, value_parser = positive)]
    pub chunk: usize,
    /// Steps timed
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = positive)]
    pub tokens: usize,
    /// Tokens of each sequence in a step, which are let go after it, as where drafts are checked
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub rows: u16,
    /// End a step with the likeliest tokens, found on the device, instead of the logits in host memory; the next step is begun
    /// by them, as the server does
    #[arg(long)]
    pub greedy: bool,
    /// What the device's memory moves, in TB/s, for the floor [default: 4.27 with cuda; on the CPU none, and no floor]
    #[arg(long, value_name = "TB/S", value_parser = above_zero)]
    pub bandwidth: Option<f64>,
    /// The share of the cache that lies in pinned host memory beside a CUDA device
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub offloaded: f64,
    /// What the device reads of the host's memory, in GB/s, for the floor
    #[arg(long, value_name = "GB/S", default_value_t = 51.3, value_parser = above_zero)]
    pub bus: f64,
    /// Write the table
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

/// A rate of the command line.
fn above_zero(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|&rate| rate > 0.0).ok_or_else(|| "must be a number above 0".into())
}

/// What an H200's memory moves, in TB/s, as measured.
const BANDWIDTH: f64 = 4.27;

/// Times and prints the table.
///
/// # Errors
/// The argument at fault, or a device that cannot hold the model.
pub fn run(args: &BenchModelArgs) -> Result<()> {
    eval::writable("markdown", args.markdown.as_deref())?;
    let Some(mut shape) = ModelConfig::of_shape(&args.shape) else {
        bail!("--shape: {:?} is none of {}", args.shape, ModelConfig::SHAPES.join(", "));
    };
    let device = args.device.as_deref().map_or_else(|| Ok(DeviceChoice::found()), config::device)?;
    if !(0.0..=1.0).contains(&args.offloaded) || args.offloaded > 0.0 && device == DeviceChoice::Cpu {
        bail!("--offloaded: {} must be a share from 0 to 1, and 0 on the CPU", args.offloaded);
    }
    let (weights, cache) = (float("--dtype", &args.dtype)?, float("--kv-dtype", &args.kv_dtype)?);
    if device != DeviceChoice::Cpu {
        runs_on_cuda(&shape.attention_shape(), cache)?;
    }
    // Weights are random: nothing forbids positions past the context that the shape was trained for.
    let longest = args.context.iter().max().copied().unwrap_or(0) + args.tokens.max(args.rows.into()) + 64;
    shape.context_length = shape.context_length.max(longest);
    let methods = |artifacts: &Artifacts| -> Result<_> {
        let decodes = eval::methods(Phase::Decode, &args.decode, artifacts)?;
        Ok((decodes, eval::methods(Phase::Prefill, &args.prefill, artifacts)?))
    };
    let place = load::place(device);
    let mut artifacts = Artifacts::default().at(place);
    let lacks = |error: anyhow::Error| matches!(error.downcast_ref(), Some(EvalError::Artefact { .. }));
    if methods(&artifacts).is_err_and(lacks) {
        // What is learned is as random as the model.
        let attention = shape.attention_shape();
        let random = Artifacts::random(attention, Sizes::usual(&attention, longest)).context("random artefacts")?;
        artifacts = random.at(place);
    }
    let (decodes, prefills) = methods(&artifacts)?;
    // What a GPU's memory moves says nothing of another.
    let no_floor = args.bandwidth.is_none() && device == DeviceChoice::Cpu;
    let plan = StepPlan {
        contexts: args.context.clone(),
        batch: args.batch.into(),
        decodes,
        prefills,
        chunk_tokens: args.chunk,
        tokens: args.tokens,
        rows: args.rows.into(),
        greedy: args.greedy,
        weights,
        cache,
        bandwidth: args.bandwidth.unwrap_or(BANDWIDTH) * 1e12,
        offloaded: args.offloaded,
        bus: args.bus * 1e9,
        artifacts,
    };
    let model = Model::random(&shape, weights, &device.open()?).context("random weights")?;
    let mut rows = steps(&model, &plan)?;
    let mut caption = step_caption(&model, &plan);
    if no_floor {
        caption += without_floor(&mut rows);
    }
    eval::show(args.markdown.as_deref(), |style| format!("{caption}\n\n{}", step_table(&rows, style)))
}

/// Takes the floors out; what the caption says of it.
fn without_floor(rows: &mut [StepRow]) -> &'static str {
    rows.iter_mut().for_each(|row| row.floor = None);
    "; no floor, since --bandwidth does not say what the memory moves"
}

fn float(option: &str, name: &str) -> Result<DType> {
    Ok(match name {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        other => bail!("{option}: {other:?} must be f32, f16 or bf16"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use taper_eval::Style;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: BenchModelArgs,
    }

    fn args(line: &str) -> std::result::Result<BenchModelArgs, String> {
        let line = Line::try_parse_from(["model", "--shape", "smollm2-135m"].into_iter().chain(line.split(' ')));
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn a_floor_that_is_not_known_is_left_out() {
        let row = StepRow {
            phase: Phase::Decode,
            context: 64,
            method: "dense".into(),
            density: 1.0,
            seconds: 0.01,
            tokens: 1,
            queued: None,
            floor: Some(0.004),
        };
        assert!(step_table(std::slice::from_ref(&row), Style::Text).contains("4.000 ms"));
        let mut rows = [row];
        assert!(without_floor(&mut rows).contains("--bandwidth"));
        let table = step_table(&rows, Style::Text);
        assert!(table.contains("10.000 ms") && !table.contains("4.000 ms"), "{table}");
    }

    #[test]
    fn rates_and_counts_are_above_0() {
        assert!(args("--random --bandwidth=0.5 --bus=40 --context=1,2 --chunk=1 --tokens=1").is_ok());
        for (flag, values) in
            [("bandwidth", "0 -1 NaN fast"), ("bus", "0"), ("context", "0 64,0"), ("chunk", "0"), ("tokens", "0")]
        {
            for value in values.split(' ') {
                let error = args(&format!("--{flag}={value}")).unwrap_err();
                assert!(error.contains(&format!("'--{flag} <")) && error.contains("must be a "), "{error}");
            }
        }
    }
}
