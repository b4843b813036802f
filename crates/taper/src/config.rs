//! The server's settings: a TOML file under the command line, checked once.

use crate::args::{ModelArgs, ServeArgs};
use crate::preset;
use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;
use taper_attention::{Artifacts, AttentionSpec};
use taper_engine::{CacheDType, CacheOptions, DeviceChoice, EngineConfig, Offload};
use taper_model::{DEFAULT_MODEL, LoadOptions, WeightDType};
use taper_server::{Keys, ServerConfig};

/// The file as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    model: Option<String>,
    host: Option<String>,
    port: Option<u16>,
    attention: Option<serde_json::Value>,
    queue: Option<usize>,
    chunk_tokens: Option<usize>,
    sequences: Option<usize>,
    stretch: Option<f64>,
    prefix_cache: Option<bool>,
    request_seconds: Option<u32>,
    body_mib: Option<usize>,
    device: Option<String>,
    threads: Option<u16>,
    kv_memory: Option<String>,
    kv_offload: Option<String>,
    kv_offload_dir: Option<PathBuf>,
    kv_dtype: Option<String>,
    dtype: Option<String>,
    dequantize: Option<bool>,
    context: Option<usize>,
    artifacts: Option<PathBuf>,
    api_keys: Option<PathBuf>,
}

/// The attention of requests that say nothing of it, as it was written: what it needs may be known only once the model
/// is loaded.
#[derive(Debug, Clone)]
pub enum Wanted {
    /// A preset's name, or JSON.
    Text(String),
    /// The object of a settings file.
    Object(serde_json::Value),
}

impl Wanted {
    /// The spec.
    ///
    /// # Errors
    /// The field at fault, or an artefact that is not there.
    pub fn resolve(&self, artifacts: &Artifacts) -> Result<AttentionSpec> {
        match self {
            Self::Text(text) => preset::read(text, artifacts),
            Self::Object(value) => preset::spec(value, artifacts),
        }
    }
}

/// What every command needs to load a model, checked.
#[derive(Debug)]
pub struct ModelConfig {
    pub model: String,
    pub attention: Option<Wanted>,
    /// Folder of what methods learned offline.
    pub artifacts: Option<PathBuf>,
    pub device: DeviceChoice,
    pub threads: Option<u16>,
    pub cache: CacheOptions,
    pub load: LoadOptions,
    pub engine: EngineConfig,
}

/// What `taper serve` needs, checked.
#[derive(Debug)]
pub struct ServeConfig {
    pub model: ModelConfig,
    pub host: String,
    pub port: u16,
    pub server: ServerConfig,
}

/// Checks the model's part of a command line.
///
/// # Errors
/// The argument at fault and what is valid.
pub fn model(args: ModelArgs) -> Result<ModelConfig> {
    check_model(args, &File::default())
}

/// Checks the command line of `taper serve` over its file.
///
/// # Errors
/// The file, the key or argument at fault, and what is valid.
pub fn serve(args: ServeArgs) -> Result<ServeConfig> {
    let file = args.config.as_deref().map(read).transpose()?.unwrap_or_default();
    let mut model = check_model(args.model, &file)?;
    let at_least_one = |name: &str, value: Option<usize>| match value {
        Some(0) => Err(anyhow!("{name} must be at least 1")),
        other => Ok(other),
    };
    if let Some(queue) = at_least_one("queue", file.queue)? {
        model.engine.queue = queue;
    }
    if let Some(tokens) = at_least_one("chunk_tokens", file.chunk_tokens)? {
        model.engine.chunk_tokens = tokens;
    }
    if let Some(sequences) = at_least_one("sequences", file.sequences)? {
        model.engine.sequences = sequences;
    }
    if let Some(stretch) = file.stretch {
        if !(1.0..=1000.0).contains(&stretch) {
            bail!("stretch is {stretch}; must be from 1 to 1000");
        }
        model.engine.stretch = stretch;
    }
    model.cache.prefix = !args.no_prefix_cache && file.prefix_cache.unwrap_or(true);
    let mut server = ServerConfig::default();
    if let Some(mib) = at_least_one("body_mib", file.body_mib)? {
        server.body_bytes = mib.saturating_mul(1 << 20);
    }
    if file.request_seconds == Some(0) {
        bail!("request_seconds must be at least 1");
    }
    server.keys = keys(args.api_keys.or(file.api_keys).as_deref(), std::env::var_os(KEY_VARIABLE))?.into();
    server.request_timeout = file.request_seconds.map(|seconds| Duration::from_secs(seconds.into()));
    // More prompts than may wait could never be taken together.
    server.prompts = server.prompts.min(model.engine.queue);
    Ok(ServeConfig {
        model,
        host: args.host.or(file.host).unwrap_or_else(|| "127.0.0.1".into()),
        port: args.port.or(file.port).unwrap_or(8080),
        server,
    })
}

/// The environment variable that holds a key of the server.
const KEY_VARIABLE: &str = "TAPER_API_KEY";

