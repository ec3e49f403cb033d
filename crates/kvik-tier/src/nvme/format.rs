//! The blocks that describe a segment: its header, the header of each batch, and its footer.
//!
//! ```text
//! 0        header: magic, version, generation, length of the segment, first sequence number, CRC-64
//! 4096     batch header: magic, version, generation, own offset, end of the batch, entries, CRC-64
//!          the chunks of the batch, each from a multiple of 4 KiB on
//! ...      further batches
//! -n       footer: all entries of the segment; its last bytes tell how long it is, CRC-64
//! ```
//!
//! Numbers are little endian, blocks are multiples of 4 KiB, and the last eight bytes of every block are the
//! CRC-64/NVME of all bytes before them, padding included. Every block names the generation of its segment, 64
//! random bits that are drawn anew whenever the file is used again, so a block of an earlier life proves
//! nothing. An entry says that a chunk lies at a place or that a chunk is gone. The sequence numbers of entries
//! order what was said about one key, whichever segment says it: a chunk is there if an entry places it after
//! the last one that says that it is gone.

use crc_fast::{CrcAlgorithm, checksum};
use kvik_types::BlockHash;

use crate::key::{ChunkKey, NamespaceId};

/// The unit of everything in a segment: what a direct transfer is a multiple of.
pub const BLOCK_BYTES: u64 = 4096;

/// The most entries of one batch; its header then is 28 blocks.
pub const MAX_BATCH_ENTRIES: usize = 2048;

const VERSION: u32 = 1;
const HEADER_MAGIC: [u8; 8] = *b"KVIKSEGM";
const BATCH_MAGIC: [u8; 8] = *b"KVIKBTCH";
const FOOTER_MAGIC: [u8; 8] = *b"KVIKFOOT";
const ENTRY_BYTES: usize = 56;
/// Magic, version, number of entries, generation, offset, end.
const BATCH_FIXED_BYTES: usize = 40;
/// Magic, version, number of entries, generation, length of the footer, CRC.
const TRAILER_BYTES: usize = 40;
const CRC_BYTES: usize = 8;
const KIND_CHUNK: u16 = 1;
const KIND_GONE: u16 = 2;

/// Why a block proves nothing; constant words for logs and tests.
pub type Reason = &'static str;

/// The first block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Names this life of the file.
    pub generation: u64,
    /// Length of the segment, a multiple of the block.
    pub segment_bytes: u64,
    /// All sequence numbers that were given before this life began are lower.
    pub first_sequence: u64,
}

/// The blocks before the chunks of one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    /// The life of the file it was written in.
    pub generation: u64,
    /// Where it lies.
    pub offset: u64,
    /// Where the next batch begins.
    pub end: u64,
    /// What it says.
    pub entries: Vec<Entry>,
}

/// The last blocks of a sealed segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// The life of the file it was written in.
    pub generation: u64,
    /// What all batches said.
    pub entries: Vec<Entry>,
}

/// One statement about a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Whom it is about.
    pub key: ChunkKey,
    /// When it was said, in the order of the tier.
    pub sequence: u64,
    /// What it says.
    pub content: Content,
}

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The chunk lies in this segment.
    Chunk {
        /// Its first byte, a multiple of the block.
        offset: u64,
        /// Its length without padding.
        n_bytes: u64,
    },
    /// The chunk was deleted: what earlier entries say of the key no longer holds.
    Gone,
}

/// Rounds up to whole blocks; more than fits a `u64` becomes the last whole block that does.
pub const fn padded(n_bytes: u64) -> u64 {
    match n_bytes.checked_next_multiple_of(BLOCK_BYTES) {
        Some(padded_bytes) => padded_bytes,
        None => u64::MAX / BLOCK_BYTES * BLOCK_BYTES,
    }
}

/// Length of the header of a batch with so many entries.
pub fn batch_header_bytes(n_entries: usize) -> u64 {
    padded((BATCH_FIXED_BYTES + n_entries * ENTRY_BYTES + CRC_BYTES) as u64)
}

/// Length of the footer of a segment with so many entries.
pub fn footer_bytes(n_entries: usize) -> u64 {
    padded((n_entries * ENTRY_BYTES + TRAILER_BYTES) as u64)
}

impl Entry {
    /// Whether it places a chunk.
    pub fn is_chunk(&self) -> bool {
        matches!(self.content, Content::Chunk { .. })
    }

    /// First byte of the chunk; 0 if it is gone.
    pub fn offset(&self) -> u64 {
        match self.content {
            Content::Chunk { offset, .. } => offset,
            Content::Gone => 0,
        }
    }

    /// Length of the chunk; 0 if it is gone.
    pub fn n_bytes(&self) -> u64 {
        match self.content {
            Content::Chunk { n_bytes, .. } => n_bytes,
            Content::Gone => 0,
        }
    }

