//! `taper train`: what attention methods learn offline.

mod args;

pub(crate) use args::UNUSED;
pub use args::{Train, TrainArgs};

use crate::{config, eval, interrupt, load};
use anyhow::{Context, Result};
use args::{NearArgs, NetworkArgs};
use indicatif::{ProgressBar, ProgressStyle};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use taper_eval::train::{Corpus, CorpusSize, Method, Network, Plan, Progress, TrainError, table, train};

/// Trains and prints what held-out text says of it.
///
/// # Errors
/// The argument or file at fault, or a step that failed; layers finished by then are in the artefact.
pub fn run(what: Train) -> Result<()> {
    let none = NearArgs::default();
    let (method, near, common) = match what {
        Train::DoubleSparsity { channels, near, common } => (Method::DoubleSparsity { channels }, near, common),
        Train::KMeans { rope, clusters, near, common } => (Method::KMeans { rope, clusters }, near, common),
        Train::Saap { clusters, network, near, common } => {
            (Method::Saap { clusters, network: read(&network) }, near, common)
        }
        Train::HashAttention { network, near, common } => {
            (Method::HashAttention { network: read(&network) }, near, common)
        }
        Train::MInference { keys, common } => (Method::MInference { keys }, none, common),
        Train::SampleAttention { cra, common } => (Method::SampleAttention { cra }, none, common),
    };
    common.model.without(&UNUSED, "the model runs densely over plain text, with a cache of its own")?;
    eval::writable("markdown", common.markdown.as_deref())?;
    let plan = Plan {
        method,
        layers: common.layers.map(|layers| layers.0),
        queries: common.queries,
        sink: near.sink,
        window: near.window,
        seed: common.seed,
        memory_bytes: config::size(&common.memory).context("--memory")?,
        resume: common.resume,
    };
    let size = CorpusSize { length: common.length, sequences: common.sequences };
    let started = Instant::now();
    let (model, tokenizer) = load::model(&config::model(common.model)?)?;
    let corpus = Corpus::open(&tokenizer, &common.text, common.seed, size)?;
    let mut terminal = Terminal::new(interrupt::stop()?);
    let trained = train(&model, &corpus, &plan, &common.out, &mut terminal);
    terminal.done();
    let trained = trained.map_err(|error| match error {
        TrainError::Stopped => anyhow::anyhow!("stopped; --resume goes on with what is in {}", common.out.display()),
        error => error.into(),
    })?;
    eval::show(common.markdown.as_deref(), |style| table(&trained.reports, style))?;
    let kept = if trained.kept > 0 { format!(", {} layers kept", trained.kept) } else { String::new() };
    let seconds = started.elapsed().as_secs_f64();
    eprintln!("{} from {} tokens in {seconds:.0} s{kept}", trained.file.display(), corpus.tokens());
    Ok(())
}

fn read(args: &NetworkArgs) -> Network {
    let NetworkArgs { hidden, iterations, batch, learning_rate } = *args;
    Network { hidden, iterations, batch, learning_rate }
}

/// Shows the progress of long work.
pub struct Terminal {
    bar: ProgressBar,
    started: Instant,
    stop: Arc<AtomicBool>,
}

impl Terminal {
    /// `stop` is set when the work is to end.
    pub fn new(stop: Arc<AtomicBool>) -> Self {
        let bar = ProgressBar::new(1);
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len}, {elapsed} of {eta} left  {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, started: Instant::now(), stop }
    }

    /// Takes the bar away.
    pub fn done(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Terminal {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn begins(&mut self, part: &str, steps: usize) {
        if self.bar.is_hidden() {
            eprintln!("{:>6.0} s  {part}", self.started.elapsed().as_secs_f64());
        }
        self.bar.reset();
        self.bar.set_length(steps as u64);
        self.bar.set_message(part.to_owned());
    }

    fn advance(&mut self) {
        self.bar.inc(1);
    }
}
