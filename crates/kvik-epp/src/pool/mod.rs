//! The engines of an `InferencePool`: the ports of its ready pods.
//!
//! Pool and pods are listed once and then watched; a version that the API server no longer knows asks for a new list. While the API server
//! is away all engines stay as they are. A pool that is not there has no engines.
//!
//! Needs: `list` and `watch` on `inferencepools` in `inference.networking.k8s.io` and on `pods`, in the pool's namespace.

mod listeners;
mod objects;

use std::collections::BTreeMap;
use std::time::Duration;

use kvik_gateway::{BackendConfig, Gateway};
use kvik_indexer::sources::kubernetes::{Api, ApiError, Change, Resource, Watch};
use kvik_indexer::sources::pause::Pauses;
use kvik_runtime::shutdown::Shutdown;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use self::listeners::Listeners;
use self::objects::{Engine, InferencePool, Pod};
use crate::config::InferencePoolConfig;
use crate::metrics::{POOL_ENDPOINTS, POOL_SYNCED};

/// A server that ends watches earlier is asked no more often than this.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);

/// Follows a pool.
struct Follower {
    config: InferencePoolConfig,
    gateway: Gateway,
    synced: watch::Sender<bool>,
    api: Api,
    pool: Option<InferencePool>,
    /// By name.
    pods: BTreeMap<String, Pod>,
    listeners: Listeners,
}

/// A watch that goes on when the server ends it.
struct Followed<T> {
    resource: Resource,
    version: String,
    watch: Watch<T>,
    begun: Instant,
}

/// Keeps the engines of the gateway equal to those of the pool until everything stops.
pub(crate) async fn run(
    config: InferencePoolConfig,
    gateway: Gateway,
    synced: watch::Sender<bool>,
    shutdown: Shutdown,
) {
    let mut follower = Follower {
        api: Api::new(config.access()),
        listeners: Listeners::new(gateway.indexer()),
        config,
        gateway,
        synced,
        pool: None,
        pods: BTreeMap::new(),
    };
    tokio::select! {
        () = follower.run() => {}
        () = shutdown.stopping() => {}
    }
    follower.listeners.stop().await;
}

impl Follower {
    /// Follows without end.
    async fn run(&mut self) {
        let longest = Duration::from_millis(self.config.retry_max_ms);
        let mut pauses = Pauses::new(Duration::from_millis(self.config.retry_min_ms), longest);
        loop {
            let begun = Instant::now();
            match self.follow().await {
                Ok(()) => {
                    pauses.reset();
                    continue;
                }
                Err(ApiError::Gone) => tracing::info!("the list of pods is too old; asking anew"),
                Err(ApiError::Failed(error)) => tracing::warn!(%error, "cannot follow the InferencePool"),
            }
            if begun.elapsed() >= longest {
                pauses.reset();
            }
            sleep(pauses.after_failure()).await;
        }
    }

    /// Lists, and then watches for as long as that goes well; ends well when other pods are to be listed.
    async fn follow(&mut self) -> Result<(), ApiError> {
        let (namespace, name) = self.config.namespace_and_name().unwrap_or_default();
        let path = format!("/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools");
        let pools = Resource::with_name(path, name);
        let pods_path = format!("/api/v1/namespaces/{namespace}/pods");
        let (found, version) = self.api.list::<InferencePool>(&pools).await?;
        let pool = found.into_iter().next();
        if pool.is_none() {
            tracing::warn!(pool = self.config.name, "there is no such InferencePool");
        }
        let selector = pool.as_ref().and_then(InferencePool::selector);
        self.pool = pool;
        let mut pod_changes = None;
        self.pods.clear();
        if let Some(selector) = &selector {
            let resource = Resource::with_labels(pods_path, selector);
            let (pods, version) = self.api.list::<Pod>(&resource).await?;
            self.pods = pods.into_iter().map(|pod| (pod.metadata.name.clone(), pod)).collect();
            pod_changes = Some(Followed::<Pod>::begin(&mut self.api, resource, version).await?);
        }
        let mut pool_changes = Followed::<InferencePool>::begin(&mut self.api, pools, version).await?;
        self.publish().await;
        loop {
            let next_pod = async {
                match &mut pod_changes {
                    Some(changes) => changes.watch.next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                change = pool_changes.watch.next() => match change? {
                    None => pool_changes.go_on(&mut self.api).await?,
                    Some(Change::Bookmark(meta)) => pool_changes.version = meta.resource_version,
                    Some(Change::Delete(_)) => {
                        self.pool = None;
                        self.pods.clear();
                        self.publish().await;
                        return Ok(());
                    }
                    Some(Change::Put(pool)) => {
                        pool_changes.version.clone_from(&pool.metadata.resource_version);
                        let is_other = pool.selector() != selector;
                        self.pool = Some(pool);
                        if is_other {
                            return Ok(());
                        }
                        self.publish().await;
                    }
                },
                change = next_pod => {
                    let change = change?;
                    let Some(changes) = &mut pod_changes else { continue };
                    match change {
                        None => changes.go_on(&mut self.api).await?,
                        Some(Change::Bookmark(meta)) => changes.version = meta.resource_version,
                        Some(Change::Delete(pod)) => {
                            changes.version = pod.metadata.resource_version;
                            self.pods.remove(&pod.metadata.name);
                            self.publish().await;
                        }
                        Some(Change::Put(pod)) => {
                            changes.version.clone_from(&pod.metadata.resource_version);
                            self.pods.insert(pod.metadata.name.clone(), pod);
                            self.publish().await;
                        }
                    }
                }
            }
        }
    }

    /// Tells the gateway which engines there are, and listens to their events.
    async fn publish(&mut self) {
        let pool = self.pool.as_ref();
        let engines = pool.map(|pool| pool.engines(self.pods.values(), &self.config)).unwrap_or_default();
        let backends: Vec<BackendConfig> = engines.iter().map(|engine| engine.backend.clone()).collect();
        self.gateway.set_discovered(&backends);
        metrics::gauge!(POOL_ENDPOINTS).set(backends.len() as f64);
        metrics::gauge!(POOL_SYNCED).set(1.0);
        if !self.synced.send_replace(true) {
            let n_pods = self.pods.len();
            tracing::info!(
                pool = self.config.name,
                n_pods,
                n_endpoints = backends.len(),
                "the pool is known"
            );
        }
        let events: Vec<&Engine> = engines.iter().filter(|engine| engine.events.is_some()).collect();
        self.listeners.follow(&events).await;
    }
}

impl<T: DeserializeOwned> Followed<T> {
    async fn begin(api: &mut Api, resource: Resource, version: String) -> Result<Self, ApiError> {
        let watch = api.watch(&resource, &version).await?;
        Ok(Self { resource, version, watch, begun: Instant::now() })
    }

    /// Watches on from the last version.
    async fn go_on(&mut self, api: &mut Api) -> Result<(), ApiError> {
        sleep(SHORTEST_WATCH.saturating_sub(self.begun.elapsed())).await;
        self.watch = api.watch(&self.resource, &self.version).await?;
        self.begun = Instant::now();
        Ok(())
    }
}
