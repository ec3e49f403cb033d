//! The tiers below memory, under their names and in their order.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvik_runtime::secret::{HIDDEN, Secret, SecretUrl};
use kvik_store::TierName;
use kvik_tier::{IoKind, RemoteUrl, ThrottledOptions, TierKind};
use kvik_types::ByteSize;
use serde::{Deserialize, Serialize};

use super::field::{TIMEOUTS, check, parse_size, refuse, size_text};
use crate::error::{NodeError, Result};

/// Tiers that can be configured: those of a store without its memory.
const MAX_CONFIGURED: usize = 7;

const NVME_FORM: &str =
    "DIR:SIZE, such as /var/cache/kvik:20GiB, or a block device, such as /dev/nvme1n1 or /dev/nvme1n1:200GiB";

/// A tier below memory. Exactly one of `nvme`, `peer` and `remote` says what it is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TierConfig {
    /// Its name in metrics and commands: 1 to 32 of `a-z`, `0-9` and `-`. Default: its kind, such as `nvme`, with a
    /// number where another tier has that name.
    pub name: Option<String>,
    /// Folder and size on a local disk, such as `/mnt/a:200GiB`, or a block device. Default: none.
    pub nvme: Option<String>,
    /// Whether this is the place of other nodes, which `peer` names. Default: false.
    pub peer: bool,
    /// Address of a remote tier. Default: none.
    pub remote: Option<SecretUrl>,
    /// How a disk is read and written: `auto`, `uring` or `positional`. Default: `nvme_io` of the store.
    pub io: Option<String>,
    /// Bytes a second that move to and from it, such as `1GB`, for all tenants together; what is over is not read or
    /// written. Default: `0`, no bound.
    #[serde(deserialize_with = "size_text")]
    pub bytes_per_s: String,
    /// Whether what is over `bytes_per_s` waits, as on a slow link, instead. Default: false.
    pub waits: bool,
    /// Calls at a time; further ones are skipped. Default: 0, no bound but the threads of the store.
    pub max_calls: usize,
    /// Bytes at a time, such as `64MiB`; what is over is skipped. Default: `0`, no bound.
    #[serde(deserialize_with = "size_text")]
    pub max_bytes_in_flight: String,
    /// Time for one call to a remote tier. Default: `remote_timeout_ms` of the store.
    pub timeout_ms: Option<u64>,
    /// Time after which a Redis server forgets a chunk. Default: `remote_ttl_s` of the store.
    pub ttl_s: Option<u64>,
    /// Settings of an object store by name. Default: `remote_options` of the store.
    pub options: Option<BTreeMap<String, Secret>>,
    /// Authorities that sign a remote tier's certificate, PEM. Default: `remote_ca_file` of the store.
    pub ca_file: Option<PathBuf>,
    /// File with the keys that seal its chunks. Default: `encryption_key_file` of the store.
    pub encryption_key_file: Option<PathBuf>,
    /// Codec of its chunks: `none`, `lossless`, or a lossy one that `allow_lossy` of the store names. Default: `none`.
    pub codec: String,
    /// Whether the store starts without it where it cannot be opened; it is then down until the next start. Default:
    /// false.
    pub optional: bool,
}

/// A tier to be opened.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TierPlan {
    pub(crate) name: TierName,
    pub(crate) place: TierPlace,
    pub(crate) bounds: ThrottledOptions,
    pub(crate) encryption_key_file: Option<PathBuf>,
    /// `None`: chunks are stored as they are.
    pub(crate) codec: Option<String>,
    pub(crate) is_optional: bool,
}

/// What a tier is made of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TierPlace {
    Nvme(NvmePlan),
    Peer,
    Remote(RemotePlan),
}

/// A folder on a local disk, or a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NvmePlan {
    pub(crate) path: PathBuf,
    /// `None`: that of the device.
    pub(crate) capacity_bytes: Option<u64>,
    pub(crate) io: IoKind,
    /// Whether a device without kvik's header is formatted.
    pub(crate) formats_device: bool,
}

