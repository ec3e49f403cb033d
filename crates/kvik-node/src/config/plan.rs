//! What is built of the settings of a store.
//!
//! A plan has no alias, no text and no value out of range: whatever is wrong is refused here, before anything is opened.

use std::time::Duration;

use kvik_memory::SocketAddress;
use kvik_store::TierName;
use kvik_store::policy::PolicyKind;
use kvik_tier::{NumaPlacement, TierKind};

use super::StoreConfig;
use super::field::{TIMEOUTS, check, either, gigabytes, over, parse_size, refuse};
use super::tiers::{self, NvmePlan, TierConfig, TierDefaults, TierPlace, TierPlan};
use crate::error::Result;
use crate::tenant::ClientToken;

/// What the length of a chunk must be a multiple of: the tokens of a block of the built-in engine, and of most others.
const BLOCK_TOKENS: usize = 16;

/// Memory of a store that has lower tiers and was given none: everything read from below passes through it.
pub(super) const STAGING_BYTES: u64 = 256 << 20;

/// What LMCache takes of memory where nothing is said.
const LOCAL_CPU_GB: f64 = 5.0;

/// How a store daemon is used.
#[derive(Debug, Clone)]
pub struct DaemonPlan {
    /// Where it listens.
    pub socket: SocketAddress,
    /// What it is shown.
    pub token: Option<ClientToken>,
    /// Whether chunks are read layer by layer.
    pub is_layerwise: bool,
    /// Longest time that a request waits for chunks.
    pub load_timeout: Duration,
    /// Whether chunks that are not in memory are loaded or computed.
    pub planner: PlannerMode,
}

/// Whether chunks of lower tiers are loaded or computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannerMode {
    /// Whichever is predicted to be faster.
    Auto,
    /// They are loaded.
    LoadAll,
    /// They are computed.
    ComputeAll,
}

/// What to build of a [`StoreConfig`].
#[derive(Debug, Clone, PartialEq)]
pub struct StorePlan {
    /// Memory for chunks, at least 1.
    pub ram_bytes: u64,
    pub(crate) numa: NumaPlacement,
    /// The tiers below memory, fastest first.
    pub(crate) tiers: Vec<TierPlan>,
    pub(crate) chunk_tokens: usize,
    pub(crate) policy: PolicyKind,
    /// Whether chunks are read layer by layer.
    pub is_layerwise: bool,
    /// Lossy codecs that tiers may use, sorted.
    pub(crate) allow_lossy: Vec<String>,
    pub(crate) stores_tails: bool,
    pub(crate) writes_on_reuse: bool,
    /// Longest time that a request waits for chunks of lower tiers.
    pub load_timeout: Duration,
    /// Whether these are loaded or computed.
    pub planner: PlannerMode,
}

impl StoreConfig {
    /// How the store daemon is used; `None` without `daemon`.
    ///
    /// # Errors
    /// [`NodeError::Invalid`](crate::NodeError::Invalid) if settings of a daemon are set beside its socket.
    pub fn daemon(&self) -> Result<Option<DaemonPlan>> {
        let Some(socket) = &self.daemon else {
            return match &self.daemon_token_file {
                None => Ok(None),
                Some(file) => refuse(
                    "store.daemon_token_file",
                    &file.display().to_string(),
                    "none without `store.daemon`",
                ),
            };
        };
        let only_a_clients = Self {
            daemon: self.daemon.clone(),
            daemon_token_file: self.daemon_token_file.clone(),
            load_timeout_ms: self.load_timeout_ms,
            layerwise: self.layerwise,
            planner: self.planner.clone(),
            // What these say is about the worker.
            lmcache_instance_id: self.lmcache_instance_id.clone(),
            enable_controller: self.enable_controller,
            ..Self::default()
        };
        if *self != only_a_clients {
            let allowed = "alone, or with `daemon_token_file`, `load_timeout_ms`, `layerwise` and `planner`: the daemon \
                has the other settings";
            return refuse("store.daemon", &socket.display().to_string(), allowed);
        }
        let milliseconds = self.load_timeout_ms;
        check((1..=600_000).contains(&milliseconds), "store.load_timeout_ms", &milliseconds, TIMEOUTS)?;
        Ok(Some(DaemonPlan {
            socket: SocketAddress::Path(socket.clone()),
            token: self.daemon_token_file.as_deref().map(ClientToken::read).transpose()?,
            is_layerwise: self.layerwise,
            load_timeout: Duration::from_millis(milliseconds),
            planner: self.planner_mode()?,
        }))
    }

    fn planner_mode(&self) -> Result<PlannerMode> {
        match self.planner.as_str() {
            "auto" => Ok(PlannerMode::Auto),
            "load_all" => Ok(PlannerMode::LoadAll),
            "compute_all" => Ok(PlannerMode::ComputeAll),
            other => refuse("store.planner", other, "auto, load_all or compute_all"),
        }
    }

