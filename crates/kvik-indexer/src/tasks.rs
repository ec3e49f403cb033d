//! Background tasks of an index.

use std::sync::Arc;
use std::time::Duration;

use kvik_runtime::shutdown::Shutdown;

use crate::catalog::Catalog;
use crate::config::IndexConfig;
use crate::error::Result;
use crate::feed::Feeds;
use crate::hub::fetch_all;
use crate::sources::engine::EngineSource;
use crate::sources::kubernetes::KubernetesSource;
use crate::storage::{MemoryStorage, Storage};

/// How long a worker that only a snapshot knows is kept without an event. Sources try again after 30 s at
/// most; but an engine that is idle says nothing, and without a replay port what it holds would not be learned again.
const LONGEST_UNHEARD: Duration = Duration::from_mins(10);

/// Starts everything that a configuration asks for.
pub(crate) fn start(
    storage: &Storage,
    catalog: &Arc<Catalog>,
    config: &IndexConfig,
    shutdown: &Shutdown,
) -> Result<()> {
    if let Storage::Memory(storage) = storage {
        for (model, keys) in storage.kept() {
            // A damaged or edited list costs the books that it names, not the start.
            let opened = catalog.open_model(&model).and_then(|books| books.open(&keys));
            if let Err(error) = opened {
                storage.skip(&model, &error);
            }
        }
        if config.snapshot_folder.is_some() {
            let interval = Duration::from_secs(config.snapshot_interval_s);
            shutdown.spawn(keep(Arc::clone(storage), interval, shutdown.clone()));
            shutdown.spawn(forget_unheard(Arc::clone(catalog), shutdown.clone()));
        }
    }
    if !config.tokenizers.hub.models.is_empty() {
        shutdown.spawn(fetch_all(config.tokenizers.hub.clone(), shutdown.clone()));
    }
    let feeds = Arc::clone(catalog) as Arc<dyn Feeds>;
    let engines = config.engines.iter().map(|engine| EngineSource::start(engine, Arc::clone(&feeds)));
    let engines = engines.collect::<Result<Vec<_>>>()?;
    let services = config.kubernetes.iter();
    let services = services.map(|service| KubernetesSource::start(service.clone(), Arc::clone(&feeds)));
    let services = services.collect::<Result<Vec<_>>>()?;
    let stopping = shutdown.clone();
    shutdown.spawn(async move {
        stopping.stopping().await;
        for engine in engines {
            engine.stop().await;
        }
        for service in services {
            service.stop().await;
        }
    });
    Ok(())
}

/// Removes workers that left while this process was down: no source will announce it. It repeats, because a book that
/// the folder's list has lost is read when its first event arrives.
async fn forget_unheard(catalog: Arc<Catalog>, shutdown: Shutdown) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(LONGEST_UNHEARD) => {}
            () = shutdown.stopping() => return,
        }
        for books in catalog.all() {
            let model = books.model();
            for book in books.all() {
                match book.forget_unheard().await {
                    Ok(0) => {}
                    Ok(n_sources) => {
                        tracing::info!(%model, n_sources, "forgot workers that only a snapshot knew");
                    }
                    Err(error) => tracing::warn!(%model, %error, "failed to forget workers of a snapshot"),
                }
            }
        }
    }
}

/// Writes the books to their folder from time to time, and once more at the end.
async fn keep(storage: Arc<MemoryStorage>, interval: Duration, shutdown: Shutdown) {
    loop {
        let is_last = tokio::select! {
            () = tokio::time::sleep(interval) => false,
            () = shutdown.stopping() => true,
        };
        let saved = Arc::clone(&storage);
        match tokio::task::spawn_blocking(move || saved.save()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "failed to keep the index"),
            Err(error) => tracing::error!(%error, "failed to keep the index"),
        }
        if is_last {
            return;
        }
    }
}
