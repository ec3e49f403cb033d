//! Proof that what is read is what was stored.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::scratch::ScratchPool;
use super::wanted::{Wanted, get_by_range, section_bytes_behind_page};
use crate::chunk_file::ChunkFile;
use crate::envelope::{ENVELOPE_BYTES, Envelope, seal, seal_sections};
use crate::error::Result;
use crate::key::{ChunkKey, TokenDigest};
use crate::sections::Sections;
use crate::tier::{
    Change, FileItem, Fill, GetItem, GetOutcome, Heads, PutItem, PutOutcome, Rewritten, Tier, TierKind,
    TierStat,
};

/// Sections up to this length are read without asking first whether they are there.
const MAX_TRUSTED_BYTES: u64 = 16 << 20;

/// Puts an [`Envelope`] before every chunk and serves only what its envelope proves.
///
/// Bytes are not copied: they go to and come from the tier inside straight from and into the caller's
/// buffers. A read is one batch of the tier inside, of one item for each: its range with the envelope as the
/// head. It is proven as soon as it has arrived, on the thread that received it; a head that the caller asks
/// for is proven as a range of its own. An envelope is made when its chunk is about to be sent.
///
/// A range may begin and end anywhere, but one that cuts through a section of the envelope is read a second
/// time with the rest of its sections, into memory of its own. A chunk that is shorter or longer than what was
/// asked for is [`GetOutcome::Corrupt`], because a key has one content. One that was stored for other tokens
/// is [`GetOutcome::TokenMismatch`]: the tier is one that keeps digests.
///
/// Lengths of keys are those of chunks without envelopes; [`TierStat::used_bytes`] has them with.
#[derive(Debug)]
pub struct Checksummed<T> {
    inner: T,
    scratch: ScratchPool,
    n_corrupt: Arc<AtomicU64>,
    n_token_mismatches: AtomicU64,
}

/// The envelopes of a batch, each made when it is wanted.
struct Seals<'a> {
    items: Vec<PutItem<'a>>,
    sealed: Vec<OnceLock<AlignedEnvelope>>,
}

/// An envelope that direct I/O takes from where it lies.
#[repr(align(4096))]
struct AlignedEnvelope([u8; ENVELOPE_BYTES]);

/// What can be said of bytes that have arrived.
enum Verdict {
    /// All there is to say.
    Final(GetOutcome),
    /// They cut through sections: those from here to there have to be read.
    Cut(u64, u64),
}

