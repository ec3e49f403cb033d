//! The protocol under a model checker: every interleaving, with the memory model's reorderings.

use std::sync::atomic::Ordering as StdOrdering;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64 as LoomWord, Ordering};
use loom::thread;

use super::{
    Grant, GrantTable, MAX_SLACK_UNITS, MAX_UNITS, Outcome, Word, claim, claim_slack, give_back, take_slack,
    try_claim,
};

impl Word for LoomWord {
    fn load(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn store(&self, value: u64) {
        self.store(value, Ordering::Release);
    }

    fn replace(&self, current: u64, new: u64) -> bool {
        self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    fn pause(_attempt: u32, _slot: usize) {
        thread::yield_now();
    }
}

struct ModelTable {
    grants: Vec<LoomWord>,
    groups: Vec<u64>,
    budget_units: u64,
    limit_units: u64,
}

impl ModelTable {
    fn new(groups: &[u64], budget_units: u64, limit_units: u64) -> Arc<Self> {
        let grants = groups.iter().map(|_| LoomWord::new(0)).collect();
        Arc::new(Self { grants, groups: groups.to_vec(), budget_units, limit_units })
    }

    fn confirmed(&self, slot: usize) -> u64 {
        Grant::unpack(Word::load(&self.grants[slot])).confirmed.into()
    }
}

impl GrantTable for ModelTable {
    type Word = LoomWord;

    fn n_slots(&self) -> usize {
        self.grants.len()
    }

    fn grant(&self, slot: usize) -> &LoomWord {
        &self.grants[slot]
    }

    fn group(&self, slot: usize) -> u64 {
        self.groups[slot]
    }

    fn budget_units(&self) -> u64 {
        self.budget_units
    }

    fn limit_units(&self, _group: u64) -> u64 {
        self.limit_units
    }
}

/// One attempt without retries keeps the state space small; `claim` only repeats it.
fn attempt(table: &ModelTable, slot: usize, n_units: u32) -> bool {
    matches!(try_claim(table, slot, n_units), super::Verdict::Fits)
}

fn model(preemption_bound: Option<usize>, test: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemption_bound;
    builder.check(test);
}

#[test]
fn two_claims_never_exceed_the_budget_in_any_order() {
    static N_BOTH_DENIED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    model(None, || {
        let table = ModelTable::new(&[0, 1], 3, 3);
        let peer = Arc::clone(&table);
        let other = thread::spawn(move || attempt(&peer, 1, 2));
        let mine = attempt(&table, 0, 2);
        let theirs = other.join().unwrap();
        assert!(!(mine && theirs), "4 of 3 units are held");
        assert_eq!(table.confirmed(0), if mine { 2 } else { 0 });
        assert_eq!(table.confirmed(1), if theirs { 2 } else { 0 });
        if !mine && !theirs {
            N_BOTH_DENIED.fetch_add(1, StdOrdering::Relaxed);
            assert_eq!(
                claim(&*table, 0, 2),
                Outcome::Granted,
                "a claim that fits alone is granted on a retry"
            );
        }
    });
    assert!(N_BOTH_DENIED.load(StdOrdering::Relaxed) > 0, "the model never made two claims see each other");
}

#[test]
fn two_members_of_a_group_never_exceed_its_limit() {
    model(None, || {
        let table = ModelTable::new(&[7, 7], 100, 3);
        let peer = Arc::clone(&table);
        let other = thread::spawn(move || attempt(&peer, 1, 2));
        let mine = attempt(&table, 0, 2);
        let theirs = other.join().unwrap();
        assert!(!(mine && theirs));
        assert!(table.confirmed(0) + table.confirmed(1) <= 3);
    });
}

#[test]
fn three_claims_never_exceed_the_budget() {
    model(Some(3), || {
        let table = ModelTable::new(&[0, 1, 2], 4, 4);
        let peers: Vec<_> = [1, 2]
            .map(|slot| {
                let table = Arc::clone(&table);
                thread::spawn(move || attempt(&table, slot, 2))
            })
            .into_iter()
            .collect();
        let mut n_granted = u64::from(attempt(&table, 0, 2));
        for peer in peers {
            n_granted += u64::from(peer.join().unwrap());
        }
        let sum: u64 = (0..3).map(|slot| table.confirmed(slot)).sum();
        assert_eq!(sum, 2 * n_granted);
        assert!(sum <= 4, "{sum} of 4 units are held");
    });
}

#[test]
fn a_release_during_a_claim_frees_only_what_was_released() {
    model(None, || {
        let table = ModelTable::new(&[0, 1], 4, 4);
        assert_eq!(claim(&*table, 1, 3), Outcome::Granted);
        let peer = Arc::clone(&table);
        let other = thread::spawn(move || assert_eq!(give_back(&peer.grants[1], 2, None).n_units, 2));
        let mine = attempt(&table, 0, 3);
        // Whatever it saw, the units it took were free when it confirmed.
        if mine {
            assert_eq!(table.confirmed(1), 1);
        }
        other.join().unwrap();
        assert!(mine || attempt(&table, 0, 3), "what was released can be claimed");
        assert_eq!(table.confirmed(0) + table.confirmed(1), 4);
    });
}

#[test]
fn a_reap_during_two_claims_returns_the_dead_ones_units_once() {
    model(Some(3), || {
        let table = ModelTable::new(&[0, 1, 2], 4, 4);
        // The dead one was killed between claim and confirmation.
        Word::store(&table.grants[2], Grant { confirmed: 2, pending: 2, slack: 0 }.pack());
        let reaper = {
            let table = Arc::clone(&table);
            thread::spawn(move || Word::store(&table.grants[2], 0))
        };
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || attempt(&table, 1, 3))
        };
        let mine = attempt(&table, 0, 3);
        let theirs = other.join().unwrap();
        reaper.join().unwrap();
        assert!(!(mine && theirs));
        if !mine && !theirs {
            assert_eq!(claim(&*table, 0, 3), Outcome::Granted);
        }
        assert_eq!(table.confirmed(0) + table.confirmed(1), 3);
    });
}