/// The keys of a file and of the environment.
fn keys(file: Option<&Path>, variable: Option<OsString>) -> Result<Keys> {
    let mut keys = match file {
        None => Keys::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            Keys::parse(&text).map_err(|e| anyhow!("{}: {e}", path.display()))?
        }
    };
    if file.is_some() && keys.is_empty() {
        bail!("{}: holds no keys", file.unwrap_or(Path::new("")).display());
    }
    if let Some(key) = variable {
        // What is no text holds no key, which must not let everyone in.
        keys.add(KEY_VARIABLE, &key.to_string_lossy()).map_err(|e| anyhow!("{e}"))?;
    }
    Ok(keys)
}

fn read(path: &Path) -> Result<File> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("{name}"))?;
    // Only the first line of TOML's errors fits the one line that an error is; it says where.
    toml::from_str(&text).map_err(|e| {
        let line = e.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        anyhow!("{name}:{line}: {}", e.message())
    })
}

fn check_model(args: ModelArgs, file: &File) -> Result<ModelConfig> {
    let artifacts = args.artifacts.or_else(|| file.artifacts.clone());
    let attention = match (args.attention, &file.attention) {
        (Some(text), _) => Some(Wanted::Text(text)),
        (None, Some(serde_json::Value::String(name))) => Some(Wanted::Text(name.clone())),
        (None, Some(value)) => Some(Wanted::Object(value.clone())),
        (None, None) => None,
    };
    // A mistake should be known before a large model has loaded, unless only its artefacts can tell.
    if let (Some(wanted), None) = (&attention, &artifacts) {
        wanted.resolve(&Artifacts::default()).context("attention")?;
    }
    let memory = args.kv_memory.or_else(|| file.kv_memory.clone());
    let offload = args.kv_offload.or_else(|| file.kv_offload.clone());
    let offload_dir = args.kv_offload_dir.or_else(|| file.kv_offload_dir.clone());
    let kv_dtype = args.kv_dtype.or_else(|| file.kv_dtype.clone());
    let dtype = args.dtype.or_else(|| file.dtype.clone());
    let device = args.device.or_else(|| file.device.clone());
    let device = device.as_deref().map_or(Ok(DeviceChoice::default()), self::device)?;
    let threads = args.threads.or(file.threads);
    if threads == Some(0) {
        bail!("threads must be at least 1");
    }
    Ok(ModelConfig {
        model: args.model.or_else(|| file.model.clone()).unwrap_or_else(|| DEFAULT_MODEL.into()),
        attention,
        artifacts,
        device,
        threads,
        cache: CacheOptions {
            bytes: memory.as_deref().map(size).transpose().context("kv memory")?,
            offload: self::offload(offload.as_deref(), offload_dir, device)?,
            dtype: kv_dtype.as_deref().map_or(Ok(CacheDType::default()), cache_dtype)?,
            prefix: false,
        },
        load: LoadOptions {
            dtype: dtype.as_deref().map_or(Ok(WeightDType::default()), weight_dtype)?,
            dequantize: args.dequantize || file.dequantize.unwrap_or(false),
            context_limit: args.context.or(file.context),
        },
        engine: EngineConfig::default(),
    })
}

