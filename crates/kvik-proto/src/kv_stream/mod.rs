//! What a worker of kvik holds, as a numbered stream.
//!
//! `GET /kv/events?epoch=E&from=S` on a worker is answered by a body that does not end by itself:
//!
//! | frame | says |
//! |---|---|
//! | [`Hello`] | first of all: the worker, and how its block keys are made |
//! | [`SnapshotPart`] | blocks that are held now; any number of them, also none |
//! | [`Frame::SnapshotEnd`] | the snapshot is whole, and which batch is the next |
//! | [`KvBatch`] | what changed, numbered without gaps from 0 on within an epoch |
//! | [`Frame::Alive`] | nothing changed for [`ALIVE_INTERVAL`] |
//!
//! A listener that names the worker's epoch and a number that the worker still has is sent the batches from
//! there on. Any other one is sent a snapshot first, and so is, in the middle of the stream, one that reads
//! so slowly that the worker has dropped the batch it needs. A snapshot replaces all that was known before.
//! A batch never stores a block that is held or removes one that is not.
//!
//! A frame is its length (four bytes, big endian), a byte for its kind, and a msgpack array; the length
//! counts the kind. Fields may be added at the end of arrays, and kinds of frames that are not known are
//! passed over: what changes a holding is numbered and cannot be missed. Nothing here trusts its input.

mod decode;
mod encode;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use kvik_types::BlockHash;
use serde::{Deserialize, Serialize};

pub use decode::FrameDecoder;

use crate::events::EventError;

/// Longest frame that is written or read, in bytes, without its length. [`MAX_FRAME_KEYS`] in the worst
/// form, where each is a change of its own, are a quarter of it; a reader keeps no more for a peer that lies.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// The most keys that a writer puts into one frame: enough that the overhead of a frame is nothing, few
/// enough that a frame is sent and read in well below a millisecond.
pub const MAX_FRAME_KEYS: usize = 8192;

/// Time without news after which a worker says that it lives. A listener that receives nothing for a multiple of
/// it takes the connection for broken.
pub const ALIVE_INTERVAL: Duration = Duration::from_secs(3);

/// Why a stream cannot be read on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// A frame is longer than [`MAX_FRAME_BYTES`], or has not even a kind.
    #[error("a frame of {n_bytes} bytes; allowed: 1 to {MAX_FRAME_BYTES}")]
    BadLength {
        /// What its first bytes say.
        n_bytes: usize,
    },
    /// A frame is not what its kind says.
    #[error(transparent)]
    Malformed(#[from] EventError),
}

/// Stands for a block and everything before it: the first eight bytes, big endian, of its [`BlockHash`].
///
/// As text it is sixteen hexadecimal digits, because numbers in JSON are not exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct KvKey(pub u64);

/// A text that is no [`KvKey`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a block key; allowed: 1 to 16 hexadecimal digits")]
pub struct BadKey {
    text: String,
}

/// The kind of place where a worker has a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvTier {
    /// Memory of the device that computes, whatever it is.
    Gpu,
    /// Memory of the host.
    Cpu,
    /// A disk of the host.
    Disk,
    /// A store outside of the host. It is shared: a worker tells only what it put or found there.
    Remote,
}

/// Blocks of one size whose keys come from one chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockGroup {
    /// Names the group in the other frames.
    pub number: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// The parent of the first block of every prompt.
    pub root: BlockHash,
}

/// The worker that sends the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The worker's id.
    pub worker: String,
    /// The worker's epoch.
    pub epoch: u64,
    /// The model, as requests name it.
    pub model: String,
    /// All groups of blocks that it has.
    pub groups: Vec<BlockGroup>,
    /// The number of the batch that the stream goes on from; `None` if a snapshot follows.
    pub resumes_at: Option<u64>,
}

/// Some of the blocks that one tier holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotPart {
    /// Their group.
    pub group: u32,
    /// Where they are.
    pub tier: KvTier,
    /// The blocks, in any order; each is in one part of its group and tier.
    pub keys: Vec<KvKey>,
}

/// What changed, under one number.
#[derive(Debug, Clone, PartialEq)]
pub struct KvBatch {
    /// Its number.
    pub sequence: u64,
    /// Unix time of publication in seconds, by the worker's clock.
    pub published_s: f64,
    /// What changed, in order.
    pub changes: Vec<KvChange>,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvChange {
    /// A tier has these blocks now, one after the other in a prompt.
    Stored {
        /// Their group.
        group: u32,
        /// Where they are.
        tier: KvTier,
        /// The block before the first; `None` at the start of a prompt, or where it is not known.
        parent: Option<KvKey>,
        /// The blocks.
        keys: Vec<KvKey>,
    },
    /// A tier has lost these blocks.
    Removed {
        /// Their group.
        group: u32,
        /// Where they were.
        tier: KvTier,
        /// The blocks, in any order.
        keys: Vec<KvKey>,
    },
    /// All blocks of all groups are lost, in one tier or in every tier.
    Cleared {
        /// Where; `None` is everywhere.
        tier: Option<KvTier>,
    },
}

/// One frame of the stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// The worker that sends the stream.
    Hello(Hello),
    /// Some of what is held.
    SnapshotPart(SnapshotPart),
    /// All that is held has been told.
    SnapshotEnd {
        /// The number of the first batch that the snapshot does not have in it.
        next_sequence: u64,
    },
    /// What changed.
    Batch(KvBatch),
    /// The worker lives.
    Alive {
        /// The number of the batch that will come next.
        next_sequence: u64,
    },
}

// === impl KvKey ===

impl From<BlockHash> for KvKey {
    fn from(hash: BlockHash) -> Self {
        Self((hash.to_u128() >> 64) as u64)
    }
}

impl fmt::Display for KvKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

impl FromStr for KvKey {
    type Err = BadKey;

    fn from_str(text: &str) -> Result<Self, BadKey> {
        // `from_str_radix` alone would take a sign.
        let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        match u64::from_str_radix(text, 16) {
            Ok(key) if is_hex && text.len() <= 16 => Ok(Self(key)),
            _ => Err(BadKey { text: text.chars().take(32).collect() }),
        }
    }
}

impl TryFrom<String> for KvKey {
    type Error = BadKey;

    fn try_from(text: String) -> Result<Self, BadKey> {
        text.parse()
    }
}

impl From<KvKey> for String {
    fn from(key: KvKey) -> Self {
        key.to_string()
    }
}

// === impl KvTier ===

impl KvTier {
    /// All of them, fastest first.
    pub const ALL: [Self; 4] = [Self::Gpu, Self::Cpu, Self::Disk, Self::Remote];

    /// Its place in [`Self::ALL`], which is also its number on the wire.
    pub fn as_index(self) -> usize {
        self as usize
    }
}

// === impl KvChange ===

impl KvChange {
    /// The blocks that it is about; none if it clears.
    pub fn keys(&self) -> &[KvKey] {
        match self {
            Self::Stored { keys, .. } | Self::Removed { keys, .. } => keys,
            Self::Cleared { .. } => &[],
        }
    }
}
