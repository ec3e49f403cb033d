//! Places that hold chunks of KV, behind one trait.
//!
//! A [`Tier`] is a map from [`ChunkKey`] to bytes that are written once and read whole or in ranges. It
//! works in batches and blocks its caller's thread; a caller with many operations at a time brings the threads.
//! A tier decides nothing: when it is full it says so, and its owner chooses what leaves.
//!
//! Invariants:
//!
//! * A read gives the bytes that were put under that key with that digest of tokens, or none. Tiers whose medium can lose, tear or
//!   mix bytes are wrapped in a decorator that proves it.
//! * A chunk is found only after all of its bytes are there.
//! * A buffer that was handed to a read that did not hit has undefined content, and its outcome says so.

#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "it maps memory and hands out references into it")]
mod arena;
mod channel;
mod chunk_file;
#[cfg(feature = "conformance")]
pub mod conformance;
mod decorator;
mod envelope;
mod error;
mod histogram;
mod key;
mod lanes;
mod lm;
pub mod nvme;
mod object;
mod operations;
pub mod peer;
mod plugin;
mod pool;
mod ram;
mod random;
mod redis;
mod remote;
mod sections;
mod tally;
mod tier;
mod tls;

pub use arena::shared;
pub use arena::{
    Arena, ArenaOptions, ArenaStat, ChunkPlace, Commitment, HostRegistrar, HugePages, Lease, NumaPlacement,
    Slot,
};
pub use chunk_file::ChunkFile;
pub use decorator::{
    Absent, Bandwidth, BandwidthShare, Breaker, BreakerOptions, Checksummed, Clock, Coded, CodedSpaces,
    Encrypted, EncryptionKeys, FaultRates, Faulty, KeyId, KeyRing, Metered, OpenedHead, Retry, RetryOptions,
    SEALED_HEAD_BYTES, SealedHead, SealingKey, SystemClock, Throttled, ThrottledOptions, TierMetrics,
    is_lossless_codec, seal_chunk,
};
pub use envelope::{ENVELOPE_BYTES, Envelope, seal};
pub use error::{Result, TierError};
pub use histogram::Latencies;
pub use key::{ChunkKey, NamespaceId, TokenDigest};
pub use lm::{
    LM_KEY_BYTES, LM_MAX_VALUE_BYTES, LM_REPLY_BYTES, LM_REQUEST_BYTES, LmCommand, LmForm, LmKey, LmOptions,
    LmReply, LmRequest, LmSource, LmTier, LmUrl, LmWriter, serve_lm,
};
pub use nvme::{IoKind, NvmeOptions, NvmeTier, format_device};
pub use object::{ObjectOptions, ObjectTier, ObjectUrl};
pub use operations::OperationMetrics;
pub use peer::{PeerAddress, PeerOptions, PeerTier};
pub use plugin::{PluginTier, PluginUrl};
pub use ram::{PlacedChunk, RamTier};
pub use redis::{RedisOptions, RedisTier, RedisUrl, Reply, ReplyReader, ValueReply};
pub use remote::{RemoteOptions, RemoteUrl, open_remote};
pub use tier::{
    Arrived, Change, FileItem, Fill, GetItem, GetOutcome, Heads, PutItem, PutOutcome, Rewritten, Tier,
    TierExt, TierHealth, TierKind, TierStat,
};
