//! What one round finds out about one project.

use crate::workload::MIB;

/// The memory part of both projects.
pub const MEMORY_BYTES: usize = 64 * MIB;

/// The most bytes that the files of either project take.
pub const DISK_BYTES: usize = 2048 * MIB;

pub struct Sample {
    /// Of the chunks that were on the disk at the end.
    pub put_gb_per_s: f64,
    /// By several threads.
    pub get_gb_per_s: f64,
    /// By one thread, through the memory part.
    pub retrieve_gb_per_s: f64,
    pub single_gets_ms: Vec<f64>,
    pub single_retrieves_ms: Vec<f64>,
    pub reopen_ms: f64,
    /// Chunks that were put and are not there.
    pub n_dropped: usize,
    /// Chunks that were there when the project was closed, and are not after it was opened again.
    pub n_lost: usize,
    /// Reads that found nothing, in two passes over all chunks that were put.
    pub n_missed: usize,
}
