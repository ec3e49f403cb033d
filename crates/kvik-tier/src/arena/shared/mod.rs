//! Memory that processes share: words for their queues, and the arena of another process.
//!
//! The other process may be broken or hostile. Words are atomics, of which every bit pattern is a value, and bytes of
//! an arena are copied through raw pointers: what a peer writes at the wrong time can spoil values, never this
//! process' memory. A file that its owner could still shorten is refused, because touching the lost part kills.

mod mapping;
mod view;
mod words;

pub use view::{ArenaView, ViewAccess};
pub use words::SharedWords;

/// The checksum that accompanies bytes from one process to another: CRC-64/NVME.
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}
