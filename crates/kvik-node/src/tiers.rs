//! From a configuration to a store.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvik_runtime::config::cloud_environment;
use kvik_store::{DigestKey, KeptMemory, LowerTier, Store, StoreOptions, WriteBack};
use kvik_tier::{
    Absent, Arena, ArenaOptions, Breaker, BreakerOptions, Checksummed, Coded, CodedSpaces, Encrypted,
    EncryptionKeys, LmOptions, Metered, NvmeOptions, NvmeTier, ObjectOptions, RamTier, RedisOptions,
    RemoteOptions, Retry, RetryOptions, Throttled, ThrottledOptions, Tier, open_remote,
};
use kvik_types::BlockSize;

use crate::bandwidth::TenantBandwidth;
use crate::config::{NvmePlan, PeerPlan, RemotePlan, StoreConfig, StorePlan, TierPlace, TierPlan};
use crate::error::{NodeError, Result};
use crate::take_over::StoreParts;

/// The least that a secret must have: one that cannot be guessed.
const MIN_SECRET_BYTES: usize = 16;

/// Opens the tiers of `config`, of which `plan` is what it [resolves](StoreConfig::resolve) to, and puts the store
/// together.
///
/// A disk that cannot be used is an error of the start, unless it is optional. A remote tier that cannot be reached is
/// not: it may come, and until then it is left alone.
///
/// # Errors
/// If memory or a disk cannot be used, or a file of keys cannot be read.
pub fn open_store(config: &StoreConfig, plan: &StorePlan, peers: Option<&PeerPlan>) -> Result<Store> {
    open_store_with(config, plan, peers, None)
}

/// As [`open_store`], for a tenant that shares bounds with others.
///
/// # Errors
/// As [`open_store`], and if a bound differs from that of another tenant.
pub(crate) fn open_store_with(
    config: &StoreConfig,
    plan: &StorePlan,
    peers: Option<&PeerPlan>,
    bandwidth: Option<TenantBandwidth<'_>>,
) -> Result<Store> {
    let options = ArenaOptions { numa: plan.numa, ..ArenaOptions::new(plan.ram_bytes) };
    let arena = Arena::new(options).map_err(NodeError::opening)?;
    store_parts(config, plan, peers, bandwidth)?.open(KeptMemory::new(RamTier::new(arena)))
}

/// The settings of the store of `config`.
///
/// # Errors
/// If the key of digests cannot be read.
pub(crate) fn store_options(config: &StoreConfig, plan: &StorePlan) -> Result<StoreOptions> {
    Ok(StoreOptions {
        chunk_tokens: BlockSize::try_new(plan.chunk_tokens)
            .map_err(|error| NodeError::InvalidStore { reason: error.to_string() })?,
        stores_tails: plan.stores_tails,
        policy: plan.policy,
        spares_last_copy: config.spare_last_copy,
        write_back: if plan.writes_on_reuse { WriteBack::OnReuse } else { WriteBack::OnStore },
        retrieve_timeout: plan.load_timeout,
        digest_key: config.digest_key_file.as_deref().map(read_digest_key).transpose()?,
        coded_spaces: plan.tiers.iter().any(|tier| tier.codec.is_some()).then(Arc::default),
        lossy_codecs: plan.allow_lossy.clone(),
        ..StoreOptions::default()
    })
}

