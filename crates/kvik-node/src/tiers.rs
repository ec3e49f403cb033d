//! From a configuration to a store.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use kvik_runtime::config::cloud_environment;
use kvik_store::{DigestKey, KeptMemory, Store, StoreOptions, WriteBack};
use kvik_tier::{
    Arena, ArenaOptions, Breaker, BreakerOptions, Checksummed, Encrypted, EncryptionKeys, IoKind, Metered,
    NvmeOptions, NvmeTier, ObjectOptions, RamTier, RedisOptions, RemoteOptions, Retry, RetryOptions,
    Throttled, ThrottledOptions, Tier, TierKind, open_remote,
};
use kvik_types::BlockSize;

use crate::config::{PeerPlan, StoreConfig, StorePlan};
use crate::error::{NodeError, Result};
use crate::take_over::StoreParts;

/// The least that a secret must have: one that cannot be guessed.
const MIN_SECRET_BYTES: usize = 16;

/// Opens the tiers of `config`, of which `plan` is what it [resolves](StoreConfig::resolve) to, and puts the store
/// together.
///
/// A disk that cannot be used is an error of the start. A remote tier that cannot be reached is not: it may
/// come, and until then it is left alone.
///
/// # Errors
/// If memory or the disk cannot be used, or a file of keys cannot be read.
pub fn open_store(config: &StoreConfig, plan: &StorePlan, peers: Option<&PeerPlan>) -> Result<Store> {
    let options = ArenaOptions { numa: plan.numa, ..ArenaOptions::new(plan.ram_bytes) };
    let arena = Arena::new(options).map_err(refused)?;
    store_parts(config, plan, peers)?.open(KeptMemory::new(RamTier::new(arena)))
}

/// The settings of the store of `config`.
///
/// # Errors
/// If the key of digests cannot be read.
pub(crate) fn store_options(config: &StoreConfig, plan: &StorePlan) -> Result<StoreOptions> {
    Ok(StoreOptions {
        chunk_tokens: BlockSize::try_new(plan.chunk_tokens).map_err(refused)?,
        stores_tails: plan.stores_tails,
        policy: plan.policy,
        spares_last_copy: config.spare_last_copy,
        write_back: if plan.writes_on_reuse { WriteBack::OnReuse } else { WriteBack::OnStore },
        retrieve_timeout: plan.load_timeout,
        digest_key: config.digest_key_file.as_deref().map(read_digest_key).transpose()?,
        ..StoreOptions::default()
    })
}

/// Opens the tiers below memory, with the chunks of other nodes as one of them where there are `peers`.
///
/// # Errors
/// As [`open_store`].
pub(crate) fn store_parts(
    config: &StoreConfig,
    plan: &StorePlan,
    peers: Option<&PeerPlan>,
) -> Result<StoreParts> {
    let mut options = store_options(config, plan)?;
    let (mut locals, mut remotes, mut read_threads) = (Vec::new(), Vec::new(), Vec::new());
    let keys = config.encryption_key_file.as_deref().map(read_encryption_keys).transpose()?;
    if let Some(nvme) = &plan.nvme {
        let mut options = NvmeOptions::new(&nvme.dir, nvme.capacity_bytes);
        options.io = match config.nvme_io.as_str() {
            "uring" => IoKind::Uring,
            "positional" => IoKind::Positional,
            _ => IoKind::Auto,
        };
        let tier = NvmeTier::open(&options).map_err(refused)?;
        locals.push(guarded(Throttled::new(proven(tier, keys.as_ref()), plan.nvme_bounds.clone())));
    }
    if let Some(peers) = peers {
        let bounds = ThrottledOptions { bytes_per_s: peers.bytes_per_s, ..ThrottledOptions::default() };
        // No breaker around it: it leaves single peers alone.
        let tier: Arc<dyn Tier> = Arc::new(Metered::new(Throttled::new(Arc::clone(&peers.tier), bounds)));
        remotes.push(tier);
        read_threads.push((TierKind::Peer, peers.n_read_threads));
        // As long as one question to peers may take.
        options.lookup_timeout = options.lookup_timeout.max(peers.lookup_timeout);
    }
    if let Some(url) = &plan.remote {
        let tier = open_remote(url, &remote_options(config, plan)).map_err(refused)?;
        // One more try within the time of one: a short failure of the network is worth it, and a server
        // that is gone must not block a caller.
        let retry = RetryOptions { max_attempts: 2, budget: plan.remote_timeout, ..RetryOptions::default() };
        let tier = Retry::new(proven(tier, keys.as_ref()), retry);
        let tier = Throttled::new(tier, plan.remote_bounds.clone());
        remotes.push(guarded(tier));
    }
    Ok(StoreParts { options, locals, remotes, read_threads, cuda_device: config.cuda_device })
}

fn read_digest_key(path: &Path) -> Result<DigestKey> {
    let refuse =
        |reason: &dyn Display| refused(format!("`store.digest_key_file` is {}: {reason}", path.display()));
    let secret = std::fs::read(path).map_err(|error| refuse(&error))?;
    let secret = secret.trim_ascii_end();
    if secret.len() < MIN_SECRET_BYTES {
        return Err(refuse(&format!("{} bytes; allowed: {MIN_SECRET_BYTES} or more", secret.len())));
    }
    Ok(DigestKey::from_secret(secret))
}

fn read_encryption_keys(path: &Path) -> Result<Arc<EncryptionKeys>> {
    let keys = EncryptionKeys::open(path);
    keys.map(Arc::new)
        .map_err(|error| refused(format!("`store.encryption_key_file` is {}: {error}", path.display())))
}

fn remote_options(config: &StoreConfig, plan: &StorePlan) -> RemoteOptions {
    RemoteOptions {
        redis: RedisOptions {
            ttl: plan.remote_ttl,
            connect_timeout: plan.remote_timeout,
            response_timeout: plan.remote_timeout,
            ca_file: config.remote_ca_file.clone(),
            ..RedisOptions::default()
        },
        object: ObjectOptions {
            settings: config
                .remote_options
                .iter()
                .map(|(name, value)| (name.clone(), value.expose().to_owned()))
                .collect(),
            environment: cloud_environment(),
            connect_timeout: plan.remote_timeout,
            timeout: plan.remote_timeout,
            ca_file: config.remote_ca_file.clone(),
            ..ObjectOptions::default()
        },
    }
}

/// A tier that serves only what it can prove, and is unreadable without the keys where there are some.
fn proven(tier: impl Tier + 'static, keys: Option<&Arc<EncryptionKeys>>) -> Box<dyn Tier> {
    match keys {
        Some(keys) => Box::new(Encrypted::new(tier, Arc::clone(keys))),
        None => Box::new(Checksummed::new(tier)),
    }
}

/// A tier that is left alone for a while when it fails, and is measured.
fn guarded(tier: impl Tier + 'static) -> Arc<dyn Tier> {
    Arc::new(Metered::new(Breaker::new(tier, BreakerOptions::default())))
}

/// A store that refuses what is asked of it was configured wrongly.
fn refused(error: impl Display) -> NodeError {
    NodeError::Open { reason: error.to_string() }
}
