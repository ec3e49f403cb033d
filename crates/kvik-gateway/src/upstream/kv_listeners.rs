//! Whose KV events are listened to: one task for each worker of the fleet.
//!
//! A task ends when its worker leaves the fleet or starts a new life; what the index knew of the worker goes
//! with it. Engines of other kinds are listened to by the indexer itself, as its configuration says.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvik_indexer::feed::Feeds;
use kvik_indexer::sources::worker::{FollowedWorker, follow_worker};
use kvik_indexer::{IndexConfig, Indexer};
use kvik_proto::client::WorkerClient;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::state::Shared;
use crate::upstream::backend::BackendKind;

/// A worker's life: another one is listened to anew.
type Life = (String, u64, String, String);

/// Keeps one listener for each worker until everything stops, and one for each worker of a configured store.
pub(crate) async fn run(shared: Arc<Shared>, indexer: Arc<Indexer>) {
    let stores: Vec<DropGuard> = followed_stores(&shared.view().config.index)
        .map(|followed| follow(&shared, &indexer, followed))
        .collect();
    let mut listeners: BTreeMap<Life, DropGuard> = BTreeMap::new();
    loop {
        let changed = shared.members_changed.notified();
        let wanted = wanted_lives(&shared);
        listeners.retain(|life, _| wanted.contains(life));
        for life in wanted {
            if listeners.contains_key(&life) {
                continue;
            }
            let (worker, _, address, model) = life.clone();
            let followed = FollowedWorker { address, worker, model, store_model: None };
            listeners.insert(life, follow(&shared, &indexer, followed));
        }
        tokio::select! {
            () = changed => {}
            () = shared.shutdown.stopping() => {
                drop(stores);
                return;
            }
        }
    }
}

/// Listens to a worker, or to the store of one, until the guard is dropped.
fn follow(shared: &Shared, indexer: &Indexer, followed: FollowedWorker) -> DropGuard {
    let token = CancellationToken::new();
    let left = token.clone();
    let feeds = Arc::clone(indexer.catalog()) as Arc<dyn Feeds>;
    let client = WorkerClient::new(shared.http.clone(), &followed.address);
    let client = client.with_header(shared.cluster_header.clone());
    let stopping = shared.shutdown.clone();
    shared.shutdown.spawn(async move {
        tokio::select! {
            biased;
            // A gateway that ends leaves the shared index as it is: the worker has not left.
            () = stopping.stopping() => {}
            () = follow_worker(client, followed, feeds, left) => {}
        }
    });
    token.drop_guard()
}

/// The workers of other kinds whose KV a store daemon keeps.
fn followed_stores(config: &IndexConfig) -> impl Iterator<Item = FollowedWorker> {
    config.stores.iter().flat_map(|store| {
        store.workers.iter().map(|worker| FollowedWorker {
            address: store.url.clone(),
            worker: worker.trim_end_matches('/').to_owned(),
            model: store.model.clone(),
            store_model: Some(store.store_model.clone().unwrap_or_else(|| store.model.clone())),
        })
    })
}

fn wanted_lives(shared: &Shared) -> Vec<Life> {
    let view = shared.view();
    let mut lives: Vec<Life> = view
        .fleet
        .groups
        .iter()
        .flat_map(|group| group.seats.iter().map(move |seat| (group, &seat.backend)))
        .filter(|(_, backend)| backend.kind == BackendKind::Worker)
        .map(|(group, backend)| {
            (backend.id.clone(), backend.epoch, backend.base.clone(), group.model.clone())
        })
        .collect();
    lives.sort();
    lives
}
