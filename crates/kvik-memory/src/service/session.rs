//! One client of the memory service: a member of the ledger for as long as its connection is open.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::frame::{DeviceStanding, Notice, Outcome, Reply, Request, RequestBody, Standing};
use crate::geometry::UNIT_BYTES;
use crate::ledger::{JoinOptions, Ledger, LimitStatus, Member};
use crate::pages::{Claim, Event, GrantEvents as _, Grants as _, Shortage, Usage};
use crate::socket::{Connection, FrameBuffer, is_readable, wait_ready};
use crate::{MemoryError, Result};

/// How long a connection may take to open its session.
const OPEN_WITHIN: Duration = Duration::from_secs(5);

/// How often a claim that waits is tried again, so that the ledger knows that it still waits, and a notice
/// that the client had no room for is sent again.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// The longest sleep of the thread that listens to the ledger.
const LISTEN_FOR: Duration = Duration::from_secs(1);

/// What sessions of one server share.
#[derive(Debug)]
pub(super) struct ServerState {
    pub(super) ledger: Ledger,
    /// The group of sessions that name none.
    pub(super) default_ipc_name: Option<String>,
    pub(super) is_stopping: AtomicBool,
}

/// A connection and what it holds.
struct Session<'a> {
    server: &'a ServerState,
    connection: &'a Connection,
    member: &'a Member,
    inbox: &'a Inbox,
    /// The claim that waits.
    waiting: Option<WaitingClaim>,
}

struct WaitingClaim {
    number: u32,
    n_bytes: u64,
    deadline: Instant,
    shortage: Shortage,
}

/// Notices of the ledger for a session, until its thread handles them.
#[derive(Debug)]
struct Inbox {
    /// Readable when there is something new.
    wakeup: OwnedFd,
    pending: Mutex<PendingNotices>,
    is_closed: AtomicBool,
}

#[derive(Debug, Default)]
struct PendingNotices {
    limit_changed: bool,
    reclaim_bytes: u64,
}

/// Serves `connection` to its end.
pub(super) fn serve(server: &ServerState, connection: &Connection) {
    match open(server, connection) {
        Ok(Some(member)) => {
            let label = format!("{} in slot {}", member.ipc_name(), member.slot());
            tracing::info!(session = label, "a session is open");
            let end = run(server, connection, &member);
            let n_bytes = member.held_bytes();
            // Its grants go back with it.
            drop(member);
            tracing::info!(session = label, n_bytes, reason = %end, "a session has ended");
        }
        Ok(None) => {}
        Err(error) => tracing::warn!(%error, "a connection ended before it opened a session"),
    }
}

/// Reads the first request and joins the ledger; `None` where it was refused.
fn open(server: &ServerState, connection: &Connection) -> io::Result<Option<Member>> {
    let mut buffer = FrameBuffer::new();
    let mut descriptors = [PollFd::new(connection, PollFlags::IN)];
    if !wait_ready(&mut descriptors, Some(Instant::now() + OPEN_WITHIN))? {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "no request to open a session"));
    }
    let Some(frame) = connection.receive(&mut buffer)? else { return Ok(None) };
    let (number, joined) = match Request::decode(frame) {
        Ok(Request { number, body: RequestBody::Open { ipc_name, label, policy } }) => {
            let ipc_name = match &server.default_ipc_name {
                Some(default) if ipc_name.is_empty() => default.clone(),
                _ => ipc_name,
            };
            (number, server.ledger.join(&JoinOptions { ipc_name, label, policy }))
        }
        Ok(Request { number, .. }) => {
            let first = MemoryError::Invalid {
                field: "request",
                value: "another".to_owned(),
                allowed: "the first request opens the session".to_owned(),
            };
            (number, Err(first))
        }
        Err(error) => (0, Err(error)),
    };
    let reply = match &joined {
        Ok(member) => Reply { number, outcome: Outcome::Opened, standing: standing(member) },
        Err(error) => {
            tracing::warn!(%error, "refused a session");
            let outcome = Outcome::Refused { op: 1, reason: error.to_string() };
            Reply { number, outcome, standing: Standing::default() }
        }
    };
    send(connection, &reply.encode())?;
    Ok(joined.ok())
}

