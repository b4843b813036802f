//! Connections whose clients read nothing are let go: what waits to be sent to them would otherwise be held for as long as they
//! like.

use axum_server::accept::Accept;
use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Accepts what another acceptor does, and lets go of those that take nothing for so long.
#[derive(Debug, Clone)]
pub(crate) struct Patience<A> {
    pub(crate) inner: A,
    pub(crate) limit: Duration,
}

impl<A, I, S> Accept<I, S> for Patience<A>
where
    A: Accept<I, S>,
    A::Future: Send + 'static,
{
    type Stream = Patient<A::Stream>;
    type Service = A::Service;
    type Future = Pin<Box<dyn Future<Output = Result<(Self::Stream, Self::Service)>> + Send>>;

    fn accept(&self, stream: I, service: S) -> Self::Future {
        let (accepted, limit) = (self.inner.accept(stream, service), self.limit);
        Box::pin(async move {
            let (stream, service) = accepted.await?;
            Ok((Patient { stream, limit, waits: None }, service))
        })
    }
}

/// A connection that fails where nothing of what is written gets through for so long.
#[derive(Debug)]
pub(crate) struct Patient<S> {
    stream: S,
    limit: Duration,
    /// Since nothing more got through.
    waits: Option<Pin<Box<Sleep>>>,
}

impl<S: Unpin> Patient<S> {
    fn poll<T>(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<Result<T>>,
    ) -> Poll<Result<T>> {
        let polled = write(Pin::new(&mut self.stream), context);
        if polled.is_ready() {
            self.waits = None;
            return polled;
        }
        let limit = self.limit;
        ready!(self.waits.get_or_insert_with(|| Box::pin(sleep(limit))).as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client reads nothing")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        self.poll(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        self.poll(context, |stream, context| stream.poll_write_vectored(context, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.poll(context, |stream, context| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        self.poll(context, |stream, context| stream.poll_shutdown(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    fn patient(room: usize, limit: Duration) -> (Patient<impl AsyncRead + AsyncWrite>, impl AsyncRead) {
        let (stream, other) = duplex(room);
        (Patient { stream, limit, waits: None }, other)
    }

    #[tokio::test]
    async fn a_reader_that_takes_nothing_is_let_go_after_the_limit_and_a_slow_one_is_not() {
        let (mut stream, _other) = patient(10, Duration::from_millis(50));
        let began = Instant::now();
        let error = stream.write_all(&[7; 11]).await.unwrap_err();
        assert!(error.kind() == ErrorKind::TimedOut && began.elapsed() >= Duration::from_millis(50));

        let (limit, began) = (Duration::from_secs(2), Instant::now());
        let (mut stream, mut other) = patient(10, limit);
        let reader = tokio::spawn(async move {
            let mut all = 0;
            while all < 50 {
                sleep(Duration::from_millis(700)).await;
                all += other.read(&mut [0; 10]).await.unwrap();
            }
            all
        });
        stream.write_all(&[7; 50]).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(reader.await.unwrap(), 50);
        assert!(began.elapsed() > limit, "longer than it may take nothing");
    }
}
