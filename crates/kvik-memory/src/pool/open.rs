//! Wiring a pool to a device and to its ledger.

use std::sync::Arc;

use super::overhead::OverheadGrants;
use super::{KvPool, PoolParts, PoolSettings};
use crate::Result;
use crate::geometry::{Geometry, PageId};
use crate::ledger::{Member, PageStates};
use crate::pages::{Claim, FixedGrants, GrantEvents, Grants, PageObserver, PageState};
use crate::region::{Guard, Region};
use crate::vmm::Vmm;

/// What a pool on a device is to be.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// The shape of the region.
    pub geometry: Geometry,
    /// What lies behind unmapped pages.
    pub guard: Guard,
    /// How the memory is kept.
    pub settings: PoolSettings,
}

impl KvPool {
    /// Opens a pool on `vmm` whose memory is granted by the ledger that `member` joined.
    ///
    /// Tools see the state of every page. Where the ledger has no memory for a guard there is none, and a
    /// stray read faults.
    pub fn open(vmm: Arc<dyn Vmm>, member: Member, options: &PoolOptions) -> Result<Self> {
        let geometry = &options.geometry;
        let states = member.create_page_states(geometry.capacity_pages(), geometry.page_cost_bytes())?;
        let member = Arc::new(member);
        Self::open_with(vmm, member.clone(), member, Some(Arc::new(states)), options)
    }

    /// Opens a pool on `vmm` with a budget of its own.
    pub fn open_alone(vmm: Arc<dyn Vmm>, budget: Arc<FixedGrants>, options: &PoolOptions) -> Result<Self> {
        Self::open_with(vmm, budget.clone(), budget, None, options)
    }

    /// Opens a pool on `vmm` whose memory `grants` grants and whose agent listens to `events`.
    ///
    /// For an owner that keeps other memory under the same grants and answers for it in
    /// [`claimable_bytes`](Grants::claimable_bytes).
    pub fn open_with(
        vmm: Arc<dyn Vmm>,
        grants: Arc<dyn Grants>,
        events: Arc<dyn GrantEvents>,
        observer: Option<Arc<dyn PageObserver>>,
        options: &PoolOptions,
    ) -> Result<Self> {
        let mut guard = options.guard;
        let max_guard_bytes = Region::max_guard_bytes(vmm.as_ref(), &options.geometry, guard);
        let mut guard_bytes = 0;
        if max_guard_bytes > 0 {
            match grants.claim(max_guard_bytes)? {
                Claim::Granted => guard_bytes = max_guard_bytes,
                Claim::Denied(shortage) => {
                    tracing::warn!(?shortage, max_guard_bytes, "no memory for a guard: a stray read faults");
                    grants.stop_waiting();
                    guard = Guard::None;
                }
            }
        }
        // From here on a failure gives the grant of the guard back, by drop.
        let mut grants = Arc::new(OverheadGrants::new(grants, guard_bytes));
        let region = Arc::new(Region::try_new(vmm, options.geometry, guard)?);
        if let (Guard::None, Some(grants)) = (region.guard(), Arc::get_mut(&mut grants)) {
            grants.give_back_overhead();
        }
        let parts = PoolParts { mapper: region.clone(), grants, events, observer };
        Self::start_on(parts, options.settings.clone(), Some(region))
    }
}

impl PageObserver for PageStates {
    fn pages_became(&self, first_page: PageId, n_pages: u32, state: PageState) {
        self.set(first_page, n_pages, state);
    }
}
