//! Listening, and stopping without losing a request.

use crate::app::{ServerConfig, router};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use taper_engine::Engine;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// How long clients may take to read the rest of finished answers once the server stops.
const FLUSH: Duration = Duration::from_secs(10);

/// Serves until `stop`, then drains: what was taken is finished and answered, new requests get a 503, `/health` stays
/// 200; the socket closes when the engine is idle.
///
/// # Errors
/// The listener's.
pub async fn serve(
    listener: TcpListener,
    engine: Arc<Engine>,
    config: ServerConfig,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let app = router(Arc::clone(&engine), config);
    let (idle, was_idle) = oneshot::channel();
    let drained = async move {
        stop.await;
        tracing::info!("draining: finishing what was taken");
        engine.drain();
        engine.idle().await;
        // Nobody listens only if serving has ended already.
        let _ = idle.send(());
    };
    let serving = axum::serve(listener, app).with_graceful_shutdown(drained);
    let stalled = async {
        match was_idle.await {
            Ok(()) => tokio::time::sleep(FLUSH).await,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        done = async { serving.await } => done,
        () = stalled => {
            tracing::warn!("some clients did not read their answers in time");
            Ok(())
        }
    }
}
