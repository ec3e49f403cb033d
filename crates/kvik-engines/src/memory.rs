//! The engines' places in the ledgers of elastic memory, and weights that follow traffic.
//!
//! A weight follows traffic within bounds: it is the configured one times 1 to [`MAX_FACTOR`], by the model's rate beside
//! that of the busiest model. An idle engine keeps its configured weight, so it is never pushed out for good.

use std::collections::BTreeMap;
use std::path::Path;

use kvik_memory::ledger::{Ledger, LedgerOptions, Policy};

use crate::config::EngineMemory;
use crate::error::Result;

/// Most that traffic multiplies a weight by.
const MAX_FACTOR: f64 = 4.0;

/// What a group has now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Held {
    pub(crate) held_bytes: u64,
    pub(crate) used_bytes: u64,
}

/// Sets what the group of an engine may have; the group is there before its engine then.
///
/// # Errors
/// If the ledger cannot be opened or refuses the policy.
pub(crate) fn apply(dir: &Path, memory: &EngineMemory) -> Result<()> {
    let options = LedgerOptions { dir: dir.to_owned(), ..LedgerOptions::new(&memory.device) };
    Ok(Ledger::open(&options)?.set_policy(&memory.group, &memory.policy)?)
}

/// Changes the weight of a group, and leaves what else it may have.
///
/// # Errors
/// If the ledger cannot be opened or refuses the policy.
pub(crate) fn set_weight(dir: &Path, memory: &EngineMemory, weight: u32) -> Result<()> {
    let Some(ledger) = Ledger::open_existing(dir, &memory.device)? else { return Ok(()) };
    let groups = ledger.snapshot()?.groups;
    let Some(group) = groups.into_iter().find(|group| group.ipc_name == memory.group) else { return Ok(()) };
    if group.policy.weight != weight {
        ledger.set_policy(&memory.group, &Policy { weight, ..group.policy })?;
    }
    Ok(())
}

/// What the groups of a device have, by name; nothing where there is no ledger.
pub(crate) fn held(dir: &Path, device: &str) -> BTreeMap<String, Held> {
    let snapshot =
        Ledger::open_existing(dir, device).ok().flatten().and_then(|ledger| ledger.snapshot().ok());
    let groups = snapshot.into_iter().flat_map(|snapshot| snapshot.groups);
    groups
        .map(|group| (group.ipc_name, Held { held_bytes: group.held_bytes, used_bytes: group.used_bytes }))
        .collect()
}

/// The weight of a model that has `rate` requests a second where the busiest has `max_rate`.
pub(crate) fn weight(configured: u32, rate: f64, max_rate: f64) -> u32 {
    let share = if max_rate > 0.0 { (rate / max_rate).clamp(0.0, 1.0) } else { 0.0 };
    let weight = f64::from(configured) * (1.0 + (MAX_FACTOR - 1.0) * share);
    (weight.round() as u32).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_weight_is_bounded_and_grows_with_the_rate(
            configured in 1..1000_u32,
            rates in (0.0..1e6_f64, 0.0..1e6_f64),
        ) {
            let (low, high) = (rates.0.min(rates.1), rates.0.max(rates.1));
            let (idle, busy) = (weight(configured, low, high), weight(configured, high, high));
            prop_assert!(configured <= idle && idle <= busy && busy <= configured * 4);
        }
    }

    #[test]
    fn a_policy_is_there_before_its_engine() {
        let dir = tempfile::tempdir().unwrap();
        let policy = Policy { max_bytes: Some(64 << 20), weight: 3, ..Policy::default() };
        let memory = EngineMemory { device: "host0".to_owned(), group: "a".to_owned(), policy };
        apply(dir.path(), &memory).unwrap();
        let ledger = Ledger::open_existing(dir.path(), "host0").unwrap().unwrap();
        assert_eq!(ledger.snapshot().unwrap().groups[0].policy, policy);
        set_weight(dir.path(), &memory, 7).unwrap();
        let changed = ledger.snapshot().unwrap().groups[0].policy;
        assert_eq!(changed, Policy { weight: 7, ..policy });
        assert_eq!(held(dir.path(), "host0")["a"], Held { held_bytes: 0, used_bytes: 0 });
        assert!(held(dir.path(), "host1").is_empty());
    }
}
