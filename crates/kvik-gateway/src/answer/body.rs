//! The body of an answer on its way to the client.
//!
//! Frames pass as they come, and only when the client takes them: a slow client slows its worker
//! down and costs no memory. Events that are there at the same time become one frame, so that a
//! burst is one write; nothing waits for more to come. The body owns the request's [`Record`]; when
//! the client goes away the body is dropped, and with it the connection to the worker. A body is not polled
//! while its client does not read: then the connection's own limits (`AnswerLimits`) end it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::answer::continuation::{Continuation, Continued};
use crate::answer::events::Events;
use crate::answer::record::{Ending, Record};
use crate::upstream::exchange::WorkerBody;

/// Bytes after which events that are there at the same time are not joined further.
const MAX_JOINED_BYTES: usize = 16 << 10;

/// Finds out where an answer goes on.
type Continuing = Pin<Box<dyn Future<Output = Continued> + Send>>;

/// An answer's body with everything that ends with it.
pub(crate) struct GuardedBody {
    inner: WorkerBody,
    record: Record,
    events: Option<Events>,
    /// Whole events that go on with the next frame.
    joined: Joined,
    clock: Clock,
    /// Ready when the worker is found not to answer at all.
    silence: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    /// What the answer goes on from elsewhere; `None` if it cannot.
    continuation: Option<Box<Continuation>>,
    /// While the answer is between two workers.
    continuing: Option<Continuing>,
    is_ended: bool,
}

/// Bytes in one piece; copied only if they come in several.
#[derive(Debug, Default)]
struct Joined {
    first: Bytes,
    /// All bytes, the first included, once there are more.
    all: BytesMut,
}

/// The times that a body has.
#[derive(Debug)]
pub(crate) struct Clock {
    deadline: Instant,
    max_silence: Duration,
    /// Started when the body first has to wait.
    sleep: Option<Pin<Box<Sleep>>>,
    /// Whom the sleep wakes.
    waker: Option<Waker>,
    n_frames: u64,
    /// Frames when the sleep was started: a clock is read only when it rings.
    n_frames_before: u64,
}

// === impl GuardedBody ===

impl GuardedBody {
    /// Guards `inner`; `events` for a stream of events, `continuation` for one that can go on elsewhere.
    pub(crate) fn new(
        inner: WorkerBody,
        record: Record,
        events: Option<Events>,
        clock: Clock,
        continuation: Option<Continuation>,
    ) -> Self {
        let silence = silence_of(&record);
        Self {
            inner,
            record,
            events,
            joined: Joined::default(),
            clock,
            silence,
            continuation: continuation.map(Box::new),
            continuing: None,
            is_ended: false,
        }
    }

    fn end(&mut self, ending: Ending) {
        self.is_ended = true;
        self.record.end(ending);
    }

    /// Whether the worker's answer may end here without being complete.
    fn is_cut_off(&self) -> bool {
        self.continuation.as_ref().is_some_and(|continuation| !continuation.journal.is_done())
    }

    fn is_silent(&mut self, context: &mut Context<'_>) -> bool {
        self.silence.as_mut().is_some_and(|silence| silence.as_mut().poll(context).is_ready())
    }

    fn complete(&mut self) -> Option<Bytes> {
        let Some(events) = &mut self.events else {
            self.end(Ending::Complete);
            return None;
        };
        let is_incomplete = match &self.continuation {
            Some(continuation) => !continuation.journal.is_done(),
            None => events.needs_done && !events.is_done(),
        };
        if is_incomplete {
            return self.fail(Ending::UpstreamBroke).ok();
        }
        let rest = events.finish();
        self.end(Ending::Complete);
        rest
    }

    /// Whether the answer goes on elsewhere after its worker has failed; it is not the client's end then.
    fn goes_on(&mut self) -> bool {
        let Some(load) = &self.record.load else { return false };
        let backend = Arc::clone(&load.backend);
        let replay = self.continuation.as_mut().and_then(|continuation| continuation.replay(&backend));
        let Some(replay) = replay else { return false };
        tracing::debug!(worker = %backend.id, "an answer goes on at another worker");
        self.record.note_failure();
        self.continuing = Some(Box::pin(replay));
        true
    }

