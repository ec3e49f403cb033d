//! What stands before a sealed chunk.
//!
//! A head takes one page of a disk, so that the chunk behind it stays aligned for direct I/O, and the chunk keeps its
//! length: the tags of its sections are in the head, and a range of the chunk is the same range of what is stored. All
//! numbers are little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic, `KVIKSEAL` |
//! | 8 | 2 | format version, 1 |
//! | 10 | 2 | rank |
//! | 12 | 2 | number of sections |
//! | 14 | 2 | flags, 0 |
//! | 16 | 16 | namespace |
//! | 32 | 16 | chunk hash |
//! | 48 | 8 | bytes of a section; the last may be shorter |
//! | 56 | 8 | bytes of the chunk |
//! | 64 | 16 | name of the key |
//! | 80 | 32 | salt |
//! | 112 | 16 each | tag of each section, then zeros |
//! | 4048 | 32 | digest of the tokens, encrypted |
//! | 4080 | 16 | tag of the head |
//!
//! Everything is AES-256-GCM with a key of the chunk's own: HKDF-SHA256 (expand) of the tenant's key and the salt, which
//! is random and new at every put. So a nonce needs no randomness: it is the index of the section, and all ones for the
//! head. A section is authenticated together with the first 64 bytes of the head, the digest and its index. The head's
//! tag covers all of the head: a chunk whose head holds was sealed by a holder of the key, as a whole and at once.

use kvik_types::BlockHash;
use ring::aead::{Aad, LessSafeKey, NONCE_LEN, Nonce, Tag};
use ring::error::Unspecified;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::keys::{KeyId, SALT_BYTES, SealingKey};
use crate::key::{ChunkKey, NamespaceId, TokenDigest};
use crate::sections::Sections;

/// Size of a head: what direct I/O asks for on every disk there is.
pub const SEALED_HEAD_BYTES: usize = 4096;

const MAGIC: [u8; 8] = *b"KVIKSEAL";
const FORMAT_VERSION: u16 = 1;
const KEY_ID: usize = 64;
const SALT: usize = 80;
const TAG_TABLE: usize = SALT + SALT_BYTES;
const TAG_BYTES: usize = 16;
const DIGEST: usize = OWN_TAG - 32;
const OWN_TAG: usize = SEALED_HEAD_BYTES - TAG_BYTES;

/// What of the head is authenticated with every section: whose chunk it is, and its lengths.
const BOUND_BYTES: usize = KEY_ID;

/// Sections whose tags fit.
const MAX_SECTIONS: u64 = ((DIGEST - TAG_TABLE) / TAG_BYTES) as u64;

/// The longest chunk: offsets behind its head are those of files, which have a sign.
const MAX_CHUNK_BYTES: u64 = i64::MAX as u64 - SEALED_HEAD_BYTES as u64;

/// The nonce of the head, which no section has: there are fewer.
const HEAD_NONCE: u32 = u32::MAX;

/// A head that could be one; nothing of it is proven.
#[derive(Debug, Clone, Copy)]
pub struct SealedHead<'a> {
    bytes: &'a [u8; SEALED_HEAD_BYTES],
}

/// A head that a holder of the key has made, with what is needed to open sections.
#[derive(Debug)]
pub struct OpenedHead<'a> {
    head: SealedHead<'a>,
    chunk_key: LessSafeKey,
    digest: TokenDigest,
}

