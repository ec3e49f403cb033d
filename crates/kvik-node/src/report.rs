//! What a store says of itself, in the words of the cache API.

use std::collections::BTreeMap;

use kvik_proto::cache::{CacheStats, TierOperation, TierReport};
use kvik_store::{Store, TierLabel};
use kvik_tier::shared::checksum;
use kvik_tier::{OperationMetrics, TierHealth, TierStat};
use rustix::fs::fstat;

/// What the kernel calls the time since the machine started.
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// What a store counted since its start, and the state of its tiers.
pub fn cache_stats(store: &Store) -> CacheStats {
    let stats = store.stats();
    let mut counts: BTreeMap<String, u64> = [
        ("lookups", stats.n_lookups),
        ("retrieves", stats.n_retrieves),
        ("requested_tokens", stats.requested_tokens),
        ("truncated_retrieves", stats.n_truncated),
        ("timed_out_retrieves", stats.n_timeouts),
        ("stored_chunks", stats.n_stored),
        ("stored_again_chunks", stats.n_stored_before),
        ("refused_slots", stats.n_refused),
        ("stored_bytes", stats.stored_bytes),
        ("promoted_chunks", stats.n_promoted),
        ("flights", stats.n_flights),
        ("joined_flights", stats.n_joined_flights),
        ("direct_chunks", stats.n_direct),
        ("direct_bytes", stats.direct_bytes),
        ("failed_direct_reads", stats.n_failed_direct),
        ("direct_written_chunks", stats.n_direct_writes),
        ("direct_written_bytes", stats.direct_written_bytes),
        ("failed_direct_writes", stats.n_failed_direct_writes),
        ("indexed_chunks", stats.n_entries),
        ("index_bytes", stats.directory_bytes),
    ]
    .map(|(name, count)| (name.to_owned(), count))
    .into();
    for (name, by_tier) in [
        ("hit_tokens", &stats.hit_tokens),
        ("written_chunks", &stats.written),
        ("dropped_writes", &stats.dropped_writes),
        ("loaded_chunks", &stats.loaded),
        ("failed_loads", &stats.failed_loads),
        ("evicted_chunks", &stats.evicted_chunks),
        ("token_mismatches", &stats.token_mismatches),
    ] {
        counts.extend(
            by_tier
                .iter()
                .map(|(tier, count)| (format!("{name}_{}", tier.as_str().replace('-', "_")), *count)),
        );
    }
    CacheStats {
        chunk_tokens: store.options().chunk_tokens.get(),
        counts,
        tiers: tier_reports(store),
        store_id: store_id(store).unwrap_or_default(),
    }
}

/// Names the memory of a store on all machines, as long as there is it: also when another daemon takes over. `None` where
/// the operating system does not tell.
fn store_id(store: &Store) -> Option<String> {
    let boot_id = std::fs::read_to_string(BOOT_ID_FILE).ok()?;
    let stat = fstat(store.arena().as_fd()).ok()?;
    // Summed up, because the name of a boot is not for others to know.
    let sum = checksum(format!("{boot_id} {} {}", stat.st_dev, stat.st_ino).as_bytes());
    Some(format!("{:016x}", sum.0))
}

/// The state of each tier, memory first.
pub fn tier_reports(store: &Store) -> Vec<TierReport> {
    store.health().into_iter().map(|(tier, stat)| report(&tier, stat)).collect()
}

fn report(tier: &TierLabel, stat: TierStat) -> TierReport {
    let (state, reason) = match stat.health {
        TierHealth::Up => ("up", None),
        TierHealth::ReadOnly(reason) => ("read_only", Some(reason)),
        TierHealth::Down(reason) => ("down", Some(reason)),
    };
    TierReport {
        tier: tier.name.to_string(),
        kind: tier.kind.name().to_owned(),
        state: state.to_owned(),
        reason,
        chunks: stat.n_chunks,
        used_bytes: stat.used_bytes,
        capacity_bytes: stat.capacity_bytes,
        details: stat.details.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        operations: stat
            .operations
            .iter()
            .filter(|metrics| metrics.latencies.n_calls() > 0)
            .map(operation)
            .collect(),
    }
}

fn operation(metrics: &OperationMetrics) -> TierOperation {
    let OperationMetrics { operation, outcomes, n_bytes, latencies } = metrics;
    TierOperation {
        operation: (*operation).to_owned(),
        outcomes: outcomes.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
        bytes: *n_bytes,
        calls: latencies.n_calls(),
        p50_us: latencies.p50().as_micros() as u64,
        p99_us: latencies.p99().as_micros() as u64,
    }
}
