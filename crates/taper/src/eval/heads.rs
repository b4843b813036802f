//! `taper eval heads`: a method's errors and promise, head by head.

use crate::args::HeadsArgs;
use crate::train::Terminal;
use crate::{config, eval, interrupt, load};
use anyhow::{Context, Result};
use taper_attention::Artifacts;
use taper_eval::train::{Corpus, CorpusSize};
use taper_eval::{HeadsPlan, heads, heads_table, with_promises};

/// Settings of a model that heads have no use for.
pub const UNUSED: [&str; 7] =
    ["attention", "presets", "chat_template", "kv_memory", "kv_offload", "kv_offload_dir", "kv_dtype"];

/// Measures and prints the table.
///
/// # Errors
/// The argument or file at fault, or a step that failed.
pub fn run(args: HeadsArgs) -> Result<()> {
    args.model.without(&UNUSED, "heads are measured over plain text by --decode, with a cache of their own")?;
    eval::writable("markdown", args.markdown.as_deref())?;
    let methods = args.decode.iter().map(|text| eval::value(text)).collect::<Result<Vec<_>>>().context("--decode")?;
    let config = config::model(args.model)?;
    let read =
        |artifacts: &Artifacts| with_promises(&methods, &args.epsilon, &args.delta, artifacts).context("--decode");
    // A mistake should be known before a large model has loaded, unless only its artefacts can tell.
    if config.artifacts.is_none() {
        read(&Artifacts::default())?;
    }
    let (model, tokenizer) = load::model(&config)?;
    let artifacts = load::artifacts(&config, &model.config().key())?;
    let last = model.attention_shape().layers - 1;
    let some = || {
        let mut some = vec![1.min(last), last / 2, last.saturating_sub(1)];
        some.dedup();
        some
    };
    let mut layers = args.layers.map_or_else(some, |layers| layers.0);
    layers.sort_unstable();
    layers.dedup();
    let plan = HeadsPlan {
        layers,
        methods: read(&artifacts)?,
        draws: args.draws,
        alone: args.alone,
        seed: args.seed,
        texts: args.texts,
        artifacts,
    };
    let mut terminal = Terminal::new(interrupt::stop()?);
    let mut rows = Vec::new();
    for &length in &args.length {
        let size = CorpusSize { length, sequences: args.texts.max(2) };
        let corpus = Corpus::open(&tokenizer, &args.text, args.seed, size)?;
        rows.extend(heads(&model, &corpus, &plan, &mut terminal)?);
    }
    terminal.done();
    eval::show(args.markdown.as_deref(), |style| heads_table(&rows, style))
}
