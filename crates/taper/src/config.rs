//! Settings, checked: what loads a model, and what serves it.

use crate::otlp::Otlp;
use crate::preset::{self, Presets};
use crate::settings::{KEY, LogFormat, ModelArgs, Settings};
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;
use taper_attention::{Artifacts, AttentionSpec, DENSE_BELOW_MAX};
use taper_engine::{CacheDType, CacheOptions, DeviceChoice, EngineConfig, Offload};
use taper_model::{DEFAULT_MODEL, LoadOptions, Progress, WeightDType};
use taper_server::{Keys, Origins, ServerConfig, Tls};

/// The attention of requests that say nothing of it, as it was written: what it needs may be known only once the model
/// is loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AttentionSetting {
    /// A preset's or method's name, or JSON.
    Text(String),
    /// The object of a settings file.
    Object(serde_json::Value),
}

impl From<&str> for AttentionSetting {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl AttentionSetting {
    /// The spec.
    ///
    /// # Errors
    /// The field at fault, or an artefact that is not there.
    pub fn resolve(&self, presets: &Presets, artifacts: &Artifacts) -> Result<AttentionSpec> {
        match self {
            Self::Text(text) => presets.find(text, artifacts),
            Self::Object(value) => preset::spec(value, artifacts),
        }
    }
}

/// What every command needs to load a model, checked.
#[derive(Debug)]
pub struct ModelConfig {
    pub model: String,
    pub attention: Option<AttentionSetting>,
    /// What may be said of attention by a name.
    pub presets: Presets,
    /// Folder of what methods learned offline.
    pub artifacts: Option<PathBuf>,
    /// Contexts that decode methods read whole where nothing else is said.
    pub dense_below: usize,
    pub device: DeviceChoice,
    pub threads: Option<u16>,
    pub cache: CacheOptions,
    pub load: LoadOptions,
    pub engine: EngineConfig,
}

/// Whose `generation_config.json` says what requests leave out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Generation {
    /// The model's.
    Model,
    /// Nobody's.
    Plain,
    /// A folder's.
    Folder(PathBuf),
}

impl Generation {
    /// From vLLM's words, a truth value, or a folder.
    fn new(text: &str) -> Result<Self> {
        match text {
            "auto" | "true" => Ok(Self::Model),
            "vllm" | "false" => Ok(Self::Plain),
            folder if Path::new(folder).join("generation_config.json").is_file() => Ok(Self::Folder(folder.into())),
            other => {
                bail!("generation_config: {other:?} must be auto, vllm or a folder with a generation_config.json")
            }
        }
    }
}

/// What `taper serve` needs, checked.
#[derive(Debug)]
pub struct ServeConfig {
    pub model: ModelConfig,
    pub host: String,
    pub port: u16,
    pub log: LogFormat,
    pub keys: Keys,
    pub tls: Option<Tls>,
    /// The collector of spans, if there is one.
    pub otlp: Option<Otlp>,
    /// What says how requests are sampled that do not say it.
    pub generation: Generation,
    pub server: ServerConfig,
}

