//! The list of the chunks in an arena and of their pins, as it goes from one daemon to the next.
//!
//! A start, four numbers, the chunks in the order in which they leave, the parents of those that are pinned, the pins, the
//! times of chunks that have one, and a CRC-64 of all before it. All numbers are little-endian.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::OwnedFd;

use kvik_store::{KeptChunk, KeptMemory, KeptParent, KeptPin, KeptPins, KeptTime};
use kvik_tier::shared::checksum;
use kvik_tier::{ChunkKey, ChunkPlace, NamespaceId, PlacedChunk, RamTier, TokenDigest};
use kvik_types::BlockHash;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::error::{NodeError, Result};
use crate::manage::MAX_PINS;

/// The first bytes of a list, with its version.
const MAGIC: [u8; 8] = *b"KVIKCL04";

/// The start, and the numbers of chunks, parents, pins and times.
const HEADER_BYTES: usize = MAGIC.len() + 4 * 8;
const CHECKSUM_BYTES: usize = 8;

/// Namespace, hash, rank, depth, digest, offset and length.
const CHUNK_BYTES: usize = 16 + 16 + 2 + 4 + 32 + 8 + 8;

/// The names of a chunk and its parent.
const PARENT_BYTES: usize = 16 + 16;

/// The name of a chain, whether chunks of it are kept, the last of them, and the milliseconds that are left.
const PIN_BYTES: usize = 16 + 1 + 16 + 8;

/// The name of a chunk and the milliseconds that are left.
const TIME_BYTES: usize = 16 + 8;

/// Stands for the time that is left of a pin without an end.
const NO_END_MS: u64 = u64::MAX;

/// The most that a list has for one chunk.
const MOST_BYTES: usize = CHUNK_BYTES + PARENT_BYTES + TIME_BYTES;

/// The least that a chunk takes of an arena.
const UNIT_BYTES: u64 = 4096;

/// A chunk in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedChunk {
    /// Its name, tokens and place.
    pub placed: PlacedChunk,
    /// Its place in its chain.
    pub depth: u32,
}

/// The chunks of an arena, in the order in which they leave when there is no room.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ChunkList {
    /// The chunks.
    pub chunks: Vec<ListedChunk>,
    /// Those of them that are pinned.
    pub pins: KeptPins,
    /// Those of them that are kept for some time only.
    pub times: Vec<KeptTime>,
}

impl ChunkList {
    /// All chunks of a memory that no reader or writer uses; `None` while one does.
    pub(crate) fn of(memory: &KeptMemory) -> Option<Self> {
        let placed = memory.ram.inventory()?;
        let mut by_key: HashMap<ChunkKey, PlacedChunk> =
            placed.into_iter().map(|placed| (placed.key, placed)).collect();
        let listed = |chunk: &KeptChunk| {
            let placed = by_key.remove(&chunk.key)?;
            Some(ListedChunk { placed, depth: chunk.depth })
        };
        let chunks = memory.chunks.iter().filter_map(listed).collect();
        // The next daemon takes what is not listed for free memory, and here no other chunk is.
        by_key.is_empty().then(|| Self { chunks, pins: memory.pins.clone(), times: memory.times.clone() })
    }

    /// The memory that a list describes. The caller has the right to the file.
    pub(crate) fn adopt(self, arena: OwnedFd) -> Result<KeptMemory> {
        let placed: Vec<PlacedChunk> = self.chunks.iter().map(|chunk| chunk.placed).collect();
        let ram = RamTier::adopt(arena, &placed)?;
        let kept = |chunk: &ListedChunk| KeptChunk { key: chunk.placed.key, depth: chunk.depth };
        let chunks = self.chunks.iter().map(kept).collect();
        Ok(KeptMemory { ram, chunks, pins: self.pins, times: self.times })
    }

