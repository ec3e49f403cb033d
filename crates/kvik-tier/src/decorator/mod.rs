//! Tiers around tiers.
//!
//! A decorator owns what it wraps and is a tier itself, so they stack in any order. Shared and boxed tiers
//! are tiers too. From the outside in, the order that makes sense is `Metered`, `Breaker`, `Coded`, `Retry`,
//! `Throttled`, `Checksummed` or `Encrypted`, and then the place itself: what was skipped is counted and not
//! tried again, and a breaker sees a failure only after it was tried again.

mod absent;
mod bandwidth;
mod breaker;
mod checksummed;
mod clock;
mod coded;
mod encrypted;
mod faulty;
mod metered;
mod retry;
mod scratch;
mod throttled;
mod wanted;

use std::sync::Arc;

pub use absent::Absent;
pub use bandwidth::{Bandwidth, BandwidthShare};
pub use breaker::{Breaker, BreakerOptions};
pub(crate) use breaker::{Gate, Permit, Verdict};
pub use checksummed::Checksummed;
pub use clock::{Clock, SystemClock};
pub use coded::{Coded, CodedSpaces, is_lossless_codec};
pub use encrypted::{
    Encrypted, EncryptionKeys, KeyId, KeyRing, OpenedHead, SEALED_HEAD_BYTES, SealedHead, SealingKey,
    seal_chunk,
};
pub use faulty::{FaultRates, Faulty};
pub use metered::{Metered, TierMetrics};
pub use retry::{Retry, RetryOptions};
pub use throttled::{Throttled, ThrottledOptions};

use crate::chunk_file::ChunkFile;
use crate::error::{Result, TierError};
use crate::key::{ChunkKey, TokenDigest};
use crate::tier::{
    Arrived, Change, FileItem, Fill, GetItem, GetOutcome, Heads, PutItem, PutOutcome, Rewritten, Tier,
    TierKind, TierStat,
};

/// Implements [`Tier`] for pointers to one.
macro_rules! impl_tier_for_pointer {
    ($pointer:ident) => {
        impl<T: Tier + ?Sized> Tier for $pointer<T> {
            fn kind(&self) -> TierKind {
                (**self).kind()
            }

            fn is_read_only(&self) -> bool {
                (**self).is_read_only()
            }

            fn put(&self, batch: &mut [PutItem<'_>]) {
                (**self).put(batch);
            }

            fn put_each(&self, batch: &mut [PutItem<'_>], heads: &dyn Heads) {
                (**self).put_each(batch, heads);
            }

            fn get(&self, batch: &mut [GetItem<'_>]) {
                (**self).get(batch);
            }

            fn get_each(&self, batch: &mut [GetItem<'_>], arrived: Arrived<'_>) {
                (**self).get_each(batch, arrived);
            }

            fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
                (**self).contains(keys, present)
            }

            fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
                (**self).delete(keys)
            }

            fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
                (**self).visit_keys(visit);
            }

            fn flush(&self) -> Result<()> {
                (**self).flush()
            }

            fn stat(&self) -> TierStat {
                (**self).stat()
            }

            fn has_files(&self) -> bool {
                (**self).has_files()
            }

            fn open_chunk(
                &self,
                key: ChunkKey,
                digest: TokenDigest,
            ) -> std::result::Result<ChunkFile, GetOutcome> {
                (**self).open_chunk(key, digest)
            }

            fn put_file(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
                (**self).put_file(item, fill)
            }

            fn codec(&self) -> Option<&str> {
                (**self).codec()
            }

            fn rewrite(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
                (**self).rewrite(key, change)
            }

            fn recode(&self, key: ChunkKey, codec: &str) -> Result<Rewritten> {
                (**self).recode(key, codec)
            }
        }
    };
}

impl_tier_for_pointer!(Arc);
impl_tier_for_pointer!(Box);

/// Why a chunk was not stored, where that is an error.
fn put_error(outcome: &PutOutcome) -> Option<&TierError> {
    match outcome {
        PutOutcome::Failed(error) => Some(error),
        _ => None,
    }
}

/// Why a chunk was not read, where that is an error.
fn get_error(outcome: &GetOutcome) -> Option<&TierError> {
    match outcome {
        GetOutcome::Failed(error) => Some(error),
        _ => None,
    }
}

fn skip_puts(batch: &mut [PutItem<'_>]) {
    for item in batch {
        item.outcome = PutOutcome::Skipped;
    }
}

fn skip_gets(batch: &mut [GetItem<'_>]) {
    for item in batch {
        item.outcome = GetOutcome::Skipped;
    }
}

/// The error of calls that have no outcome for "not asked".
fn not_asked(kind: TierKind, reason: &'static str) -> TierError {
    TierError::remote(format!("ask the {kind} tier"), &reason, true)
}