    /// Reads the journal: what may pass, and whether the worker gives the request away.
    fn read_journal(&mut self, data: Bytes) -> Result<Bytes, ()> {
        let Some(continuation) = &mut self.continuation else { return Ok(data) };
        let passed = continuation.journal.pass(data).map_err(|error| {
            tracing::warn!(%error, "a worker's stream cannot be read");
        })?;
        let Some(load) = &self.record.load else { return Ok(passed) };
        load.backend.hear();
        if continuation.journal.take_draining() {
            continuation.ask_to_move(&load.backend);
        }
        if let Some(notice) = continuation.journal.take_notice()
            && let Some(following) = continuation.follow(notice, &load.backend)
        {
            self.continuing = Some(Box::pin(following));
        }
        Ok(passed)
    }

    /// Waits until the answer goes on; `None` when it does.
    fn poll_continuing(&mut self, context: &mut Context<'_>) -> Option<Poll<io::Result<Bytes>>> {
        let continuing = self.continuing.as_mut()?;
        let Poll::Ready(continued) = continuing.as_mut().poll(context) else {
            return match self.clock.poll_deadline(context) {
                Poll::Pending => Some(Poll::Pending),
                Poll::Ready(()) => Some(Poll::Ready(self.fail(Ending::DeadlinePassed))),
            };
        };
        self.continuing = None;
        self.clock.n_frames += 1;
        match continued {
            Continued::Elsewhere(body, load) => {
                // The other stream may have broken off within a line.
                if let Some(continuation) = &mut self.continuation {
                    continuation.journal.drop_held();
                }
                self.inner = body;
                self.record.go_on(load);
                self.silence = silence_of(&self.record);
                None
            }
            Continued::Here => None,
            Continued::Nowhere => Some(Poll::Ready(self.fail(Ending::UpstreamBroke))),
        }
    }

    /// Ends a body that cannot go on: with a last event, or by breaking the connection.
    fn fail(&mut self, ending: Ending) -> io::Result<Bytes> {
        self.end(ending);
        match &self.events {
            Some(events) => Ok(events.failure(ending)),
            None => Err(io::Error::new(io::ErrorKind::ConnectionAborted, ending.as_str())),
        }
    }
}

impl Body for GuardedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        if this.is_ended {
            return Poll::Ready(None);
        }
        loop {
            if this.continuing.is_some() {
                if !this.joined.is_empty() {
                    break;
                }
                match this.poll_continuing(context) {
                    None => {}
                    Some(Poll::Pending) => return Poll::Pending,
                    Some(Poll::Ready(last)) => return Poll::Ready(Some(last.map(Frame::data))),
                }
            }
            let data = match Pin::new(&mut this.inner).poll_frame(context) {
                Poll::Pending if !this.joined.is_empty() => break,
                Poll::Pending if this.is_silent(context) => {
                    if this.goes_on() {
                        continue;
                    }
                    return Poll::Ready(Some(this.fail(Ending::UpstreamSilent).map(Frame::data)));
                }
                Poll::Pending => match this.clock.poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ending::UpstreamSilent) if this.goes_on() => continue,
                    Poll::Ready(ending) => return Poll::Ready(Some(this.fail(ending).map(Frame::data))),
                },
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => data,
                    // Trailers belong to one connection.
                    Err(_) => continue,
                },
                Poll::Ready(Some(Err(_)) | None) if this.is_cut_off() && this.goes_on() => continue,
                Poll::Ready(Some(Err(_))) => match this.fail(Ending::UpstreamBroke) {
                    Ok(event) => {
                        this.joined.push(event);
                        break;
                    }
                    Err(error) => return Poll::Ready(Some(Err(error))),
                },
                Poll::Ready(None) => {
                    let rest = this.complete();
                    this.joined.push(rest.unwrap_or_default());
                    break;
                }
            };
            this.clock.n_frames += 1;
            let Ok(data) = this.read_journal(data) else {
                if this.goes_on() {
                    continue;
                }
                return Poll::Ready(Some(this.fail(Ending::UpstreamBroke).map(Frame::data)));
            };
            if data.is_empty() && this.continuation.is_some() {
                continue;
            }
            this.record.count(&data);
            let Some(events) = &mut this.events else {
                // The server does not ask for more once it has as many bytes as were announced.
                if this.inner.is_end_stream() {
                    this.end(Ending::Complete);
                }
                return Poll::Ready(Some(Ok(Frame::data(data))));
            };
            if let Some(whole) = events.pass(data) {
                this.joined.push(whole);
                if MAX_JOINED_BYTES <= this.joined.len() {
                    break;
                }
            }
        }
        let joined = this.joined.take();
        Poll::Ready((!joined.is_empty()).then(|| Ok(Frame::data(joined))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_ended
    }

    fn size_hint(&self) -> SizeHint {
        if self.events.is_none() { self.inner.size_hint() } else { SizeHint::default() }
    }
}

