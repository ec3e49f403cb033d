//! What stands before every chunk on a medium that may lose, tear or mix bytes.
//!
//! An envelope says whose chunk follows, of which tokens, how long it is and what its bytes are. It takes one page of a disk,
//! so that the chunk behind it stays aligned for direct I/O. All numbers are little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic, `KVIKCHNK` |
//! | 8 | 2 | format version, 2 |
//! | 10 | 2 | flags, 0 |
//! | 12 | 2 | rank |
//! | 14 | 2 | number of sections |
//! | 16 | 16 | namespace |
//! | 32 | 16 | chunk hash |
//! | 48 | 8 | bytes of a section; the last may be shorter |
//! | 56 | 8 | bytes of the chunk |
//! | 64 | 32 | digest of the namespace and of all tokens up to the chunk's end |
//! | 96 | 8 each | CRC-64/NVME of each section, then zeros |
//! | 4088 | 8 | CRC-64/NVME of all before |
//!
//! A chunk with more sections than there is room for has them checked several at a time: the size of a
//! section in the envelope then is a multiple of the size that was asked for.

use crc_fast::{CrcAlgorithm, Digest, checksum};
use kvik_types::BlockHash;

use crate::key::{ChunkKey, NamespaceId, TokenDigest};
use crate::sections::Sections;

#[cfg(test)]
mod tests;

/// Size of an envelope: what direct I/O asks for on every disk there is.
pub const ENVELOPE_BYTES: usize = 4096;

const MAGIC: [u8; 8] = *b"KVIKCHNK";
const FORMAT_VERSION: u16 = 2;
const SECTION_TABLE: usize = 96;
const OWN_CHECKSUM: usize = ENVELOPE_BYTES - 8;

/// Sections whose checksums fit.
const MAX_SECTIONS: u64 = ((OWN_CHECKSUM - SECTION_TABLE) / 8) as u64;

/// The longest chunk: offsets behind its envelope are those of files, which have a sign.
const MAX_CHUNK_BYTES: u64 = i64::MAX as u64 - ENVELOPE_BYTES as u64;

/// An envelope whose own bytes are proven; those of its chunk are not yet.
#[derive(Debug, Clone, Copy)]
pub struct Envelope<'a> {
    bytes: &'a [u8; ENVELOPE_BYTES],
}

/// Writes the envelope of the chunk that `parts` are one after the other.
///
/// `section_bytes` is the unit in which the chunk will be read; 0 stands for the whole of it.
pub fn seal(
    key: ChunkKey,
    digest: TokenDigest,
    parts: &[&[u8]],
    section_bytes: usize,
    envelope: &mut [u8; ENVELOPE_BYTES],
) {
    let chunk_bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let sections = Sections::at_most(MAX_SECTIONS, chunk_bytes, section_bytes as u64);
    write_fields(key, digest, sections, envelope);
    let mut section_idx = 0;
    for_each_section_checksum(parts, sections.section_bytes, |checksum| {
        write_checksum(envelope, section_idx, checksum);
        section_idx += 1;
    });
    write_own_checksum(envelope);
}

/// Writes the envelope of a chunk whose sections have these checksums; false where it cannot have so many, or has another number.
pub(crate) fn seal_sections(
    key: ChunkKey,
    digest: TokenDigest,
    sections: Sections,
    checksums: &[u64],
    envelope: &mut [u8; ENVELOPE_BYTES],
) -> bool {
    let Sections { chunk_bytes, section_bytes } = sections;
    let is_right = section_bytes > 0
        && sections == Sections::at_most(MAX_SECTIONS, chunk_bytes, section_bytes)
        && sections.n_sections() == checksums.len() as u64;
    if is_right {
        write_fields(key, digest, sections, envelope);
        for (section_idx, checksum) in checksums.iter().enumerate() {
            write_checksum(envelope, section_idx, *checksum);
        }
        write_own_checksum(envelope);
    }
    is_right
}

/// All but the checksums, which are zeros then.
fn write_fields(key: ChunkKey, digest: TokenDigest, sections: Sections, envelope: &mut [u8; ENVELOPE_BYTES]) {
    envelope.fill(0);
    let mut write = |offset: usize, field: &[u8]| envelope[offset..][..field.len()].copy_from_slice(field);
    write(0, &MAGIC);
    write(8, &FORMAT_VERSION.to_le_bytes());
    write(12, &key.rank.to_le_bytes());
    write(14, &(sections.n_sections() as u16).to_le_bytes());
    write(16, &key.namespace.0.0);
    write(32, &key.chunk.0);
    write(48, &sections.section_bytes.to_le_bytes());
    write(56, &sections.chunk_bytes.to_le_bytes());
    write(64, &digest.0);
}

fn write_checksum(envelope: &mut [u8; ENVELOPE_BYTES], section_idx: usize, checksum: u64) {
    envelope[SECTION_TABLE + 8 * section_idx..][..8].copy_from_slice(&checksum.to_le_bytes());
}

