//! The old daemon's side of a take-over: pause, let go, and wait until the other one serves.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_memory::socket::{Connection, FrameBuffer, Listener, wait_ready};
use kvik_store::{KeptMemory, Store};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::BorrowedFd;

use super::{RunningSession, Shared, reap, wait};
use crate::error::{NodeError, Result};
use crate::frame::refusal;
use crate::take_over::{ChunkList, TakeOver, TakeOverFrame, TenantOpener, TenantTerms};
use crate::tenant::{ClientToken, Tenant};

/// Time between two looks whether all sessions have ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Time for the other daemon to take a frame.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for a daemon that failed to take over to let go of the disks.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// What an arena can be smaller than its setting: the rest of a huge page.
const ROUNDING_BYTES: u64 = 2 << 20;

/// A daemon that may take over.
#[derive(Debug)]
pub(super) struct Successor {
    connection: Arc<Connection>,
}

/// A tenant that is not served.
struct Paused {
    name: String,
    token: Option<ClientToken>,
    store: PausedStore,
}

enum PausedStore {
    /// It could not be taken apart.
    Whole(Store),
    Memory(KeptMemory),
}

/// Answers a daemon that wants to take over: its terms are compared, and what waits for lower tiers is written, so that the
/// pause is short. The accepting thread does the rest.
///
/// # Errors
/// If the terms differ, this daemon cannot be taken over, or another daemon was first.
pub(super) fn ask(shared: &Shared, connection: &Arc<Connection>, frame: &[u8]) -> Result<()> {
    if shared.opener.is_none() {
        return Err(failed("this daemon cannot open its tiers again, so it does not let go of them"));
    }
    let TakeOver { tenants: terms } = TakeOver::decode(frame)?;
    check_terms(&shared.tenants.read(), &terms)?;
    let stores: Vec<Store> = shared.tenants.read().iter().map(|tenant| tenant.store.clone()).collect();
    for store in &stores {
        // What is not written by now is written in the pause.
        store.flush(shared.take_over_grace);
    }
    let mut successor = shared.successor.lock();
    if successor.is_some() {
        return Err(failed("another daemon takes over already"));
    }
    *successor = Some(Successor { connection: Arc::clone(connection) });
    Ok(())
}

/// Lets a daemon take over; says whether it serves now. If not, this one goes on as before.
pub(super) fn run(
    shared: &Shared,
    listener: &Listener,
    sessions: &mut Vec<RunningSession>,
    successor: &Successor,
) -> bool {
    let begin = Instant::now();
    let pid = successor.connection.peer_pid();
    tracing::info!(pid, n_sessions = sessions.len(), "pausing for a daemon that takes over");
    let deadline = begin + shared.take_over_grace;
    let outcome = pause(shared, sessions, successor, deadline).and_then(|()| {
        if let Some(opener) = &shared.opener {
            opener.pausing();
        }
        hand_on(shared, listener, successor, deadline)
    });
    match outcome {
        Ok(n_chunks) => {
            let pause_ms = begin.elapsed().as_millis() as u64;
            tracing::info!(pid, n_chunks, pause_ms, "another daemon has taken over");
            if let Some(opener) = &shared.opener {
                opener.taken_over();
            }
            true
        }
        Err(error) => {
            for session in &*sessions {
                session.control.set_moving(false);
            }
            if let Some(opener) = &shared.opener {
                opener.resumed(&shared.tenants.read());
            }
            // It may be gone.
            let _ = successor.connection.send(&refusal(&error.to_string()));
            tracing::warn!(pid, %error, "a take-over failed; serving goes on");
            false
        }
    }
}

/// Compares what the two daemons must have in common.
fn check_terms(tenants: &[Tenant], terms: &[TenantTerms]) -> Result<()> {
    if tenants.len() != terms.len() {
        let allowed = format!("{}, those of the running daemon", tenants.len());
        return Err(NodeError::invalid("tenants", &terms.len(), allowed));
    }
    for terms in terms {
        let Some(tenant) = tenants.iter().find(|tenant| tenant.name == terms.name) else {
            return Err(NodeError::invalid("tenant", &terms.name, "one of the running daemon"));
        };
        if !tenant.has_token(&terms.token) {
            return Err(NodeError::invalid("token of a tenant", &terms.name, "that of the running daemon"));
        }
        let options = tenant.store.options();
        let that_of = |value: &dyn std::fmt::Display| format!("{value}, that of the running daemon");
        if terms.chunk_tokens != options.chunk_tokens {
            let allowed = that_of(&options.chunk_tokens.get());
            return Err(NodeError::invalid("chunk_tokens", &terms.chunk_tokens.get(), allowed));
        }
        if terms.stores_tails != options.stores_tails {
            let allowed = that_of(&options.stores_tails);
            return Err(NodeError::invalid("tails", &terms.stores_tails, allowed));
        }
        if terms.digest_key != options.digest_key {
            return Err(NodeError::invalid("digest_key_file", &"another key", "that of the running daemon"));
        }
        let arena_bytes = tenant.store.arena().stat().capacity_bytes;
        let is_its_size = (arena_bytes..arena_bytes + ROUNDING_BYTES).contains(&terms.ram_bytes);
        if terms.ram_bytes != 0 && !is_its_size {
            return Err(NodeError::invalid("ram", &terms.ram_bytes, that_of(&arena_bytes)));
        }
    }
    Ok(())
}

