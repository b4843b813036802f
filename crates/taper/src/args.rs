//! The command line.

use crate::bench;
use crate::bench::model::BenchModelArgs;
use crate::bench::serve::BenchServeArgs;
use crate::eval;
use crate::settings::{ModelArgs, ServeArgs};
use crate::train::TrainArgs;
use clap::{Arg, ArgGroup, Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;

/// An LLM inference server whose attention is a request parameter.
#[derive(Debug, Parser)]
#[command(name = "taper", version, mut_subcommands(below_zero))]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve the OpenAI API over HTTP
    Serve(Box<ServeArgs>),
    /// Look at the server's settings
    Config(ConfigArgs),
    /// Ask a running server whether it is well: exit status 0 if it is
    Health(HealthArgs),
    /// Talk to a model in the terminal
    Chat(ChatArgs),
    /// Continue one prompt and print the result
    Generate(GenerateArgs),
    /// Measure what attention methods cost in answers
    Eval(EvalArgs),
    /// Measure what attention methods save in time
    Bench(BenchArgs),
    /// Train what some attention methods learn offline
    Train(TrainArgs),
    /// List attention methods, their parameters and the presets
    Methods(MethodsArgs),
}

#[derive(Debug, Args)]
#[command(
    after_help = "Without --url the server's settings say where it is: the environment, and --config. A certificate is not checked,
since the server is asked by an address that stands in none.

Examples:
  taper health
  taper health --ready --url http://127.0.0.1:9000"
)]
pub struct HealthArgs {
    /// Where the server is, such as http://127.0.0.1:8080
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Whether it takes requests, rather than whether it lives
    #[arg(long)]
    pub ready: bool,
    /// The server's settings in TOML
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    pub what: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check the settings that `taper serve` would have, and print them as a file that says the same; loads nothing
    Check(Box<ServeArgs>),
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
pub struct SamplingArgs {
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = positive)]
    pub max_tokens: usize,
    /// 0 always takes the most probable token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    pub temperature: f32,
    /// Keep the most probable tokens up to this sum of probabilities
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = share::<f32>)]
    pub top_p: f32,
    /// Keep only the K most probable tokens [default: all]
    #[arg(long, value_name = "K", value_parser = whole)]
    pub top_k: Option<usize>,
    /// Seed of all random draws, any whole number of 64 bits [default: 0 at temperature 0, else a new one each time]
    #[arg(long, value_parser = seed)]
    pub seed: Option<u64>,
    /// Print to standard error what attention did
    #[arg(long)]
    pub usage: bool,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("text").required(true).args(["prompt", "prompt_file"]))]
#[command(after_help = "Examples:
  taper generate --prompt 'The capital of France is' --stream
  taper generate --chat --prompt 'Why is the sky blue?' --attention vattention --usage
  taper generate --prompt-file long.txt --attention '{\"prefill\": {\"method\": \"delta\", \"gamma\": 32}}'")]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The text to continue
    #[arg(long)]
    pub prompt: Option<String>,
    /// A file of that text, without the line break at its end; - is standard input
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Put the prompt into the model's chat template, as a user's message
    #[arg(long)]
    pub chat: bool,
    /// Print the text as it is generated
    #[arg(long)]
    pub stream: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
#[command(after_help = "In the chat:
  /attention <preset, method or JSON>   change how the next answers attend; a method goes by its defaults
  /reset                                forget the conversation
  /quit                                 leave (so does the end of input)
  Ctrl-C                                end the answer, of which the conversation keeps what there is; at the prompt, or
                                        once more before it has ended, leave
A line that begins with a space goes to the model, whatever follows.

Example:
  taper chat --attention vattention --usage")]
pub struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// A system message to begin with
    #[arg(long)]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    pub what: Eval,
}

#[derive(Debug, Subcommand)]
pub enum Eval {
    /// Ask for what is hidden in long contexts: RULER's tasks
    Needle(NeedleArgs),
    /// Hold a method's choices, head by head, against dense attention: errors, and whether a promise is kept
    Heads(HeadsArgs),
}

#[derive(Debug, Args)]
#[command(
    mut_args(|arg| hidden(arg, &eval::heads::UNUSED)),
    after_help = "The model runs densely over a text. The last token's query heads then attend by each method, once for each draw,
