//! What peers say to each other. All numbers are little-endian, and every frame has a fixed length or says it.
//!
//! A client begins with a greeting and both sides prove that they know the token. Then it asks, one request at a time:
//! which of some chunks are there, or for ranges of chunks. A range is answered by a head, its bytes and their checksum.

use kvik_types::BlockHash;

use crate::key::{ChunkKey, NamespaceId, TokenDigest};

/// The first bytes of a greeting, with the version of all that follows.
pub(super) const MAGIC: [u8; 8] = *b"KVIKPR01";

/// Random bytes that a side adds to its greeting, so that a proof is of no use in another connection.
pub(super) const NONCE_BYTES: usize = 32;

/// Bytes of a proof.
pub(super) const PROOF_BYTES: usize = 32;

/// The longest name of a tenant.
pub(super) const MAX_TENANT_BYTES: usize = 256;

/// Bytes of a greeting before the tenant's name: the magic, the client's nonce and the name's length.
pub(super) const GREETING_BYTES: usize = MAGIC.len() + NONCE_BYTES + 2;

/// Bytes at the beginning of a request.
pub(super) const REQUEST_BYTES: usize = 8;

/// Chunks that one request is about, at most: those of a prompt of a million tokens.
pub(super) const MAX_ITEMS: usize = 4096;

/// Bytes of one range, at most: larger than any chunk that is kept.
pub(super) const MAX_RANGE_BYTES: u64 = 1 << 32;

/// Bytes of a chunk's name.
pub(super) const KEY_BYTES: usize = 34;

/// Bytes of a range that is asked for.
pub(super) const WANTED_BYTES: usize = KEY_BYTES + 32 + 3 * 8;

/// Bytes before those of a range.
pub(super) const ANSWER_BYTES: usize = 32;

/// Bytes behind those of a range.
pub(super) const TRAILER_BYTES: usize = 8;

const LOOKUP: u8 = 1;
const READ: u8 = 2;

/// A request, without its items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerRequest {
    /// Which chunks are there; as many names follow.
    Lookup {
        /// Chunks it is about, at most 4096.
        n_items: usize,
    },
    /// Bytes of chunks; as many ranges follow.
    Read {
        /// Ranges it is about, at most 4096.
        n_items: usize,
    },
}

/// A range of a chunk that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedRange {
    /// The chunk.
    pub key: ChunkKey,
    /// The tokens it must be for.
    pub digest: TokenDigest,
    /// The first byte.
    pub offset: u64,
    /// Bytes from there on, at most 4 GiB.
    pub n_bytes: u64,
    /// The length that the whole chunk must have; 0 for any.
    pub chunk_bytes: u64,
}

/// What is said before the bytes of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeAnswer {
    /// What became of it; the bytes and their checksum follow a hit alone.
    pub outcome: RangeOutcome,
    /// Bytes that follow.
    pub n_bytes: u64,
    /// What it is the answer to.
    pub range: RangeFingerprint,
}

/// A short hash of a range that is asked for, by which an answer names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RangeFingerprint(pub [u8; 16]);

/// What became of a range that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeOutcome {
    /// It is not there.
    Miss,
    /// Its bytes follow.
    Hit,
    /// A chunk of other tokens has the name.
    TokenMismatch,
    /// The peer has no memory for it now.
    Busy,
}

// === impl PeerRequest ===

impl PeerRequest {
    /// The bytes before the items.
    pub fn encode(self) -> [u8; REQUEST_BYTES] {
        let (operation, n_items) = match self {
            Self::Lookup { n_items } => (LOOKUP, n_items),
            Self::Read { n_items } => (READ, n_items),
        };
        let mut frame = [0; REQUEST_BYTES];
        frame[0] = operation;
        frame[4..].copy_from_slice(&(n_items as u32).to_le_bytes());
        frame
    }

    /// Reads the bytes before the items; `None` where they are no request.
    pub fn decode(frame: [u8; REQUEST_BYTES]) -> Option<Self> {
        let [operation, 0, 0, 0, count @ ..] = frame else { return None };
        let n_items = u32::from_le_bytes(count) as usize;
        match operation {
            _ if n_items > MAX_ITEMS => None,
            LOOKUP => Some(Self::Lookup { n_items }),
            READ => Some(Self::Read { n_items }),
            _ => None,
        }
    }
}

// === impl WantedRange ===

impl WantedRange {
    /// The bytes of a range.
    pub fn encode(&self) -> [u8; WANTED_BYTES] {
        let mut frame = [0; WANTED_BYTES];
        frame[..KEY_BYTES].copy_from_slice(&encode_key(&self.key));
        frame[KEY_BYTES..][..32].copy_from_slice(&self.digest.0);
        let (numbers, _) = frame[KEY_BYTES + 32..].as_chunks_mut::<8>();
        for (bytes, number) in numbers.iter_mut().zip([self.offset, self.n_bytes, self.chunk_bytes]) {
            *bytes = number.to_le_bytes();
        }
        frame
    }

    /// What the answer is named by.
    pub fn fingerprint(&self) -> RangeFingerprint {
        let hash = blake3::hash(&self.encode());
        RangeFingerprint(std::array::from_fn(|place| hash.as_bytes()[place]))
    }