/// Seals the chunk that `parts` are one after the other: head and chunk fill `sealed`.
///
/// `section_bytes` is the unit in which the chunk will be read; 0 stands for the whole of it. No two calls use one
/// pair of key and nonce, also for the same chunk.
///
/// # Errors
/// In a few words, if there is no randomness, `sealed` has another length, or a section is longer than GCM allows
/// (64 GiB).
pub fn seal_chunk(
    sealing: &SealingKey,
    key: ChunkKey,
    digest: TokenDigest,
    parts: &[&[u8]],
    section_bytes: usize,
    sealed: &mut [u8],
) -> Result<(), &'static str> {
    let chunk_bytes: usize = parts.iter().map(|part| part.len()).sum();
    let (head, chunk) = sealed.split_first_chunk_mut::<SEALED_HEAD_BYTES>().ok_or("length")?;
    if chunk.len() != chunk_bytes {
        return Err("length");
    }
    let sections = Sections::at_most(MAX_SECTIONS, chunk_bytes as u64, section_bytes as u64);
    let mut salt = [0; SALT_BYTES];
    SystemRandom::new().fill(&mut salt).map_err(|Unspecified| "no randomness")?;
    let chunk_key = sealing.chunk_key(&salt).map_err(|Unspecified| "key")?;
    head.fill(0);
    let mut write = |offset: usize, field: &[u8]| head[offset..][..field.len()].copy_from_slice(field);
    write(0, &MAGIC);
    write(8, &FORMAT_VERSION.to_le_bytes());
    write(10, &key.rank.to_le_bytes());
    write(12, &(sections.n_sections() as u16).to_le_bytes());
    write(16, &key.namespace.0.0);
    write(32, &key.chunk.0);
    write(48, &sections.section_bytes.to_le_bytes());
    write(56, &sections.chunk_bytes.to_le_bytes());
    write(KEY_ID, &sealing.id().0);
    write(SALT, &salt);
    let mut unread = Parts { parts, rest: &[] };
    for (section, section_idx) in chunk.chunks_mut(sections.section_bytes as usize).zip(0_u32..) {
        // Copied section by section: the cipher then finds the bytes in the processor's cache.
        unread.fill(section);
        let bound = bound_to(head, digest, section_idx);
        let tag = chunk_key.seal_in_place_separate_tag(nonce(section_idx), Aad::from(bound), section);
        let tag = tag.map_err(|Unspecified| "section length")?;
        head[TAG_TABLE + TAG_BYTES * section_idx as usize..][..TAG_BYTES].copy_from_slice(tag.as_ref());
    }
    let (covered, secret) = head.split_at_mut(DIGEST);
    let (own_digest, own_tag) = secret.split_at_mut(OWN_TAG - DIGEST);
    own_digest.copy_from_slice(&digest.0);
    let tag = chunk_key.seal_in_place_separate_tag(nonce(HEAD_NONCE), Aad::from(&*covered), own_digest);
    own_tag.copy_from_slice(tag.map_err(|Unspecified| "head")?.as_ref());
    Ok(())
}

// === impl SealedHead ===

impl<'a> SealedHead<'a> {
    /// Reads a head.
    ///
    /// # Errors
    /// What is wrong with it, in a few words.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; SEALED_HEAD_BYTES] = bytes.try_into().map_err(|_| "sealed head length")?;
        let head = Self { bytes };
        if bytes[..8] != MAGIC {
            return Err("sealed head magic");
        }
        if head.u16_at(8) != FORMAT_VERSION {
            return Err("sealed head version");
        }
        if head.u16_at(14) != 0 {
            return Err("sealed head flags");
        }
        let sections = head.sections();
        if sections.chunk_bytes > MAX_CHUNK_BYTES {
            return Err("chunk length");
        }
        if sections.section_bytes == 0 {
            return Err("section size");
        }
        let n_sections = sections.n_sections();
        if n_sections > MAX_SECTIONS || n_sections != u64::from(head.u16_at(12)) {
            return Err("number of sections");
        }
        Ok(head)
    }

    /// The key that it says it was sealed with.
    pub fn key_id(self) -> KeyId {
        KeyId(self.array_at(KEY_ID))
    }

    /// Proves the head with the key that it names.
    ///
    /// # Errors
    /// What is wrong, in a few words.
    pub fn open(self, sealing: &SealingKey) -> Result<OpenedHead<'a>, &'static str> {
        let chunk_key = sealing.chunk_key(&self.array_at(SALT)).map_err(|Unspecified| "key")?;
        let mut digest: [u8; 32] = self.array_at(DIGEST);
        let tag = Tag::from(self.array_at(OWN_TAG));
        let covered = Aad::from(&self.bytes[..DIGEST]);
        let opened = chunk_key.open_in_place_separate_tag(nonce(HEAD_NONCE), covered, tag, &mut digest, 0..);
        opened.map_err(|Unspecified| "sealed head tag")?;
        Ok(OpenedHead { head: self, chunk_key, digest: TokenDigest(digest) })
    }

    fn sections(self) -> Sections {
        Sections { chunk_bytes: self.u64_at(56), section_bytes: self.u64_at(48) }
    }

    fn u16_at(self, offset: usize) -> u16 {
        u16::from_le_bytes(self.array_at(offset))
    }

    fn u64_at(self, offset: usize) -> u64 {
        u64::from_le_bytes(self.array_at(offset))
    }

    /// The field at `offset`, which with its length is inside of the head.
    fn array_at<const N: usize>(self, offset: usize) -> [u8; N] {
        let mut field = [0; N];
        field.copy_from_slice(&self.bytes[offset..][..N]);
        field
    }
}

