//! What the entries of the rings say.
//!
//! | word | submission | completion |
//! |---|---|---|
//! | 0 | operation, and above 32 bits the place of a chunk | status, and above 32 bits a count of chunks |
//! | 1 | number of the request | the same |
//! | 2 | handle, and above 32 bits the first chunk | handle |
//! | 3 | first word of the payload, and above 32 bits a count of chunks | tokens |
//! | 4 | an argument | the slowest tier of what was found |
//! | 5 | | its tokens in memory; 0 from older daemons |
//!
//! The payload of an `open` is the names of the chunks, [`NAME_WORDS`] each. That of a `retrieve`, `write` or
//! `read_layers` is the digests of the chain's first chunks, [`DIGEST_WORDS`] each, over which the daemon writes the
//! offsets of chunks in its answer. A `next_layer` has room for offsets alone.

use std::time::Duration;

use kvik_store::{Priority, Retention};
use kvik_tier::{TierKind, TokenDigest};
use kvik_types::BlockHash;

use crate::ring::{Entry, PAYLOAD_WORDS};

/// Words of a chunk's name.
pub(crate) const NAME_WORDS: usize = 2;

/// Words of a chunk's digest.
pub(crate) const DIGEST_WORDS: usize = 4;

/// Chunks that one request may be about: all whose digests fit into the payload.
pub(crate) const MAX_CHAIN_CHUNKS: usize = PAYLOAD_WORDS / DIGEST_WORDS;

/// The offset of a chunk that is stored already.
pub(crate) const PRESENT: u64 = u64::MAX;

/// Bits of an offset in the arena; more memory than any machine has.
const OFFSET_BITS: u32 = 56;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;

/// The tiers by their number in answers.
const TIERS: [TierKind; 7] = [
    TierKind::Ram,
    TierKind::Nvme,
    TierKind::Peer,
    TierKind::Redis,
    TierKind::Object,
    TierKind::Lm,
    TierKind::Plugin,
];

/// The code of a write with the default retention, and of one with another.
const WRITE: u32 = 3;
const WRITE_KEPT: u32 = 9;

/// Stands for a write without a time.
const NO_TIME_MS: u64 = u64::MAX;

/// The priorities of writes.
const PRIORITIES: [Priority; 2] = [Priority::Low, Priority::Normal];

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Make a chain of names known, and say how much of it is there. The argument is its number of tokens.
    Open { span: Span, n_tokens: u64 },
    /// Lease what is there of a chain from a chunk on, up to the last one with a digest.
    Retrieve { chain: u32, first_chunk: u32, span: Span },
    /// Take memory for chunks of a chain, up to the last one with a digest, that are kept so long. A retention that is not
    /// the default has a code of its own, with the time as the argument and the priority as the place.
    Write { chain: u32, first_chunk: u32, span: Span, retention: Retention },
    /// Publish a chunk of a write.
    Commit { write: u32, place: u32, checksum: u64 },
    /// Tell the policies of a request. The argument is the number of generated tokens.
    Note { chain: u32, n_generated: u64 },
    /// Give a handle back.
    Release { handle: u32 },
    /// Begin to read a chain from a chunk on, layer by layer.
    ReadLayers { chain: u32, first_chunk: u32, span: Span },
    /// Wait for the next layer, and give the one before it back.
    NextLayer { reader: u32, span: Span },
}

/// Words of the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) first_word: u32,
    pub(crate) n_chunks: u32,
}

/// A request as it is in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Submission {
    pub(crate) request: u64,
    pub(crate) operation: Operation,
}

/// An answer as it is in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) request: u64,
    pub(crate) status: Status,
    pub(crate) n_chunks: u32,
    pub(crate) handle: u32,
    pub(crate) n_tokens: u64,
    /// The slowest tier of what was found.
    pub(crate) tier: TierKind,
    /// Tokens of it that are in memory.
    pub(crate) n_memory_tokens: u64,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    /// As asked.
    Done = 0,
    /// Memory is full.
    NoRoom = 1,
    /// The chunk before is not there.
    NoParent = 2,
    /// Other tokens have the name.
    Collision = 3,
    /// The namespace was cleared meanwhile.
    Cleared = 4,
    /// Another writer stored it meanwhile.
    Present = 5,
    /// The checksum is not that of the bytes.
    Corrupt = 6,
    /// The session holds too much already.
    TooMany = 7,
    /// Another daemon takes over; nothing new is begun here.
    Moving = 8,
}

