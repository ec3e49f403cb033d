//! What a group may have.

use std::sync::atomic::Ordering;

use super::checked::bytes;
use super::layout::GroupLayout;
use crate::geometry::UNIT_BYTES;
use crate::{MemoryError, Result};

/// The guarantee, limit, weight and priority of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// What the group gets before weights count, when it asks; default 0. Rounded down to 2 MiB.
    pub min_bytes: u64,
    /// What the group may hold at most; by default as much as the device has. Rounded down to 2 MiB.
    pub max_bytes: Option<u64>,
    /// Its weight when memory is scarce, 1 or more; default 1.
    pub weight: u32,
    /// Higher is served first among waiting claims; default 0.
    pub priority: u32,
}

/// How "as much as the device has" is written in the segment.
pub(super) const UNLIMITED_UNITS: u64 = u64::MAX;

impl Default for Policy {
    fn default() -> Self {
        Self { min_bytes: 0, max_bytes: None, weight: 1, priority: 0 }
    }
}

impl Policy {
    /// Fails where the minimum is above the limit or the weight is zero.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(max_bytes) = self.max_bytes.filter(|&max_bytes| max_bytes < self.min_bytes) {
            return Err(MemoryError::Invalid {
                field: "min_bytes",
                value: self.min_bytes.to_string(),
                allowed: format!("up to max_bytes, which is {max_bytes}"),
            });
        }
        if self.weight == 0 {
            return Err(MemoryError::Invalid {
                field: "weight",
                value: "0".to_owned(),
                allowed: "1 or more".to_owned(),
            });
        }
        Ok(())
    }

    pub(super) fn store(&self, group: &GroupLayout) {
        // A concurrent reader sees old and new values mixed, each of which was or is valid.
        group.min_units.store(self.min_bytes / UNIT_BYTES, Ordering::SeqCst);
        let max_units = self.max_bytes.map_or(UNLIMITED_UNITS, |max_bytes| max_bytes / UNIT_BYTES);
        group.max_units.store(max_units, Ordering::SeqCst);
        group.weight.store(self.weight.into(), Ordering::SeqCst);
        group.priority.store(self.priority.into(), Ordering::SeqCst);
    }

    pub(super) fn load(group: &GroupLayout) -> Self {
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let max_units = group.max_units.load(Ordering::SeqCst);
        Self {
            min_bytes: bytes(group.min_units.load(Ordering::SeqCst)),
            max_bytes: (max_units != UNLIMITED_UNITS).then(|| bytes(max_units)),
            weight: small(group.weight.load(Ordering::SeqCst)).max(1),
            priority: small(group.priority.load(Ordering::SeqCst)),
        }
    }
}