fn write_own_checksum(envelope: &mut [u8; ENVELOPE_BYTES]) {
    let own_checksum = checksum_of(&envelope[..OWN_CHECKSUM]);
    envelope[OWN_CHECKSUM..].copy_from_slice(&own_checksum.to_le_bytes());
}

// === impl Envelope ===

impl<'a> Envelope<'a> {
    /// Reads an envelope.
    ///
    /// # Errors
    /// What is wrong with it, in a few words.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, &'static str> {
        let bytes: &[u8; ENVELOPE_BYTES] = bytes.try_into().map_err(|_| "envelope length")?;
        let envelope = Self { bytes };
        if bytes[..8] != MAGIC {
            return Err("envelope magic");
        }
        if envelope.u16_at(8) != FORMAT_VERSION {
            return Err("envelope version");
        }
        if checksum_of(&bytes[..OWN_CHECKSUM]) != envelope.u64_at(OWN_CHECKSUM) {
            return Err("envelope checksum");
        }
        if envelope.u16_at(10) != 0 {
            return Err("envelope flags");
        }
        if envelope.chunk_bytes() > MAX_CHUNK_BYTES {
            return Err("chunk length");
        }
        if envelope.section_bytes() == 0 {
            return Err("section size");
        }
        let n_sections = envelope.chunk_bytes().div_ceil(envelope.section_bytes());
        if n_sections > MAX_SECTIONS || n_sections != u64::from(envelope.n_sections()) {
            return Err("number of sections");
        }
        // All bytes at once: a search for the first one that is set takes longer than the checksum.
        let rest = &bytes[SECTION_TABLE + 8 * n_sections as usize..OWN_CHECKSUM];
        if rest.iter().fold(0, |set_bits, byte| set_bits | byte) != 0 {
            return Err("bytes behind the section checksums");
        }
        Ok(envelope)
    }

    /// Whose chunk follows.
    pub fn key(self) -> ChunkKey {
        ChunkKey {
            namespace: NamespaceId(BlockHash(self.array_at(16))),
            chunk: BlockHash(self.array_at(32)),
            rank: self.u16_at(12),
        }
    }

    /// The tokens that it was stored for.
    pub fn digest(self) -> TokenDigest {
        TokenDigest(self.array_at(64))
    }

    /// Length of the chunk.
    pub fn chunk_bytes(self) -> u64 {
        self.u64_at(56)
    }

    /// Length of its sections but the last, which may be shorter. At least 1.
    pub fn section_bytes(self) -> u64 {
        self.u64_at(48)
    }

    /// Number of its sections.
    pub fn n_sections(self) -> u16 {
        self.u16_at(14)
    }

    /// CRC-64/NVME of each section.
    pub fn section_checksums(self) -> impl Iterator<Item = u64> + 'a {
        (0..usize::from(self.n_sections())).map(move |idx| self.u64_at(SECTION_TABLE + 8 * idx))
    }

    /// The range of whole sections that has all bytes from `offset` to `end`; none if the chunk has not.
    pub fn widen(self, offset: u64, end: u64) -> Option<(u64, u64)> {
        let (chunk_bytes, section_bytes) = (self.chunk_bytes(), self.section_bytes());
        Sections { chunk_bytes, section_bytes }.widen(offset, end)
    }

    /// Whether `sections`, the bytes of whole sections from `offset` on, are what was stored.
    ///
    /// # Errors
    /// What is wrong, in a few words.
    pub fn prove(self, offset: u64, sections: &[u8]) -> Result<(), &'static str> {
        let end = offset.checked_add(sections.len() as u64).ok_or("length")?;
        if self.widen(offset, end) != Some((offset, end)) {
            return Err("length");
        }
        let first_section = (offset / self.section_bytes()) as usize;
        for (section_idx, section) in sections.chunks(self.section_bytes() as usize).enumerate() {
            if checksum_of(section) != self.u64_at(SECTION_TABLE + 8 * (first_section + section_idx)) {
                return Err("section checksum");
            }
        }
        Ok(())
    }

    fn u16_at(self, offset: usize) -> u16 {
        u16::from_le_bytes(self.array_at(offset))
    }

    fn u64_at(self, offset: usize) -> u64 {
        u64::from_le_bytes(self.array_at(offset))
    }

    /// The field at `offset`, which with its length is inside of the envelope.
    fn array_at<const N: usize>(self, offset: usize) -> [u8; N] {
        let mut field = [0; N];
        field.copy_from_slice(&self.bytes[offset..][..N]);
        field
    }
}

/// Calls `take` with the checksum of each section; sections run across the borders of parts.
fn for_each_section_checksum(parts: &[&[u8]], section_bytes: u64, mut take: impl FnMut(u64)) {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut n_missing_bytes = section_bytes as usize;
    for part in parts {
        let mut rest = *part;
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(rest.len().min(n_missing_bytes));
            digest.update(piece);
            rest = behind;
            n_missing_bytes -= piece.len();
            if n_missing_bytes == 0 {
                take(digest.finalize_reset());
                n_missing_bytes = section_bytes as usize;
            }
        }
    }
    if n_missing_bytes < section_bytes as usize {
        take(digest.finalize());
    }
}

fn checksum_of(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}
