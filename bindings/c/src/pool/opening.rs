//! How a pool is opened: device, ledger, blocks and threads, in this order.
//!
//! Each part owns what it took, and gives it back where a later one fails: the engine leaves the ledger with its grants.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kvik_memory::config::{MemoryConfig, default_ipc_name};
use kvik_memory::geometry::BlockGeometry;
use kvik_memory::ledger::{JoinOptions, Ledger, LedgerOptions, Policy};
use kvik_memory::machine::memory_bytes;
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::{Guard, Region};
use parking_lot::Mutex;

use super::{Names, Pool};
use crate::backend::Backend;
use crate::block_pool::BlockPool;
use crate::chunks::Chunks;
use crate::config::{KVIK_FLAG_NO_PREALLOCATION, KVIK_FLAG_NULL_BLOCK, kvik_config};
use crate::grants::EngineGrants;
use crate::heap::Heap;
use crate::plan::Plan;
use crate::rank_region::{RankServer, Role, start_leader};
use crate::reclaim::Reclaimer;
use crate::signals::SignalsBlocked;
use crate::status::Failure;

/// What an engine calls itself where it does not say.
const DEFAULT_LABEL: &str = "proc";

impl Pool {
    /// Opens a pool of this process alone.
    pub(crate) fn open(
        config: &kvik_config,
        names: Names,
        environment: &MemoryConfig,
    ) -> Result<Box<Self>, Failure> {
        Self::open_as(Role::Alone, config, names, environment)
    }

    /// Opens a pool; settings that `config` does not give come from `environment`.
    pub(crate) fn open_as(
        role: Role,
        config: &kvik_config,
        names: Names,
        environment: &MemoryConfig,
    ) -> Result<Box<Self>, Failure> {
        let plan = Plan::try_new(config, environment.page_bytes)?;
        if !plan.has_blocks && !matches!(role, Role::Alone) {
            return Err(Failure::invalid("`config.n_blocks` is 0; allowed for ranks: 1 or more"));
        }
        let page_cost_bytes = plan.geometry.page_cost_bytes();
        if plan.has_blocks && config.max_bytes < page_cost_bytes {
            return Err(Failure::invalid(format!(
                "the limit is {} bytes; allowed: {page_cost_bytes}, which is one page, or more",
                config.max_bytes
            )));
        }
        let label = names.label.unwrap_or_else(|| DEFAULT_LABEL.to_owned());
        let ipc_name = names.ipc_name.or_else(|| environment.ipc_name.clone()).unwrap_or_else(|| {
            // SAFETY: the call has no arguments and cannot fail.
            let process_group = unsafe { libc::getpgrp() };
            default_ipc_name(&label, process_group.unsigned_abs())
        });
        let machine_bytes = if config.host_bytes == 0 { memory_bytes() } else { config.host_bytes };
        let backend = Backend::open(config.device, machine_bytes)?;
        let vmm = backend.vmm();
        let utilization = environment.device_utilization;
        let ledger = Ledger::open(&LedgerOptions {
            dir: names.directory.map_or_else(|| environment.dir.clone(), PathBuf::from),
            budget_bytes: matches!(backend, Backend::Host(_))
                .then_some((machine_bytes as f64 * utilization) as u64),
            ..LedgerOptions::new(vmm.device_name())
        })?;
        match backend {
            Backend::Host(_) if config.host_bytes != 0 => ledger.set_budget_bytes(config.host_bytes)?,
            Backend::Host(_) => {}
            Backend::Cuda(_) => {
                ledger.reconcile(vmm.memory_info()?, utilization)?;
            }
        }
        let join_options = JoinOptions {
            policy: Policy {
                min_bytes: config.min_bytes,
                max_bytes: (config.max_bytes != u64::MAX).then_some(config.max_bytes),
                weight: config.weight,
                priority: config.priority,
            },
            ..JoinOptions::new(ipc_name, label)
        };
        let member = ledger.join(&join_options)?;
        // The blocks of a rank are the leader's: its own pool has a page of addresses and never maps it.
        let has_blocks = plan.has_blocks && !matches!(role, Role::Rank { .. });
        let geometry = if matches!(role, Role::Rank { .. }) { plan.without_pages()? } else { plan.geometry };
        let states = member.create_page_states(geometry.capacity_pages(), page_cost_bytes)?;
        let reclaimer = Arc::new(Reclaimer::default());
        let grants = Arc::new(EngineGrants::new(member));
        let options = PoolOptions {
            geometry,
            guard: if has_blocks { environment.guard } else { Guard::None },
            settings: PoolSettings {
                block_bytes: plan.block_bytes,
                has_null_block: has_blocks && config.has_flag(KVIK_FLAG_NULL_BLOCK),
                is_preallocating: has_blocks
                    && environment.is_preallocating
                    && !config.has_flag(KVIK_FLAG_NO_PREALLOCATION),
                low_watermark_pages: environment.low_watermark_pages,
                high_watermark_pages: environment.high_watermark_pages,
                trim_after: environment.trim_after,
                limit_pages: (!has_blocks).then_some(0),
            },
        };
        // The threads of agent and rank do not belong to the engine.
        let signals_blocked = SignalsBlocked::new();
        let (pool, rank, base_address) = match role {
            Role::Alone => {
                let pool =
                    KvPool::open_with(vmm, grants.clone(), grants.clone(), Some(Arc::new(states)), &options)?;
                let base_address = pool.region().map_or(0, |region| region.range().address);
                (pool, None, base_address)
            }
            // A guard would be memory that no grant covers.
            Role::Leader { sockets, timeout } => {
                let region = Arc::new(Region::try_new(vmm, plan.geometry, Guard::None)?);
                let base_address = region.range().address;
                let settings = options.settings;
                let pool = start_leader(region, &sockets, timeout, &grants, Arc::new(states), settings)?;
                (pool, None, base_address)
            }
            Role::Rank { rank, n_ranks, socket } => {
                let region = Region::try_new(Arc::clone(&vmm), plan.geometry, Guard::None)?;
                let base_address = region.range().address;
                let pool =
                    KvPool::open_with(vmm, grants.clone(), grants.clone(), Some(Arc::new(states)), &options)?;
                let server = RankServer::start(region, &grants, rank, n_ranks, socket)?;
                (pool, Some(server), base_address)
            }
        };
        drop(signals_blocked);
        pool.set_reclaim_callback({
            let reclaimer = Arc::clone(&reclaimer);
            move |n_bytes| reclaimer.call(n_bytes)
        });
        let blocks = Arc::new(BlockPool::new(pool));
        grants.attach(&blocks);
        Ok(Box::new(Self {
            rank,
            blocks,
            grants,
            reclaimer,
            chunks: Chunks::default(),
            chunk_bytes: AtomicU64::new(0),
            admitted_bytes: AtomicU64::new(0),
            heap: Heap::new(join_options, environment.clone()),
            block_geometry: BlockGeometry::try_new(&plan.geometry, plan.block_bytes)?,
            plan,
            base_address,
            last_message: Mutex::new(Cow::Borrowed("")),
            backend,
        }))
    }
}
