//! The store of KV: where chunks go when an engine's own memory has no room for them.
//!
//! Options of LMCache are read too, under its names; [`StoreConfig::resolve`] makes one plan of both.

mod blending;
mod cluster;
mod daemon;
mod lm;
mod lmcache;
mod peer;
#[cfg(test)]
mod tests;
mod tiers;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use kvik_memory::SocketAddress;
use kvik_runtime::secret::{Secret, SecretUrl};
use kvik_store::TierName;
use kvik_store::policy::PolicyKind;
use kvik_tier::{NumaPlacement, TierKind};
use kvik_types::ByteSize;
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{NodeError, Result};
use crate::tenant::ClientToken;

pub use blending::BlendingPlan;
pub(crate) use cluster::store_info;
pub use daemon::{DaemonConfig, TenantConfig};
pub(crate) use daemon::{PeerPlans, read_token};
pub use lm::LmConfig;
pub use peer::{PeerConfig, PeerPlan, PeerTlsConfig};
pub use tiers::TierConfig;
use tiers::TierDefaults;
pub(crate) use tiers::{NvmePlan, RemotePlan, TierPlace, TierPlan};

/// What the length of a chunk must be a multiple of: the tokens of a block of the built-in engine, and of most others.
const BLOCK_TOKENS: usize = 16;

/// Memory of a store that has lower tiers and was given none: everything read from below passes through it.
const STAGING_BYTES: u64 = 256 << 20;

/// What LMCache takes of memory where nothing is said.
const LOCAL_CPU_GB: f64 = 5.0;

const TIMEOUTS: &str = "1 to 600000 (ten minutes)";

const SIZES: &str = "a size such as 2GiB, 512MiB or 1073741824";