// === impl Operation ===

impl Operation {
    /// Whether it begins something that a later operation ends.
    pub(crate) fn begins_something(self) -> bool {
        match self {
            Self::Open { .. } | Self::Retrieve { .. } | Self::Write { .. } | Self::ReadLayers { .. } => true,
            Self::Commit { .. } | Self::Note { .. } | Self::Release { .. } | Self::NextLayer { .. } => false,
        }
    }

    /// Whether it waits for no tier and looks up no chain: a commit takes as long as its chunk's checksum.
    pub(crate) fn is_short(self) -> bool {
        matches!(self, Self::Commit { .. } | Self::Note { .. } | Self::Release { .. })
    }
}

// === impl Submission ===

impl Submission {
    pub(crate) fn encode(self) -> Entry {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let span = |span: Span| pair(span.first_word, span.n_chunks);
        let (code, place, handle, payload, argument) = match self.operation {
            Operation::Open { span: names, n_tokens } => (1, 0, 0, span(names), n_tokens),
            Operation::Retrieve { chain, first_chunk, span: digests } => {
                (2, 0, pair(chain, first_chunk), span(digests), 0)
            }
            Operation::Write { chain, first_chunk, span: digests, retention } => {
                let (code, priority, time) = retention_code(retention);
                (code, priority, pair(chain, first_chunk), span(digests), time)
            }
            Operation::Commit { write, place, checksum } => (4, place, pair(write, 0), 0, checksum),
            Operation::Note { chain, n_generated } => (5, 0, pair(chain, 0), 0, n_generated),
            Operation::Release { handle } => (6, 0, pair(handle, 0), 0, 0),
            Operation::ReadLayers { chain, first_chunk, span: digests } => {
                (7, 0, pair(chain, first_chunk), span(digests), 0)
            }
            Operation::NextLayer { reader, span: offsets } => (8, 0, pair(reader, 0), span(offsets), 0),
        };
        [pair(code, place), self.request, handle, payload, argument, 0, 0, 0]
    }

    /// `None` where it is no operation, or where its payload lies outside.
    pub(crate) fn decode(entry: Entry) -> Option<Self> {
        let low = |word: u64| word as u32;
        let high = |word: u64| (word >> 32) as u32;
        let [first, request, handles, payload, argument, ..] = entry;
        let span = |words_a_chunk: usize| {
            let span = Span { first_word: low(payload), n_chunks: high(payload) };
            let n_words = (span.n_chunks as usize).checked_mul(words_a_chunk)?;
            let end = n_words.checked_add(span.first_word as usize)?;
            (end <= PAYLOAD_WORDS).then_some(span)
        };
        let (chain, first_chunk) = (low(handles), high(handles));
        let operation = match low(first) {
            1 => Operation::Open { span: span(NAME_WORDS)?, n_tokens: argument },
            2 => Operation::Retrieve { chain, first_chunk, span: span(DIGEST_WORDS)? },
            code @ (WRITE | WRITE_KEPT) => {
                let retention = retention_of(code, high(first), argument)?;
                Operation::Write { chain, first_chunk, span: span(DIGEST_WORDS)?, retention }
            }
            4 => Operation::Commit { write: chain, place: high(first), checksum: argument },
            5 => Operation::Note { chain, n_generated: argument },
            6 => Operation::Release { handle: chain },
            7 => Operation::ReadLayers { chain, first_chunk, span: span(DIGEST_WORDS)? },
            8 => Operation::NextLayer { reader: chain, span: span(1)? },
            _ => return None,
        };
        Some(Self { request, operation })
    }
}

// === impl Completion ===

