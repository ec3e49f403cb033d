//! Bytes a second that several users share by weight.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{Clock, SystemClock};

/// A bound on bytes a second for all who [join](Bandwidth::join).
///
/// Each member has a bucket of its own, which fills with its share of the rate and holds its share of the burst. What
/// a full bucket cannot take goes to those that are not full. So members that always want more get bytes in
/// proportion to their shares, one alone gets everything, and none can be kept from its share by others.
#[derive(Debug)]
pub struct Bandwidth {
    bytes_per_s: u64,
    burst_bytes: u64,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

/// A member of a [`Bandwidth`]; it leaves when this is dropped.
pub struct BandwidthShare {
    bandwidth: Arc<Bandwidth>,
    id: u64,
}

#[derive(Debug)]
struct State {
    members: Vec<Member>,
    filled_at: Instant,
    next_id: u64,
}

#[derive(Debug)]
struct Member {
    id: u64,
    share: u32,
    /// Below 0 is debt.
    level_bytes: f64,
}

// === impl Bandwidth ===

impl Bandwidth {
    /// A bound of `bytes_per_s`; `burst_bytes` may move at once after a rest.
    pub fn new(bytes_per_s: u64, burst_bytes: u64) -> Arc<Self> {
        Self::with_clock(bytes_per_s, burst_bytes, Arc::new(SystemClock))
    }

    /// As [`Self::new`], by a clock of the caller.
    pub fn with_clock(bytes_per_s: u64, burst_bytes: u64, clock: Arc<dyn Clock>) -> Arc<Self> {
        let state = State { members: Vec::new(), filled_at: clock.now(), next_id: 0 };
        Arc::new(Self { bytes_per_s, burst_bytes, clock, state: Mutex::new(state) })
    }

    /// Bytes a second of all members together.
    pub fn bytes_per_s(&self) -> u64 {
        self.bytes_per_s
    }

    /// Adds a member, whose share is at least 1. Its bucket is full at first; those of others lose what is over
    /// their smaller share of the burst.
    pub fn join(self: &Arc<Self>, share: u32) -> BandwidthShare {
        let mut state = self.state.lock();
        self.fill(&mut state);
        let id = state.next_id;
        state.next_id += 1;
        state.members.push(Member { id, share: share.max(1), level_bytes: f64::INFINITY });
        self.cut(&mut state);
        BandwidthShare { bandwidth: Arc::clone(self), id }
    }

    /// Adds what the time since the last call has brought.
    fn fill(&self, state: &mut State) {
        let now = self.clock.now();
        let elapsed = now.saturating_duration_since(state.filled_at);
        state.filled_at = now;
        let mut rest_bytes = elapsed.as_secs_f64() * self.bytes_per_s as f64;
        let total = total_shares(&state.members);
        // Each round fills a bucket or ends.
        for _ in 0..=state.members.len() {
            let cap_bytes = |member: &Member| self.cap_bytes(member, total);
            let hungry = state.members.iter().filter(|member| member.level_bytes < cap_bytes(member));
            let hungry_shares: f64 = hungry.map(|member| f64::from(member.share)).sum();
            if rest_bytes <= 0.0 || hungry_shares == 0.0 {
                return;
            }
            let per_share = rest_bytes / hungry_shares;
            rest_bytes = 0.0;
            for member in &mut state.members {
                let cap_bytes = self.cap_bytes(member, total);
                if member.level_bytes < cap_bytes {
                    let filled_bytes = member.level_bytes + per_share * f64::from(member.share);
                    member.level_bytes = filled_bytes.min(cap_bytes);
                    rest_bytes += filled_bytes - member.level_bytes;
                }
            }
        }
    }

    /// Takes away what buckets cannot hold.
    fn cut(&self, state: &mut State) {
        let total = total_shares(&state.members);
        for member in &mut state.members {
            member.level_bytes = member.level_bytes.min(self.cap_bytes(member, total));
        }
    }

    fn cap_bytes(&self, member: &Member, total_shares: f64) -> f64 {
        (self.burst_bytes as f64 * f64::from(member.share) / total_shares).max(1.0)
    }
}

fn total_shares(members: &[Member]) -> f64 {
    members.iter().map(|member| f64::from(member.share)).sum()
}

// === impl BandwidthShare ===

impl BandwidthShare {
    /// Takes the bytes of items; returns how many items, from the first on, found some. The last of them may leave a
    /// debt, which is paid before anything else is let through.
    pub(crate) fn take(&self, lengths: impl Iterator<Item = usize>) -> usize {
        let mut state = self.bandwidth.state.lock();
        self.bandwidth.fill(&mut state);
        let Some(member) = state.members.iter_mut().find(|member| member.id == self.id) else { return 0 };
        let mut n_items = 0;
        for n_bytes in lengths {
            if member.level_bytes <= 0.0 {
                break;
            }
            member.level_bytes -= n_bytes as f64;
            n_items += 1;
        }
        n_items
    }

    /// Takes bytes that have moved, and returns when the share has paid for them.
    pub(crate) fn take_and_wait(&self, n_bytes: usize) {
        let mut state = self.bandwidth.state.lock();
        self.bandwidth.fill(&mut state);
        let total_shares = total_shares(&state.members);
        let Some(member) = state.members.iter_mut().find(|member| member.id == self.id) else { return };
        member.level_bytes -= n_bytes as f64;
        let bytes_per_s = self.bandwidth.bytes_per_s as f64 * f64::from(member.share) / total_shares;
        let wait_s = (-member.level_bytes / bytes_per_s.max(1.0)).max(0.0);
        drop(state);
        if let Ok(wait) = Duration::try_from_secs_f64(wait_s) {
            self.bandwidth.clock.pause(wait);
        }
    }

    /// Gives back the bytes of items that did not move.
    pub(crate) fn give_back(&self, n_bytes: usize) {
        let mut state = self.bandwidth.state.lock();
        if let Some(member) = state.members.iter_mut().find(|member| member.id == self.id) {
            member.level_bytes += n_bytes as f64;
        }
        self.bandwidth.cut(&mut state);
    }
}

impl Drop for BandwidthShare {
    fn drop(&mut self) {
        let mut state = self.bandwidth.state.lock();
        // What was before is shared as it was before.
        self.bandwidth.fill(&mut state);
        state.members.retain(|member| member.id != self.id);
    }
}

impl fmt::Debug for BandwidthShare {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("BandwidthShare").field("id", &self.id).finish_non_exhaustive()
    }
}