// === impl OpenedHead ===

impl OpenedHead<'_> {
    /// Whose chunk follows.
    pub fn key(&self) -> ChunkKey {
        ChunkKey {
            namespace: NamespaceId(BlockHash(self.head.array_at(16))),
            chunk: BlockHash(self.head.array_at(32)),
            rank: self.head.u16_at(10),
        }
    }

    /// The tokens that it was stored for.
    pub fn digest(&self) -> TokenDigest {
        self.digest
    }

    /// Length of the chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.head.sections().chunk_bytes
    }

    /// The range of whole sections that has all bytes from `offset` to `end`; none if the chunk has not.
    pub fn widen(&self, offset: u64, end: u64) -> Option<(u64, u64)> {
        self.head.sections().widen(offset, end)
    }

    /// Opens whole sections, which begin at `offset` of the chunk, where they lie.
    ///
    /// # Errors
    /// What is wrong, in a few words; the bytes are undefined then.
    pub fn open_sections(&self, offset: u64, sections: &mut [u8]) -> Result<(), &'static str> {
        let end = offset.checked_add(sections.len() as u64).ok_or("length")?;
        if self.widen(offset, end) != Some((offset, end)) {
            return Err("length");
        }
        let section_bytes = self.head.sections().section_bytes;
        let first_section = (offset / section_bytes) as u32;
        for (section, section_idx) in sections.chunks_mut(section_bytes as usize).zip(first_section..) {
            let bound = bound_to(self.head.bytes, self.digest, section_idx);
            let tag = Tag::from(self.head.array_at(TAG_TABLE + TAG_BYTES * section_idx as usize));
            let (nonce, bound) = (nonce(section_idx), Aad::from(bound));
            let opened = self.chunk_key.open_in_place_separate_tag(nonce, bound, tag, section, 0..);
            opened.map_err(|Unspecified| "section tag")?;
        }
        Ok(())
    }
}

/// Bytes of a chunk that are read one after the other.
struct Parts<'a> {
    parts: &'a [&'a [u8]],
    rest: &'a [u8],
}

impl Parts<'_> {
    /// Copies the next bytes, as many as there are at most.
    fn fill(&mut self, mut into: &mut [u8]) {
        while !into.is_empty() {
            if self.rest.is_empty() {
                let Some((next, behind)) = self.parts.split_first() else { return };
                (self.rest, self.parts) = (next, behind);
                continue;
            }
            let n_bytes = into.len().min(self.rest.len());
            let (copied, rest) = self.rest.split_at(n_bytes);
            into[..n_bytes].copy_from_slice(copied);
            (into, self.rest) = (&mut into[n_bytes..], rest);
        }
    }
}

/// What a section is authenticated with.
fn bound_to(
    head: &[u8; SEALED_HEAD_BYTES],
    digest: TokenDigest,
    section_idx: u32,
) -> [u8; BOUND_BYTES + 32 + 4] {
    let mut bound = [0; BOUND_BYTES + 32 + 4];
    bound[..BOUND_BYTES].copy_from_slice(&head[..BOUND_BYTES]);
    bound[BOUND_BYTES..][..32].copy_from_slice(&digest.0);
    bound[BOUND_BYTES + 32..].copy_from_slice(&section_idx.to_le_bytes());
    bound
}

fn nonce(number: u32) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..4].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}
