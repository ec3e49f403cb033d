//! State backends: the current leader, and what the next one must know.
//!
//! Only the leader changes the membership. A term is one life of a leader; terms rise, and a backend
//! refuses the writes of a term that is over, so that a leader that was paused cannot undo what its
//! successor did. The members are written down; heartbeats, loads and versions are
//! in the leader's memory and come again by themselves.

mod embedded;
mod etcd;
mod kubernetes;
mod record;

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::Instant;

pub(crate) use embedded::EmbeddedState;
pub(crate) use etcd::EtcdState;
pub(crate) use kubernetes::KubernetesState;

use crate::membership::{Change, MemberInfo, Record};

/// What a coordinator is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// It changes the membership.
    Leader {
        term: u64,
        /// When the lead ends unless it is renewed; `None`: never.
        until: Option<Instant>,
    },
    /// Another coordinator does, or none.
    Follower {
        /// The leader's base address, if there is a leader.
        leader: Option<String>,
    },
}

/// Why the backend did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    /// The term is over; another coordinator leads or will lead.
    #[error("the term is over")]
    Fenced,
    /// The backend cannot be reached or does not work; trying again may help.
    #[error("{0}")]
    Unavailable(String),
}

/// A place that knows the leader and the members.
pub(crate) trait StateBackend: Debug + Send + Sync + 'static {
    /// What tells its terms apart from those of other backends; 0 if all coordinators share the backend.
    fn incarnation(&self) -> u64;

    /// Time between two calls of [`StateBackend::elect`] in this role.
    fn elect_interval(&self, role: &Role) -> Duration;

    /// Renews the lead or tries to get it; returns the role. A lead that was lost or given up comes
    /// back only under a higher term.
    fn elect(&self) -> impl Future<Output = Result<Role, StateError>> + Send;

    /// Gives the lead up, if held, so that another coordinator has it at once. Later writes under
    /// its term are refused.
    fn resign(&self) -> impl Future<Output = ()> + Send;

    /// Reads the members of a kind, as leader of `term`.
    fn load<I: MemberInfo>(
        &self,
        term: u64,
    ) -> impl Future<Output = Result<Vec<Record<I>>, StateError>> + Send;

    /// Writes changes down, as leader of `term`. The caller MUST give up the lead if this fails,
    /// because part of the changes may be written.
    fn write<I: MemberInfo>(
        &self,
        term: u64,
        changes: &[Change<I>],
    ) -> impl Future<Output = Result<(), StateError>> + Send;
}

impl Role {
    /// Says whether this is the role of a leader whose time is not over.
    pub(crate) fn leads(&self, now: Instant) -> bool {
        match self {
            Self::Leader { until, .. } => until.is_none_or(|until| now < until),
            Self::Follower { .. } => false,
        }
    }
}
