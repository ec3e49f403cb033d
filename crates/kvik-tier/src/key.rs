//! Names of chunks.

use std::fmt;

use kvik_types::{BlockHash, Namespace};

/// Names a namespace inside of keys: the seed of its hash chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub BlockHash);

/// Names what one rank of an engine holds of one chunk.
///
/// Equal keys are equal content: the hash covers the namespace and all tokens up to the chunk's end, so a
/// key never comes to mean other bytes. The namespace stands beside the hash so that readers can check it
/// and so that a namespace can be listed and cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkKey {
    /// Where the chunk belongs.
    pub namespace: NamespaceId,
    /// The hash of all tokens up to the end of the chunk.
    pub chunk: BlockHash,
    /// The rank whose part of the KV it is; 0 where there is one.
    pub rank: u16,
}

impl From<&Namespace> for NamespaceId {
    fn from(namespace: &Namespace) -> Self {
        Self(namespace.seed())
    }
}

impl fmt::Display for NamespaceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl fmt::Display for ChunkKey {
    /// The namespace, the chunk and the rank in hexadecimal, separated by slashes.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}/{:04x}", self.namespace, self.chunk, self.rank)
    }
}
