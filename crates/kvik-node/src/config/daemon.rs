//! The daemon's own settings.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvik_memory::SocketAddress;
use kvik_runtime::secret::Secret;
use kvik_store::Store;
use serde::{Deserialize, Serialize};

use super::field::{check, refuse};
use super::{LmConfig, PeerConfig, PeerPlan, StoreConfig, StorePlan, TierConfig};
use crate::bandwidth::{NodeBandwidth, TenantBandwidth};
use crate::error::{NodeError, Result};
use crate::peers::IndexHints;
use crate::take_over::{StoreParts, TenantTerms};
use crate::tenant::{ClientToken, Tenant};
use crate::tiers::{open_store_with, store_options, store_parts};

/// Everything that can be configured of a store daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DaemonConfig {
    /// Socket at which engines attach, in a folder that only this user can enter; the folder is made if it is missing.
    /// Default: `/run/kvik/store.sock`.
    pub socket: PathBuf,
    /// Engines that are attached at a time; more are refused. Default: 64.
    pub max_sessions: usize,
    /// Address for `/metrics`, `/health` and `/kv/events` over HTTP; port 0 takes a free one. The last tells an index which
    /// chunks there are: to callers with the cluster token, or on loopback where there is none. Default: none.
    pub metrics: Option<String>,
    /// File with a token of at least 16 bytes that engines show when they attach. Default: none, every process of this
    /// user may attach.
    pub token_file: Option<PathBuf>,
    /// Token that all services of a cluster share, of 16 characters or more, for calls to coordinators and the index,
    /// and for those of indexes that listen to this daemon.
    /// `KVIK_CLUSTER_TOKEN` in the environment sets it for every role. Default: none.
    pub cluster_token: Option<Secret>,
    /// File with the cluster token, less a line break at its end. Default: none.
    pub cluster_token_file: Option<PathBuf>,
    /// Where chunks are kept. With `tenants` these are the settings that a tenant does not have itself, and no tenant
    /// is without a name.
    pub tiers: StoreConfig,
    /// Tenants, which share no chunk and no memory. Default: none, all engines share everything.
    pub tenants: Vec<TenantConfig>,
    /// Other nodes, whose chunks are read and that read those of this one.
    pub peer: PeerConfig,
    /// Clients of LMCache's plain remote protocol, which keep their own chunks here.
    pub lm: LmConfig,
    /// File to which is appended which engine attached, stored and read which chunks, one JSON object a line, with mode
    /// 0600 where it is new; it is opened again after it was renamed. Default: none.
    pub audit_log: Option<PathBuf>,
    /// Time for chunks to be written to lower tiers at the end. Default: 20 s.
    pub drain_grace_s: u64,
    /// Time for engines to give back the chunks that they read or write when another daemon takes over. After it the
    /// other daemon is refused. Default: 10 s.
    pub take_over_grace_s: u64,
}

/// What other nodes are read through, by the names of tenants.
pub(crate) type PeerPlans = BTreeMap<String, PeerPlan>;

/// A tenant with all that its store is made of.
struct ConfiguredTenant {
    name: String,
    token: Option<ClientToken>,
    tiers: StoreConfig,
    share: u32,
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
    /// Its tiers below memory, as `tiers.tiers`, with disks of its own. Default: `nvme` and `tiers.remote`, or `tiers.tiers`
    /// if it has no disk.
    #[serde(default)]
    pub tiers: Vec<TierConfig>,
    /// Its weight among tenants that want more bytes of a tier than `bytes_per_s` lets through: 1 to 1000. Default: 1.
    #[serde(default = "one_share")]
    pub share: u32,
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
            cluster_token: None,
            cluster_token_file: None,
            tiers: StoreConfig::default(),
            tenants: Vec::new(),
            peer: PeerConfig::default(),
            lm: LmConfig::default(),
            audit_log: None,
            drain_grace_s: 20,
            take_over_grace_s: 10,
        }
    }
}