and errors are relative to dense attention. A head breaks a promise of delta if it is over epsilon more often than the
99.9 % quantile of the binomial distribution of (draws, delta). \"decided\" are draws whose size the promise decided:
neither the first look's nor everything; \"spare\" is the share of all keys read that these could have done without, had it been
known beforehand how large a sample each head takes to err by more than epsilon in delta of them (with --alone; else heads of a
group read what its neediest one takes).

Examples:
  taper eval heads --length 1024 --length 4096 --layers 1,14,28 --epsilon 0.05,0.1 --delta 0.05,0.2
  taper eval heads --text book.txt --draws 500 --decode '{\"method\": \"santa\", \"variant\": \"iid\"}' --decode santa"
)]
pub struct HeadsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to run over: a file, or a folder of .txt and .md files; may be repeated [default: generated prose]
    #[arg(long, value_name = "FILE|FOLDER")]
    pub text: Vec<PathBuf>,
    /// Tokens of the context; may be repeated
    #[arg(long, value_name = "TOKENS", default_values_t = [4096], value_parser = positive)]
    pub length: Vec<usize>,
    /// Texts of each length
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive)]
    pub texts: usize,
    /// Layers, such as 3,7-9 [default: an early one, the middle one and a late one]
    #[arg(long, value_name = "LAYERS", value_parser = layers)]
    pub layers: Option<Layers>,
    /// The method: a name, or JSON as in a request; may be repeated
    #[arg(long, value_name = "NAME|JSON", default_values_t = ["vattention".to_owned()])]
    pub decode: Vec<String>,
    /// Hold methods that make a promise to these instead of their own, with commas between them
    #[arg(long, value_name = "EPSILON", value_delimiter = ',')]
    pub epsilon: Vec<f64>,
    /// Likewise; every pair is measured
    #[arg(long, value_name = "DELTA", value_delimiter = ',')]
    pub delta: Vec<f64>,
    /// Draws of every head and method
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = positive)]
    pub draws: usize,
    /// Let every query head choose alone, rather than with those that share its KV head
    #[arg(long)]
    pub alone: bool,
    /// Seed of generated text and draws
    #[arg(long, default_value_t = 1, value_parser = seed)]
    pub seed: u64,
    /// Write the table
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(
    mut_args(|arg| hidden(arg, &eval::UNUSED)),
    after_help = "Tasks: single_1, single_2, single_3, multikey_1, multikey_2, multikey_3, multivalue, multiquery,
variable_tracking, common_words, frequent_words.

Every prompt is prefilled once by each prefill method and answered from there by each decode method.
Ctrl-C ends the run; what was measured is in the JSON file.

Examples:
  taper eval needle --length 4096 --tasks multikey_1,multikey_3 --samples 20
  taper eval needle --length 4096 --length 8192 --json grid.json \\
    --prefill dense --prefill '{\"method\": \"streaming_llm\", \"window\": 512}' --prefill delta \\
    --decode dense --decode vattention --audit 0.01
  taper eval needle --resume grid.json --length 8192 --samples 100
  taper eval needle --model FOLDER --length 32768 --samples 100 --prompts asked.jsonl"
)]
pub struct NeedleArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of prompt and answer together; may be repeated
    #[arg(long, value_name = "TOKENS", default_values_t = [4096], value_parser = positive)]
    pub length: Vec<usize>,
    /// Tasks, with commas between them, or all
    #[arg(long, value_name = "TASKS", default_value = "all")]
    pub tasks: String,
    /// Questions of each task and length
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = positive)]
    pub samples: usize,
    /// Number of the first question, to cut a grid over processes or machines
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = count)]
    pub first: usize,
    /// How prompts are attended: a method's name, or JSON as in a request; may be repeated
    #[arg(long, value_name = "NAME|JSON", default_values_t = ["dense".to_owned()])]
    pub prefill: Vec<String>,
    /// How answers are attended: a method's name, or JSON as in a request; may be repeated
    #[arg(long, value_name = "NAME|JSON", default_values_t = ["dense".to_owned()])]
    pub decode: Vec<String>,
    /// What attends prompts, and questions that are not attended by the decode method: cpu, cuda or cuda:N; answers are
    /// decoded on --device [default: the same]
    #[arg(long, value_name = "DEVICE")]
    pub prefill_device: Option<String>,
    /// How the question after the context is attended: as the prompt is, densely, or by the decode method
    #[arg(long, value_name = "WAY", default_value_t = Question::Prefill, value_enum)]
    pub question: Question,
    /// Seed of questions and methods
    #[arg(long, default_value_t = 1, value_parser = seed)]
    pub seed: u64,
    /// Share of tokens compared with dense attention, in all layers, for the mean error beside accuracy and density; 0 for none
    #[arg(long, value_name = "SHARE", default_value_t = 0.005, value_parser = audit)]
    pub audit: f64,
    /// Write every answer and the table, as they come
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the tables at the end
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Go on with the answers of an earlier run's --json file, and write to it unless --json names another; repeated,
    /// the files are put together
    #[arg(long, value_name = "FILE")]
    pub resume: Vec<PathBuf>,
    /// Write the prompts that would be asked, a line of JSON each with token ids and wanted strings, and end: no weights
    /// are loaded, nothing is answered
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prefill", "decode", "prefill_device", "question", "audit", "json", "markdown", "resume"])]
    pub prompts: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Question {
    Prefill,
    Dense,
    Decode,
}

