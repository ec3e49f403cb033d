//! How backends outside of this process write a member down.

use std::time::{Duration, SystemTime};

use kvik_proto::coordinator::WorkerState;
use serde::{Deserialize, Serialize};

use crate::membership::{MemberInfo, Record};

/// A member as it is written down.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredRecord<I> {
    #[serde(rename = "worker")]
    info: I,
    state: WorkerState,
    /// Milliseconds since 1970. Clocks of coordinators may differ by what a slow start can bear.
    joined_unix_ms: u64,
    ramps: bool,
}

impl<I: MemberInfo> StoredRecord<I> {
    pub(super) fn from_record(record: &Record<I>, now_ms: u64) -> Self {
        Self {
            info: record.info.clone(),
            state: record.state,
            joined_unix_ms: now_ms.saturating_sub(record.age.as_millis() as u64),
            ramps: record.ramps,
        }
    }

    pub(super) fn into_record(self, now_ms: u64) -> Record<I> {
        let age = Duration::from_millis(now_ms.saturating_sub(self.joined_unix_ms));
        Record { info: self.info, state: self.state, age, ramps: self.ramps }
    }
}

/// The time of the wall clock.
pub(super) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
