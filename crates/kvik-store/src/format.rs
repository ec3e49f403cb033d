//! What the bytes of a chunk are.

use kvik_types::{BlockSize, Namespace};

use crate::error::{Result, StoreError};

/// The most ranks a format may have: the directory keeps a bit for each.
pub const MAX_RANKS: u16 = 64;

/// How the payload of a chunk is put together.
///
/// A payload is what one rank holds of one chunk: `n_layers` sections, layer 0 first, each of
/// `n_tokens * token_layer_bytes` bytes. The format is part of what a chunk's hash covers, so that engines
/// with different formats never meet in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkFormat {
    /// Layers of the model that this cache holds.
    pub n_layers: u32,
    /// Bytes of one token in one layer of one rank, K and V together.
    pub token_layer_bytes: u64,
    /// Ranks that must all have a chunk for it to be a hit; 1 to [`MAX_RANKS`].
    pub n_ranks: u16,
    /// Tokens in a token block of the engine; the length of a tail is a multiple of it.
    pub block_tokens: BlockSize,
}

impl ChunkFormat {
    /// Bytes of one layer of a chunk of `n_tokens` tokens.
    pub fn section_bytes(&self, n_tokens: usize) -> usize {
        n_tokens * self.token_layer_bytes as usize
    }

    /// Bytes that one rank holds of a chunk of `n_tokens` tokens.
    pub fn payload_bytes(&self, n_tokens: usize) -> usize {
        self.n_layers as usize * self.section_bytes(n_tokens)
    }

    /// The namespace that stands for `namespace` with this format and chunk length.
    ///
    /// The suffix has one grammar and comes last, so no two pairs of a namespace and a format give the same.
    pub(crate) fn qualify(&self, namespace: &Namespace, chunk_tokens: BlockSize) -> Namespace {
        let Self { n_layers, token_layer_bytes, n_ranks, block_tokens } = self;
        let layout = format!(
            "{}/chunk_tokens={chunk_tokens}/n_layers={n_layers}/token_layer_bytes={token_layer_bytes}\
             /n_ranks={n_ranks}/block_tokens={block_tokens}",
            namespace.layout
        );
        Namespace { layout, ..namespace.clone() }
    }

    pub(crate) fn validate(&self, chunk_tokens: BlockSize) -> Result<()> {
        if self.n_layers == 0 {
            return Err(StoreError::invalid("n_layers", &self.n_layers, "1 or more"));
        }
        if self.token_layer_bytes == 0 {
            return Err(StoreError::invalid("token_layer_bytes", &self.token_layer_bytes, "1 or more"));
        }
        if !(1..=MAX_RANKS).contains(&self.n_ranks) {
            return Err(StoreError::invalid("n_ranks", &self.n_ranks, format!("1 to {MAX_RANKS}")));
        }
        if !chunk_tokens.get().is_multiple_of(self.block_tokens.get()) {
            let allowed = format!("a divisor of the chunk's {chunk_tokens} tokens");
            return Err(StoreError::invalid("block_tokens", &self.block_tokens, allowed));
        }
        let n_bytes = u128::from(self.n_layers)
            * u128::from(self.token_layer_bytes)
            * u128::from(self.n_ranks)
            * chunk_tokens.get() as u128;
        if n_bytes > 1 << 40 {
            return Err(StoreError::invalid("token_layer_bytes", &n_bytes, "chunks of at most 1 TiB"));
        }
        Ok(())
    }

    /// One bit for each rank.
    pub(crate) fn all_ranks(&self) -> u64 {
        u64::MAX >> (u32::from(MAX_RANKS) - u32::from(self.n_ranks))
    }
}