/// Serves an open session; returns why it ended.
fn run(server: &ServerState, connection: &Connection, member: &Member) -> io::Error {
    let wakeup = match eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) {
        Ok(wakeup) => wakeup,
        Err(error) => return error.into(),
    };
    let inbox = Inbox { wakeup, pending: Mutex::default(), is_closed: AtomicBool::new(false) };
    thread::scope(|scope| {
        let listener = thread::Builder::new()
            .name("kvik-grants".to_owned())
            .spawn_scoped(scope, || inbox.listen(member));
        if let Err(error) = listener {
            return error;
        }
        let mut session = Session { server, connection, member, inbox: &inbox, waiting: None };
        let end = session.serve();
        inbox.is_closed.store(true, Ordering::SeqCst);
        member.interrupt();
        end
    })
}

// === impl Session ===

impl Session<'_> {
    fn serve(&mut self) -> io::Error {
        let mut buffer = FrameBuffer::new();
        loop {
            if let Err(error) = self.turn(&mut buffer) {
                return error;
            }
        }
    }

    /// Does what is due, waits for something to do, and reads one request.
    fn turn(&mut self, buffer: &mut FrameBuffer) -> io::Result<()> {
        self.try_waiting_claim()?;
        let has_news_left = !self.tell_news()?;
        let deadline = match &self.waiting {
            Some(claim) => Some(claim.deadline.min(Instant::now() + ASK_AGAIN_AFTER)),
            None if has_news_left => Some(Instant::now() + ASK_AGAIN_AFTER),
            None => None,
        };
        let mut descriptors =
            [PollFd::new(self.connection, PollFlags::IN), PollFd::new(&self.inbox.wakeup, PollFlags::IN)];
        wait_ready(&mut descriptors, deadline)?;
        if self.server.is_stopping.load(Ordering::SeqCst) {
            return Err(io::Error::other("the server stops"));
        }
        if is_readable(&descriptors[1]) {
            // It counts; only that it rang matters.
            let _ = rustix::io::read(&self.inbox.wakeup, &mut [0_u8; 8]);
        }
        if !is_readable(&descriptors[0]) {
            return Ok(());
        }
        let Some(frame) = self.connection.receive(buffer)? else { return Ok(()) };
        let unreadable = |error: MemoryError| io::Error::new(io::ErrorKind::InvalidData, error);
        let request = Request::decode(frame).map_err(unreadable)?;
        match self.answer(&request) {
            Ok(Some(outcome)) => self.reply(request.number, outcome),
            Ok(None) => Ok(()),
            Err(error) => {
                let outcome = Outcome::Refused { op: request.body.op(), reason: error.to_string() };
                self.reply(request.number, outcome)
            }
        }
    }

    /// Does what is asked; `None` where the answer comes later.
    fn answer(&mut self, request: &Request) -> Result<Option<Outcome>> {
        match &request.body {
            RequestBody::Open { .. } => {
                Err(invalid("request", "a second open", "one session on each connection"))
            }
            &RequestBody::Claim { n_bytes, timeout_ms } => self.claim(request.number, n_bytes, timeout_ms),
            &RequestBody::GiveBack { n_bytes } => {
                let held_bytes = self.member.held_bytes();
                if !n_bytes.is_multiple_of(UNIT_BYTES) || held_bytes < n_bytes {
                    let allowed = format!("a multiple of 2 MiB (2097152 bytes), up to {held_bytes}");
                    return Err(invalid("n_bytes", &n_bytes.to_string(), &allowed));
                }
                // Tools and shares must not see more in use than is held.
                self.publish(held_bytes - n_bytes);
                self.member.give_back(n_bytes);
                Ok(Some(Outcome::GivenBack))
            }
            RequestBody::Stats => {
                let snapshot = self.server.ledger.snapshot()?;
                let group = snapshot.groups.iter().find(|group| group.ipc_name == self.member.ipc_name());
                Ok(Some(Outcome::Stats(DeviceStanding {
                    budget_bytes: snapshot.budget_bytes,
                    held_bytes: snapshot.held_bytes,
                    group_held_bytes: group.map_or(0, |group| group.held_bytes),
                })))
            }
            &RequestBody::SetLimit { limit_bytes } => {
                let change = self.server.ledger.set_limit(self.member.ipc_name(), limit_bytes, None)?;
                match change.status {
                    LimitStatus::Applied | LimitStatus::Deferred => Ok(Some(Outcome::LimitSet)),
                    status => {
                        let value =
                            limit_bytes.map_or("none".to_owned(), |limit_bytes| limit_bytes.to_string());
                        let allowed = format!("the guaranteed minimum or more ({status:?})");
                        Err(invalid("limit_bytes", &value, &allowed))
                    }
                }
            }
        }
    }

    fn claim(&mut self, number: u32, n_bytes: u64, timeout_ms: u32) -> Result<Option<Outcome>> {
        if self.waiting.is_some() {
            return Err(invalid("request", "a second claim", "one claim at a time that waits"));
        }
        match self.member.claim(n_bytes)? {
            Claim::Granted => {
                self.publish(self.member.held_bytes());
                Ok(Some(Outcome::Granted))
            }
            Claim::Denied(shortage) if timeout_ms == 0 => {
                self.member.stop_waiting();
                Ok(Some(Outcome::Denied(shortage)))
            }
            Claim::Denied(shortage) => {
                let deadline = Instant::now() + Duration::from_millis(timeout_ms.into());
                self.waiting = Some(WaitingClaim { number, n_bytes, deadline, shortage });
                Ok(None)
            }
        }
    }

    fn try_waiting_claim(&mut self) -> io::Result<()> {
        let Some(waiting) = &mut self.waiting else { return Ok(()) };
        let number = waiting.number;
        let outcome = match self.member.claim(waiting.n_bytes) {
            Ok(Claim::Granted) => Outcome::Granted,
            Ok(Claim::Denied(shortage)) if Instant::now() < waiting.deadline => {
                waiting.shortage = shortage;
                return Ok(());
            }
            Ok(Claim::Denied(_)) => {
                self.member.stop_waiting();
                Outcome::Denied(waiting.shortage)
            }
            Err(error) => Outcome::Refused { op: 2, reason: error.to_string() },
        };
        self.waiting = None;
        self.publish(self.member.held_bytes());
        self.reply(number, outcome)
    }

    /// Tells the client what the ledger wants; `false` where it had no room for it.
    fn tell_news(&self) -> io::Result<bool> {
        let mut pending = self.inbox.pending.lock();
        if pending.limit_changed {
            let notice = Notice::Limit { limit_bytes: self.member.limit_bytes() };
            if !self.connection.send(&notice.encode())? {
                return Ok(false);
            }
            pending.limit_changed = false;
        }
        // What went back in the meantime need not be asked for.
        let n_bytes = pending.reclaim_bytes.min(self.member.held_bytes());
        if n_bytes > 0 && !self.connection.send(&Notice::Reclaim { n_bytes }.encode())? {
            return Ok(false);
        }
        pending.reclaim_bytes = 0;
        Ok(true)
    }

    /// All that a session holds is in use: what it parks, only its client knows.
    fn publish(&self, used_bytes: u64) {
        self.member.publish(Usage { used_bytes, parked_bytes: 0 });
    }

    fn reply(&self, number: u32, outcome: Outcome) -> io::Result<()> {
        let reply = Reply { number, outcome, standing: standing(self.member) };
        send(self.connection, &reply.encode())
    }
}

