//! A client that comes: what it says of itself, and what it is answered.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_store::{Space, Store};
use kvik_tier::shared::SharedWords;
use kvik_types::Namespace;
use rustix::event::{PollFd, PollFlags};

use super::control::SessionControl;
use super::manage::Management;
use super::records::Auditor;
use super::session::Session;
use super::{Served, Shared, hand_over, manage, watch};
use crate::error::{NodeError, Result};
use crate::frame::{Attach, Attached, Purpose, refusal};
use crate::kv_streams::StreamName;
use crate::ring::{Consumer, SESSION_WORDS, SUBMISSIONS};
use crate::take_over::is_take_over;
use crate::tenant::Tenant;

/// Time for a client to say what it is.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a session without its first frame looks whether it is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// What a client that may attach gets.
struct Admitted {
    attach: Attach,
    tenant: String,
    store: Store,
    space: Space,
}

/// Serves a client until it or the daemon ends; `is_full` says that there are too many.
pub(super) fn serve(
    shared: &Shared,
    connection: &Arc<Connection>,
    control: &SessionControl,
    is_full: bool,
) -> Result<Served> {
    let counters = &shared.counters;
    let mut auditor = Auditor::new(shared.audit.as_ref(), connection);
    let served = receive(connection, control).and_then(|frame| {
        if is_take_over(&frame) {
            return hand_over::ask(shared, connection, &frame).map(|()| None);
        }
        admit(shared, &frame, is_full).map(Some)
    });
    let admitted = match served {
        Ok(Some(admitted)) => admitted,
        Ok(None) => return Ok(Served::AsSuccessor),
        Err(error) => {
            counters.refused.fetch_add(1, Ordering::Relaxed);
            auditor.refused(&error);
            // A client that is gone does not need to know.
            let _ = connection.send(&refusal(&error.with_causes()));
            return Err(error);
        }
    };
    auditor.attached(&admitted.tenant, &admitted.attach, &admitted.space);
    if admitted.attach.purpose == Purpose::Watch {
        let served = answer(shared, &admitted, connection, &[])
            .and_then(|()| watch::run(&admitted.store, &admitted.space, connection, control));
        auditor.detached(served.as_ref().err());
        return served.map(|()| Served::ToTheEnd);
    }
    if admitted.attach.purpose == Purpose::Manage {
        let served = answer(shared, &admitted, connection, &[])
            .and_then(|()| manage(shared, &admitted, connection, control, &auditor));
        counters.failed.fetch_add(served.is_err().into(), Ordering::Relaxed);
        auditor.detached(served.as_ref().err());
        return served.map(|()| Served::ToTheEnd);
    }
    // Segments are no prefix of any prompt: an index that knew of them would route by them.
    if admitted.attach.purpose == Purpose::Session {
        let stream = StreamName::new(&admitted.tenant, &admitted.attach.namespace.model);
        shared.streams.note(&stream, &admitted.store, &admitted.space);
    }
    let words = Arc::new(SharedWords::create(SESSION_WORDS)?);
    let sleeping = Arc::clone(&words);
    control.woken_by(move || Consumer::interrupt(&*sleeping, SUBMISSIONS));
    let arena = admitted.store.arena();
    let readable = read_only(arena.as_fd())?;
    let mut session = Session::new(
        admitted.store.clone(),
        admitted.space.clone(),
        admitted.attach.rank,
        Arc::clone(&words),
        Arc::clone(&shared.sums),
        auditor.clone(),
    );
    // Before the answer, so that a client that has attached is counted.
    counters.attached.fetch_add(1, Ordering::Relaxed);
    counters.sessions.fetch_add(1, Ordering::Relaxed);
    let served = answer(shared, &admitted, connection, &[words.as_fd(), readable.as_fd(), arena.as_fd()])
        .and_then(|()| session.serve_until(control, counters));
    counters.failed.fetch_add(served.is_err().into(), Ordering::Relaxed);
    // What it held is given back before it counts as gone.
    drop(session);
    auditor.detached(served.as_ref().err());
    counters.sessions.fetch_sub(1, Ordering::Relaxed);
    served.map(|()| Served::ToTheEnd)
}

