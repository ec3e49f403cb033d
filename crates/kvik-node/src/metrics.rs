//! The metrics of a store, and of a store daemon.
//!
//! Those of a store have the labels of its owner: `model_name` and `engine` in a worker, `tenant` in a daemon. `tier` is the
//! name of a tier; in the names of counts a `-` of it is a `_`.
//!
//! | name | kind | meaning |
//! |---|---|---|
//! | `kvik_store_tier_up{tier}` | gauge | 1 while a tier of the store reads and writes |
//! | `kvik_store_tier_chunks{tier}`, `_used_bytes`, `_capacity_bytes` | gauge | what a tier holds and may hold |
//! | `kvik_store_tier_operations_total{tier,operation,outcome}` | counter | items that a lower tier was asked, by what became of them, such as `corrupt` or `skipped` |
//! | `kvik_store_tier_calls_total{tier,operation}`, `_bytes_total` | counter | calls to a lower tier, and bytes that they stored or read |
//! | `kvik_store_tier_call_seconds{tier,operation,quantile}` | gauge | what half and 99 of 100 calls took at most, since the start |
//! | `kvik_store_tier_unknown_key_reads_total{tier}` | counter | chunks of an encrypted tier that were misses, because their key is not in the file |
//! | `kvik_store_indexed_chunks`, `kvik_store_index_bytes` | gauge | chunks that the store knows, and what knowing them takes |
//! | `kvik_store_<count>_total` | counter | the counts of `GET /cache/stats`, such as `kvik_store_hit_tokens_ram_total` |
//! | `kvik_node_sessions` | gauge | engines that are attached to the daemon |
//! | `kvik_node_managers` | gauge | managing connections that are open |
//! | `kvik_node_attached_total`, `kvik_node_refused_total` | counter | engines that attached, and that were refused |
//! | `kvik_node_failed_sessions_total` | counter | sessions that ended by a mistake of the engine |
//! | `kvik_node_requests_total` | counter | requests that were answered |
//! | `kvik_node_peer_connections` | gauge | connections of other nodes |
//! | `kvik_node_refused_peers_total` | counter | connections of other nodes that were refused, or ended by a mistake |
//! | `kvik_node_lm_connections` | gauge | connections of LMCache's clients |
//! | `kvik_node_refused_lm_clients_total` | counter | connections of LMCache's clients that were refused, or ended by a mistake |
//! | `kvik_node_peer_hints_total{outcome}` | counter | lookups that asked the nodes which the index named: `right` where one had something, `wrong` where none had |
//! | `kvik_node_corrupt_chunks_total` | counter | chunks whose bytes were not those of their checksum |
//! | `kvik_node_audit_lost_total` | counter | lines that the audit log has lost |

use std::sync::Arc;

use kvik_proto::cache::{CacheStats, TierOperation};
use kvik_tier::TierKind;
use metrics::{counter, gauge};

use crate::acceptor::ConnectionCounts;
use crate::lm::LmServer;
use crate::peers::{PeerServer, PeerStats};
use crate::report::cache_stats;
use crate::server::{NodeServer, NodeStats};
use crate::tenant::Tenant;

/// The counts of a store that can become less.
const GAUGES: [&str; 3] = ["index_bytes", "indexed_chunks", "copy_queue_bytes"];

