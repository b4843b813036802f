//! `taper eval`: `needle`, long-context tasks over pairs of methods, is here, with what the other measuring commands share; promises
//! head by head are in `heads`.

pub mod heads;

use crate::args::{self, NeedleArgs};
use crate::load::{self, Ready};
use crate::{config, interrupt, talk};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use taper_attention::{Artifacts, Question};
use taper_engine::{Backend, Handover, ModelBackend};
use taper_eval::{
    EvalError, Fork, Header, Method, ModelText, Outcome, Phase, Plan, Results, Style, Task, Watch, accuracies, details,
    digests, write_prompts,
};
use taper_model::weights_digest;

/// Settings of a model that methods given one by one leave no use for.
pub const UNUSED: [&str; 2] = ["attention", "presets"];

/// Runs the grid and prints its tables.
///
/// # Errors
/// The argument or file at fault, or a step that failed; what was measured is in the JSON file then.
pub fn needle(args: NeedleArgs) -> Result<()> {
    args.model.without(&UNUSED, "give --prefill and --decode instead")?;
    let mut plan = Plan {
        tasks: tasks(&args.tasks)?,
        lengths: args.length.clone(),
        samples: args.first..args.first.saturating_add(args.samples),
        prefills: Vec::new(),
        decodes: Vec::new(),
        question: match args.question {
            args::Question::Prefill => Question::Prefill,
            args::Question::Dense => Question::Dense,
            args::Question::Decode => Question::Decode,
        },
        audit: args.audit,
        artifacts: Artifacts::default(),
        chunk_tokens: 512,
    };
    let loaded = format!(
        "weights {}{}, cache {}, on {}{}",
        args.model.dtype.as_deref().unwrap_or("auto"),
        if args.model.dequantize == Some(true) { " dequantized" } else { "" },
        args.model.kv_dtype.as_deref().unwrap_or("auto"),
        args.model.device.as_deref().unwrap_or("cpu"),
        args.prefill_device.as_ref().map(|device| format!(", prompts on {device}")).unwrap_or_default(),
    );
    let prompts_on = args.prefill_device.as_deref().map(config::device).transpose().context("--prefill-device")?;
    let json = json_file(&args)?;
    writable("json", json.as_deref())?;
    writable("markdown", args.markdown.as_deref())?;
    let config = config::model(args.model)?;
    if let Some(file) = &args.prompts {
        let text = ModelText::load(&load::find(&config)?, config.load.chat_template.as_deref())?;
        let prompts = write_prompts(&plan, args.seed, &text, file)?;
        eprintln!("{prompts} prompts");
        return Ok(());
    }
    let methods = |artifacts: &Artifacts| -> Result<_> {
        let prefills = methods(Phase::Prefill, &args.prefill, artifacts)?;
        Ok((prefills, methods(Phase::Decode, &args.decode, artifacts)?))
    };
    // A mistake should be known before a large model has loaded, unless only its artefacts can tell.
    if config.artifacts.is_none() {
        methods(&Artifacts::default().at(load::place(config.device)))?;
    }
    let Ready { model, mut backend, artifacts, .. } = load::backend(&config)?;
    (plan.prefills, plan.decodes) = methods(&artifacts)?;
    plan.artifacts = artifacts;
    let text = ModelText::load(&model, config.load.chat_template.as_deref())?;
    let learnt = config.artifacts.as_deref().map(|folder| digests(folder, &plan.artifacts.names())).transpose()?;
    let header = Header {
        model: model.name.clone(),
        // Two models may have one name: answers of both are not one grid's.
        loaded: format!("{loaded}, configuration {}", backend.key().fingerprint),
        question: args.question.to_string(),
        seed: args.seed,
        weights: Some(weights_digest(&model)?),
        artifacts: learnt.unwrap_or_default(),
    };
    let mut results = Results::new(header);
    for file in &args.resume {
        let theirs = Results::load(file, &results.header)?;
        if theirs.header.weights.is_none() {
            let file = file.display();
            eprintln!("{file} does not say which weights its answers are of; they are taken to be this model's");
        }
        results.absorb(theirs);
    }
    let started = Instant::now();
    let mut terminal = Terminal::new(plan.answers(), json, interrupt::stop()?);
    let outcome = match prompts_on {
        None => taper_eval::run(&mut backend, FORK, &text, &plan, &mut results, &mut terminal),
        Some(device) => {
            let prompts = ModelBackend::load(&model, &config.load, config.cache.clone(), &device.open()?)?;
            let mut backend = Handover::new(prompts, backend);
            let fork: Fork<Handover> = |backend, held, spec, seed| backend.hand_over(held, spec, seed);
            taper_eval::run(&mut backend, fork, &text, &plan, &mut results, &mut terminal)
        }
    };
    terminal.bar.finish_and_clear();
    report(&mut results, terminal.json.as_deref(), args.markdown.as_deref())?;
    let seconds = started.elapsed().as_secs_f64();
    match outcome? {
        Outcome::Complete => eprintln!("{} answers in {seconds:.0} s", results.records.len()),
        Outcome::Stopped => {
            let kept = terminal.json.as_deref().map(|file| format!("; --resume {} goes on", file.display()));
            eprintln!("stopped after {} answers, {seconds:.0} s{}", results.records.len(), kept.unwrap_or_default());
        }
    }
    Ok(())
}

