//! The daemon's side towards other nodes.

mod discovery;
mod hints;
mod listing;
mod source;

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use kvik_tier::TierError;
use kvik_tier::peer::{PeerAdmission, PeerSource, serve_peer};
use parking_lot::RwLock;

use crate::acceptor::{Acceptor, ConnectionCounts, ConnectionLimits, Service};
use crate::error::Result;
use crate::tenant::Tenant;
pub(crate) use discovery::Discovery;
pub(crate) use hints::IndexHints;
pub(crate) use listing::{Listed, Listing};
use source::StoreSource;

/// Connections at a time: those of a hundred nodes.
const LIMITS: ConnectionLimits = ConnectionLimits { n_connections: 1024, n_by_address: 64 };

/// Other nodes that read from the stores of this one; dropping it ends all connections and joins the threads.
#[derive(Debug)]
pub(crate) struct PeerServer {
    acceptor: Acceptor<PeerService>,
}

#[derive(Debug)]
struct PeerService {
    admission: PeerAdmission,
    /// By the names of tenants; none during a pause.
    sources: RwLock<HashMap<String, Arc<StoreSource>>>,
}

/// What happened with peers since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerStats {
    /// Connections of peers now.
    pub n_connections: u64,
    /// Connections that were refused: too many, a wrong token, wrong frames.
    pub n_refused: u64,
}

impl PeerServer {
    /// Serves the stores of the tenants at `listener` until it is dropped.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub(crate) fn start(listener: TcpListener, tenants: &[Tenant], admission: PeerAdmission) -> Result<Self> {
        let service = PeerService { admission, sources: RwLock::new(sources_of(tenants)) };
        Ok(Self { acceptor: Acceptor::start(listener, service, LIMITS)? })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    pub(crate) fn stats(&self) -> PeerStats {
        let ConnectionCounts { n_connections, n_refused } = self.acceptor.counts();
        PeerStats { n_connections, n_refused }
    }

    /// Ends all connections and lets go of the stores; new connections wait until [`Self::resume`].
    pub(crate) fn pause(&self) {
        self.acceptor.service().sources.write().clear();
        self.acceptor.pause();
    }

    /// Serves the stores of the tenants again.
    pub(crate) fn resume(&self, tenants: &[Tenant]) {
        *self.acceptor.service().sources.write() = sources_of(tenants);
        self.acceptor.resume();
    }

    /// Ends all connections and joins the threads.
    pub(crate) fn end(&self) {
        self.acceptor.end();
    }
}

impl Service for PeerService {
    const CLIENT: &'static str = "peer of the store";
    const THREAD: &'static str = "kvik-peer";

    fn serve(&self, stream: TcpStream) -> Result<(), TierError> {
        let source_of = |tenant: &str| {
            self.sources.read().get(tenant).map(|source| Arc::clone(source) as Arc<dyn PeerSource>)
        };
        serve_peer(stream, &self.admission, source_of)
    }

    /// Gives back leases that have ended where no request does it.
    fn tick(&self) {
        for source in self.sources.read().values() {
            source.end_leases(Instant::now());
        }
    }
}

fn sources_of(tenants: &[Tenant]) -> HashMap<String, Arc<StoreSource>> {
    let source = |tenant: &Tenant| (tenant.name.clone(), Arc::new(StoreSource::new(tenant.store.clone())));
    tenants.iter().map(source).collect()
}
