//! Streams chunk events to a watching client.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_memory::socket::{Connection, wait_ready};
use kvik_store::{ChunkChange, ChunkObserver, Space, Store};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};

use super::control::SessionControl;
use crate::changes::{MAX_CHANGES, WatchFrame};
use crate::error::{NodeError, Result};

/// Changes that wait for a client. One that is further behind is cut off, and begins anew with a snapshot.
const MAX_WAITING: usize = 1 << 20;

/// How often a watch looks whether it is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Time for a client to take a frame.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Changes on their way to one client.
#[derive(Debug, Default)]
struct Waiting {
    changes: Mutex<VecDeque<ChunkChange>>,
    arrived: Condvar,
}

impl ChunkObserver for Waiting {
    fn changed(&self, changes: &[ChunkChange]) {
        let mut waiting = self.changes.lock();
        // One beyond the limit stays, so that the watch sees that it is behind.
        let n_room = (MAX_WAITING + 1).saturating_sub(waiting.len());
        waiting.extend(changes.iter().take(n_room));
        drop(waiting);
        self.arrived.notify_one();
    }
}

/// Tells a client everything, until it or the daemon ends, or another daemon takes over.
pub(super) fn run(
    store: &Store,
    space: &Space,
    connection: &Connection,
    control: &SessionControl,
) -> Result<()> {
    let waiting = Arc::new(Waiting::default());
    let woken = Arc::clone(&waiting);
    control.woken_by(move || {
        // With the lock: the watch sleeps, or looks at the control after this.
        drop(woken.changes.lock());
        woken.arrived.notify_one();
    });
    let _observation = store.observe(space, Arc::clone(&waiting) as Arc<dyn ChunkObserver>);
    let mut is_snapshot = true;
    while !control.is_ended() {
        let changes: Vec<ChunkChange> = {
            let mut changes = waiting.changes.lock();
            if changes.len() > MAX_WAITING {
                return Err(NodeError::Gone { reason: "the client is too far behind" });
            }
            if changes.is_empty() && !is_snapshot && control.is_moving() {
                drop(changes);
                return send(connection, &WatchFrame::Moving);
            }
            if changes.is_empty() && !is_snapshot && !control.is_ended() {
                waiting.arrived.wait_for(&mut changes, LOOK_INTERVAL);
            }
            let n_changes = changes.len().min(MAX_CHANGES);
            changes.drain(..n_changes).collect()
        };
        if !changes.is_empty() {
            send(connection, &WatchFrame::Changes(changes))?;
        } else if is_snapshot {
            // `observe` has reported all that was there before it returned.
            is_snapshot = false;
            send(connection, &WatchFrame::SnapshotEnd)?;
        }
    }
    Ok(())
}

fn send(connection: &Connection, frame: &WatchFrame) -> Result<()> {
    let frame = frame.encode();
    let deadline = Instant::now() + SEND_TIMEOUT;
    while !connection.send(&frame).map_err(NodeError::io("tell a client of chunks"))? {
        let mut descriptors = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::OUT)];
        if !wait_ready(&mut descriptors, Some(deadline)).map_err(NodeError::io("wait for a client"))? {
            return Err(NodeError::Gone { reason: "the client does not read" });
        }
    }
    Ok(())
}