/// Checks the settings of `taper serve`.
///
/// # Errors
/// The setting at fault and what is valid.
pub fn serve(settings: Settings) -> Result<ServeConfig> {
    let Settings { model, server: args } = settings;
    let mut model = self::model(model)?;
    let at_least_one = |name: &str, value: Option<usize>| match value {
        Some(0) => Err(anyhow!("{name} is 0; must be at least 1")),
        other => Ok(other),
    };
    let engine = EngineConfig::default();
    let stretch = args.stretch.unwrap_or(engine.stretch);
    if !(1.0..=1000.0).contains(&stretch) {
        bail!("stretch is {stretch}; must be from 1 to 1000");
    }
    model.engine = EngineConfig {
        queue: at_least_one("queue", args.queue)?.unwrap_or(engine.queue),
        chunk_tokens: at_least_one("chunk_tokens", args.chunk_tokens)?.unwrap_or(engine.chunk_tokens),
        sequences: at_least_one("sequences", args.sequences)?.unwrap_or(engine.sequences),
        stretch,
    };
    model.dense_below = args.dense_below.unwrap_or(0);
    if model.dense_below > DENSE_BELOW_MAX {
        bail!("dense_below is {}; must be at most {DENSE_BELOW_MAX}", model.dense_below);
    }
    model.cache.prefix = args.prefix_cache.unwrap_or(true);
    let seconds = |name: &str, value: Option<u32>| match value {
        Some(0) => Err(anyhow!("{name} is 0; must be at least 1")),
        other => Ok(other.map(|seconds| Duration::from_secs(seconds.into()))),
    };
    let mut server = ServerConfig::default();
    if let Some(mib) = at_least_one("body_mib", args.body_mib)? {
        server.body_bytes = mib.saturating_mul(1 << 20);
    }
    server.names = model_names(args.served_model_name.unwrap_or_default())?;
    server.request_timeout = seconds("request_seconds", args.request_seconds)?;
    server.step_timeout = seconds("step_seconds", args.step_seconds)?.unwrap_or(server.step_timeout);
    server.body_timeout = seconds("body_seconds", args.body_seconds)?.unwrap_or(server.body_timeout);
    server.write_timeout = seconds("write_seconds", args.write_seconds)?.unwrap_or(server.write_timeout);
    server.least_priority = args.least_priority.unwrap_or(server.least_priority);
    server.header_timeout = seconds("header_seconds", args.header_seconds)?.unwrap_or(server.header_timeout);
    server.origins = args.cors_origins.as_deref().map_or(Ok(Origins::None), origins)?;
    let tls = match (args.tls_cert, args.tls_key) {
        (None, None) => None,
        (Some(certificate), Some(key)) => Some(Tls { certificate, key }),
        (Some(_), None) => bail!("tls_cert needs tls_key, the certificate's private key"),
        (None, Some(_)) => bail!("tls_key needs tls_cert, the key's certificate"),
    };
    // Where an empty one stands, it is there to take back what the environment says.
    let collector = args.otlp_traces_endpoint.filter(|url| !url.is_empty());
    let otlp = collector.map(|url| Otlp::new(&url, |name| std::env::var(name).ok())).transpose()?;
    // More prompts than may wait could never be taken together.
    server.prompts = server.prompts.min(model.engine.queue);
    Ok(ServeConfig {
        model,
        keys: keys(args.api_keys.as_deref(), std::env::var_os(KEY))?,
        host: args.host.unwrap_or_else(|| "127.0.0.1".into()),
        port: args.port.unwrap_or(8080),
        log: args.log.unwrap_or_default(),
        tls,
        otlp,
        generation: args.generation_config.as_deref().map_or(Ok(Generation::Model), Generation::new)?,
        server,
    })
}

/// Names of the model, each once.
fn model_names(given: Vec<String>) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    for name in given.iter().map(|name| name.trim()) {
        if name.is_empty() || name.contains(char::is_control) {
            bail!("served_model_name: {name:?} is no name; must be one or more, with commas between them");
        }
        if names.iter().all(|known| known != name) {
            names.push(name.into());
        }
    }
    Ok(names)
}

/// Origins of web pages, as a browser names them.
fn origins(text: &str) -> Result<Origins> {
    if text.trim() == "*" {
        return Ok(Origins::Any);
    }
    let each = text.split(',').map(str::trim).filter(|origin| !origin.is_empty());
    let sound = |origin: &str| {
        let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && !b"/*,".contains(&b));
        origin.split_once("://").is_some_and(|(scheme, host)| plain(scheme) && plain(host))
    };
    let each = each.map(|origin| match sound(origin) {
        // As browsers write it.
        true => Ok(origin.to_ascii_lowercase()),
        false => Err(anyhow!("cors_origins: {origin:?} is not like https://example.com, and not the only *")),
    });
    Ok(Origins::These(each.collect::<Result<_>>()?))
}