/// Waits until all sessions have ended: each does when it holds no memory.
fn pause(
    shared: &Shared,
    sessions: &mut Vec<RunningSession>,
    successor: &Successor,
    deadline: Instant,
) -> Result<()> {
    for session in &*sessions {
        session.control.set_moving(true);
    }
    loop {
        *sessions = reap(std::mem::take(sessions));
        if sessions.is_empty() {
            return Ok(());
        }
        if shared.is_closing.load(Ordering::Acquire) {
            return Err(failed("the running daemon ends"));
        }
        if successor.has_hung_up() {
            return Err(failed("the other daemon is gone"));
        }
        if Instant::now() >= deadline {
            return Err(failed(&held_by(sessions)));
        }
        wait(shared, None, sessions, Some(&timespec(LOOK_INTERVAL)));
    }
}

/// Which processes still hold memory, and how much.
fn held_by(sessions: &[RunningSession]) -> String {
    let holders: Vec<String> = sessions
        .iter()
        .map(|session| {
            format!("process {} holds {}", session.connection.peer_pid(), session.control.n_held())
        })
        .collect();
    format!("leases and writes were not given back in time: {}", holders.join(", "))
}

/// Gives the memory and the socket to the other daemon; returns how many chunks it has. If that fails, the tenants are
/// served again.
fn hand_on(shared: &Shared, listener: &Listener, successor: &Successor, deadline: Instant) -> Result<usize> {
    let Some(opener) = &shared.opener else {
        return Err(failed("the running daemon cannot be taken over"));
    };
    for tenant in &*shared.tenants.read() {
        if tenant.store.is_shared() {
            return Err(failed("another part of the process uses a store"));
        }
        wait_until_idle(shared, &tenant.store, deadline)?;
    }
    let tenants = std::mem::take(&mut *shared.tenants.write());
    shared.streams.clear();
    let (mut paused, mut is_apart) = (Vec::with_capacity(tenants.len()), true);
    for Tenant { name, token, store } in tenants {
        let store = if is_apart { store.take_apart() } else { Err(store) };
        is_apart = store.is_ok();
        let store = match store {
            Ok(memory) => PausedStore::Memory(memory),
            Err(store) => PausedStore::Whole(store),
        };
        paused.push(Paused { name, token, store });
    }
    let outcome = offer(&paused, listener, &successor.connection)
        .and_then(|n_chunks| await_serving(shared, &successor.connection).map(|()| n_chunks));
    if let Err(error) = &outcome
        && !shared.is_closing.load(Ordering::Acquire)
    {
        // So that the other daemon lets go of the disks, if it has opened them. It may be gone.
        let _ = successor.connection.send(&refusal(&error.to_string()));
        successor.connection.close();
        let reopened = paused.into_iter().filter_map(|paused| reopen(shared, &**opener, paused));
        let reopened: Vec<Tenant> = reopened.collect();
        *shared.tenants.write() = reopened;
    }
    outcome
}

/// Waits until no tier reads or writes for a store: closing it then takes no time.
fn wait_until_idle(shared: &Shared, store: &Store, deadline: Instant) -> Result<()> {
    let is_idle =
        |store: &Store| store.queues().iter().all(|queues| queues.write_bytes == 0 && queues.read_bytes == 0);
    store.flush(deadline.saturating_duration_since(Instant::now()));
    while !is_idle(store) {
        if Instant::now() >= deadline {
            return Err(failed("a lower tier is slow: chunks are still read or written"));
        }
        wait(shared, None, &[], Some(&timespec(LOOK_INTERVAL)));
    }
    Ok(())
}

