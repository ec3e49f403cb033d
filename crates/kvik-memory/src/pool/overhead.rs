//! Grants of which a part is not pages.

use std::sync::Arc;

use crate::Result;
use crate::pages::{Claim, Grants, Usage};

/// Grants less a fixed part that something else than pages holds; gives that part back when it goes.
#[derive(Debug)]
pub(super) struct OverheadGrants {
    grants: Arc<dyn Grants>,
    overhead_bytes: u64,
}

impl OverheadGrants {
    /// The rest of `grants`, of which `overhead_bytes` are claimed already.
    pub(super) fn new(grants: Arc<dyn Grants>, overhead_bytes: u64) -> Self {
        Self { grants, overhead_bytes }
    }

    /// Gives the fixed part back.
    pub(super) fn give_back_overhead(&mut self) {
        let overhead_bytes = std::mem::take(&mut self.overhead_bytes);
        if overhead_bytes > 0 {
            self.grants.give_back(overhead_bytes);
        }
    }
}

impl Grants for OverheadGrants {
    fn claim(&self, n_bytes: u64) -> Result<Claim> {
        self.grants.claim(n_bytes)
    }

    fn give_back(&self, n_bytes: u64) {
        self.grants.give_back(n_bytes);
    }

    fn claimable_bytes(&self) -> u64 {
        self.grants.claimable_bytes().saturating_sub(self.overhead_bytes)
    }

    fn limit_bytes(&self) -> u64 {
        self.grants.limit_bytes().saturating_sub(self.overhead_bytes)
    }

    fn publish(&self, usage: Usage) {
        let used_bytes = usage.used_bytes.saturating_add(self.overhead_bytes);
        self.grants.publish(Usage { used_bytes, ..usage });
    }

    fn note_starved(&self) {
        self.grants.note_starved();
    }

    fn stop_waiting(&self) {
        self.grants.stop_waiting();
    }
}

impl Drop for OverheadGrants {
    fn drop(&mut self) {
        self.grants.publish(Usage::default());
        self.give_back_overhead();
    }
}