/// Opens the tiers below memory, with the chunks of other nodes as one of them where there are `peers`.
///
/// # Errors
/// As [`open_store_with`].
pub(crate) fn store_parts(
    config: &StoreConfig,
    plan: &StorePlan,
    peers: Option<&PeerPlan>,
    bandwidth: Option<TenantBandwidth<'_>>,
) -> Result<StoreParts> {
    let mut options = store_options(config, plan)?;
    // A file that cannot be used is an error of the start, also where no tier needs it yet.
    let mut keys = KeyFiles::default();
    if let Some(file) = &config.encryption_key_file {
        keys.read(file)?;
    }
    let mut tiers = Vec::new();
    for tier_plan in &plan.tiers {
        let opened = match (&tier_plan.place, peers) {
            (TierPlace::Peer, None) => continue,
            (TierPlace::Peer, Some(peers)) => {
                // As long as one question to peers may take.
                options.lookup_timeout = options.lookup_timeout.max(peers.lookup_timeout);
                open_peers(tier_plan, peers, bandwidth)
            }
            (TierPlace::Nvme(disk), _) => open_disk(tier_plan, disk, &options, &mut keys, bandwidth),
            (TierPlace::Remote(remote), _) => open_far(tier_plan, remote, &options, &mut keys, bandwidth),
        };
        let opened = match opened {
            Err(error) if tier_plan.is_optional => {
                tracing::error!(tier = %tier_plan.name, %error, "the store starts without a tier");
                let absent: Arc<dyn Tier> = Arc::new(Absent::new(tier_plan.place.kind(), error.to_string()));
                match &tier_plan.place {
                    TierPlace::Nvme(_) => LowerTier::local(absent),
                    TierPlace::Peer | TierPlace::Remote(_) => LowerTier::remote(absent),
                }
            }
            opened => opened?,
        };
        tiers.push(opened.named(tier_plan.name.clone()));
    }
    Ok(StoreParts { options, tiers, cuda_device: config.cuda_device })
}

fn open_disk(
    plan: &TierPlan,
    disk: &NvmePlan,
    options: &StoreOptions,
    keys: &mut KeyFiles,
    bandwidth: Option<TenantBandwidth<'_>>,
) -> Result<LowerTier> {
    let capacity_bytes = disk.capacity_bytes.unwrap_or(NvmeOptions::WHOLE_DEVICE);
    let NvmePlan { io, formats_device, .. } = *disk;
    let disk = NvmeOptions { io, formats_device, ..NvmeOptions::new(&disk.path, capacity_bytes) };
    let tier = NvmeTier::open(&disk).map_err(NodeError::opening)?;
    let tier = throttled(proven(tier, plan, keys)?, plan, &plan.bounds, bandwidth)?;
    Ok(LowerTier::local(coded(tier, plan, options)?))
}

fn open_peers(
    plan: &TierPlan,
    peers: &PeerPlan,
    bandwidth: Option<TenantBandwidth<'_>>,
) -> Result<LowerTier> {
    let bounds = ThrottledOptions { bytes_per_s: peers.bytes_per_s, ..plan.bounds.clone() };
    // No breaker around it: it leaves single peers alone.
    let tier = Metered::new(throttled(Arc::clone(&peers.tier), plan, &bounds, bandwidth)?);
    Ok(LowerTier { n_read_threads: Some(peers.n_read_threads), ..LowerTier::remote(Arc::new(tier)) })
}

fn open_far(
    plan: &TierPlan,
    remote: &RemotePlan,
    options: &StoreOptions,
    keys: &mut KeyFiles,
    bandwidth: Option<TenantBandwidth<'_>>,
) -> Result<LowerTier> {
    let tier = open_remote(&remote.url, &remote_options(remote)).map_err(NodeError::opening)?;
    // One more try within the time of one: a short failure of the network is worth it, and a server
    // that is gone must not block a caller.
    let retry = RetryOptions { max_attempts: 2, budget: remote.timeout, ..RetryOptions::default() };
    let tier = Retry::new(proven(tier, plan, keys)?, retry);
    let tier = throttled(tier, plan, &plan.bounds, bandwidth)?;
    Ok(LowerTier::remote(coded(tier, plan, options)?))
}

/// A tier within its bounds, which it may share with those of other tenants.
fn throttled<T: Tier>(
    tier: T,
    plan: &TierPlan,
    bounds: &ThrottledOptions,
    bandwidth: Option<TenantBandwidth<'_>>,
) -> Result<Throttled<T>> {
    Ok(match bandwidth {
        Some(bandwidth) => {
            let share = bandwidth.share_of(&plan.name, bounds)?;
            Throttled::with_share(tier, bounds.clone(), share)
        }
        None => Throttled::new(tier, bounds.clone()),
    })
}

