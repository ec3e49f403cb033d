//! One store for the engines of a node: a daemon, and the client that an engine has.
//!
//! A [`NodeServer`] owns a store and listens on a unix socket. A [`NodeClient`] attaches to it and is sent two
//! descriptors: the words of two rings, and the arena in which all chunks lie. From then on requests and answers go
//! through the rings, and the client copies the bytes of chunks itself. `docs/node.md` is the design.
//!
//! # Invariants
//!
//! * Leased chunks stay unchanged until the client releases them or its session ends.
//! * A chunk that a client writes is found by others only after its commit, with the checksum of its bytes.
//! * The end of a client, by whatever death, gives back all that its session held; the kernel tells.
//! * No byte that a client writes, into a ring or anywhere, does more than end its own session.
//! * Memory that one daemon leaves to the next has one user at any time, and no client holds any of it meanwhile.
//! * A daemon that is gone costs hits: every call of a client returns an error within a bounded time.

#![forbid(unsafe_code)]

mod acceptor;
mod api;
mod audit;
mod bandwidth;
mod changes;
mod client;
mod config;
mod daemon;
mod error;
mod frame;
mod kv_log;
mod kv_streams;
mod lm;
mod manage;
mod metrics;
mod operation;
mod peers;
mod prefetch;
mod report;
mod ring;
mod server;
mod take_over;
mod tenant;
mod tiers;

pub use changes::WatchFrame;
pub use client::{
    AttachOptions, NodeClient, NodeManager, NodeSession, NodeWatch, OpenChain, RemoteLayers, RemoteLease,
    RemotePrefetch, RemoteWrite, survey,
};
pub use config::{
    BlendingPlan, DaemonConfig, DaemonPlan, LmConfig, PeerConfig, PeerPlan, PeerTlsConfig, PlannerMode,
    StoreConfig, StorePlan, TenantConfig, TierConfig,
};
pub use daemon::{RunningDaemon, StoreDaemon};
pub use error::{NodeError, Result};
pub use frame::{Attach, Attached, Purpose};
pub use kv_log::{HeldChange, KEPT_BYTES, KvListener, KvLog, LoggedChunks, kv_tier};
pub use manage::{ManageAnswer, ManageRequest};
pub use metrics::publish_store;
pub use peers::PeerStats;
pub use prefetch::HeldPrefetch;
pub use report::{cache_stats, tier_reports};
pub use server::{NodeOptions, NodeServer, NodeStats};
pub use take_over::{
    ChunkList, ListedChunk, StoreParts, TakeOver, TakeOverFrame, TakeOverOptions, TenantOpener, TenantTerms,
};
pub use tenant::{ClientToken, Tenant};
pub use tiers::{format_device, open_store};
