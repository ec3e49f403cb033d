//! State in memory, for a coordinator that is the only one.
//!
//! Nothing outlives the process: workers register again when their heartbeats are answered with
//! 404. The term is the time of the start in milliseconds since 1970, which rises unless the clock steps
//! back; gateways follow a restarted coordinator in any case, because its incarnation is another one.

use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, SystemTime};

use super::{Role, StateBackend, StateError};
use crate::membership::{Change, MemberInfo, Record};

/// Leads from the start to the end of the process.
#[derive(Debug)]
pub(crate) struct EmbeddedState {
    term: u64,
    incarnation: u64,
}

impl EmbeddedState {
    /// The state of a coordinator that starts at this time of the wall clock.
    pub(crate) fn new(started: SystemTime) -> Self {
        let since_1970 = started.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        // 53 bits: every reader of JSON keeps them. 0 stands for shared state.
        let incarnation = (RandomState::new().hash_one(0) >> 11).max(1);
        Self { term: since_1970.as_millis() as u64, incarnation }
    }
}

impl StateBackend for EmbeddedState {
    fn incarnation(&self) -> u64 {
        self.incarnation
    }

    fn elect_interval(&self, _role: &Role) -> Duration {
        // Nothing ever changes; the value only must not be short.
        Duration::from_hours(1)
    }

    async fn elect(&self) -> Result<Role, StateError> {
        Ok(Role::Leader { term: self.term, until: None })
    }

    async fn resign(&self) {}

    async fn load<I: MemberInfo>(&self, _term: u64) -> Result<Vec<Record<I>>, StateError> {
        Ok(Vec::new())
    }

    async fn write<I: MemberInfo>(&self, _term: u64, _changes: &[Change<I>]) -> Result<(), StateError> {
        Ok(())
    }
}
