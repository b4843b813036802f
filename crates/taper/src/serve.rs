//! `taper serve`.

use crate::args::ServeArgs;
use crate::config::{self, ServeConfig};
use crate::load::{self, Loaded};
use crate::talk;
use anyhow::{Context, Result};
use std::net::SocketAddr;
use std::sync::Arc;
use taper_engine::{Engine, of_them_offloaded};
use tokio::net::TcpListener;

/// Loads the model and serves until Ctrl-C or SIGTERM.
///
/// # Errors
/// Settings, model or address that cannot be used.
pub fn run(args: ServeArgs) -> Result<()> {
    let config = config::serve(args)?;
    let runtime = tokio::runtime::Runtime::new().context("starting the runtime")?;
    runtime.block_on(serve(config))
}

async fn serve(config: ServeConfig) -> Result<()> {
    // The address first: that it is taken should not be known only after a large model has loaded.
    let at = format!("{}:{}", config.host, config.port);
    let listener = TcpListener::bind((config.host.as_str(), config.port)).await.with_context(|| at)?;
    let address = listener.local_addr()?;
    let (model, mut server) = (config.model, config.server);
    let Loaded { engine, artifacts, attention } = tokio::task::spawn_blocking(move || load::engine(&model)).await??;
    let engine = Arc::new(engine);
    talk::print(&greeting(&engine, address, attention.names()))?;
    (server.attention, server.artifacts) = (attention, artifacts);
    if !address.ip().is_loopback() && server.keys.is_empty() {
        eprintln!("warning: anyone who reaches {address} may use this server: it asks for no key (--api-keys)");
    }
    taper_server::serve(listener, engine, server, stopped()).await.context("serving")
}

fn greeting(engine: &Engine, address: SocketAddr, (prefill, decode): (&str, &str)) -> String {
    let (id, limits) = (&engine.model().id, engine.limits());
    format!(
        r#"taper serves {id} at http://{address}
context {} tokens, KV cache {} tokens{} in {} MiB, attention {prefill} / {decode} unless a request says otherwise

curl http://{address}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}], "epsilon": 0.1}}'

"#,
        limits.context_tokens,
        limits.cache_tokens,
        of_them_offloaded(limits.offloaded_tokens),
        limits.cache_bytes >> 20
    )
}

/// Ends at the first Ctrl-C or SIGTERM; a second one ends the process at once.
async fn stopped() {
    signal().await;
    eprintln!("finishing what was taken; press Ctrl-C again to stop at once");
    tokio::spawn(async {
        signal().await;
        std::process::exit(130);
    });
}

#[cfg(unix)]
async fn signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        // Without a handler SIGTERM ends the process by itself; Ctrl-C still drains.
        let _ = tokio::signal::ctrl_c().await;
        return;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

#[cfg(not(unix))]
async fn signal() {
    // An error means that no signal can come: wait for none.
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}
