//! The native part of the Python package `kvik`.
//!
//! Engines in Python name chunks, and this module moves the bytes between their memory and the store of the node, on
//! threads of its own that never hold Python's lock.

#![expect(clippy::needless_pass_by_value, reason = "arguments come from Python by value")]

mod array;
mod awaiting;
mod buffer;
mod chain;
mod client;
mod copies;
mod dlpack;
mod elastic;
mod engine;
mod error;
mod found;
mod gpu;
mod index;
mod job;
mod layers;
mod memory;
mod own_store;
mod paged;
mod planner;
mod sessions;
mod store;

use pyo3::prelude::*;

/// The native part of kvik; import `kvik` instead.
#[pymodule]
fn _kvik(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<chain::Chain>()?;
    module.add_class::<client::Client>()?;
    module.add_class::<client::Prefetch>()?;
    module.add_class::<elastic::Memory>()?;
    module.add_class::<elastic::MemoryTensor>()?;
    module.add_class::<index::Index>()?;
    module.add_class::<index::WorkerMatch>()?;
    module.add_class::<job::Job>()?;
    module.add_class::<memory::EngineMemory>()?;
    module.add_class::<paged::PagedMemory>()?;
    module.add_class::<planner::LoadPlanner>()?;
    module.add_class::<planner::MeasuredLoad>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<found::Found>()?;
    error::add_to(module)
}