/// A remote tier.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RemotePlan {
    pub(crate) url: RemoteUrl,
    pub(crate) timeout: Duration,
    pub(crate) ttl: Option<Duration>,
    pub(crate) options: BTreeMap<String, Secret>,
    pub(crate) ca_file: Option<PathBuf>,
}

impl Default for TierConfig {
    fn default() -> Self {
        Self {
            name: None,
            nvme: None,
            peer: false,
            remote: None,
            io: None,
            bytes_per_s: "0".to_owned(),
            waits: false,
            max_calls: 0,
            max_bytes_in_flight: "0".to_owned(),
            timeout_ms: None,
            ttl_s: None,
            options: None,
            ca_file: None,
            encryption_key_file: None,
            codec: "none".to_owned(),
            optional: false,
        }
    }
}

// === impl TierConfig ===

impl TierConfig {
    /// Whether it is a local disk.
    pub(crate) fn is_disk(&self) -> bool {
        self.nvme.is_some()
    }

    /// What it is called in messages.
    fn shown(&self) -> String {
        match (&self.name, &self.nvme, &self.remote) {
            (Some(name), ..) => name.clone(),
            (None, Some(nvme), _) => nvme.clone(),
            (None, None, Some(remote)) => remote.to_string(),
            (None, None, None) => if self.peer { "peer" } else { "an entry" }.to_owned(),
        }
    }

    fn refuse<T>(&self, what: &str, allowed: &'static str) -> Result<T> {
        refuse("store.tiers", &format!("{}, with {what}", self.shown()), allowed)
    }

    /// Refuses what has no meaning for the kind of the tier.
    fn check_fields(&self) -> Result<()> {
        let n_places = [self.nvme.is_some(), self.peer, self.remote.is_some()].into_iter().filter(|is| *is);
        if n_places.count() != 1 {
            return refuse("store.tiers", &self.shown(), "exactly one of `nvme`, `peer: true` and `remote`");
        }
        let of_a_remote =
            [self.timeout_ms.is_some(), self.ttl_s.is_some(), self.options.is_some(), self.ca_file.is_some()];
        if self.remote.is_none() && of_a_remote.contains(&true) {
            return self
                .refuse("`timeout_ms`, `ttl_s`, `options` or `ca_file`", "these beside `remote` only");
        }
        if self.nvme.is_none() && self.io.is_some() {
            return self.refuse("`io`", "it beside `nvme` only");
        }
        if self.waits && parse_size("store.tiers.bytes_per_s", &self.bytes_per_s)? == 0 {
            return self.refuse("`waits`", "it beside `bytes_per_s` only");
        }
        let named = Self { name: self.name.clone(), peer: true, ..Self::default() };
        if self.peer && *self != named {
            return self
                .refuse("other settings", "`name` beside `peer: true`; `peer` has the settings of nodes");
        }
        Ok(())
    }

    /// The bounds of the tier.
    fn bounds(&self) -> Result<ThrottledOptions> {
        let bytes_per_s = parse_size("store.tiers.bytes_per_s", &self.bytes_per_s)?;
        let in_flight = parse_size("store.tiers.max_bytes_in_flight", &self.max_bytes_in_flight)?;
        let bounds = bounds(bytes_per_s, self.max_calls);
        let max_bytes_in_flight = if in_flight > 0 { in_flight } else { bounds.max_bytes_in_flight };
        let waits = self.waits;
        // A link saves nothing up while it rests.
        let burst_bytes = if waits { (bytes_per_s / 100).max(1) } else { bounds.burst_bytes };
        Ok(ThrottledOptions { max_bytes_in_flight, waits, burst_bytes, ..bounds })
    }
}

/// What a list of tiers takes from the store that it belongs to.
pub(crate) struct TierDefaults<'a> {
    pub(crate) io: &'a str,
    pub(crate) formats_devices: bool,
    pub(crate) timeout_ms: u64,
    pub(crate) ttl_s: Option<u64>,
    pub(crate) options: &'a BTreeMap<String, Secret>,
    pub(crate) ca_file: Option<&'a PathBuf>,
    pub(crate) encryption_key_file: Option<&'a PathBuf>,
    pub(crate) allow_lossy: &'a [String],
}

