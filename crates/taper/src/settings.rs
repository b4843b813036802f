//! Where the server's settings come from: the command line before the environment before a TOML file before the defaults.
//!
//! Every setting is one field of [`ModelArgs`] or [`ServerArgs`]: `--kv-memory`, `TAPER_KV_MEMORY` and the file's `kv_memory`
//! are the same by construction.

use crate::args::whole;
use crate::config::AttentionSetting;
use crate::otlp;
use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;
use taper_attention::nearest;
use taper_engine::EngineConfig;
use taper_server::ServerConfig;
use toml::Spanned;

#[derive(Debug, Clone, Default, Args)]
#[command(after_help = "Examples:
  taper serve
  taper serve --model ./Llama-3.2-1B-Instruct --port 9000 --attention delta-vattention
  taper serve --config configs/server/example.toml
  taper serve --attention '{\"decode\": {\"method\": \"streaming_llm\", \"window\": 512}}'

Every option is also a variable of the environment (--kv-memory is TAPER_KV_MEMORY) and a key of the settings file (kv_memory);
the command line goes before the environment, which goes before the file. `taper config check` shows what comes of them.
SIGHUP has keys, certificate, presets and default attention read again.")]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub server: ServerArgs,
    /// Settings in TOML
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// Which model, and on what. A field is a setting of the server too: see the head of this file.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
pub struct ModelArgs {
    /// default (SmolLM2-135M-Instruct, fetched once), a folder, a .gguf file, or a hub id (owner/name[@revision][:file.gguf])
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Chat template (Jinja) to use in place of the model's own, or for a model that has none [default: the model's]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Attention, of a server where a request says nothing of it: a preset or method (see `taper methods`), or JSON such as
    /// '{"decode": {"method": "vattention", "epsilon": 0.1}}' [default: dense]
    #[arg(long, value_name = "PRESET|METHOD|JSON")]
    pub attention: Option<AttentionSetting>,
    /// Folder of more presets, a TOML file each as those of configs/attention, for --attention and requests to name
    #[arg(long, value_name = "DIR")]
    pub presets: Option<PathBuf>,
    /// Folder of what methods learned offline (see `taper train`)
    #[arg(long, value_name = "DIR")]
    pub artifacts: Option<PathBuf>,
    /// What computes: cpu, cuda or cuda:N, of a build with that feature [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Threads for arithmetic [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Memory for keys and values, such as 512MiB or 2GiB [default: a quarter of what is free, at most sixteen contexts; on a
    /// CUDA device what is free less what requests take besides, at most sixty-four]
    #[arg(long, value_name = "SIZE")]
    pub kv_memory: Option<String>,
    /// Room for keys and values beyond that memory, such as 20GiB: in a file; beside cuda in pinned host memory [default: none]
    #[arg(long, value_name = "SIZE")]
    pub kv_offload: Option<String>,
    /// Folder of that file, on a disk; the device cpu alone has one
    #[arg(long, value_name = "DIR")]
    pub kv_offload_dir: Option<PathBuf>,
    /// Type of cached keys and values: auto, f16, bf16 or f32 [default: auto, which on cuda is bf16 beside such
    /// weights, else f16]
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// Type that float weights are kept in: auto, f32, f16 or bf16 [default: auto, which is the file's own]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<String>,
    /// Turn a GGUF file's quantised weights into floats when loading: more memory, slower, for comparison [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub dequantize: Option<bool>,
    /// Lower the model's context to so many tokens [default: the model's own]
    #[arg(long, value_name = "TOKENS", value_parser = whole)]
    pub context: Option<usize>,
}

impl ModelArgs {
    /// Refuses settings that a command has no use for.
    ///
    /// # Errors
    /// The flag, and why.
    pub fn without(&self, names: &[&str], why: &str) -> Result<()> {
        let said = serde_json::to_value(self)?;
        match names.iter().find(|name| !said[**name].is_null()) {
            Some(name) => bail!("--{}: {why}", name.replace('_', "-")),
            None => Ok(()),
        }
    }
}

