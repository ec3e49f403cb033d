//! From a configuration to a store.

use std::sync::Arc;

use kvik_runtime::config::cloud_environment;
use kvik_store::{Store, StoreOptions, WriteBack, register_with_cuda};
use kvik_tier::{
    Arena, ArenaOptions, Breaker, BreakerOptions, Checksummed, IoKind, Metered, NvmeOptions, NvmeTier,
    ObjectOptions, RamTier, RedisOptions, RemoteOptions, Retry, RetryOptions, Throttled, ThrottledOptions,
    Tier, open_remote,
};
use kvik_types::BlockSize;

use super::refused;
use crate::config::{StoreConfig, StorePlan};
use crate::error::Result;

/// Opens the tiers and puts the store together.
///
/// A disk that cannot be used is an error of the start. A remote tier that cannot be reached is not: it may
/// come, and until then it is left alone.
pub(super) fn open(config: &StoreConfig, plan: &StorePlan) -> Result<Store> {
    let options = StoreOptions {
        chunk_tokens: BlockSize::try_new(plan.chunk_tokens).map_err(refused)?,
        stores_tails: plan.stores_tails,
        policy: plan.policy,
        write_back: if plan.writes_on_reuse { WriteBack::OnReuse } else { WriteBack::OnStore },
        retrieve_timeout: plan.load_timeout,
        ..StoreOptions::default()
    };
    let arena = Arena::new(ArenaOptions::new(plan.ram_bytes)).map_err(refused)?;
    if let Some(ordinal) = config.cuda_device {
        register_with_cuda(&arena, ordinal).map_err(refused)?;
    }
    let mut builder = Store::builder(options, RamTier::new(arena));
    if let Some(nvme) = &plan.nvme {
        let mut options = NvmeOptions::new(&nvme.dir, nvme.capacity_bytes);
        options.io = match config.nvme_io.as_str() {
            "uring" => IoKind::Uring,
            "positional" => IoKind::Positional,
            _ => IoKind::Auto,
        };
        let tier = NvmeTier::open(&options).map_err(refused)?;
        builder = builder.local(guarded(Checksummed::new(tier)));
    }
    if let Some(url) = &plan.remote {
        let tier = open_remote(url, &remote_options(config, plan)).map_err(refused)?;
        // One more try within the time of one: what a moment of a network spoils is worth it, and a server
        // that is gone must not hold anybody up.
        let retry = RetryOptions { max_attempts: 2, budget: plan.remote_timeout, ..RetryOptions::default() };
        let tier = Throttled::new(Retry::new(Checksummed::new(tier), retry), ThrottledOptions::default());
        builder = builder.remote(guarded(tier));
    }
    builder.open().map_err(refused)
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

/// A tier that is left alone for a while when it fails, and is measured.
fn guarded(tier: impl Tier + 'static) -> Arc<dyn Tier> {
    Arc::new(Metered::new(Breaker::new(tier, BreakerOptions::default())))
}