/// Where KV is kept beyond the engine's own memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub struct StoreConfig {
    /// Memory for chunks, such as `2GiB`; `0`: none of its own. Default: `0`, no store, or 256 MiB where
    /// `nvme` or `remote` is set.
    #[serde(deserialize_with = "size_text")]
    pub ram: String,
    /// Folder and size on a local disk, such as `/var/cache/kvik:20GiB`, or a block device. Default: none.
    pub nvme: Option<String>,
    /// A remote tier: `redis://`, `rediss://`, `redis+cluster://`, `s3://`, `gs://`, `az://`, `file://`, `lm://`,
    /// `plugin://` or `mooncakestore://`.
    /// Default: none.
    pub remote: Option<SecretUrl>,
    /// All tiers below memory, fastest first, in the place of `nvme` and `remote`: objects such as
    /// `{name: fast, nvme: /mnt/a:200GiB}`, `{peer: true}` and `{name: far, remote: s3://bucket, timeout_ms: 5000}`, also
    /// with `io`, `bytes_per_s`, `waits`, `max_calls`, `max_bytes_in_flight`, `ttl_s`, `options`, `ca_file`, `encryption_key_file`,
    /// `codec` and `optional`. Chunks are written to each and read from the first that has them. Default: none.
    pub tiers: Vec<TierConfig>,
    /// Tokens in a chunk, a multiple of 16. Default: 256.
    pub chunk_tokens: usize,
    /// What leaves a full tier: `lru`, `lfu`, `fifo`, `s3fifo`, `arc`, `cost` or `kvik`. Default: `kvik`.
    pub policy: String,
    /// Whether chunks that were read from another node, which has them too, leave a full tier before others that are
    /// hardly worth more. Default: true.
    pub spare_last_copy: bool,
    /// Whether chunks are read layer by layer. Default: false.
    pub layerwise: bool,
    /// Whether the last chunk of a sequence is stored too if it is not full. Default: false.
    pub tails: bool,
    /// When chunks go to lower tiers: `store`, as soon as they are there, or `reuse`, when they are used
    /// again. Default: `store`.
    pub write_back: String,
    /// Longest time that a request waits for chunks of lower tiers before it computes them. Default: 2000 ms.
    pub load_timeout_ms: u64,
    /// Whether chunks of lower tiers are loaded or computed: `auto`, whichever is predicted to be faster, and both at a time
    /// where that is; `load_all`; or `compute_all`. Chunks that are read layer by layer, or by a daemon, are all loaded.
    /// Default: `auto`.
    pub planner: String,
    /// Socket of a store daemon on this machine, which then has all tiers: the other settings but `load_timeout_ms`,
    /// `layerwise` and `daemon_token_file` are the daemon's and must not be set here. Default: none, a store in this
    /// process.
    pub daemon: Option<PathBuf>,
    /// File with the token that the daemon wants. Default: none.
    pub daemon_token_file: Option<PathBuf>,
    /// Whose cache it is: workers with other tenants never share KV. Default: empty, shared.
    pub tenant: String,
    /// File with a secret of at least 16 bytes that keys the digests which prove a chunk's tokens; blank space
    /// at its end does not count. Workers that share tiers need the same one: chunks of another key are misses.
    /// Default: none, digests that need no secret.
    pub digest_key_file: Option<PathBuf>,
    /// File with keys, one a line as 64 hexadecimal digits, that only its user and group can use: chunks on disk and
    /// remote are sealed with the first and opened with any. It is read again within a second when it changes.
    /// Default: none, chunks are stored as they are.
    pub encryption_key_file: Option<PathBuf>,
    /// Whether a block device without kvik's header is formatted at the start, which loses what is on it; one with the mark
    /// of a file system, or that is in use, never is. Default: false; `kvik store format DEVICE` does it once.
    pub format_devices: bool,
    /// How the disk is read and written: `auto`, `uring` or `positional`. Default: `auto`.
    pub nvme_io: String,
    /// Codec of chunks on the disk: `none`, `lossless`, or a lossy one that `allow_lossy` names: `fp8`, `int8`, `int4` or
    /// `cachegen`. Default: `none`.
    pub nvme_codec: String,
    /// Lossy codecs that tiers may use, such as `[int8]`. KV that was read back is then approximate, so the store shares
    /// nothing with stores that allow others or none. Default: none.
    pub allow_lossy: Vec<String>,
    /// NUMA nodes that the memory is on: `interleave`, all that have memory in turn; `local`, that of the thread that
    /// needs it first; or the number of a node. Default: `interleave`.
    #[serde(deserialize_with = "size_text")]
    pub numa: String,
    /// Bytes a second that move to and from the disk, such as `2GB`: what is over is not read or written, and is counted
    /// as skipped. Default: `0`, no bound.
    #[serde(deserialize_with = "size_text")]
    pub nvme_bytes_per_s: String,
    /// Calls to the disk at a time; further ones are skipped. Default: 0, no bound but the threads of the store.
    pub nvme_max_calls: usize,
    /// GPU through which the memory is registered with CUDA, for engines that copy from it. Default: none.
    pub cuda_device: Option<u32>,
    /// Codec of chunks in the remote tier, as `nvme_codec`. Stores that share a remote tier read what others have coded; coded
    /// chunks and those of `none` are not found by each other. Default: `none`.
    pub remote_codec: String,
    /// Time for one call to the remote tier. Default: 2000 ms.
    pub remote_timeout_ms: u64,
    /// Time after which a Redis server forgets a chunk. Default: none.
    pub remote_ttl_s: Option<u64>,
    /// Bytes a second that move to and from the remote tier, such as `500MB`, for each worker: what is over is
    /// not read or written, and is counted as skipped. Default: `0`, no bound.
    #[serde(deserialize_with = "size_text")]
    pub remote_bytes_per_s: String,
    /// Calls to the remote tier at a time; further ones are skipped. Default: 0, no bound but the threads of
    /// the store: two read and one writes.
    pub remote_max_calls: usize,
    /// Settings of an object store by name, such as `endpoint`, `region`, `access_key_id`,
    /// `secret_access_key`, `allow_http`; variables such as `AWS_ACCESS_KEY_ID` set them too. Default: none.
    pub remote_options: BTreeMap<String, Secret>,
    /// Authorities that sign the remote tier's certificate, PEM. Default: none, those of the system.
    pub remote_ca_file: Option<PathBuf>,

    /// LMCache's name: whether there is memory for chunks; `max_local_cpu_size` says how much. Default: none.
    pub local_cpu: Option<bool>,
    /// LMCache's name for `ram`, in GB (10^9 bytes). Default: none; 5 where only `local_cpu` is set.
    pub max_local_cpu_size: Option<f64>,
    /// LMCache's name for the folder of `nvme`, with or without `file://`. Default: none.
    pub local_disk: Option<String>,
    /// LMCache's name for the size of `nvme`, in GB (10^9 bytes). Default: none.
    pub max_local_disk_size: Option<f64>,
    /// LMCache's name for `remote`. Default: none.
    pub remote_url: Option<SecretUrl>,
    /// LMCache's name for `chunk_tokens`. Default: none.
    pub chunk_size: Option<usize>,
    /// LMCache's name for `policy`, in any case. Default: none.
    pub cache_policy: Option<String>,
    /// LMCache's name for `layerwise`. Default: none.
    pub use_layerwise: Option<bool>,
    /// LMCache's name for `tails`. Default: none.
    pub save_unfull_chunk: Option<bool>,
    /// LMCache's name: whether text prompts are put together from parts, of which kvik's worker computes the tokens again whose keys
    /// differ most. Default: none, off.
    pub enable_blending: Option<bool>,
    /// LMCache's name: the share of tokens that are computed again, a list of one. Default: none, 0.15.
    pub blend_recompute_ratios: Option<Vec<f32>>,
    /// LMCache's name: the layer whose keys are compared, a list of one. Default: none, 1.
    pub blend_check_layers: Option<Vec<usize>>,
    /// LMCache's name; refused: the share decides. Default: none.
    pub blend_thresholds: Option<Vec<f32>>,
    /// LMCache's name: parts with fewer tokens are computed. Default: none, 256.
    pub blend_min_tokens: Option<usize>,
    /// LMCache's name: the text between the parts of a prompt. Default: none, ` # # `.
    pub blend_special_str: Option<String>,
    /// LMCache's name: whether the worker is governed by others, which `coordinators` of the worker names. Default: none.
    pub enable_controller: Option<bool>,
    /// LMCache's name for `id` of the worker. Default: none.
    pub lmcache_instance_id: Option<String>,
    /// LMCache's name; refused, because a worker has one `id`. Default: none.
    pub lmcache_worker_ids: Option<Vec<u32>>,
    /// LMCache's name; refused, because a worker has one port. Default: none.
    pub lmcache_worker_ports: Option<Vec<u16>>,
    /// LMCache's name; refused: `coordinators` of a worker has the addresses. Default: none.
    pub controller_pull_url: Option<SecretUrl>,
    /// LMCache's name; refused: `coordinators` of a worker has the addresses. Default: none.
    pub controller_reply_url: Option<SecretUrl>,
    /// LMCache's name; only `false` is taken: `peer` of a store daemon has the settings of other nodes. Default: none.
    pub enable_p2p: Option<bool>,
    /// LMCache's name; taken beside `enable_p2p: false` only. Default: none.
    pub p2p_host: Option<String>,
    /// LMCache's name; taken beside `enable_p2p: false` only. Default: none.
    pub p2p_init_ports: Option<Vec<u16>>,
}

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

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            ram: "0".to_owned(),
            nvme: None,
            remote: None,
            tiers: Vec::new(),
            chunk_tokens: 256,
            policy: PolicyKind::Kvik.name().to_owned(),
            spare_last_copy: true,
            layerwise: false,
            tails: false,
            write_back: "store".to_owned(),
            load_timeout_ms: 2000,
            planner: "auto".to_owned(),
            daemon: None,
            daemon_token_file: None,
            tenant: String::new(),
            digest_key_file: None,
            encryption_key_file: None,
            format_devices: false,
            nvme_io: "auto".to_owned(),
            nvme_codec: "none".to_owned(),
            allow_lossy: Vec::new(),
            numa: "interleave".to_owned(),
            nvme_bytes_per_s: "0".to_owned(),
            nvme_max_calls: 0,
            cuda_device: None,
            remote_codec: "none".to_owned(),
            remote_timeout_ms: 2000,
            remote_ttl_s: None,
            remote_bytes_per_s: "0".to_owned(),
            remote_max_calls: 0,
            remote_options: BTreeMap::new(),
            remote_ca_file: None,
            local_cpu: None,
            max_local_cpu_size: None,
            local_disk: None,
            max_local_disk_size: None,
            remote_url: None,
            chunk_size: None,
            cache_policy: None,
            use_layerwise: None,
            save_unfull_chunk: None,
            enable_blending: None,
            blend_recompute_ratios: None,
            blend_check_layers: None,
            blend_thresholds: None,
            blend_min_tokens: None,
            blend_special_str: None,
            enable_controller: None,
            lmcache_instance_id: None,
            lmcache_worker_ids: None,
            lmcache_worker_ports: None,
            controller_pull_url: None,
            controller_reply_url: None,
            enable_p2p: None,
            p2p_host: None,
            p2p_init_ports: None,
        }
    }
}

