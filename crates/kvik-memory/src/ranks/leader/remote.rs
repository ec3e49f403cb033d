//! One rank in another process, as its leader sees it.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::RankPeer;
use crate::ranks::frame::{Body, Greeting, Kind, Reply, Request, Status};
use crate::socket::{Connection, FrameBuffer, wait_ready};
use crate::{MemoryError, Result};

/// How long a rank that was lost may take to greet again.
///
/// A live worker answers in microseconds. One that is stopped or in a long call must not hold up
/// every transaction for the whole timeout.
const RESUME_TIMEOUT: Duration = Duration::from_secs(1);

/// How often a rank that has not started is tried.
const CONNECT_PAUSE: Duration = Duration::from_millis(5);

/// A rank's address, its connection while there is one, and how to get it back.
#[derive(Debug)]
pub(super) struct Remote {
    peer: RankPeer,
    group: u32,
    greeting: Greeting,
    connection: Option<Connection>,
    /// A map that this rank may have done and that was undone on the others.
    unresolved: Option<u64>,
}

impl Remote {
    /// Connects for the first time, waiting until `deadline` for a rank that does not listen yet.
    pub(super) fn connect(
        peer: RankPeer,
        world: u32,
        group: u32,
        generation: u64,
        deadline: Instant,
        buffer: &mut FrameBuffer,
    ) -> Result<Self> {
        let greeting =
            Greeting { generation, resumed_instance: 0, rank: peer.rank, world, geometry: peer.geometry };
        let mut remote = Self { peer, group, greeting, connection: None, unresolved: None };
        loop {
            match remote.open(deadline, buffer) {
                Ok(()) => return Ok(remote),
                Err(error) if is_transient(&error) && Instant::now() < deadline => {
                    thread::park_timeout(CONNECT_PAUSE);
                }
                Err(error) => {
                    return Err(MemoryError::Rank { rank: remote.rank(), reason: remote.reason(&error) });
                }
            }
        }
    }

    /// Connects again to the same life of the rank.
    ///
    /// Fails with the reason where the rank is gone, was started anew or has another leader.
    pub(super) fn resume(&mut self, deadline: Instant, buffer: &mut FrameBuffer) -> Result<(), String> {
        // The rank must see the end of the old connection before it sees a new one.
        self.connection = None;
        let deadline = deadline.min(Instant::now() + RESUME_TIMEOUT);
        self.open(deadline, buffer).map_err(|error| self.reason(&error))?;
        tracing::info!(rank = self.peer.rank, "connected to the rank again");
        Ok(())
    }

    pub(super) fn rank(&self) -> u32 {
        self.peer.rank
    }

    pub(super) fn connection(&self) -> Option<&Connection> {
        self.connection.as_ref()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    pub(super) fn disconnect(&mut self) {
        self.connection = None;
    }

    pub(super) fn set_unresolved(&mut self, transaction: u64) {
        self.unresolved = Some(transaction);
    }

    /// Whether a reply is to `request` and from this life of the rank.
    pub(super) fn is_answered_by(&self, request: &Request, reply: &Reply) -> bool {
        answers(request, reply) && reply.instance == self.greeting.resumed_instance
    }

    /// Connects, greets, and settles what was left open.
    fn open(&mut self, deadline: Instant, buffer: &mut FrameBuffer) -> io::Result<()> {
        let connection = Connection::open(&self.peer.address)?;
        let hello = Request { transaction: 0, group: self.group, body: Body::Hello(self.greeting) };
        let reply = ask(&connection, &hello, deadline, buffer)?;
        if reply.status != Status::Done {
            return Err(io::Error::other(reply.detail));
        }
        // The rank has checked the same; this is for a rank that does not.
        let known_instance = self.greeting.resumed_instance;
        if known_instance != 0 && known_instance != reply.instance {
            return Err(io::Error::other("the rank answered as another than it was"));
        }
        if let Some(transaction) = self.unresolved {
            let abort = Request { transaction, group: self.group, body: Body::Abort(Kind::Map) };
            ask(&connection, &abort, deadline, buffer)?;
            self.unresolved = None;
        }
        self.greeting.resumed_instance = reply.instance;
        self.connection = Some(connection);
        Ok(())
    }

    fn reason(&self, error: &io::Error) -> String {
        format!("connect to {}: {error}", self.peer.address)
    }
}

/// Sends one request on a new connection and waits for its reply.
fn ask(
    connection: &Connection,
    request: &Request,
    deadline: Instant,
    buffer: &mut FrameBuffer,
) -> io::Result<Reply> {
    if !connection.send(&request.encode())? {
        return Err(io::Error::other("the buffer of a new connection is full"));
    }
    loop {
        if let Some(frame) = connection.receive(buffer)? {
            let reply = Reply::decode(frame).map_err(io::Error::other)?;
            return if answers(request, &reply) {
                Ok(reply)
            } else {
                Err(io::Error::other("the rank answered something else"))
            };
        }
        let mut descriptors = [PollFd::new(connection, PollFlags::IN)];
        if !wait_ready(&mut descriptors, Some(deadline))? {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the rank did not answer in time"));
        }
    }
}

fn answers(request: &Request, reply: &Reply) -> bool {
    (reply.op, reply.transaction, reply.part) == (request.op(), request.transaction, request.part())
}

/// Whether an error can be that the rank is about to start, or that another caller came in between.
fn is_transient(error: &io::Error) -> bool {
    use io::ErrorKind::{
        BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof, WouldBlock,
    };
    matches!(
        error.kind(),
        NotFound | ConnectionRefused | WouldBlock | ConnectionReset | BrokenPipe | UnexpectedEof
    )
}
