//! What is stored is unreadable without the tenant's key.

mod head;
mod key_file;
mod keys;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

pub use head::{OpenedHead, SEALED_HEAD_BYTES, SealedHead, seal_chunk};
pub use key_file::EncryptionKeys;
pub use keys::{KeyId, KeyRing, SealingKey};

use super::scratch::ScratchPool;
use super::wanted::{Wanted, get_by_range, section_bytes_behind_page};
use crate::envelope::ENVELOPE_BYTES;
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::nvme::AlignedBuffer;
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Tier, TierKind, TierStat};

/// Bytes that are sealed before they are stored, but for a chunk that is longer.
const MAX_GROUP_BYTES: usize = 64 << 20;

// The memory for heads is that for envelopes.
const _: () = assert!(SEALED_HEAD_BYTES == ENVELOPE_BYTES);

/// Seals every chunk with AES-256-GCM, behind a [head](SealedHead), and serves only what a holder of the key sealed.
///
/// It stands in the place of [`Checksummed`](super::Checksummed), right around the medium. The head proves all
/// that an envelope does, by tags that cannot be made without the key: whose chunk it is, for which tokens, its length,
/// and each of its sections. Checksums inside would be a second page and a second pass over the bytes that find
/// nothing more; checksums outside would hand over sections of a page, so that each page had a tag. What decides
/// whether the medium is asked at all ([`Breaker`](super::Breaker), [`Retry`](super::Retry),
/// [`Throttled`](super::Throttled)) stays outside: what is tried again is sealed again, under another salt.
///
/// Each section is sealed on its own and keeps its place and length, so that one layer is one range of the medium,
/// read with the head in one item and opened in the caller's buffer. A range that cuts through a section is read a second
/// time with the rest of it, into memory of its own. A put copies: a batch is sealed in memory of this tier, up to
/// 64 MiB at a time, on the caller's thread.
///
/// | what is there | what it is |
/// |---|---|
/// | a flipped, cut, moved or swapped byte, section, head or chunk; a chunk that is not sealed | [`GetOutcome::Corrupt`] |
/// | a chunk that was sealed for other tokens | [`GetOutcome::TokenMismatch`] |
/// | a chunk of a key that is not in the file | [`GetOutcome::Miss`], counted as `unknown_key_reads` |
///
/// A chunk of an unknown key is not deleted, because another node may have the key already, or still. So that it does
/// not keep its name occupied, a put that finds a name present reads the head there, and replaces what this tier
/// could not open: a chunk of an unknown key, one that was stored before there were keys, one with a damaged head.
///
/// Lengths of keys are those of chunks without heads; [`TierStat::used_bytes`] has them with.
#[derive(Debug)]
pub struct Encrypted<T> {
    inner: T,
    keys: Arc<EncryptionKeys>,
    scratch: ScratchPool,
    /// Memory of the last put, for the next.
    sealed: Mutex<Option<AlignedBuffer>>,
    n_corrupt: AtomicU64,
    n_token_mismatches: AtomicU64,
    n_unknown_keys: AtomicU64,
}

/// What can be said of bytes that were read behind their head.
enum Verdict {
    /// All there is to say.
    Final(GetOutcome),
    /// They cut through sections: those from here to there have to be read.
    Cut(u64, u64),
}

