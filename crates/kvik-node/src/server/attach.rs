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

use super::records::Auditor;
use super::session::{Session, SessionEnd};
use super::{Shared, watch};
use crate::error::{NodeError, Result};
use crate::frame::{Attach, Attached, Purpose, refusal};
use crate::ring::SESSION_WORDS;
use crate::tenant::Tenant;

/// Time for a client to say what it is.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// What a client that may attach gets.
struct Admitted<'a> {
    attach: Attach,
    tenant: &'a str,
    store: &'a Store,
    space: Space,
}

/// Serves a client until it or the daemon ends; `is_full` says that there are too many.
pub(super) fn serve(shared: &Shared, connection: &Connection, end: &SessionEnd, is_full: bool) -> Result<()> {
    let counters = &shared.counters;
    let mut auditor = Auditor::new(shared.audit.as_ref(), connection);
    let admitted = match admit(shared, connection, is_full) {
        Ok(admitted) => admitted,
        Err(error) => {
            counters.refused.fetch_add(1, Ordering::Relaxed);
            auditor.refused(&error);
            // A client that is gone does not need to know.
            let _ = connection.send(&refusal(&error.to_string()));
            return Err(error);
        }
    };
    auditor.attached(admitted.tenant, &admitted.attach, &admitted.space);
    if admitted.attach.purpose == Purpose::Watch {
        let served = answer(&admitted, connection, &[])
            .and_then(|()| watch::run(admitted.store, &admitted.space, connection, end));
        auditor.detached(served.as_ref().err());
        return served;
    }
    let words = Arc::new(SharedWords::create(SESSION_WORDS)?);
    end.sleeps_at(&words);
    let arena = admitted.store.arena();
    let readable = read_only(arena.as_fd())?;
    let mut session = Session::new(
        admitted.store.clone(),
        admitted.space.clone(),
        admitted.attach.rank,
        Arc::clone(&words),
        auditor.clone(),
    );
    // Before the answer, so that a client that has attached is counted.
    counters.attached.fetch_add(1, Ordering::Relaxed);
    counters.sessions.fetch_add(1, Ordering::Relaxed);
    let served = answer(&admitted, connection, &[words.as_fd(), readable.as_fd(), arena.as_fd()])
        .and_then(|()| session.serve_until(end, counters));
    counters.failed.fetch_add(served.is_err().into(), Ordering::Relaxed);
    // What it held is given back before it counts as gone.
    drop(session);
    auditor.detached(served.as_ref().err());
    counters.sessions.fetch_sub(1, Ordering::Relaxed);
    served
}

fn admit<'a>(shared: &'a Shared, connection: &Connection, is_full: bool) -> Result<Admitted<'a>> {
    let attach = Attach::decode(&receive(connection)?)?;
    if is_full {
        let n_sessions = shared.options.max_sessions;
        return Err(NodeError::invalid("sessions", &(n_sessions + 1), format!("at most {n_sessions}")));
    }
    let found = Tenant::find(&shared.options.tenants, &attach.token);
    let Some(Tenant { name, store, .. }) = found else {
        return Err(NodeError::invalid("token", &"another", "that of a tenant"));
    };
    let namespace = Namespace { tenant: name.clone(), ..attach.namespace.clone() };
    let space = store.space(&namespace, attach.format)?;
    Ok(Admitted { attach, tenant: name, store, space })
}

fn answer(admitted: &Admitted<'_>, connection: &Connection, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    let options = admitted.store.options();
    let attached = Attached {
        tenant: admitted.tenant.to_owned(),
        chunk_tokens: options.chunk_tokens,
        stores_tails: options.stores_tails,
        digest_key: options.digest_key.clone(),
        arena_bytes: admitted.store.arena().stat().capacity_bytes,
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
fn receive(connection: &Connection) -> Result<Vec<u8>> {
    let deadline = Instant::now() + ATTACH_TIMEOUT;
    let mut buffer = FrameBuffer::new();
    loop {
        let frame = connection.receive(&mut buffer).map_err(NodeError::io("read the frame of a client"))?;
        if let Some(frame) = frame {
            return Ok(frame.to_vec());
        }
        let mut descriptors = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
        if !wait_ready(&mut descriptors, Some(deadline)).map_err(NodeError::io("wait for a client"))? {
            return Err(NodeError::Gone { reason: "the client says nothing" });
        }
    }
}