    /// What to build; `None` where there is no store.
    ///
    /// # Errors
    /// [`NodeError::Invalid`](crate::NodeError::Invalid) for the first value that is not allowed, also where a value stands
    /// under both of its names and differs.
    pub fn resolve(&self) -> Result<Option<StorePlan>> {
        Ok(Some(self.plan()?).filter(|plan| plan.ram_bytes > 0))
    }

    fn numa_placement(&self) -> Result<NumaPlacement> {
        match self.numa.as_str() {
            "interleave" => Ok(NumaPlacement::Auto),
            "local" => Ok(NumaPlacement::Local),
            node => match node.parse() {
                Ok(node) => Ok(NumaPlacement::Node(node)),
                Err(_) => refuse("store.numa", node, "interleave, local, or the number of a node"),
            },
        }
    }

    /// What to build, also with no memory of its own.
    pub(crate) fn plan(&self) -> Result<StorePlan> {
        let default = Self::default();
        self.check_lmcache()?;
        let tiers = self.tier_plans()?;
        let mut ram_bytes = self.ram_bytes()?;
        if ram_bytes == 0 && tiers.iter().any(|plan| plan.place != TierPlace::Peer) {
            ram_bytes = STAGING_BYTES;
        }
        let chunk_tokens =
            over("store.chunk_size", self.chunk_tokens, &default.chunk_tokens, self.chunk_size)?;
        let fits =
            (BLOCK_TOKENS..=65_536).contains(&chunk_tokens) && chunk_tokens.is_multiple_of(BLOCK_TOKENS);
        check(fits, "store.chunk_tokens", &chunk_tokens, "multiples of 16 up to 65536")?;
        let alias = self.cache_policy.as_ref().map(|name| name.to_ascii_lowercase());
        let policy = over("store.cache_policy", self.policy.clone(), &default.policy, alias)?;
        let Ok(policy) = policy.parse::<PolicyKind>() else {
            return refuse("store.policy", &policy, "lru, lfu, fifo, s3fifo, arc, cost or kvik");
        };
        let is_layerwise =
            over("store.use_layerwise", self.layerwise, &default.layerwise, self.use_layerwise)?;
        let write_back = self.write_back.as_str();
        check(["store", "reuse"].contains(&write_back), "store.write_back", write_back, "store or reuse")?;
        let planner = self.planner_mode()?;
        let gpu_direct = self.gpu_direct.as_str();
        check(
            ["off", "auto", "on"].contains(&gpu_direct),
            "store.gpu_direct",
            gpu_direct,
            "off, auto or on",
        )?;
        let is_possible = !self.gpu_direct_writes || gpu_direct != "off";
        check(is_possible, "store.gpu_direct_writes", "true", "false where `store.gpu_direct` is off")?;
        let is_possible = !self.gpu_direct_writes || write_back == "store";
        check(is_possible, "store.gpu_direct_writes", "true", "false where `store.write_back` is reuse")?;
        let io = self.nvme_io.as_str();
        check(
            ["auto", "uring", "positional"].contains(&io),
            "store.nvme_io",
            io,
            "auto, uring or positional",
        )?;
        for (field, milliseconds) in [
            ("store.load_timeout_ms", self.load_timeout_ms),
            ("store.remote_timeout_ms", self.remote_timeout_ms),
        ] {
            check((1..=600_000).contains(&milliseconds), field, &milliseconds, TIMEOUTS)?;
        }
        if let Some(seconds) = self.remote_ttl_s {
            check((1..=315_360_000).contains(&seconds), "store.remote_ttl_s", &seconds, "1 to 315360000")?;
        }
        check(self.tenant.len() <= 256, "store.tenant", &self.tenant, "at most 256 bytes")?;
        Ok(StorePlan {
            ram_bytes,
            numa: self.numa_placement()?,
            tiers,
            chunk_tokens,
            policy,
            is_layerwise,
            allow_lossy: self.allowed_lossy()?,
            stores_tails: self.stores_tails()?,
            writes_on_reuse: write_back == "reuse",
            load_timeout: Duration::from_millis(self.load_timeout_ms),
            planner,
        })
    }

    /// This store's share for one of `n_workers` in one process: memory and disk are divided, and each has
    /// a folder of its own, because a folder has one owner.
    ///
    /// # Errors
    /// As for the configuration of one worker.
    pub fn share_of(&self, worker_id: &str, n_workers: u64) -> Result<Self> {
        let n_workers = n_workers.max(1);
        let Some(plan) = self.resolve()? else { return Ok(self.clone()) };
        let (mut nvme, mut tiers) = (None, self.tiers.clone());
        let disks = plan.tiers.iter().filter_map(|plan| match &plan.place {
            TierPlace::Nvme(disk) => Some(disk.share_of(worker_id, n_workers)),
            TierPlace::Peer | TierPlace::Remote(_) => None,
        });
        let shares = disks.collect::<Result<Vec<String>>>()?;
        if tiers.is_empty() {
            nvme = shares.into_iter().next();
        } else {
            for (tier, share) in tiers.iter_mut().filter(|tier| tier.is_disk()).zip(shares) {
                tier.nvme = Some(share);
            }
        }
        Ok(Self {
            ram: (plan.ram_bytes / n_workers).to_string(),
            nvme,
            tiers,
            local_cpu: None,
            max_local_cpu_size: None,
            local_disk: None,
            max_local_disk_size: None,
            ..self.clone()
        })
    }

