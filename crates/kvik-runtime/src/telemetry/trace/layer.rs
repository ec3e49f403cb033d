//! The span of a request around its handler and its answer's body.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::Method;
use http_body::{Body as HttpBody, Frame, SizeHint};

use super::{Span, Tracer};

/// An answer's body with the span that ends with it.
struct TracedBody {
    body: Body,
    span: Span,
    is_ended: bool,
}

pub(super) async fn trace_request(State(tracer): State<Tracer>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    // Questions for health and metrics would be most of all spans, and say nothing.
    let Some(path) = path.filter(|_| request.method() == Method::POST) else {
        return next.run(request).await;
    };
    let mut span = tracer.request(request.headers(), || format!("POST {}", path.as_str()));
    span.set("http.request.method", "POST");
    span.set("http.route", path.as_str().to_owned());
    let serve = next.run(request);
    let response = match span.parent() {
        Some(parent) => parent.scope(serve).await,
        None => serve.await,
    };
    span.set("http.response.status_code", i64::from(response.status().as_u16()));
    if response.status().is_server_error() {
        span.fail("the service failed");
    }
    response.map(|body| Body::new(TracedBody { body, span, is_ended: false }))
}

impl HttpBody for TracedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(context);
        match &polled {
            Poll::Ready(None) => this.is_ended = true,
            Poll::Ready(Some(Err(_))) => {
                this.is_ended = true;
                this.span.fail("the answer broke off");
            }
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
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

impl Drop for TracedBody {
    fn drop(&mut self) {
        if !self.is_ended && !self.body.is_end_stream() {
            self.span.set("kvik.outcome", "client_left");
        }
    }
}
