//! Claim, verify, confirm: how grants are taken without a lock.
//!
//! A claimant first writes what it wants into its own word, then looks at all words. Between the
//! two stands a sequentially consistent fence, so of two claimants at the same time the one whose
//! fence is later sees the other. What a claimant sees as pending it counts as held: so the sum of what
//! is confirmed never exceeds a limit, whatever the order and wherever a process is stopped or killed.
//!
//! What a slot gives back stays with it as slack while no claim waits and every limit holds: it counts as held, so the
//! slot takes it again without a look at others. A claim that does not fit takes the slack of all others first, so
//! slack denies nothing. Only this way may a word be written by another than its owner.
//!
//! The protocol is written over [`Word`], so that a model checker can run exactly this code.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::steps;

/// How often a claim that saw another one in flight tries again before it is denied.
const MAX_ATTEMPTS: u32 = 16;

/// The most units that a slot keeps as slack: what its bits hold.
pub const MAX_SLACK_UNITS: u32 = (1 << SLACK_BITS) - 1;

const SLACK_BITS: u32 = 8;

/// Bits of what is held and of what is asked for: 512 TiB of units of 2 MiB.
const COUNT_BITS: u32 = 28;

/// The most units that a grant can say.
const MAX_UNITS: u32 = (1 << COUNT_BITS) - 1;

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
    /// Given back, and still counted against the limits until another claim takes it.
    pub slack: u32,
}

/// What came of giving units back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returned {
    /// Units that were held and are no more.
    pub n_units: u32,
    /// Whether all of them stay with the slot as slack, so that others have no more than before.
    pub is_kept: bool,
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
        let verdict = try_claim(table, slot, n_units);
        match verdict {
            Verdict::Fits => return Outcome::Granted,
            Verdict::Full(Outcome::Lost) => return Outcome::Lost,
            Verdict::Full(outcome) | Verdict::Contended(outcome) => {
                attempt += 1;
                if attempt == MAX_ATTEMPTS {
                    return outcome;
                }
                let has_taken_slack = take_slack(table) > 0;
                match verdict {
                    _ if has_taken_slack => {}
                    Verdict::Contended(_) => B::Word::pause(attempt, slot),
                    _ => return outcome,
                }
            }
        }
    }
}

/// Takes `n_units` of a slot's own slack; false where it has less.
///
/// The caller owns the slot and makes one claim at a time on it.
pub fn claim_slack<W: Word>(word: &W, n_units: u32) -> bool {
    let packed = word.load();
    let grant = Grant::unpack(packed);
    let (Some(slack), confirmed) =
        (grant.slack.checked_sub(n_units), grant.confirmed.saturating_add(n_units))
    else {
        return false;
    };
    confirmed <= MAX_UNITS && word.replace(packed, Grant { confirmed, slack, ..grant }.pack())
}

/// Returns `n_units` of a slot, or as many as it holds.
///
/// With `calm`, a word and the value it had when no claim waited and every limit held, they become slack as far as there is
/// room for it, unless the word has another value now. The caller owns the slot and has released their memory.
pub fn give_back<W: Word>(word: &W, n_units: u32, calm: Option<(&W, u64)>) -> Returned {
    let (n_units, is_kept) = loop {
        let packed = word.load();
        let grant = Grant::unpack(packed);
        let n_returned = n_units.min(grant.confirmed);
        let room = if calm.is_some() { MAX_SLACK_UNITS - grant.slack.min(MAX_SLACK_UNITS) } else { 0 };
        let n_kept = n_returned.min(room);
        let after = Grant { confirmed: grant.confirmed - n_returned, slack: grant.slack + n_kept, ..grant };
        if word.replace(packed, after.pack()) {
            break (n_returned, n_kept == n_returned && n_kept > 0);
        }
    };
    let Some((epoch, calm)) = calm else { return Returned { n_units, is_kept: false } };
    steps::step();
    // A waiter advances the word and then takes slack: either it sees this slack, or this sees the advanced word.
    W::fence();
    if epoch.load() == calm {
        return Returned { n_units, is_kept };
    }
    take_slack_of(word);
    Returned { n_units, is_kept: false }
}

/// Takes the slack of all slots, which is free then; says how much it was.
pub fn take_slack<B: GrantTable>(table: &B) -> u64 {
    (0..table.n_slots()).map(|slot| u64::from(take_slack_of(table.grant(slot)))).sum()
}

/// Takes the slack of one slot.
pub fn take_slack_of<W: Word>(word: &W) -> u32 {
    loop {
        let packed = word.load();
        let grant = Grant::unpack(packed);
        if grant.slack == 0 || word.replace(packed, Grant { slack: 0, ..grant }.pack()) {
            return grant.slack;
        }
    }
}

/// Whether everything that counts is within the limits of the device and of the group of `slot`.
pub fn is_within_limits<B: GrantTable>(table: &B, slot: usize) -> bool {
    matches!(verify(table, slot, 0), Verdict::Fits)
}

fn try_claim<B: GrantTable>(table: &B, slot: usize, n_units: u32) -> Verdict {
    let word = table.grant(slot);
    // Without slack only the owner writes the word.
    take_slack_of(word);
    let before_packed = word.load();
    let before = Grant::unpack(before_packed);
    let confirmed = before.confirmed.saturating_add(n_units);
    if confirmed > MAX_UNITS {
        return Verdict::Full(Outcome::DeviceFull);
    }
    let claimed = Grant { confirmed: before.confirmed, pending: n_units, slack: 0 };
    if !word.replace(before_packed, claimed.pack()) {
        return Verdict::Full(Outcome::Lost);
    }
    steps::step();
    B::Word::fence();
    let verdict = verify(table, slot, n_units);
    steps::step();
    let after = match verdict {
        Verdict::Fits => Grant { confirmed, pending: 0, slack: 0 },
        Verdict::Contended(_) | Verdict::Full(_) => {
            Grant { confirmed: before.confirmed, pending: 0, slack: 0 }
        }
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
        self.confirmed += u64::from(grant.confirmed) + u64::from(grant.slack);
        self.pending += u64::from(grant.pending);
    }
}

// === impl Grant ===

impl Grant {
    /// The grant in a word.
    pub fn unpack(word: u64) -> Self {
        let count = |shift: u32| (word >> shift) as u32 & MAX_UNITS;
        Self {
            confirmed: count(COUNT_BITS + SLACK_BITS),
            pending: count(SLACK_BITS),
            slack: word as u32 & MAX_SLACK_UNITS,
        }
    }

    /// The word of a grant, whose counts are within their bits.
    pub fn pack(self) -> u64 {
        u64::from(self.confirmed) << (COUNT_BITS + SLACK_BITS)
            | u64::from(self.pending) << SLACK_BITS
            | u64::from(self.slack)
    }

    /// What is held or asked for; slack is free for any claim.
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
