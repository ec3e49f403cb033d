//! Finds engines by the `EndpointSlices` of a service and listens to each.
//!
//! The slices are listed once and then watched: `GET /apis/discovery.k8s.io/v1/namespaces/{ns}/endpointslices`, then
//! the same with `watch=1` from the version of the list on, which answers with a JSON object a line for each change.
//! The server ends a watch after some minutes and it resumes from the last version, which bookmarks keep
//! young; a version that the server no longer knows (410) asks for a new list. While the API server is away, all
//! engines stay as they are.
//!
//! An engine is listened to from when it first serves until it is no longer among the endpoints, or ends
//! and does not serve; being not ready for a while changes nothing. What it held is then forgotten.
//!
//! Objects of other kinds are followed by the same requests ([`Api`]).
//!
//! Needs: `get`, `list` and `watch` on `endpointslices` in `discovery.k8s.io`, in the engines' namespace.

mod api;
mod config;
mod discovery;
mod slices;

use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use api::{Api, ApiAccess, ApiError, Change, ObjectMeta, Resource, Watch};
pub use config::{KubernetesConfig, PortRef, SERVICE_ACCOUNT, WorkerNaming, is_dns_name};
use discovery::Discovery;

use crate::error::Result;
use crate::feed::Feeds;

/// A task that finds engines and listens to them; it ends with this handle.
#[derive(Debug)]
pub struct KubernetesSource {
    /// Ends the task when it is dropped.
    guard: DropGuard,
    task: JoinHandle<()>,
}

impl KubernetesSource {
    /// Begins to look for engines. An API server that is not there yet is waited for.
    ///
    /// # Errors
    /// If the configuration cannot be used.
    pub fn start(config: KubernetesConfig, feeds: Arc<dyn Feeds>) -> Result<Self> {
        config.check()?;
        let token = CancellationToken::new();
        let stopped = token.clone();
        let mut discovery = Discovery::new(config, feeds);
        let task = tokio::spawn(async move {
            stopped.run_until_cancelled(discovery.run()).await;
            discovery.stop().await;
        });
        Ok(Self { guard: token.drop_guard(), task })
    }

    /// Ends listening to all engines; what is known of them stays.
    pub async fn stop(self) {
        drop(self.guard);
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the discovery of engines failed");
        }
    }
}