impl std::fmt::Display for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Dense => "dense",
            Self::Decode => "decode",
        })
    }
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: Bench,
}

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Time attention methods side by side, in this process
    Methods(BenchMethodsArgs),
    /// Time the steps of a well-known shape with random weights, beside the least time that their bytes could take
    Model(BenchModelArgs),
    /// Send load to a server, this one or any that speaks OpenAI's protocol, and report what clients see
    Serve(BenchServeArgs),
}

#[derive(Debug, Args)]
#[command(
    mut_args(|arg| hidden(arg, &bench::methods::UNUSED)),
    after_help = "Rounds go through all methods in turn and medians are compared. \"next to none\" is a window of one token: what
remains is not attention. \"allowed\" is the speed-up if attention took its density's share of dense attention's time.

Examples:
  taper bench methods --length 4096 --tokens 0 --prefill streaming_llm --prefill delta --prefill sample_attention
  taper bench methods --model FOLDER --length 32768 --no-prefill --prefill streaming_llm --decode vattention --decode quest"
)]
pub struct BenchMethodsArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text of the prompt: a file, or a folder of .txt and .md files; may be repeated [default: generated prose]
    #[arg(long, value_name = "FILE|FOLDER")]
    pub text: Vec<PathBuf>,
    /// Tokens of the prompt [default: 8192, or as many as fit]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub length: Option<usize>,
    /// How prompts are attended; may be repeated; the first makes the prompt that tokens are generated from
    #[arg(long, value_name = "NAME|JSON", default_values_t = ["dense".to_owned()])]
    pub prefill: Vec<String>,
    /// Do not time prompts
    #[arg(long)]
    pub no_prefill: bool,
    /// How generated tokens are attended, besides densely; may be repeated
    #[arg(long, value_name = "NAME|JSON")]
    pub decode: Vec<String>,
    /// Tokens generated by each method in each round; 0 for prompts alone
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = count)]
    pub tokens: usize,
    /// Rounds through all methods
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive)]
    pub rounds: usize,
    /// Write the table
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
}

impl BenchMethodsArgs {
    /// Tokens of a method after the prompt.
    pub fn more_tokens(&self) -> usize {
        if self.tokens == 0 { 0 } else { self.rounds * self.tokens + 2 }
    }
}

/// Layers of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers(pub Vec<usize>);

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  taper methods
  taper methods --json | jq '.presets[\"delta-vattention\"]'")]
pub struct MethodsArgs {
    /// Print what GET /v1/attention/methods of a server without settings answers
    #[arg(long)]
    pub json: bool,
}

/// An argument, not shown if it is among those that a command has no use for.
pub(crate) fn hidden(arg: Arg, unused: &[&str]) -> Arg {
    let hide = unused.contains(&arg.get_id().as_str());
    if hide { arg.hide(true) } else { arg }
}

