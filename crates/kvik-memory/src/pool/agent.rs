//! The thread that keeps a pool in order while its engine is busy or asleep.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Shared;
use crate::pages::{Event, PageAllocator, PagesOutcome};

/// How long the agent sleeps when nothing is to be done.
const IDLE_SLEEP: Duration = Duration::from_secs(1);

/// How long a request of others holds: a waiter asks again.
const REQUEST_HOLDS_FOR: Duration = Duration::from_secs(2);

/// What the agent has in mind.
struct Agent<'a> {
    shared: &'a Shared,
    /// Whether more is held than is allowed, or was when the limit moved last.
    is_over_limit: bool,
    /// Pages that others asked for and did not get, until when that counts.
    owed: Option<(u32, Instant)>,
    /// How often pages had changed hands when they did last, and when that was.
    last_change: (u64, Instant),
}

/// Runs until the pool goes.
pub(super) fn run(shared: &Shared) {
    let mut agent = Agent { shared, is_over_limit: false, owed: None, last_change: (0, Instant::now()) };
    agent.keep_in_order();
    while !shared.is_stopping.load(Ordering::SeqCst) {
        let event = shared.events.wait(agent.sleep());
        // Before the look at the pages: a thread that changes them after it wakes the agent again.
        shared.is_poked.store(false, Ordering::SeqCst);
        match event {
            Event::LimitChanged => {
                agent.obey_limit();
                agent.tell_waiters();
            }
            Event::ReclaimRequested { n_bytes } => {
                let n_pages = n_bytes.div_ceil(agent.pages().page_cost_bytes());
                agent.owed = None;
                agent.reclaim(u32::try_from(n_pages).unwrap_or(u32::MAX));
            }
            Event::CapacityReturned => agent.tell_waiters(),
            Event::Timeout => {}
        }
        if !shared.is_stopping.load(Ordering::SeqCst) {
            agent.keep_in_order();
        }
    }
}

impl Agent<'_> {
    fn pages(&self) -> &PageAllocator {
        self.shared.blocks.pages()
    }

    fn sleep(&self) -> Duration {
        let is_high = self.pages().n_parked_hint() > self.shared.settings.high_watermark_pages;
        if is_high { self.shared.settings.trim_after.min(IDLE_SLEEP) } else { IDLE_SLEEP }
    }

    fn tell_waiters(&self) {
        self.shared.can_prepare.store(true, Ordering::Relaxed);
        self.shared.waiters.notify();
    }

    /// Everything that is due whatever happened.
    fn keep_in_order(&mut self) {
        // Announced before the look: pages that are freed after it wake the agent.
        self.shared.wants_freed_pages.store(self.is_over_limit || self.owed.is_some(), Ordering::SeqCst);
        if self.is_over_limit {
            self.give_back_excess();
        }
        if let Some((n_owed, until)) = self.owed {
            let n_left = n_owed.saturating_sub(self.give_back(n_owed));
            self.owed = (n_left > 0 && Instant::now() < until).then_some((n_left, until));
        }
        if self.is_over_limit || self.owed.is_some() {
            return;
        }
        self.shared.wants_freed_pages.store(false, Ordering::SeqCst);
        self.trim_idle_pages();
        self.prepare_pages();
    }

    /// Gives back at once what is held beyond a limit that moved, and asks the engine for the rest.
    fn obey_limit(&mut self) {
        self.is_over_limit = true;
        self.shared.wants_freed_pages.store(true, Ordering::SeqCst);
        let excess_bytes = self.give_back_excess();
        if excess_bytes > 0 {
            self.ask_engine(excess_bytes);
        }
    }

    /// Gives back what is held beyond the limit; returns by how many bytes it is still passed.
    fn give_back_excess(&mut self) -> u64 {
        let excess_bytes = || self.pages().held_bytes().saturating_sub(self.shared.grants.claimable_bytes());
        let n_pages = excess_bytes().div_ceil(self.pages().page_cost_bytes());
        if n_pages > 0 {
            self.give_back(u32::try_from(n_pages).unwrap_or(u32::MAX));
        }
        let still_excess_bytes = excess_bytes();
        self.is_over_limit = still_excess_bytes > 0;
        still_excess_bytes
    }

    /// Gives back pages that others wait for: parked ones, then what the engine frees when it is asked.
    fn reclaim(&mut self, n_pages: u32) {
        let n_owed = n_pages.saturating_sub(self.give_back(n_pages));
        if n_owed > 0 {
            self.shared.wants_freed_pages.store(true, Ordering::SeqCst);
            self.ask_engine(u64::from(n_owed) * self.pages().page_cost_bytes());
            self.owed = Some((n_owed, Instant::now() + REQUEST_HOLDS_FOR));
        }
    }

    fn give_back(&self, n_pages: u32) -> u32 {
        self.shared.blocks.release_empty_pages();
        self.pages().trim(n_pages)
    }

    fn ask_engine(&self, n_bytes: u64) {
        let callback = self.shared.on_reclaim.lock().clone();
        let Some(callback) = callback else { return };
        if catch_unwind(AssertUnwindSafe(|| callback(n_bytes))).is_err() {
            tracing::error!(n_bytes, "the engine's reclaim callback panicked");
        }
    }

    /// Parks the empty page that the blocks keep, and unmaps what is parked above the high watermark, if
    /// no page changed hands for a while.
    fn trim_idle_pages(&mut self) {
        let counters = self.pages().counters();
        if counters.n_changes != self.last_change.0 {
            self.last_change = (counters.n_changes, Instant::now());
            return;
        }
        if self.last_change.1.elapsed() < self.shared.settings.trim_after {
            return;
        }
        self.shared.blocks.release_empty_pages();
        let n_parked = self.pages().counters().n_parked;
        let n_above = n_parked.saturating_sub(self.shared.settings.high_watermark_pages);
        if n_above > 0 {
            self.pages().trim(n_above);
        }
    }

    fn prepare_pages(&self) {
        if !self.shared.settings.is_preallocating {
            return;
        }
        let can_prepare = match self.pages().prepare() {
            Ok(PagesOutcome::Allocated) => true,
            Ok(PagesOutcome::NoMemory(_)) => {
                // These pages are for later: others give nothing up for them.
                self.shared.grants.stop_waiting();
                false
            }
            Err(error) => {
                tracing::warn!(%error, "cannot prepare pages");
                false
            }
        };
        self.shared.can_prepare.store(can_prepare, Ordering::Relaxed);
    }
}
