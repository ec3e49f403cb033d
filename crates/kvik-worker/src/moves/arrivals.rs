//! Sequences on their way here.
//!
//! A ticket stands for a request that may come and the KV that was sent ahead of it. It holds blocks of the engine's, which
//! takes them back when it needs them; it is given up when the source says so, and when nothing came for it for a while.
//! Giving it up costs time and nothing else: a request that comes with an unknown ticket is computed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::Instant;

use crate::error::Refusal;
use crate::generation::StageGuard;
use crate::plan::Plan;

/// Most sequences that may be on their way: more than a worker that drains has, and each is a plan and a few ids.
const MAX_ARRIVALS: usize = 1024;
/// Time after which a ticket that nothing comes for is given up: far longer than a round of copies takes.
const MAX_SILENCE: Duration = Duration::from_secs(30);

/// All sequences on their way.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    by_ticket: Mutex<HashMap<String, Slot>>,
}

#[derive(Debug)]
struct Slot {
    arrival: Arc<Arrival>,
    last_use: Instant,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) plan: Plan,
    /// The worker that it comes from.
    pub(crate) from: String,
    /// By prompt and choice. Puts of one arrival wait for each other.
    pub(crate) stages: AsyncMutex<HashMap<(usize, u32), StageGuard>>,
    /// Told when blocks were taken.
    pub(crate) taken: Notify,
}

impl Arrivals {
    /// Adds one; a ticket is used once.
    pub(crate) fn insert(&self, ticket: &str, arrival: Arrival) -> Result<(), Refusal> {
        let mut by_ticket = self.by_ticket.lock();
        if MAX_ARRIVALS <= by_ticket.len() {
            let message = format!("{MAX_ARRIVALS} sequences are on their way here; try another worker");
            return Err(Refusal::unavailable(message, 1));
        }
        if by_ticket.contains_key(ticket) {
            return Err(Refusal::conflict("`ticket` is known already", Some("ticket")));
        }
        let slot = Slot { arrival: Arc::new(arrival), last_use: Instant::now() };
        by_ticket.insert(ticket.to_owned(), slot);
        Ok(())
    }

    /// The one with this ticket.
    pub(crate) fn get(&self, ticket: &str) -> Option<Arc<Arrival>> {
        let mut by_ticket = self.by_ticket.lock();
        let slot = by_ticket.get_mut(ticket)?;
        slot.last_use = Instant::now();
        Some(Arc::clone(&slot.arrival))
    }

    /// Takes the one with this ticket, for good.
    pub(crate) fn take(&self, ticket: &str) -> Option<Arc<Arrival>> {
        self.by_ticket.lock().remove(ticket).map(|slot| slot.arrival)
    }

    /// Gives up those that nothing came for.
    pub(crate) fn end_idle(&self) {
        self.by_ticket.lock().retain(|_, slot| slot.last_use.elapsed() < MAX_SILENCE);
    }
}