    fn encode(&self, bytes: &mut [u8]) {
        let (kind, offset, n_bytes) = match self.content {
            Content::Chunk { offset, n_bytes } => (KIND_CHUNK, offset, n_bytes),
            Content::Gone => (KIND_GONE, 0, 0),
        };
        let mut writer = Writer { bytes, at: 0 };
        writer.put(&self.key.namespace.0.0);
        writer.put(&self.key.chunk.0);
        writer.put(&self.sequence.to_le_bytes());
        writer.put(&n_bytes.to_le_bytes());
        writer.put(&((offset / BLOCK_BYTES) as u32).to_le_bytes());
        writer.put(&self.key.rank.to_le_bytes());
        writer.put(&kind.to_le_bytes());
    }

    /// Reads an entry whose chunk lies inside of `first..end`.
    fn decode(bytes: &[u8], first: u64, end: u64) -> Result<Self, Reason> {
        let mut reader = Reader { bytes };
        let namespace = NamespaceId(BlockHash(reader.take()?));
        let chunk = BlockHash(reader.take()?);
        let sequence = reader.u64()?;
        let n_bytes = reader.u64()?;
        let offset = u64::from(u32::from_le_bytes(reader.take()?)) * BLOCK_BYTES;
        let rank = u16::from_le_bytes(reader.take()?);
        let content = match u16::from_le_bytes(reader.take()?) {
            KIND_CHUNK if offset < first => return Err("a chunk lies before its batch"),
            KIND_CHUNK if offset > end || padded(n_bytes) > end - offset => {
                return Err("a chunk lies behind its batch");
            }
            KIND_CHUNK => Content::Chunk { offset, n_bytes },
            KIND_GONE if offset != 0 || n_bytes != 0 => return Err("a deleted chunk has a place"),
            KIND_GONE => Content::Gone,
            _ => return Err("entry kind"),
        };
        Ok(Self { key: ChunkKey { namespace, chunk, rank }, sequence, content })
    }
}

impl SegmentHeader {
    /// The block.
    pub fn encode(&self) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES as usize];
        let mut writer = Writer { bytes: &mut block, at: 0 };
        writer.put(&HEADER_MAGIC);
        writer.put(&VERSION.to_le_bytes());
        writer.put(&[0; 4]);
        writer.put(&self.generation.to_le_bytes());
        writer.put(&self.segment_bytes.to_le_bytes());
        writer.put(&self.first_sequence.to_le_bytes());
        seal(&mut block);
        block
    }

    /// Reads the first block of a file.
    ///
    /// # Errors
    /// What does not hold.
    pub fn decode(block: &[u8]) -> Result<Self, Reason> {
        let mut reader = Reader { bytes: opened(block)? };
        reader.expect_start(HEADER_MAGIC)?;
        if reader.take()? != [0; 4] {
            return Err("reserved bytes");
        }
        let header =
            Self { generation: reader.u64()?, segment_bytes: reader.u64()?, first_sequence: reader.u64()? };
        if !header.segment_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err("segment length");
        }
        reader.expect_padding()?;
        Ok(header)
    }
}

impl BatchHeader {
    /// The blocks.
    pub fn encode(&self) -> Vec<u8> {
        let mut blocks = vec![0; batch_header_bytes(self.entries.len()) as usize];
        let mut writer = Writer { bytes: &mut blocks, at: 0 };
        writer.put(&BATCH_MAGIC);
        writer.put(&VERSION.to_le_bytes());
        writer.put(&(self.entries.len() as u32).to_le_bytes());
        writer.put(&self.generation.to_le_bytes());
        writer.put(&self.offset.to_le_bytes());
        writer.put(&self.end.to_le_bytes());
        writer.put_entries(&self.entries);
        seal(&mut blocks);
        blocks
    }

    /// Length of the header that begins with `block`, if it looks like one of this life and place.
    ///
    /// # Errors
    /// What does not hold.
    pub fn peek_bytes(block: &[u8], generation: u64, offset: u64) -> Result<u64, Reason> {
        let mut reader = Reader { bytes: block };
        reader.expect_start(BATCH_MAGIC)?;
        let n_entries = u32::from_le_bytes(reader.take()?) as usize;
        if n_entries > MAX_BATCH_ENTRIES {
            return Err("number of entries");
        }
        if reader.u64()? != generation {
            return Err("generation");
        }
        if reader.u64()? != offset {
            return Err("offset");
        }
        Ok(batch_header_bytes(n_entries))
    }

    /// Reads the header at `offset` of a segment of so many bytes.
    ///
    /// # Errors
    /// What does not hold.
    pub fn decode(blocks: &[u8], generation: u64, offset: u64, segment_bytes: u64) -> Result<Self, Reason> {
        let n_bytes = Self::peek_bytes(blocks, generation, offset)?;
        if blocks.len() as u64 != n_bytes {
            return Err("header length");
        }
        let mut reader = Reader { bytes: opened(blocks)? };
        reader.expect_start(BATCH_MAGIC)?;
        let n_entries = u32::from_le_bytes(reader.take()?) as usize;
        let (_generation, _offset) = (reader.u64()?, reader.u64()?);
        let end = reader.u64()?;
        let first = offset.checked_add(n_bytes).ok_or("offset")?;
        if end < first || end > segment_bytes || !end.is_multiple_of(BLOCK_BYTES) {
            return Err("end of the batch");
        }
        let entries = reader.entries(n_entries, first, end)?;
        reader.expect_padding()?;
        Ok(Self { generation, offset, end, entries })
    }
}

