//! Events as a string of operations beside their keys, in parts that one call of a script can take.

use kvik_index::holders::{BlockKey, Event, Tier};

/// Keys of one call: a few milliseconds of the server's time, in which it serves no other client.
pub(super) const MAX_CALL_KEYS: usize = 4096;

const OPERATION_BYTES: usize = 6;
const EVERY_TIER: u8 = 4;

/// What one call of a script does.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// Six bytes each: a letter, a tier, the number of blocks.
    pub(super) operations: Vec<u8>,
    /// The blocks of all operations, in order.
    pub(super) keys: Vec<BlockKey>,
    /// Units: blocks, and clears, which have none.
    pub(super) n_units: usize,
    pub(super) is_last: bool,
}

/// The part of some events that begins behind the first `n_done` units.
pub(super) fn part<'a>(events: impl IntoIterator<Item = Event<'a>>, n_done: usize) -> Part {
    let mut part = Part::default();
    let mut n_skipped = 0;
    for event in events {
        let (letter, tier, keys) = match event {
            Event::Stored { tier, keys, .. } => (b'S', tier.as_index() as u8, keys),
            Event::Removed { tier, keys } => (b'R', tier.as_index() as u8, keys),
            Event::Cleared { tier } => {
                (b'C', tier.map_or(EVERY_TIER, |tier| Tier::as_index(tier) as u8), &[][..])
            }
        };
        let n_units = if letter == b'C' { 1 } else { keys.len() };
        let n_to_skip = (n_done - n_skipped).min(n_units);
        n_skipped += n_to_skip;
        let n_taken = (n_units - n_to_skip).min(MAX_CALL_KEYS - part.n_units);
        if n_taken > 0 {
            let keys = if letter == b'C' { keys } else { &keys[n_to_skip..n_to_skip + n_taken] };
            part.operations.extend_from_slice(&[letter, tier]);
            part.operations.extend_from_slice(&(keys.len() as u32).to_be_bytes());
            part.keys.extend_from_slice(keys);
            part.n_units += n_taken;
        }
        if n_taken < n_units - n_to_skip {
            return part;
        }
    }
    part.is_last = true;
    debug_assert!(part.operations.len().is_multiple_of(OPERATION_BYTES));
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_events_in_order_without_loss() {
        let keys: Vec<BlockKey> = (0..10_000).map(BlockKey).collect();
        let events = [
            Event::Stored { tier: Tier::Gpu, parent: None, keys: &keys[..4095] },
            Event::Cleared { tier: None },
            Event::Cleared { tier: Some(Tier::Disk) },
            Event::Removed { tier: Tier::Cpu, keys: &keys[4095..] },
            Event::Stored { tier: Tier::Remote, parent: None, keys: &[] },
        ];
        let mut n_done = 0;
        let mut parts = Vec::new();
        loop {
            let part = part(events, n_done);
            n_done += part.n_units;
            assert!(part.n_units <= MAX_CALL_KEYS);
            parts.push(part);
            if parts.last().unwrap().is_last {
                break;
            }
        }
        let all: Vec<BlockKey> = parts.iter().flat_map(|part| part.keys.clone()).collect();
        assert_eq!(all, keys);
        assert_eq!(n_done, keys.len() + 2);
        let operations: Vec<Vec<u8>> = parts.into_iter().map(|part| part.operations).collect();
        assert_eq!(operations[0], [b"S\0\0\0\x0f\xff".as_slice(), b"C\x04\0\0\0\0"].concat());
        assert_eq!(operations[1], [b"C\x02\0\0\0\0".as_slice(), b"R\x01\0\0\x0f\xff"].concat());
        assert_eq!(operations[2], [b"R\x01\0\0\x07\x12".as_slice()].concat());
    }

    #[test]
    fn no_events_are_one_part() {
        assert_eq!(part([], 0), Part { is_last: true, ..Part::default() });
    }
}