    /// The list as a memory file that cannot change any more.
    pub(crate) fn to_file(&self) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(memfd_create("kvik-chunks", flags)?);
        file.write_all(&self.encode())?;
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)?;
        Ok(file.into())
    }

    /// Reads the list of an arena of this size.
    pub(crate) fn from_file(file: OwnedFd, arena_bytes: u64) -> Result<Self> {
        // Two clients that pin at a time may both be the last that is let.
        let n_fixed_bytes = HEADER_BYTES + CHECKSUM_BYTES + 2 * MAX_PINS * PIN_BYTES;
        let max_bytes = n_fixed_bytes as u64 + arena_bytes / UNIT_BYTES * MOST_BYTES as u64;
        let mut bytes = Vec::new();
        let mut file = File::from(file);
        file.rewind()
            .and_then(|()| file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes))
            .map_err(NodeError::io("read the list of chunks"))?;
        Self::decode(&bytes)
    }

    /// The bytes of the list.
    pub fn encode(&self) -> Vec<u8> {
        let KeptPins { parents, pins } = &self.pins;
        let mut bytes = Vec::with_capacity(
            HEADER_BYTES
                + self.chunks.len() * CHUNK_BYTES
                + parents.len() * PARENT_BYTES
                + pins.len() * PIN_BYTES
                + self.times.len() * TIME_BYTES
                + CHECKSUM_BYTES,
        );
        bytes.extend(MAGIC);
        for count in [self.chunks.len(), parents.len(), pins.len(), self.times.len()] {
            bytes.extend((count as u64).to_le_bytes());
        }
        for ListedChunk { placed: PlacedChunk { key, digest, place }, depth } in &self.chunks {
            bytes.extend(key.namespace.0.0);
            bytes.extend(key.chunk.0);
            bytes.extend(key.rank.to_le_bytes());
            bytes.extend(depth.to_le_bytes());
            bytes.extend(digest.0);
            bytes.extend(place.offset.to_le_bytes());
            bytes.extend(place.n_bytes.to_le_bytes());
        }
        for KeptParent { chunk, parent } in parents {
            bytes.extend(chunk.0);
            bytes.extend(parent.0);
        }
        for KeptPin { chain, chunk, left_ms } in pins {
            bytes.extend(chain.0);
            bytes.push(chunk.is_some().into());
            bytes.extend(chunk.map_or([0; 16], |chunk| chunk.0));
            bytes.extend(left_ms.unwrap_or(NO_END_MS).to_le_bytes());
        }
        for KeptTime { chunk, left_ms } in &self.times {
            bytes.extend(chunk.0);
            bytes.extend(left_ms.to_le_bytes());
        }
        bytes.extend(checksum(&bytes).0.to_le_bytes());
        bytes
    }

    /// Reads the bytes of a list. Whether the places are possible is for the arena to say.
    ///
    /// # Errors
    /// If they are no such list; the error names what is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let refused = |value: &str, allowed: &str| NodeError::invalid("list of chunks", &value, allowed);
        let Some((body, sum)) = bytes.split_last_chunk::<CHECKSUM_BYTES>() else {
            return Err(refused("cut off", "all of its fields"));
        };
        if checksum(body).0 != u64::from_le_bytes(*sum) {
            return Err(refused("damaged", "bytes with their checksum"));
        }
        let Some(body) = body.strip_prefix(&MAGIC) else {
            return Err(refused("of another kind", "KVIKCL04"));
        };
        let Some((counts, body)) = body.split_at_checked(HEADER_BYTES - MAGIC.len()) else {
            return Err(refused("cut off", "all of its fields"));
        };
        let mut counts = counts;
        let [n_chunks, n_parents, n_pins, n_times] =
            std::array::from_fn(|_| u64::from_le_bytes(field(&mut counts)));
        let split = || {
            let (chunks, rest) = split_records::<CHUNK_BYTES>(body, n_chunks)?;
            let (parents, rest) = split_records::<PARENT_BYTES>(rest, n_parents)?;
            let (pins, rest) = split_records::<PIN_BYTES>(rest, n_pins)?;
            let (times, rest) = split_records::<TIME_BYTES>(rest, n_times)?;
            rest.is_empty().then_some((chunks, parents, pins, times))
        };
        let Some((chunks, parents, pins, times)) = split() else {
            return Err(refused("of another length", "as many chunks, pins and times as it says"));
        };
        let Some(pins) = pins.iter().map(pin_of).collect::<Option<Vec<KeptPin>>>() else {
            return Err(refused("with a wrong pin", "pins of a chunk, or of none"));
        };
        let parents = parents.iter().map(parent_of).collect();
        Ok(Self {
            chunks: chunks.iter().map(chunk_of).collect(),
            pins: KeptPins { parents, pins },
            times: times.iter().map(time_of).collect(),
        })
    }
}

/// The first `n_records` records, and the bytes behind them; `None` where there are not so many.
fn split_records<const N: usize>(bytes: &[u8], n_records: u64) -> Option<(&[[u8; N]], &[u8])> {
    let n_bytes = usize::try_from(n_records).ok()?.checked_mul(N)?;
    let (records, rest) = bytes.split_at_checked(n_bytes)?;
    Some((records.as_chunks::<N>().0, rest))
}

fn parent_of(bytes: &[u8; PARENT_BYTES]) -> KeptParent {
    let mut rest = &bytes[..];
    KeptParent { chunk: BlockHash(field(&mut rest)), parent: BlockHash(field(&mut rest)) }
}

/// `None` where it says neither that a chunk is kept nor that none is.
fn pin_of(bytes: &[u8; PIN_BYTES]) -> Option<KeptPin> {
    let mut rest = &bytes[..];
    let chain = BlockHash(field(&mut rest));
    let ([is_kept], chunk) = (field(&mut rest), BlockHash(field(&mut rest)));
    let chunk = match is_kept {
        0 if chunk.0 == [0; 16] => None,
        1 => Some(chunk),
        _ => return None,
    };
    let left_ms = u64::from_le_bytes(field(&mut rest));
    Some(KeptPin { chain, chunk, left_ms: (left_ms != NO_END_MS).then_some(left_ms) })
}

fn time_of(bytes: &[u8; TIME_BYTES]) -> KeptTime {
    let mut rest = &bytes[..];
    KeptTime { chunk: BlockHash(field(&mut rest)), left_ms: u64::from_le_bytes(field(&mut rest)) }
}

