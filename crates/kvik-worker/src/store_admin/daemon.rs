//! The store of a daemon, as its administrators use it.
//!
//! Requests go over two connections, so that a look at the store does not wait for what moves or clears. Bytes go through
//! the sessions that the engine has, and those of one tier alone through memory files. While the daemon is away every operation answers 503.

use std::sync::Arc;

use kvik_node::{NodeClient, NodeError, NodeManager, RemotePrefetch, survey};
use kvik_proto::cache::{CacheStats, PrefetchState, StoreResponse, TierReport};
use kvik_store::{Chain, Commit, Lookup, Space, TierName};
use kvik_tier::TierKind;
use kvik_types::BlockHash;

use super::{BegunPrefetch, ReadChunks, StoreOperations};
use crate::error::Refusal;
use crate::store::{DaemonStore, SinkCounts};

/// Seconds after which a daemon may be back.
const RETRY_AFTER_S: u64 = 1;

/// Chunks that are written with one request: the daemon publishes some while the next are copied.
const CHUNKS_A_WRITE: usize = 16;

/// Asks a daemon.
#[derive(Debug)]
pub(super) struct DaemonOperations {
    store: Arc<DaemonStore>,
    /// For what answers at once, and prefetches.
    looking: Arc<NodeManager>,
    /// For what waits for tiers.
    changing: NodeManager,
}

/// A prefetch that belongs to a connection.
#[derive(Debug)]
struct DaemonPrefetch {
    manager: Arc<NodeManager>,
    prefetch: RemotePrefetch,
}

impl DaemonOperations {
    /// Those of a worker's store; it attaches when it is first asked.
    pub(super) fn new(store: &Arc<DaemonStore>) -> Self {
        let manager = || NodeManager::new(store.options().clone());
        Self { store: Arc::clone(store), looking: Arc::new(manager()), changing: manager() }
    }

    /// The chunks of a chain that are present or stored now, and whether all of a request were.
    fn write_some(
        client: &NodeClient,
        chain: &Chain,
        first_chunk: usize,
        sections: &[Vec<&[u8]>],
        response: &mut StoreResponse,
    ) -> Result<bool, NodeError> {
        let n_wanted = CHUNKS_A_WRITE.min(sections.len() - first_chunk);
        let mut write = client.open(chain)?.write(first_chunk, n_wanted)?;
        let n_chunks = write.n_chunks();
        let missing: Vec<usize> = (0..n_chunks).filter(|place| !write.is_present(*place)).collect();
        for place in &missing {
            for (layer_idx, section) in sections[first_chunk + place].iter().enumerate() {
                write.write_layer(*place, layer_idx, section)?;
            }
        }
        let outcomes = write.finish()?;
        let n_stored = outcomes.iter().filter(|outcome| **outcome == Some(Commit::Stored)).count();
        let n_present =
            outcomes.iter().filter(|outcome| matches!(outcome, None | Some(Commit::Present))).count();
        response.stored_chunks += n_stored;
        response.present_chunks += n_present;
        Ok(n_stored + n_present == n_wanted)
    }
}

impl StoreOperations for DaemonOperations {
    fn space(&self) -> Result<Space, Refusal> {
        self.looking.space().map_err(|error| away(&error))
    }

    fn lookup(&self, chain: &Chain) -> Result<Lookup, Refusal> {
        self.looking.lookup(chain, false).map_err(|error| away(&error))
    }

    fn lookup_local(&self, chain: &Chain) -> Result<Lookup, Refusal> {
        self.looking.lookup(chain, true).map_err(|error| away(&error))
    }

    fn prefetch(&self, chain: &Chain, tier: Option<&TierName>) -> Result<Box<dyn BegunPrefetch>, Refusal> {
        let prefetch = self.looking.prefetch(chain, tier).map_err(|error| away(&error))?;
        Ok(Box::new(DaemonPrefetch { manager: Arc::clone(&self.looking), prefetch }))
    }

    fn pin(&self, chain: &Chain) -> Result<usize, Refusal> {
        self.changing.pin(chain).map_err(|error| away(&error))
    }

    fn unpin(&self, chain: &Chain) -> Result<bool, Refusal> {
        self.changing.unpin(chain).map_err(|error| away(&error))
    }

