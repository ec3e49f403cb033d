//! The stream of events that a page lives on.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName};
use http_body::Frame;
use kvik_runtime::http::AnswerLimits;
use kvik_runtime::shutdown::Shutdown;
use tokio::sync::watch;
use tokio::time::Instant;

use super::board::Shown;
use crate::answer::{WRONG_KEY, refuse};
use crate::error::Refusal;
use crate::state::Shared;

/// Longest life of a stream: then the page shows its credential again.
const MAX_LIFE: Duration = Duration::from_mins(10);
/// Longest time that a page may leave an event unread.
const MAX_STALL: Duration = Duration::from_secs(20);

/// What a stream waits with for its next event.
struct Stream {
    page: watch::Receiver<Shown>,
    shutdown: Shutdown,
    ends: Instant,
    /// The number of the first point that the page does not have.
    next_point: u64,
}

/// The next event with the stream behind it; none at the end.
type Next = Pin<Box<dyn Future<Output = Option<(Bytes, Stream)>> + Send>>;

/// A body that is made event by event. What a page does not read in time is left out: it gets the latest, not all.
struct EventBody(Option<Next>);

/// `GET /ui/events`.
///
/// Each event is an object with `fleet`, as of now, and `points`, those of the last hour that the stream has not sent yet.
pub(super) async fn events(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    if !shared.view().keys.admits(&shared.trust, &headers) {
        return refuse(Refusal::unauthorized(WRONG_KEY));
    }
    let Some(mut page) = shared.board.open() else { return refuse(Refusal::too_many_pages()) };
    if page.borrow().fleet.is_some() {
        // The last look is better than nothing until the next.
        page.mark_changed();
    }
    let ends = Instant::now() + MAX_LIFE;
    let stream = Stream { page, shutdown: shared.shutdown.clone(), ends, next_point: 0 };
    let headers = [
        (CONTENT_TYPE, "text/event-stream"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    let body = Body::new(EventBody(Some(Box::pin(stream.next()))));
    let mut response = (headers, body).into_response();
    response.extensions_mut().insert(AnswerLimits { deadline: ends + MAX_STALL, max_stall: MAX_STALL });
    response
}

impl Stream {
    async fn next(mut self) -> Option<(Bytes, Self)> {
        loop {
            tokio::select! {
                changed = self.page.changed() => changed.ok()?,
                () = self.shutdown.draining() => return None,
                () = tokio::time::sleep_until(self.ends) => return None,
            }
            let shown = self.page.borrow_and_update().clone();
            if let Some(fleet) = &shown.fleet {
                let event = self.event(fleet, &shown);
                return Some((event, self));
            }
        }
    }

    fn event(&mut self, fleet: &str, shown: &Shown) -> Bytes {
        let mut event = Vec::with_capacity(fleet.len() + 64);
        event.extend_from_slice(b"data: {\"fleet\":");
        event.extend_from_slice(fleet.as_bytes());
        event.extend_from_slice(b",\"points\":[");
        let new = shown.points.iter().filter(|(number, _)| self.next_point <= *number);
        for (place, (_, point)) in new.enumerate() {
            if 0 < place {
                event.push(b',');
            }
            event.extend_from_slice(point.as_bytes());
        }
        self.next_point = shown.points.last().map_or(self.next_point, |(number, _)| number + 1);
        event.extend_from_slice(b"]}\n\n");
        event.into()
    }
}

impl http_body::Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(next) = &mut self.0 else { return Poll::Ready(None) };
        let Poll::Ready(next) = next.as_mut().poll(context) else { return Poll::Pending };
        let (event, stream) = next.unzip();
        self.0 = stream.map(|stream| Box::pin(stream.next()) as Next);
        Poll::Ready(event.map(|event| Ok(Frame::data(event))))
    }
}
