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

/// Attaches to a daemon, and again whenever the daemon was gone and is back; dropping it ends the session.
///
/// While there is no daemon every call returns nothing at once: the caller does without the store.
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
    is_ended: bool,
    /// Whether the absence of the daemon was logged.
    is_absence_known: bool,
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

    /// Where chains are made; `None` while there is no daemon. Does not wait.
    pub fn space(&self) -> Option<Space> {
        self.shared.state.lock().client.as_ref().map(|client| client.space().clone())
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
    pub fn run<T>(&self, ask: impl FnOnce(&NodeClient) -> Result<T>) -> Option<T> {
        let client = self.shared.state.lock().client.clone()?;
        match ask(&client) {
            Ok(answer) => Some(answer),
            Err(error) => {
                self.shared.forget(&client, &error);
                None
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
            let next_look = Instant::now() + LOOK_INTERVAL;
            while !state.is_ended && !self.changed.wait_until(&mut state, next_look).timed_out() {}
            if state.is_ended {
                return;
            }
            let client = state.client.clone();
            // Without the lock: a daemon that hangs must not block callers.
            drop(state);
            match client {
                None => self.attach(),
                // Noticed here too, so that an idle session is back before it is needed.
                Some(client) if client.is_gone() => {
                    self.forget(&client, &NodeError::Gone { reason: "its connection ended" });
                }
                Some(_) => {}
            }
            state = self.state.lock();
        }
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
                state.is_absence_known = false;
                self.changed.notify_all();
            }
            Err(error) if !state.is_absence_known => {
                state.is_absence_known = true;
                let error = chain_of(&error);
                tracing::warn!(socket = %self.options.socket, error, "no store daemon; trying until there is one");
            }
            Err(_) => {}
        }
    }

    /// Ends the session of a client that failed, unless another one has taken its place.
    fn forget(&self, client: &NodeClient, error: &NodeError) {
        let mut state = self.state.lock();
        if state.client.as_ref().is_some_and(|current| Arc::ptr_eq(&current.shared, &client.shared)) {
            state.client = None;
            // Said here, so that the next failed attempt is not news.
            state.is_absence_known = true;
            let error = chain_of(error);
            tracing::warn!(socket = %self.options.socket, error, "lost the store daemon");
        }
    }
}

/// An error with its causes.
fn chain_of(error: &NodeError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
