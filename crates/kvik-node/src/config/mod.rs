//! The store of KV: where chunks go when an engine's own memory has no room for them.
//!
//! Options of LMCache are read too, under its names; [`StoreConfig::resolve`] makes one plan of both.

mod blending;
mod cluster;
mod daemon;
mod field;
mod lm;
mod lmcache;
mod peer;
mod plan;
#[cfg(test)]
mod tests;
mod tiers;

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvik_runtime::secret::{Secret, SecretUrl};
use kvik_store::policy::PolicyKind;
use serde::{Deserialize, Serialize};

pub use blending::BlendingPlan;
pub(crate) use cluster::store_info;
pub(crate) use daemon::PeerPlans;
pub use daemon::{DaemonConfig, TenantConfig};
use field::{size_text, switch_text};
pub use lm::LmConfig;
pub use peer::{PeerConfig, PeerPlan, PeerTlsConfig};
pub use plan::{DaemonPlan, PlannerMode, StorePlan};
pub use tiers::TierConfig;
pub(crate) use tiers::{NvmePlan, RemotePlan, TierPlace, TierPlan};

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
    /// Whether a worker on a GPU reads chunks from the disk into the GPU's memory by `cuFile`: `off`; `on`, or end
    /// with an error where the library is not there; `auto`, where it is. Chunks that are read so do not come into memory, so
    /// they are read from the disk again. Default: `off`.
    #[serde(deserialize_with = "switch_text")]
    pub gpu_direct: String,
    /// Whether the GPU of a worker with `gpu_direct` also writes chunks of ended requests to the disk by itself, where the disk is the
    /// only tier beside memory and `write_back` is `store`. They do not come into memory then, and requests find them on the disk.
    /// Default: false.
    pub gpu_direct_writes: bool,
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
            gpu_direct: "off".to_owned(),
            gpu_direct_writes: false,
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
