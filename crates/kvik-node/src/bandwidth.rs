//! Bytes a second of tiers that the tenants of a node share.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvik_store::TierName;
use kvik_tier::{Bandwidth, BandwidthShare, ThrottledOptions};
use parking_lot::Mutex;

use crate::error::{NodeError, Result};

/// The bounds of a node by the names of tiers: tiers of one name, of whichever tenant, share one.
#[derive(Debug, Default)]
pub(crate) struct NodeBandwidth(Mutex<BTreeMap<TierName, Arc<Bandwidth>>>);

/// What one tenant gets of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TenantBandwidth<'a> {
    pub(crate) node: &'a NodeBandwidth,
    pub(crate) share: u32,
}

impl TenantBandwidth<'_> {
    /// A tenant's share of a tier; `None` where the tier has no bound.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] if the tier of another tenant has the name and another bound.
    pub(crate) fn share_of(
        &self,
        tier: &TierName,
        bounds: &ThrottledOptions,
    ) -> Result<Option<BandwidthShare>> {
        let Some(bytes_per_s) = bounds.bytes_per_s else { return Ok(None) };
        let mut tiers = self.node.0.lock();
        let bandwidth =
            tiers.entry(tier.clone()).or_insert_with(|| Bandwidth::new(bytes_per_s, bounds.burst_bytes));
        if bandwidth.bytes_per_s() != bytes_per_s {
            let allowed = format!(
                "{}, which the tier {tier} of another tenant has: the bound is that of the node",
                bandwidth.bytes_per_s()
            );
            return Err(NodeError::invalid("bytes_per_s", &bytes_per_s, allowed));
        }
        Ok(Some(bandwidth.join(self.share)))
    }
}