/// How the server meets its clients, each a setting.
#[derive(Debug, Clone, Default, Args, Serialize, Deserialize)]
pub struct ServerArgs {
    /// What requests may call the model, one or more names; the first stands in answers [default: the folder's or file's name]
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    #[serde(default, deserialize_with = "names_of")]
    pub served_model_name: Option<Vec<String>>,
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long)]
    pub host: Option<String>,
    /// Port; 0 takes a free one [default: 8080]
    #[arg(long)]
    pub port: Option<u16>,
    /// Requests that may wait; over it clients get a 503 [default: 256]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub queue: Option<usize>,
    /// Most work on prompts in one step, in tokens through all layers; over 512 only what takes 0.3 seconds [default: 8192]
    #[arg(long, value_name = "TOKENS", value_parser = whole)]
    pub chunk_tokens: Option<usize>,
    /// Most answers that are generated together [default: 64]
    #[arg(long, value_name = "N", value_parser = whole)]
    pub sequences: Option<usize>,
    /// How many times as long a step may take because of others' prompts [default: 2]
    #[arg(long, value_name = "TIMES")]
    pub stretch: Option<f64>,
    /// Tokens below which answers read all of them, where a request's decode method has no `dense_below` [default: 0]
    #[arg(long, value_name = "TOKENS", value_parser = whole)]
    pub dense_below: Option<usize>,
    /// Whether prompts that begin alike share what they begin with [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub prefix_cache: Option<bool>,
    /// Whose generation_config.json says how requests are sampled that do not say it, and how long answers are: auto (the
    /// model's), vllm (none), or a folder; true and false are auto and vllm [default: auto]
    #[arg(long, value_name = "auto|vllm|DIR", num_args = 0..=1, default_missing_value = "auto")]
    #[serde(default, deserialize_with = "text_of")]
    pub generation_config: Option<String>,
    /// Least `priority` of requests: those with less go before those with more [default: 0]
    #[arg(long, value_name = "N")]
    pub least_priority: Option<i64>,
    /// How long a request may take, waiting included, and the most of its `timeout`; then it ends with a 504 [default: no limit]
    #[arg(long, value_name = "SECONDS")]
    pub request_seconds: Option<u32>,
    /// How long a step may take before /health says that the server hangs [default: 300]
    #[arg(long, value_name = "SECONDS")]
    pub step_seconds: Option<u32>,
    /// Largest request body [default: 16]
    #[arg(long, value_name = "MIB", value_parser = whole)]
    pub body_mib: Option<usize>,
    /// How long a client may take to send a request's body [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub body_seconds: Option<u32>,
    /// How long a client may take nothing of what waits to be sent to it [default: 60]
    #[arg(long, value_name = "SECONDS")]
    pub write_seconds: Option<u32>,
    /// How long a client may take to send a request's head, and idle between two [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub header_seconds: Option<u32>,
    /// API keys in TOML, with their limits; the environment's TAPER_API_KEY is another one
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// Origins of web pages that may ask, with commas between them, or * for all [default: none]
    #[arg(long, value_name = "ORIGINS")]
    pub cors_origins: Option<String>,
    /// Certificate chain in PEM: the server then speaks HTTPS
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's private key in PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Collector that takes spans of requests, by OTLP over HTTP, such as http://localhost:4318/v1/traces; '' for none
    /// [default: OpenTelemetry's variables, of which OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME and more hold too]
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
    /// Format of the log [default: text]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub log: Option<LogFormat>,
}

/// Names in a list, or in a text with commas between them.
fn names_of<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "must be a name or a list of names")]
    enum Names {
        Text(String),
        List(Vec<String>),
    }
    Ok(Option::<Names>::deserialize(from)?.map(|names| match names {
        Names::Text(text) => text.split(',').map(str::to_owned).collect(),
        Names::List(list) => list,
    }))
}

/// A text, or a truth value, by its name.
fn text_of<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "must be auto, vllm, a folder, true or false")]
    enum Text {
        Bool(bool),
        Text(String),
    }
    Ok(Option::<Text>::deserialize(from)?.map(|text| match text {
        Text::Bool(is) => is.to_string(),
        Text::Text(text) => text,
    }))
}

/// How lines of the log are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

/// What comes before a setting's name in the environment.
const PREFIX: &str = "TAPER_";
/// Variables of that prefix that are no settings: a key, and the file of the settings.
pub(crate) const KEY: &str = "TAPER_API_KEY";
const CONFIG: &str = "TAPER_CONFIG";

/// Whether Kubernetes has set a variable, on behalf of a service whose name begins as ours.
fn of_kubernetes(variable: &str, text: &str) -> bool {
    let host = variable.ends_with("_SERVICE_HOST") || variable.contains("_SERVICE_PORT");
    let port = variable.split_once("_PORT_").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()));
    host || port || variable.ends_with("_PORT") && ["tcp://", "udp://", "sctp://"].iter().any(|p| text.starts_with(p))
}

