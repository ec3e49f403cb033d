//! The coordinator's API: membership in, routing snapshots out.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `POST /register` | [`RegisterRequest`] | [`RegisterResponse`] |
//! | `POST /heartbeat` | [`HeartbeatRequest`] | [`HeartbeatResponse`]; 404: register again |
//! | `POST /deregister` | [`DeregisterRequest`] | 204 |
//! | `POST /workers/{id}/drain` | none | 204 |
//! | `GET /workers` | none | [`Snapshot`] |
//! | `GET /ring` | none | [`RingView`] |
//! | `GET /route?seq_id=..&explain=true` | none | [`RouteResponse`] |
//! | `GET /watch` | none | server-sent [`WatchEvent`]s: a snapshot, then one after each change |
//!
//! [`stores`](crate::stores) has the calls of store daemons.

use serde::{Deserialize, Serialize};

use crate::stores::StoreInfo;

/// A worker as it describes itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Name of the worker, unique among the live ones.
    pub id: String,
    /// One life of the worker: larger in each later life. The larger one wins.
    pub epoch: u64,
    /// Base address of its API: `http://host:port`.
    pub address: String,
    /// The model it serves.
    pub model: String,
    /// Tokens of KV that it can hold.
    pub capacity_tokens: u64,
    /// Share of the ring relative to the other workers. Default: 1.
    #[serde(default = "one")]
    pub weight: f64,
    /// Which part of requests it takes. Default: `both`.
    #[serde(default, skip_serializing_if = "WorkerRole::is_both")]
    pub role: WorkerRole,
    /// Where other nodes read the chunks of the store daemon that it is attached to, `host:port`. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
}

/// Which part of requests a worker takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerRole {
    /// Computes prompts for others.
    Prefill,
    /// Generates, after prompts that others or it itself computed.
    Decode,
    /// Both.
    #[default]
    Both,
}

/// What a worker has to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerLoad {
    /// Sequences in the batch.
    pub running: u64,
    /// Sequences that wait for admission.
    pub waiting: u64,
    /// Tokens left to compute: of prompts, and of outputs as far as their limit.
    pub outstanding_tokens: u64,
    /// Used share of the KV blocks, 0 to 1.
    pub kv_usage: f64,
}

/// Where a worker is in its life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// Takes requests.
    #[default]
    Ready,
    /// Finishes what it has; takes nothing new.
    Draining,
}

/// Asks to become a member, or to remain one under a later epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RegisterRequest {
    /// The worker.
    pub worker: WorkerInfo,
    /// Its load now.
    #[serde(default)]
    pub load: WorkerLoad,
    /// Its state now. A member that drains never becomes ready again within its epoch: neither by
    /// saying so, nor because a coordinator has forgotten it. Default: `ready`.
    #[serde(default)]
    pub state: WorkerState,
}

/// What a member has to do to remain one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterResponse {
    /// Time between two heartbeats, in milliseconds; after three missed ones the member is gone.
    pub heartbeat_interval_ms: u64,
    /// Term of the coordinator that answered.
    pub term: u64,
}

/// Says that a member lives.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeartbeatRequest {
    /// The member.
    pub id: String,
    /// Its epoch; another one than registered is refused.
    pub epoch: u64,
    /// Its load now.
    pub load: WorkerLoad,
}

/// What the coordinator wants of a member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatResponse {
    /// The state the coordinator has for the member; `draining` asks it to drain.
    pub state: WorkerState,
    /// Term of the coordinator that answered.
    pub term: u64,
}

/// Ends a membership.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeregisterRequest {
    /// The member.
    pub id: String,
    /// Its epoch; nothing happens if another one is registered.
    pub epoch: u64,
}

/// A member as gateways see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The worker.
    pub worker: WorkerInfo,
    /// Its state.
    pub state: WorkerState,
    /// Its load at the last heartbeat.
    pub load: WorkerLoad,
    /// Its share of the ring now: its weight, less during the slow start.
    pub ring_weight: f64,
}

/// The function that places keys and virtual nodes on the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RingHash {
    /// XXH3, 64 bits.
    Xxh3,
    /// The first 32 bits of MD5.
    Md5,
}

/// How the ring is built.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RingConfig {
    /// The hash function. Default: `xxh3`.
    pub hash: RingHash,
    /// Virtual nodes of a worker of weight 1. Default: 160.
    pub virtual_nodes: u32,
    /// A worker takes at most `1 + load_factor` times its share of the outstanding tokens.
    /// Default: 0.25.
    pub load_factor: f64,
}

/// Everything a gateway needs to route without asking.
///
/// Gateways that hold the same snapshot choose the same worker for the same key and loads. Within an incarnation, a
/// snapshot of a lower `(term, version)` than the one held is stale and ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Tells apart coordinators that do not count terms together; a random number below 2^53. A coordinator without
    /// shared state draws one at each start, because its clock, and with it its term, may have stepped back. 0 where
    /// all coordinators count terms in shared state.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub incarnation: u64,
    /// Counts the leaders; a fencing token.
    pub term: u64,
    /// Counts the changes within a term.
    pub version: u64,
    /// How the ring is built.
    pub ring: RingConfig,
    /// The members, by id.
    pub members: Vec<Member>,
    /// The store daemons, by id; they take no requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stores: Vec<StoreInfo>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that serde calls")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The ring for people: how much of it each member owns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RingView {
    /// Term of the snapshot.
    pub term: u64,
    /// Version of the snapshot.
    pub version: u64,
    /// How the ring is built.
    pub ring: RingConfig,
    /// For each member: id, virtual nodes and owned share of the keys.
    pub members: Vec<RingShare>,
}

/// A member's part of the ring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RingShare {
    /// The member.
    pub id: String,
    /// Its virtual nodes.
    pub virtual_nodes: u32,
    /// Owned share of all keys, 0 to 1.
    pub share: f64,
}

/// Which worker a key belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouteResponse {
    /// The worker.
    pub worker_id: String,
    /// Its address.
    pub address: String,
    /// Why this one, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<RouteExplanation>,
}

/// Why a worker was chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouteExplanation {
    /// Place of the key on the ring.
    pub key_hash: u64,
    /// `owner`: the key is its own. `bound`: workers before it were full. `unusable`: workers before
    /// it take no requests. `least_loaded`: all were full, and it has the least load for its weight.
    pub reason: String,
    /// The distinct workers from the key's place on, in ring order.
    pub candidates: Vec<RouteCandidate>,
}

/// A worker that was considered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RouteCandidate {
    /// The worker.
    pub worker_id: String,
    /// Its outstanding tokens.
    pub load: u64,
    /// The most it may have.
    pub bound: u64,
    /// Why it was not taken: `full` or `unusable`. Absent for the chosen one and those after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// What `/watch` sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum WatchEvent {
    /// The whole state: first of all, and after each change.
    Snapshot(Snapshot),
    /// Nothing changed; the connection lives.
    Alive,
}

impl WorkerRole {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the form that serde calls")]
    fn is_both(&self) -> bool {
        *self == Self::Both
    }
}

impl Default for RingConfig {
    fn default() -> Self {
        Self { hash: RingHash::Xxh3, virtual_nodes: 160, load_factor: 0.25 }
    }
}

fn one() -> f64 {
    1.0
}