impl DaemonConfig {
    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddress {
        SocketAddress::Path(self.socket.clone())
    }

    /// Time for engines to give back what they hold when another daemon takes over.
    pub(crate) fn take_over_grace(&self) -> Duration {
        Duration::from_secs(self.take_over_grace_s)
    }

    /// Opens the stores of all tenants.
    ///
    /// # Errors
    /// For the first value that is not allowed, and where a token, memory or a disk cannot be used.
    pub(crate) fn open_tenants(&self, peers: &PeerPlans, node: &NodeBandwidth) -> Result<Vec<Tenant>> {
        let open = |configured: ConfiguredTenant| {
            let ConfiguredTenant { name, token, tiers, share } = configured;
            let store = open(&tiers, peers.get(&name), TenantBandwidth { node, share })?;
            Ok(Tenant { name, token, store })
        };
        self.configured_tenants()?.into_iter().map(open).collect()
    }

    /// Opens what other nodes are read through, for each tenant that does.
    ///
    /// # Errors
    /// For the first value that is not allowed, and where a token or a file of TLS cannot be read.
    pub(crate) fn peer_plans(&self, hints: Option<&Arc<IndexHints>>) -> Result<PeerPlans> {
        let mut plans = PeerPlans::new();
        for ConfiguredTenant { name, .. } in self.configured_tenants()? {
            if let Some(plan) = self.peer.open_tier(&name, hints)? {
                plans.insert(name, plan);
            }
        }
        Ok(plans)
    }

    /// What a daemon must have in common with one that takes over from it.
    ///
    /// # Errors
    /// For the first value that is not allowed, and where a token or key cannot be read.
    pub(crate) fn terms(&self) -> Result<Vec<TenantTerms>> {
        let terms = |configured: ConfiguredTenant| {
            let ConfiguredTenant { name, token, tiers, .. } = configured;
            let plan = plan(&tiers)?;
            let options = store_options(&tiers, &plan)?;
            Ok(TenantTerms {
                name,
                token: token.as_ref().map_or("", ClientToken::expose).to_owned(),
                chunk_tokens: options.chunk_tokens,
                stores_tails: options.stores_tails,
                digest_key: options.digest_key,
                ram_bytes: plan.ram_bytes,
            })
        };
        self.configured_tenants()?.into_iter().map(terms).collect()
    }

    /// The name of the tenant in whose store chunks of LMCache's clients are.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] if it is no tenant, or if there are several and none is named.
    pub(crate) fn lm_tenant(&self) -> Result<String> {
        let names: Vec<String> = self.configured_tenants()?.into_iter().map(|tenant| tenant.name).collect();
        match (&self.lm.tenant, &names[..]) {
            (Some(name), _) if names.contains(name) => Ok(name.clone()),
            (None, [only]) => Ok(only.clone()),
            (given, _) => {
                let given = given.as_deref().unwrap_or("not set");
                refuse("lm.tenant", given, "the name of one of `tenants`, or of `tiers.tenant` without any")
            }
        }
    }

    /// Opens the tiers below the memory of a tenant.
    ///
    /// # Errors
    /// As for [`Self::open_tenants`], and if there is no such tenant.
    pub(crate) fn parts_of(
        &self,
        tenant: &str,
        peers: &PeerPlans,
        node: &NodeBandwidth,
    ) -> Result<StoreParts> {
        let configured = self.configured_tenants()?.into_iter().find(|configured| configured.name == tenant);
        let Some(ConfiguredTenant { tiers, share, .. }) = configured else {
            return Err(NodeError::invalid("tenant", &tenant, "one that is configured"));
        };
        store_parts(&tiers, &plan(&tiers)?, peers.get(tenant), Some(TenantBandwidth { node, share }))
    }