/// All of them.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Settings {
    #[serde(flatten)]
    pub model: ModelArgs,
    #[serde(flatten)]
    pub server: ServerArgs,
}

/// Some settings by their names.
type Layer = Map<String, Value>;

impl Settings {
    /// Puts the layers together; `environment` is the process's.
    ///
    /// # Errors
    /// The file and line, or the variable, and what is wrong with it.
    pub fn read(args: ServeArgs, environment: impl Iterator<Item = (OsString, OsString)>) -> Result<Self> {
        let ServeArgs { model, server, config } = args;
        let environment: Vec<(OsString, OsString)> = environment.collect();
        let named = environment.iter().find(|(name, path)| name == CONFIG && !path.is_empty());
        let config = config.or_else(|| named.map(|(_, path)| path.into()));
        let collector = otlp::endpoint(&environment).map(|url| ("otlp_traces_endpoint".to_string(), url.into()));
        let environment = variables(environment.into_iter())?;
        let file = config.as_deref().map(file).transpose()?.unwrap_or_default();
        let mut all = layer(&Self::defaults())?;
        all.extend(collector);
        for over in [file, environment, layer(&Self { model, server })?] {
            all.extend(over);
        }
        Ok(serde_json::from_value(Value::Object(all))?)
    }

    /// What holds where nothing is said; none where that depends on machine and model.
    fn defaults() -> Self {
        let EngineConfig { queue, chunk_tokens, sequences, stretch } = EngineConfig::default();
        let server = ServerConfig::default();
        let seconds = |time: Duration| u32::try_from(time.as_secs()).ok();
        Self {
            model: ModelArgs {
                model: Some(taper_model::DEFAULT_MODEL.into()),
                device: Some("cpu".into()),
                kv_dtype: Some("auto".into()),
                dtype: Some("auto".into()),
                dequantize: Some(false),
                ..ModelArgs::default()
            },
            server: ServerArgs {
                host: Some("127.0.0.1".into()),
                port: Some(8080),
                queue: Some(queue),
                chunk_tokens: Some(chunk_tokens),
                sequences: Some(sequences),
                stretch: Some(stretch),
                dense_below: Some(0),
                prefix_cache: Some(true),
                generation_config: Some("auto".into()),
                step_seconds: seconds(server.step_timeout),
                body_mib: Some(server.body_bytes >> 20),
                body_seconds: seconds(server.body_timeout),
                write_seconds: seconds(server.write_timeout),
                least_priority: Some(server.least_priority),
                header_seconds: seconds(server.header_timeout),
                log: Some(Default::default()),
                ..ServerArgs::default()
            },
        }
    }

    /// As a file that would say the same.
    ///
    /// # Errors
    /// None that a setting could bring about.
    pub fn text(&self) -> Result<String> {
        Ok(toml::to_string(&Value::Object(layer(self)?))?)
    }
}

/// The settings that are said, by name.
fn layer(settings: &Settings) -> Result<Layer> {
    // Which JSON has no word for.
    if let Some(stretch) = settings.server.stretch.filter(|stretch| !stretch.is_finite()) {
        bail!("stretch is {stretch}; must be from 1 to 1000");
    }
    let Value::Object(map) = serde_json::to_value(settings)? else { bail!("settings are no map: a bug") };
    Ok(map.into_iter().filter(|(_, value)| !value.is_null()).collect())
}

/// The names of all settings.
fn names() -> Vec<String> {
    let all = serde_json::to_value(Settings::default()).unwrap_or_default();
    all.as_object().into_iter().flat_map(Map::keys).cloned().collect()
}

/// What an unknown name may have meant.
fn meant(name: &str) -> String {
    let names = names();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    nearest(name, &names).map_or(String::new(), |name| format!("; did you mean `{name}`?"))
}

/// The number of the line at a place in a text.
fn line(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// What is wrong with a file of TOML. Only the first line of its errors fits the one line that an error is; it says where.
pub fn wrong(name: &str, text: &str, error: &toml::de::Error) -> anyhow::Error {
    anyhow!("{name}:{}: {}", line(text, error.span().map_or(0, |span| span.start)), error.message())
}

fn file(path: &Path) -> Result<Layer> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).with_context(|| name.clone())?;
    let table: BTreeMap<Spanned<String>, toml::Value> = toml::from_str(&text).map_err(|e| wrong(&name, &text, &e))?;
    let (known, mut layer) = (names(), Layer::new());
    for (key, value) in table {
        let (line, key) = (line(&text, key.span().start), key.into_inner());
        if !known.contains(&key) {
            bail!("{name}:{line}: unknown setting `{key}`{}", meant(&key));
        }
        layer.extend(one(&key, serde_json::to_value(value)?).with_context(|| format!("{name}:{line}: {key}"))?);
    }
    Ok(layer)
}