impl Completion {
    pub(crate) fn encode(self) -> Entry {
        let first = self.status as u64 | u64::from(self.n_chunks) << 32;
        [
            first,
            self.request,
            self.handle.into(),
            self.n_tokens,
            tier_code(self.tier),
            self.n_memory_tokens,
            0,
            0,
        ]
    }

    /// `None` where it has a status that does not exist.
    pub(crate) fn decode(entry: Entry) -> Option<Self> {
        const STATUSES: [Status; 9] = [
            Status::Done,
            Status::NoRoom,
            Status::NoParent,
            Status::Collision,
            Status::Cleared,
            Status::Present,
            Status::Corrupt,
            Status::TooMany,
            Status::Moving,
        ];
        let [first, request, handle, n_tokens, tier, n_memory_tokens, ..] = entry;
        Some(Self {
            request,
            status: *STATUSES.get(first as u32 as usize)?,
            n_chunks: (first >> 32) as u32,
            handle: u32::try_from(handle).ok()?,
            n_tokens,
            tier: tier_of(tier)?,
            n_memory_tokens,
        })
    }
}

/// The code of a write, the number of its priority and its time in milliseconds. What a daemon that knows no retention
/// must not store has a code that it does not know.
fn retention_code(retention: Retention) -> (u32, u32, u64) {
    if retention == Retention::default() {
        return (WRITE, 0, 0);
    }
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(NO_TIME_MS).min(NO_TIME_MS - 1);
    (WRITE_KEPT, retention.priority as u32, retention.time_to_live.map_or(NO_TIME_MS, ms))
}

/// What [`retention_code`] was given; `None` where it is none.
fn retention_of(code: u32, priority: u32, time_ms: u64) -> Option<Retention> {
    if code == WRITE {
        return Some(Retention::default());
    }
    let priority = PRIORITIES.into_iter().find(|known| *known as u32 == priority)?;
    let time_to_live = (time_ms != NO_TIME_MS).then(|| Duration::from_millis(time_ms));
    Some(Retention { time_to_live, priority })
}

/// Where a chunk that is read lies, and the tier that it came from: the tier is in the bits above [`OFFSET_BITS`].
pub(crate) fn place_word(offset: u64, tier: TierKind) -> u64 {
    offset & OFFSET_MASK | tier_code(tier) << OFFSET_BITS
}

/// What [`place_word`] was given; a tier that does not exist counts as memory, where the chunk is in any case.
pub(crate) fn place_of(word: u64) -> (u64, TierKind) {
    (word & OFFSET_MASK, tier_of(word >> OFFSET_BITS).unwrap_or(TierKind::Ram))
}

/// The number of a tier.
pub(crate) fn tier_code(tier: TierKind) -> u64 {
    TIERS.iter().position(|other| *other == tier).unwrap_or(0) as u64
}

/// The tier of a number.
pub(crate) fn tier_of(code: u64) -> Option<TierKind> {
    usize::try_from(code).ok().and_then(|code| TIERS.get(code)).copied()
}

/// A name as words.
pub(crate) fn name_words(name: BlockHash) -> [u64; NAME_WORDS] {
    words_of(&name.0)
}

/// The name that [`name_words`] gave.
pub(crate) fn name_of(words: [u64; NAME_WORDS]) -> BlockHash {
    let mut name = [0; 16];
    write_words(words, &mut name);
    BlockHash(name)
}

/// A digest as words.
pub(crate) fn digest_words(digest: TokenDigest) -> [u64; DIGEST_WORDS] {
    words_of(&digest.0)
}

/// The digest that [`digest_words`] gave.
pub(crate) fn digest_of(words: [u64; DIGEST_WORDS]) -> TokenDigest {
    let mut digest = [0; 32];
    write_words(words, &mut digest);
    TokenDigest(digest)
}

fn words_of<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    words.iter_mut().zip(bytes.as_chunks().0).for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
    words
}

