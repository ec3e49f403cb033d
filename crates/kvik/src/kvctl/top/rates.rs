//! How fast members map and unmap: what two readings differ in, by time.

use std::collections::HashMap;
use std::time::Duration;

use kvik_memory::ledger::MemberSnapshot;
use serde::Serialize;

use crate::folder::Reading;

/// The rates of every member between two readings.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rates {
    by_member: HashMap<MemberKey, Rate>,
}

/// Bytes per second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Rate {
    pub(crate) map_bytes_per_s: f64,
    pub(crate) unmap_bytes_per_s: f64,
}

/// A slot is taken by one engine after the other; the generation tells them apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct MemberKey {
    device: String,
    slot: usize,
    generation: u64,
}

// === impl Rates ===

impl Rates {
    /// The rates between `before` and `after`, which was read `elapsed` later.
    ///
    /// A member that joined in between has none yet.
    pub(crate) fn between(before: &Reading, after: &Reading, elapsed: Duration) -> Self {
        let elapsed_s = elapsed.as_secs_f64();
        if elapsed_s <= 0.0 {
            return Self::default();
        }
        let earlier: HashMap<MemberKey, &MemberSnapshot> = members(before).collect();
        let per_second = |now: u64, then: u64| now.saturating_sub(then) as f64 / elapsed_s;
        let rate_of = |(key, now): (MemberKey, &MemberSnapshot)| {
            let then = earlier.get(&key)?;
            let rate = Rate {
                map_bytes_per_s: per_second(now.mapped_bytes, then.mapped_bytes),
                unmap_bytes_per_s: per_second(now.unmapped_bytes, then.unmapped_bytes),
            };
            Some((key, rate))
        };
        Self { by_member: members(after).filter_map(rate_of).collect() }
    }

    /// The rate of one member; zero if it is not known.
    pub(crate) fn of(&self, device: &str, member: &MemberSnapshot) -> Rate {
        self.by_member.get(&MemberKey::new(device, member)).copied().unwrap_or_default()
    }
}

// === impl Rate ===

impl std::ops::AddAssign for Rate {
    fn add_assign(&mut self, other: Self) {
        self.map_bytes_per_s += other.map_bytes_per_s;
        self.unmap_bytes_per_s += other.unmap_bytes_per_s;
    }
}

// === impl MemberKey ===

impl MemberKey {
    fn new(device: &str, member: &MemberSnapshot) -> Self {
        Self { device: device.to_owned(), slot: member.slot, generation: member.generation }
    }
}

fn members(reading: &Reading) -> impl Iterator<Item = (MemberKey, &MemberSnapshot)> {
    reading.devices.iter().flat_map(|device| {
        device.members.iter().map(|member| (MemberKey::new(&device.device, member), member))
    })
}
