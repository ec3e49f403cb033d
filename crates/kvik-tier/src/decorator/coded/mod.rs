//! Chunks that are smaller where they are stored.

mod page;
mod recode;
mod spaces;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvik_codec::{Codec, CodecError, NAMES, by_name, encode};
use kvik_types::BlockHash;

pub use spaces::CodedSpaces;

use self::page::{PAGE_BYTES, Page, checksum_of, piece_bytes};
use super::scratch::ScratchPool;
use super::wanted::{Wanted, get_by_range};
use crate::envelope::ENVELOPE_BYTES;
use crate::error::{Result, TierError};
use crate::key::{ChunkKey, NamespaceId};
use crate::tier::{GetItem, GetOutcome, PutItem, PutOutcome, Rewritten, Tier, TierKind, TierStat};

// The memory for pages is that for envelopes.
const _: () = assert!(PAGE_BYTES == ENVELOPE_BYTES);

/// The longest section of which a part is read: a forged page may claim any length.
const MAX_CUT_SECTION_BYTES: usize = 1 << 30;

/// The codec of chunks whose layout a lossy one does not know.
const FALLBACK: &str = "lossless";

/// Codes chunks on their way to the tier inside, and decodes of what comes back only the layers that are asked for.
///
/// A coded chunk is a page that says how it was coded, with a checksum of each coded layer or piece, and these behind it. A
/// read is two calls of the tier inside: the pages, and then what they say is wanted. The tier inside has to prove
/// what it gives ([`Checksummed`](super::Checksummed) or [`Encrypted`](super::Encrypted)).
///
/// What is read is decoded by the codec of its page, whichever is configured now, if that is lossless or allowed; else it is
/// [`GetOutcome::Corrupt`]. Coded chunks have keys of their own in the tier inside: a store that reads the tier without this
/// decorator does not find them, and this one does not find what was stored without it.
///
/// A chunk whose layout a lossy codec does not know is coded without loss; one that is not made of equal sections of
/// floats is kept as it is behind its page.
///
/// Lengths of keys are those of coded chunks; [`TierStat::used_bytes`] has them too.
#[derive(Debug)]
pub struct Coded<T> {
    inner: T,
    codec: Box<dyn Codec>,
    fallback: Box<dyn Codec>,
    /// By which a chunk may have been coded to be read.
    readable: Vec<Box<dyn Codec>>,
    spaces: Arc<CodedSpaces>,
    pages: ScratchPool,
    n_raw_bytes: AtomicU64,
    n_coded_bytes: AtomicU64,
    n_unreadable: AtomicU64,
}

/// What a page and a wanted range lead to.
enum Plan<'a> {
    /// Nothing is left to be read.
    Done(GetOutcome),
    /// The range is in these pieces, which lie behind the page as they are.
    AsItIs { pieces: Range<u64>, stored: Range<u64> },
    /// These layers are decoded.
    Layers { codec: &'a dyn Codec, layers: Range<usize>, coded: Range<u64> },
}

/// A page that direct I/O takes from where it lies.
#[repr(align(4096))]
struct AlignedPage([u8; PAGE_BYTES]);

