//! Where chains are made: a namespace with the format of its chunks.
//!
//! What two spaces differ in, but for tails, is in the parent of their first chunks: chunks of different namespaces,
//! formats, chunk lengths or keys never have the same name and digest.

use std::sync::Arc;

use kvik_tier::{NamespaceId, TokenDigest};
use kvik_types::{BlockHash, BlockSize, Namespace};

use crate::digest::{DigestKey, keyed_seed, root_digest};
use crate::error::Result;
use crate::format::ChunkFormat;
use crate::namespaces::NamespaceState;
use crate::options::StoreOptions;

/// A namespace with a format: where chains are made.
#[derive(Debug, Clone)]
pub struct Space {
    pub(crate) shared: Arc<SpaceShared>,
}

/// What all clones of a space share.
#[derive(Debug)]
pub(crate) struct SpaceShared {
    pub(crate) namespace: Arc<NamespaceState>,
    pub(crate) format: ChunkFormat,
    pub(crate) chunk_tokens: BlockSize,
    pub(crate) stores_tails: bool,
    pub(crate) token_us: f64,
    /// The parent of the first chunk: namespace, format and chunk length.
    pub(crate) seed: BlockHash,
    pub(crate) digest_key: Option<DigestKey>,
    /// The digest before the first chunk, of the same.
    pub(crate) root_digest: TokenDigest,
}

impl Space {
    /// The space of a namespace; `qualified` is the namespace with the format and the chunk length.
    pub(crate) fn new(
        namespace: Arc<NamespaceState>,
        format: ChunkFormat,
        options: &StoreOptions,
        qualified: &Namespace,
    ) -> Self {
        let digest_key = options.digest_key.clone();
        let root_digest = root_digest(digest_key.as_ref(), qualified);
        // Under a key names differ too: stores with different keys may share a tier, and a name does not tell whether
        // a prompt that an attacker knows is stored.
        let seed = if digest_key.is_some() { keyed_seed(root_digest) } else { qualified.seed() };
        let shared = SpaceShared {
            namespace,
            format,
            chunk_tokens: options.chunk_tokens,
            stores_tails: options.stores_tails,
            token_us: options.token_us(),
            seed,
            root_digest,
            digest_key,
        };
        Self { shared: Arc::new(shared) }
    }

    /// A space outside of any store: its chains have the names that they have in a store with the same options, for a
    /// client whose store is in another process.
    ///
    /// # Errors
    /// If the format is not allowed.
    pub fn detached(namespace: &Namespace, format: ChunkFormat, options: &StoreOptions) -> Result<Self> {
        format.validate(options.chunk_tokens)?;
        let namespace = options.namespace_of(namespace);
        let qualified = format.qualify(&namespace, options.chunk_tokens);
        let state = NamespaceState::new(NamespaceId::from(&namespace), u32::MAX);
        Ok(Self::new(Arc::new(state), format, options, &qualified))
    }

    /// The format of the chunks in it.
    pub fn format(&self) -> &ChunkFormat {
        &self.shared.format
    }

    /// Tokens of a full chunk.
    pub fn chunk_tokens(&self) -> usize {
        self.shared.chunk_tokens.get()
    }

    /// Whether chains of the two have the same names and digests for the same tokens.
    pub fn names_as(&self, other: &Self) -> bool {
        let parts = |space: &Self| {
            let SpaceShared { format, chunk_tokens, stores_tails, seed, digest_key, root_digest, .. } =
                &*space.shared;
            (*format, *chunk_tokens, *stores_tails, *seed, digest_key.clone(), *root_digest)
        };
        parts(self) == parts(other)
    }

    /// The namespace in the keys of its chunks.
    pub fn namespace_id(&self) -> NamespaceId {
        self.shared.namespace.id
    }

    /// The parent of the first chunk of every chain without a salt in it.
    pub fn root(&self) -> BlockHash {
        self.shared.seed
    }

    /// The digest before the first chunk of every chain without a salt in it.
    pub fn root_digest(&self) -> TokenDigest {
        self.shared.root_digest
    }

    pub(crate) fn namespace_idx(&self) -> u32 {
        self.shared.namespace.idx
    }
}
