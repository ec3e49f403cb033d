//! The daemon's side towards clients of LMCache's plain remote protocol.
//!
//! `values.rs` is where their values are, `record.rs` what is stored of a value beside its bytes; the protocol is
//! `kvik-tier/src/lm/`.

mod record;
mod values;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use kvik_tier::{TierError, serve_lm};
use parking_lot::RwLock;

use crate::acceptor::{Acceptor, ConnectionCounts, ConnectionLimits, Service};
use crate::error::{NodeError, Result};
use crate::tenant::Tenant;
use values::StoreValues;

/// An engine has a connection for each of its ranks.
const LIMITS: ConnectionLimits = ConnectionLimits { n_connections: 1024, n_by_address: 256 };

/// Serves values of LMCache's clients from the store of one tenant; dropping it ends all connections and joins the threads.
#[derive(Debug)]
pub(crate) struct LmServer {
    acceptor: Acceptor<LmService>,
    tenant: String,
}

#[derive(Debug)]
struct LmService {
    /// None during a pause.
    values: RwLock<Option<Arc<StoreValues>>>,
}

impl LmServer {
    /// Serves the store of the tenant of that name at `listener`.
    ///
    /// # Errors
    /// If there is no such tenant, or the operating system refuses.
    pub(crate) fn start(listener: TcpListener, tenant: &str, tenants: &[Tenant]) -> Result<Self> {
        let values = values_of(tenant, tenants)?;
        let service = LmService { values: RwLock::new(Some(Arc::new(values))) };
        Ok(Self { acceptor: Acceptor::start(listener, service, LIMITS)?, tenant: tenant.to_owned() })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.acceptor.address()
    }

    /// Connections of clients, now and refused.
    pub(crate) fn counts(&self) -> ConnectionCounts {
        self.acceptor.counts()
    }

    /// Ends all connections and lets go of the store; new connections wait until [`Self::resume`].
    pub(crate) fn pause(&self) {
        *self.acceptor.service().values.write() = None;
        self.acceptor.pause();
    }

    /// Serves the store of the tenant again.
    pub(crate) fn resume(&self, tenants: &[Tenant]) {
        match values_of(&self.tenant, tenants) {
            Ok(values) => *self.acceptor.service().values.write() = Some(Arc::new(values)),
            Err(error) => tracing::error!(%error, "clients of LMCache are not served"),
        }
        self.acceptor.resume();
    }

    /// Ends all connections and joins the threads.
    pub(crate) fn end(&self) {
        self.acceptor.end();
    }
}

impl Service for LmService {
    const CLIENT: &'static str = "client of LMCache";
    const THREAD: &'static str = "kvik-lm";

    fn serve(&self, stream: TcpStream) -> Result<(), TierError> {
        // A clone: the lock is not held while a client is served.
        let values = self.values.read().clone();
        match values {
            Some(values) => serve_lm(stream, &*values),
            None => Ok(()),
        }
    }
}

fn values_of(name: &str, tenants: &[Tenant]) -> Result<StoreValues> {
    let tenant = tenants.iter().find(|tenant| tenant.name == name).ok_or_else(|| {
        let names: Vec<&str> = tenants.iter().map(|tenant| tenant.name.as_str()).collect();
        NodeError::invalid("lm.tenant", &name, format!("a tenant: {}", names.join(", ")))
    })?;
    StoreValues::try_new(name, tenant.store.clone())
}