/// Variables of our prefix with what they say, but for those that are about something else. One that is empty says nothing: so
/// compose files hand on what is not set.
fn ours(environment: impl Iterator<Item = (OsString, OsString)>) -> impl Iterator<Item = (String, String)> {
    environment
        .filter_map(|(variable, text)| Some((variable.into_string().ok()?, text.to_string_lossy().into_owned())))
        .filter(|(variable, text)| {
            variable.starts_with(PREFIX)
                && !text.is_empty()
                && ![KEY, CONFIG].contains(&variable.as_str())
                && !of_kubernetes(variable, text)
        })
}

/// Whether a variable of our prefix is somebody else's. What may have been meant for the server is not passed over.
fn strange(variable: &str) -> bool {
    let name = variable[PREFIX.len()..].to_lowercase();
    !variable.starts_with(KEY) && !names().contains(&name) && meant(&name).is_empty()
}

/// Variables of our prefix that say nothing to us, to be warned of.
pub fn unknown(environment: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    ours(environment).map(|(variable, _)| variable).filter(|variable| strange(variable)).collect()
}

fn variables(environment: impl Iterator<Item = (OsString, OsString)>) -> Result<Layer> {
    let (known, mut layer) = (names(), Layer::new());
    for (variable, text) in ours(environment).filter(|(variable, _)| !strange(variable)) {
        let name = variable[PREFIX.len()..].to_lowercase();
        if !known.contains(&name) {
            bail!("{variable}: no setting is called `{name}`{}", meant(&name));
        }
        // A word, or a number or a truth value as JSON writes them.
        let value = one(&name, Value::from(text.as_str())).or_else(|error| match serde_json::from_str(&text) {
            Ok(value) => one(&name, value),
            Err(_) => Err(error),
        });
        layer.extend(value.with_context(|| format!("{variable}: {text:?}"))?);
    }
    Ok(layer)
}

/// A layer of one setting, checked for its type.
fn one(name: &str, value: Value) -> Result<Layer> {
    let value = Value::Object([(name.to_string(), value)].into_iter().collect());
    let settings: Settings = serde_json::from_value(value).map_err(|error| anyhow!(in_words(&error.to_string())))?;
    let layer = layer(&settings)?;
    if layer.is_empty() {
        bail!("is no value of that setting");
    }
    Ok(layer)
}

