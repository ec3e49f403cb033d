//! Listens to the KV events of the engines of a pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvik_indexer::Indexer;
use kvik_indexer::feed::Feeds;
use kvik_indexer::sources::engine::{EngineConfig, EngineSource};

use super::objects::Engine;

/// A source for each engine that publishes.
pub(super) struct Listeners {
    /// `None` where there is no index.
    feeds: Option<Arc<dyn Feeds>>,
    /// By the address of the engine.
    sources: BTreeMap<String, (EngineConfig, EngineSource)>,
}

impl Listeners {
    pub(super) fn new(indexer: Option<&Arc<Indexer>>) -> Self {
        let feeds = indexer.map(|indexer| Arc::clone(indexer.catalog()) as Arc<dyn Feeds>);
        Self { feeds, sources: BTreeMap::new() }
    }

    /// Listens to these engines and no others; what an engine held that is gone is forgotten.
    pub(super) async fn follow(&mut self, engines: &[&Engine]) {
        let Some(feeds) = &self.feeds else { return };
        let wanted: BTreeMap<&String, &EngineConfig> = engines
            .iter()
            .filter_map(|engine| Some((&engine.backend.url, engine.events.as_ref()?)))
            .collect();
        let is_gone = |(url, (config, _)): &(&String, &(EngineConfig, EngineSource))| {
            wanted.get(url).is_none_or(|wanted| *wanted != config)
        };
        let gone: Vec<String> = self.sources.iter().filter(is_gone).map(|(url, _)| url.clone()).collect();
        for url in gone {
            if let Some((_, source)) = self.sources.remove(&url) {
                source.remove().await;
            }
        }
        for (url, config) in wanted {
            if self.sources.contains_key(url) {
                continue;
            }
            match EngineSource::start(config, Arc::clone(feeds)) {
                Ok(source) => {
                    self.sources.insert(url.clone(), (config.clone(), source));
                }
                Err(error) => tracing::warn!(%error, url, "a pod of the pool cannot be listened to"),
            }
        }
    }

    /// Ends listening; what is known of the engines stays.
    pub(super) async fn stop(&mut self) {
        for (_, (_, source)) in std::mem::take(&mut self.sources) {
            source.stop().await;
        }
    }
}
