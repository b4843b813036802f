//! `taper bench`: times of methods side by side.

use crate::args::BenchMethodsArgs;
use crate::load::{self, Ready};
use crate::train::Terminal;
use crate::{config, eval};
use anyhow::{Result, bail};
use std::sync::Arc;
use taper_attention::Artifacts;
use taper_engine::Backend;
use taper_eval::train::{Corpus, CorpusSize};
use taper_eval::{Phase, SpeedPlan, speed, speed_table};
use taper_model::Tokenizer;

/// Tokens of the prompt where nothing else is said, and they fit.
const LENGTH: usize = 8192;

/// Settings of a model that are not for it.
pub const UNUSED: [&str; 3] = ["attention", "presets", "chat_template"];

/// Times and prints the table.
///
/// # Errors
/// The argument or file at fault, or a step that failed.
pub fn run(args: BenchMethodsArgs) -> Result<()> {
    args.model.without(&UNUSED, "prompts are plain text, attended by --prefill and --decode")?;
    eval::writable("markdown", args.markdown.as_deref())?;
    let tokens = args.more_tokens();
    let config = config::model(args.model)?;
    let read = |artifacts: &Artifacts| -> Result<_> {
        let prefills = eval::methods(Phase::Prefill, &args.prefill, artifacts)?;
        Ok((prefills, eval::methods(Phase::Decode, &args.decode, artifacts)?))
    };
    // A mistake should be known before a large model has loaded, unless only its artefacts can tell.
    if config.artifacts.is_none() {
        read(&Artifacts::default().at(load::place(config.device)))?;
    }
    let Ready { model, mut backend, artifacts, .. } = load::backend(&config)?;
    let (prefills, decodes) = read(&artifacts)?;
    let limits = backend.limits();
    // Every method's own tokens follow the prompt, in blocks of its own.
    let room = limits.context_tokens.saturating_sub(tokens);
    let room = room.min(limits.cache_tokens.saturating_sub((decodes.len() + 2) * (tokens + 128)));
    let length = args.length.unwrap_or(LENGTH.min(room).max(1));
    if length > room {
        bail!(
            "--length: {length} tokens and {tokens} more of each method do not fit; the model's context is {}, the cache holds {}",
            limits.context_tokens,
            limits.cache_tokens
        );
    }
    let tokenizer = Tokenizer::load(&model)?;
    let size = CorpusSize { length, sequences: 2 };
    let corpus = Corpus::open(&tokenizer, &args.text, 1, size)?;
    let plan = SpeedPlan {
        prefills,
        time_prefill: !args.no_prefill,
        decodes,
        tokens: args.tokens,
        rounds: args.rounds,
        chunk_tokens: 512,
        artifacts,
    };
    // Ctrl-C ends the process: there is nothing to keep.
    let mut terminal = Terminal::new(Arc::default());
    let timed = speed(&mut backend, eval::FORK, &corpus.sequences()[0], &plan, &mut terminal);
    terminal.done();
    let timed = timed?;
    eval::show(args.markdown.as_deref(), |style| speed_table(&timed, style))
}
