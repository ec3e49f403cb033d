//! A tier in a library that is loaded at run time.
//!
//! `bindings/c/include/kvik_tier.h` is the interface, `abi.rs` its types, `library.rs` the library with all unsafe code, and
//! `url.rs` which library it is. What a library answers is judged here: an outcome that is none, a length that cannot be,
//! and a count that is too high are failures of that item or call and nothing else.

mod abi;
#[expect(unsafe_code, reason = "it loads code and calls it")]
mod library;
mod url;

pub use url::PluginUrl;

use self::library::{Library, ReadAnswer, WantedBytes};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tally::Tally;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};

/// A tier in a library.
///
/// Its answers are not verified; wrap it in a decorator that verifies. Its calls take as long as the library takes. A head
/// and a range of a chunk are two reads of one call.
#[derive(Debug)]
pub struct PluginTier {
    loaded: Library,
    url: PluginUrl,
    tally: Tally,
}

impl PluginTier {
    /// Loads the library and opens its tier. The library stays loaded until the process ends.
    ///
    /// # Errors
    /// [`TierError::Remote`] with the reason of the loader or of the library.
    pub fn open(url: &PluginUrl) -> Result<Self> {
        let loaded = Library::open(&url.path, &url.options)?;
        Ok(Self { loaded, url: url.clone(), tally: Tally::default() })
    }

    fn failed(&self, what: &str, reason: &str, is_transient: bool) -> TierError {
        TierError::remote(format!("{what} at {}", self.url), &reason, is_transient)
    }

    fn put_outcome(&self, outcome: i32) -> PutOutcome {
        match outcome {
            abi::STORED => PutOutcome::Stored,
            abi::PRESENT => PutOutcome::Present,
            abi::NO_ROOM => PutOutcome::NoRoom,
            outcome => PutOutcome::Failed(self.failure("store a chunk", outcome)),
        }
    }

    /// What became of bytes of which the library says this.
    fn read_outcome(&self, answer: &ReadAnswer, offset: u64, n_wanted: usize) -> GetOutcome {
        let ReadAnswer { outcome, n_read, chunk_bytes } = *answer;
        match outcome {
            abi::MISS => GetOutcome::Miss,
            abi::HIT => {
                // A buffer without room asks for nothing, wherever it begins.
                let is_there = n_wanted == 0
                    || offset.checked_add(n_wanted as u64).is_some_and(|end| end <= chunk_bytes);
                match (is_there, n_read == n_wanted) {
                    (false, _) => GetOutcome::Corrupt("length"),
                    (true, true) => GetOutcome::Hit,
                    (true, false) => {
                        let reason = format!("the library says that it read {n_read} of {n_wanted} bytes");
                        GetOutcome::Failed(self.failed("read a chunk", &reason, false))
                    }
                }
            }
            outcome => GetOutcome::Failed(self.failure("read a chunk", outcome)),
        }
    }

    fn failure(&self, what: &str, outcome: i32) -> TierError {
        match outcome {
            abi::FAILED => self.failed(what, "the library has failed", true),
            abi::REFUSED => self.failed(what, "the library refuses", false),
            outcome => {
                let reason = format!("the library gives {outcome}, which is no outcome of that");
                self.failed(what, &reason, false)
            }
        }
    }
}

impl Tier for PluginTier {
    fn kind(&self) -> TierKind {
        TierKind::Plugin
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        if batch.is_empty() {
            return;
        }
        let outcomes = self.loaded.put(batch);
        for (item, outcome) in batch.iter_mut().zip(outcomes) {
            item.outcome = self.put_outcome(outcome);
        }
        self.tally.note_put(batch, None);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        if batch.is_empty() {
            return;
        }
        // A head and a buffer of each, whether there is room in them or not: so answers find their item.
        let mut wanted = Vec::with_capacity(2 * batch.len());
        for GetItem { key, offset, head, buffer, .. } in batch.iter_mut() {
            wanted.push(WantedBytes { key: *key, offset: 0, buffer: head });
            wanted.push(WantedBytes { key: *key, offset: *offset, buffer });
        }
        let answers = self.loaded.get(&mut wanted);
        let (pairs, _) = answers.as_chunks::<2>();
        for (item, [of_head, of_buffer]) in batch.iter_mut().zip(pairs) {
            let is_other_length = |answer: &ReadAnswer| answer.chunk_bytes != item.n_bytes() as u64;
            let head = self.read_outcome(of_head, 0, item.head.len());
            let buffer = self.read_outcome(of_buffer, item.offset, item.buffer.len());
            item.outcome = match (head, buffer) {
                (GetOutcome::Hit, GetOutcome::Hit) => {
                    if item.is_whole && [of_head, of_buffer].into_iter().any(is_other_length) {
                        GetOutcome::Corrupt("length")
                    } else {
                        GetOutcome::Hit
                    }
                }
                (GetOutcome::Hit, other) | (other, _) => other,
            };
        }
        self.tally.note_get(batch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        let (status, found) = self.loaded.contains(keys);
        let failure = (status < 0)
            .then(|| self.failed("ask for chunks", &format!("the library gives status {status}"), true));
        self.tally.note_answer(failure.as_ref());
        for (is_present, is_found) in present.iter_mut().zip(found) {
            *is_present = is_found != 0;
        }
        failure.map_or(Ok(()), Err)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        let n_removed = self.loaded.remove(keys);
        let removed = usize::try_from(n_removed).ok().filter(|n_removed| *n_removed <= keys.len());
        let removed = removed.ok_or_else(|| {
            self.failed(
                "delete chunks",
                &format!("the library gives {n_removed} for {} keys", keys.len()),
                true,
            )
        });
        self.tally.note_answer(removed.as_ref().err());
        removed
    }

    fn visit_keys(&self, _visit: &mut dyn FnMut(ChunkKey, u64)) {}

    fn flush(&self) -> Result<()> {
        match self.loaded.flush() {
            0 => Ok(()),
            status => Err(self.failed("flush", &format!("the library gives status {status}"), true)),
        }
    }

    fn stat(&self) -> TierStat {
        TierStat { health: self.tally.health(), details: self.tally.counts(), ..TierStat::default() }
    }
}