fn chunk_of(bytes: &[u8; CHUNK_BYTES]) -> ListedChunk {
    let mut rest = &bytes[..];
    let key = ChunkKey {
        namespace: NamespaceId(BlockHash(field(&mut rest))),
        chunk: BlockHash(field(&mut rest)),
        rank: u16::from_le_bytes(field(&mut rest)),
    };
    let depth = u32::from_le_bytes(field(&mut rest));
    let digest = TokenDigest(field(&mut rest));
    let place = ChunkPlace {
        offset: u64::from_le_bytes(field(&mut rest)),
        n_bytes: u64::from_le_bytes(field(&mut rest)),
    };
    ListedChunk { placed: PlacedChunk { key, digest, place }, depth }
}

/// Takes the next field; zeros behind the end, which the length of a chunk excludes.
fn field<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let Some((field, after)) = rest.split_first_chunk::<N>() else { return [0; N] };
    *rest = after;
    *field
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunks() -> impl Strategy<Value = ListedChunk> {
        let key = any::<([u8; 16], [u8; 16], u16)>().prop_map(|(namespace, chunk, rank)| ChunkKey {
            namespace: NamespaceId(BlockHash(namespace)),
            chunk: BlockHash(chunk),
            rank,
        });
        (key, any::<([u8; 32], u64, u64, u32)>()).prop_map(|(key, (digest, offset, n_bytes, depth))| {
            let place = ChunkPlace { offset, n_bytes };
            ListedChunk { placed: PlacedChunk { key, digest: TokenDigest(digest), place }, depth }
        })
    }

    fn pins() -> impl Strategy<Value = KeptPins> {
        let hash = || any::<[u8; 16]>().prop_map(BlockHash);
        let parent = (hash(), hash()).prop_map(|(chunk, parent)| KeptParent { chunk, parent });
        let pin = (hash(), prop::option::of(hash()), prop::option::of(0..u64::MAX))
            .prop_map(|(chain, chunk, left_ms)| KeptPin { chain, chunk, left_ms });
        (prop::collection::vec(parent, 0..5), prop::collection::vec(pin, 0..5))
            .prop_map(|(parents, pins)| KeptPins { parents, pins })
    }

    fn times() -> impl Strategy<Value = Vec<KeptTime>> {
        let time = any::<([u8; 16], u64)>()
            .prop_map(|(chunk, left_ms)| KeptTime { chunk: BlockHash(chunk), left_ms });
        prop::collection::vec(time, 0..5)
    }

    proptest! {
        #[test]
        fn a_list_is_read_as_it_was_written(
            chunks in prop::collection::vec(chunks(), 0..20),
            pins in pins(),
            times in times(),
        ) {
            let list = ChunkList { chunks, pins, times };
            prop_assert_eq!(ChunkList::decode(&list.encode()).unwrap(), list.clone());
            let read = ChunkList::from_file(list.to_file().unwrap(), 1 << 20).unwrap();
            prop_assert_eq!(read, list);
        }

        #[test]
        fn a_list_that_is_cut_longer_or_changed_is_refused(
            chunks in prop::collection::vec(chunks(), 1..4),
            pins in pins(),
            times in times(),
            place in any::<prop::sample::Index>(),
            bit in 0..8_u32,
        ) {
            let bytes = ChunkList { chunks, pins, times }.encode();
            prop_assert!(ChunkList::decode(&bytes[..place.index(bytes.len())]).is_err());
            prop_assert!(ChunkList::decode(&[&bytes[..], &[0]].concat()).is_err());
            let mut changed = bytes;
            let place = place.index(changed.len());
            changed[place] ^= 1 << bit;
            prop_assert!(ChunkList::decode(&changed).is_err());
        }

        #[test]
        fn any_bytes_are_a_list_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = ChunkList::decode(&bytes);
            // With the right start and checksum.
            bytes.splice(0..0, MAGIC);
            bytes.extend(checksum(&bytes).0.to_le_bytes());
            if let Ok(list) = ChunkList::decode(&bytes) {
                prop_assert_eq!(list.encode(), bytes);
            }
        }
    }

    #[test]
    fn a_list_with_more_chunks_than_the_arena_has_room_for_is_refused() {
        let chunk = ListedChunk {
            placed: PlacedChunk {
                key: ChunkKey {
                    namespace: NamespaceId(BlockHash([1; 16])),
                    chunk: BlockHash([2; 16]),
                    rank: 0,
                },
                digest: TokenDigest([3; 32]),
                place: ChunkPlace { offset: 0, n_bytes: 1 },
            },
            depth: 0,
        };
        // Beyond what pins may take.
        let n_units = 30_000;
        let list = |n_chunks: usize| ChunkList { chunks: vec![chunk; n_chunks], ..ChunkList::default() };
        let n_most = (n_units * MOST_BYTES + 2 * MAX_PINS * PIN_BYTES) / CHUNK_BYTES;
        let read =
            |list: ChunkList| ChunkList::from_file(list.to_file().unwrap(), n_units as u64 * UNIT_BYTES);
        assert!(read(list(n_units)).is_ok());
        assert!(read(list(n_most + 1)).is_err());
    }
}
