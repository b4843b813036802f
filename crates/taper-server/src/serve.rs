//! Listening, and stopping without losing a request.

use crate::app::{ServerConfig, router};
use crate::error::ApiError;
use crate::stalled::Patience;
use axum::Router;
use axum::http::{StatusCode, header};
use axum_server::accept::NoDelayAcceptor;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use axum_server::{Handle, Server};
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use taper_engine::Engine;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// How long clients may take to read the rest of finished answers once the server stops.
const FLUSH: Duration = Duration::from_secs(10);

/// The files of a certificate: its chain and its private key, both in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The chain, the server's own certificate first.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// A certificate in use.
#[derive(Clone)]
pub struct Certificate(RustlsConfig);

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Files that cannot be read, hold no certificate, or do not go together.
    pub async fn load(&self) -> std::io::Result<Certificate> {
        // Another one may be in place already, which does as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        self.read().await.map(|config| Certificate(RustlsConfig::from_config(config)))
    }

    async fn read(&self) -> std::io::Result<Arc<rustls::ServerConfig>> {
        let config = RustlsConfig::from_pem_file(&self.certificate, &self.key).await?;
        let mut config = (*config.get_inner()).clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl Certificate {
    /// Reads the files again, for connections from now on.
    ///
    /// # Errors
    /// As [`Tls::load`]; the certificate in use stays.
    pub async fn reload(&self, tls: &Tls) -> std::io::Result<()> {
        self.0.reload_from_config(tls.read().await?);
        Ok(())
    }
}

/// Answers whatever is asked that the model is still loading, until the [`Loading`] is ended, and gives the listener back for what
/// comes then: connections that nobody has taken by that time wait for it.
///
/// # Errors
/// The listener's.
pub fn answer_meanwhile(
    listener: TcpListener,
    certificate: Option<Certificate>,
    config: &ServerConfig,
) -> std::io::Result<(TcpListener, Loading)> {
    let listener = listener.into_std()?;
    let both = (TcpListener::from_std(listener.try_clone()?)?, TcpListener::from_std(listener)?);
    let handle = Handle::new();
    let limits = (config.header_timeout, config.write_timeout);
    let loading = || async {
        let message = "the model is still loading";
        let error = ApiError { retry_after: Some(1), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message) };
        // Who asks again is to ask the server itself.
        ([(header::CONNECTION, "close")], error)
    };
    let answers = answer(both.0, certificate, Router::new().fallback(loading), limits, handle.clone());
    Ok((both.1, Loading { handle, answers: tokio::spawn(answers) }))
}

/// What answers while the model loads.
pub struct Loading {
    handle: Handle<SocketAddr>,
    answers: JoinHandle<std::io::Result<()>>,
}

impl Loading {
    /// Ends it once what it has taken is answered.
    pub async fn end(self) {
        self.handle.graceful_shutdown(Some(FLUSH));
        if let Err(error) = self.answers.await.map_err(std::io::Error::from).and_then(|served| served) {
            tracing::warn!(%error, "answering while the model loaded");
        }
    }
}

/// Serves until `stop`, by HTTPS if there is a certificate, then drains: what was taken is finished and answered, new requests
/// get a 503, `/health` stays 200 as long as steps end; the socket closes when the engine is idle.
///
/// # Errors
/// The listener's.
pub async fn serve(
    listener: TcpListener,
    certificate: Option<Certificate>,
    engine: Arc<Engine>,
    mut config: ServerConfig,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let (header_timeout, limit) = (config.header_timeout, config.write_timeout);
    config.loopback = listener.local_addr()?.ip().to_canonical().is_loopback();
    let app = router(Arc::clone(&engine), config);
    let handle = Handle::new();
    let own = handle.clone();
    let drained = tokio::spawn(async move {
        stop.await;
        tracing::info!("draining: finishing what was taken");
        engine.drain();
        engine.idle().await;
        own.graceful_shutdown(Some(FLUSH));
    });
    let served = answer(listener, certificate, app, (header_timeout, limit), handle).await;
    // Where serving ended by itself nobody drains any more.
    drained.abort();
    served
}

/// Answers what comes until the handle says otherwise, giving clients so long to send a request's head, and to take what is sent.
async fn answer(
    listener: TcpListener,
    certificate: Option<Certificate>,
    app: Router,
    (header_timeout, limit): (Duration, Duration),
    handle: Handle<SocketAddr>,
) -> std::io::Result<()> {
    let app = app.into_make_service();
    // HTTP/1.1 alone: the limits of time hold for it, and a client that streams has a connection of its own.
    let mut server = Server::<SocketAddr>::from_listener(listener)
        .http1_only()
        .handle(handle)
        .first_request_timeout(header_timeout)
        .accept_error_handler(|from, error| match from {
            Some(from) => tracing::debug!(?from, %error, "a connection failed"),
            // Such as no file being left for it.
            None => tracing::warn!(%error, "a connection could not be taken"),
        });
    server.http_builder().http1().header_read_timeout(header_timeout);
    // A token is a small packet, and waits for no other.
    let plain = NoDelayAcceptor::new();
    match certificate {
        None => server.acceptor(Patience { inner: plain, limit }).serve(app).await,
        Some(Certificate(config)) => {
            let inner = RustlsAcceptor::new(config).handshake_timeout(header_timeout).acceptor(plain);
            server.acceptor(Patience { inner, limit }).serve(app).await
        }
    }
}