    fn configured_tenants(&self) -> Result<Vec<ConfiguredTenant>> {
        let max_sessions = self.max_sessions;
        check((1..=4096).contains(&max_sessions), "max_sessions", &max_sessions, "1 to 4096")?;
        if let Some(name) = self.tiers.allow_lossy.first() {
            let allowed = "none: only a worker's own store may be approximate";
            return refuse("tiers.allow_lossy", name, allowed);
        }
        let grace_s = self.take_over_grace_s;
        check((1..=300).contains(&grace_s), "take_over_grace_s", &grace_s, "1 to 300")?;
        if self.tenants.is_empty() {
            let token = self.token_file.as_deref().map(ClientToken::read).transpose()?;
            let name = self.tiers.tenant.clone();
            return Ok(vec![ConfiguredTenant { name, token, tiers: self.tiers.clone(), share: 1 }]);
        }
        if let Some(file) = &self.token_file {
            let allowed = "none beside `tenants`, which have tokens of their own";
            return Err(NodeError::invalid("token_file", &file.display(), allowed));
        }
        self.tenants.iter().map(|tenant| self.configured_tenant(tenant)).collect()
    }

    fn configured_tenant(&self, tenant: &TenantConfig) -> Result<ConfiguredTenant> {
        let TenantConfig { name, token_file, ram, nvme, tiers, share, digest_key_file, encryption_key_file } =
            tenant;
        check((1..=256).contains(&name.len()), "tenants.name", name.as_str(), "1 to 256 bytes")?;
        check((1..=1000).contains(share), "tenants.share", share, "1 to 1000")?;
        let tiers = if tiers.is_empty() { &self.tiers.tiers } else { tiers };
        if tenant.tiers.is_empty() && tiers.iter().any(TierConfig::is_disk) {
            let allowed = "a list of its own where `tiers.tiers` has disks: a disk has one owner";
            return refuse("tenants.tiers", &format!("empty for {name}"), allowed);
        }
        // A list of its own is there in the place of the short forms.
        let is_own = !tenant.tiers.is_empty();
        let tiers = StoreConfig {
            ram: ram.clone(),
            nvme: nvme.clone(),
            tiers: tiers.clone(),
            remote: self.tiers.remote.clone().filter(|_| !is_own),
            remote_url: self.tiers.remote_url.clone().filter(|_| !is_own),
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
        Ok(ConfiguredTenant {
            name: name.clone(),
            token: Some(ClientToken::read(token_file)?),
            tiers,
            share: *share,
        })
    }
}

fn one_share() -> u32 {
    1
}

fn open(tiers: &StoreConfig, peers: Option<&PeerPlan>, bandwidth: TenantBandwidth<'_>) -> Result<Store> {
    let plan = plan(tiers)?;
    if plan.ram_bytes == 0 {
        return Err(NodeError::invalid(
            "ram",
            &tiers.ram,
            "a size such as 2GiB: a daemon has memory for chunks",
        ));
    }
    open_store_with(tiers, &plan, peers, Some(bandwidth))
}

fn plan(tiers: &StoreConfig) -> Result<StorePlan> {
    if let Some(socket) = &tiers.daemon {
        return Err(NodeError::invalid("tiers.daemon", &socket.display(), "none: this is the daemon"));
    }
    if tiers.enable_controller == Some(true) {
        return refuse(
            "tiers.enable_controller",
            "true",
            "false: `coordinators` of each worker names what governs it",
        );
    }
    if tiers.planner != StoreConfig::default().planner {
        return refuse(
            "tiers.planner",
            &tiers.planner,
            "not set: a daemon gives its engines all that they ask for",
        );
    }
    if tiers.gpu_direct != StoreConfig::default().gpu_direct {
        return refuse(
            "tiers.gpu_direct",
            &tiers.gpu_direct,
            "not set: a worker reads only the disks of its own store by its GPU",
        );
    }
    if let Some(id) = &tiers.lmcache_instance_id {
        return refuse(
            "tiers.lmcache_instance_id",
            id,
            "not set: a worker has a name, `id`, and a daemon has none",
        );
    }
    tiers.plan()
}