impl<T: Tier> Checksummed<T> {
    /// Proves what comes out of `inner`.
    pub fn new(inner: T) -> Self {
        Self {
            inner,
            scratch: ScratchPool::default(),
            n_corrupt: Arc::default(),
            n_token_mismatches: AtomicU64::new(0),
        }
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// Reads the ranges; the outcomes are in their order.
    fn get_wanted(&self, wanted: &mut [Wanted<'_>]) -> Vec<GetOutcome> {
        let mut scratch = self.scratch.take(wanted.len());
        let claims: Vec<(TokenDigest, u64, Option<u64>)> =
            wanted.iter().map(|range| (range.digest, range.offset, range.chunk_bytes)).collect();
        let verdicts: Vec<OnceLock<Verdict>> = wanted.iter().map(|_| OnceLock::new()).collect();
        let mut inner_batch: Vec<GetItem<'_>> = wanted
            .iter_mut()
            .zip(scratch.envelopes_mut())
            .map(|(range, envelope)| {
                let offset = range.offset.saturating_add(ENVELOPE_BYTES as u64);
                GetItem::with_head(range.key, envelope, offset, range.buffer)
            })
            .collect();
        self.inner.get_each(&mut inner_batch, &|item_idx, item| {
            let (digest, offset, chunk_bytes) = claims[item_idx];
            verdicts[item_idx].get_or_init(|| judge(item, digest, offset, chunk_bytes));
        });
        drop(inner_batch);
        let mut outcomes = Vec::with_capacity(wanted.len());
        for ((range, envelope), verdict) in wanted.iter_mut().zip(scratch.envelopes()).zip(verdicts) {
            let outcome = match verdict.into_inner() {
                Some(Verdict::Final(outcome)) => outcome,
                Some(Verdict::Cut(start, end)) => self.get_cut(range, envelope, (start, end)),
                // Never told of: nothing says that these bytes are right.
                None => GetOutcome::Pending,
            };
            self.count(&outcome);
            outcomes.push(outcome);
        }
        self.scratch.give_back(scratch);
        outcomes
    }

    fn count(&self, outcome: &GetOutcome) {
        // Relaxed: counts for people.
        match outcome {
            GetOutcome::Corrupt(_) => self.n_corrupt.fetch_add(1, Ordering::Relaxed),
            GetOutcome::TokenMismatch => self.n_token_mismatches.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
    }

    /// The chunk behind its envelope, which is proven.
    fn open_behind(&self, key: ChunkKey, digest: TokenDigest) -> std::result::Result<ChunkFile, GetOutcome> {
        let file = self.inner.open_chunk(key, TokenDigest::NONE)?;
        let head = file.read_head::<ENVELOPE_BYTES>().map_err(GetOutcome::Failed)?;
        let head = head.ok_or(GetOutcome::Corrupt("length"))?;
        let envelope = prove_head(&head, key, digest)?;
        if envelope.chunk_bytes() + ENVELOPE_BYTES as u64 != file.n_bytes() {
            return Err(GetOutcome::Corrupt("length"));
        }
        let checksums = envelope.section_checksums().collect();
        Ok(file.behind(ENVELOPE_BYTES, envelope.section_bytes(), checksums, &self.n_corrupt))
    }

    /// Reads a range that cuts through sections with the rest of them.
    fn get_cut(
        &self,
        wanted: &mut Wanted<'_>,
        envelope: &[u8; ENVELOPE_BYTES],
        (start, end): (u64, u64),
    ) -> GetOutcome {
        let envelope = match Envelope::decode(envelope) {
            Ok(envelope) => envelope,
            Err(reason) => return GetOutcome::Corrupt(reason),
        };
        // A forged envelope may claim any length: memory is taken only for bytes that are there.
        if end - start > MAX_TRUSTED_BYTES {
            let outcome = self.get_range(wanted.key, end - 1, &mut [0]);
            if !outcome.is_hit() {
                return self.judge_missing_bytes(wanted.key, outcome);
            }
        }
        let mut sections = vec![0; (end - start) as usize];
        let outcome = self.get_range(wanted.key, start, &mut sections);
        if !outcome.is_hit() {
            return self.judge_missing_bytes(wanted.key, outcome);
        }
        let outcome = outcome_of_proof(envelope.prove(start, &sections));
        if outcome.is_hit() {
            let n_bytes_before = (wanted.offset - start) as usize;
            wanted.buffer.copy_from_slice(&sections[n_bytes_before..][..wanted.buffer.len()]);
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

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let seals = Seals {
            sealed: batch.iter().map(|_| OnceLock::new()).collect(),
            items: batch.iter().map(|item| item.with_parts(item.parts)).collect(),
        };
        let mut inner_batch: Vec<PutItem<'_>> = batch
            .iter()
            .map(|item| PutItem::with_sections(item.key, item.parts, section_bytes_behind_page(item)))
            .collect();
        self.inner.put_each(&mut inner_batch, &seals);
        let outcomes: Vec<PutOutcome> = inner_batch.into_iter().map(|item| item.outcome).collect();
        for (item, outcome) in batch.iter_mut().zip(outcomes) {
            item.outcome = outcome;
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
        self.inner.visit_keys(&mut |key, n_bytes| visit(key, n_bytes.saturating_sub(ENVELOPE_BYTES as u64)));
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }

    fn has_files(&self) -> bool {
        self.inner.has_files()
    }

    fn open_chunk(&self, key: ChunkKey, digest: TokenDigest) -> std::result::Result<ChunkFile, GetOutcome> {
        self.open_behind(key, digest).inspect_err(|outcome| self.count(outcome))
    }

    fn put_file(&self, item: &FileItem, fill: Fill<'_>) -> PutOutcome {
        let FileItem { key, digest, n_bytes, section_bytes } = *item;
        let behind = FileItem { n_bytes: n_bytes + ENVELOPE_BYTES as u64, ..*item };
        self.inner.put_file(&behind, &mut |file, offset| {
            let checksums = fill(file, offset + ENVELOPE_BYTES as u64)?;
            let mut envelope = AlignedEnvelope([0; ENVELOPE_BYTES]);
            let sections = Sections { chunk_bytes: n_bytes, section_bytes };
            if !seal_sections(key, digest, sections, &checksums, &mut envelope.0) {
                return Err(io::Error::other("the sections of a chunk cannot have these checksums"));
            }
            if rustix::io::pwrite(file, &envelope.0, offset)? < ENVELOPE_BYTES {
                return Err(io::ErrorKind::WriteZero.into());
            }
            Ok(checksums)
        })
    }

    fn rewrite(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
        self.inner.rewrite(key, &mut |sealed| {
            let (envelope, chunk) = sealed.split_at_checked(ENVELOPE_BYTES)?;
            let envelope = Envelope::decode(envelope).ok()?;
            // What does not prove itself stays as it is: its next reader finds out.
            let is_whole = envelope.key() == key && envelope.chunk_bytes() == chunk.len() as u64;
            if !is_whole || envelope.prove(0, chunk).is_err() {
                return None;
            }
            let (changed, section_bytes) = change(chunk)?;
            let mut head = AlignedEnvelope([0; ENVELOPE_BYTES]);
            seal(key, envelope.digest(), &[&changed], section_bytes, &mut head.0);
            Some(([&head.0[..], &changed].concat(), ENVELOPE_BYTES))
        })
    }

    fn stat(&self) -> TierStat {
        let mut stat = self.inner.stat();
        stat.details.push(("corrupt_reads", self.n_corrupt.load(Ordering::Relaxed)));
        stat.details.push(("token_mismatches", self.n_token_mismatches.load(Ordering::Relaxed)));
        stat
    }
}

impl Heads for Seals<'_> {
    fn n_bytes(&self) -> usize {
        ENVELOPE_BYTES
    }

    fn head_of(&self, item_idx: usize) -> &[u8] {
        let PutItem { key, parts, section_bytes, digest, .. } = self.items[item_idx];
        let sealed = self.sealed[item_idx].get_or_init(|| {
            let mut envelope = AlignedEnvelope([0; ENVELOPE_BYTES]);
            seal(key, digest, parts, section_bytes, &mut envelope.0);
            envelope
        });
        &sealed.0
    }
}

/// Judges what came for a range that begins at `offset` of its chunk; the item's head is the envelope.
fn judge(item: &GetItem<'_>, digest: TokenDigest, offset: u64, chunk_bytes: Option<u64>) -> Verdict {
    if !item.outcome.is_hit() {
        return Verdict::Final(item.outcome.clone());
    }
    let corrupt = |reason| Verdict::Final(GetOutcome::Corrupt(reason));
    let envelope = match prove_head(item.head, item.key, digest) {
        Ok(envelope) => envelope,
        Err(outcome) => return Verdict::Final(outcome),
    };
    if chunk_bytes.is_some_and(|chunk_bytes| chunk_bytes != envelope.chunk_bytes()) {
        return corrupt("length");
    }
    let end = offset.checked_add(item.buffer.len() as u64);
    match end.and_then(|end| Some((end, envelope.widen(offset, end)?))) {
        None => corrupt("length"),
        Some((end, sections)) if sections != (offset, end) => Verdict::Cut(sections.0, sections.1),
        Some(_) => Verdict::Final(outcome_of_proof(envelope.prove(offset, item.buffer))),
    }
}

/// The envelope of a chunk, if it is that of this key and these tokens.
fn prove_head(
    head: &[u8],
    key: ChunkKey,
    digest: TokenDigest,
) -> std::result::Result<Envelope<'_>, GetOutcome> {
    let envelope = Envelope::decode(head).map_err(GetOutcome::Corrupt)?;
    if envelope.key() != key {
        return Err(GetOutcome::Corrupt("key"));
    }
    if envelope.digest() == digest { Ok(envelope) } else { Err(GetOutcome::TokenMismatch) }
}

fn outcome_of_proof(proof: Result<(), &'static str>) -> GetOutcome {
    match proof {
        Ok(()) => GetOutcome::Hit,
        Err(reason) => GetOutcome::Corrupt(reason),
    }
}
