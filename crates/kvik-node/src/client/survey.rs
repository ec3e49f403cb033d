//! Which chunks a daemon has, asked once.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::time::Instant;

use kvik_memory::socket::{FrameBuffer, wait_ready};
use kvik_store::{ChunkChange, Space};
use kvik_tier::TierKind;
use kvik_types::BlockHash;
use rustix::event::{PollFd, PollFlags};

use super::{AttachOptions, connect};
use crate::changes::WatchFrame;
use crate::error::{NodeError, Result};
use crate::frame::Purpose;

/// The chunks of a client's space that the daemon has, with their tiers. Those that come or go meanwhile may be left out.
///
/// # Errors
/// If the daemon is gone, does not answer in the client's time, or names chunks otherwise than `space`.
pub fn survey(options: &AttachOptions, space: &Space) -> Result<HashMap<BlockHash, Vec<TierKind>>> {
    let (connection, attached, _) = connect(options, Purpose::Watch)?;
    if !attached.space(&options.namespace, options.format)?.names_as(space) {
        return Err(NodeError::invalid("space", &"another", "that of the daemon"));
    }
    let failed = || NodeError::io("read changes of chunks");
    let mut held: HashMap<BlockHash, Vec<TierKind>> = HashMap::new();
    let mut buffer = FrameBuffer::new();
    let mut deadline = Instant::now() + options.timeout;
    loop {
        let Some(frame) = connection.receive(&mut buffer).map_err(failed())? else {
            let mut waiting = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
            if !wait_ready(&mut waiting, Some(deadline)).map_err(failed())? {
                return Err(NodeError::Gone { reason: "it does not answer" });
            }
            continue;
        };
        // A daemon that goes on telling is there.
        deadline = Instant::now() + options.timeout;
        match WatchFrame::decode(frame)? {
            WatchFrame::Changes(changes) => {
                for ChunkChange { hash, tier, is_held, .. } in changes {
                    let tiers = held.entry(hash).or_default();
                    tiers.retain(|other| *other != tier);
                    if is_held {
                        tiers.push(tier);
                    }
                }
            }
            WatchFrame::SnapshotEnd | WatchFrame::Moving => break,
        }
    }
    held.retain(|_, tiers| !tiers.is_empty());
    for tiers in held.values_mut() {
        tiers.sort_unstable();
    }
    Ok(held)
}
