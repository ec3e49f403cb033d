//! The coordinators' list of store daemons: this node has itself listed, and learns of the others.
//!
//! The list only adds and takes away addresses. A node that is listed still has to prove the token of peers before
//! anything is read from it.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use kvik_proto::client::{ClientError, CoordinatorClient};
use kvik_proto::coordinator::DeregisterRequest;
use kvik_proto::stores::{RegisterStoreRequest, StoreHeartbeatRequest, StoreInfo, StoreList};
use kvik_runtime::shutdown::Shutdown;
use kvik_tier::PeerAddress;
use tokio::sync::watch;

/// Time between two looks at the list where this node is not on it; one that is on it looks with each heartbeat.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// Shortest time between two heartbeats, whatever a coordinator asks for.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// First pause after no coordinator answered, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Lists in a row that a node must be missing on before it is not asked any more: a coordinator that was started again
/// knows a node only after its next heartbeat.
const N_MISSING_LISTS: u32 = 5;

/// A node's place on the coordinators' list.
#[derive(Debug)]
pub(crate) struct Listing {
    clients: Vec<CoordinatorClient>,
    /// The one that answered last.
    client_idx: usize,
    /// What others receive of this node; `None` where no node reads from it.
    own: Option<StoreInfo>,
    is_listed: bool,
    interval: Duration,
    others: Others,
    found: watch::Sender<Listed>,
}

/// What the coordinators list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Listed {
    /// The other nodes.
    pub(crate) nodes: Vec<PeerAddress>,
    /// By worker: the node that it is on.
    pub(crate) workers: BTreeMap<String, PeerAddress>,
}

/// The nodes that were listed, and on how many lists since they have been missing.
#[derive(Debug, Default)]
struct Others {
    n_missing: BTreeMap<PeerAddress, u32>,
}

impl Listing {
    /// A place that is not taken yet, and where the nodes that are found go.
    pub(crate) fn new(
        clients: Vec<CoordinatorClient>,
        own: Option<StoreInfo>,
    ) -> (Self, watch::Receiver<Listed>) {
        let (found, receiver) = watch::channel(Listed::default());
        let listing = Self {
            clients,
            client_idx: 0,
            own,
            is_listed: false,
            interval: LOOK_INTERVAL,
            others: Others::default(),
            found,
        };
        (listing, receiver)
    }

    /// Stays on the list until the daemon drains, then leaves it.
    pub(crate) async fn run(mut self, shutdown: Shutdown) {
        tokio::select! {
            () = self.stay() => {}
            () = shutdown.draining() => {}
        }
        tokio::select! {
            () = self.leave() => {}
            () = shutdown.stopping() => {}
        }
    }

    async fn stay(&mut self) {
        let mut pause = FIRST_PAUSE;
        loop {
            if self.meet_any().await {
                pause = FIRST_PAUSE;
                tokio::time::sleep(self.interval).await;
            } else {
                // Random, because all nodes of a cluster may look for the same coordinator.
                let share = (RandomState::new().hash_one(0) >> 11) as f64 / (1_u64 << 53) as f64;
                tokio::time::sleep(pause.mul_f64(0.5 + share / 2.0)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    /// Meets the first coordinator that answers. False where none does: the nodes stay as they were.
    async fn meet_any(&mut self) -> bool {
        for attempt in 0..self.clients.len() {
            let client_idx = (self.client_idx + attempt) % self.clients.len();
            let client = self.clients[client_idx].clone();
            match self.meet(&client).await {
                Ok(()) => {
                    self.client_idx = client_idx;
                    return true;
                }
                Err(error) => {
                    tracing::warn!(coordinator = client.base(), %error, "failed to ask for the stores");
                }
            }
        }
        false
    }

    /// Stays on a coordinator's list, or gets onto it, and takes the list over.
    async fn meet(&mut self, client: &CoordinatorClient) -> Result<(), ClientError> {
        if let Some(own) = self.own.clone() {
            if self.is_listed {
                let request = StoreHeartbeatRequest { id: own.id.clone(), epoch: own.epoch };
                match client.store_heartbeat(&request).await {
                    Ok(_) => {}
                    Err(ClientError::Refused { status: 404, .. }) => self.is_listed = false,
                    Err(error) => return Err(error),
                }
            }
            if !self.is_listed {
                let answer = client.register_store(&RegisterStoreRequest { store: own.clone() }).await?;
                self.interval = Duration::from_millis(answer.heartbeat_interval_ms).max(SHORTEST_INTERVAL);
                self.is_listed = true;
                tracing::info!(store = own.id, coordinator = client.base(), "listed by a coordinator");
            }
        }
        let StoreList { stores: listed, workers, .. } = client.stores().await?;
        let is_other = |store: &StoreInfo| self.own.as_ref().is_none_or(|own| own.id != store.id);
        let addresses = listed.iter().filter(|store| is_other(store)).filter_map(address_of).collect();
        let workers = workers.into_iter().filter_map(|(worker, store)| Some((worker, store.parse().ok()?)));
        let listed = Listed { nodes: self.others.take(addresses), workers: workers.collect() };
        self.found.send_if_modified(|found| {
            let is_news = *found != listed;
            *found = listed;
            is_news
        });
        Ok(())
    }

    async fn leave(&self) {
        let Some(own) = self.own.as_ref().filter(|_| self.is_listed) else { return };
        let request = DeregisterRequest { id: own.id.clone(), epoch: own.epoch };
        for attempt in 0..self.clients.len() {
            let client = &self.clients[(self.client_idx + attempt) % self.clients.len()];
            match client.deregister_store(&request).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(coordinator = client.base(), %error, "failed to leave the list of stores");
                }
            }
        }
    }
}

impl Others {
    /// Takes a list over; returns the nodes that are asked from now on.
    fn take(&mut self, listed: Vec<PeerAddress>) -> Vec<PeerAddress> {
        for n_missing in self.n_missing.values_mut() {
            *n_missing += 1;
        }
        self.n_missing.extend(listed.into_iter().map(|address| (address, 0)));
        self.n_missing.retain(|_, n_missing| *n_missing < N_MISSING_LISTS);
        self.n_missing.keys().cloned().collect()
    }
}

fn address_of(store: &StoreInfo) -> Option<PeerAddress> {
    let parsed = store.address.parse();
    if parsed.is_err() {
        tracing::warn!(store = store.id, address = store.address, "passed over a store without an address");
    }
    parsed.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_stays_for_some_lists_that_it_is_missing_on() {
        let address = |text: &str| text.parse::<PeerAddress>().unwrap();
        let mut others = Others::default();
        let both = vec![address("a:1"), address("b:1")];
        assert_eq!(others.take(both.clone()), both);
        for _ in 1..N_MISSING_LISTS {
            assert_eq!(others.take(vec![address("a:1")]), both);
        }
        assert_eq!(others.take(vec![address("a:1")]), [address("a:1")]);
        for _ in 1..N_MISSING_LISTS {
            others.take(Vec::new());
        }
        assert_eq!(others.take(both.clone()), both, "one that comes back counts anew");
        assert_eq!(others.take(Vec::new()), both);
    }
}
