//! Connections to one worker, driven by the requests that use them.
//!
//! A connection is no task of its own. The request that has it polls it, first while it waits for
//! the answer's head, then as the answer's [`LinkedBody`]: an answer passes from socket to socket
//! within one poll of one task, all chunks that one read brings can go on together, and a client
//! that leaves takes the connection with it. One whose answer was read whole goes back and serves
//! the next request. It is not polled in between; whether the worker has closed it is found out
//! when it is taken.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::uri::Scheme;
use http::{HeaderValue, Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Time to establish a connection: far above any network between a gateway and its workers, far
/// below what a client waits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections kept.
const MAX_IDLE: usize = 256;
/// Time after which an idle connection is not used again.
const MAX_IDLE_TIME: Duration = Duration::from_mins(1);
/// Times that a connection is polled again because it moved on its own account. After that the
/// task lets others run, as it must once the runtime's budget for one poll is used up.
const MAX_TURNS: usize = 3;

/// The connections of one worker.
#[derive(Debug)]
pub(crate) struct Links {
    host: String,
    port: u16,
    /// What requests carry as `host`.
    pub(crate) host_header: HeaderValue,
    /// The one used last at the end, with the time since when it has been idle.
    idle: Mutex<Vec<(Box<Link>, Instant)>>,
}

/// The body of an answer, with the connection that it comes from.
#[derive(Debug)]
pub(crate) struct LinkedBody {
    body: Incoming,
    /// Gone once it is closed.
    link: Option<Box<Link>>,
    links: Arc<Links>,
    is_complete: bool,
}

#[derive(Debug)]
struct Link {
    sender: SendRequest<Full<Bytes>>,
    connection: Connection<TokioIo<TcpStream>, Full<Bytes>>,
    bell: Arc<Bell>,
    /// Rings the bell.
    waker: Waker,
}

/// Tells wakes that come from outside from those that a poll causes itself: both ends of the
/// connection's channels are polled by one task, and each step at one end wakes the other.
#[derive(Debug, Default)]
struct Bell {
    state: Mutex<BellState>,
}

#[derive(Debug, Default)]
struct BellState {
    is_polled: bool,
    has_rung: bool,
    /// Whom to wake.
    task: Option<Waker>,
}

/// What came of a request.
enum Sent {
    Answered(Response<Incoming>),
    /// The connection was closed before the request was written to it.
    Returned(Box<Request<Full<Bytes>>>),
}

// === impl Links ===

impl Links {
    /// The connections to the worker at `uri`; `None` if it is not reached by plain HTTP.
    pub(crate) fn new(uri: &Uri) -> Option<Self> {
        let authority = uri.authority().filter(|_| uri.scheme() == Some(&Scheme::HTTP))?;
        Some(Self {
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(80),
            host_header: HeaderValue::from_str(authority.as_str()).ok()?,
            idle: Mutex::default(),
        })
    }

    /// Sends a request, whose URI must be a path and which must have its `host`, and waits for the
    /// head of its answer. Dropping the future closes the connection.
    ///
    /// # Errors
    /// If there is no connection, or it breaks before the answer's head.
    pub(crate) async fn request(
        self: &Arc<Self>,
        request: Request<Full<Bytes>>,
    ) -> io::Result<Response<LinkedBody>> {
        let mut request = request;
        loop {
            let reused = self.take_idle();
            let is_reused = reused.is_some();
            let mut link = match reused {
                Some(link) => link,
                None => self.connect().await?,
            };
            match link.send(request).await? {
                Sent::Answered(response) => {
                    let links = Arc::clone(self);
                    return Ok(response.map(|body| LinkedBody {
                        body,
                        link: Some(link),
                        links,
                        is_complete: false,
                    }));
                }
                // The worker gave up an idle connection just now: the request has not been seen.
                Sent::Returned(returned) if is_reused => request = *returned,
                Sent::Returned(_) => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
    }

    /// Closes the connections that have been idle for long.
    pub(crate) fn close_idle(&self, now: Instant) {
        let mut idle = self.idle.lock();
        let n_old = idle.partition_point(|(_, since)| MAX_IDLE_TIME <= now.saturating_duration_since(*since));
        let old: Vec<_> = idle.drain(..n_old).collect();
        drop(idle);
        drop(old);
    }

    fn take_idle(&self) -> Option<Box<Link>> {
        loop {
            let (mut link, since) = self.idle.lock().pop()?;
            if since.elapsed() < MAX_IDLE_TIME && link.is_idle() {
                return Some(link);
            }
        }
    }

    fn give_back(&self, mut link: Box<Link>) {
        if link.is_idle() {
            let mut idle = self.idle.lock();
            if idle.len() < MAX_IDLE {
                idle.push((link, Instant::now()));
            }
        }
    }

    async fn connect(&self) -> io::Result<Box<Link>> {
        let connecting = TcpStream::connect((self.host.as_str(), self.port));
        let stream = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await??;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let bell = Arc::new(Bell::default());
        Ok(Box::new(Link { sender, connection, waker: Waker::from(Arc::clone(&bell)), bell }))
    }
}

// === impl Link ===

impl Link {
    /// Whether it can take a request.
    fn is_idle(&mut self) -> bool {
        // No task waits for it: that of its last request may be over.
        self.bell.state.lock().task = None;
        let mut context = Context::from_waker(&self.waker);
        Pin::new(&mut self.connection).poll(&mut context).is_pending() && self.sender.is_ready()
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> io::Result<Sent> {
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        let (connection, bell, waker) = (&mut self.connection, &*self.bell, &self.waker);
        let mut is_closed = false;
        let outcome = std::future::poll_fn(|context| {
            bell.poll(waker, context, |context| {
                is_closed = is_closed || Pin::new(&mut *connection).poll(context).is_ready();
                match answer.as_mut().poll(context) {
                    Poll::Pending if is_closed => Poll::Ready(None),
                    outcome => outcome.map(Some),
                }
            })
        })
        .await;
        match outcome {
            Some(Ok(response)) => Ok(Sent::Answered(response)),
            Some(Err(mut error)) => match error.take_message() {
                Some(request) => Ok(Sent::Returned(Box::new(request))),
                None => Err(io::Error::other(error.into_error())),
            },
            None => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

// === impl Bell ===

impl Bell {
    /// Polls with a context of `waker`, which must ring this bell, and polls again while that made
    /// it ring. The task of `context` is woken by every later ring.
    fn poll<T>(
        &self,
        waker: &Waker,
        context: &mut Context<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        for _ in 0..MAX_TURNS {
            {
                let mut state = self.state.lock();
                (state.is_polled, state.has_rung) = (true, false);
            }
            let outcome = poll(&mut Context::from_waker(waker));
            let mut state = self.state.lock();
            state.is_polled = false;
            if outcome.is_ready() {
                return outcome;
            }
            if !state.has_rung {
                if !state.task.as_ref().is_some_and(|task| task.will_wake(context.waker())) {
                    state.task = Some(context.waker().clone());
                }
                return Poll::Pending;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let task = {
            let mut state = self.state.lock();
            if state.is_polled {
                state.has_rung = true;
                return;
            }
            state.task.clone()
        };
        if let Some(task) = task {
            task.wake();
        }
    }
}

// === impl LinkedBody ===

impl Body for LinkedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        let mut body = Pin::new(&mut this.body);
        let mut is_closed = false;
        let outcome = match this.link.as_deref_mut() {
            None => body.poll_frame(context),
            Some(Link { connection, bell, waker, .. }) => bell.poll(waker, context, |context| {
                let outcome = body.as_mut().poll_frame(context);
                if outcome.is_ready() {
                    return outcome;
                }
                is_closed = is_closed || Pin::new(&mut *connection).poll(context).is_ready();
                body.as_mut().poll_frame(context)
            }),
        };
        if is_closed {
            this.link = None;
        }
        match outcome {
            // Without a link the rest cannot arrive.
            Poll::Pending if this.link.is_none() => {
                Poll::Ready(Some(Err(io::ErrorKind::ConnectionAborted.into())))
            }
            Poll::Ready(None) => {
                this.is_complete = true;
                Poll::Ready(None)
            }
            outcome => outcome.map_err(io::Error::other),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for LinkedBody {
    fn drop(&mut self) {
        if (self.is_complete || self.body.is_end_stream())
            && let Some(link) = self.link.take()
        {
            self.links.give_back(link);
        }
    }
}

#[cfg(test)]
mod tests;
