//! What the entries of the rings say.
//!
//! | word | submission | completion |
//! |---|---|---|
//! | 0 | operation, and above 32 bits the place of a chunk | status, and above 32 bits a count of chunks |
//! | 1 | number of the request | the same |
//! | 2 | handle, and above 32 bits the first chunk | handle |
//! | 3 | first word of the payload, and above 32 bits a count of chunks | tokens |
//! | 4 | an argument | 0 |
//!
//! The payload of an `open` is the names of the chunks, [`NAME_WORDS`] each; that of a `retrieve` or `write` is room for
//! one offset a chunk, which the daemon fills.

use kvik_tier::TokenDigest;
use kvik_types::BlockHash;

use crate::ring::{Entry, PAYLOAD_WORDS};

/// Words of a chunk's name and digest.
pub(crate) const NAME_WORDS: usize = 6;

/// Chunks that one request may be about: all that fit into the payload.
pub(crate) const MAX_CHAIN_CHUNKS: usize = PAYLOAD_WORDS / NAME_WORDS;

/// The offset of a chunk that is stored already.
pub(crate) const PRESENT: u64 = u64::MAX;

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Make a chain of names known, and say how much of it is there. The argument is its number of tokens.
    Open { span: Span, n_tokens: u64 },
    /// Lease what is there of a chain from a chunk on.
    Retrieve { chain: u32, first_chunk: u32, span: Span },
    /// Take memory for chunks of a chain.
    Write { chain: u32, first_chunk: u32, span: Span },
    /// Publish a chunk of a write.
    Commit { write: u32, place: u32, checksum: u64 },
    /// Tell the policies of a request. The argument is the number of generated tokens.
    Note { chain: u32, n_generated: u64 },
    /// Give a handle back.
    Release { handle: u32 },
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
}

// === impl Submission ===

impl Submission {
    pub(crate) fn encode(self) -> Entry {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let span = |span: Span| pair(span.first_word, span.n_chunks);
        let (code, place, handle, payload, argument) = match self.operation {
            Operation::Open { span: names, n_tokens } => (1, 0, 0, span(names), n_tokens),
            Operation::Retrieve { chain, first_chunk, span: offsets } => {
                (2, 0, pair(chain, first_chunk), span(offsets), 0)
            }
            Operation::Write { chain, first_chunk, span: offsets } => {
                (3, 0, pair(chain, first_chunk), span(offsets), 0)
            }
            Operation::Commit { write, place, checksum } => (4, place, pair(write, 0), 0, checksum),
            Operation::Note { chain, n_generated } => (5, 0, pair(chain, 0), 0, n_generated),
            Operation::Release { handle } => (6, 0, pair(handle, 0), 0, 0),
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
            2 => Operation::Retrieve { chain, first_chunk, span: span(1)? },
            3 => Operation::Write { chain, first_chunk, span: span(1)? },
            4 => Operation::Commit { write: chain, place: high(first), checksum: argument },
            5 => Operation::Note { chain, n_generated: argument },
            6 => Operation::Release { handle: chain },
            _ => return None,
        };
        Some(Self { request, operation })
    }
}

// === impl Completion ===

impl Completion {
    pub(crate) fn encode(self) -> Entry {
        let first = self.status as u64 | u64::from(self.n_chunks) << 32;
        [first, self.request, self.handle.into(), self.n_tokens, 0, 0, 0, 0]
    }

    /// `None` where it has a status that does not exist.
    pub(crate) fn decode(entry: Entry) -> Option<Self> {
        const STATUSES: [Status; 8] = [
            Status::Done,
            Status::NoRoom,
            Status::NoParent,
            Status::Collision,
            Status::Cleared,
            Status::Present,
            Status::Corrupt,
            Status::TooMany,
        ];
        let [first, request, handle, n_tokens, ..] = entry;
        Some(Self {
            request,
            status: *STATUSES.get(first as u32 as usize)?,
            n_chunks: (first >> 32) as u32,
            handle: u32::try_from(handle).ok()?,
            n_tokens,
        })
    }
}

/// A name and digest as words.
pub(crate) fn name_words((hash, digest): (BlockHash, TokenDigest)) -> [u64; NAME_WORDS] {
    let bytes = hash.0.as_chunks::<8>().0.iter().chain(digest.0.as_chunks::<8>().0);
    let mut words = [0; NAME_WORDS];
    words.iter_mut().zip(bytes).for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
    words
}

/// The name and digest that [`name_words`] gave.
pub(crate) fn name_of(words: [u64; NAME_WORDS]) -> (BlockHash, TokenDigest) {
    let (mut hash, mut digest) = ([0; 16], [0; 32]);
    let bytes = hash.as_chunks_mut::<8>().0.iter_mut().chain(digest.as_chunks_mut::<8>().0);
    bytes.zip(words).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
    (BlockHash(hash), TokenDigest(digest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
            (any::<u32>(), any::<u32>(), span()).prop_map(|(chain, first_chunk, span)| Operation::Write {
                chain,
                first_chunk,
                span
            }),
            (any::<u32>(), any::<u32>(), any::<u64>())
                .prop_map(|(write, place, checksum)| Operation::Commit { write, place, checksum }),
            (any::<u32>(), any::<u64>())
                .prop_map(|(chain, n_generated)| Operation::Note { chain, n_generated }),
            any::<u32>().prop_map(|handle| Operation::Release { handle }),
        ]
    }

    proptest! {
        #[test]
        fn a_submission_is_read_as_it_was_written(request in any::<u64>(), operation in operations()) {
            let submission = Submission { request, operation };
            prop_assert_eq!(Submission::decode(submission.encode()), Some(submission));
        }

        #[test]
        fn any_words_are_a_request_inside_of_the_payload_or_none(entry in any::<Entry>(), code in 0..8_u64) {
            let entry = [code | entry[0] << 32, entry[1], entry[2], entry[3], entry[4], 0, 0, 0];
            let Some(Submission { operation, .. }) = Submission::decode(entry) else { return Ok(()) };
            if let Operation::Open { span, .. } = operation {
                prop_assert!(span.first_word as usize + span.n_chunks as usize * NAME_WORDS <= PAYLOAD_WORDS);
            }
            if let Operation::Retrieve { span, .. } | Operation::Write { span, .. } = operation {
                prop_assert!(span.first_word as usize + span.n_chunks as usize <= PAYLOAD_WORDS);
            }
            let _ = Completion::decode(entry);
        }

        #[test]
        fn a_name_is_read_as_it_was_written(hash in any::<[u8; 16]>(), digest in any::<[u8; 32]>()) {
            let name = (BlockHash(hash), TokenDigest(digest));
            prop_assert_eq!(name_of(name_words(name)), name);
        }
    }
}
