//! `taper serve` and `taper config check`.

use crate::config::{self, Generation, ServeConfig};
use crate::load::{self, Loaded};
use crate::otlp::Otlp;
use crate::settings::{self, LogFormat, ServeArgs, Settings};
use crate::talk;
use anyhow::{Context, Result, anyhow, bail};
use std::io::Write;
use std::sync::Arc;
use taper_attention::Artifacts;
use taper_engine::{Engine, SamplingParams, of_them_offloaded};
use taper_model::{GenerationConfig, ModelError, ModelFiles, ResolvedModel};
use taper_server::{Certificate, Listening, Live, Tls};
use tokio::net::{TcpListener, TcpSocket};

/// Loads the model and serves until Ctrl-C or SIGTERM.
///
/// # Errors
/// Settings, model or address that cannot be used.
pub fn run(args: ServeArgs) -> Result<()> {
    let settings = Settings::read(args.clone(), std::env::vars_os())?;
    crate::log(settings.server.log.unwrap_or_default());
    let text = settings.text()?;
    let config = config::serve(settings)?;
    for variable in settings::unknown(std::env::vars_os()) {
        tracing::warn!("{variable} is no setting of the server");
    }
    let runtime = tokio::runtime::Runtime::new().context("starting the runtime")?;
    let served = runtime.block_on(serve(config, args, &text));
    // A model that still loads is not waited for.
    runtime.shutdown_background();
    served
}

/// Checks the settings and prints them.
///
/// # Errors
/// Settings that cannot be used.
pub fn check(args: ServeArgs) -> Result<()> {
    let settings = Settings::read(args, std::env::vars_os())?;
    let text = settings.text()?;
    let config = config::serve(settings)?;
    for variable in settings::unknown(std::env::vars_os()) {
        eprintln!("warning: {variable} is no setting of the server");
    }
    if let Some(tls) = &config.tls {
        tokio::runtime::Runtime::new()?.block_on(certificate(tls))?;
    }
    Ok(talk::print(&text)?)
}

/// Connections that may wait to be taken: as many as may well come at one moment.
const BACKLOG: u32 = 1024;

/// Listens at the first of a name's addresses that can be had.
async fn listen(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut error = None;
    for at in tokio::net::lookup_host((host, port)).await? {
        let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A server that was ended a moment ago is in nobody's way.
        socket.set_reuseaddr(true)?;
        match socket.bind(at).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(other) => error = Some(other),
        }
    }
    Err(error.unwrap_or_else(|| std::io::Error::other("the name has no address")))
}

async fn serve(config: ServeConfig, args: ServeArgs, text: &str) -> Result<()> {
    // Before the model loads: a signal that nobody waits for ends the process.
    let (asked, mut stops) = (hang_up(), Stops::new().context("listening to signals")?);
    // The address first: that it is taken should not be known only after a large model has loaded.
    let at = format!("{}:{}", config.host, config.port);
    let listener = listen(&config.host, config.port).await;
    let listener = listener.map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => anyhow!("{error}; --port names another, 0 any that is free"),
        _ => error.into(),
    });
    let listener = listener.with_context(|| at)?;
    let address = listener.local_addr()?;
    let ServeConfig { model, keys, tls, otlp, log, generation, mut server, .. } = config;
    let certificate = match tls {
        Some(tls) => Some((certificate(&tls).await?, tls)),
        None => None,
    };
    let listening = Listening::start(listener, certificate.as_ref().map(|(own, _)| own.clone()), &server)?;
    let exporter = otlp.map(Otlp::start).transpose()?;
    server.spans = exporter.as_ref().map(|exporter| exporter.spans(certificate.is_some()));
    let loading = tokio::task::spawn_blocking(move || {
        let found = load::find(&model)?;
        // A mistake in it should be known before a large model has loaded.
        let generation = by(generation, &found)?;
        anyhow::Ok((load::engine_of(&model, found)?, generation))
    });
    let (Loaded { engine, artifacts, attention, presets }, generation) = tokio::select! {
        loaded = loading => loaded??,
        () = stops.next() => bail!("stopped before the model was loaded"),
    };
    server.sampling = sampling(&generation);
    server.max_tokens = generation.max_new_tokens.and_then(|most| usize::try_from(most).ok());
    let engine = Arc::new(engine);
    let open = keys.is_empty();
    let names = if server.names.is_empty() { engine.model().id.clone() } else { server.names.join(", ") };
    let scheme = if certificate.is_some() { "https" } else { "http" };
    let methods = attention.names();
    (server.live, server.artifacts) = (Arc::new(Live::new(attention, presets, keys)), artifacts);
    tokio::spawn(reloaded(asked, args, Arc::clone(&server.live), Arc::clone(&server.artifacts), certificate));
    listening.open(Arc::clone(&engine), server);
    greet(&engine, &names, &format!("{scheme}://{address}"), open, methods, log);
    match log {
        LogFormat::Text => {
            let text = text.trim_end().replace('\n', "\n  ");
            // Whoever read it may be gone.
            let _ = writeln!(std::io::stderr(), "settings:\n  {text}");
        }
        LogFormat::Json => tracing::info!(settings = text, "settings"),
    }
    let said = said(&generation);
    if !said.is_empty() {
        tracing::info!("by generation_config.json, unless a request says otherwise: {said}");
    }
    if !address.ip().to_canonical().is_loopback() && open {
        tracing::warn!("anyone who reaches {address} may use this server: it asks for no key (--api-keys)");
    }
    let served = listening.until(engine, stops.stopped()).await.context("serving");
    if let Some(exporter) = exporter {
        exporter.stop().await;
    }
    served
}