    fn ram_bytes(&self) -> Result<u64> {
        let ram = parse_size("store.ram", &self.ram)?;
        let alias = match (self.local_cpu, self.max_local_cpu_size) {
            (Some(false), _) => Some(0),
            (Some(true), None) => Some(gigabytes("store.max_local_cpu_size", LOCAL_CPU_GB)?),
            (_, Some(size)) => Some(gigabytes("store.max_local_cpu_size", size)?),
            (None, None) => None,
        };
        over("store.local_cpu", ram, &0, alias)
    }

    /// The tiers below memory, of the list or of its short form.
    fn tier_plans(&self) -> Result<Vec<TierPlan>> {
        let defaults = TierDefaults {
            io: &self.nvme_io,
            formats_devices: self.format_devices,
            timeout_ms: self.remote_timeout_ms,
            ttl_s: self.remote_ttl_s,
            options: &self.remote_options,
            ca_file: self.remote_ca_file.as_ref(),
            encryption_key_file: self.encryption_key_file.as_ref(),
            allow_lossy: &self.allow_lossy,
        };
        let nvme_codec = defaults.codec("store.nvme_codec", &self.nvme_codec)?;
        let remote_codec = defaults.codec("store.remote_codec", &self.remote_codec)?;
        let nvme_bytes_per_s = parse_size("store.nvme_bytes_per_s", &self.nvme_bytes_per_s)?;
        let remote_bytes_per_s = parse_size("store.remote_bytes_per_s", &self.remote_bytes_per_s)?;
        let disk = self.disk_plan(&defaults)?;
        let url = either("store.remote_url", self.remote.as_ref(), self.remote_url.as_ref())?;
        if !self.tiers.is_empty() {
            let shorts = [disk.is_some(), url.is_some(), nvme_bytes_per_s > 0, self.nvme_max_calls > 0];
            if shorts.contains(&true)
                || nvme_codec.is_some()
                || remote_codec.is_some()
                || remote_bytes_per_s > 0
                || self.remote_max_calls > 0
            {
                let allowed = "without `nvme`, `remote`, their names in LMCache, their bounds and codecs, which are the short \
                    form of a list with one of each";
                return refuse("store.tiers", "set", allowed);
            }
            return defaults.plan(&self.tiers);
        }
        let of_kind = |place: TierPlace, bounds, codec: Option<&str>| TierPlan {
            name: TierName::from(place.kind()),
            place,
            bounds,
            encryption_key_file: self.encryption_key_file.clone(),
            codec: codec.map(str::to_owned),
            is_optional: false,
        };
        let mut plans = Vec::new();
        plans.extend(disk.map(|disk| {
            of_kind(TierPlace::Nvme(disk), tiers::bounds(nvme_bytes_per_s, self.nvme_max_calls), nvme_codec)
        }));
        plans.push(TierPlan::of_peers(TierName::from(TierKind::Peer)));
        if let Some(url) = url {
            let remote = defaults.remote(url, &TierConfig::default())?;
            let bounds = tiers::bounds(remote_bytes_per_s, self.remote_max_calls);
            plans.push(of_kind(TierPlace::Remote(remote), bounds, remote_codec));
        }
        Ok(plans)
    }

    /// The lossy codecs that are allowed, each once and in an order that does not depend on that of the list.
    fn allowed_lossy(&self) -> Result<Vec<String>> {
        let mut names = self.allow_lossy.clone();
        names.sort();
        names.dedup();
        for name in &names {
            let is_lossy = matches!(kvik_tier::is_lossless_codec(name), Ok(false));
            check(
                is_lossy,
                "store.allow_lossy",
                name.as_str(),
                "lossy codecs: fp8, int8, int4 and cachegen",
            )?;
        }
        Ok(names)
    }

    /// The disk of the short form.
    fn disk_plan(&self, defaults: &TierDefaults<'_>) -> Result<Option<NvmePlan>> {
        let nvme = self.nvme.as_ref().map(|text| defaults.disk("store.nvme", text, None)).transpose()?;
        let alias = match (&self.local_disk, self.max_local_disk_size) {
            (None, None) => None,
            (Some(dir), Some(size)) => {
                let capacity_bytes = gigabytes("store.max_local_disk_size", size)?;
                if dir.contains(',') {
                    let allowed = "one folder; `store.tiers` has an entry for each of several";
                    return refuse("store.local_disk", dir, allowed);
                }
                let dir = dir.strip_prefix("file://").unwrap_or(dir);
                Some(defaults.disk("store.local_disk", &format!("{dir}:{capacity_bytes}"), None)?)
            }
            (Some(_), None) => {
                return refuse("store.max_local_disk_size", "not set", "a size in GB beside `local_disk`");
            }
            (None, Some(_)) => {
                return refuse("store.local_disk", "not set", "a folder beside `max_local_disk_size`");
            }
        };
        either("store.local_disk", nvme, alias)
    }
}