/// What is wrong with a value, with what numbers may be in place of their types.
fn in_words(error: &str) -> String {
    let types = [
        ("u16", "a whole number from 0 to 65535"),
        ("u32", "a whole number from 0 to 4294967295"),
        ("usize", "a whole number of at least 0"),
        ("i64", "a whole number"),
        ("f64", "a number"),
    ];
    let words = types.iter().find_map(|(name, words)| Some(error.strip_suffix(name)?.to_owned() + words));
    words.unwrap_or_else(|| error.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn read(line: &[&str], environment: &[(&str, &str)]) -> Result<Settings> {
        let cli = Cli::try_parse_from(["taper", "serve"].iter().chain(line))?;
        let Command::Serve(serve) = cli.command else { panic!("another command") };
        Settings::read(*serve, environment.iter().map(|(name, text)| (name.into(), text.into())))
    }

    fn said(result: Result<Settings>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn what_commands_have_no_use_for_are_settings() {
        let lists = [
            &crate::eval::UNUSED[..],
            &crate::eval::heads::UNUSED,
            &crate::bench::methods::UNUSED,
            &crate::train::UNUSED,
        ];
        for names in lists {
            let settings = serde_json::to_value(ModelArgs::default()).unwrap();
            names.iter().for_each(|name| assert!(settings.get(name).is_some(), "{name}"));
        }
    }

    #[test]
    fn every_setting_is_a_flag_a_variable_and_a_key() {
        let command = ServeArgs::augment_args(clap::Command::new("serve"));
        let flags: Vec<String> =
            command.get_opts().filter_map(|arg| arg.get_long()).map(|long| long.replace('-', "_")).collect();
        let mut names = names();
        assert!(names.len() > 25, "{names:?}");
        for name in &names {
            assert!(flags.contains(name), "--{name}");
        }
        names.push("config".into());
        assert!(flags.iter().all(|flag| names.contains(flag)), "{flags:?}");
        // Each is read from the environment as from a file, whatever its type.
        let all = "model='m'\nchat_template='j'\nserved_model_name='n,o'\nattention='dense'\npresets='p'\nartifacts='a'\ndevice='cpu'\nthreads=2\nkv_memory='1GiB'\nkv_offload='2GiB'\nkv_offload_dir='d'\n\
                   kv_dtype='f32'\ndtype='f16'\ndequantize=true\ncontext=99\nhost='h'\nport=1\nqueue=2\nchunk_tokens=3\nsequences=4\nstretch=1.5\n\
                   dense_below=9\nprefix_cache=false\ngeneration_config=false\nrequest_seconds=5\nstep_seconds=9\nbody_mib=6\nbody_seconds=7\nwrite_seconds=6\nleast_priority=-2\nheader_seconds=8\napi_keys='k'\ncors_origins='*'\n\
                   tls_cert='c'\ntls_key='t'\notlp_traces_endpoint='http://c:4318/'\nlog='json'\n";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all.toml");
        std::fs::write(&path, all).unwrap();
        let by_file = read(&["--config", path.to_str().unwrap()], &[]).unwrap().text().unwrap();
        let pairs: Vec<(String, String)> = all
            .lines()
            .map(|line| line.trim().split_once('=').unwrap())
            .map(|(name, value)| (format!("TAPER_{}", name.to_uppercase()), value.trim_matches('\'').to_string()))
            .collect();
        assert_eq!(pairs.len(), names.len() - 1, "the text above says all of them");
        let pairs: Vec<(&str, &str)> = pairs.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        assert_eq!(read(&[], &pairs).unwrap().text().unwrap(), by_file);
        let flags: Vec<String> = pairs
            .iter()
            .flat_map(|(name, text)| [format!("--{}", name[6..].to_lowercase().replace('_', "-")), (*text).into()])
            .collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        assert_eq!(read(&flags, &[]).unwrap().text().unwrap(), by_file);
        // What is a word may be a truth value too.
        for (text, word) in [("'vllm'", "vllm"), ("true", "true"), ("'/a/folder'", "/a/folder")] {
            std::fs::write(&path, format!("generation_config={text}")).unwrap();
            let by_file = read(&["--config", path.to_str().unwrap()], &[]).unwrap();
            let by_variable = read(&[], &[("TAPER_GENERATION_CONFIG", word)]).unwrap();
            let by_flag = read(&["--generation-config", word], &[]).unwrap();
            for settings in [by_file, by_variable, by_flag] {
                assert_eq!(settings.server.generation_config.as_deref(), Some(word));
            }
        }
        // And what is printed can be read again.
        std::fs::write(&path, &by_file).unwrap();
        assert_eq!(read(&["--config", path.to_str().unwrap()], &[]).unwrap().text().unwrap(), by_file);
    }

    #[test]
    fn names_of_the_model_are_said_as_one_likes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("names.toml");
        std::fs::write(&path, "served_model_name = ['a', 'b']").unwrap();
        let flag = "--served-model-name";
        for (line, environment) in [
            (&[flag, "a,b"][..], &[][..]),
            (&[flag, "a", "b"], &[]),
            (&[flag, "a", flag, "b"], &[("TAPER_SERVED_MODEL_NAME", "c")]),
            (&[], &[("TAPER_SERVED_MODEL_NAME", "a,b")]),
            (&["--config", path.to_str().unwrap()], &[]),
        ] {
            let names = read(line, environment).unwrap().server.served_model_name.unwrap();
            assert_eq!(names, ["a", "b"], "{line:?} {environment:?}");
        }
        assert_eq!(read(&[], &[]).unwrap().server.served_model_name, None);
    }

    #[test]
    fn the_command_line_goes_before_the_environment_before_the_file_before_the_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.toml");
        std::fs::write(&path, "port = 1\nqueue = 1\nbody_mib = 1\n").unwrap();
        let file = ["--config", path.to_str().unwrap(), "--port", "3"];
        let settings =
            read(&file, &[("TAPER_PORT", "2"), ("TAPER_QUEUE", "2"), ("HOME", "/"), ("TAPER_API_KEY", "x")]).unwrap();
        let server = settings.server;
        assert_eq!(
            (server.port, server.queue, server.body_mib, server.stretch),
            (Some(3), Some(2), Some(1), Some(2.0))
        );
        assert_eq!(settings.model.model.as_deref(), Some("default"));
        assert_eq!(settings.model.threads, None);
        // The file may be named by the environment, too.
        let named = [("TAPER_CONFIG", path.to_str().unwrap())];
        assert_eq!(read(&[], &named).unwrap().server.queue, Some(1));
        assert!(
            said(read(&["--config", "nowhere.toml"], &named)).starts_with("nowhere.toml"),
            "the command line's goes first"
        );
    }

    #[test]
    fn an_empty_variable_is_one_that_is_not_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.toml");
        std::fs::write(&path, "kv_memory = '3GiB'\nport = 1\notlp_traces_endpoint = 'http://c:4318/'\n").unwrap();
        let others = ["config", "qeue", "something_else_entirely"].map(str::to_owned);
        let variables: Vec<String> =
            names().into_iter().chain(others).map(|name| format!("TAPER_{}", name.to_uppercase())).collect();
        let empty: Vec<(&str, &str)> = variables.iter().map(|variable| (variable.as_str(), "")).collect();
        for line in [&[][..], &["--config", path.to_str().unwrap()]] {
            assert_eq!(read(line, &empty).unwrap().text().unwrap(), read(line, &[]).unwrap().text().unwrap());
        }
        assert_eq!(unknown(empty.iter().map(|(name, text)| (name.into(), text.into()))), [""; 0]);
    }

    #[test]
    fn mistakes_name_the_variable_or_the_line() {
        assert_eq!(
            said(read(&[], &[("TAPER_PROT", "1")])),
            "TAPER_PROT: no setting is called `prot`; did you mean `port`?"
        );
        let says = "TAPER_PORT: \"99999\": invalid value: integer `99999`, expected a whole number from 0 to 65535";
        assert_eq!(said(read(&[], &[("TAPER_PORT", "99999")])), says);
        assert!(said(read(&[], &[("TAPER_PORT", "null")])).starts_with("TAPER_PORT: \"null\": "));
        assert!(said(read(&[], &[("TAPER_LOG", "xml")])).contains("json"));
        assert!(said(read(&[], &[("TAPER_API_KEY_FILE", "x")])).starts_with("TAPER_API_KEY_FILE: no setting"));
        let kubernetes = [
            ("TAPER_PORT", "tcp://10.0.0.1:80"),
            ("TAPER_PORT_80_TCP", "x"),
            ("TAPER_SERVICE_HOST", "10.0.0.1"),
            ("TAPER_METRICS_SERVICE_PORT_HTTP", "80"),
            ("TAPER_METRICS_PORT", "tcp://10.0.0.1:80"),
            ("TAPER_SOMETHING_ELSE_ENTIRELY", "1"),
        ];
        assert_eq!(read(&[], &kubernetes).unwrap().server.port, Some(8080));
        let others = unknown(kubernetes.iter().map(|(name, text)| (name.into(), text.into())));
        assert_eq!(others, ["TAPER_SOMETHING_ELSE_ENTIRELY"]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.toml");
        for (text, says) in [
            ("port = 1\nprot = 2\n", ":2: unknown setting `prot`; did you mean `port`?"),
            ("port = 1\n\n[atention]\n", ":3: unknown setting `atention`; did you mean `attention`?"),
            (
                "queue = 1\nport = 99999\n",
                ":2: port: invalid value: integer `99999`, expected a whole number from 0 to 65535",
            ),
            ("queue = 1\nkv_offload_dir = '/'\nkv_offload = 3\n", ":3: kv_offload: invalid type: integer `3`"),
            ("queue = 1\ndequantize = 'yes'\n", ":2: dequantize: invalid type"),
            ("stretch = 'x'\n", ":1: stretch: invalid type: string \"x\", expected a number"),
            ("stretch = nan\n", ":1: stretch: is no value of that setting"),
            ("queue = 1\nattention.decode = 'quest'\n[port]\nx = 1\n", ":3: port: invalid type: map"),
            ("queue = \n", ":1: "),
            ("queue = 1\nqueue = 2\n", ":2: duplicate key"),
        ] {
            std::fs::write(&path, text).unwrap();
            let said = said(read(&["--config", path.to_str().unwrap()], &[]));
            assert!(said.contains(says) && said.contains("bad.toml") && !said.contains('\n'), "{said}");
        }
    }
}