    fn relocate(
        &self,
        chain: &Chain,
        from: &TierName,
        to: &TierName,
        keeps_source: bool,
    ) -> Result<usize, Refusal> {
        self.changing.relocate(chain, from.clone(), to.clone(), keeps_source).map_err(|error| away(&error))
    }

    fn clear(
        &self,
        chain: Option<&Chain>,
        tiers: Option<Vec<TierName>>,
    ) -> Result<Vec<(TierName, usize)>, Refusal> {
        self.changing.clear(chain, tiers).map_err(|error| away(&error))
    }

    fn read(&self, chain: &Chain, tier: Option<&TierName>) -> Result<ReadChunks, Refusal> {
        if let Some(tier) = tier {
            let payloads = self.changing.read_from(chain, tier).map_err(|error| away(&error))?;
            return Ok(ReadChunks::Copied(payloads));
        }
        let read = self.store.loads().run(|client| {
            let lease = client.open(chain)?.retrieve(0)?;
            let mut payloads = Vec::with_capacity(lease.n_chunks());
            for place in 0..lease.n_chunks() {
                let mut payload = vec![0; lease.payload_bytes(place)];
                lease.copy_out(place, 0, &mut payload)?;
                payloads.push(payload);
            }
            Ok(payloads)
        });
        read.map(ReadChunks::Copied).ok_or_else(no_session)
    }

    fn write(
        &self,
        chain: &Chain,
        sections: &[Vec<&[u8]>],
        tier: Option<&TierName>,
    ) -> Result<StoreResponse, Refusal> {
        if let Some(tier) = tier {
            let written = self.changing.write_to(chain, sections, tier).map_err(|error| away(&error))?;
            let (stored_chunks, present_chunks) = written;
            return Ok(StoreResponse { stored_chunks, present_chunks });
        }
        let mut response = StoreResponse { stored_chunks: 0, present_chunks: 0 };
        let mut first_chunk = 0;
        while first_chunk < sections.len() {
            let written = self.store.writes().run(|client| {
                let mut so_far = response.clone();
                let is_whole = Self::write_some(client, chain, first_chunk, sections, &mut so_far)?;
                Ok((so_far, is_whole))
            });
            let (so_far, is_whole) = written.ok_or_else(no_session)?;
            response = so_far;
            if !is_whole {
                break;
            }
            first_chunk += CHUNKS_A_WRITE;
        }
        Ok(response)
    }

    fn tiers(&self) -> Result<Vec<TierReport>, Refusal> {
        Ok(self.stats()?.tiers)
    }

    fn stats(&self) -> Result<CacheStats, Refusal> {
        self.looking.stats().map_err(|error| away(&error))
    }

    fn is_in_process(&self) -> bool {
        false
    }

    fn sink_counts(&self) -> &SinkCounts {
        self.store.sink_counts()
    }

    fn visit_chunks(&self, visit: &mut dyn FnMut(BlockHash, &[TierKind])) -> Result<(), Refusal> {
        let space = self.space()?;
        let chunks = survey(self.store.options(), &space).map_err(|error| away(&error))?;
        for (hash, tiers) in chunks {
            visit(hash, &tiers);
        }
        Ok(())
    }

    fn close(&self) {
        self.looking.close();
        self.changing.close();
    }
}

impl BegunPrefetch for DaemonPrefetch {
    fn state(&self, is_cancelled: bool) -> Result<PrefetchState, Refusal> {
        // One that had nothing to load was done when it was begun.
        if !self.prefetch.is_loading {
            return Ok(PrefetchState::Done);
        }
        let is_loading = self.manager.is_loading(&self.prefetch).map_err(|error| away(&error))?;
        Ok(match (is_loading, is_cancelled) {
            (Some(true), _) => PrefetchState::Loading,
            (Some(false), false) => PrefetchState::Done,
            // With its connection it was ended.
            (None, _) | (Some(false), true) => PrefetchState::Cancelled,
        })
    }

    fn cancel(&self) -> Result<bool, Refusal> {
        let was_loading = self.manager.cancel(&self.prefetch).map_err(|error| away(&error))?;
        Ok(was_loading.unwrap_or(false))
    }
}

fn away(error: &NodeError) -> Refusal {
    Refusal::unavailable(format!("the store daemon does not do it: {error}"), RETRY_AFTER_S)
}

/// What an operation answers while there is no daemon.
pub(crate) fn no_session() -> Refusal {
    Refusal::unavailable("the store daemon is away; try again later", RETRY_AFTER_S)
}
