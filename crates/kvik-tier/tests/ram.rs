//! The tier in memory has the behaviors of all tiers: alone, behind the decorator that proves chunks, and under
//! faults.

use kvik_tier::conformance::{self, Traits};
use kvik_tier::{Arena, ArenaOptions, Checksummed, FaultRates, Faulty, RamTier, Tier};

#[expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
fn tier(capacity_bytes: u64) -> RamTier {
    RamTier::new(Arena::new(ArenaOptions::new(capacity_bytes)).unwrap())
}

#[test]
fn memory_behaves_as_a_tier() {
    let make = || Box::new(tier(64 << 20)) as Box<dyn Tier>;
    conformance::run(&make, &Traits::default());
}

#[test]
fn memory_that_is_short_behaves_as_a_tier() {
    let capacity_bytes = 8 << 20;
    let make = || Box::new(tier(capacity_bytes)) as Box<dyn Tier>;
    conformance::run(
        &make,
        &Traits { capacity_bytes: Some(capacity_bytes), max_chunk_bytes: 1 << 20, ..Traits::default() },
    );
}

#[test]
fn proven_memory_behaves_as_a_tier() {
    let make = || Box::new(Checksummed::new(tier(64 << 20))) as Box<dyn Tier>;
    conformance::run(&make, &Traits::default());
}

#[test]
fn memory_under_faults_gives_the_right_bytes_or_none() {
    let rates = FaultRates {
        fail: 20,
        fail_late: 20,
        lose: 20,
        tear: 20,
        shorten: 20,
        duplicate: 20,
        flip: 20,
        mix: 20,
        ..FaultRates::default()
    };
    let make = |seed| {
        let faulty = Faulty::new(tier(16 << 20), rates.clone(), seed);
        Box::new(Checksummed::new(faulty)) as Box<dyn Tier>
    };
    let n_hits = conformance::run_under_faults(&make, 0..10);
    assert!(n_hits > 100, "{n_hits} hits");
}
