//! State in memory, for a coordinator that is the only one.
//!
//! Nothing outlives the process: workers register again when their heartbeats are answered with
//! 404. The term is the time of the start in milliseconds since 1970, so that gateways take the
//! snapshots of a coordinator that was restarted for newer than those they hold.

use std::time::{Duration, SystemTime};

use super::{Role, StateBackend, StateError};
use crate::membership::{Change, Record};

/// Leads from the start to the end of the process.
#[derive(Debug)]
pub(crate) struct EmbeddedState {
    term: u64,
}

impl EmbeddedState {
    pub(crate) fn new() -> Self {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { term: since_1970.as_millis() as u64 }
    }
}

impl StateBackend for EmbeddedState {
    fn elect_interval(&self, _role: &Role) -> Duration {
        // Nothing ever changes; the value only must not be short.
        Duration::from_hours(1)
    }

    async fn elect(&self) -> Result<Role, StateError> {
        Ok(Role::Leader { term: self.term, until: None })
    }

    async fn resign(&self) {}

    async fn load(&self, _term: u64) -> Result<Vec<Record>, StateError> {
        Ok(Vec::new())
    }

    async fn write(&self, _term: u64, _changes: &[Change]) -> Result<(), StateError> {
        Ok(())
    }
}
