//! What the global KV index knows of the chunks of other nodes.
//!
//! Workers tell the index which chunks the store daemon of their node has, under the first halves of the chunks' names. So
//! a daemon can ask by names alone. The index answers with workers; the coordinators' list says which node each is on.

use std::collections::BTreeMap;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use kvik_proto::client::IndexClient;
use kvik_proto::index::{HoldersRequest, MAX_HOLDER_KEYS};
use kvik_proto::kv_stream::KvKey;
use kvik_tier::peer::PeerHints;
use kvik_tier::{ChunkKey, PeerAddress};
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;

/// How long an index that did not answer is left alone.
const PAUSE: Duration = Duration::from_secs(1);

/// Asks the global KV index.
#[derive(Debug)]
pub(crate) struct IndexHints {
    client: IndexClient,
    runtime: Handle,
    /// The nodes of workers, as the coordinators list them.
    nodes: RwLock<BTreeMap<String, Vec<PeerAddress>>>,
    /// Until when the index is left alone.
    paused_until: Mutex<Option<Instant>>,
}

impl IndexHints {
    /// Asks through `client`, with tasks on `runtime`.
    pub(crate) fn new(client: IndexClient, runtime: Handle) -> Self {
        Self { client, runtime, nodes: RwLock::default(), paused_until: Mutex::default() }
    }

    /// Takes over which node each worker is on.
    pub(crate) fn set_nodes(&self, nodes: BTreeMap<String, Vec<PeerAddress>>) {
        *self.nodes.write() = nodes;
    }

    fn is_paused(&self) -> bool {
        self.paused_until.lock().is_some_and(|until| Instant::now() < until)
    }
}

impl PeerHints for IndexHints {
    fn holders(&self, keys: &[ChunkKey], deadline: Instant) -> Vec<PeerAddress> {
        // An answer names workers, which mean nothing before the list came.
        if self.is_paused() || self.nodes.read().is_empty() {
            return Vec::new();
        }
        let mut names: Vec<KvKey> = keys.iter().map(|key| KvKey::from(key.chunk)).collect();
        // The ranks of a chunk share its name.
        names.dedup();
        names.truncate(MAX_HOLDER_KEYS);
        let request = HoldersRequest { keys: names.iter().map(ToString::to_string).collect() };
        let (sender, receiver) = sync_channel(1);
        let client = self.client.clone();
        self.runtime.spawn(async move {
            // A lookup that did not wait so long has gone on without it.
            let _ = sender.send(client.holders(&request).await);
        });
        let answer = receiver.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        let mut holders: Vec<(String, u64)> = match answer {
            Ok(Ok(answer)) => answer.holders.into_iter().collect(),
            Ok(Err(error)) => {
                tracing::debug!(%error, "the index does not say where chunks are");
                *self.paused_until.lock() = Some(Instant::now() + PAUSE);
                return Vec::new();
            }
            Err(_) => {
                *self.paused_until.lock() = Some(Instant::now() + PAUSE);
                return Vec::new();
            }
        };
        holders.sort_by_key(|(_, n_chunks)| std::cmp::Reverse(*n_chunks));
        let nodes = self.nodes.read();
        let mut peers: Vec<PeerAddress> = Vec::new();
        for address in holders.iter().filter_map(|(worker, _)| nodes.get(worker)).flatten() {
            // The workers of a node all tell of the same store.
            if !peers.contains(address) {
                peers.push(address.clone());
            }
        }
        peers
    }
}