/// The keys of a file and of the environment.
fn keys(file: Option<&Path>, variable: Option<OsString>) -> Result<Keys> {
    let mut keys = match file {
        None => Keys::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| match path.components().count() {
                // It may be a key in the wrong place, and is not shown.
                1 => format!("api_keys: the file cannot be read; a key itself goes into {KEY}"),
                _ => path.display().to_string(),
            })?;
            Keys::parse(&text).map_err(|e| anyhow!("{}: {e}", path.display()))?
        }
    };
    if file.is_some() && keys.is_empty() {
        bail!("{}: holds no keys", file.unwrap_or(Path::new("")).display());
    }
    if let Some(key) = variable {
        // What is no text, or empty, holds no key, which must not let everyone in.
        keys.add(KEY, &key.to_string_lossy()).map_err(|e| anyhow!("{e}"))?;
    }
    Ok(keys)
}

/// Checks what every command needs to load a model.
///
/// # Errors
/// The setting at fault and what is valid.
pub fn model(args: ModelArgs) -> Result<ModelConfig> {
    let ModelArgs { attention, artifacts, threads, .. } = args;
    // A mistake should be known before a large model has loaded, unless only its artefacts can tell.
    let presets = Presets::read(args.presets.as_deref())?;
    match (&attention, &artifacts) {
        (Some(wanted), None) => drop(wanted.resolve(&presets, &Artifacts::default()).context("attention")?),
        (Some(AttentionSetting::Text(text)), Some(_)) => drop(presets.check(text).context("attention")?),
        _ => {}
    }
    if artifacts.is_none() {
        presets.specs(&Artifacts::default())?;
    }
    // What a name leads to is looked at when it is used; that it leads nowhere is known now.
    for (setting, folder) in [("artifacts", &artifacts), ("kv_offload_dir", &args.kv_offload_dir)] {
        if let Some(folder) = folder.as_deref().filter(|folder| !folder.is_dir()) {
            bail!("{setting}: {} is no folder", folder.display());
        }
    }
    if let Some(file) = args.chat_template.as_deref().filter(|file| !file.is_file()) {
        bail!("chat_template: {} is no file", file.display());
    }
    let model = args.model.unwrap_or_else(|| DEFAULT_MODEL.into());
    if model.trim().is_empty() {
        bail!("model: must be a name or a path");
    }
    if args.context == Some(0) {
        bail!("--context: 0 must be at least 1, and at most the model's own context");
    }
    let device = args.device.as_deref().map_or(Ok(DeviceChoice::default()), self::device)?;
    if threads == Some(0) {
        bail!("threads is 0; must be at least 1");
    }
    let kv_dtype = args.kv_dtype.as_deref().map_or(Ok(None), cache_dtype)?;
    if device != DeviceChoice::Cpu && kv_dtype == Some(CacheDType::F32) {
        bail!("--kv-dtype: f32 goes with the device cpu alone; cuda has kernels for f16 and bf16");
    }
    Ok(ModelConfig {
        model,
        attention,
        presets,
        artifacts,
        dense_below: 0,
        device,
        threads,
        cache: CacheOptions {
            bytes: args.kv_memory.as_deref().map(size).transpose().context("--kv-memory")?,
            offload: self::offload(args.kv_offload.as_deref(), args.kv_offload_dir, device)?,
            dtype: kv_dtype,
            prefix: false,
        },
        load: LoadOptions {
            dtype: args.dtype.as_deref().map_or(Ok(WeightDType::default()), weight_dtype)?,
            dequantize: args.dequantize.unwrap_or(false),
            context_limit: args.context,
            chat_template: args.chat_template,
            progress: Progress::Shown,
        },
        engine: EngineConfig::default(),
    })
}

/// Where the cache goes on beyond its memory: on the CPU in a file, else in the host's memory.
fn offload(bytes: Option<&str>, folder: Option<PathBuf>, device: DeviceChoice) -> Result<Option<Offload>> {
    let bytes = bytes.map(size).transpose().context("--kv-offload")?;
    Ok(match (bytes, folder, device) {
        (None, None, _) => None,
        (Some(bytes), Some(folder), DeviceChoice::Cpu) => Some(Offload::File { bytes, folder }),
        (Some(_), None, DeviceChoice::Cpu) => bail!("--kv-offload needs --kv-offload-dir, the folder of the file"),
        (None, Some(_), DeviceChoice::Cpu) => bail!("--kv-offload-dir needs --kv-offload, the size of the file"),
        (Some(bytes), None, DeviceChoice::Cuda(_)) => Some(Offload::Host { bytes }),
        (_, Some(_), DeviceChoice::Cuda(_)) => {
            bail!("--kv-offload-dir goes with the device cpu; beside cuda what is offloaded lies in pinned host memory")
        }
    })
}