#[test]
fn a_claim_that_is_stopped_half_way_counts_and_stops_no_other() {
    model(None, || {
        let table = ModelTable::new(&[0, 1], 4, 4);
        Word::store(&table.grants[1], Grant { confirmed: 0, pending: 2, slack: 0 }.pack());
        assert_eq!(claim(&*table, 0, 3), Outcome::DeviceFull);
        assert_eq!(claim(&*table, 0, 2), Outcome::Granted);
    });
}

#[test]
fn a_slot_that_another_thread_wrote_is_lost_and_not_granted() {
    model(None, || {
        let table = ModelTable::new(&[0], 4, 4);
        let peer = Arc::clone(&table);
        let intruder = thread::spawn(move || {
            let word = &peer.grants[0];
            let packed = Word::load(word);
            word.replace(packed, Grant { confirmed: 9, pending: 9, slack: 9 }.pack())
        });
        let outcome = claim(&*table, 0, 1);
        intruder.join().unwrap();
        assert!(matches!(outcome, Outcome::Granted | Outcome::Lost | Outcome::DeviceFull));
        if outcome == Outcome::Lost {
            assert_eq!(table.confirmed(0), 9, "the other's word is left as it is");
        }
    });
}

#[test]
fn slack_is_taken_by_its_owner_or_by_a_claim_that_needs_it_and_never_by_both() {
    model(None, || {
        let table = ModelTable::new(&[0, 1], 3, 3);
        Word::store(&table.grants[0], Grant { confirmed: 1, pending: 0, slack: 2 }.pack());
        let peer = Arc::clone(&table);
        let other = thread::spawn(move || claim(&*peer, 1, 2) == Outcome::Granted);
        let mine = claim_slack(&table.grants[0], 1);
        let theirs = other.join().unwrap();
        assert!(mine != theirs, "the units that are left are for one of them: {mine}, {theirs}");
        assert_eq!(table.confirmed(0), if mine { 2 } else { 1 });
        assert_eq!(table.confirmed(1), if theirs { 2 } else { 0 });
    });
}

#[test]
fn what_is_given_back_while_a_wait_begins_does_not_stay_as_slack() {
    static N_KEPT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    static N_GIVEN: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    model(None, || {
        let table = ModelTable::new(&[0, 1], 2, 2);
        let epoch = Arc::new(LoomWord::new(7));
        Word::store(&table.grants[0], Grant { confirmed: 2, pending: 0, slack: 0 }.pack());
        let (peer, epoch_of_peer) = (Arc::clone(&table), Arc::clone(&epoch));
        let waiter = thread::spawn(move || {
            Word::store(&*epoch_of_peer, 8);
            LoomWord::fence();
            take_slack(&*peer)
        });
        let returned = give_back(&table.grants[0], 2, Some((&*epoch, 7)));
        let n_taken = waiter.join().unwrap();
        assert_eq!(returned.n_units, 2);
        assert_eq!(Word::load(&table.grants[0]), 0, "slack is left beside a waiter");
        assert!(!returned.is_kept || n_taken == 2, "the giver announces nothing, and the waiter saw nothing");
        let counter = if returned.is_kept { &N_KEPT } else { &N_GIVEN };
        counter.fetch_add(1, StdOrdering::Relaxed);
    });
    assert!(N_KEPT.load(StdOrdering::Relaxed) > 0 && N_GIVEN.load(StdOrdering::Relaxed) > 0);
}

#[test]
fn slack_has_a_bound_and_a_word_is_read_as_it_was_written() {
    model(None, || {
        let table = ModelTable::new(&[0], 1000, 1000);
        let epoch = LoomWord::new(0);
        assert_eq!(claim(&*table, 0, 300), Outcome::Granted);
        let returned = give_back(&table.grants[0], 300, Some((&epoch, 0)));
        assert_eq!((returned.n_units, returned.is_kept), (300, false));
        assert!(!claim_slack(&table.grants[0], MAX_SLACK_UNITS + 1));
        assert!(claim_slack(&table.grants[0], MAX_SLACK_UNITS));
        assert_eq!(table.confirmed(0), u64::from(MAX_SLACK_UNITS));
        let most = Grant { confirmed: MAX_UNITS, pending: MAX_UNITS - 1, slack: MAX_SLACK_UNITS };
        assert_eq!(Grant::unpack(most.pack()), most);
        Word::store(&table.grants[0], Grant { confirmed: MAX_UNITS, pending: 0, slack: 9 }.pack());
        assert!(!claim_slack(&table.grants[0], 1));
        assert_eq!(claim(&*table, 0, 1), Outcome::DeviceFull);
    });
}