/// What looks like a number below 0 is the value of the option before it, which says what it takes, and no option that nobody
/// knows.
fn below_zero(command: clap::Command) -> clap::Command {
    let value = |arg: Arg| {
        let takes = arg.get_action().takes_values();
        arg.allow_negative_numbers(takes)
    };
    command.mut_args(value).mut_subcommands(below_zero)
}

/// No number of tokens, rounds or requests is larger, so that what is reckoned from a few of them fits 64 bits.
const MOST: usize = 1 << 24;

pub(crate) fn positive(text: &str) -> Result<usize, String> {
    within(text, 1)
}

pub(crate) fn count(text: &str) -> Result<usize, String> {
    within(text, 0)
}

/// A number whose bounds are looked at later.
pub(crate) fn whole(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "must be a whole number of at least 0".into())
}

fn within(text: &str, least: usize) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (least..=MOST).contains(number));
    number.ok_or_else(|| format!("must be a whole number from {least} to {MOST}"))
}

/// A negative seed is what it is modulo 2^64.
pub(crate) fn seed(text: &str) -> Result<u64, String> {
    let parsed = text.parse::<u64>().or_else(|_| text.parse::<i64>().map(|seed| seed as u64));
    parsed.map_err(|_| "must be a whole number of 64 bits".into())
}

/// Numbers and ranges with commas between them. No model has more layers than a range may span.
pub(crate) fn layers(text: &str) -> Result<Layers, String> {
    let invalid = || format!("{text:?} must be layers such as 3 or 3,7-9");
    let mut layers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&n| n < 4096).ok_or_else(invalid);
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(invalid());
        }
        layers.extend(first..=last);
    }
    Ok(Layers(layers))
}

fn temperature(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|t| (0.0..=2.0).contains(t)).ok_or_else(|| "must be a number in [0, 2]".into())
}

fn audit(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|p| (0.0..=1.0).contains(p)).ok_or_else(|| "must be a number in [0, 1]".into())
}

