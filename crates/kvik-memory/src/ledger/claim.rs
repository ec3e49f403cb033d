//! Claim, verify, confirm: how grants are taken without a lock.
//!
//! A claimant first writes what it wants into its own word, then looks at all words. Between the
//! two stands a sequentially consistent fence, so of two claimants at the same time the one whose
//! fence is later sees the other. What a claimant sees as pending it counts as held: so the sum of what
//! is confirmed never exceeds a limit, whatever the order and wherever a process is stopped or killed.
//!
//! The protocol is written over [`Word`], so that a model checker can run exactly this code.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::steps;

/// How often a claim that saw another one in flight tries again before it is denied.
const MAX_ATTEMPTS: u32 = 16;

/// An atomic word of 64 bits.
pub trait Word {
    /// Reads the word; what was written before it was written is visible afterwards.
    fn load(&self) -> u64;

    /// Writes `value`; what was written before is visible to its reader.
    fn store(&self, value: u64);

    /// Writes `new` if the word is `current`; says whether it was.
    fn replace(&self, current: u64, new: u64) -> bool;

    /// Orders all of this thread's accesses before with all after, among all threads that do the same.
    fn fence();

    /// Lets time pass before attempt `attempt` of slot `slot`.
    fn pause(attempt: u32, slot: usize);
}

/// What a claim needs to see.
///
/// The implementation reads each word anew on every call.
pub trait GrantTable {
    /// The words' type.
    type Word: Word;

    /// How many slots may hold grants.
    fn n_slots(&self) -> usize;

    /// The grant word of `slot`.
    fn grant(&self, slot: usize) -> &Self::Word;

    /// The group of `slot`.
    fn group(&self, slot: usize) -> u64;

    /// What all slots together may hold.
    fn budget_units(&self) -> u64;

    /// What the slots of `group` together may hold.
    fn limit_units(&self, group: u64) -> u64;
}

/// A slot's grant: what it holds and what it is asking for, in units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// Held.
    pub confirmed: u32,
    /// Asked for; counts as held until it is confirmed or withdrawn.
    pub pending: u32,
}

/// What came of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The units are held.
    Granted,
    /// The limit of the group is reached.
    GroupLimit,
    /// The budget of the device is reached, or others are in flight for what is left.
    DeviceFull,
    /// Another writer changed the word, which only its owner may write: the slot is lost.
    Lost,
}

enum Verdict {
    Fits,
    Contended(Outcome),
    Full(Outcome),
}

/// Takes `n_units` for `slot`, or nothing.
///
/// The caller owns the slot and makes one claim at a time on it.
pub fn claim<B: GrantTable>(table: &B, slot: usize, n_units: u32) -> Outcome {
    let mut attempt = 0;
    loop {
        match try_claim(table, slot, n_units) {
            Verdict::Fits => return Outcome::Granted,
            Verdict::Full(outcome) => return outcome,
            Verdict::Contended(outcome) => {
                attempt += 1;
                if attempt == MAX_ATTEMPTS {
                    return outcome;
                }
                B::Word::pause(attempt, slot);
            }
        }
    }
}

/// Returns `n_units` of `slot`, or as many as it holds; says how many.
///
/// The caller owns the slot and has released their memory.
pub fn give_back<W: Word>(word: &W, n_units: u32) -> u32 {
    loop {
        let packed = word.load();
        let grant = Grant::unpack(packed);
        let n_returned = n_units.min(grant.confirmed);
        let after = Grant { confirmed: grant.confirmed - n_returned, ..grant };
        if word.replace(packed, after.pack()) {
            return n_returned;
        }
    }
}

fn try_claim<B: GrantTable>(table: &B, slot: usize, n_units: u32) -> Verdict {
    let word = table.grant(slot);
    let before_packed = word.load();
    let before = Grant::unpack(before_packed);
    let Some(confirmed) = before.confirmed.checked_add(n_units) else {
        return Verdict::Full(Outcome::DeviceFull);
    };
    let claimed = Grant { confirmed: before.confirmed, pending: n_units };
    if !word.replace(before_packed, claimed.pack()) {
        return Verdict::Full(Outcome::Lost);
    }
    steps::step();
    B::Word::fence();
    let verdict = verify(table, slot, n_units);
    steps::step();
    let after = match verdict {
        Verdict::Fits => Grant { confirmed, pending: 0 },
        Verdict::Contended(_) | Verdict::Full(_) => Grant { confirmed: before.confirmed, pending: 0 },
    };
    if !word.replace(claimed.pack(), after.pack()) {
        return Verdict::Full(Outcome::Lost);
    }
    steps::step();
    verdict
}

/// Compares what would be held with the limits.
fn verify<B: GrantTable>(table: &B, slot: usize, n_units: u32) -> Verdict {
    let own_group = table.group(slot);
    let mut device = Sum::default();
    let mut group = Sum::default();
    for other in 0..table.n_slots() {
        let mut grant = Grant::unpack(table.grant(other).load());
        if other == slot {
            grant.pending = 0;
        }
        device.add(grant);
        if other == slot || table.group(other) == own_group {
            group.add(grant);
        }
    }
    let n_units = u64::from(n_units);
    let limit_units = table.limit_units(own_group);
    let budget_units = table.budget_units();
    if group.confirmed + n_units > limit_units {
        Verdict::Full(Outcome::GroupLimit)
    } else if device.confirmed + n_units > budget_units {
        Verdict::Full(Outcome::DeviceFull)
    } else if group.confirmed + group.pending + n_units > limit_units {
        Verdict::Contended(Outcome::GroupLimit)
    } else if device.confirmed + device.pending + n_units > budget_units {
        Verdict::Contended(Outcome::DeviceFull)
    } else {
        Verdict::Fits
    }
}

/// Cannot overflow: a table has far fewer than 2^32 slots of less than 2^32 units.
#[derive(Default)]
struct Sum {
    confirmed: u64,
    pending: u64,
}

impl Sum {
    fn add(&mut self, grant: Grant) {
        self.confirmed += u64::from(grant.confirmed);
        self.pending += u64::from(grant.pending);
    }
}

// === impl Grant ===

impl Grant {
    /// The grant in a word.
    pub fn unpack(word: u64) -> Self {
        Self { confirmed: (word >> 32) as u32, pending: word as u32 }
    }

    /// The word of a grant.
    pub fn pack(self) -> u64 {
        u64::from(self.confirmed) << 32 | u64::from(self.pending)
    }

    /// What counts as held.
    pub fn held_units(self) -> u64 {
        u64::from(self.confirmed) + u64::from(self.pending)
    }
}

// === impl Word for AtomicU64 ===

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn store(&self, value: u64) {
        self.store(value, Ordering::Release);
    }

    fn replace(&self, current: u64, new: u64) -> bool {
        // The fence between claim and verification gives the total order; the word itself needs
        // only to be read after what was written before it.
        self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }

    fn pause(attempt: u32, slot: usize) {
        // Lower slots come back sooner, so two that saw each other do not meet again.
        let n_spins = (slot + 1) << attempt.min(6);
        for _ in 0..n_spins {
            std::hint::spin_loop();
        }
        if attempt > 6 {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests;
