//! Copies between the memory of a GPU and the arena of the store.

use kvik_memory::vmm::cuda::{CopyPiece, CopyWay, CudaCopier, CudaHostMemory};
use kvik_node::NodeClient;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::error::KvikError;

/// A GPU with a stream for each direction.
#[derive(Debug)]
pub(crate) struct Gpu {
    loads: CudaCopier,
    saves: CudaCopier,
    host: CudaHostMemory,
    /// The arenas that the driver knows, with the clients that keep them mapped.
    registered: Mutex<Vec<RegisteredArena>>,
}

#[derive(Debug)]
struct RegisteredArena {
    client: NodeClient,
    /// `Single` where the driver refused it.
    way: CopyWay,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToGpu,
    FromGpu,
}

impl Gpu {
    pub(crate) fn open(ordinal: u32) -> PyResult<Self> {
        let failed = |error| KvikError::new_err(format!("open the GPU {ordinal}: {error}"));
        Ok(Self {
            loads: CudaCopier::open_staged(ordinal).map_err(failed)?,
            saves: CudaCopier::open(ordinal).map_err(failed)?,
            host: CudaHostMemory::open(ordinal).map_err(failed)?,
            registered: Mutex::default(),
        })
    }

    /// Registers the arena of a client, once, and says how it may be copied; copies of an arena that cannot be registered are
    /// slower.
    pub(crate) fn register(&self, client: &NodeClient) -> CopyWay {
        let (address, n_bytes) = client.arena();
        let mut registered = self.registered.lock();
        if let Some(arena) = registered.iter().find(|arena| arena.client.arena().0 == address) {
            return arena.way;
        }
        // Arenas of daemons that are gone.
        registered.retain(|arena| !arena.client.is_gone() || !self.forget(arena));
        // As one range: the driver refuses copies from or to memory that was registered in two.
        let way = match self.host.register(address, n_bytes) {
            Ok(()) => CopyWay::BatchOrKernel,
            Err(error) => {
                tracing::warn!(%error, "the store's memory is not registered with the GPU: copies are slower");
                CopyWay::Single
            }
        };
        registered.push(RegisteredArena { client: client.clone(), way });
        way
    }

    fn forget(&self, arena: &RegisteredArena) -> bool {
        if arena.way != CopyWay::Single {
            self.host.unregister(arena.client.arena().0);
        }
        true
    }

    /// Copies pieces, each an address of the GPU, one of the arena, and a length, behind the event `after`.
    ///
    /// # Safety
    /// As for [`CudaCopier::copy`].
    pub(crate) unsafe fn copy(
        &self,
        direction: Direction,
        pieces: impl Iterator<Item = (usize, usize, usize)>,
        way: CopyWay,
        after: Option<u64>,
    ) -> Result<(), kvik_memory::MemoryError> {
        let mut joined: Vec<CopyPiece> = Vec::new();
        for (gpu, host, n_bytes) in pieces {
            let (target, source) = match direction {
                Direction::ToGpu => (gpu as u64, host as u64),
                Direction::FromGpu => (host as u64, gpu as u64),
            };
            // Blocks that lie beside each other on both sides are one piece.
            match joined.last_mut() {
                Some(last)
                    if last.target + last.n_bytes as u64 == target
                        && last.source + last.n_bytes as u64 == source =>
                {
                    last.n_bytes += n_bytes;
                }
                _ => joined.push(CopyPiece { target, source, n_bytes }),
            }
        }
        // Towards the host the driver's copies are as fast, and leave the GPU's processors alone.
        let (copier, way) = match direction {
            Direction::ToGpu => (&self.loads, way),
            Direction::FromGpu if way == CopyWay::BatchOrKernel => (&self.saves, CopyWay::Batch),
            Direction::FromGpu => (&self.saves, way),
        };
        // SAFETY: the caller answers for all of it.
        unsafe { copier.copy(&joined, way, after) }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let registered = std::mem::take(&mut *self.registered.lock());
        for arena in &registered {
            self.forget(arena);
        }
    }
}