impl<T: Tier> Encrypted<T> {
    /// Seals what goes into `inner` and opens what comes out.
    pub fn new(inner: T, keys: Arc<EncryptionKeys>) -> Self {
        Self {
            inner,
            keys,
            scratch: ScratchPool::default(),
            sealed: Mutex::new(None),
            n_corrupt: AtomicU64::new(0),
            n_token_mismatches: AtomicU64::new(0),
            n_unknown_keys: AtomicU64::new(0),
        }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Seals chunks one behind the other into `memory`, each at a page, and stores them.
    fn put_group(&self, keys: &KeyRing, group: &mut [PutItem<'_>], memory: &mut [u8]) {
        let mut rest = memory;
        let mut places: Vec<(usize, &[u8])> = Vec::with_capacity(group.len());
        for (item_idx, item) in group.iter_mut().enumerate() {
            let (room, behind) = rest.split_at_mut(room_bytes(item));
            rest = behind;
            let sealed = &mut room[..SEALED_HEAD_BYTES + item.n_bytes()];
            let PutItem { key, parts, section_bytes, digest, .. } = *item;
            match seal_chunk(keys.sealing(), key, digest, parts, section_bytes, sealed) {
                Ok(()) => places.push((item_idx, sealed)),
                Err(reason) => {
                    item.outcome = PutOutcome::Failed(TierError::invalid("chunk to be sealed", &key, reason));
                }
            }
        }
        let parts: Vec<[&[u8]; 1]> = places.iter().map(|(_, sealed)| [*sealed]).collect();
        let mut inner_batch: Vec<PutItem<'_>> = places
            .iter()
            .zip(&parts)
            .map(|((item_idx, _), parts)| {
                let item = &group[*item_idx];
                PutItem::with_sections(item.key, parts, section_bytes_behind_page(item))
            })
            .collect();
        self.inner.put(&mut inner_batch);
        self.replace_unusable(keys, &mut inner_batch);
        let outcomes: Vec<PutOutcome> = inner_batch.into_iter().map(|item| item.outcome).collect();
        let item_idxs: Vec<usize> = places.into_iter().map(|(item_idx, _)| item_idx).collect();
        for (item_idx, outcome) in item_idxs.into_iter().zip(outcomes) {
            group[item_idx].outcome = outcome;
        }
    }

    /// Stores those items again that found something present which cannot be opened.
    fn replace_unusable(&self, keys: &KeyRing, batch: &mut [PutItem<'_>]) {
        let mut present: Vec<&mut PutItem<'_>> =
            batch.iter_mut().filter(|item| matches!(item.outcome, PutOutcome::Present)).collect();
        if present.is_empty() {
            return;
        }
        let mut scratch = self.scratch.take(present.len());
        let mut heads: Vec<GetItem<'_>> = present
            .iter()
            .zip(scratch.envelopes_mut())
            .map(|(item, head)| sealed_item(item.key, head, 0, &mut []))
            .collect();
        self.inner.get(&mut heads);
        let are_usable: Vec<bool> = heads.iter().map(|item| is_usable(keys, item)).collect();
        drop(heads);
        self.scratch.give_back(scratch);
        let mut are_usable = are_usable.into_iter();
        present.retain(|_| are_usable.next() == Some(false));
        let unusable: Vec<ChunkKey> = present.iter().map(|item| item.key).collect();
        // Where they cannot be deleted, they stay as they are, and so do the outcomes.
        if unusable.is_empty() || self.inner.delete(&unusable).is_err() {
            return;
        }
        let mut again: Vec<PutItem<'_>> = present.iter().map(|item| item.with_parts(item.parts)).collect();
        self.inner.put(&mut again);
        let outcomes: Vec<PutOutcome> = again.into_iter().map(|item| item.outcome).collect();
        for (item, outcome) in present.into_iter().zip(outcomes) {
            item.outcome = outcome;
        }
    }

    /// Reads the ranges; the outcomes are in their order.
    fn get_wanted(&self, wanted: &mut [Wanted<'_>]) -> Vec<GetOutcome> {
        let keys = self.keys.current();
        let mut scratch = self.scratch.take(wanted.len());
        let mut inner_batch: Vec<GetItem<'_>> = wanted
            .iter_mut()
            .zip(scratch.envelopes_mut())
            .map(|(range, head)| sealed_item(range.key, head, range.offset, range.buffer))
            .collect();
        self.inner.get(&mut inner_batch);
        let read: Vec<GetOutcome> = inner_batch.into_iter().map(|item| item.outcome).collect();
        let mut outcomes = Vec::with_capacity(wanted.len());
        for ((range, head), outcome) in wanted.iter_mut().zip(scratch.envelopes()).zip(read) {
            let outcome = match outcome {
                GetOutcome::Hit => match self.open(&keys, head, range) {
                    Verdict::Final(outcome) => outcome,
                    Verdict::Cut(start, end) => self.get_cut(&keys, range, (start, end)),
                },
                outcome => outcome,
            };
            // Relaxed: counts for people.
            match outcome {
                GetOutcome::Corrupt(_) => self.n_corrupt.fetch_add(1, Ordering::Relaxed),
                GetOutcome::TokenMismatch => self.n_token_mismatches.fetch_add(1, Ordering::Relaxed),
                _ => 0,
            };
            outcomes.push(outcome);
        }
        self.scratch.give_back(scratch);
        outcomes
    }

    /// Opens what was read for a range, in its buffer.
    fn open(&self, keys: &KeyRing, head: &[u8], range: &mut Wanted<'_>) -> Verdict {
        let corrupt = |reason| Verdict::Final(GetOutcome::Corrupt(reason));
        let head = match SealedHead::decode(head) {
            Ok(head) => head,
            Err(reason) => return corrupt(reason),
        };
        let Some(key) = keys.find(head.key_id()) else {
            self.n_unknown_keys.fetch_add(1, Ordering::Relaxed);
            return Verdict::Final(GetOutcome::Miss);
        };
        let head = match head.open(key) {
            Ok(head) if head.key() == range.key => head,
            Ok(_) => return corrupt("key"),
            Err(reason) => return corrupt(reason),
        };
        if head.digest() != range.digest {
            return Verdict::Final(GetOutcome::TokenMismatch);
        }
        if range.chunk_bytes.is_some_and(|chunk_bytes| chunk_bytes != head.chunk_bytes()) {
            return corrupt("length");
        }
        let end = range.offset.checked_add(range.buffer.len() as u64);
        match end.and_then(|end| Some((end, head.widen(range.offset, end)?))) {
            None => corrupt("length"),
            Some(_) if range.buffer.is_empty() => Verdict::Final(GetOutcome::Hit),
            Some((end, sections)) if sections != (range.offset, end) => Verdict::Cut(sections.0, sections.1),
            Some(_) => match head.open_sections(range.offset, range.buffer) {
                Ok(()) => Verdict::Final(GetOutcome::Hit),
                Err(reason) => corrupt(reason),
            },
        }
    }

    /// Reads a range that cuts through sections with the rest of them, whose length a head has proven.
    ///
    /// The head is read again: it and the sections must be of one put.
    fn get_cut(&self, keys: &KeyRing, range: &mut Wanted<'_>, (start, end): (u64, u64)) -> GetOutcome {
        let mut head = AlignedBuffer::new(SEALED_HEAD_BYTES);
        let mut sections = AlignedBuffer::new((end - start) as usize);
        let mut batch = [sealed_item(range.key, &mut head, start, &mut sections)];
        self.inner.get(&mut batch);
        let [GetItem { outcome, .. }] = batch;
        if !outcome.is_hit() {
            return outcome;
        }
        let Wanted { key, digest, chunk_bytes, .. } = *range;
        let mut wider = Wanted { key, digest, offset: start, chunk_bytes, buffer: &mut sections };
        match self.open(keys, &head, &mut wider) {
            Verdict::Final(GetOutcome::Hit) => {
                let n_bytes_before = (range.offset - start) as usize;
                range.buffer.copy_from_slice(&sections[n_bytes_before..][..range.buffer.len()]);
                GetOutcome::Hit
            }
            Verdict::Final(outcome) => outcome,
            // It was deleted and stored again in other sections: the next read finds those.
            Verdict::Cut(..) => GetOutcome::Miss,
        }
    }

    /// Memory of so many bytes or more, aligned for direct I/O.
    fn memory(&self, n_bytes: usize) -> AlignedBuffer {
        let kept = self.sealed.lock().take().filter(|kept| kept.len() >= n_bytes);
        kept.unwrap_or_else(|| AlignedBuffer::new(n_bytes))
    }
}

impl<T: Tier> Tier for Encrypted<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let keys = self.keys.current();
        let mut rest = batch;
        while !rest.is_empty() {
            let mut group_bytes = room_bytes(&rest[0]);
            let fitting = rest[1..].iter().map(room_bytes).take_while(|n_bytes| {
                group_bytes += n_bytes;
                group_bytes <= MAX_GROUP_BYTES
            });
            let (group, behind) = rest.split_at_mut(1 + fitting.count());
            let mut memory = self.memory(group.iter().map(room_bytes).sum());
            self.put_group(&keys, group, &mut memory);
            if memory.len() <= MAX_GROUP_BYTES {
                *self.sealed.lock() = Some(memory);
            }
            rest = behind;
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        get_by_range(batch, |wanted| self.get_wanted(wanted));
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.inner.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.inner.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner
            .visit_keys(&mut |key, n_bytes| visit(key, n_bytes.saturating_sub(SEALED_HEAD_BYTES as u64)));
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }

    fn stat(&self) -> TierStat {
        let mut stat = self.inner.stat();
        stat.details.push(("corrupt_reads", self.n_corrupt.load(Ordering::Relaxed)));
        stat.details.push(("token_mismatches", self.n_token_mismatches.load(Ordering::Relaxed)));
        stat.details.push(("unknown_key_reads", self.n_unknown_keys.load(Ordering::Relaxed)));
        stat
    }
}

/// Whether what was read as a head is that of a chunk which can be opened; also where it could not be read.
fn is_usable(keys: &KeyRing, item: &GetItem<'_>) -> bool {
    match item.outcome {
        GetOutcome::Hit => {
            let head = SealedHead::decode(item.head).ok();
            let opened = head.and_then(|head| head.open(keys.find(head.key_id())?).ok());
            opened.is_some_and(|head| head.key() == item.key)
        }
        // Too short for a head.
        GetOutcome::Corrupt(_) => false,
        _ => true,
    }
}

/// A range of a chunk with its head, as they lie in the tier inside.
fn sealed_item<'a>(key: ChunkKey, head: &'a mut [u8], offset: u64, buffer: &'a mut [u8]) -> GetItem<'a> {
    GetItem::with_head(key, head, offset.saturating_add(SEALED_HEAD_BYTES as u64), buffer)
}

/// What a chunk takes in memory when it is sealed: whole pages, so that the next one begins at one.
fn room_bytes(item: &PutItem<'_>) -> usize {
    SEALED_HEAD_BYTES + item.n_bytes().next_multiple_of(SEALED_HEAD_BYTES)
}