type Label = (&'static str, String);

/// Publishes what a store says of itself under the labels of its owner.
pub fn publish_store(labels: &[Label], stats: &CacheStats) {
    for (name, count) in &stats.counts {
        if GAUGES.contains(&name.as_str()) {
            gauge!(format!("kvik_store_{name}"), labels).set(*count as f64);
        } else {
            counter!(format!("kvik_store_{name}_total"), labels).absolute(*count);
        }
    }
    for tier in &stats.tiers {
        let labels = with(labels, [("tier", tier.tier.clone())]);
        let is_up = f64::from(u8::from(tier.state == "up"));
        gauge!("kvik_store_tier_up", &labels).set(is_up);
        for (name, value) in [
            ("kvik_store_tier_chunks", tier.chunks),
            ("kvik_store_tier_used_bytes", tier.used_bytes),
            ("kvik_store_tier_capacity_bytes", tier.capacity_bytes),
        ] {
            if let Some(value) = value {
                gauge!(name, &labels).set(value as f64);
            }
        }
        if let Some(count) = tier.details.get("unknown_key_reads") {
            counter!("kvik_store_tier_unknown_key_reads_total", &labels).absolute(*count);
        }
        tier.operations.iter().for_each(|operation| publish_operation(&labels, operation));
    }
}

fn publish_operation(labels: &[Label], operation: &TierOperation) {
    let labels = with(labels, [("operation", operation.operation.clone())]);
    for (outcome, count) in &operation.outcomes {
        let labels = with(&labels, [("outcome", outcome.clone())]);
        counter!("kvik_store_tier_operations_total", &labels).absolute(*count);
    }
    counter!("kvik_store_tier_calls_total", &labels).absolute(operation.calls);
    counter!("kvik_store_tier_bytes_total", &labels).absolute(operation.bytes);
    for (quantile, micros) in [("0.5", operation.p50_us), ("0.99", operation.p99_us)] {
        let labels = with(&labels, [("quantile", quantile.to_owned())]);
        gauge!("kvik_store_tier_call_seconds", &labels).set(micros as f64 / 1e6);
    }
}

/// Publishes what became of what the index said.
fn publish_hints(tenant: &Tenant) {
    let tiers = tenant.store.health();
    let details =
        tiers.iter().filter(|(tier, _)| tier.kind == TierKind::Peer).flat_map(|(_, stat)| &stat.details);
    for (name, count) in details {
        let outcome = match *name {
            "right_hints" => "right",
            "wrong_hints" => "wrong",
            _ => continue,
        };
        let labels = [("tenant", tenant.name.clone()), ("outcome", outcome.to_owned())];
        counter!("kvik_node_peer_hints_total", &labels).absolute(*count);
    }
}

fn with<const N: usize>(labels: &[Label], more: [Label; N]) -> Vec<Label> {
    labels.iter().cloned().chain(more).collect()
}

/// Publishes the state of a daemon.
#[derive(Debug)]
pub(crate) struct DaemonMetrics {
    server: Arc<NodeServer>,
    peers: Option<Arc<PeerServer>>,
    lm: Option<Arc<LmServer>>,
}

impl DaemonMetrics {
    pub(crate) fn new(
        server: Arc<NodeServer>,
        peers: Option<Arc<PeerServer>>,
        lm: Option<Arc<LmServer>>,
    ) -> Self {
        Self { server, peers, lm }
    }

    /// Takes over the present state.
    pub(crate) fn update(&self) {
        for tenant in &*self.server.tenants() {
            publish_store(&[("tenant", tenant.name.clone())], &cache_stats(&tenant.store));
            publish_hints(tenant);
        }
        let stats = self.server.stats();
        let NodeStats {
            n_sessions,
            n_managers,
            n_attached,
            n_refused,
            n_failed,
            n_requests,
            n_corrupt,
            n_audit_lost,
        } = stats;
        gauge!("kvik_node_sessions").set(n_sessions as f64);
        gauge!("kvik_node_managers").set(n_managers as f64);
        for (name, count) in [
            ("kvik_node_attached_total", n_attached),
            ("kvik_node_refused_total", n_refused),
            ("kvik_node_failed_sessions_total", n_failed),
            ("kvik_node_requests_total", n_requests),
            ("kvik_node_corrupt_chunks_total", n_corrupt),
            ("kvik_node_audit_lost_total", n_audit_lost),
        ] {
            counter!(name).absolute(count);
        }
        if let Some(peers) = &self.peers {
            let PeerStats { n_connections, n_refused } = peers.stats();
            gauge!("kvik_node_peer_connections").set(n_connections as f64);
            counter!("kvik_node_refused_peers_total").absolute(n_refused);
        }
        if let Some(lm) = &self.lm {
            let ConnectionCounts { n_connections, n_refused } = lm.counts();
            gauge!("kvik_node_lm_connections").set(n_connections as f64);
            counter!("kvik_node_refused_lm_clients_total").absolute(n_refused);
        }
    }
}