/// A device by its name.
pub fn device(name: &str) -> Result<DeviceChoice> {
    let number = match name.split_once(':') {
        Some(("cuda", number)) => number.parse().ok(),
        None if name == "cuda" => Some(0),
        None if name == "cpu" => return Ok(DeviceChoice::Cpu),
        _ => None,
    };
    number.map(DeviceChoice::Cuda).with_context(|| format!("device {name:?}: must be cpu, cuda or cuda:N"))
}

fn cache_dtype(name: &str) -> Result<Option<CacheDType>> {
    Ok(Some(match name {
        "auto" => return Ok(None),
        "f16" => CacheDType::F16,
        "bf16" => CacheDType::BF16,
        "f32" => CacheDType::F32,
        other => bail!("--kv-dtype: {other:?} must be auto, f16, bf16 or f32"),
    }))
}

fn weight_dtype(name: &str) -> Result<WeightDType> {
    Ok(match name {
        "auto" => WeightDType::Auto,
        "f32" => WeightDType::F32,
        "f16" => WeightDType::F16,
        "bf16" => WeightDType::BF16,
        other => bail!("dtype {other:?}: must be auto, f32, f16 or bf16"),
    })
}

/// Bytes from `512MiB`, `2GiB`, `1.5G` or a plain number.
pub fn size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        unit => bail!("{text:?} has the unknown unit {unit:?}; write for example 512MiB or 2GiB"),
    };
    let number: f64 = digits.trim().parse().map_err(|_| anyhow!("{text:?} is no size; write for example 2GiB"))?;
    if !number.is_finite() || number <= 0.0 {
        bail!("{text:?} must be greater than 0");
    }
    Ok((number * unit as f64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{ServeArgs, ServerArgs};

    /// What comes of a file and a command line.
    fn read(config: Option<&Path>, model: ModelArgs, server: ServerArgs) -> Result<ServeConfig> {
        let args = ServeArgs { model, server, config: config.map(Into::into) };
        serve(Settings::read(args, std::iter::empty())?)
    }

    fn of_file(path: &Path) -> Result<ServeConfig> {
        read(Some(path), ModelArgs::default(), ServerArgs::default())
    }

    fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taper.toml");
        std::fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn the_example_and_every_other_server_file_load() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/server");
        let mut count = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            of_file(&path).unwrap_or_else(|e| panic!("{}: {e:#}", path.display()));
            count += 1;
        }
        assert!(count > 0);
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let (_folder, path) = file("port = 1\nqueue = 3\n[attention.decode]\nmethod = 'vattention'\n");
        let config = of_file(&path).unwrap();
        assert_eq!((config.port, config.model.engine.queue, config.server.prompts), (1, 3, 3));
        let attention = config.model.attention.unwrap().resolve(&config.model.presets, &Artifacts::default()).unwrap();
        assert_eq!(attention.names().1, "vattention");
        let config =
            read(Some(&path), ModelArgs::default(), ServerArgs { port: Some(2), ..ServerArgs::default() }).unwrap();
        assert_eq!(config.port, 2);
    }

    #[test]
    fn the_engine_is_set_by_the_file() {
        let (_folder, path) = file("sequences = 3\nstretch = 1.5\nrequest_seconds = 9\nstep_seconds = 8");
        let config = of_file(&path).unwrap();
        assert_eq!((config.model.engine.sequences, config.model.engine.stretch), (3, 1.5));
        assert_eq!(config.server.request_timeout, Some(Duration::from_secs(9)));
        assert_eq!(config.server.step_timeout, Duration::from_secs(8));
        assert!(config.model.cache.prefix);
        assert!(
            !read(Some(&path), ModelArgs::default(), ServerArgs { prefix_cache: Some(false), ..ServerArgs::default() })
                .unwrap()
                .model
                .cache
                .prefix
        );
        for (text, said) in [
            ("stretch = 0.5", "stretch is 0.5; must be from 1 to 1000"),
            ("sequences = 0", "sequences is 0; must be at least 1"),
            ("request_seconds = 0", "request_seconds is 0; must be at least 1"),
            ("step_seconds = 0", "step_seconds is 0; must be at least 1"),
        ] {
            let (_folder, path) = file(text);
            assert_eq!(of_file(&path).unwrap_err().to_string(), said);
        }
        let (_folder, path) = file("kv_offload = '3GiB'\nkv_offload_dir = '/tmp'");
        let model = ModelArgs { kv_offload: Some("5GiB".into()), ..ModelArgs::default() };
        let offload = read(Some(&path), model, ServerArgs::default()).unwrap().model.cache.offload.unwrap();
        assert_eq!(offload, Offload::File { bytes: 5 << 30, folder: "/tmp".into() });
        let (_folder, path) = file("kv_offload = '3GiB'\ndevice = 'cuda'");
        let offload = of_file(&path).unwrap().model.cache.offload.unwrap();
        assert_eq!(offload, Offload::Host { bytes: 3 << 30 });
        let (_folder, path) = file("prefix_cache = false");
        assert!(!of_file(&path).unwrap().model.cache.prefix);
    }

    #[test]
    fn what_requests_leave_out_is_the_models_nobodys_or_a_folders() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("generation_config.json"), "{}").unwrap();
        let name = folder.path().to_str().unwrap();
        for (text, generation) in [
            ("", Generation::Model),
            ("generation_config = true", Generation::Model),
            ("generation_config = 'auto'", Generation::Model),
            ("generation_config = false", Generation::Plain),
            ("generation_config = 'vllm'", Generation::Plain),
            (&format!("generation_config = '{name}'"), Generation::Folder(folder.path().into())),
        ] {
            let (_folder, path) = file(text);
            assert_eq!(of_file(&path).unwrap().generation, generation, "{text}");
        }
    }

    #[test]
    fn a_name_that_is_there_twice_counts_once() {
        let (_folder, path) = file("served_model_name = 'a, b,a'");
        assert_eq!(of_file(&path).unwrap().server.names, ["a", "b"]);
    }

    #[test]
    fn keys_come_from_a_file_and_the_environment() {
        let (_folder, path) = file("[[keys]]\nname = 'a'\nkey = 'secret'\n");
        assert!(keys(None, None).unwrap().is_empty());
        assert!(!keys(None, Some("k".into())).unwrap().is_empty());
        assert!(!keys(Some(&path), Some("k".into())).unwrap().is_empty());
        let said = |path: &Path, variable: Option<&str>| {
            format!("{:#}", keys(Some(path), variable.map(OsString::from)).unwrap_err())
        };
        assert_eq!(said(&path, Some("secret")), "TAPER_API_KEY: has the key of a");
        assert!(said(&path, Some("")).starts_with("TAPER_API_KEY: a key is at least one visible"));
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStringExt;
            assert!(keys(None, Some(OsString::from_vec(vec![255, 65]))).is_err());
        }
        let (_folder, empty) = file("keys = []");
        assert_eq!(said(&empty, None), format!("{}: holds no keys", empty.display()));
        let (_folder, wrong) = file("[[keys]]\nname = 3\n");
        assert!(said(&wrong, None).starts_with(&format!("{}: line 2: a value of another type", wrong.display())));
        // A key in the place of a file is not shown.
        let mistaken = said(Path::new("secret"), None);
        assert!(mistaken.starts_with("api_keys: the file cannot be read; a key itself"), "{mistaken}");
        assert!(!mistaken.contains("secret"), "{mistaken}");
        // What names the file may stand in the settings, too.
        let (_folder, settings) = file("api_keys = '/does/not/exist'");
        assert!(format!("{:#}", of_file(&settings).unwrap_err()).starts_with("/does/not/exist: "));
        assert!(
            !read(None, ModelArgs::default(), ServerArgs { api_keys: Some(path), ..ServerArgs::default() })
                .unwrap()
                .keys
                .is_empty()
        );
    }

    #[test]
    fn weights_are_loaded_as_file_or_command_line_say() {
        let loads = |model: ModelArgs, text: &str| {
            let (_folder, path) = file(text);
            read(Some(&path), model, ServerArgs::default()).unwrap().model.load
        };
        let plain = loads(ModelArgs::default(), "");
        assert_eq!((plain.dtype, plain.dequantize), (WeightDType::Auto, false));
        let set = loads(ModelArgs::default(), "dtype = 'bf16'\ndequantize = true\n");
        assert_eq!((set.dtype, set.dequantize), (WeightDType::BF16, true));
        let line = ModelArgs { dtype: Some("f32".into()), dequantize: Some(true), ..ModelArgs::default() };
        let both = loads(line, "dtype = 'bf16'\ndequantize = false\n");
        assert_eq!((both.dtype, both.dequantize), (WeightDType::F32, true));
    }

    #[test]
    fn mistakes_name_the_file_the_line_and_the_key() {
        for (text, says) in [
            ("port = 1\nprot = 2\n", ":2: unknown setting `prot`"),
            ("port = 99999\n", ":1: port: invalid value"),
            ("attention = 'nope'\n", "no attention preset"),
            ("[attention.decode]\nmethod = 'nope'\n", "attention.decode.method"),
            (
                "kv_memory = '2 parsecs'\n",
                "--kv-memory: \"2 parsecs\" has the unknown unit \"parsecs\"; write for example 512MiB",
            ),
            ("kv_offload = '2GiB'\n", "--kv-offload needs --kv-offload-dir"),
            ("kv_offload_dir = '/tmp'\n", "--kv-offload-dir needs --kv-offload"),
            ("kv_offload = '2GiB'\nkv_offload_dir = '/tmp'\ndevice = 'cuda:1'\n", "goes with the device cpu"),
            ("kv_offload = '2 parsecs'\nkv_offload_dir = '/tmp'\n", "--kv-offload: \"2 parsecs\" has the unknown unit"),
            ("kv_dtype = 'f8'\n", "--kv-dtype: \"f8\" must be auto, f16, bf16 or f32"),
            ("kv_dtype = 'f32'\ndevice = 'cuda'\n", "--kv-dtype: f32 goes with the device cpu alone"),
            ("dtype = 'int4'\n", "must be auto, f32"),
            ("device = 'gpu'\n", "must be cpu, cuda or cuda:N"),
            ("device = 'cuda:x'\n", "must be cpu, cuda or cuda:N"),
            ("dequantize = 'yes'\n", ":1: dequantize: invalid type"),
            ("queue = 0\n", "queue is 0; must be"),
            ("served_model_name = 'a,,b'\n", "served_model_name: \"\" is no name; must be one or more"),
            ("served_model_name = ['a', 3]\n", ":1: served_model_name: must be a name or a list of names"),
            (
                "generation_config = '/nowhere'\n",
                "generation_config: \"/nowhere\" must be auto, vllm or a folder with a generation_config.json",
            ),
            ("generation_config = 1\n", ":1: generation_config: must be auto, vllm, a folder, true or false"),
            ("header_seconds = 0\n", "header_seconds is 0; must be at least 1"),
            ("tls_cert = 'a.pem'\n", "tls_cert needs tls_key"),
            ("tls_key = 'a.pem'\n", "tls_key needs tls_cert"),
            ("cors_origins = 'example.com'\n", "\"example.com\" is not like https://example.com"),
            ("cors_origins = 'https://a.b, *'\n", "and not the only *"),
            (
                "otlp_traces_endpoint = 'grpc://localhost:4317'\n",
                "otlp_traces_endpoint must be like http://localhost:4318",
            ),
            ("log = 'xml'\n", ":1: log: unknown variant `xml`"),
        ] {
            let (_folder, path) = file(text);
            let error = format!("{:#}", of_file(&path).unwrap_err());
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        }
        assert!(of_file(Path::new("/does/not/exist")).is_err());
    }

    #[test]
    fn sizes() {
        for (text, bytes) in
            [("2GiB", 2 << 30), ("1.5g", 3 << 29), ("100", 100), ("3MB", 3_000_000), ("512 MiB", 512 << 20)]
        {
            assert_eq!(size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "GiB", "-1G", "0", "nanG"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
