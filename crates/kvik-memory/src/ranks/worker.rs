//! A rank's process: one thread that serves the leader over a socket.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::frame::{Body, Op, Reply, Request, Status};
use super::participant::{Answer, Identity, Participant};
use crate::pages::PageMapper;
use crate::socket::{Connection, FrameBuffer, Listener, SocketAddress, is_readable, wait_ready};
use crate::{MemoryError, Result};

/// How long the worker waits after it could not accept, so that a lack of descriptors costs no core.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// What a [`RankWorker`] serves, and where.
#[derive(Debug, Clone)]
pub struct RankWorkerOptions {
    /// This rank, from 0 on.
    pub rank: u32,
    /// How many ranks the group has.
    pub world: u32,
    /// The group of caches; a process with several regions has one worker for each.
    pub group: u32,
    /// Where to listen.
    pub address: SocketAddress,
}

/// Serves one rank's region to the leader of its group, on a thread of its own.
///
/// One leader is served at a time; others are refused while it is connected. When it goes, what it had
/// prepared and not committed is undone, and what was committed stays mapped. Dropping the worker ends
/// the connection and waits for the thread.
#[derive(Debug)]
pub struct RankWorker {
    listener: Arc<Listener>,
    thread: Option<JoinHandle<()>>,
}

/// The state of the serving thread.
struct Server {
    listener: Arc<Listener>,
    participant: Participant,
    /// Which life of the rank this is; never 0.
    instance: u64,
    leader: Option<Connection>,
    /// A connection without a greeting so far; the next one replaces it.
    candidate: Option<Connection>,
    buffer: FrameBuffer,
}

/// What was there to do on a connection.
enum Turn {
    /// Nothing yet.
    Idle,
    /// One frame was read.
    Served,
    /// The connection has ended, or must.
    Ended,
}

// === impl RankWorker ===

impl RankWorker {
    /// Listens, and serves `mapper` from then on.
    ///
    /// The mapper has nothing mapped and no other user. Fails with [`MemoryError::Rank`] where
    /// the address cannot be listened at, or is not safe from other users.
    pub fn start(options: &RankWorkerOptions, mapper: Arc<dyn PageMapper>) -> Result<Self> {
        let &RankWorkerOptions { rank, world, group, ref address } = options;
        let failed =
            |error: io::Error| MemoryError::Rank { rank, reason: format!("listen at {address}: {error}") };
        let listener = Arc::new(Listener::open(address).map_err(failed)?);
        let mut server = Server {
            listener: Arc::clone(&listener),
            participant: Participant::new(Identity { rank, world, group }, mapper),
            instance: new_life(),
            leader: None,
            candidate: None,
            buffer: FrameBuffer::new(),
        };
        let thread = thread::Builder::new()
            .name(format!("kvik-rank-{rank}"))
            .spawn(move || server.run())
            .map_err(failed)?;
        Ok(Self { listener, thread: Some(thread) })
    }
}

impl Drop for RankWorker {
    fn drop(&mut self) {
        self.listener.close();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a rank panicked");
        }
    }
}

// === impl Server ===

impl Server {
    fn run(&mut self) {
        while let Ok(true) = self.turn() {}
        self.participant.roll_back();
    }

    /// Waits for something to do and does it; `false` when the listener is closed.
    fn turn(&mut self) -> io::Result<bool> {
        let (is_closed, has_caller) = self.wait()?;
        if is_closed {
            return Ok(false);
        }
        let turn = self.serve_leader();
        if matches!(turn, Turn::Ended) {
            self.leader = None;
            self.participant.roll_back();
        }
        // A leader closes its old connection before it opens another, so the end of the old one is seen
        // before the greeting on the new one.
        if !matches!(turn, Turn::Served) && !matches!(self.serve_candidate(), Turn::Idle) {
            self.candidate = None;
        }
        if has_caller {
            self.accept();
        }
        Ok(true)
    }

