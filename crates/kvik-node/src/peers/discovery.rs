//! Which nodes there are: the addresses of the names in the configuration and on the coordinators' list, looked up
//! again and again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use kvik_runtime::shutdown::Shutdown;
use kvik_tier::{PeerAddress, PeerTier};
use tokio::sync::watch;

use super::{IndexHints, Listed};

/// How often names are looked up. A node that comes is asked after so long; one that goes is left alone at once,
/// because it does not answer.
const INTERVAL: Duration = Duration::from_secs(5);

/// Keeps the peers of tiers up to date.
#[derive(Debug)]
pub(crate) struct Discovery {
    names: Vec<PeerAddress>,
    /// What the coordinators list; `None` where none is asked.
    listed: Option<watch::Receiver<Listed>>,
    /// What receives which workers are on which of the nodes; `None` where no index is asked.
    hints: Option<Arc<IndexHints>>,
    /// Where this node listens for peers.
    own: Option<SocketAddr>,
    /// Whether addresses are taken for those of the names: with TLS a certificate is for the name.
    keeps_names: bool,
    tiers: Vec<Arc<PeerTier>>,
}

impl Discovery {
    pub(crate) fn new(
        names: Vec<PeerAddress>,
        (listed, hints): (Option<watch::Receiver<Listed>>, Option<Arc<IndexHints>>),
        own: Option<SocketAddr>,
        keeps_names: bool,
        tiers: Vec<Arc<PeerTier>>,
    ) -> Self {
        Self { names, listed, hints, own, keeps_names, tiers }
    }

    /// Looks the names up once, then again and again until the service ends.
    pub(crate) async fn start(mut self, shutdown: &Shutdown) {
        self.look_up().await;
        let draining = shutdown.clone();
        shutdown.spawn(async move {
            loop {
                tokio::select! {
                    () = draining.draining() => return,
                    () = tokio::time::sleep(INTERVAL) => {}
                    () = self.list_changed() => {}
                }
                self.look_up().await;
            }
        });
    }

    /// Waits for another list; for ever where there will be none.
    async fn list_changed(&mut self) {
        if let Some(listed) = &mut self.listed
            && listed.changed().await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }

    async fn look_up(&self) {
        let listed = self.listed.as_ref().map(|listed| listed.borrow().clone()).unwrap_or_default();
        let mut found: BTreeMap<&PeerAddress, Vec<PeerAddress>> = BTreeMap::new();
        for name in self.names.iter().chain(&listed.nodes) {
            if !found.contains_key(name) {
                found.insert(name, self.peers_of(name).await);
            }
        }
        let peers: BTreeSet<PeerAddress> = found.values().flatten().cloned().collect();
        let peers: Vec<PeerAddress> = peers.into_iter().collect();
        for tier in &self.tiers {
            tier.set_peers(&peers);
        }
        if let Some(hints) = &self.hints {
            let nodes = listed.workers.iter().filter_map(|(worker, name)| {
                let peers = found.get(name).filter(|peers| !peers.is_empty())?;
                Some((worker.clone(), peers.clone()))
            });
            hints.set_nodes(nodes.collect());
        }
    }

    /// The peers that a name stands for.
    async fn peers_of(&self, name: &PeerAddress) -> Vec<PeerAddress> {
        let found = tokio::net::lookup_host((name.host.as_str(), name.port)).await;
        let addresses: Vec<SocketAddr> = match found {
            Ok(addresses) => addresses.collect(),
            Err(error) => {
                tracing::debug!(peer = %name, %error, "look up a peer of the store");
                Vec::new()
            }
        };
        if self.keeps_names || addresses.is_empty() {
            // A name without an address may get one, and is asked as soon as it has.
            let is_own = addresses.iter().any(|address| self.is_own(*address));
            return if is_own { Vec::new() } else { vec![name.clone()] };
        }
        let others = addresses.into_iter().filter(|address| !self.is_own(*address));
        others.map(|address| PeerAddress { host: address.ip().to_string(), port: address.port() }).collect()
    }

    /// Whether this node listens there: the port is its own, and the address is one of this machine, which is so where
    /// a socket can be bound to it.
    fn is_own(&self, address: SocketAddr) -> bool {
        let Some(own) = self.own.filter(|own| own.port() == address.port()) else { return false };
        own.ip() == address.ip() || (own.ip().is_unspecified() && UdpSocket::bind((address.ip(), 0)).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use kvik_tier::PeerOptions;

    use super::*;

    #[tokio::test]
    async fn names_stand_for_their_addresses_and_this_node_is_left_out() {
        let tier = Arc::new(PeerTier::open(PeerOptions::default()).unwrap());
        let names: Vec<PeerAddress> =
            ["127.0.0.1:9106", "127.0.0.2:9106", "127.0.0.1:9107", "[::1]:9106", "no.such.name.invalid:9106"]
                .iter()
                .map(|text| text.parse().unwrap())
                .collect();
        let own = Some("127.0.0.1:9106".parse().unwrap());
        let discovery = Discovery::new(names.clone(), (None, None), own, false, vec![Arc::clone(&tier)]);
        discovery.look_up().await;
        let found = |tier: &PeerTier| tier.peers().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            found(&tier),
            ["127.0.0.1:9107", "127.0.0.2:9106", "[::1]:9106", "no.such.name.invalid:9106"]
        );
        let own = Some("0.0.0.0:9106".parse().unwrap());
        Discovery::new(names[..3].to_vec(), (None, None), own, false, vec![Arc::clone(&tier)])
            .look_up()
            .await;
        assert_eq!(found(&tier), ["127.0.0.1:9107"], "all addresses of loopback are this machine's");
        let (_sender, listed) = watch::channel(Listed { nodes: names[1..3].to_vec(), ..Listed::default() });
        let own = Some("127.0.0.2:9106".parse().unwrap());
        Discovery::new(names[..1].to_vec(), (Some(listed), None), own, false, vec![Arc::clone(&tier)])
            .look_up()
            .await;
        assert_eq!(found(&tier), ["127.0.0.1:9106", "127.0.0.1:9107"], "names and the list add up");
    }
}
