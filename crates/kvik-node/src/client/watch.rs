//! What a daemon has, for a client that keeps a copy of it.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_store::{ChunkChange, ChunkObserver, Space};
use kvik_tier::TierKind;
use kvik_types::BlockHash;
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};

use super::{AttachOptions, connect};
use crate::changes::WatchFrame;
use crate::error::{NodeError, Result};
use crate::frame::Purpose;

/// Time between two attempts to attach, and between two looks whether the watch is over.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Tells an observer which chunks of a space the daemon's tiers have, until it is dropped.
///
/// While there is no daemon, or one that names chunks otherwise, there are none. Each change differs from the state
/// before it, also over restarts of the daemon.
#[derive(Debug)]
pub struct NodeWatch {
    shared: Arc<WatchShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct WatchShared {
    options: AttachOptions,
    space: Space,
    observer: Arc<dyn ChunkObserver>,
    is_over: Mutex<bool>,
    ended: Condvar,
}

type Held = HashSet<(BlockHash, TierKind)>;

impl NodeWatch {
    /// Starts the thread that listens.
    ///
    /// # Errors
    /// If the operating system gives none.
    pub fn start(options: AttachOptions, space: Space, observer: Arc<dyn ChunkObserver>) -> Result<Self> {
        let shared =
            WatchShared { options, space, observer, is_over: Mutex::new(false), ended: Condvar::new() };
        let shared = Arc::new(shared);
        let watching = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvik-watch".to_owned())
            .spawn(move || watching.run())
            .map_err(NodeError::io("start the watching thread"))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for NodeWatch {
    fn drop(&mut self) {
        *self.shared.is_over.lock() = true;
        self.shared.ended.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl WatchShared {
    fn run(&self) {
        let mut held = Held::new();
        while !self.is_over() {
            // Why it ended is known to the session beside it, which logs it.
            let _ = self.follow(&mut held);
            // What a daemon had that is gone cannot be read.
            let gone: Vec<ChunkChange> = held.drain().map(|place| change(place, None, false)).collect();
            self.tell(&gone);
            let mut is_over = self.is_over.lock();
            if !*is_over {
                self.ended.wait_for(&mut is_over, LOOK_INTERVAL);
            }
        }
    }

    fn is_over(&self) -> bool {
        *self.is_over.lock()
    }

    /// Listens to one daemon until it ends.
    fn follow(&self, held: &mut Held) -> Result<()> {
        let (connection, attached, _) = connect(&self.options, Purpose::Watch)?;
        let space = attached.space(&self.options.namespace, self.options.format)?;
        if !space.names_as(&self.space) {
            return Err(NodeError::invalid("space", &"another", "that of the client's start"));
        }
        let mut buffer = FrameBuffer::new();
        loop {
            let Some(frame) = self.receive(&connection, &mut buffer)? else { return Ok(()) };
            // A snapshot needs no other care: nothing is held at the start, and a change that repeats what holds already
            // is left out.
            if let WatchFrame::Changes(mut changes) = frame {
                changes.retain(|ChunkChange { hash, tier, is_held, .. }| {
                    let place = (*hash, *tier);
                    if *is_held { held.insert(place) } else { held.remove(&place) }
                });
                self.tell(&changes);
            }
        }
    }

    /// The next frame; `None` when the watch is over.
    fn receive(&self, connection: &Connection, buffer: &mut FrameBuffer) -> Result<Option<WatchFrame>> {
        while !self.is_over() {
            let failed = || NodeError::io("hear of chunks");
            if let Some(frame) = connection.receive(buffer).map_err(failed())? {
                return WatchFrame::decode(frame).map(Some);
            }
            let mut descriptors = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
            wait_ready(&mut descriptors, Some(Instant::now() + LOOK_INTERVAL)).map_err(failed())?;
        }
        Ok(None)
    }

    fn tell(&self, changes: &[ChunkChange]) {
        if !changes.is_empty() {
            self.observer.changed(changes);
        }
    }
}

fn change((hash, tier): (BlockHash, TierKind), parent: Option<BlockHash>, is_held: bool) -> ChunkChange {
    ChunkChange { hash, parent, tier, is_held }
}