/// Every decode method goes on from the same prefill.
pub const FORK: Fork<ModelBackend> = |backend, sequence, spec, seed| {
    let mut fork = backend.fork(sequence, seed)?;
    fork.decode_by(spec);
    Ok(fork)
};

/// Prints the tables and writes the files.
fn report(results: &mut Results, json: Option<&Path>, markdown: Option<&Path>) -> Result<()> {
    if let Some(file) = json {
        results.save(file)?;
    }
    let cells = results.cells();
    if cells.is_empty() {
        return Ok(());
    }
    let both = |style| format!("{}\n{}", accuracies(&cells, style), details(&cells, style));
    show(markdown, both)
}

/// Refuses a file that could not be written, before the work that it is for; leaves none behind.
///
/// # Errors
/// The flag that names it.
pub fn writable(flag: &str, file: Option<&Path>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    // Not `exists`, which follows a link that leads nowhere.
    let new = std::fs::symlink_metadata(file).is_err();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(file);
    let tried = opened.and_then(|_| if new { std::fs::remove_file(file) } else { Ok(()) });
    tried.with_context(|| format!("--{flag}: {}", file.display()))
}

/// Prints a table, and writes it to a file in Markdown.
///
/// # Errors
/// A terminal that is gone, or the file that could not be written.
pub fn show(markdown: Option<&Path>, table: impl Fn(Style) -> String) -> Result<()> {
    talk::print(&table(Style::Text))?;
    if let Some(file) = markdown {
        std::fs::write(file, table(Style::Markdown)).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn tasks(names: &str) -> Result<Vec<Task>> {
    if names == "all" {
        return Ok(Task::ALL.to_vec());
    }
    let mut tasks = Vec::new();
    for name in names.split(',') {
        let task: Task = name.trim().parse().context("--tasks")?;
        if !tasks.contains(&task) {
            tasks.push(task);
        }
    }
    Ok(tasks)
}

/// Where results are kept; refuses to write over another run's.
fn json_file(args: &NeedleArgs) -> Result<Option<PathBuf>> {
    match &args.json {
        Some(json) if json.exists() && !args.resume.contains(json) => {
            bail!("--json: {} exists; --resume {0} goes on with it", json.display())
        }
        json => Ok(json.as_ref().or(args.resume.first()).cloned()),
    }
}

/// The methods of an option that may be repeated.
///
/// # Errors
/// The option and the parameter at fault.
pub fn methods(phase: Phase, texts: &[String], artifacts: &Artifacts) -> Result<Vec<Method>> {
    let read = |text: &String| method(phase, text, artifacts).with_context(|| format!("--{}", phase.name()));
    texts.iter().map(read).collect()
}

fn method(phase: Phase, text: &str, artifacts: &Artifacts) -> Result<Method> {
    Ok(Method::read(phase, &value(text)?, artifacts)?)
}

/// A method's object from JSON, or from its name. No presets: one of them may be called as a method of the other phase is.
///
/// # Errors
/// JSON that is none.
pub fn value(text: &str) -> Result<Value> {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).context("the method is not valid JSON");
    }
    Ok(json!({ "method": text }))
}

/// Shows progress and keeps results.
struct Terminal {
    bar: ProgressBar,
    json: Option<PathBuf>,
    stop: Arc<AtomicBool>,
}

impl Terminal {
    fn new(answers: usize, json: Option<PathBuf>, stop: Arc<AtomicBool>) -> Self {
        let bar = ProgressBar::new(answers as u64);
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} answers, {elapsed} of {eta} left  {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, json, stop }
    }
}

impl Watch for Terminal {
    fn stopped(&self) -> bool {
        self.bar.tick();
        self.stop.load(Ordering::SeqCst)
    }

    fn begins(&mut self, task: Task, length: usize, prefill: &Method) {
        let part = format!("{task} {length} {}", prefill.label);
        if self.bar.is_hidden() && self.bar.message() != part {
            let seconds = self.bar.elapsed().as_secs_f64();
            eprintln!("{seconds:>6.0} s  {}/{} answers; {part}", self.bar.position(), self.bar.length().unwrap_or(0));
        }
        self.bar.set_message(part);
    }