/// Sends the memory of all tenants and the socket.
fn offer(paused: &[Paused], listener: &Listener, connection: &Connection) -> Result<usize> {
    let in_use = || failed("memory has another user");
    let mut n_chunks = 0;
    for Paused { name, store, .. } in paused {
        let PausedStore::Memory(memory) = store else { return Err(in_use()) };
        let list = ChunkList::of(memory).ok_or_else(in_use)?;
        n_chunks += list.chunks.len();
        let file = list.to_file().map_err(NodeError::io("write the list of chunks"))?;
        let frame = TakeOverFrame::Tenant { name: name.clone() };
        send(connection, &frame, &[memory.ram.arena().as_fd(), file.as_fd()])?;
    }
    send(connection, &TakeOverFrame::Listener, &[listener.as_fd()])?;
    Ok(n_chunks)
}

fn send(connection: &Connection, frame: &TakeOverFrame, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let failed_to = || NodeError::io("hand memory to another daemon");
    let deadline = Instant::now() + SEND_TIMEOUT;
    while !connection.send_with_descriptors(&frame.encode(), descriptors).map_err(failed_to())? {
        let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::OUT)];
        if !wait_ready(&mut waiting, Some(deadline)).map_err(failed_to())? {
            return Err(failed("the other daemon does not read"));
        }
    }
    Ok(())
}

/// Waits until the other daemon says that it serves.
///
/// # Errors
/// If it does not serve, and never will.
fn await_serving(shared: &Shared, connection: &Connection) -> Result<()> {
    let deadline = Instant::now() + shared.successor_timeout;
    let mut buffer = FrameBuffer::new();
    let mut reason = "the other daemon does not say that it serves";
    while Instant::now() < deadline && !shared.is_closing.load(Ordering::Acquire) {
        match connection.receive(&mut buffer) {
            Ok(Some(frame)) => return serving_of(frame),
            Ok(None) => {}
            Err(_) => {
                reason = "the other daemon is gone";
                break;
            }
        }
        let mut waiting = [
            PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN),
            PollFd::new(&shared.wake_event, PollFlags::IN),
        ];
        wait_ready(&mut waiting, Some(deadline)).map_err(NodeError::io("wait for another daemon"))?;
        let mut count = [0; 8];
        // Nothing to read is as good: there was no wake-up then.
        let _ = rustix::io::read(&shared.wake_event, &mut count);
    }
    // From now on it cannot send anything; what it sent before that counts.
    connection.close();
    match connection.receive(&mut buffer) {
        Ok(Some(frame)) => serving_of(frame),
        _ => Err(failed(reason)),
    }
}

fn serving_of(frame: &[u8]) -> Result<()> {
    match TakeOverFrame::decode(frame)? {
        TakeOverFrame::Serving => Ok(()),
        TakeOverFrame::Refused { reason } => Err(NodeError::TakeOver { reason }),
        other => Err(failed(&format!("the other daemon says {other:?}"))),
    }
}

/// Opens a store again; `None`, and an error in the log, where that is not possible.
fn reopen(shared: &Shared, opener: &dyn TenantOpener, paused: Paused) -> Option<Tenant> {
    let Paused { name, token, mut store } = paused;
    let deadline = Instant::now() + REOPEN_TIMEOUT;
    let memory = loop {
        store = match store {
            PausedStore::Memory(memory) => break memory,
            // A thread was slow in a tier, and the store is closed: without it, it can be opened again.
            PausedStore::Whole(store) if Instant::now() < deadline => {
                wait(shared, None, &[], Some(&timespec(LOOK_INTERVAL)));
                store.take_apart().map_or_else(PausedStore::Whole, PausedStore::Memory)
            }
            PausedStore::Whole(store) => {
                tracing::error!(tenant = name, "a store goes on without its lower tiers");
                return Some(Tenant { name, token, store });
            }
        };
    };
    // The kernel may tell of the end of a process before it has let go of its locks.
    let deadline = Instant::now() + REOPEN_TIMEOUT;
    let parts = loop {
        match opener.parts(&name) {
            Err(_) if Instant::now() < deadline => {
                wait(shared, None, &[], Some(&timespec(LOOK_INTERVAL)));
            }
            outcome => break outcome,
        }
    };
    match parts.and_then(|parts| parts.open(memory)) {
        Ok(store) => Some(Tenant { name, token, store }),
        Err(error) => {
            tracing::error!(tenant = name, %error, "a store cannot be opened again; its tenant is not served");
            None
        }
    }
}

impl Successor {
    fn has_hung_up(&self) -> bool {
        let mut descriptors = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::RDHUP)];
        wait_ready(&mut descriptors, Some(Instant::now())).unwrap_or(true)
    }
}

fn failed(reason: &str) -> NodeError {
    NodeError::TakeOver { reason: reason.to_owned() }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}
