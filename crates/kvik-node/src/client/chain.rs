//! A chain that the daemon knows.

use std::sync::atomic::AtomicU64;

use kvik_store::{Chain, Retention};
use kvik_tier::TierKind;

use super::exchange::write_words;
use super::{Handle, NodeClient, RemoteLayers, RemoteLease, RemoteWrite};
use crate::error::{NodeError, Result};
use crate::operation::{MAX_CHAIN_CHUNKS, NAME_WORDS, Operation, name_words};

/// A chain that the daemon knows; dropping it makes the daemon forget it.
#[derive(Debug)]
pub struct OpenChain {
    chain: Chain,
    handle: Handle,
    n_found: usize,
    n_found_tokens: usize,
    slowest_tier: TierKind,
    n_memory_tokens: usize,
}

impl OpenChain {
    pub(super) fn open(client: &NodeClient, chain: &Chain) -> Result<Self> {
        if !chain.space().names_as(client.space()) {
            return Err(NodeError::invalid(
                "chain",
                &"of another space",
                "one that this client's space made",
            ));
        }
        let n_chunks = chain.n_chunks();
        if n_chunks > MAX_CHAIN_CHUNKS {
            return Err(NodeError::invalid("chunks", &n_chunks, format!("at most {MAX_CHAIN_CHUNKS}")));
        }
        let operation = |span| Operation::Open { span, n_tokens: chain.n_tokens() as u64 };
        let write_names = |payload: &[AtomicU64]| {
            let (places, _) = payload.as_chunks::<NAME_WORDS>();
            for (place, name) in places.iter().zip(chain.names()) {
                write_words(place, name_words(*name));
            }
        };
        let (completion, _) = client.exchange().ask_with(n_chunks, write_names, operation, 0)?;
        Ok(Self {
            chain: chain.clone(),
            handle: client.handle(completion.handle),
            n_found: completion.n_chunks as usize,
            n_found_tokens: completion.n_tokens as usize,
            slowest_tier: completion.tier,
            n_memory_tokens: completion.n_memory_tokens as usize,
        })
    }

    /// The chain.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Chunks that are there, from the start of the chain on.
    pub fn n_found(&self) -> usize {
        self.n_found
    }

    /// Their tokens.
    pub fn n_found_tokens(&self) -> usize {
        self.n_found_tokens
    }

    /// The slowest tier that a chunk of them is in.
    pub fn slowest_tier(&self) -> TierKind {
        self.slowest_tier
    }

    /// The found tokens that are in memory, which are the first ones. A daemon of an older version does not tell of some of them.
    pub fn n_memory_tokens(&self) -> usize {
        if self.slowest_tier == TierKind::Ram {
            return self.n_found_tokens;
        }
        self.n_memory_tokens.min(self.n_found_tokens)
    }

    /// Leases the chunks that were found, from `first_chunk` on; those of lower tiers are read for it. Chunks may have
    /// left meanwhile: the lease ends before the first that has.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn retrieve(&self, first_chunk: usize) -> Result<RemoteLease> {
        let digests = self.chain.digests(self.n_found);
        let (chain, first_chunk) = (self.handle.number, first_chunk.min(digests.len()));
        let operation = |span| Operation::Retrieve { chain, first_chunk: first_chunk as u32, span };
        let n_wanted = digests.len() - first_chunk;
        let client = &self.handle.client;
        let (completion, words) = client.exchange().ask_with_digests(&digests, operation, n_wanted)?;
        Ok(RemoteLease::new(client.handle(completion.handle), &self.chain, first_chunk, &words))
    }

    /// Begins to read the chunks that were found, from `first_chunk` on, layer by layer.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn retrieve_layers(&self, first_chunk: usize) -> Result<RemoteLayers> {
        let digests = self.chain.digests(self.n_found);
        let (chain, first_chunk) = (self.handle.number, first_chunk.min(digests.len()));
        let operation = |span| Operation::ReadLayers { chain, first_chunk: first_chunk as u32, span };
        let client = &self.handle.client;
        let (completion, _) = client.exchange().ask_with_digests(&digests, operation, 0)?;
        let n_chunks = completion.n_chunks as usize;
        Ok(RemoteLayers::new(client.handle(completion.handle), &self.chain, first_chunk, n_chunks))
    }

    /// Takes memory for at most `n_chunks` from `first_chunk` on, as far as there is room.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn write(&self, first_chunk: usize, n_chunks: usize) -> Result<RemoteWrite> {
        self.write_kept(first_chunk, n_chunks, Retention::default())
    }

    /// As [`Self::write`], for chunks that are kept as `retention` says, in whole milliseconds. A daemon that does not know of
    /// it ends the session.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn write_kept(
        &self,
        first_chunk: usize,
        n_chunks: usize,
        retention: Retention,
    ) -> Result<RemoteWrite> {
        let end = first_chunk.saturating_add(n_chunks).min(self.chain.n_chunks());
        let digests = self.chain.digests(end);
        let (chain, first_chunk) = (self.handle.number, first_chunk.min(end));
        let operation = |span| Operation::Write { chain, first_chunk: first_chunk as u32, span, retention };
        let client = &self.handle.client;
        let (completion, offsets) =
            client.exchange().ask_with_digests(&digests, operation, end - first_chunk)?;
        Ok(RemoteWrite::new(client.handle(completion.handle), &self.chain, first_chunk, offsets))
    }

    /// Tells the eviction policies of a request with this chain, once for each.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn note_request(&self, n_generated_tokens: Option<u32>) -> Result<()> {
        let n_generated = n_generated_tokens.map_or(u64::MAX, u64::from);
        let chain = self.handle.number;
        self.handle.client.exchange().ask(Operation::Note { chain, n_generated }).map(drop)
    }
}