/// What the file says that is to say it.
fn by(generation: Generation, model: &ResolvedModel) -> Result<GenerationConfig> {
    let read = match generation {
        Generation::Plain => return Ok(GenerationConfig::default()),
        Generation::Model => GenerationConfig::read(model),
        Generation::Folder(folder) => {
            let files = ModelFiles::Folder(folder);
            GenerationConfig::read(&ResolvedModel { name: String::new(), files })
        }
    };
    // A file that is no JSON at all the model cannot do without: it names tokens that end answers.
    let avoidable = |error: &ModelError| matches!(error, ModelError::Invalid { field, .. } if field != "file");
    read.map_err(|error| match avoidable(&error) {
        true => anyhow!(error).context("--generation-config vllm does without"),
        false => error.into(),
    })
}

/// What requests are sampled by that say nothing of it.
fn sampling(by: &GenerationConfig) -> SamplingParams {
    let plain = SamplingParams::default();
    let or = |said: Option<f64>, plain: f32| said.map_or(plain, |said| said as f32);
    SamplingParams {
        temperature: or(by.temperature, plain.temperature),
        top_k: by.top_k.and_then(|k| usize::try_from(k).ok()).filter(|&k| k > 0),
        top_p: or(by.top_p, plain.top_p),
        min_p: or(by.min_p, plain.min_p),
        repetition_penalty: or(by.repetition_penalty, plain.repetition_penalty),
        ..plain
    }
}

/// What a model's file says of sampling.
fn said(by: &GenerationConfig) -> String {
    let [top_k, most] = [by.top_k, by.max_new_tokens].map(|whole| whole.map(|whole| whole as f64));
    let all = [
        ("temperature", by.temperature),
        ("top_k", top_k),
        ("top_p", by.top_p),
        ("min_p", by.min_p),
        ("repetition_penalty", by.repetition_penalty),
        ("max_new_tokens", most),
    ];
    let said = all.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value?)));
    said.collect::<Vec<_>>().join(", ")
}

async fn certificate(tls: &Tls) -> Result<Certificate> {
    let name = || format!("{} with {}", tls.certificate.display(), tls.key.display());
    tls.load().await.with_context(name)
}

/// Says where the server is: to whoever started it, or to whoever reads its log.
fn greet(engine: &Engine, id: &str, url: &str, open: bool, (prefill, decode): (&str, &str), log: LogFormat) {
    let limits = engine.limits();
    let cache_mib = limits.cache_bytes >> 20;
    if log == LogFormat::Json {
        let (context, cache, offloaded) = (limits.context_tokens, limits.cache_tokens, limits.offloaded_tokens);
        tracing::info!(
            model = id,
            url,
            context_tokens = context,
            cache_tokens = cache,
            offloaded_tokens = offloaded,
            cache_mib,
            prefill,
            decode,
            "serving"
        );
        return;
    }
    let greeting = format!(
        "taper serves {id} at {url}
context {} tokens, KV cache {} tokens{} in {} MiB, attention {prefill} / {decode} unless a request says otherwise

{}

",
        limits.context_tokens,
        limits.cache_tokens,
        of_them_offloaded(limits.offloaded_tokens),
        cache_mib,
        example(url, open)
    );
    // Whoever read it may be gone.
    let _ = talk::print(&greeting);
}

/// A first request.
fn example(url: &str, open: bool) -> String {
    let key = if open { "" } else { " -H 'Authorization: Bearer KEY'" };
    format!(
        r#"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "epsilon": 0.1, "max_tokens": 64}}'"#
    )
}