fn read_digest_key(path: &Path) -> Result<DigestKey> {
    let with = |reason: &dyn Display| format!("`store.digest_key_file` is {}: {reason}", path.display());
    let secret = std::fs::read(path).map_err(|error| NodeError::Open { reason: with(&error) })?;
    let secret = secret.trim_ascii_end();
    if secret.len() < MIN_SECRET_BYTES {
        let reason = with(&format!("{} bytes; allowed: {MIN_SECRET_BYTES} or more", secret.len()));
        return Err(NodeError::InvalidStore { reason });
    }
    Ok(DigestKey::from_secret(secret))
}

/// The files of keys that were read, each once for all tiers.
#[derive(Default)]
struct KeyFiles(BTreeMap<PathBuf, Arc<EncryptionKeys>>);

impl KeyFiles {
    fn read(&mut self, path: &Path) -> Result<Arc<EncryptionKeys>> {
        if let Some(keys) = self.0.get(path) {
            return Ok(Arc::clone(keys));
        }
        let keys = EncryptionKeys::open(path).map(Arc::new).map_err(|error| {
            NodeError::opening_with(error, &format!("`store.encryption_key_file` is {}: ", path.display()))
        })?;
        self.0.insert(path.to_owned(), Arc::clone(&keys));
        Ok(keys)
    }
}

fn remote_options(remote: &RemotePlan) -> RemoteOptions {
    let RemotePlan { timeout, ttl, options, ca_file, .. } = remote;
    RemoteOptions {
        redis: RedisOptions {
            ttl: *ttl,
            connect_timeout: *timeout,
            response_timeout: *timeout,
            ca_file: ca_file.clone(),
            ..RedisOptions::default()
        },
        object: ObjectOptions {
            settings: options.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect(),
            environment: cloud_environment(),
            connect_timeout: *timeout,
            timeout: *timeout,
            ca_file: ca_file.clone(),
            ..ObjectOptions::default()
        },
        lm: LmOptions { connect_timeout: *timeout, response_timeout: *timeout, ..LmOptions::default() },
    }
}

/// A tier that serves only what it can prove, and is unreadable without the keys where there are some.
fn proven(tier: impl Tier + 'static, plan: &TierPlan, keys: &mut KeyFiles) -> Result<Box<dyn Tier>> {
    Ok(match &plan.encryption_key_file {
        Some(file) => Box::new(Encrypted::new(tier, keys.read(file)?)),
        None => Box::new(Checksummed::new(tier)),
    })
}

/// A guarded tier whose chunks are coded as its plan says. Its bounds are for what moves, which is coded.
fn coded(tier: impl Tier + 'static, plan: &TierPlan, options: &StoreOptions) -> Result<Arc<dyn Tier>> {
    let (Some(codec), Some(spaces)) = (&plan.codec, &options.coded_spaces) else {
        return Ok(guarded(tier));
    };
    let spaces: Arc<CodedSpaces> = Arc::clone(spaces);
    let tier = Coded::try_new(tier, codec, &options.lossy_codecs, spaces).map_err(NodeError::opening)?;
    Ok(guarded(tier))
}

/// A tier that is left alone for a while when it fails, and is measured.
fn guarded(tier: impl Tier + 'static) -> Arc<dyn Tier> {
    Arc::new(Metered::new(Breaker::new(tier, BreakerOptions::default())))
}

/// Makes a block device ready for chunks, `capacity_bytes` of it or all; returns the bytes that they may take with what
/// describes them. Everything that was on it is lost.
///
/// # Errors
/// If it is no device, is in use, has the mark of another program, or was formatted before.
pub fn format_device(device: &Path, capacity_bytes: Option<u64>) -> Result<u64> {
    let options = NvmeOptions::new(device, capacity_bytes.unwrap_or(NvmeOptions::WHOLE_DEVICE));
    kvik_tier::format_device(&options).map_err(NodeError::opening)
}