    fn wait(&self) -> io::Result<(bool, bool)> {
        let mut descriptors = Vec::with_capacity(3);
        descriptors.push(PollFd::new(&*self.listener, PollFlags::IN));
        for connection in [&self.leader, &self.candidate].into_iter().flatten() {
            descriptors.push(PollFd::new(connection, PollFlags::IN));
        }
        wait_ready(&mut descriptors, None)?;
        let listener = &descriptors[0];
        Ok((listener.revents().contains(PollFlags::HUP), is_readable(listener)))
    }

    fn serve_leader(&mut self) -> Turn {
        let Some(leader) = &self.leader else {
            return Turn::Idle;
        };
        let request = match leader.receive(&mut self.buffer) {
            Ok(None) => return Turn::Idle,
            Ok(Some(frame)) => Request::decode(frame),
            Err(error) => {
                tracing::info!(%error, "the leader's connection ended");
                return Turn::Ended;
            }
        };
        let reply = match request {
            Ok(Request { body: Body::Hello(_), .. }) => {
                tracing::warn!("the leader said hello twice; its connection is closed");
                return Turn::Ended;
            }
            Ok(request) => self.participant.handle(&request, self.instance),
            Err(error) => {
                tracing::warn!(%error, "the leader sent no request; its connection is closed");
                return Turn::Ended;
            }
        };
        send_reply(leader, &reply)
    }

    /// Reads the greeting of a process that wants to be the leader; [`Turn::Idle`] is the only case in which it stays.
    fn serve_candidate(&mut self) -> Turn {
        let Some(candidate) = &self.candidate else {
            return Turn::Idle;
        };
        let request = match candidate.receive(&mut self.buffer) {
            Ok(None) => return Turn::Idle,
            Ok(Some(frame)) => Request::decode(frame),
            Err(_) => return Turn::Ended,
        };
        let reply = match &request {
            Ok(request) if request.op() != Op::Hello => {
                Answer::refused("the first request is a hello").into_reply(request, self.instance)
            }
            Ok(request) if self.leader.is_some() => {
                Answer::refused("another leader is connected").into_reply(request, self.instance)
            }
            Ok(request) => self.participant.handle(request, self.instance),
            Err(error) => refuse_unreadable(error, self.instance),
        };
        let turn = send_reply(candidate, &reply);
        if reply.status == Status::Done && matches!(turn, Turn::Served) {
            tracing::info!("a leader is connected");
            self.leader = self.candidate.take();
        } else {
            tracing::warn!(reason = reply.detail, "refused a leader");
        }
        turn
    }

    fn accept(&mut self) {
        match self.listener.accept() {
            Ok(None) => {}
            Ok(Some(connection)) => self.candidate = Some(connection),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                tracing::warn!(%error, "refused a connection");
            }
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                thread::park_timeout(ACCEPT_PAUSE);
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Also when the mapper panics: a leader must not wait for a thread that is gone.
        self.listener.close();
    }
}

/// A number that no other leader and no other life of a rank has; never 0.
pub(super) fn new_life() -> u64 {
    // Random keys are what the standard library seeds its maps with, from the kernel.
    RandomState::new().hash_one(std::process::id()).max(1)
}

/// What a caller gets that speaks another version; it is most likely to understand a hello's answer.
fn refuse_unreadable(error: &MemoryError, instance: u64) -> Reply {
    Reply {
        op: Op::Hello,
        transaction: 0,
        part: 0,
        instance,
        status: Status::Refused,
        extents: Vec::new(),
        whole: false,
        detail: error.to_string(),
    }
}

fn send_reply(connection: &Connection, reply: &Reply) -> Turn {
    match connection.send(&reply.encode()) {
        Ok(true) => Turn::Served,
        // A leader has one request at a time: a peer that does not read its answers is not a leader.
        Ok(false) => Turn::Ended,
        Err(error) => {
            tracing::info!(%error, "could not answer");
            Turn::Ended
        }
    }
}