fn manage(
    shared: &Shared,
    admitted: &Admitted,
    connection: &Connection,
    control: &SessionControl,
    auditor: &Auditor,
) -> Result<()> {
    let Admitted { attach, tenant, store, space } = admitted;
    let namespace = Namespace { tenant: tenant.clone(), ..attach.namespace.clone() };
    let management = Management::new(store, space, namespace, attach.rank, auditor);
    shared.counters.managers.fetch_add(1, Ordering::Relaxed);
    // What it held is given back before it counts as gone.
    let managed = manage::run(management, connection, control, &shared.counters);
    shared.counters.managers.fetch_sub(1, Ordering::Relaxed);
    managed
}

fn admit(shared: &Shared, frame: &[u8], is_full: bool) -> Result<Admitted> {
    let attach = Attach::decode(frame)?;
    if is_full {
        let n_sessions = shared.max_sessions;
        return Err(NodeError::invalid("sessions", &(n_sessions + 1), format!("at most {n_sessions}")));
    }
    let tenants = shared.tenants.read();
    let Some(Tenant { name, store, .. }) = Tenant::find(&tenants, &attach.token).cloned() else {
        return Err(NodeError::invalid("token", &"another", "that of a tenant"));
    };
    drop(tenants);
    let namespace = Namespace { tenant: name.clone(), ..attach.namespace.clone() };
    let space = match attach.purpose {
        Purpose::Segments => store.space_with_tails(&namespace, attach.format)?,
        Purpose::Session | Purpose::Watch | Purpose::Manage => store.space(&namespace, attach.format)?,
    };
    Ok(Admitted { attach, tenant: name, store, space })
}

fn answer(
    shared: &Shared,
    admitted: &Admitted,
    connection: &Connection,
    descriptors: &[BorrowedFd<'_>],
) -> Result<()> {
    let options = admitted.store.options();
    let attached = Attached {
        tenant: admitted.tenant.clone(),
        chunk_tokens: options.chunk_tokens,
        stores_tails: options.stores_tails || admitted.attach.purpose == Purpose::Segments,
        digest_key: options.digest_key.clone(),
        arena_bytes: admitted.store.arena().stat().capacity_bytes,
        peer_address: shared.opener.as_ref().and_then(|opener| opener.peer_address()),
    };
    let is_sent = connection
        .send_with_descriptors(&attached.encode(), descriptors)
        .map_err(NodeError::io("answer a client"))?;
    if is_sent { Ok(()) } else { Err(NodeError::Gone { reason: "the client does not read" }) }
}

/// Another descriptor of a memory file that can only be read.
fn read_only(file: BorrowedFd<'_>) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::open(path).map(OwnedFd::from).map_err(NodeError::io("open the arena for reading"))
}

/// The first frame of a client.
fn receive(connection: &Connection, control: &SessionControl) -> Result<Vec<u8>> {
    let deadline = Instant::now() + ATTACH_TIMEOUT;
    let mut buffer = FrameBuffer::new();
    loop {
        // Before the look at the socket: a client that has sent its frame by then is answered.
        let is_over = Instant::now() >= deadline || control.is_ended() || control.is_moving();
        let frame = connection.receive(&mut buffer).map_err(NodeError::io("read the frame of a client"))?;
        if let Some(frame) = frame {
            return Ok(frame.to_vec());
        }
        if is_over {
            return Err(NodeError::Gone { reason: "the client says nothing" });
        }
        let mut descriptors = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
        let next_look = deadline.min(Instant::now() + LOOK_INTERVAL);
        wait_ready(&mut descriptors, Some(next_look)).map_err(NodeError::io("wait for a client"))?;
    }
}
