//! Proof that what is read is what was stored.

use std::sync::atomic::{AtomicU64, Ordering};

use super::scratch::ScratchPool;
use crate::envelope::{ENVELOPE_BYTES, Envelope, seal};
use crate::error::Result;
use crate::key::ChunkKey;
use crate::tier::{GetItem, GetOutcome, PutItem, Tier, TierKind, TierStat};

/// Sections up to this length are read without asking first whether they are there.
const MAX_TRUSTED_BYTES: u64 = 16 << 20;

/// Puts an [`Envelope`] before every chunk and serves only what its envelope proves.
///
/// Bytes are not copied: they go to and come from the tier inside straight from and into the caller's
/// buffers. A read is one batch of the tier inside, of an envelope and a range for each item.
///
/// A range may begin and end anywhere, but one that cuts through a section of the envelope is read a second
/// time with the rest of its sections, into memory of its own. A chunk that is shorter or longer than what was
/// asked for is [`GetOutcome::Corrupt`], because a key has one content.
///
/// Lengths of keys are those of chunks without envelopes; [`TierStat::used_bytes`] has them with.
#[derive(Debug)]
pub struct Checksummed<T> {
    inner: T,
    scratch: ScratchPool,
    n_corrupt: AtomicU64,
}

impl<T: Tier> Checksummed<T> {
    /// Proves what comes out of `inner`.
    pub fn new(inner: T) -> Self {
        Self { inner, scratch: ScratchPool::default(), n_corrupt: AtomicU64::new(0) }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Judges an item by the outcomes of its envelope and its bytes.
    fn judge(
        &self,
        item: &mut GetItem<'_>,
        envelope: &[u8; ENVELOPE_BYTES],
        envelope_outcome: GetOutcome,
        bytes_outcome: GetOutcome,
    ) -> GetOutcome {
        if !envelope_outcome.is_hit() {
            return envelope_outcome;
        }
        let envelope = match Envelope::decode(envelope) {
            Ok(envelope) if envelope.key() == item.key => envelope,
            Ok(_) => return GetOutcome::Corrupt("key"),
            Err(reason) => return GetOutcome::Corrupt(reason),
        };
        let Some(end) = item.offset.checked_add(item.buffer.len() as u64) else {
            return GetOutcome::Corrupt("length");
        };
        if item.is_whole && (item.offset != 0 || end != envelope.chunk_bytes()) {
            return GetOutcome::Corrupt("length");
        }
        match envelope.widen(item.offset, end) {
            None => GetOutcome::Corrupt("length"),
            Some(range) if range != (item.offset, end) => self.get_widened(item, envelope, range),
            Some(_) if !bytes_outcome.is_hit() => self.judge_missing_bytes(item.key, bytes_outcome),
            Some(_) => outcome_of_proof(envelope.prove(item.offset, item.buffer)),
        }
    }

    /// Reads the item's bytes with the rest of their sections.
    fn get_widened(
        &self,
        item: &mut GetItem<'_>,
        envelope: Envelope<'_>,
        (start, end): (u64, u64),
    ) -> GetOutcome {
        // A forged envelope may claim any length: memory is taken only for bytes that are there.
        if end - start > MAX_TRUSTED_BYTES {
            let outcome = self.get_range(item.key, end - 1, &mut [0]);
            if !outcome.is_hit() {
                return self.judge_missing_bytes(item.key, outcome);
            }
        }
        let mut sections = vec![0; (end - start) as usize];
        let outcome = self.get_range(item.key, start, &mut sections);
        if !outcome.is_hit() {
            return self.judge_missing_bytes(item.key, outcome);
        }
        let outcome = outcome_of_proof(envelope.prove(start, &sections));
        if outcome.is_hit() {
            let n_bytes_before = (item.offset - start) as usize;
            item.buffer.copy_from_slice(&sections[n_bytes_before..][..item.buffer.len()]);
        }
        outcome
    }

    /// Judges bytes that are not there although their envelope is.
    ///
    /// A miss is a chunk that was deleted in between, unless its key is still there: then it has lost its end
    /// in a tier that cannot tell the two apart, and would be in the way of its next put for ever.
    fn judge_missing_bytes(&self, key: ChunkKey, outcome: GetOutcome) -> GetOutcome {
        let mut present = [false];
        match outcome {
            GetOutcome::Miss if self.inner.contains(&[key], &mut present).is_ok() && present[0] => {
                GetOutcome::Corrupt("length")
            }
            outcome => outcome,
        }
    }

    /// Reads unproven bytes of a chunk.
    fn get_range(&self, key: ChunkKey, offset: u64, buffer: &mut [u8]) -> GetOutcome {
        let mut batch = [GetItem::range(key, ENVELOPE_BYTES as u64 + offset, buffer)];
        self.inner.get(&mut batch);
        let [GetItem { outcome, .. }] = batch;
        outcome
    }
}

impl<T: Tier> Tier for Checksummed<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let mut scratch = self.scratch.take(batch.len());
        for (item, envelope) in batch.iter().zip(scratch.envelopes_mut()) {
            seal(item.key, item.parts, item.section_bytes, envelope);
        }
        let parts: Vec<Vec<&[u8]>> = batch
            .iter()
            .zip(scratch.envelopes())
            .map(|(item, envelope)| [&[envelope.as_slice()], item.parts].concat())
            .collect();
        let mut inner_batch: Vec<PutItem<'_>> = batch
            .iter()
            .zip(&parts)
            .map(|(item, parts)| PutItem::with_sections(item.key, parts, inner_section_bytes(item)))
            .collect();
        self.inner.put(&mut inner_batch);
        for (item, inner_item) in batch.iter_mut().zip(inner_batch) {
            item.outcome = inner_item.outcome;
        }
        self.scratch.give_back(scratch);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        let mut scratch = self.scratch.take(batch.len());
        let mut inner_batch = Vec::with_capacity(2 * batch.len());
        for (item, envelope) in batch.iter_mut().zip(scratch.envelopes_mut()) {
            let offset = item.offset.saturating_add(ENVELOPE_BYTES as u64);
            inner_batch.push(GetItem::range(item.key, 0, envelope));
            inner_batch.push(GetItem::range(item.key, offset, item.buffer));
        }
        self.inner.get(&mut inner_batch);
        let outcomes: Vec<GetOutcome> = inner_batch.into_iter().map(|item| item.outcome).collect();
        let mut outcomes = outcomes.into_iter();
        for (item, envelope) in batch.iter_mut().zip(scratch.envelopes()) {
            let [envelope_outcome, bytes_outcome] = [(); 2].map(|()| outcomes.next().unwrap_or_default());
            item.outcome = self.judge(item, envelope, envelope_outcome, bytes_outcome);
            if matches!(item.outcome, GetOutcome::Corrupt(_)) {
                // Relaxed: a count for people.
                self.n_corrupt.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.scratch.give_back(scratch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.inner.contains(keys, present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.inner.delete(keys)
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner.visit_keys(&mut |key, n_bytes| visit(key, n_bytes.saturating_sub(ENVELOPE_BYTES as u64)));
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }

    fn stat(&self) -> TierStat {
        let mut stat = self.inner.stat();
        stat.details.push(("corrupt_reads", self.n_corrupt.load(Ordering::Relaxed)));
        stat
    }
}

fn outcome_of_proof(proof: Result<(), &'static str>) -> GetOutcome {
    match proof {
        Ok(()) => GetOutcome::Hit,
        Err(reason) => GetOutcome::Corrupt(reason),
    }
}

/// The largest unit that the envelope and the sections behind it are multiples of.
fn inner_section_bytes(item: &PutItem<'_>) -> usize {
    if item.section_bytes == 0 || item.section_bytes >= item.n_bytes() {
        return ENVELOPE_BYTES;
    }
    ENVELOPE_BYTES.min(1 << item.section_bytes.trailing_zeros())
}