/// A number above 0, up to 1.
pub(crate) fn share<T: FromStr + Into<f64> + Copy>(text: &str) -> Result<T, String> {
    let share = text.parse().ok().filter(|&share: &T| share.into() > 0.0 && share.into() <= 1.0);
    share.ok_or_else(|| "must be a number in (0, 1]".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::Train;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    /// The command lines of a help text; one that ends with a backslash goes on.
    fn examples(command: &clap::Command) -> Vec<String> {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default().replace("\\\n", "");
        let here = help.lines().filter(|line| line.starts_with("  taper ")).map(str::to_owned);
        here.chain(command.get_subcommands().flat_map(examples)).collect()
    }

    /// Words as a shell has them, as far as examples need it: single quotes, and nothing after a pipe.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut quoted) = (vec![String::new()], false);
        for letter in line.trim().chars() {
            match letter {
                '\'' => quoted = !quoted,
                '|' if !quoted => break,
                ' ' if !quoted => words.push(String::new()),
                _ => words.last_mut().unwrap().push(letter),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }

    /// With the default model, whose context is 8192 tokens, unless they name another one.
    #[test]
    fn examples_in_help_can_be_run() {
        let examples = examples(&Cli::command());
        assert!(examples.len() > 20, "{examples:?}");
        for line in examples {
            let words = words(&line);
            let cli = Cli::try_parse_from(&words).unwrap_or_else(|error| panic!("{line}\n{error}"));
            let more = match cli.command {
                Command::Bench(BenchArgs { what: Bench::Methods(args) }) => args.more_tokens(),
                _ => 0,
            };
            let mut lengths =
                words.windows(2).filter(|pair| pair[0] == "--length").map(|pair| pair[1].parse::<usize>());
            let fits = lengths.all(|length| length.unwrap() + more <= 8192);
            assert!(fits || words.iter().any(|word| word == "--model"), "{line}");
        }
    }

    /// A preset is what `--attention` names.
    #[test]
    fn presets_are_offered_where_attention_is() {
        fn check(command: &clap::Command) {
            let hidden = |id: &str| command.get_arguments().find(|arg| arg.get_id() == id).map(|arg| arg.is_hide_set());
            assert_eq!(hidden("attention"), hidden("presets"), "{}", command.get_name());
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn a_seed_may_be_any_of_64_bits() {
        let seed = |text: &str| {
            let cli = Cli::try_parse_from(["taper", "generate", "--prompt", "x", "--seed", text]).ok()?;
            let Command::Generate(args) = cli.command else { return None };
            args.sampling.seed
        };
        assert_eq!(seed("-7"), Some(-7i64 as u64));
        assert_eq!(seed("18446744073709551615"), Some(u64::MAX));
        assert_eq!((seed("18446744073709551616"), seed("1.5")), (None, None));
    }

    /// The commands that nothing is below, each with the words that call it.
    fn leaves(command: &clap::Command, before: &[String]) -> Vec<(Vec<String>, clap::Command)> {
        let line = [before, &[command.get_name().to_owned()]].concat();
        match command.has_subcommands() {
            true => command.get_subcommands().flat_map(|below| leaves(below, &line)).collect(),
            false => vec![(line, command.clone())],
        }
    }

    #[test]
    fn a_number_below_zero_is_a_value_and_what_is_wrong_with_it_is_said() {
        for (line, command) in leaves(&Cli::command(), &[]) {
            for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
                let flag = format!("--{}", arg.get_long().unwrap());
                let tried = Cli::try_parse_from(line.iter().map(String::as_str).chain([flag.as_str(), "-1"]));
                // Others that are missing, or that exclude each other, say so.
                let told = tried.err().map(|error| error.to_string()).unwrap_or_default();
                assert!(!told.contains("unexpected argument"), "{line:?} {flag}: {told}");
                assert!(!told.contains("invalid digit") && !told.contains("invalid float"), "{line:?} {flag}: {told}");
            }
        }
        let told = Cli::try_parse_from(["taper", "generate", "--prompt", "x", "--temperature", "-1"]).unwrap_err();
        assert!(told.to_string().contains("invalid value '-1' for '--temperature <T>': must be a number in [0, 2]"));
        assert!(Cli::try_parse_from(["taper", "generate", "--prompt", "x", "--stream", "-1"]).is_err());
    }

    #[test]
    fn numbers_that_would_overflow_are_refused() {
        for line in [
            "generate --prompt x --max-tokens",
            "eval needle --length",
            "eval needle --samples",
            "eval needle --first",
            "eval heads --length",
            "eval heads --draws",
            "bench methods --tokens",
            "bench methods --rounds",
            "bench model --shape x --context",
            "bench model --shape x --tokens",
            "bench serve --requests",
            "bench serve --clients",
            "bench serve --shared-prefix",
            "bench serve --warm-up",
            "train kmeans --out x --length",
        ] {
            let with = |number: &str| Cli::try_parse_from(["taper"].into_iter().chain(line.split(' ')).chain([number]));
            let error = with(&usize::MAX.to_string()).unwrap_err().to_string();
            assert!(error.contains("must be a whole number from") && with("16777216").is_ok(), "{line}: {error}");
        }
    }

    #[test]
    fn layers_are_numbers_and_ranges() {
        assert_eq!(layers("3, 7-9,0").unwrap().0, [3, 7, 8, 9, 0]);
        for text in ["", "3,", "9-7", "-3", "x", "1-99999999999"] {
            assert!(layers(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_command_with_a_model_takes_the_same_options() {
        let train = ["train", "kmeans", "--out", "x"];
        let (eval, heads) = (["eval", "needle"], ["eval", "heads"]);
        let generate = ["generate", "--prompt", "x"];
        for command in [&["serve"][..], &["chat"], &generate, &eval, &heads, &["bench", "methods"], &train] {
            let line = [&["taper"][..], command, &["--dtype", "f16", "--dequantize"]].concat();
            let model = match Cli::try_parse_from(line).expect("taken").command {
                Command::Serve(args) => args.model,
                Command::Chat(args) => args.model,
                Command::Generate(args) => args.model,
                Command::Eval(EvalArgs { what: Eval::Needle(args) }) => args.model,
                Command::Eval(EvalArgs { what: Eval::Heads(args) }) => args.model,
                Command::Bench(BenchArgs { what: Bench::Methods(args) }) => args.model,
                Command::Train(TrainArgs { what: Train::KMeans { common, .. } }) => common.model,
                _ => unreachable!("not asked for"),
            };
            assert_eq!((model.dtype.as_deref(), model.dequantize), (Some("f16"), Some(true)));
        }
    }
}
