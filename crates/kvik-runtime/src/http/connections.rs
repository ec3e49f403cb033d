//! The open connections of one listener, bounded in number.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::Instant;

use super::monitor::{Monitor, Phase};

/// The part of all connections that is closed at once to make room: each time all of them are looked at.
const EVICTED_PART: usize = 64;

/// All open connections, each a task.
#[derive(Debug)]
pub(super) struct Connections {
    max: usize,
    tasks: JoinSet<()>,
    open: HashMap<Id, (AbortHandle, Arc<Monitor>)>,
}

impl Connections {
    pub(super) fn new(max: usize) -> Self {
        Self { max, tasks: JoinSet::new(), open: HashMap::new() }
    }

    pub(super) fn has_room(&self) -> bool {
        self.open.len() < self.max
    }

    pub(super) fn spawn(
        &mut self,
        monitor: Arc<Monitor>,
        connection: impl Future<Output = ()> + Send + 'static,
    ) {
        let handle = self.tasks.spawn(connection);
        self.open.insert(handle.id(), (handle, monitor));
    }

    /// Waits for the end of one; false if there is no connection. Cancel safe.
    pub(super) async fn join_next(&mut self) -> bool {
        let ended = match self.tasks.join_next_with_id().await {
            None => return false,
            Some(Ok((id, ()))) => id,
            Some(Err(error)) => error.id(),
        };
        self.open.remove(&ended);
        true
    }

    /// Closes those that have had no request for the longest time; if all have one, those whose body has been
    /// arriving for the longest time. False if there are none of either.
    pub(super) fn evict(&self) -> bool {
        let mut candidates: Vec<(bool, Instant, &AbortHandle)> = Vec::new();
        for (task, monitor) in self.open.values() {
            let (phase, since) = monitor.phase();
            if monitor.is_idle() {
                candidates.push((false, since, task));
            } else if phase == Phase::Body {
                candidates.push((true, since, task));
            }
        }
        let has_idle = candidates.iter().any(|(is_body, ..)| !is_body);
        candidates.retain(|(is_body, ..)| *is_body != has_idle);
        if candidates.is_empty() {
            return false;
        }
        let n_evicted = (self.max / EVICTED_PART).clamp(1, candidates.len());
        candidates.select_nth_unstable_by_key(n_evicted - 1, |(_, since, _)| *since);
        for (_, _, task) in &candidates[..n_evicted] {
            task.abort();
            super::count_closed("limit");
        }
        true
    }

    /// Ends all.
    pub(super) async fn shutdown(&mut self) {
        self.tasks.shutdown().await;
        self.open.clear();
    }
}