    /// Reads a range; `None` where it cannot be one.
    pub fn decode(frame: &[u8; WANTED_BYTES]) -> Option<Self> {
        let (key, rest) = frame.split_first_chunk::<KEY_BYTES>()?;
        let (digest, rest) = rest.split_first_chunk::<32>()?;
        let ([offset, n_bytes, chunk_bytes], []) = rest.as_chunks::<8>() else { return None };
        let wanted = Self {
            key: decode_key(key),
            digest: TokenDigest(*digest),
            offset: u64::from_le_bytes(*offset),
            n_bytes: u64::from_le_bytes(*n_bytes),
            chunk_bytes: u64::from_le_bytes(*chunk_bytes),
        };
        let is_bounded = wanted.n_bytes <= MAX_RANGE_BYTES && wanted.chunk_bytes <= MAX_RANGE_BYTES;
        (is_bounded && wanted.offset.checked_add(wanted.n_bytes).is_some()).then_some(wanted)
    }
}

// === impl RangeAnswer ===

impl RangeAnswer {
    /// The bytes of an answer's head.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut frame = [0; ANSWER_BYTES];
        frame[0] = match self.outcome {
            RangeOutcome::Miss => 0,
            RangeOutcome::Hit => 1,
            RangeOutcome::TokenMismatch => 2,
            RangeOutcome::Busy => 3,
        };
        frame[8..16].copy_from_slice(&self.n_bytes.to_le_bytes());
        frame[16..].copy_from_slice(&self.range.0);
        frame
    }

    /// Reads an answer's head; `None` where it cannot be one.
    pub fn decode(frame: &[u8; ANSWER_BYTES]) -> Option<Self> {
        let (head, rest) = frame.split_first_chunk::<8>()?;
        let (n_bytes, range) = rest.split_first_chunk::<8>()?;
        let outcome = match head {
            [0, 0, 0, 0, 0, 0, 0, 0] => RangeOutcome::Miss,
            [1, 0, 0, 0, 0, 0, 0, 0] => RangeOutcome::Hit,
            [2, 0, 0, 0, 0, 0, 0, 0] => RangeOutcome::TokenMismatch,
            [3, 0, 0, 0, 0, 0, 0, 0] => RangeOutcome::Busy,
            _ => return None,
        };
        let n_bytes = u64::from_le_bytes(*n_bytes);
        let is_possible =
            if outcome == RangeOutcome::Hit { n_bytes <= MAX_RANGE_BYTES } else { n_bytes == 0 };
        is_possible.then_some(Self { outcome, n_bytes, range: RangeFingerprint(range.try_into().ok()?) })
    }
}

pub(super) fn encode_key(key: &ChunkKey) -> [u8; KEY_BYTES] {
    let mut bytes = [0; KEY_BYTES];
    bytes[..16].copy_from_slice(&key.namespace.0.0);
    bytes[16..32].copy_from_slice(&key.chunk.0);
    bytes[32..].copy_from_slice(&key.rank.to_le_bytes());
    bytes
}

pub(super) fn decode_key(bytes: &[u8; KEY_BYTES]) -> ChunkKey {
    let hash_at = |start: usize| BlockHash(std::array::from_fn(|place| bytes[start + place]));
    ChunkKey {
        namespace: NamespaceId(hash_at(0)),
        chunk: hash_at(16),
        rank: u16::from_le_bytes([bytes[32], bytes[33]]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> WantedRange {
        let key =
            ChunkKey { namespace: NamespaceId(BlockHash([3; 16])), chunk: BlockHash([4; 16]), rank: 513 };
        WantedRange { key, digest: TokenDigest([5; 32]), offset: 1 << 33, n_bytes: 77, chunk_bytes: 1 << 20 }
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        for request in [PeerRequest::Lookup { n_items: 0 }, PeerRequest::Read { n_items: MAX_ITEMS }] {
            assert_eq!(PeerRequest::decode(request.encode()), Some(request));
        }
        assert_eq!(WantedRange::decode(&wanted().encode()), Some(wanted()));
        for outcome in
            [RangeOutcome::Miss, RangeOutcome::Hit, RangeOutcome::TokenMismatch, RangeOutcome::Busy]
        {
            let n_bytes = if outcome == RangeOutcome::Hit { 1 << 30 } else { 0 };
            let answer = RangeAnswer { outcome, n_bytes, range: RangeFingerprint([9; 16]) };
            assert_eq!(RangeAnswer::decode(&answer.encode()), Some(answer));
        }
    }

    #[test]
    fn lengths_beyond_the_bounds_are_no_frames() {
        assert_eq!(PeerRequest::decode(PeerRequest::Read { n_items: MAX_ITEMS + 1 }.encode()), None);
        for wanted in [
            WantedRange { n_bytes: MAX_RANGE_BYTES + 1, ..wanted() },
            WantedRange { chunk_bytes: MAX_RANGE_BYTES + 1, ..wanted() },
            WantedRange { offset: u64::MAX, ..wanted() },
        ] {
            assert_eq!(WantedRange::decode(&wanted.encode()), None);
        }
        let answer = |outcome, n_bytes| RangeAnswer { outcome, n_bytes, range: RangeFingerprint([9; 16]) };
        assert_eq!(RangeAnswer::decode(&answer(RangeOutcome::Hit, MAX_RANGE_BYTES + 1).encode()), None);
        assert_eq!(RangeAnswer::decode(&answer(RangeOutcome::Miss, 1).encode()), None);
    }
}
