//! The store daemons of a cluster, which a coordinator lists apart from the workers.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `POST /stores/register` | [`RegisterStoreRequest`] | [`RegisterResponse`](crate::coordinator::RegisterResponse) |
//! | `POST /stores/heartbeat` | [`StoreHeartbeatRequest`] | [`HeartbeatResponse`](crate::coordinator::HeartbeatResponse); 404: register again |
//! | `POST /stores/deregister` | [`DeregisterRequest`](crate::coordinator::DeregisterRequest) | 204 |
//! | `GET /stores` | none | [`StoreList`] |
//!
//! A daemon is a member by the rules of workers: the later epoch wins, and three missed heartbeats end it. It is never among
//! the members of the ring, so no gateway sends it a request.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A store daemon as it describes itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreInfo {
    /// Name of the daemon, unique among the live ones.
    pub id: String,
    /// One life of the daemon: larger in each later life. The larger one wins.
    pub epoch: u64,
    /// Where other daemons read its chunks: `host:port`.
    pub address: String,
    /// Memory for chunks, of all tenants together.
    #[serde(default)]
    pub memory_bytes: u64,
}

/// Asks to be listed, or to remain so under a later epoch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisterStoreRequest {
    /// The daemon.
    pub store: StoreInfo,
}

/// Says that a daemon lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreHeartbeatRequest {
    /// The daemon.
    pub id: String,
    /// Its epoch; another one than registered is refused.
    pub epoch: u64,
}

/// The daemons that are listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreList {
    /// Term of the snapshot.
    pub term: u64,
    /// Version of the snapshot.
    pub version: u64,
    /// The daemons, by id.
    pub stores: Vec<StoreInfo>,
    /// By worker: the address of the daemon that it is attached to, and whose chunks it tells the index of.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub workers: BTreeMap<String, String>,
}