impl std::fmt::Debug for GuardedBody {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("GuardedBody").field("record", &self.record).finish_non_exhaustive()
    }
}

fn silence_of(record: &Record) -> Option<Pin<Box<WaitForCancellationFutureOwned>>> {
    record.load.as_ref().map(|load| Box::pin(load.silence.clone().cancelled_owned()))
}

impl Drop for GuardedBody {
    fn drop(&mut self) {
        if !self.is_ended && self.clock.deadline <= Instant::now() {
            self.record.end(Ending::DeadlinePassed);
        }
    }
}

// === impl Joined ===

impl Joined {
    fn push(&mut self, bytes: Bytes) {
        if self.is_empty() {
            self.first = bytes;
            return;
        }
        if self.all.is_empty() {
            self.all.reserve(MAX_JOINED_BYTES.max(self.first.len() + bytes.len()));
            self.all.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.all.extend_from_slice(&bytes);
    }

    fn take(&mut self) -> Bytes {
        if self.all.is_empty() { std::mem::take(&mut self.first) } else { self.all.split().freeze() }
    }

    fn len(&self) -> usize {
        self.first.len() + self.all.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

// === impl Clock ===

impl Clock {
    pub(crate) fn new(deadline: Instant, max_silence: Duration) -> Self {
        Self { deadline, max_silence, sleep: None, waker: None, n_frames: 0, n_frames_before: 0 }
    }

    /// Ready once the request's time is over, however silent it is.
    fn poll_deadline(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // Without a worker there is no silence to measure.
        self.n_frames += 1;
        match self.poll(context) {
            Poll::Ready(Ending::DeadlinePassed) => Poll::Ready(()),
            Poll::Ready(_) => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Ready with how the body ends once its time is over.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ending> {
        let Self { deadline, max_silence, .. } = *self;
        let start = || Box::pin(tokio::time::sleep_until(deadline.min(Instant::now() + max_silence)));
        let sleep = self.sleep.get_or_insert_with(start);
        // Polled at every frame, so neither the clock nor the timer is asked without need.
        let is_awaited = self.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        if is_awaited && !sleep.is_elapsed() {
            return Poll::Pending;
        }
        while sleep.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            if self.deadline <= now {
                return Poll::Ready(Ending::DeadlinePassed);
            }
            if self.n_frames == self.n_frames_before {
                return Poll::Ready(Ending::UpstreamSilent);
            }
            self.n_frames_before = self.n_frames;
            sleep.as_mut().reset(self.deadline.min(now + self.max_silence));
        }
        self.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_joined_in_their_order_and_one_piece_is_not_copied() {
        let mut joined = Joined::default();
        assert!(joined.is_empty() && joined.take().is_empty());
        for n_pieces in [1, 2, 5, 3000] {
            let piece = Bytes::from_static(b"data: 1234\n\n");
            for _ in 0..n_pieces {
                joined.push(piece.clone());
            }
            assert_eq!(joined.len(), n_pieces * piece.len());
            let all = joined.take();
            assert_eq!(all, piece.repeat(n_pieces));
            assert_eq!(all.as_ptr() == piece.as_ptr(), n_pieces == 1);
            assert!(joined.is_empty());
        }
    }
}
