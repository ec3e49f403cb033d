//! Keeps a source for each engine that the API server knows.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::api::{Api, ApiError, Change, Resource};
use super::config::KubernetesConfig;
use super::slices::{EndpointSlice, Located};
use crate::feed::Feeds;
use crate::sources::engine::EngineSource;
use crate::sources::pause::Pauses;

/// A server that ends watches earlier is asked no more often than this.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);

/// Follows the slices of a service.
pub(super) struct Discovery {
    config: KubernetesConfig,
    feeds: Arc<dyn Feeds>,
    api: Api,
    /// The slices.
    resource: Resource,
    /// By name.
    slices: HashMap<String, EndpointSlice>,
    /// By the name of the worker.
    engines: BTreeMap<String, Engine>,
}

/// An engine that is listened to.
struct Engine {
    located: Located,
    /// One for each rank.
    sources: Vec<EngineSource>,
}

impl Discovery {
    pub(super) fn new(config: KubernetesConfig, feeds: Arc<dyn Feeds>) -> Self {
        let (api, resource) = (Api::new(config.access()), config.resource());
        Self { config, feeds, api, resource, slices: HashMap::new(), engines: BTreeMap::new() }
    }

    /// Follows without end. An API server that is away changes nothing.
    pub(super) async fn run(&mut self) {
        let longest = Duration::from_millis(self.config.retry_max_ms);
        let mut pauses = Pauses::new(Duration::from_millis(self.config.retry_min_ms), longest);
        loop {
            let begun = Instant::now();
            match self.follow().await {
                Err(ApiError::Gone) => info!("the list of engines is too old; asking anew"),
                Err(ApiError::Failed(error)) => warn!(%error, "cannot follow the engines in Kubernetes"),
                Ok(never) => match never {},
            }
            if begun.elapsed() >= longest {
                pauses.reset();
            }
            sleep(pauses.after_failure()).await;
        }
    }

    /// Ends listening; what is known of the engines stays.
    pub(super) async fn stop(&mut self) {
        for (_, engine) in std::mem::take(&mut self.engines) {
            for source in engine.sources {
                source.stop().await;
            }
        }
    }

    /// Lists, and then watches for as long as that goes well.
    async fn follow(&mut self) -> Result<std::convert::Infallible, ApiError> {
        let (slices, mut version) = self.api.list::<EndpointSlice>(&self.resource).await?;
        self.slices = slices.into_iter().map(|slice| (slice.metadata.name.clone(), slice)).collect();
        self.reconcile().await;
        loop {
            let begun = Instant::now();
            let mut watch = self.api.watch::<EndpointSlice>(&self.resource, &version).await?;
            while let Some(change) = watch.next().await? {
                let meta = match change {
                    Change::Put(slice) => {
                        let meta = slice.metadata.clone();
                        self.slices.insert(meta.name.clone(), slice);
                        meta
                    }
                    Change::Delete(slice) => {
                        self.slices.remove(&slice.metadata.name);
                        slice.metadata
                    }
                    Change::Bookmark(meta) => {
                        version = meta.resource_version;
                        continue;
                    }
                };
                version = meta.resource_version;
                self.reconcile().await;
            }
            sleep(SHORTEST_WATCH.saturating_sub(begun.elapsed())).await;
        }
    }

    /// Starts and ends sources until they are those of the slices.
    async fn reconcile(&mut self) {
        let mut wanted = BTreeMap::new();
        for slice in self.slices.values() {
            slice.locate(&self.config, &mut wanted);
        }
        let is_where_it_was = |engine: &Engine, found: &Located| {
            (&engine.located.address, engine.located.port, engine.located.replay_port)
                == (&found.address, found.port, found.replay_port)
        };
        // What has moved has begun anew.
        let gone: Vec<String> = self
            .engines
            .iter()
            .filter(|(worker, engine)| {
                wanted.get(*worker).is_none_or(|found| !is_where_it_was(engine, found))
            })
            .map(|(worker, _)| worker.clone())
            .collect();
        for worker in gone {
            let Some(engine) = self.engines.remove(&worker) else { continue };
            info!(worker, address = engine.located.address, "an engine is gone");
            for source in engine.sources {
                source.remove().await;
            }
        }
        let n_wanted = wanted.len();
        for (worker, located) in wanted {
            // One that does not answer yet is waited for by Kubernetes, not here.
            if !located.is_serving || self.engines.contains_key(&worker) {
                continue;
            }
            if self.engines.len() >= self.config.max_engines {
                warn!(
                    n_wanted,
                    max_engines = self.config.max_engines,
                    "more engines than may be listened to"
                );
                break;
            }
            self.start(worker, located);
        }
        metrics::gauge!("kvik_index_discovered_engines").set(self.engines.len() as f64);
    }

    fn start(&mut self, worker: String, located: Located) {
        info!(worker, address = located.address, "an engine was found");
        let mut sources = Vec::new();
        for rank in 0..self.config.n_ranks {
            let Some((endpoint, replay_endpoint)) = located.endpoints(rank) else { break };
            let config = self.config.engine(&worker, rank, endpoint, replay_endpoint);
            match EngineSource::start(&config, Arc::clone(&self.feeds)) {
                Ok(source) => sources.push(source),
                Err(error) => warn!(%error, worker, "an engine that was found cannot be listened to"),
            }
        }
        self.engines.insert(worker, Engine { located, sources });
    }
}

impl std::fmt::Debug for Discovery {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Discovery").field("config", &self.config).finish_non_exhaustive()
    }
}
