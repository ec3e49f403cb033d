//! The frames that tell a watching client which chunks the daemon has.
//!
//! After its attachment a watching client gets everything that is there, a frame that says so, and then every change. A
//! change is the chunk's name, its parent's, and a byte: whether it is held, whether the parent is known, and the tier.

use kvik_store::ChunkChange;
use kvik_types::BlockHash;

use crate::error::{NodeError, Result};
use crate::frame::MAGIC;
use crate::operation::{tier_code, tier_of};

/// Changes in one frame: it has room in the socket's.
pub(crate) const MAX_CHANGES: usize = 512;

const CHANGES: u8 = 3;
const SNAPSHOT_END: u8 = 4;
const MOVING: u8 = 5;

const CHANGE_BYTES: usize = 33;

const IS_HELD: u8 = 1;
const HAS_PARENT: u8 = 2;
const TIER_SHIFT: u32 = 4;

/// A frame to a watching client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchFrame {
    /// Chunks that a tier has since now, or has no more.
    Changes(Vec<ChunkChange>),
    /// All that was there has been sent.
    SnapshotEnd,
    /// Another daemon takes over, and goes on with what was sent so far.
    Moving,
}

impl WatchFrame {
    /// The frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = MAGIC.to_vec();
        match self {
            Self::SnapshotEnd => frame.push(SNAPSHOT_END),
            Self::Moving => frame.push(MOVING),
            Self::Changes(changes) => {
                frame.push(CHANGES);
                for ChunkChange { hash, parent, tier, is_held } in changes {
                    let held = if *is_held { IS_HELD } else { 0 };
                    let with_parent = if parent.is_some() { HAS_PARENT } else { 0 };
                    frame.push(held | with_parent | ((tier_code(*tier) as u8) << TIER_SHIFT));
                    frame.extend(hash.0);
                    frame.extend(parent.unwrap_or(BlockHash([0; 16])).0);
                }
            }
        }
        frame
    }

    /// Reads a frame.
    ///
    /// # Errors
    /// If the bytes are no such frame.
    pub fn decode(frame: &[u8]) -> Result<Self> {
        let refused =
            || NodeError::invalid("frame of changes", &format!("{} bytes", frame.len()), "whole changes");
        let body = frame.strip_prefix(&MAGIC).ok_or_else(refused)?;
        let (kind, body) = body.split_first().ok_or_else(refused)?;
        match (*kind, body) {
            (SNAPSHOT_END, []) => Ok(Self::SnapshotEnd),
            (MOVING, []) => Ok(Self::Moving),
            (CHANGES, body) => {
                let (changes, rest) = body.as_chunks::<CHANGE_BYTES>();
                if !rest.is_empty() || changes.len() > MAX_CHANGES {
                    return Err(refused());
                }
                let changes = changes.iter().map(change_of).collect::<Option<_>>();
                changes.map(Self::Changes).ok_or_else(refused)
            }
            _ => Err(refused()),
        }
    }
}

fn change_of(bytes: &[u8; CHANGE_BYTES]) -> Option<ChunkChange> {
    let flags = bytes[0];
    let (names, _) = bytes[1..].as_chunks::<16>();
    Some(ChunkChange {
        hash: BlockHash(*names.first()?),
        parent: (flags & HAS_PARENT != 0).then_some(BlockHash(*names.get(1)?)),
        tier: tier_of(u64::from(flags >> TIER_SHIFT))?,
        is_held: flags & IS_HELD != 0,
    })
}

#[cfg(test)]
mod tests {
    use kvik_tier::TierKind;

    use super::*;

    #[test]
    fn changes_are_read_as_they_were_written_and_what_is_cut_is_refused() {
        let change = |number: u8, parent: Option<u8>, tier, is_held| ChunkChange {
            hash: BlockHash([number; 16]),
            parent: parent.map(|parent| BlockHash([parent; 16])),
            tier,
            is_held,
        };
        let changes = WatchFrame::Changes(vec![
            change(1, None, TierKind::Ram, true),
            change(2, Some(1), TierKind::Nvme, false),
            change(3, Some(2), TierKind::Object, true),
        ]);
        for frame in [changes, WatchFrame::SnapshotEnd, WatchFrame::Moving, WatchFrame::Changes(Vec::new())] {
            let bytes = frame.encode();
            assert_eq!(WatchFrame::decode(&bytes).unwrap(), frame);
            // A frame is whole; the socket keeps frames apart. What is cut at a change is a shorter frame.
            let is_cut = |n_bytes: &usize| (n_bytes - MAGIC.len().min(*n_bytes)) % CHANGE_BYTES != 1;
            for n_bytes in (0..bytes.len()).filter(is_cut) {
                assert!(WatchFrame::decode(&bytes[..n_bytes]).is_err(), "{n_bytes}");
            }
        }
    }
}
