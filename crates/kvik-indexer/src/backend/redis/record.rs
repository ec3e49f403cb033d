//! How names, keys and positions are written on the server.

use kvik_index::holders::{BlockKey, N_TIERS, SourceName};
use xxhash_rust::xxh3::Xxh3;

use crate::backend::{Row, SourceState};

/// Raised with every change of what lies on the server, so that versions do not read each other's books.
const LAYOUT_VERSION: u32 = 1;

/// The length of a source's record; see `lua/register.lua`.
const RECORD_BYTES: usize = 79;
/// Doubt, four prefixes, four coverages and the highest block.
const ROW_BYTES: usize = 1 + 9 * 4;

/// The names of one book's keys.
#[derive(Debug, Clone)]
pub(super) struct BookKeys {
    /// The register: a hash of sources, holders and the last number of a holder.
    pub(super) register: Vec<u8>,
    /// What stands before the eight bytes of a block.
    pub(super) block_prefix: Vec<u8>,
}

impl BookKeys {
    /// The keys of the book of a model and naming, however long their names are. All of them share a hash
    /// tag, so that one server of a cluster has them.
    pub(super) fn new(key_prefix: &str, model: &str, naming: &str) -> Self {
        let mut hash = Xxh3::new();
        hash.update(&LAYOUT_VERSION.to_be_bytes());
        for name in [model, naming] {
            hash.update(&(name.len() as u64).to_be_bytes());
            hash.update(name.as_bytes());
        }
        let book = format!("{key_prefix}:{{{:016x}}}", hash.digest());
        Self { register: format!("{book}:r").into_bytes(), block_prefix: format!("{book}:b:").into_bytes() }
    }

    /// The name of a block, written over what is in `name`.
    pub(super) fn write_block(&self, BlockKey(key): BlockKey, name: &mut Vec<u8>) {
        name.clear();
        name.extend_from_slice(&self.block_prefix);
        name.extend_from_slice(&key.to_be_bytes());
    }

    /// The block of a name.
    pub(super) fn block(&self, name: &[u8]) -> Option<BlockKey> {
        let key = name.strip_prefix(self.block_prefix.as_slice())?;
        Some(BlockKey(u64::from_be_bytes(key.try_into().ok()?)))
    }
}

/// A source's name as bytes: the rank, then the worker.
pub(super) fn source_bytes(source: &SourceName) -> Vec<u8> {
    [source.rank.to_be_bytes().as_slice(), source.worker.as_bytes()].concat()
}

/// The source of a name; `None` if it is not one that kvik wrote.
pub(super) fn source_name(bytes: &[u8]) -> Option<SourceName> {
    let (rank, worker) = bytes.split_first_chunk::<4>()?;
    let worker = std::str::from_utf8(worker).ok()?.into();
    Some(SourceName { worker, rank: u32::from_be_bytes(*rank) })
}

/// A time as bytes that are ordered as the times are; what is no time comes first.
pub(super) fn time_bytes(time_s: f64) -> [u8; 8] {
    if time_s.is_nan() {
        return [0; 8];
    }
    let bits = time_s.to_bits();
    let sign = 1 << 63;
    (if bits & sign == 0 { bits | sign } else { !bits }).to_be_bytes()
}

/// A number or nothing, as scripts take it.
pub(super) fn option_bytes(number: Option<u64>) -> Vec<u8> {
    number.map_or_else(Vec::new, |number| number.to_be_bytes().to_vec())
}

/// Where a source stands, of its record, and its holders by tier.
pub(super) fn source_state(source: SourceName, record: &[u8]) -> Option<(SourceState, [[u8; 5]; N_TIERS])> {
    if record.len() != RECORD_BYTES {
        return None;
    }
    let number = |at: usize| Some(u64::from_be_bytes(record.get(at + 1..at + 9)?.try_into().ok()?));
    let option = |at: usize| if record.get(at) == Some(&1) { number(at) } else { None };
    let mut holders = [[0; 5]; N_TIERS];
    for (holder, bytes) in holders.iter_mut().zip(record[39..59].as_chunks::<5>().0) {
        *holder = *bytes;
    }
    let state = SourceState {
        source,
        epoch: option(0),
        due_sequence: option(9),
        is_unsure: record[18] != 0,
        n_blocks: None,
    };
    Some((state, holders))
}

/// A row of a lookup's answer.
pub(super) fn row(bytes: &[u8]) -> Option<Row> {
    let (numbers, name) = bytes.split_at_checked(ROW_BYTES)?;
    let (is_unsure, numbers) = numbers.split_first()?;
    let number = |at: usize| numbers.as_chunks::<4>().0.get(at).map_or(0, |bytes| u32::from_be_bytes(*bytes));
    Some(Row {
        source: source_name(name)?,
        is_unsure: *is_unsure != 0,
        prefix_in: std::array::from_fn(number),
        covered_in: std::array::from_fn(|tier| number(N_TIERS + tier)),
        highest_block: number(2 * N_TIERS),
    })
}

/// The tiers in which a block's value names one of these holders; bit `i` is the `i`-th tier.
pub(super) fn tiers_of(value: &[u8], holders: &[[u8; 5]; N_TIERS]) -> u8 {
    let entries = value.as_chunks::<8>().0;
    let has = |holder: &[u8; 5]| *holder != [0; 5] && entries.iter().any(|entry| entry[..5] == *holder);
    holders.iter().enumerate().fold(0, |tiers, (tier, holder)| tiers | u8::from(has(holder)) << tier)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_ordered_as_bytes() {
        let times =
            [f64::NAN, f64::NEG_INFINITY, -1.5, -0.0, 0.0, 1e-9, 1.7e9, 1.700_000_000_1e9, f64::INFINITY];
        assert!(times.windows(2).all(|pair| time_bytes(pair[0]) < time_bytes(pair[1])));
    }

    #[test]
    fn books_of_other_names_have_other_keys_of_the_same_length() {
        let keys = BookKeys::new("kvik", "model", "naming");
        let long = BookKeys::new("kvik", &"m".repeat(1 << 20), "naming");
        assert_eq!(keys.register.len(), long.register.len());
        assert_ne!(keys.register, long.register);
        assert_ne!(keys.register, BookKeys::new("kvik", "modeln", "aming").register);
        let mut name = Vec::new();
        keys.write_block(BlockKey(7), &mut name);
        assert_eq!(keys.block(&name), Some(BlockKey(7)));
        assert_eq!(long.block(&name), None);
    }
}