/// Where the cache goes on beyond its memory: on the CPU in a file, else in the host's memory.
fn offload(bytes: Option<&str>, folder: Option<PathBuf>, device: DeviceChoice) -> Result<Option<Offload>> {
    let bytes = bytes.map(size).transpose().context("kv offload")?;
    Ok(match (bytes, folder, device) {
        (None, None, _) => None,
        (Some(bytes), Some(folder), DeviceChoice::Cpu) => Some(Offload::File { bytes, folder }),
        (Some(_), None, DeviceChoice::Cpu) => bail!("kv offload needs kv_offload_dir, the folder of the file"),
        (None, Some(_), DeviceChoice::Cpu) => bail!("kv_offload_dir needs kv offload, the size of the file"),
        (Some(bytes), None, DeviceChoice::Cuda(_)) => Some(Offload::Host { bytes }),
        (_, Some(_), DeviceChoice::Cuda(_)) => {
            bail!("kv_offload_dir goes with the device cpu; beside cuda what is offloaded lies in pinned host memory")
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

fn cache_dtype(name: &str) -> Result<CacheDType> {
    Ok(match name {
        "f16" => CacheDType::F16,
        "bf16" => CacheDType::BF16,
        "f32" => CacheDType::F32,
        other => bail!("kv dtype {other:?}: must be f16, bf16 or f32"),
    })
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
        unit => bail!("unknown unit {unit:?}; write for example 512MiB or 2GiB"),
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

    fn args(config: Option<&Path>) -> ServeArgs {
        ServeArgs {
            model: ModelArgs::default(),
            host: None,
            port: None,
            no_prefix_cache: false,
            api_keys: None,
            config: config.map(Into::into),
        }
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
            serve(args(Some(&path))).unwrap_or_else(|e| panic!("{}: {e:#}", path.display()));
            count += 1;
        }
        assert!(count > 0);
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let (_folder, path) = file("port = 1\nqueue = 3\n[attention.decode]\nmethod = 'vattention'\n");
        let config = serve(args(Some(&path))).unwrap();
        assert_eq!((config.port, config.model.engine.queue, config.server.prompts), (1, 3, 3));
        let attention = config.model.attention.unwrap().resolve(&Artifacts::default()).unwrap();
        assert_eq!(attention.names().1, "vattention");
        let config = serve(ServeArgs { port: Some(2), ..args(Some(&path)) }).unwrap();
        assert_eq!(config.port, 2);
    }

    #[test]
    fn the_engine_is_set_by_the_file() {
        let (_folder, path) = file("sequences = 3\nstretch = 1.5\nrequest_seconds = 9");
        let config = serve(args(Some(&path))).unwrap();
        assert_eq!((config.model.engine.sequences, config.model.engine.stretch), (3, 1.5));
        assert_eq!(config.server.request_timeout, Some(Duration::from_secs(9)));
        assert!(config.model.cache.prefix);
        assert!(!serve(ServeArgs { no_prefix_cache: true, ..args(Some(&path)) }).unwrap().model.cache.prefix);
        for (text, said) in [
            ("stretch = 0.5", "stretch is 0.5; must be from 1 to 1000"),
            ("sequences = 0", "sequences must be at least 1"),
            ("request_seconds = 0", "request_seconds must be at least 1"),
        ] {
            let (_folder, path) = file(text);
            assert_eq!(serve(args(Some(&path))).unwrap_err().to_string(), said);
        }
        let (_folder, path) = file("kv_offload = '3GiB'\nkv_offload_dir = '/tmp'");
        let model = ModelArgs { kv_offload: Some("5GiB".into()), ..ModelArgs::default() };
        let offload = serve(ServeArgs { model, ..args(Some(&path)) }).unwrap().model.cache.offload.unwrap();
        assert_eq!(offload, Offload::File { bytes: 5 << 30, folder: "/tmp".into() });
        let (_folder, path) = file("kv_offload = '3GiB'\ndevice = 'cuda'");
        let offload = serve(args(Some(&path))).unwrap().model.cache.offload.unwrap();
        assert_eq!(offload, Offload::Host { bytes: 3 << 30 });
        let (_folder, path) = file("prefix_cache = false");
        assert!(!serve(args(Some(&path))).unwrap().model.cache.prefix);
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
        // What names the file may stand in the settings, too.
        let (_folder, settings) = file("api_keys = '/does/not/exist'");
        assert!(format!("{:#}", serve(args(Some(&settings))).unwrap_err()).starts_with("/does/not/exist: "));
        assert!(!serve(ServeArgs { api_keys: Some(path), ..args(None) }).unwrap().server.keys.is_empty());
    }

    #[test]
    fn weights_are_loaded_as_file_or_command_line_say() {
        let loads = |model: ModelArgs, text: &str| {
            let (_folder, path) = file(text);
            serve(ServeArgs { model, ..args(Some(&path)) }).unwrap().model.load
        };
        let plain = loads(ModelArgs::default(), "");
        assert_eq!((plain.dtype, plain.dequantize), (WeightDType::Auto, false));
        let set = loads(ModelArgs::default(), "dtype = 'bf16'\ndequantize = true\n");
        assert_eq!((set.dtype, set.dequantize), (WeightDType::BF16, true));
        let line = ModelArgs { dtype: Some("f32".into()), dequantize: true, ..ModelArgs::default() };
        let both = loads(line, "dtype = 'bf16'\ndequantize = false\n");
        assert_eq!((both.dtype, both.dequantize), (WeightDType::F32, true));
    }

    #[test]
    fn mistakes_name_the_file_the_line_and_the_key() {
        for (text, says) in [
            ("port = 1\nprot = 2\n", ":2: unknown field `prot`"),
            ("port = 99999\n", ":1: "),
            ("attention = 'nope'\n", "no attention preset"),
            ("[attention.decode]\nmethod = 'nope'\n", "attention.decode.method"),
            ("kv_memory = '2 parsecs'\n", "unknown unit"),
            ("kv_offload = '2GiB'\n", "kv offload needs kv_offload_dir"),
            ("kv_offload_dir = '/tmp'\n", "kv_offload_dir needs kv offload"),
            ("kv_offload = '2GiB'\nkv_offload_dir = '/tmp'\ndevice = 'cuda:1'\n", "goes with the device cpu"),
            ("kv_offload = '2 parsecs'\nkv_offload_dir = '/tmp'\n", "kv offload: unknown unit"),
            ("kv_dtype = 'f8'\n", "must be f16"),
            ("dtype = 'int4'\n", "must be auto, f32"),
            ("device = 'gpu'\n", "must be cpu, cuda or cuda:N"),
            ("device = 'cuda:x'\n", "must be cpu, cuda or cuda:N"),
            ("dequantize = 'yes'\n", ":1: invalid type"),
            ("queue = 0\n", "queue must be"),
        ] {
            let (_folder, path) = file(text);
            let error = format!("{:#}", serve(args(Some(&path))).unwrap_err());
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        }
        assert!(serve(args(Some(Path::new("/does/not/exist")))).is_err());
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
