//! Answers that hold something until they are sent, or nobody wants them any more.

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use http_body::{Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

/// An answer with what is dropped with it; `sent` is done to that once all of it was passed on.
pub(crate) fn holding<T: Send + Unpin + 'static>(response: Response, held: T, sent: fn(&mut T)) -> Response {
    response.map(|body| Body::new(Holding { body, held, sent }))
}

struct Holding<T> {
    body: Body,
    held: T,
    sent: fn(&mut T),
}

impl<T: Unpin> HttpBody for Holding<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        // Of a body whose length is known nobody asks for what comes after the last frame.
        if matches!(polled, Poll::Ready(None)) || matches!(polled, Poll::Ready(Some(Ok(_)))) && self.is_end_stream() {
            let sent = self.sent;
            sent(&mut self.held);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
