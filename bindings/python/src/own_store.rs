//! A store in this process.
//!
//! Its engine uses it as one of a daemon, over a socket in a folder that only this user can enter; both end with it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use kvik_memory::SocketAddress;
use kvik_node::{NodeOptions, NodeServer, StoreConfig, open_store};
use pyo3::prelude::*;

use crate::error::{KvikError, exception_of, invalid};

/// The socket, in a folder of its own.
const SOCKET_NAME: &str = "store.sock";

/// A store in this process, with a socket that only this user can reach.
#[derive(Debug)]
pub(crate) struct OwnStore {
    server: NodeServer,
    folder: tempfile::TempDir,
}

impl OwnStore {
    pub(crate) fn open(config: &StoreConfig) -> PyResult<Self> {
        let plan = config.resolve().map_err(|error| exception_of(&error))?;
        let plan = plan.ok_or_else(|| invalid("ram", &config.ram, "more than 0"))?;
        let store = open_store(config, &plan, None).map_err(|error| exception_of(&error))?;
        let folder = tempfile::Builder::new()
            .prefix("kvik-store-")
            // As the socket demands, whatever the process' mask is.
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .map_err(|error| KvikError::new_err(format!("make a folder: {error}")))?;
        let options = NodeOptions::new(SocketAddress::Path(folder.path().join(SOCKET_NAME)), store);
        let server = NodeServer::start(options).map_err(|error| exception_of(&error))?;
        Ok(Self { server, folder })
    }

    /// Its socket.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join(SOCKET_NAME)
    }
}

impl Drop for OwnStore {
    fn drop(&mut self) {
        self.server.end();
    }
}
