//! A store of this process, as its administrators use it.

use std::sync::Arc;

use kvik_node::{HeldPrefetch, cache_stats, tier_reports};
use kvik_proto::cache::{CacheStats, ExplainResponse, PrefetchState, StoreResponse, TierReport};
use kvik_store::{Chain, Clear, Lookup, Space, Store, TierName, TierWrite, Write};
use kvik_tier::TierKind;
use kvik_types::BlockHash;

use super::{BegunPrefetch, ReadChunks, StoreOperations, explain};
use crate::error::Refusal;
use crate::prompt::Prompt;
use crate::store::{LocalStore, SinkCounts};

impl StoreOperations for LocalStore {
    fn space(&self) -> Result<Space, Refusal> {
        Ok(self.space().clone())
    }

    fn lookup(&self, chain: &Chain) -> Result<Lookup, Refusal> {
        Ok(self.store().lookup(chain))
    }

    fn lookup_local(&self, chain: &Chain) -> Result<Lookup, Refusal> {
        Ok(self.store().lookup_local(chain))
    }

    fn prefetch(&self, chain: &Chain, tier: Option<&TierName>) -> Result<Box<dyn BegunPrefetch>, Refusal> {
        let prefetch = match tier {
            None => self.store().prefetch(chain, 0),
            Some(tier) => self.store().prefetch_from(chain, 0, tier).ok_or_else(|| no_such_tier(tier))?,
        };
        Ok(Box::new(HeldPrefetch::hold(prefetch)))
    }

    fn pin(&self, chain: &Chain) -> Result<usize, Refusal> {
        Ok(self.store().pin(chain))
    }

    fn unpin(&self, chain: &Chain) -> Result<bool, Refusal> {
        Ok(self.store().unpin(chain))
    }

    fn relocate(
        &self,
        chain: &Chain,
        from: &TierName,
        to: &TierName,
        keeps_source: bool,
    ) -> Result<usize, Refusal> {
        Ok(self.store().relocate(chain, from.clone(), to.clone(), keeps_source))
    }

    fn clear(
        &self,
        chain: Option<&Chain>,
        tiers: Option<Vec<TierName>>,
    ) -> Result<Vec<(TierName, usize)>, Refusal> {
        let namespace = chain.is_none().then(|| self.namespace().clone());
        Ok(self.store().clear(&Clear { namespace, chain: chain.cloned(), tiers }).chunks)
    }

    fn read(&self, chain: &Chain, tier: Option<&TierName>) -> Result<ReadChunks, Refusal> {
        let retrieved = match tier {
            None => self.store().retrieve(chain, 0),
            Some(tier) => self.store().retrieve_from(chain, 0, tier).ok_or_else(|| no_such_tier(tier))?,
        };
        Ok(ReadChunks::Leased(retrieved))
    }

    fn write(
        &self,
        chain: &Chain,
        sections: &[Vec<&[u8]>],
        tier: Option<&TierName>,
    ) -> Result<StoreResponse, Refusal> {
        if let Some(tier) = tier {
            return Ok(write_to(self, chain, sections, tier));
        }
        let mut response = StoreResponse { stored_chunks: 0, present_chunks: 0 };
        for (chunk_idx, layers) in sections.iter().enumerate() {
            match self.store().begin_write(chain, chunk_idx, 0) {
                Write::Slot(mut writer) => {
                    for (layer_idx, section) in layers.iter().enumerate() {
                        writer.layer_mut(layer_idx).copy_from_slice(section);
                    }
                    writer.commit();
                    response.stored_chunks += 1;
                }
                Write::Present => response.present_chunks += 1,
                Write::NoRoom | Write::NoParent | Write::Collision => break,
            }
        }
        Ok(response)
    }

    fn tiers(&self) -> Result<Vec<TierReport>, Refusal> {
        Ok(tier_reports(self.store()))
    }

    fn stats(&self) -> Result<CacheStats, Refusal> {
        Ok(cache_stats(self.store()))
    }

    fn is_in_process(&self) -> bool {
        true
    }

    fn sink_counts(&self) -> &SinkCounts {
        self.sink_counts()
    }

    fn explain(&self, prompt: &Prompt) -> Result<ExplainResponse, Refusal> {
        Ok(explain::explain(self, prompt))
    }

    fn local(&self) -> Option<&Store> {
        Some(self.store())
    }

    fn plan_counts(&self) -> Vec<(&'static str, u64)> {
        self.planner().counts().into()
    }

    fn visit_chunks(&self, visit: &mut dyn FnMut(BlockHash, &[TierKind])) -> Result<(), Refusal> {
        self.visit_chunks(visit);
        Ok(())
    }
}

impl BegunPrefetch for Arc<HeldPrefetch> {
    fn state(&self, is_cancelled: bool) -> Result<PrefetchState, Refusal> {
        Ok(match (self.is_loading(), is_cancelled) {
            (true, _) => PrefetchState::Loading,
            (false, true) => PrefetchState::Cancelled,
            (false, false) => PrefetchState::Done,
        })
    }

    fn cancel(&self) -> Result<bool, Refusal> {
        Ok(HeldPrefetch::cancel(self))
    }
}

/// Stores the chunks of a chain in one tier, as far as it takes them.
fn write_to(store: &LocalStore, chain: &Chain, sections: &[Vec<&[u8]>], tier: &TierName) -> StoreResponse {
    let mut response = StoreResponse { stored_chunks: 0, present_chunks: 0 };
    for (chunk_idx, layers) in sections.iter().enumerate() {
        let fill = |memory: &mut [u8]| memory.copy_from_slice(&layers.concat());
        match store.store().write_to(chain, chunk_idx, 0, tier, fill) {
            TierWrite::Stored => response.stored_chunks += 1,
            TierWrite::Present => response.present_chunks += 1,
            TierWrite::Refused => break,
        }
    }
    response
}

fn no_such_tier(tier: &TierName) -> Refusal {
    Refusal::field("tier", tier, "a tier of the store")
}
