//! A device with a ledger in a folder of its own.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use kvik_memory::Geometry;
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{DEFAULT_DIR, JoinOptions, Ledger, LedgerOptions, Member};
use kvik_memory::pool::{KvPool, PoolOptions, PoolSettings};
use kvik_memory::region::{Guard, Region};
use kvik_memory::vmm::Vmm;
use kvik_memory::vmm::cuda::CudaVmm;
use kvik_memory::vmm::host::{HostDevice, HostVmm};

use super::BenchDevice;

/// Keys and values of 32 layers.
pub(super) const N_BUFFERS: u32 = 64;
pub(super) const PAGE_BYTES: u64 = UNIT_BYTES;
/// 2 MiB over all buffers: 16 tokens of 8 heads of 128 elements of 16 bits in each.
pub(super) const BLOCK_BYTES: u64 = 32 << 10;
/// 64 GiB of addresses.
pub(super) const CAPACITY_PAGES: u32 = 512;
/// Beside what is grown to: guards, pages kept ready, pages of the other measurements.
const SPARE_BYTES: u64 = 8 << 30;
/// Names that are tried for the folder.
const MAX_FOLDERS: u32 = 100;

/// What the measurements are done on.
#[derive(Debug)]
pub(super) struct Stand {
    vmm: Arc<dyn Vmm>,
    geometry: Geometry,
    guard: Guard,
    ledger: Ledger,
    folder: Folder,
}

/// A folder in shared memory that goes when this is dropped.
#[derive(Debug)]
struct Folder(PathBuf);

impl Stand {
    /// Opens the device, which must have room for `growth_bytes`.
    pub(super) fn try_new(device: BenchDevice, growth_bytes: u64) -> anyhow::Result<Self> {
        let budget_bytes = growth_bytes + SPARE_BYTES;
        let vmm: Arc<dyn Vmm> = match device {
            // It is mapped and never touched, so it takes addresses and no memory.
            BenchDevice::Host => Arc::new(HostVmm::open(HostDevice::new(budget_bytes))?),
            BenchDevice::Cuda(ordinal) => Arc::new(CudaVmm::open(ordinal)?),
        };
        let free_bytes = vmm.memory_info()?.free_bytes;
        ensure!(
            budget_bytes <= free_bytes,
            "take {} GiB of the device: {} GiB are free",
            budget_bytes >> 30,
            free_bytes >> 30
        );
        let folder = Folder::create()?;
        let ledger = Ledger::open(&LedgerOptions {
            dir: folder.0.clone(),
            budget_bytes: Some(budget_bytes),
            ..LedgerOptions::new(vmm.device_name())
        })?;
        let geometry = Geometry::try_new(N_BUFFERS, PAGE_BYTES, CAPACITY_PAGES)?;
        let guard = Region::try_new(Arc::clone(&vmm), geometry, Guard::Zero)?.guard();
        Ok(Self { vmm, geometry, guard, ledger, folder })
    }

    /// The device as the ledger names it.
    pub(super) fn device_name(&self) -> &str {
        self.vmm.device_name()
    }

    /// The folder of the ledger.
    pub(super) fn folder(&self) -> &Path {
        &self.folder.0
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The guard that regions of this device have.
    pub(super) fn guard(&self) -> Guard {
        self.guard
    }

    /// A new member of the ledger.
    pub(super) fn join(&self, ipc_name: &str) -> anyhow::Result<Member> {
        Ok(self.ledger.join(&JoinOptions::new(ipc_name, "kvik bench memory"))?)
    }

    /// A region in which nothing is mapped.
    pub(super) fn region(&self) -> anyhow::Result<Region> {
        Ok(Region::try_new(Arc::clone(&self.vmm), self.geometry, Guard::Zero)?)
    }

    /// An engine's pool.
    pub(super) fn pool(&self, ipc_name: &str, settings: PoolSettings) -> anyhow::Result<KvPool> {
        let options = PoolOptions { geometry: self.geometry, guard: Guard::Zero, settings };
        Ok(KvPool::open(Arc::clone(&self.vmm), self.join(ipc_name)?, &options)?)
    }
}

impl Folder {
    fn create() -> anyhow::Result<Self> {
        let pid = std::process::id();
        let mut number = 0;
        loop {
            let path = Path::new(DEFAULT_DIR).join(format!("kvik-bench-{pid}-{number}"));
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                // Of a process with the same number that was killed, or that lives in another namespace.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < MAX_FOLDERS => {
                    number += 1;
                }
                Err(error) => return Err(error).with_context(|| format!("create {}", path.display())),
            }
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left of it is a few kilobytes; a failure has no consequence.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
