//! The new daemon's side of a take-over.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, FrameBuffer, Listener, wait_ready};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::fstat;

use super::frame::{TakeOver, TakeOverFrame, TenantTerms};
use super::list::ChunkList;
use super::{StoreParts, TenantOpener};
use crate::error::{NodeError, Result};
use crate::server::{NodeOptions, NodeServer, SUCCESSOR_TIMEOUT};
use crate::tenant::{ClientToken, Tenant};

/// Time for the running daemon to let go. Its own bound, the time for clients to give back what they hold, is shorter
/// unless it is set to more.
const HAND_OVER_TIMEOUT: Duration = Duration::from_mins(10);

/// How a daemon takes over from a running one.
#[derive(Debug, Clone)]
pub struct TakeOverOptions {
    /// Where the running daemon listens.
    pub socket: SocketAddress,
    /// What must agree, for all tenants.
    pub tenants: Vec<TenantTerms>,
    /// How the stores are opened.
    pub opener: Arc<dyn TenantOpener>,
    /// Clients at a time; more are refused.
    pub max_sessions: usize,
    /// Time for clients to give back what they hold when the next daemon takes over from this one.
    pub take_over_grace: Duration,
    /// Where is said what clients do.
    pub audit_log: Option<PathBuf>,
}

/// What the running daemon hands over.
struct Handed {
    tenants: Vec<HandedTenant>,
    listener: OwnedFd,
}

struct HandedTenant {
    name: String,
    arena: OwnedFd,
    list: OwnedFd,
}

impl NodeServer {
    /// Takes over from the daemon that listens at the socket: its memory with all chunks, and its clients.
    ///
    /// # Errors
    /// If no daemon listens, the running daemon refuses, or a store cannot be opened. The running daemon then goes on.
    pub fn take_over(options: TakeOverOptions) -> Result<Self> {
        let TakeOverOptions { socket, tenants: terms, opener, max_sessions, take_over_grace, audit_log } =
            options;
        let failed_to = || NodeError::io(format!("take over from the daemon at {socket}"));
        let connection = Connection::open(&socket).map_err(failed_to())?;
        let asked = TakeOver { tenants: terms.clone() }.encode()?;
        connection.send(&asked).map_err(failed_to())?;
        let Handed { tenants, listener } = receive(&connection)?;
        // It is the running daemon's until this one serves, with its file.
        let copy = listener.try_clone().map_err(failed_to())?;
        let opened = Listener::adopt(copy, &socket)
            .map_err(failed_to())
            .map(Listener::leave)
            .and_then(|()| open_all(&terms, tenants, &*opener));
        let tenants = match opened {
            Ok(tenants) => tenants,
            Err(error) => {
                // Nothing is held any more; the running daemon logs the reason, if it is there.
                let _ = connection.send(&TakeOverFrame::Refused { reason: error.to_string() }.encode());
                return Err(error);
            }
        };
        let opener = Some(opener);
        let address = socket.clone();
        let options = NodeOptions {
            socket,
            tenants,
            max_sessions,
            opener,
            take_over_grace,
            successor_timeout: SUCCESSOR_TIMEOUT,
            audit_log,
        };
        Self::serve(options, move || {
            // The memory belongs to this daemon from here on, or never.
            let is_sent = connection.send(&TakeOverFrame::Serving.encode());
            if !is_sent.map_err(NodeError::io("tell the running daemon that this one serves"))? {
                return Err(failed("the running daemon does not read"));
            }
            Listener::adopt(listener, &address).map_err(NodeError::io(format!("listen on {address}")))
        })
    }
}

/// Opens the store of each tenant on the memory that was handed over. Holds nothing if it fails.
fn open_all(
    terms: &[TenantTerms],
    mut handed: Vec<HandedTenant>,
    opener: &dyn TenantOpener,
) -> Result<Vec<Tenant>> {
    if handed.len() != terms.len() {
        return Err(failed("the running daemon has other tenants"));
    }
    let mut memories = Vec::with_capacity(terms.len());
    for TenantTerms { name, .. } in terms {
        let Some(place) = handed.iter().position(|tenant| tenant.name == *name) else {
            return Err(failed("the running daemon has other tenants"));
        };
        let HandedTenant { arena, list, .. } = handed.swap_remove(place);
        let stat = fstat(&arena).map_err(|errno| NodeError::io("stat an arena")(errno.into()))?;
        let list = ChunkList::from_file(list, u64::try_from(stat.st_size).unwrap_or(0))?;
        memories.push(list.adopt(arena)?);
    }
    let open = |(TenantTerms { name, token, .. }, memory): (&TenantTerms, _)| {
        let token = if token.is_empty() { None } else { Some(ClientToken::try_new(token.as_str())?) };
        let store = opener.parts(name).and_then(|parts: StoreParts| parts.open(memory))?;
        Ok(Tenant { name: name.clone(), token, store })
    };
    let tenants = terms.iter().zip(memories).map(open).collect::<Result<Vec<Tenant>>>()?;
    Tenant::check_all(&tenants)?;
    Ok(tenants)
}

/// All frames of the running daemon, up to the socket.
fn receive(connection: &Connection) -> Result<Handed> {
    let failed_to = || NodeError::io("read from the running daemon");
    let deadline = Instant::now() + HAND_OVER_TIMEOUT;
    let mut buffer = FrameBuffer::new();
    let mut tenants = Vec::new();
    loop {
        let received = connection.receive_with_descriptors(&mut buffer).map_err(failed_to())?;
        let Some((frame, descriptors)) = received else {
            let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
            if !wait_ready(&mut waiting, Some(deadline)).map_err(failed_to())? {
                return Err(failed("the running daemon does not answer"));
            }
            continue;
        };
        match (TakeOverFrame::decode(frame)?, descriptors) {
            (TakeOverFrame::Refused { reason }, _) => return Err(NodeError::Refused { reason }),
            (TakeOverFrame::Tenant { name }, descriptors) => {
                let Ok([arena, list]) = <[OwnedFd; 2]>::try_from(descriptors) else {
                    return Err(NodeError::invalid("descriptors of a tenant", &"another number", "2"));
                };
                tenants.push(HandedTenant { name, arena, list });
            }
            (TakeOverFrame::Listener, descriptors) => {
                let Ok([listener]) = <[OwnedFd; 1]>::try_from(descriptors) else {
                    return Err(NodeError::invalid("descriptors of a socket", &"another number", "1"));
                };
                return Ok(Handed { tenants, listener });
            }
            (TakeOverFrame::Serving, _) => return Err(failed("the running daemon takes over itself")),
        }
    }
}

fn failed(reason: &str) -> NodeError {
    NodeError::TakeOver { reason: reason.to_owned() }
}
