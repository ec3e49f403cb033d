//! A connection's socket, which notices clients that do not read.
//!
//! A server that writes to a client which does not read is not woken again, and with it nothing that the answer
//! holds. So the socket itself has the clock: a write that has been blocked too long fails, and the connection
//! ends as if the client had left.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::monitor::Monitor;

/// A stream with a limit on blocked writes.
#[derive(Debug)]
pub(super) struct LimitedStream<S> {
    inner: S,
    monitor: Arc<Monitor>,
    max_stall: Duration,
    /// Since when a write has been blocked.
    stalled_since: Option<Instant>,
    /// Started when a write is first blocked.
    sleep: Option<Pin<Box<Sleep>>>,
}

impl<S> LimitedStream<S> {
    pub(super) fn new(inner: S, monitor: Arc<Monitor>, max_stall: Duration) -> Self {
        Self { inner, monitor, max_stall, stalled_since: None, sleep: None }
    }

    fn judge_write(
        &mut self,
        context: &mut Context<'_>,
        outcome: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if outcome.is_ready() {
            if self.stalled_since.take().is_some() {
                self.monitor.set_stalled(false);
            }
            self.monitor.wrote();
            return outcome;
        }
        let now = Instant::now();
        let since = *self.stalled_since.get_or_insert_with(|| {
            self.monitor.set_stalled(true);
            now
        });
        let end = self.monitor.stall_ends(since, self.max_stall);
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(end)));
        if sleep.deadline() != end {
            sleep.as_mut().reset(end);
        }
        if now < end && sleep.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        super::count_closed("stall");
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LimitedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let n_before = buffer.filled().len();
        let outcome = Pin::new(&mut self.inner).poll_read(context, buffer);
        if n_before < buffer.filled().len() {
            self.monitor.hear();
        }
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LimitedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.judge_write(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.judge_write(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::limits::AnswerLimits;

    const SECOND: Duration = Duration::from_secs(1);

    /// A pipe whose other end holds one byte, and the stream before it.
    fn pipe(
        max_stall: Duration,
    ) -> (tokio::io::DuplexStream, LimitedStream<tokio::io::DuplexStream>, Arc<Monitor>) {
        let (reader, writer) = tokio::io::duplex(1);
        let monitor = Arc::new(Monitor::new(Instant::now()));
        (reader, LimitedStream::new(writer, Arc::clone(&monitor), max_stall), monitor)
    }

    async fn write(stream: &mut LimitedStream<tokio::io::DuplexStream>) -> io::Result<usize> {
        std::future::poll_fn(|context| Pin::new(&mut *stream).poll_write(context, b"x")).await
    }

    async fn read(stream: &mut tokio::io::DuplexStream) {
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        std::future::poll_fn(|context| Pin::new(&mut *stream).poll_read(context, &mut buffer)).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_fails_when_the_client_has_not_read_for_the_stall_limit() {
        let (_reader, mut stream, _) = pipe(SECOND);
        write(&mut stream).await.unwrap();
        let start = Instant::now();
        assert_eq!(write(&mut stream).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!((SECOND..SECOND * 2).contains(&start.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_that_goes_on_reading_is_not_cut_off() {
        let (mut reader, mut stream, monitor) = pipe(SECOND);
        write(&mut stream).await.unwrap();
        let reading = async {
            for _ in 0..20 {
                tokio::time::sleep(SECOND / 10 * 9).await;
                read(&mut reader).await;
            }
        };
        let writing = async {
            for _ in 0..20 {
                write(&mut stream).await.unwrap();
            }
        };
        tokio::join!(reading, writing);
        assert!(monitor.is_idle());
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_of_an_answer_ends_a_blocked_write_and_goes_with_the_answer() {
        let (_reader, mut stream, monitor) = pipe(SECOND * 100);
        write(&mut stream).await.unwrap();
        let start = Instant::now();
        monitor.begin_answer(AnswerLimits { deadline: start + SECOND * 3, max_stall: SECOND * 10 });
        assert!(write(&mut stream).await.is_err());
        assert!((SECOND * 3..SECOND * 4).contains(&start.elapsed()));
        monitor.begin_answer(AnswerLimits { deadline: start + SECOND * 50, max_stall: SECOND * 10 });
        assert!(write(&mut stream).await.is_err());
        assert!((SECOND * 10..SECOND * 11).contains(&start.elapsed()));
        monitor.end_answer();
        assert!(write(&mut stream).await.is_err());
        assert!((SECOND * 100..SECOND * 101).contains(&start.elapsed()));
    }
}
