//! The sessions of a store with its daemon, and the threads that use them.
//!
//! Lookups, loads and saves have a session and threads of their own: none waits for the other. A closed store takes no job,
//! and jobs that run when it closes have ended before their session does.

use std::sync::Arc;

use kvik_node::{AttachOptions, NodeClient, NodeManager, NodeSession};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::error::{KvikError, StoreGoneError, exception_of};
use crate::job::{Job, Workers};
use crate::layers::LayerReporter;

/// A session for each kind of call.
#[derive(Debug)]
pub(crate) struct Sessions {
    lookups: Arc<NodeSession>,
    loads: Arc<NodeSession>,
    saves: Arc<NodeSession>,
    /// Pins what is saved; it attaches with the first.
    manager: Arc<NodeManager>,
    /// `None` when the store is closed.
    workers: Mutex<Option<SessionWorkers>>,
}

#[derive(Debug)]
struct SessionWorkers {
    lookups: Workers,
    loads: Workers,
    /// For loads that a pass of the engine waits for, so that they wait for no other.
    layers: Workers,
    saves: Workers,
}

impl Sessions {
    /// Starts threads and sessions; a daemon that is not there yet is no error. With `idle_saves`, saves run where no other thread
    /// needs the processor.
    pub(crate) fn start(attach: &AttachOptions, idle_saves: bool) -> PyResult<Self> {
        let session = |is_patient| {
            let options = AttachOptions { is_patient, ..attach.clone() };
            NodeSession::start(options).map(Arc::new).map_err(|error| exception_of(&error))
        };
        let workers = |name, n_threads, is_idle| {
            Workers::start(name, n_threads, is_idle)
                .map_err(|error| KvikError::new_err(format!("start threads: {error}")))
        };
        let workers = SessionWorkers {
            lookups: workers("kvik-lookups", 1, false)?,
            loads: workers("kvik-loads", 2, false)?,
            layers: workers("kvik-layers", 1, false)?,
            saves: workers("kvik-saves", 1, idle_saves)?,
        };
        Ok(Self {
            lookups: session(false)?,
            loads: session(false)?,
            saves: session(idle_saves)?,
            manager: Arc::new(NodeManager::new(attach.clone()).with_timeout(attach.timeout)),
            workers: Mutex::new(Some(workers)),
        })
    }

    pub(crate) fn all(&self) -> [&NodeSession; 3] {
        [&self.lookups, &self.loads, &self.saves]
    }

    /// The session for calls that wait, beside that of the jobs.
    pub(crate) fn lookups(&self) -> &NodeSession {
        &self.lookups
    }

    pub(crate) fn manager(&self) -> &Arc<NodeManager> {
        &self.manager
    }

    /// Fails if the store is closed.
    pub(crate) fn check_open(&self) -> PyResult<()> {
        self.workers.lock().as_ref().map(|_| ()).ok_or_else(closed)
    }

    /// Begins a job on the session of lookups.
    pub(crate) fn start_lookup(
        &self,
        work: impl FnOnce(&NodeSession) -> usize + Send + 'static,
    ) -> PyResult<Job> {
        self.submit(&self.lookups, |workers| &workers.lookups, work)
    }

    /// Begins a job on the session of loads.
    pub(crate) fn start_load(
        &self,
        work: impl FnOnce(&NodeSession) -> usize + Send + 'static,
    ) -> PyResult<Job> {
        self.submit(&self.loads, |workers| &workers.loads, work)
    }

    /// Begins a job on the session of loads that tells which layers have come.
    pub(crate) fn start_layers(
        &self,
        work: impl FnOnce(&NodeSession, &LayerReporter) -> usize + Send + 'static,
    ) -> PyResult<Job> {
        let session = Arc::clone(&self.loads);
        let workers = self.workers.lock();
        let workers = workers.as_ref().ok_or_else(closed)?;
        Ok(workers.layers.submit_layers(move |reporter| work(&session, reporter)))
    }

    /// Begins a job on the session of saves.
    pub(crate) fn start_save(
        &self,
        work: impl FnOnce(&NodeSession) -> usize + Send + 'static,
    ) -> PyResult<Job> {
        self.submit(&self.saves, |workers| &workers.saves, work)
    }

    /// Waits for jobs that run, cancels those that wait, and detaches.
    pub(crate) fn end(&self) {
        let workers = self.workers.lock().take();
        drop(workers);
        self.lookups.end();
        self.loads.end();
        self.saves.end();
        self.manager.close();
    }

    fn submit(
        &self,
        session: &Arc<NodeSession>,
        workers_of: impl FnOnce(&SessionWorkers) -> &Workers,
        work: impl FnOnce(&NodeSession) -> usize + Send + 'static,
    ) -> PyResult<Job> {
        let session = Arc::clone(session);
        let workers = self.workers.lock();
        let workers = workers_of(workers.as_ref().ok_or_else(closed)?);
        Ok(workers.submit(move || work(&session)))
    }
}

/// What a call of the daemon gives; 0 where there is none, or it fails.
pub(crate) fn run(session: &NodeSession, ask: impl FnMut(&NodeClient) -> kvik_node::Result<usize>) -> usize {
    session.run(ask).unwrap_or(0)
}

fn closed() -> PyErr {
    StoreGoneError::new_err("the store is closed")
}