    fn done(&mut self, answers: usize, results: &mut Results) -> Result<(), EvalError> {
        self.bar.inc(answers as u64);
        self.json.as_deref().map_or(Ok(()), |file| results.save(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn a_method_is_a_name_or_json() {
        let label = |phase, text| method(phase, text, &Artifacts::default()).unwrap().label;
        assert_eq!(label(Phase::Decode, "vattention"), "vattention");
        assert_eq!(label(Phase::Prefill, r#"{"method": "streaming_llm", "window": 512}"#), "streaming_llm window=512");
        let error = |phase, text| format!("{:#}", method(phase, text, &Artifacts::default()).unwrap_err());
        assert!(error(Phase::Prefill, "vattention").starts_with("prefill.method: "));
        assert!(error(Phase::Prefill, "dens").contains("dense"));
        assert!(error(Phase::Decode, "{").contains("not valid JSON"));
        assert!(error(Phase::Decode, r#"{"method": "streaming_llm", "window": 0}"#).starts_with("decode.window"));
    }

    #[test]
    fn results_go_where_they_are_told_and_never_over_others() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old.json"), folder.path().join("new.json"));
        std::fs::write(&old, "").unwrap();
        let (old, new) = (old.to_str().unwrap(), new.to_str().unwrap());
        let file = |line: &[&str]| {
            let cli = args::Cli::try_parse_from([&["taper", "eval", "needle"][..], line].concat()).unwrap();
            let args::Command::Eval(args::EvalArgs { what: args::Eval::Needle(args) }) = cli.command else { panic!() };
            json_file(&args).map(|path| path.map(|p| p.to_str().unwrap().to_owned()))
        };
        assert_eq!(file(&[]).unwrap(), None);
        assert_eq!(file(&["--json", new]).unwrap().as_deref(), Some(new));
        assert_eq!(file(&["--resume", old]).unwrap().as_deref(), Some(old));
        assert_eq!(file(&["--resume", old, "--json", old]).unwrap().as_deref(), Some(old));
        assert_eq!(file(&["--resume", old, "--json", new]).unwrap().as_deref(), Some(new));
        assert!(file(&["--json", old]).unwrap_err().to_string().contains("--resume"));
    }

    #[test]
    fn a_file_is_tried_and_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join("old.md"), folder.path().join("new.md"));
        std::fs::write(&old, "a table").unwrap();
        [None, Some(&*old), Some(&*new)].iter().for_each(|file| writable("markdown", *file).unwrap());
        assert!(std::fs::read_to_string(&old).unwrap() == "a table" && !new.exists());
        let error = format!("{:#}", writable("markdown", Some(folder.path())).unwrap_err());
        assert!(error.starts_with(&format!("--markdown: {}: ", folder.path().display())), "{error}");
    }

    #[test]
    fn prompts_are_written_instead_of_asked() {
        let line = |more: &[&str]| {
            let line = [&["taper", "eval", "needle", "--prompts", "asked.jsonl"][..], more].concat();
            args::Cli::try_parse_from(line)
        };
        let args::Command::Eval(args::EvalArgs { what: args::Eval::Needle(args) }) = line(&[]).unwrap().command else {
            panic!()
        };
        assert_eq!(args.prompts.as_deref(), Some(Path::new("asked.jsonl")));
        assert!(line(&["--length", "8192", "--tasks", "multikey_3", "--first", "4", "--seed", "2"]).is_ok());
        for (flag, value) in
            [("--json", "x"), ("--resume", "x"), ("--prefill", "dense"), ("--decode", "dense"), ("--audit", "0")]
        {
            let error = line(&[flag, value]).unwrap_err().to_string();
            assert!(error.contains("cannot be used with") && error.contains(flag), "{error}");
        }
    }

    #[test]
    fn some_heads_are_audited_unless_none_are_wanted() {
        let audit = |line: &[&str]| {
            let cli = args::Cli::try_parse_from([&["taper", "eval", "needle"][..], line].concat()).unwrap();
            let args::Command::Eval(args::EvalArgs { what: args::Eval::Needle(args) }) = cli.command else { panic!() };
            args.audit
        };
        assert_eq!((audit(&[]), audit(&["--audit", "0"])), (0.005, 0.0));
    }

    #[test]
    fn tasks_are_named() {
        assert_eq!(tasks("all").unwrap().len(), 11);
        assert_eq!(tasks("multikey_3, single_1,multikey_3").unwrap(), [Task::MultiKey3, Task::Single1]);
        assert!(format!("{:#}", tasks("multikey3").unwrap_err()).contains("did you mean multikey_3?"));
    }
}
