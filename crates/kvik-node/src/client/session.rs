//! A session that outlives its daemon.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvik_store::Space;
use parking_lot::{Condvar, Mutex};

use super::{AttachOptions, NodeClient};
use crate::error::{NodeError, Result};

/// Time between two looks at the daemon, and between two attempts to attach: both cost microseconds.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Time between two attempts to attach while another daemon takes over.
const MOVE_INTERVAL: Duration = Duration::from_millis(5);

/// Longest time that a call waits for a daemon that takes over.
const MOVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Attaches to a daemon, and again whenever the daemon was gone and is back; dropping it ends the session.
///
/// While there is no daemon every call returns nothing at once: the caller does without the store. While another daemon
/// takes over, calls wait for it, at most 5 s.
#[derive(Debug)]
pub struct NodeSession {
    shared: Arc<SessionShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct SessionShared {
    options: AttachOptions,
    state: Mutex<SessionState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SessionState {
    client: Option<NodeClient>,
    /// The state of a take-over, from the daemon's word until the next attachment.
    moving: Option<Moving>,
    is_ended: bool,
    /// Whether the absence of the daemon was logged.
    is_absence_known: bool,
    /// Why there is no client.
    last_error: Option<String>,
    /// Whether the attaching thread should not wait.
    is_attachment_urgent: bool,
}

/// A take-over as a client sees it.
#[derive(Debug)]
struct Moving {
    /// Where chains were made for the old daemon; the new one names chunks in the same way.
    space: Space,
    /// When it counts as failed.
    until: Instant,
}

impl NodeSession {
    /// Starts the thread that attaches. The first attempt is made at once, before this returns.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub fn start(options: AttachOptions) -> Result<Self> {
        let shared = SessionShared { options, state: Mutex::default(), changed: Condvar::new() };
        let shared = Arc::new(shared);
        shared.attach();
        let attaching = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvik-attach".to_owned())
            .spawn(move || attaching.run())
            .map_err(NodeError::io("start the attaching thread"))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Where chains are made; `None` while there is no daemon. Does not wait, also while another daemon takes over.
    pub fn space(&self) -> Option<Space> {
        let state = self.shared.state.lock();
        let attached = state.client.as_ref().map(NodeClient::space);
        attached.or(state.moving.as_ref().map(|moving| &moving.space)).cloned()
    }

    /// Why the last attempt to attach failed; `None` while there is a daemon.
    pub fn last_error(&self) -> Option<String> {
        self.shared.state.lock().last_error.clone()
    }

    /// Where other nodes read the daemon's chunks, `host:port`; `None` where they do not, and while there is no daemon.
    pub fn peer_address(&self) -> Option<String> {
        let state = self.shared.state.lock();
        state.client.as_ref().and_then(NodeClient::peer_address).map(str::to_owned)
    }

    /// Waits for an attachment; `None` after `timeout`.
    pub fn wait_for_space(&self, timeout: Duration) -> Option<Space> {
        let deadline = Instant::now() + timeout;
        let mut state = self.shared.state.lock();
        while state.client.is_none() && !state.is_ended {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                break;
            }
        }
        state.client.as_ref().map(|client| client.space().clone())
    }

    /// Runs `ask` with the attached client. `None` while the daemon is absent, and if `ask` fails: the session then ends
    /// and attaches again.
    ///
    /// If another daemon takes over, `ask` runs again, from its start, with a client of that one.
    pub fn run<T>(&self, mut ask: impl FnMut(&NodeClient) -> Result<T>) -> Option<T> {
        let begin = Instant::now();
        loop {
            let client = self.shared.client()?;
            let error = match ask(&client) {
                Ok(answer) => return Some(answer),
                Err(error) => error,
            };
            self.shared.forget(&client, &error);
            if !matches!(error, NodeError::Moving) || begin.elapsed() >= MOVE_TIMEOUT {
                return None;
            }
        }
    }

    /// Ends the session; there is no daemon for this from now on.
    pub fn end(&self) {
        {
            let mut state = self.shared.state.lock();
            state.is_ended = true;
            state.client = None;
        }
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Drop for NodeSession {
    fn drop(&mut self) {
        self.end();
    }
}

impl SessionShared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            let next_look = Instant::now() + state.look_interval();
            while !state.is_ended
                && !state.is_attachment_urgent
                && !self.changed.wait_until(&mut state, next_look).timed_out()
            {}
            if state.is_ended {
                return;
            }
            state.is_attachment_urgent = false;
            if state.moving.as_ref().is_some_and(|moving| Instant::now() >= moving.until) {
                state.moving = None;
                tracing::warn!(socket = %self.options.socket, "no store daemon has taken over");
                self.changed.notify_all();
            }
            let client = state.client.clone();
            // Without the lock: a daemon that hangs must not block callers.
            drop(state);
            match client {
                None => self.attach(),
                // Noticed here too, so that an idle session is back before it is needed.
                Some(client) if client.is_gone() => self.forget(&client, &client.why_gone()),
                Some(_) => {}
            }
            state = self.state.lock();
        }
    }

    /// The attached client; waits for it while another daemon takes over.
    fn client(&self) -> Option<NodeClient> {
        let mut state = self.state.lock();
        while state.client.is_none() && !state.is_ended {
            let until = state.moving.as_ref()?.until;
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.client.clone()
    }

    fn attach(&self) {
        let attached = NodeClient::attach(&self.options);
        let mut state = self.state.lock();
        if state.is_ended {
            return;
        }
        match attached {
            Ok(client) => {
                tracing::info!(socket = %self.options.socket, "attached to the store daemon");
                state.client = Some(client);
                state.moving = None;
                state.is_absence_known = false;
                state.last_error = None;
                self.changed.notify_all();
            }
            // Expected for a moment while another daemon takes over.
            Err(_) if state.moving.is_some() => {}
            Err(error) => {
                let error = error.with_causes();
                if !state.is_absence_known {
                    state.is_absence_known = true;
                    tracing::warn!(socket = %self.options.socket, error, "no store daemon; trying until there is one");
                }
                state.last_error = Some(error);
            }
        }
    }

    /// Ends the session of a client that failed, unless another one has taken its place.
    fn forget(&self, client: &NodeClient, error: &NodeError) {
        let mut state = self.state.lock();
        if !state.client.as_ref().is_some_and(|current| Arc::ptr_eq(&current.shared, &client.shared)) {
            return;
        }
        state.client = None;
        if matches!(error, NodeError::Moving) {
            tracing::info!(socket = %self.options.socket, "another store daemon takes over");
            let until = Instant::now() + MOVE_TIMEOUT;
            state.moving = Some(Moving { space: client.space().clone(), until });
            state.is_attachment_urgent = true;
            self.changed.notify_all();
            return;
        }
        // Said here, so that the next failed attempt is not news.
        state.is_absence_known = true;
        let error = error.with_causes();
        tracing::warn!(socket = %self.options.socket, error, "lost the store daemon");
        state.last_error = Some(error);
    }
}

impl SessionState {
    fn look_interval(&self) -> Duration {
        if self.moving.is_some() { MOVE_INTERVAL } else { LOOK_INTERVAL }
    }
}
