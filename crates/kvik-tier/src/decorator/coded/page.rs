//! The page before a coded chunk.
//!
//! Of a coded one it is the head of the codec (`KVKC`, see `kvik_codec::CodedHead`) and then a CRC-64 of each coded layer; of one
//! that is kept as it is, `KVKU`, the version, three zeros, the length of the chunk (u64) and a CRC-64 of each of its pieces, which
//! are of equal length but for the last. All numbers are little endian, and zeros fill the page.
//!
//! The checksums bind what follows a page to it: the two are read one after the other, and in between the chunk may have been
//! deleted and put again in another form.

use crc_fast::{CrcAlgorithm, checksum};
use kvik_codec::{CodedHead, coded_head_bytes};

/// Length of a page.
pub(super) const PAGE_BYTES: usize = 4096;

/// Layers that a page has room for.
pub(super) const MAX_LAYERS: usize = (PAGE_BYTES - coded_head_bytes(0)) / (4 + 8);

const AS_IT_IS: [u8; 8] = *b"KVKU\x02\0\0\0";

/// Pieces that a page has room for.
const MAX_PIECES: u64 = ((PAGE_BYTES - AS_IT_IS.len() - 8) / 8) as u64;

/// What a page says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Page {
    /// The chunk follows; its pieces have these checksums.
    AsItIs { chunk_bytes: u64, checksums: Vec<u64> },
    /// Coded layers follow.
    Coded { head: CodedHead, checksums: Vec<u64> },
}

impl Page {
    /// The page of a coded chunk with its head, and the length of that; none if it has no room for all layers.
    pub(super) fn of_coded(coded: &[u8]) -> Option<(Self, usize)> {
        let head = CodedHead::decode(coded).ok()?;
        if head.shape.n_layers > MAX_LAYERS {
            return None;
        }
        let head_bytes = head.head_bytes();
        let mut rest = coded.get(head_bytes..)?;
        let mut checksums = Vec::with_capacity(head.layer_bytes.len());
        for n_bytes in &head.layer_bytes {
            let (layer, behind) = rest.split_at_checked(*n_bytes as usize)?;
            checksums.push(checksum_of(layer));
            rest = behind;
        }
        Some((Self::Coded { head, checksums }, head_bytes))
    }

    /// The page of a chunk that is kept as it is.
    pub(super) fn as_it_is(raw: &[u8]) -> Self {
        let chunk_bytes = raw.len() as u64;
        let pieces = raw.chunks(piece_bytes(chunk_bytes) as usize);
        Self::AsItIs { chunk_bytes, checksums: pieces.map(checksum_of).collect() }
    }

    /// Its bytes.
    pub(super) fn to_bytes(&self) -> [u8; PAGE_BYTES] {
        let mut bytes = Vec::with_capacity(PAGE_BYTES);
        match self {
            Self::AsItIs { chunk_bytes, .. } => {
                bytes.extend(AS_IT_IS);
                bytes.extend(chunk_bytes.to_le_bytes());
            }
            Self::Coded { head, .. } => head.write(&mut bytes),
        }
        let (Self::AsItIs { checksums, .. } | Self::Coded { checksums, .. }) = self;
        bytes.extend(checksums.iter().flat_map(|checksum| checksum.to_le_bytes()));
        let mut page = [0; PAGE_BYTES];
        let n_bytes = bytes.len().min(PAGE_BYTES);
        page[..n_bytes].copy_from_slice(&bytes[..n_bytes]);
        page
    }

    /// Reads a page.
    ///
    /// # Errors
    /// What makes the bytes no page.
    pub(super) fn read(bytes: &[u8; PAGE_BYTES]) -> Result<Self, &'static str> {
        let as_it_is = bytes.strip_prefix(&AS_IT_IS).and_then(<[u8]>::split_first_chunk::<8>);
        if let Some((chunk_bytes, numbers)) = as_it_is {
            let chunk_bytes = u64::from_le_bytes(*chunk_bytes);
            let n_pieces = chunk_bytes.div_ceil(piece_bytes(chunk_bytes)) as usize;
            return Ok(Self::AsItIs { chunk_bytes, checksums: read_checksums(numbers, n_pieces) });
        }
        let head = CodedHead::decode(bytes).map_err(|_| "page of a coded chunk")?;
        if head.shape.n_layers > MAX_LAYERS {
            return Err("page of a coded chunk");
        }
        let checksums = read_checksums(&bytes[head.head_bytes()..], head.shape.n_layers);
        Ok(Self::Coded { head, checksums })
    }

    /// Length of the chunk that it is for.
    pub(super) fn chunk_bytes(&self) -> u64 {
        match self {
            Self::AsItIs { chunk_bytes, .. } => *chunk_bytes,
            Self::Coded { head, .. } => head.shape.chunk_bytes() as u64,
        }
    }
}

/// Length of the pieces of a chunk that is kept as it is: the smallest whose checksums fit into a page.
pub(super) fn piece_bytes(chunk_bytes: u64) -> u64 {
    let mut piece_bytes = PAGE_BYTES as u64;
    while chunk_bytes.div_ceil(piece_bytes) > MAX_PIECES {
        piece_bytes *= 2;
    }
    piece_bytes
}

fn read_checksums(bytes: &[u8], n_checksums: usize) -> Vec<u64> {
    let (numbers, _) = bytes.as_chunks::<8>();
    numbers.iter().take(n_checksums).map(|number| u64::from_le_bytes(*number)).collect()
}

pub(super) fn checksum_of(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

#[cfg(test)]
mod tests {
    use kvik_codec::{ChunkLayout, ChunkShape, by_name, encode};
    use kvik_types::Dtype;

    use super::*;

    #[test]
    fn pages_are_read_back() {
        let layout = ChunkLayout::Opaque { token_elements: 48 };
        let shape = ChunkShape { n_layers: MAX_LAYERS, n_tokens: 1, dtype: Dtype::BF16, layout };
        let mut coded = Vec::new();
        encode(&*by_name("lossless").unwrap(), &shape, &vec![3; shape.chunk_bytes()], &mut coded).unwrap();
        let (page, head_bytes) = Page::of_coded(&coded).unwrap();
        assert_eq!(head_bytes, coded_head_bytes(MAX_LAYERS));
        assert_eq!(Page::read(&page.to_bytes()).unwrap(), page);
        assert_eq!(page.chunk_bytes(), shape.chunk_bytes() as u64);
        for n_bytes in
            [0, 77, PAGE_BYTES, MAX_PIECES as usize * PAGE_BYTES, MAX_PIECES as usize * PAGE_BYTES + 1]
        {
            let page = Page::as_it_is(&vec![5; n_bytes]);
            assert_eq!(Page::read(&page.to_bytes()).unwrap(), page);
            assert_eq!(page.chunk_bytes(), n_bytes as u64);
        }
        // Any length that a page claims has pieces.
        assert!((1..=MAX_PIECES).contains(&u64::MAX.div_ceil(piece_bytes(u64::MAX))));
        assert!(Page::read(&[0; PAGE_BYTES]).is_err());
        let too_many = ChunkShape { n_layers: MAX_LAYERS + 1, ..shape };
        coded.clear();
        encode(&*by_name("none").unwrap(), &too_many, &vec![3; too_many.chunk_bytes()], &mut coded).unwrap();
        assert!(Page::of_coded(&coded).is_none());
    }
}