impl<T: Tier> Coded<T> {
    /// Codes with the codec of a name what goes into `inner`. `allowed_lossy` are the lossy codecs that may be used, by
    /// their names. What chunks are made of comes from `spaces`.
    ///
    /// # Errors
    /// If there is no such codec, or it is lossy and not allowed.
    pub fn try_new(
        inner: T,
        codec: &str,
        allowed_lossy: &[String],
        spaces: Arc<CodedSpaces>,
    ) -> Result<Self> {
        let codec = by_name(codec).map_err(invalid)?;
        let is_allowed =
            |codec: &dyn Codec| codec.is_lossless() || allowed_lossy.iter().any(|name| name == codec.name());
        if !is_allowed(&*codec) {
            let allowed = "a lossless codec: none, lossless; or a lossy one that `allow_lossy` names";
            return Err(TierError::invalid("codec", &codec.name(), allowed));
        }
        let codecs = NAMES.into_iter().map(|name| by_name(name).map_err(invalid));
        let codecs = codecs.collect::<Result<Vec<Box<dyn Codec>>>>()?;
        Ok(Self {
            inner,
            codec,
            fallback: by_name(FALLBACK).map_err(invalid)?,
            readable: codecs.into_iter().filter(|codec| is_allowed(&**codec)).collect(),
            spaces,
            pages: ScratchPool::default(),
            n_raw_bytes: AtomicU64::new(0),
            n_coded_bytes: AtomicU64::new(0),
            n_unreadable: AtomicU64::new(0),
        })
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    /// The page of a chunk and what stands behind it; nothing where that is the chunk as it is.
    fn coded(&self, item: &PutItem<'_>, raw: &[u8]) -> (Page, Option<Vec<u8>>) {
        let as_it_is = || (Page::as_it_is(raw), None);
        let Some(shape) = self.spaces.shape_of(item.key.namespace, raw.len(), item.section_bytes) else {
            return as_it_is();
        };
        let codec = if self.codec.check(&shape).is_ok() { &self.codec } else { &self.fallback };
        let mut coded = Vec::with_capacity(raw.len());
        if encode(&**codec, &shape, raw, &mut coded).is_err() {
            return as_it_is();
        }
        match Page::of_coded(&coded) {
            Some((page, head_bytes)) => {
                coded.drain(..head_bytes);
                (page, Some(coded))
            }
            None => as_it_is(),
        }
    }

    /// Reads the ranges, and those again of whose page and layers one may be older than the other: a chunk that was coded again
    /// between the two calls is there.
    fn get_settled(&self, wanted: &mut [Wanted<'_>]) -> Vec<GetOutcome> {
        let mut outcomes = self.get_wanted(wanted);
        for (range, outcome) in wanted.iter_mut().zip(&mut outcomes) {
            if matches!(outcome, GetOutcome::Corrupt("coded layer" | "length"))
                && let Some(again) = self.get_wanted(std::slice::from_mut(range)).pop()
            {
                *outcome = again;
            }
        }
        outcomes
    }

    /// Reads the ranges; the outcomes are in their order.
    fn get_wanted(&self, wanted: &mut [Wanted<'_>]) -> Vec<GetOutcome> {
        let mut scratch = self.pages.take(wanted.len());
        let mut inner_batch: Vec<GetItem<'_>> = wanted
            .iter()
            .zip(scratch.envelopes_mut())
            .map(|(range, page)| {
                GetItem::with_head(coded_key(range.key), page, 0, &mut []).for_tokens(range.digest)
            })
            .collect();
        self.inner.get(&mut inner_batch);
        let found: Vec<GetOutcome> = inner_batch.into_iter().map(|item| item.outcome).collect();
        let pages: Vec<std::result::Result<Page, GetOutcome>> = found
            .into_iter()
            .zip(scratch.envelopes())
            .map(|(outcome, page)| match outcome {
                GetOutcome::Hit => Page::read(page).map_err(GetOutcome::Corrupt),
                outcome => Err(outcome),
            })
            .collect();
        self.pages.give_back(scratch);
        let plans: Vec<Plan<'_>> =
            pages.iter().zip(&*wanted).map(|(page, range)| self.plan(page, range)).collect();
        self.get_planned(&plans, &pages, wanted)
    }

    /// What is to be read of a range.
    fn plan(&self, page: &std::result::Result<Page, GetOutcome>, wanted: &Wanted<'_>) -> Plan<'_> {
        let page = match page {
            Ok(page) => page,
            Err(outcome) => return Plan::Done(outcome.clone()),
        };
        let corrupt = |reason| Plan::Done(GetOutcome::Corrupt(reason));
        let end = wanted.offset.checked_add(wanted.buffer.len() as u64);
        let is_other_length = wanted.chunk_bytes.is_some_and(|n_bytes| n_bytes != page.chunk_bytes());
        if is_other_length || end.is_none_or(|end| end > page.chunk_bytes()) {
            return corrupt("length");
        }
        if wanted.buffer.is_empty() {
            return Plan::Done(GetOutcome::Hit);
        }
        let Page::Coded { head, .. } = page else {
            return plan_pieces(page.chunk_bytes(), wanted);
        };
        let Some(codec) = self.readable.iter().find(|codec| codec.id() == head.codec_id) else {
            // Relaxed: a count for people.
            self.n_unreadable.fetch_add(1, Ordering::Relaxed);
            return corrupt("codec");
        };
        let section_bytes = head.shape.section_bytes();
        let start = wanted.offset as usize;
        let layers = start / section_bytes..(start + wanted.buffer.len()).div_ceil(section_bytes);
        if section_bytes > wanted.buffer.len() && section_bytes > MAX_CUT_SECTION_BYTES {
            return corrupt("section");
        }
        let coded = head.layer_range(layers.clone());
        // No codec makes a layer much larger: memory is taken for what can be there.
        let n_most = (layers.len() * (section_bytes + PAGE_BYTES)) as u64;
        if coded.end - coded.start > n_most {
            return corrupt("length of a layer");
        }
        // The head is part of the page.
        let n_before = head.head_bytes() as u64;
        let place = |offset: u64| PAGE_BYTES as u64 + offset - n_before;
        Plan::Layers { codec: &**codec, layers, coded: place(coded.start)..place(coded.end) }
    }

    /// Reads and decodes what the plans say.
    fn get_planned(
        &self,
        plans: &[Plan<'_>],
        pages: &[std::result::Result<Page, GetOutcome>],
        wanted: &mut [Wanted<'_>],
    ) -> Vec<GetOutcome> {
        let mut bodies: Vec<Vec<u8>> = plans
            .iter()
            .map(|plan| match plan {
                Plan::Layers { coded: stored, .. } | Plan::AsItIs { stored, .. } => {
                    vec![0; (stored.end - stored.start) as usize]
                }
                Plan::Done(_) => Vec::new(),
            })
            .collect();
        let mut inner_batch: Vec<GetItem<'_>> = Vec::with_capacity(plans.len());
        for ((plan, range), body) in plans.iter().zip(&*wanted).zip(&mut bodies) {
            let offset = match plan {
                Plan::Done(_) => continue,
                Plan::AsItIs { stored, .. } => stored.start,
                Plan::Layers { coded, .. } => coded.start,
            };
            inner_batch.push(GetItem::range(coded_key(range.key), offset, body).for_tokens(range.digest));
        }
        if !inner_batch.is_empty() {
            self.inner.get(&mut inner_batch);
        }
        let mut read = inner_batch.into_iter().map(|item| item.outcome).collect::<Vec<_>>().into_iter();
        let parts = plans.iter().zip(pages).zip(wanted).zip(&bodies);
        parts
            .map(|(((plan, page), range), body)| match (plan, page) {
                (Plan::Done(outcome), _) => outcome.clone(),
                (plan, page) => match (read.next(), plan, page) {
                    (Some(GetOutcome::Hit), Plan::Layers { codec, layers, .. }, Ok(page)) => {
                        decode(*codec, page, layers.clone(), body, range)
                    }
                    (Some(GetOutcome::Hit), Plan::AsItIs { pieces, .. }, Ok(page)) => {
                        copy_pieces(page, pieces.clone(), body, range)
                    }
                    (Some(GetOutcome::Hit), ..) => GetOutcome::Corrupt("page"),
                    (outcome, ..) => outcome.unwrap_or_default(),
                },
            })
            .collect()
    }
}

impl<T: Tier> Tier for Coded<T> {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        let mut coded = Vec::with_capacity(batch.len());
        for item in &*batch {
            let joined;
            let raw = match item.parts {
                [part] => *part,
                parts => {
                    joined = parts.concat();
                    &joined
                }
            };
            let (page, body) = self.coded(item, raw);
            // Relaxed: counts for people.
            self.n_raw_bytes.fetch_add(raw.len() as u64, Ordering::Relaxed);
            let n_coded = PAGE_BYTES + body.as_ref().map_or(raw.len(), Vec::len);
            self.n_coded_bytes.fetch_add(n_coded as u64, Ordering::Relaxed);
            coded.push((AlignedPage(page.to_bytes()), body));
        }
        let parts: Vec<Vec<&[u8]>> = batch
            .iter()
            .zip(&coded)
            .map(|(item, (page, body))| match body {
                Some(body) => vec![&page.0[..], body],
                None => [&[&page.0[..]], item.parts].concat(),
            })
            .collect();
        let mut inner_batch: Vec<PutItem<'_>> = batch
            .iter()
            .zip(&parts)
            .map(|(item, parts)| {
                PutItem::with_sections(coded_key(item.key), parts, PAGE_BYTES).for_tokens(item.digest)
            })
            .collect();
        self.inner.put(&mut inner_batch);
        let outcomes: Vec<PutOutcome> = inner_batch.into_iter().map(|item| item.outcome).collect();
        for (item, outcome) in batch.iter_mut().zip(outcomes) {
            item.outcome = outcome;
        }
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        get_by_range(batch, |wanted| self.get_settled(wanted));
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        self.inner.contains(&coded_keys(keys), present)
    }

    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        self.inner.delete(&coded_keys(keys))
    }

    fn visit_keys(&self, visit: &mut dyn FnMut(ChunkKey, u64)) {
        self.inner.visit_keys(&mut |key, n_bytes| {
            visit(coded_key(key), n_bytes.saturating_sub(PAGE_BYTES as u64));
        });
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }

    fn codec(&self) -> Option<&str> {
        Some(self.codec.name())
    }

    fn recode(&self, key: ChunkKey, codec: &str) -> Result<Rewritten> {
        let Some(wanted) = self.readable.iter().find(|known| known.name() == codec) else {
            let names: Vec<&str> = self.readable.iter().map(|known| known.name()).collect();
            return Err(TierError::invalid("codec", &codec, names.join(", ")));
        };
        self.inner.rewrite(coded_key(key), &mut |stored| {
            recode::recode(&**wanted, &self.readable, stored).map(|coded| (coded, PAGE_BYTES))
        })
    }

    fn stat(&self) -> TierStat {
        let mut stat = self.inner.stat();
        stat.details.push(("bytes_before_coding", self.n_raw_bytes.load(Ordering::Relaxed)));
        stat.details.push(("bytes_after_coding", self.n_coded_bytes.load(Ordering::Relaxed)));
        stat.details.push(("codec_not_allowed_reads", self.n_unreadable.load(Ordering::Relaxed)));
        stat
    }
}

/// Whether the codec of a name gives back the same bytes.
///
/// # Errors
/// If there is no such codec; the message has the names.
pub fn is_lossless_codec(name: &str) -> Result<bool> {
    by_name(name).map(|codec| codec.is_lossless()).map_err(invalid)
}

/// The pieces of a chunk that is kept as it is that a range is in; the range is in the chunk.
fn plan_pieces(chunk_bytes: u64, wanted: &Wanted<'_>) -> Plan<'static> {
    let piece_bytes = piece_bytes(chunk_bytes);
    // A forged page may claim any length.
    if piece_bytes > wanted.buffer.len().max(MAX_CUT_SECTION_BYTES) as u64 {
        return Plan::Done(GetOutcome::Corrupt("section"));
    }
    let end = wanted.offset + wanted.buffer.len() as u64;
    let pieces = wanted.offset / piece_bytes..end.div_ceil(piece_bytes);
    let page_bytes = PAGE_BYTES as u64;
    let stored_end = pieces.end.saturating_mul(piece_bytes).min(chunk_bytes).saturating_add(page_bytes);
    Plan::AsItIs { stored: pieces.start * piece_bytes + page_bytes..stored_end, pieces }
}

/// Copies what is wanted of pieces that were read, if they are those of their page.
fn copy_pieces(page: &Page, pieces: Range<u64>, body: &[u8], wanted: &mut Wanted<'_>) -> GetOutcome {
    let Page::AsItIs { chunk_bytes, checksums } = page else {
        return GetOutcome::Corrupt("page");
    };
    let piece_bytes = piece_bytes(*chunk_bytes);
    let proofs = checksums.get(pieces.start as usize..pieces.end as usize).unwrap_or_default();
    let mut read = body.chunks(piece_bytes as usize);
    // The page and the pieces came in two calls: in between the chunk may have been put again in another form.
    if !proofs.iter().all(|proof| read.next().is_some_and(|piece| checksum_of(piece) == *proof)) {
        return GetOutcome::Corrupt("coded layer");
    }
    let start = (wanted.offset - pieces.start * piece_bytes) as usize;
    match body.get(start..start + wanted.buffer.len()) {
        Some(bytes) if read.next().is_none() => wanted.buffer.copy_from_slice(bytes),
        _ => return GetOutcome::Corrupt("length"),
    }
    GetOutcome::Hit
}

/// Decodes layers that were read into the part of them that is wanted.
fn decode(
    codec: &dyn Codec,
    page: &Page,
    layers: Range<usize>,
    body: &[u8],
    wanted: &mut Wanted<'_>,
) -> GetOutcome {
    let Page::Coded { head, checksums } = page else {
        return GetOutcome::Corrupt("page");
    };
    let section_bytes = head.shape.section_bytes();
    let (start, end) = (wanted.offset as usize, wanted.offset as usize + wanted.buffer.len());
    let mut rest = body;
    for layer in layers {
        let n_bytes = head.layer_bytes[layer] as usize;
        let Some((coded, behind)) = rest.split_at_checked(n_bytes) else {
            return GetOutcome::Corrupt("length of a layer");
        };
        rest = behind;
        // The page and the layers came in two calls: in between another codec may have written the chunk again.
        if checksum_of(coded) != checksums[layer] {
            return GetOutcome::Corrupt("coded layer");
        }
        let section = layer * section_bytes..(layer + 1) * section_bytes;
        let common = section.start.max(start)..section.end.min(end);
        let out = &mut wanted.buffer[common.start - start..common.end - start];
        let decoded = if common == section {
            codec.decode_layer(&head.shape, layer, coded, out)
        } else {
            let mut whole = vec![0; section_bytes];
            let decoded = codec.decode_layer(&head.shape, layer, coded, &mut whole);
            out.copy_from_slice(&whole[common.start - section.start..common.end - section.start]);
            decoded
        };
        if decoded.is_err() {
            return GetOutcome::Corrupt("coded layer");
        }
    }
    GetOutcome::Hit
}

/// The key of a coded chunk in the tier inside, and back.
///
/// Namespace and hash differ: a store that lists the tier without this decorator takes the chunk for one of another store,
/// which it may evict, and never for a chunk of its own.
fn coded_key(key: ChunkKey) -> ChunkKey {
    const MARK: [u8; 16] = *b"kvik coded chunk";
    let marked = |BlockHash(bytes): BlockHash| BlockHash(std::array::from_fn(|idx| bytes[idx] ^ MARK[idx]));
    ChunkKey { namespace: NamespaceId(marked(key.namespace.0)), chunk: marked(key.chunk), ..key }
}

fn coded_keys(keys: &[ChunkKey]) -> Vec<ChunkKey> {
    keys.iter().map(|key| coded_key(*key)).collect()
}

fn invalid(error: CodecError) -> TierError {
    match error {
        CodecError::Invalid { field, value, allowed } => TierError::Invalid { field, value, allowed },
        error => TierError::invalid("codec", &error, NAMES.join(", ")),
    }
}
