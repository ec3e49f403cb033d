//! What a daemon has, for a client that keeps a copy of it.

use std::collections::HashSet;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
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

/// Time between two attempts to attach while another daemon takes over.
const MOVE_INTERVAL: Duration = Duration::from_millis(5);

/// Time for a daemon that takes over to answer; after it, what the old one had counts as gone.
const MOVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Tells an observer which chunks of a space the daemon's tiers have, until it is dropped.
///
/// While there is no daemon, or one that names chunks otherwise, there are none. Each change differs from the state
/// before it, also over restarts of the daemon. When another daemon takes over, only what differs is reported.
#[derive(Debug)]
pub struct NodeWatch {
    shared: Arc<WatchShared>,
    thread: Option<JoinHandle<()>>,
}

struct WatchShared {
    options: AttachOptions,
    /// Where the client's chains are made; that of the first daemon where none was known before.
    space: OnceLock<Space>,
    /// Told of the space of the first daemon.
    on_space: Mutex<Option<OnSpace>>,
    observer: Arc<dyn ChunkObserver>,
    is_over: Mutex<bool>,
    ended: Condvar,
}

type OnSpace = Box<dyn FnOnce(&Space) + Send>;

type Held = HashSet<(BlockHash, TierKind)>;

/// How a watch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Followed {
    /// The watch is over.
    ToTheEnd,
    /// Another daemon takes over.
    UntilMove,
}

impl NodeWatch {
    /// Starts the thread that listens.
    ///
    /// # Errors
    /// If the operating system gives none.
    pub fn start(options: AttachOptions, space: Space, observer: Arc<dyn ChunkObserver>) -> Result<Self> {
        Self::start_with(options, OnceLock::from(space), None, observer)
    }

    /// Starts it for a client that does not know yet how chunks are named: `on_space` is called once, with the space of the
    /// first daemon that comes and before the observer is called.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub fn start_for_first(
        options: AttachOptions,
        on_space: impl FnOnce(&Space) + Send + 'static,
        observer: Arc<dyn ChunkObserver>,
    ) -> Result<Self> {
        Self::start_with(options, OnceLock::new(), Some(Box::new(on_space)), observer)
    }

    fn start_with(
        options: AttachOptions,
        space: OnceLock<Space>,
        on_space: Option<OnSpace>,
        observer: Arc<dyn ChunkObserver>,
    ) -> Result<Self> {
        let shared = WatchShared {
            options,
            space,
            on_space: Mutex::new(on_space),
            observer,
            is_over: Mutex::new(false),
            ended: Condvar::new(),
        };
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
        // What another daemon takes over, until when.
        let mut moving: Option<(Held, Instant)> = None;
        while !self.is_over() {
            let before = moving.as_mut().map(|(before, _)| before);
            // Why it ended is known to the session beside it, which logs it.
            match self.follow(&mut held, before) {
                Ok(Followed::UntilMove) => {
                    let mut before = moving.take().map_or_else(Held::new, |(before, _)| before);
                    before.extend(held.drain());
                    moving = Some((before, Instant::now() + MOVE_TIMEOUT));
                }
                Err(_)
                    if held.is_empty()
                        && moving.as_ref().is_some_and(|(_, until)| Instant::now() < *until) => {}
                _ => {
                    // What a daemon had that is gone cannot be read.
                    held.extend(moving.take().into_iter().flat_map(|(before, _)| before));
                    let gone: Vec<ChunkChange> =
                        held.drain().map(|place| change(place, None, false)).collect();
                    self.tell(&gone);
                }
            }
            let interval = if moving.is_some() { MOVE_INTERVAL } else { LOOK_INTERVAL };
            let mut is_over = self.is_over.lock();
            if !*is_over {
                self.ended.wait_for(&mut is_over, interval);
            }
        }
    }

    fn is_over(&self) -> bool {
        *self.is_over.lock()
    }

    /// Listens to one daemon until it ends. What is in `before` was reported of the daemon that this one takes over from: it is
    /// not reported again, and what of it the new one does not name is reported as gone.
    fn follow(&self, held: &mut Held, mut before: Option<&mut Held>) -> Result<Followed> {
        let (connection, attached, _) = connect(&self.options, Purpose::Watch)?;
        let space = attached.space(&self.options.namespace, self.options.format)?;
        let own = self.space.get_or_init(|| space.clone());
        let on_space = self.on_space.lock().take();
        if let Some(on_space) = on_space {
            on_space(own);
        }
        if !space.names_as(own) {
            return Err(NodeError::invalid("space", &"another", "that of the client's start"));
        }
        let mut buffer = FrameBuffer::new();
        loop {
            let Some(frame) = self.receive(&connection, &mut buffer)? else { return Ok(Followed::ToTheEnd) };
            match frame {
                WatchFrame::Changes(mut changes) => {
                    changes.retain(|ChunkChange { hash, tier, is_held, .. }| {
                        let place = (*hash, *tier);
                        let was_told = before.as_mut().is_some_and(|before| before.remove(&place));
                        if *is_held {
                            held.insert(place) && !was_told
                        } else {
                            held.remove(&place) || was_told
                        }
                    });
                    self.tell(&changes);
                }
                WatchFrame::SnapshotEnd => {
                    let gone = before.take().into_iter().flat_map(|before| before.drain());
                    let gone: Vec<ChunkChange> = gone.map(|place| change(place, None, false)).collect();
                    self.tell(&gone);
                }
                WatchFrame::Moving => return Ok(Followed::UntilMove),
            }
        }
    }

    /// The next frame; `None` when the watch is over.
    fn receive(&self, connection: &Connection, buffer: &mut FrameBuffer) -> Result<Option<WatchFrame>> {
        while !self.is_over() {
            let failed = || NodeError::io("read changes of chunks");
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

impl fmt::Debug for WatchShared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, space, observer, is_over, .. } = self;
        formatter
            .debug_struct("WatchShared")
            .field("options", options)
            .field("space", space)
            .field("observer", observer)
            .field("is_over", is_over)
            .finish_non_exhaustive()
    }
}

fn change((hash, tier): (BlockHash, TierKind), parent: Option<BlockHash>, is_held: bool) -> ChunkChange {
    ChunkChange { hash, parent, tier, is_held }
}
