//! The daemon's own settings.

use std::path::{Path, PathBuf};

use kvik_memory::SocketAddress;
use kvik_runtime::secret::Secret;
use kvik_store::Store;
use serde::{Deserialize, Serialize};

use super::{StoreConfig, check};
use crate::error::{NodeError, Result};
use crate::tenant::{ClientToken, Tenant};
use crate::tiers::open_store;

/// Everything that can be configured of a store daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DaemonConfig {
    /// Socket at which engines attach, in a folder that only this user can enter; the folder is made if it is missing.
    /// Default: `/run/kvik/store.sock`.
    pub socket: PathBuf,
    /// Engines that are attached at a time; more are refused. Default: 64.
    pub max_sessions: usize,
    /// Address for `/metrics` and `/health` over HTTP; port 0 takes a free one. Default: none.
    pub metrics: Option<String>,
    /// File with a token of at least 16 bytes that engines show when they attach. Default: none, every process of this
    /// user may attach.
    pub token_file: Option<PathBuf>,
    /// Where chunks are kept. With `tenants` these are the settings that a tenant does not have itself, and no tenant
    /// is without a name.
    pub tiers: StoreConfig,
    /// Tenants, which share no chunk and no memory. Default: none, all engines share everything.
    pub tenants: Vec<TenantConfig>,
    /// File to which is appended which engine attached, stored and read which chunks, one JSON object a line, with mode
    /// 0600 where it is new; it is opened again after it was renamed. Default: none.
    pub audit_log: Option<PathBuf>,
    /// Time for chunks to be written to lower tiers at the end. Default: 20 s.
    pub drain_grace_s: u64,
}

/// A tenant of a store daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Its name, which is part of the name of all its chunks.
    pub name: String,
    /// File with the token of its engines, at least 16 bytes.
    pub token_file: PathBuf,
    /// Memory for its chunks, such as `2GiB`.
    pub ram: String,
    /// Folder and size for its chunks on a local disk. Default: none.
    #[serde(default)]
    pub nvme: Option<String>,
    /// File with the secret that keys its digests and names. Default: that of `tiers`.
    #[serde(default)]
    pub digest_key_file: Option<PathBuf>,
    /// File with the keys that seal its chunks on disk and remote. Default: that of `tiers`.
    #[serde(default)]
    pub encryption_key_file: Option<PathBuf>,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            socket: PathBuf::from("/run/kvik/store.sock"),
            max_sessions: 64,
            metrics: None,
            token_file: None,
            tiers: StoreConfig::default(),
            tenants: Vec::new(),
            audit_log: None,
            drain_grace_s: 20,
        }
    }
}

impl DaemonConfig {
    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddress {
        SocketAddress::Path(self.socket.clone())
    }

    /// Opens the stores of all tenants.
    ///
    /// # Errors
    /// For the first value that is not allowed, and where a token, memory or a disk cannot be used.
    pub(crate) fn open_tenants(&self) -> Result<Vec<Tenant>> {
        let max_sessions = self.max_sessions;
        check((1..=4096).contains(&max_sessions), "max_sessions", &max_sessions, "1 to 4096")?;
        if self.tenants.is_empty() {
            let token = self.token_file.as_deref().map(read_token).transpose()?;
            let name = self.tiers.tenant.clone();
            return Ok(vec![Tenant { name, token, store: open(&self.tiers)? }]);
        }
        if let Some(file) = &self.token_file {
            let allowed = "none beside `tenants`, which have tokens of their own";
            return Err(NodeError::invalid("token_file", &file.display(), allowed));
        }
        self.tenants.iter().map(|tenant| self.open_tenant(tenant)).collect()
    }

    fn open_tenant(&self, tenant: &TenantConfig) -> Result<Tenant> {
        let TenantConfig { name, token_file, ram, nvme, digest_key_file, encryption_key_file } = tenant;
        check((1..=256).contains(&name.len()), "tenants.name", name.as_str(), "1 to 256 bytes")?;
        let tiers = StoreConfig {
            ram: ram.clone(),
            nvme: nvme.clone(),
            digest_key_file: digest_key_file.clone().or_else(|| self.tiers.digest_key_file.clone()),
            encryption_key_file: encryption_key_file
                .clone()
                .or_else(|| self.tiers.encryption_key_file.clone()),
            // Of memory and disk a tenant has only its own.
            local_cpu: None,
            max_local_cpu_size: None,
            local_disk: None,
            max_local_disk_size: None,
            ..self.tiers.clone()
        };
        let token = Some(read_token(token_file)?);
        Ok(Tenant { name: name.clone(), token, store: open(&tiers)? })
    }
}

fn open(tiers: &StoreConfig) -> Result<Store> {
    if let Some(socket) = &tiers.daemon {
        return Err(NodeError::invalid("tiers.daemon", &socket.display(), "none: this is the daemon"));
    }
    let Some(plan) = tiers.resolve()? else {
        return Err(NodeError::invalid(
            "ram",
            &tiers.ram,
            "a size such as 2GiB: a daemon has memory for chunks",
        ));
    };
    open_store(tiers, &plan)
}

/// Reads the token that is in a file.
pub(crate) fn read_token(file: &Path) -> Result<ClientToken> {
    let secret = Secret::read(file)?;
    ClientToken::try_new(secret.expose())
}
