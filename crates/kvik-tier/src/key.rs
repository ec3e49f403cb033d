//! Names of chunks.

use std::fmt;

use kvik_types::{BlockHash, Namespace};

/// Names a namespace inside of keys: the seed of its hash chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub BlockHash);

/// Names what one rank of an engine holds of one chunk.
///
/// The hash covers the namespace and all tokens up to the chunk's end, but it is no proof of them: a
/// [`TokenDigest`] is. The namespace stands beside the hash so that readers can check it
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

/// A cryptographic digest of the namespace and of all tokens up to a chunk's end: what makes a chunk the right
/// one beyond its name.
///
/// A chunk is stored with one, and is read only with the same one: two sequences that an attacker
/// constructed to have one [`ChunkKey`] do not get each other's chunks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenDigest(pub [u8; 32]);

impl TokenDigest {
    /// The digest of chunks that are not of tokens, such as those of a measurement. It is equal to no digest
    /// of tokens.
    pub const NONE: Self = Self([0; 32]);
}

impl fmt::Display for TokenDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "TokenDigest({self})")
    }
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