impl TierDefaults<'_> {
    /// The tiers of a list, in its order, with the place of other nodes above the first remote one unless the list has
    /// it elsewhere.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] for the first value that is not allowed.
    pub(crate) fn plan(&self, configs: &[TierConfig]) -> Result<Vec<TierPlan>> {
        let n_peers = configs.iter().filter(|config| config.peer).count();
        check(n_peers <= 1, "store.tiers", &n_peers, "one entry with `peer: true` at most")?;
        let n_most = if n_peers == 0 { MAX_CONFIGURED - 1 } else { MAX_CONFIGURED };
        if configs.len() > n_most {
            let allowed = format!("at most {MAX_CONFIGURED} tiers, with that of other nodes");
            return Err(NodeError::invalid("store.tiers", &configs.len(), allowed));
        }
        let mut plans: Vec<TierPlan> = Vec::with_capacity(configs.len());
        for config in configs {
            config.check_fields()?;
            let place = self.place(config)?;
            let is_given =
                |name: &TierName| configs.iter().any(|other| other.name.as_deref() == Some(name.as_str()));
            let name = match &config.name {
                Some(name) => TierName::try_new(name)
                    .map_err(|_| NodeError::invalid("store.tiers.name", name, "1 to 32 of a-z, 0-9 and -"))?,
                None => TierName::of_kind(place.kind(), |name| {
                    is_given(name) || plans.iter().any(|plan| plan.name == *name)
                }),
            };
            if name == TierKind::Ram || plans.iter().any(|plan| plan.name == name) {
                return refuse(
                    "store.tiers.name",
                    name.as_str(),
                    "a name that no other tier has; `ram` is memory",
                );
            }
            let bounds = config.bounds()?;
            let encryption_key_file =
                config.encryption_key_file.as_ref().or(self.encryption_key_file).cloned();
            let codec = self.codec("store.tiers.codec", &config.codec)?.map(str::to_owned);
            let is_optional = config.optional;
            plans.push(TierPlan { name, place, bounds, encryption_key_file, codec, is_optional });
        }
        if n_peers == 0 {
            let is_remote = |plan: &TierPlan| matches!(plan.place, TierPlace::Remote(_));
            let above = plans.iter().position(is_remote).unwrap_or(plans.len());
            let name = TierName::of_kind(TierKind::Peer, |name| plans.iter().any(|plan| plan.name == *name));
            plans.insert(above, TierPlan::of_peers(name));
        }
        Ok(plans)
    }

    /// The codec of a name; `None` for `none`.
    pub(crate) fn codec<'c>(&self, field: &'static str, name: &'c str) -> Result<Option<&'c str>> {
        let is_lossless = kvik_tier::is_lossless_codec(name);
        if matches!(is_lossless, Ok(true)) || self.allow_lossy.iter().any(|allowed| allowed == name) {
            return Ok(Some(name).filter(|name| *name != "none"));
        }
        let allowed = "none, lossless, or one of fp8, int8, int4 and cachegen that `store.allow_lossy` names";
        refuse(field, name, allowed)
    }

    fn place(&self, config: &TierConfig) -> Result<TierPlace> {
        if let Some(text) = &config.nvme {
            return Ok(TierPlace::Nvme(self.disk("store.tiers.nvme", text, config.io.as_deref())?));
        }
        match &config.remote {
            Some(url) => Ok(TierPlace::Remote(self.remote(url, config)?)),
            None => Ok(TierPlace::Peer),
        }
    }

    /// A disk, as `nvme` says it.
    pub(crate) fn disk(&self, field: &'static str, text: &str, io: Option<&str>) -> Result<NvmePlan> {
        let io = match io.unwrap_or(self.io) {
            "auto" => IoKind::Auto,
            "uring" => IoKind::Uring,
            "positional" => IoKind::Positional,
            io => return refuse("store.nvme_io", io, "auto, uring or positional"),
        };
        let formats_device = self.formats_devices;
        let sized = text.rsplit_once(':').filter(|(path, _)| !path.is_empty());
        let Some((path, size)) = sized else {
            if text.starts_with("/dev/") {
                return Ok(NvmePlan { path: PathBuf::from(text), capacity_bytes: None, io, formats_device });
            }
            return refuse(field, text, NVME_FORM);
        };
        match size.parse::<ByteSize>().map(ByteSize::bytes) {
            Ok(capacity_bytes @ 1..) => Ok(NvmePlan {
                path: PathBuf::from(path),
                capacity_bytes: Some(capacity_bytes),
                io,
                formats_device,
            }),
            _ => refuse(field, text, NVME_FORM),
        }
    }

    /// A remote tier, with what `config` says of it.
    pub(crate) fn remote(&self, url: &SecretUrl, config: &TierConfig) -> Result<RemotePlan> {
        let parsed = url.expose().parse::<RemoteUrl>().map_err(|error| {
            // What is no address may be anything, a password too.
            let shown = if url.expose().contains("://") { url.to_string() } else { HIDDEN.to_owned() };
            NodeError::InvalidRemote { url: shown, reason: error.to_string() }
        })?;
        let timeout_ms = config.timeout_ms.unwrap_or(self.timeout_ms);
        check((1..=600_000).contains(&timeout_ms), "store.remote_timeout_ms", &timeout_ms, TIMEOUTS)?;
        let ttl_s = config.ttl_s.or(self.ttl_s);
        if let Some(seconds) = ttl_s {
            check((1..=315_360_000).contains(&seconds), "store.remote_ttl_s", &seconds, "1 to 315360000")?;
        }
        Ok(RemotePlan {
            url: parsed,
            timeout: Duration::from_millis(timeout_ms),
            ttl: ttl_s.map(Duration::from_secs),
            options: config.options.as_ref().unwrap_or(self.options).clone(),
            ca_file: config.ca_file.as_ref().or(self.ca_file).cloned(),
        })
    }
}

