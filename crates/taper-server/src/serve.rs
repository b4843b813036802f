//! Listening, and stopping without losing a request.

use crate::app::{ServerConfig, router};
use crate::error::ApiError;
use crate::stalled::Patience;
use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum_server::accept::NoDelayAcceptor;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use axum_server::{Handle, Server};
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use taper_engine::Engine;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tower::ServiceExt;

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

/// A server that has its address, and answers whatever is asked that the model is still loading, until it is opened.
pub struct Listening {
    app: Arc<OnceLock<Router>>,
    answers: JoinHandle<std::io::Result<()>>,
    handle: Handle<SocketAddr>,
    loopback: bool,
}

impl Listening {
    /// Answers from now on, by HTTPS if there is a certificate; of `config` clients' limits of time are read.
    ///
    /// # Errors
    /// The listener's.
    pub fn start(
        listener: TcpListener,
        certificate: Option<Certificate>,
        config: &ServerConfig,
    ) -> std::io::Result<Self> {
        let loopback = listener.local_addr()?.ip().to_canonical().is_loopback();
        let (app, handle) = (Arc::<OnceLock<Router>>::default(), Handle::new());
        let opened = Arc::clone(&app);
        let door = Router::new().fallback(move |request: Request| {
            let app = opened.get().cloned();
            async move {
                match app {
                    Some(app) => app.oneshot(request).await.into_response(),
                    None => loading().into_response(),
                }
            }
        });
        let limits = (config.header_timeout, config.write_timeout);
        let answers = tokio::spawn(answer(listener, certificate, door, limits, handle.clone()));
        Ok(Self { app, answers, handle, loopback })
    }

    /// From now on requests are the engine's.
    pub fn open(&self, engine: Arc<Engine>, mut config: ServerConfig) {
        config.loopback = self.loopback;
        // Who opens twice has the first.
        let _ = self.app.set(router(engine, config));
    }

    /// Serves until `stop`, then drains: what was taken is finished and answered, new requests get a 503, `/health` stays 200 as
    /// long as steps end; the socket closes when the engine is idle.
    ///
    /// # Errors
    /// The listener's.
    pub async fn until(
        self,
        engine: Arc<Engine>,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> std::io::Result<()> {
        let handle = self.handle;
        let drained = tokio::spawn(async move {
            stop.await;
            engine.drain();
            engine.idle().await;
            handle.graceful_shutdown(Some(FLUSH));
        });
        let served = self.answers.await.map_err(std::io::Error::from).and_then(|served| served);
        // Where serving ended by itself nobody drains any more.
        drained.abort();
        served
    }
}

fn loading() -> ApiError {
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the model is still loading");
    ApiError { retry_after: Some(1), ..error }
}

/// Serves an engine that is there until `stop`: [`Listening::start`], [`open`](Listening::open) and [`until`](Listening::until).
///
/// # Errors
/// The listener's.
pub async fn serve(
    listener: TcpListener,
    certificate: Option<Certificate>,
    engine: Arc<Engine>,
    config: ServerConfig,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let listening = Listening::start(listener, certificate, &config)?;
    listening.open(Arc::clone(&engine), config);
    listening.until(engine, stop).await
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