// === impl Inbox ===

impl Inbox {
    /// Takes the ledger's events until the session ends.
    fn listen(&self, member: &Member) {
        while !self.is_closed.load(Ordering::SeqCst) {
            match member.wait(LISTEN_FOR) {
                Event::Timeout => continue,
                Event::CapacityReturned => {}
                Event::LimitChanged => {
                    let excess_bytes = member.held_bytes().saturating_sub(member.claimable_bytes());
                    let mut pending = self.pending.lock();
                    pending.limit_changed = true;
                    pending.reclaim_bytes = pending.reclaim_bytes.max(excess_bytes);
                }
                Event::ReclaimRequested { n_bytes } => {
                    let mut pending = self.pending.lock();
                    pending.reclaim_bytes = pending.reclaim_bytes.max(n_bytes);
                }
            }
            // Any number rings; a wakeup that cannot be rung rings already.
            let _ = rustix::io::write(&self.wakeup, &1_u64.to_le_bytes());
        }
    }
}

fn standing(member: &Member) -> Standing {
    Standing {
        held_bytes: member.held_bytes(),
        claimable_bytes: member.claimable_bytes(),
        limit_bytes: member.limit_bytes(),
    }
}

/// Sends a reply; a client that has no room for it does not read and loses its session.
fn send(connection: &Connection, frame: &[u8]) -> io::Result<()> {
    if connection.send(frame)? {
        Ok(())
    } else {
        Err(io::Error::new(io::ErrorKind::WouldBlock, "the client does not read its answers"))
    }
}

fn invalid(field: &'static str, value: &str, allowed: &str) -> MemoryError {
    MemoryError::Invalid { field, value: value.to_owned(), allowed: allowed.to_owned() }
}
