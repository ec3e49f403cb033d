//! The bodies of a connection's requests and answers.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

use super::monitor::Monitor;

/// Largest body that may use the whole budget, in bytes: a long prompt.
const SMALL_BODY_BYTES: usize = 64 << 10;
/// Time for the rest of a body that is refused.
const DISCARD_TIME: Duration = Duration::from_secs(1);

/// Why a request's body cannot be read; handlers find it with [`RequestBodyError::find`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestBodyError {
    /// It did not arrive within `limits.body_ms`.
    #[error("the request's body did not arrive in time")]
    Slow,
    /// As many bytes of other bodies are arriving as `limits.max_body_bytes_in_flight` allows.
    #[error("too many bytes of requests are arriving; try again later")]
    NoRoom,
    /// The connection broke, or the body's form is wrong.
    #[error("the request's body broke off: {0}")]
    Broken(hyper::Error),
}

/// Bytes of the bodies that arrive at one listener.
#[derive(Debug)]
pub(super) struct BodyBudget {
    limit: usize,
    used: AtomicUsize,
}

/// A request's body, with its deadline and its share of the budget.
#[derive(Debug)]
pub(super) struct RequestBody<B = Incoming> {
    inner: B,
    monitor: Arc<Monitor>,
    budget: Arc<BodyBudget>,
    deadline: Instant,
    /// Started when the body first has to wait.
    sleep: Option<Pin<Box<Sleep>>>,
    n_charged: usize,
    /// Whether there was no room: what follows can be discarded and is not kept.
    is_refused: bool,
}

/// An answer's body; tells the monitor when it ends.
#[derive(Debug)]
pub(super) struct AnswerBody {
    inner: axum::body::Body,
    monitor: Arc<Monitor>,
}

impl RequestBodyError {
    /// Finds this error among the sources of the one that reading a body gave.
    pub fn find<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref() {
                return Some(found);
            }
            next = error.source();
        }
        None
    }
}

/// Reads and forgets up to `max_bytes` of a body for a second, before a refusal: a client that is still sending reads
/// no answer, and loses it when the connection closes on what it sends.
pub async fn discard(body: &mut axum::body::Body, max_bytes: usize) {
    let reading = async {
        let mut n_bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            n_bytes += frame.data_ref().map_or(0, Bytes::len);
            if max_bytes < n_bytes {
                return;
            }
        }
    };
    // Either way the answer follows.
    let _ = tokio::time::timeout(DISCARD_TIME, reading).await;
}

// === impl BodyBudget ===

impl BodyBudget {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, used: AtomicUsize::new(0) }
    }

    /// Takes `n_more` bytes for a body that has taken `n_charged`.
    fn charge(&self, n_charged: usize, n_more: usize) -> bool {
        let is_small = n_charged.saturating_add(n_more) <= SMALL_BODY_BYTES;
        let limit = if is_small { self.limit } else { self.limit / 4 * 3 };
        // Relaxed: a count on its own.
        let used = self.used.fetch_add(n_more, Ordering::Relaxed);
        let fits = used.saturating_add(n_more) <= limit;
        if !fits {
            self.used.fetch_sub(n_more, Ordering::Relaxed);
        }
        fits
    }

    fn release(&self, n_bytes: usize) {
        self.used.fetch_sub(n_bytes, Ordering::Relaxed);
    }
}

// === impl RequestBody ===

impl<B: Body<Data = Bytes, Error = hyper::Error> + Unpin> RequestBody<B> {
    pub(super) fn new(
        inner: B,
        monitor: Arc<Monitor>,
        budget: Arc<BodyBudget>,
        start: Instant,
        max_time: Duration,
    ) -> Self {
        Self {
            inner,
            monitor,
            budget,
            deadline: start + max_time,
            sleep: None,
            n_charged: 0,
            is_refused: false,
        }
    }
}

impl<B: Body<Data = Bytes, Error = hyper::Error> + Unpin> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = RequestBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RequestBodyError>>> {
        let this = &mut *self;
        let frame = match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                let deadline = this.deadline;
                let sleep = this.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
                return sleep.as_mut().poll(context).map(|()| Some(Err(RequestBodyError::Slow)));
            }
        };
        let Some(frame) = frame else {
            this.monitor.end_body();
            return Poll::Ready(None);
        };
        let frame = frame.map_err(RequestBodyError::Broken)?;
        let n_bytes = frame.data_ref().map_or(0, Bytes::len);
        if this.inner.is_end_stream() {
            // Nothing has to be waited for with it.
            this.monitor.end_body();
        } else if this.is_refused {
            // Read by `discard`.
        } else if this.budget.charge(this.n_charged, n_bytes) {
            this.n_charged += n_bytes;
        } else {
            this.is_refused = true;
            return Poll::Ready(Some(Err(RequestBodyError::NoRoom)));
        }
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<B> Drop for RequestBody<B> {
    fn drop(&mut self) {
        self.budget.release(self.n_charged);
        self.monitor.end_body();
    }
}

// === impl AnswerBody ===

impl AnswerBody {
    pub(super) fn new(inner: axum::body::Body, monitor: Arc<Monitor>) -> Self {
        Self { inner, monitor }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        self.monitor.end_answer();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_bodies_have_room_that_large_ones_cannot_take() {
        let budget = BodyBudget::new(1 << 20);
        assert!(budget.charge(0, 700 << 10));
        assert!(!budget.charge(700 << 10, 100 << 10), "a large body has three quarters");
        assert!(!budget.charge(0, 100 << 10));
        assert!(budget.charge(0, 64 << 10));
        assert!(budget.charge(0, 64 << 10));
        assert!(budget.charge(0, 64 << 10));
        assert!(budget.charge(0, 64 << 10));
        assert!(budget.charge(0, 64 << 10));
        assert!(!budget.charge(0, 64 << 10), "the whole budget is used");
        budget.release(700 << 10);
        assert!(budget.charge(0, 100 << 10));
    }

    #[test]
    fn a_fault_is_found_below_the_errors_that_wrap_it() {
        let wrapped = axum::Error::new(axum::Error::new(RequestBodyError::NoRoom));
        assert!(matches!(RequestBodyError::find(&wrapped), Some(RequestBodyError::NoRoom)));
        assert!(RequestBodyError::find(&std::io::Error::other("no")).is_none());
    }
}