impl Footer {
    /// The blocks, of which the last is the last of the segment.
    pub fn encode(&self) -> Vec<u8> {
        let n_bytes = footer_bytes(self.entries.len());
        let mut blocks = vec![0; n_bytes as usize];
        let mut writer = Writer { bytes: &mut blocks, at: 0 };
        writer.put_entries(&self.entries);
        writer.at = n_bytes as usize - TRAILER_BYTES;
        writer.put(&FOOTER_MAGIC);
        writer.put(&VERSION.to_le_bytes());
        writer.put(&(self.entries.len() as u32).to_le_bytes());
        writer.put(&self.generation.to_le_bytes());
        writer.put(&n_bytes.to_le_bytes());
        seal(&mut blocks);
        blocks
    }

    /// Length of the footer that ends with `last_block`, if it looks like one of this life.
    ///
    /// # Errors
    /// What does not hold.
    pub fn peek_bytes(last_block: &[u8], generation: u64, segment_bytes: u64) -> Result<u64, Reason> {
        let start = last_block.len().checked_sub(TRAILER_BYTES).ok_or("too short")?;
        let mut reader = Reader { bytes: &last_block[start..] };
        reader.expect_start(FOOTER_MAGIC)?;
        let n_entries = u32::from_le_bytes(reader.take()?) as usize;
        if reader.u64()? != generation {
            return Err("generation");
        }
        let n_bytes = reader.u64()?;
        if n_bytes != footer_bytes(n_entries) || n_bytes > segment_bytes.saturating_sub(BLOCK_BYTES) {
            return Err("footer length");
        }
        Ok(n_bytes)
    }

    /// Reads the footer of a segment of so many bytes.
    ///
    /// # Errors
    /// What does not hold.
    pub fn decode(blocks: &[u8], generation: u64, segment_bytes: u64) -> Result<Self, Reason> {
        let n_bytes = Self::peek_bytes(blocks, generation, segment_bytes)?;
        if blocks.len() as u64 != n_bytes {
            return Err("footer length");
        }
        let inside = opened(blocks)?;
        let (entry_bytes, trailer) = inside.split_at(inside.len() + CRC_BYTES - TRAILER_BYTES);
        let mut trailer = Reader { bytes: trailer };
        trailer.expect_start(FOOTER_MAGIC)?;
        let n_entries = u32::from_le_bytes(trailer.take()?) as usize;
        let mut reader = Reader { bytes: entry_bytes };
        let entries = reader.entries(n_entries, BLOCK_BYTES, segment_bytes - n_bytes)?;
        reader.expect_padding()?;
        Ok(Self { generation, entries })
    }
}

/// Writes the CRC into the last bytes.
fn seal(block: &mut [u8]) {
    let crc_at = block.len() - CRC_BYTES;
    let crc = checksum(CrcAlgorithm::Crc64Nvme, &block[..crc_at]);
    block[crc_at..].copy_from_slice(&crc.to_le_bytes());
}

/// What stands before the CRC, if the CRC holds.
fn opened(block: &[u8]) -> Result<&[u8], Reason> {
    let (inside, crc) = block.split_last_chunk::<CRC_BYTES>().ok_or("too short")?;
    if checksum(CrcAlgorithm::Crc64Nvme, inside) == u64::from_le_bytes(*crc) {
        Ok(inside)
    } else {
        Err("checksum")
    }
}

struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, value: &[u8]) {
        self.bytes[self.at..self.at + value.len()].copy_from_slice(value);
        self.at += value.len();
    }

    fn put_entries(&mut self, entries: &[Entry]) {
        for entry in entries {
            entry.encode(&mut self.bytes[self.at..self.at + ENTRY_BYTES]);
            self.at += ENTRY_BYTES;
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Reason> {
        let (value, rest) = self.bytes.split_first_chunk::<N>().ok_or("too short")?;
        self.bytes = rest;
        Ok(*value)
    }

    fn u64(&mut self) -> Result<u64, Reason> {
        self.take().map(u64::from_le_bytes)
    }

    fn expect_start(&mut self, magic: [u8; 8]) -> Result<(), Reason> {
        if self.take()? != magic {
            return Err("magic");
        }
        if u32::from_le_bytes(self.take()?) != VERSION {
            return Err("version");
        }
        Ok(())
    }

    fn entries(&mut self, n_entries: usize, first: u64, end: u64) -> Result<Vec<Entry>, Reason> {
        let n_bytes = n_entries.checked_mul(ENTRY_BYTES).ok_or("number of entries")?;
        let (entries, rest) = self.bytes.split_at_checked(n_bytes).ok_or("too short")?;
        self.bytes = rest;
        entries.chunks_exact(ENTRY_BYTES).map(|bytes| Entry::decode(bytes, first, end)).collect()
    }

    fn expect_padding(&self) -> Result<(), Reason> {
        if self.bytes.iter().all(|byte| *byte == 0) { Ok(()) } else { Err("padding") }
    }
}