impl StoreConfig {
    /// How the store daemon is used; `None` without `daemon`.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] if settings of a daemon are set beside its socket.
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
            token: self.daemon_token_file.as_deref().map(read_token).transpose()?,
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
    /// [`NodeError::Invalid`] for the first value that is not allowed, also where a value stands
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

/// The value of a field that has an alias: whichever is given.
fn either<T: PartialEq>(alias_field: &'static str, value: Option<T>, alias: Option<T>) -> Result<Option<T>> {
    match (&value, &alias) {
        (Some(one), Some(other)) if one != other => contradiction(alias_field),
        _ => Ok(value.or(alias)),
    }
}

/// The same for a field that always has a value: one that is not the default was given.
fn over<T: PartialEq>(alias_field: &'static str, value: T, default: &T, alias: Option<T>) -> Result<T> {
    match alias {
        None => Ok(value),
        Some(alias) if value == *default || value == alias => Ok(alias),
        Some(_) => contradiction(alias_field),
    }
}

fn contradiction<T>(alias_field: &'static str) -> Result<T> {
    refuse(alias_field, "set beside kvik's own name with another value", "one of the two names")
}

fn refuse<T>(field: &'static str, value: &str, allowed: &'static str) -> Result<T> {
    Err(NodeError::invalid(field, &value, allowed))
}

fn check(
    fits: bool,
    field: &'static str,
    value: &(impl Display + ?Sized),
    allowed: &'static str,
) -> Result<()> {
    if fits { Ok(()) } else { refuse(field, &value.to_string(), allowed) }
}

fn parse_size(field: &'static str, text: &str) -> Result<u64> {
    match text.parse::<ByteSize>() {
        Ok(size) => Ok(size.bytes()),
        Err(_) => refuse(field, text, SIZES),
    }
}

fn gigabytes(field: &'static str, size: f64) -> Result<u64> {
    check((0.0..=1e9).contains(&size), field, &size, "GB from 0 to 1000000000")?;
    Ok((size * 1e9) as u64)
}

/// Reads a size given as a number of bytes or as text.
fn size_text<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Bytes(u64),
        Text(String),
    }
    Ok(match Given::deserialize(deserializer)? {
        Given::Bytes(n_bytes) => n_bytes.to_string(),
        Given::Text(text) => text,
    })
}