fn write_words<const N: usize>(words: [u64; N], bytes: &mut [u8]) {
    bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn retentions() -> impl Strategy<Value = Retention> {
        let time = prop::option::of((0..NO_TIME_MS).prop_map(Duration::from_millis));
        (time, prop::sample::select(PRIORITIES.to_vec()))
            .prop_map(|(time_to_live, priority)| Retention { time_to_live, priority })
    }

    fn operations() -> impl Strategy<Value = Operation> {
        let span =
            || (0..1000_u32, 0..100_u32).prop_map(|(first_word, n_chunks)| Span { first_word, n_chunks });
        prop_oneof![
            (span(), any::<u64>()).prop_map(|(span, n_tokens)| Operation::Open { span, n_tokens }),
            (any::<u32>(), any::<u32>(), span()).prop_map(|(chain, first_chunk, span)| Operation::Retrieve {
                chain,
                first_chunk,
                span
            }),
            (any::<u32>(), any::<u32>(), span(), retentions()).prop_map(
                |(chain, first_chunk, span, retention)| {
                    Operation::Write { chain, first_chunk, span, retention }
                }
            ),
            (any::<u32>(), any::<u32>(), any::<u64>())
                .prop_map(|(write, place, checksum)| Operation::Commit { write, place, checksum }),
            (any::<u32>(), any::<u64>())
                .prop_map(|(chain, n_generated)| Operation::Note { chain, n_generated }),
            any::<u32>().prop_map(|handle| Operation::Release { handle }),
            (any::<u32>(), any::<u32>(), span()).prop_map(|(chain, first_chunk, span)| {
                Operation::ReadLayers { chain, first_chunk, span }
            }),
            (any::<u32>(), span()).prop_map(|(reader, span)| Operation::NextLayer { reader, span }),
        ]
    }

    proptest! {
        #[test]
        fn a_submission_is_read_as_it_was_written(request in any::<u64>(), operation in operations()) {
            let submission = Submission { request, operation };
            prop_assert_eq!(Submission::decode(submission.encode()), Some(submission));
        }

        #[test]
        fn any_words_are_a_request_inside_of_the_payload_or_none(entry in any::<Entry>(), code in 0..10_u64) {
            let entry = [code | entry[0] << 32, entry[1], entry[2], entry[3], entry[4], 0, 0, 0];
            let Some(Submission { operation, .. }) = Submission::decode(entry) else { return Ok(()) };
            if let Operation::Open { span, .. } = operation {
                prop_assert!(span.first_word as usize + span.n_chunks as usize * NAME_WORDS <= PAYLOAD_WORDS);
            }
            if let Operation::Retrieve { span, .. }
            | Operation::Write { span, .. }
            | Operation::ReadLayers { span, .. } = operation
            {
                prop_assert!(span.first_word as usize + span.n_chunks as usize * DIGEST_WORDS <= PAYLOAD_WORDS);
            }
            if let Operation::NextLayer { span, .. } = operation {
                prop_assert!(span.first_word as usize + span.n_chunks as usize <= PAYLOAD_WORDS);
            }
            let _ = Completion::decode(entry);
        }

        #[test]
        fn a_completion_and_a_place_are_read_as_they_were_written(
            words in any::<(u64, u32, u32, u64)>(),
            status in 0..9_u64,
            tier in 0..TIERS.len(),
        ) {
            let (request, n_chunks, handle, n_tokens) = words;
            let entry = [status | u64::from(n_chunks) << 32, request, handle.into(), n_tokens, tier as u64, n_tokens, 0, 0];
            let completion = Completion::decode(entry).unwrap();
            prop_assert_eq!((completion.encode(), completion.tier), (entry, TIERS[tier]));
            let offset = n_tokens & OFFSET_MASK;
            prop_assert_eq!(place_of(place_word(offset, TIERS[tier])), (offset, TIERS[tier]));
        }

        #[test]
        fn names_and_digests_are_read_as_they_were_written(hash in any::<[u8; 16]>(), digest in any::<[u8; 32]>()) {
            let (name, digest) = (BlockHash(hash), TokenDigest(digest));
            prop_assert_eq!(name_of(name_words(name)), name);
            prop_assert_eq!(digest_of(digest_words(digest)), digest);
        }
    }
}