/// Reads keys, default attention, presets and certificate again whenever SIGHUP asks for it. What cannot be used changes nothing.
async fn reloaded(
    asked: Option<HangUp>,
    args: ServeArgs,
    live: Arc<Live>,
    artifacts: Arc<Artifacts>,
    certificate: Option<(Certificate, Tls)>,
) {
    let Some(mut asked) = asked else { return };
    while asked.recv().await.is_some() {
        let again = || -> Result<_> {
            let config = config::serve(Settings::read(args.clone(), std::env::vars_os())?)?;
            if config.keys.is_empty() && !live.keys().is_empty() {
                bail!("there are no keys any more; to let everyone in, start the server anew");
            }
            if config.tls.as_ref() != certificate.as_ref().map(|(_, tls)| tls) {
                bail!("other files of a certificate need a new start");
            }
            Ok((load::attention(&config.model, &artifacts)?, config.keys))
        };
        // All is checked before anything changes.
        let renewed = match (again(), &certificate) {
            (Ok(new), Some((certificate, tls))) => {
                certificate.reload(tls).await.context("tls_cert, tls_key").map(|()| new)
            }
            (new, _) => new,
        };
        match renewed {
            Ok(((attention, presets), keys)) => {
                let (prefill, decode) = attention.names();
                live.set(attention.clone(), presets, keys);
                tracing::info!(
                    "keys, certificate, presets and attention ({prefill} / {decode}) read again; other settings need a new start"
                );
            }
            Err(error) => tracing::warn!("settings stay as they were: {}", talk::told(&error)),
        }
    }
}

#[cfg(unix)]
type HangUp = tokio::signal::unix::Signal;

#[cfg(unix)]
fn hang_up() -> Option<HangUp> {
    use tokio::signal::unix::{SignalKind, signal};
    signal(SignalKind::hangup()).ok()
}

/// Ctrl-C and SIGTERM, from when this is made: what comes while a model loads is not lost.
struct Stops {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Stops {
    #[cfg(unix)]
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    #[cfg(unix)]
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    #[cfg(not(unix))]
    fn new() -> std::io::Result<Self> {
        Ok(Self {})
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        // An error means that no signal can come: wait for none.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Ends at the first; a second one ends the process at once.
    async fn stopped(mut self) {
        self.next().await;
        tracing::info!("finishing what was taken; press Ctrl-C again to stop at once");
        tokio::spawn(async move {
            self.next().await;
            std::process::exit(130);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_start_from_what_a_models_file_says() {
        let of = |top_k| {
            let by = GenerationConfig { temperature: Some(0.0), top_k, min_p: Some(0.25), ..Default::default() };
            let SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, .. } = sampling(&by);
            assert_eq!((temperature, top_p, min_p, repetition_penalty), (0.0, 1.0, 0.25, 1.0));
            top_k
        };
        assert_eq!([None, Some(-1), Some(0), Some(20)].map(of), [None, None, None, Some(20)]);
        let all =
            GenerationConfig { top_k: Some(20), top_p: Some(0.9), max_new_tokens: Some(2048), ..Default::default() };
        assert_eq!(said(&all), "top_k 20, top_p 0.9, max_new_tokens 2048");
        assert_eq!(said(&GenerationConfig::default()), "");
    }

    #[test]
    fn a_file_that_can_be_done_without_is_said_to_be() {
        let folder = tempfile::tempdir().unwrap();
        let model = ResolvedModel { name: "m".into(), files: ModelFiles::Folder(folder.path().into()) };
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("generation_config.json"), r#"{"top_k": 7}"#).unwrap();
        for (text, without) in [(r#"{"temperature": 2.5}"#, true), (r#"{"top_k": "x"}"#, true), ("{", false)] {
            std::fs::write(folder.path().join("generation_config.json"), text).unwrap();
            let error = format!("{:#}", by(Generation::Model, &model).unwrap_err());
            assert_eq!(error.contains("--generation-config vllm"), without, "{error}");
            assert_eq!(by(Generation::Plain, &model).unwrap(), GenerationConfig::default());
            assert_eq!(by(Generation::Folder(other.path().into()), &model).unwrap().top_k, Some(7));
        }
    }

    #[test]
    fn the_example_has_a_key_where_one_is_wanted() {
        let said = |open| example("http://127.0.0.1:8080", open);
        assert!(said(true).starts_with("curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type"));
        assert_eq!(said(false).replace(" -H 'Authorization: Bearer KEY'", ""), said(true));
        assert_ne!(said(false), said(true));
    }
}