// === impl TierPlan, TierPlace, NvmePlan ===

impl TierPlan {
    /// The place of other nodes.
    pub(crate) fn of_peers(name: TierName) -> Self {
        let bounds = ThrottledOptions::default();
        Self {
            name,
            place: TierPlace::Peer,
            bounds,
            encryption_key_file: None,
            codec: None,
            is_optional: false,
        }
    }
}

impl TierPlace {
    pub(crate) fn kind(&self) -> TierKind {
        match self {
            Self::Nvme(_) => TierKind::Nvme,
            Self::Peer => TierKind::Peer,
            Self::Remote(remote) => remote.url.kind(),
        }
    }
}

impl NvmePlan {
    /// The part of the disk that one of `n_workers` has, as `nvme` says it: a folder of its own.
    ///
    /// # Errors
    /// [`NodeError::Invalid`] if it is a block device: that has one user.
    pub(crate) fn share_of(&self, worker_id: &str, n_workers: u64) -> Result<String> {
        match self.capacity_bytes {
            Some(capacity_bytes) if n_workers == 1 || !self.path.starts_with("/dev/") => {
                Ok(format!("{}:{}", self.path.join(worker_id).display(), capacity_bytes / n_workers))
            }
            _ => refuse(
                "store.nvme",
                &self.path.display().to_string(),
                "a folder where several workers share a disk",
            ),
        }
    }
}

/// The bounds of a tier; 0 means unbounded.
pub(crate) fn bounds(bytes_per_s: u64, max_calls: usize) -> ThrottledOptions {
    let default = ThrottledOptions::default();
    ThrottledOptions {
        bytes_per_s: (bytes_per_s > 0).then_some(bytes_per_s),
        max_calls: if max_calls > 0 { max_calls } else { default.max_calls },
        ..default
    }
}
