//! The `taper` program: serve, config, health, chat, generate, eval, bench, train, methods.

mod allocator;
mod args;
mod bench;
mod chat;
mod config;
mod eval;
mod generate;
mod health;
mod interrupt;
mod load;
mod methods;
mod otlp;
mod preset;
mod serve;
mod settings;
mod talk;
mod train;

use args::{Bench, BenchArgs, Cli, Command, ConfigArgs, ConfigCommand, Eval, EvalArgs};
use clap::Parser;
use settings::LogFormat;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tracing_subscriber::EnvFilter;
use train::TrainArgs;

#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator;

/// Whether all that is written is a line of JSON, be it the last.
static JSON: AtomicBool = AtomicBool::new(false);

/// Where the server says where it is, by which settings, and that anyone may use it; how far a model's weights are, which may
/// take minutes; and how a device's memory is shared out.
const NOTICES: [&str; 3] =
    ["taper::serve=info", "taper_model::source::progress=info", "taper_engine::model::room=info"];

/// Has the log written to standard error; RUST_LOG says what of it.
pub fn log(format: LogFormat) {
    let said = std::env::var_os(EnvFilter::DEFAULT_ENV).map(|said| said.to_string_lossy().into_owned());
    let said = said.filter(|said| !said.is_empty());
    let said = said.map(EnvFilter::try_new).transpose();
    let wrong = said.as_ref().err().map(ToString::to_string);
    let filter = said.ok().flatten().unwrap_or_else(|| EnvFilter::new("warn,taper_server::access=info"));
    // What whoever runs the server must see, whatever else is wanted.
    let notices = NOTICES.map(|notice| notice.parse().expect("it is sound"));
    let filter = notices.into_iter().fold(filter, EnvFilter::add_directive);
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A line that cannot be written is lost, and nothing else: by default whoever logs it would panic.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => {
            lines.json().flatten_event(true).init();
            std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
            JSON.store(true, Relaxed);
        }
    }
    if let Some(wrong) = wrong {
        tracing::warn!("{} cannot be read, and the default is used: {wrong}", EnvFilter::DEFAULT_ENV);
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // The server sets its own up, once it knows in which format.
    if !matches!(cli.command, Command::Serve(_)) {
        log(LogFormat::Text);
    }
    let done = match cli.command {
        Command::Serve(args) => serve::run(*args),
        Command::Config(ConfigArgs { what: ConfigCommand::Check(args) }) => serve::check(*args),
        Command::Health(args) => health::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Eval(EvalArgs { what: Eval::Needle(args) }) => eval::needle(args),
        Command::Eval(EvalArgs { what: Eval::Heads(args) }) => eval::heads::run(args),
        Command::Bench(BenchArgs { what: Bench::Methods(args) }) => bench::methods::run(args),
        Command::Bench(BenchArgs { what: Bench::Model(args) }) => bench::model::run(&args),
        Command::Bench(BenchArgs { what: Bench::Serve(args) }) => bench::serve::run(args),
        Command::Train(TrainArgs { what }) => train::run(what),
        Command::Methods(args) => methods::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let error = talk::told(&error);
            match JSON.load(Relaxed) {
                true => tracing::error!("{error}"),
                false => eprintln!("taper: {error}"),
            }
            // Like clap's own exit code: what was asked for cannot be done.
            ExitCode::from(2)
        }
    }
}
