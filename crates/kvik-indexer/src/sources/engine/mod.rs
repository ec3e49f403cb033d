//! Listens to one vLLM or SGLang over `ZeroMQ`.
//!
//! An engine publishes each of its steps as a message of three frames: topic, number (64 bits, big endian, from 0 in
//! each life of the engine) and a msgpack batch. What a slow or late listener missed it has in a buffer of 10 000
//! steps, and answers on a second port: a DEALER sends an empty frame and the number to begin with, and
//! receives an empty frame, the topic (not before vLLM 0.26), the number and the batch, up to one with the number -1.
//!
//! One task listens to one endpoint and hands each batch to the [`Feed`](crate::feed::Feed) of its worker, model
//! and rank before it reads the next message. So nothing piles up here: an engine that says more than the index takes
//! waits for it, by TCP and then in its own queue, which drops, and what was dropped is a gap.
//!
//! * **Gap.** The engine is asked for what is missing while live messages wait in a bounded backlog. What it no
//!   longer has, or sends in a form that cannot be read, is given up and the source stays unsure. An answer with a
//!   hole in the middle (the engine's socket drops beyond 1000 unsent answers) is asked for again from there.
//! * **Connection.** The first thing on a new connection is a replay from the batch that was taken last. If the engine has
//!   another batch under that number, or none, it was restarted: what it held is forgotten and
//!   all that it has is replayed. Without a replay port a restart shows when a live number falls.
//! * **Trouble.** Messages that cannot be read or that name a worker without a usable name are counted and passed over.
//!   A connection that breaks the protocol is closed and opened again, after pauses that grow.

mod config;
mod listener;
mod message;
mod metrics;
mod replay;
mod slots;

use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use config::{EngineConfig, EngineLimits};
use listener::Listener;
pub use metrics::EngineCounters;
use metrics::Tallies;

use crate::error::Result;
use crate::feed::Feeds;

/// A task that listens to one engine; it ends with this handle.
#[derive(Debug)]
pub struct EngineSource {
    /// Ends the task when it is dropped.
    guard: DropGuard,
    task: JoinHandle<Listener>,
    tallies: Arc<Tallies>,
}

impl EngineSource {
    /// Begins to listen. An engine that is not there yet is waited for.
    ///
    /// # Errors
    /// If the configuration cannot be used.
    pub fn start(config: &EngineConfig, feeds: Arc<dyn Feeds>) -> Result<Self> {
        let target = config.target()?;
        let source = config.worker.clone().unwrap_or_else(|| target.endpoint.to_string());
        let tallies = Arc::new(Tallies::new(&source, config.rank));
        let token = CancellationToken::new();
        let mut listener = Listener::new(target, feeds, Arc::clone(&tallies));
        let stopped = token.clone();
        let task = tokio::spawn(async move {
            stopped.run_until_cancelled(listener.run()).await;
            listener
        });
        Ok(Self { guard: token.drop_guard(), task, tallies })
    }

    /// What has been counted since the start.
    pub fn counters(&self) -> EngineCounters {
        self.tallies.counters()
    }

    /// Ends listening; what is known of the engine stays.
    pub async fn stop(self) {
        self.end().await;
    }

    /// Ends listening because the engine is gone: nothing of it is found any more.
    pub async fn remove(self) {
        if let Some(mut listener) = self.end().await {
            listener.close().await;
        }
    }

    async fn end(self) -> Option<Listener> {
        drop(self.guard);
        self.tallies.connected.set(0);
        self.task.await.inspect_err(|error| tracing::error!(%error, "an engine's listener failed")).ok()
    }
}
