//! Memory that processes share: words for their queues, and the arena of another process.
//!
//! The other process may be broken or hostile. Words are atomics, of which every bit pattern is a value, and bytes of
//! an arena are copied through raw pointers: what a peer writes at the wrong time can spoil values, never this
//! process' memory. A file that its owner could still shorten is refused, because touching the lost part kills.

mod combine;
mod mapping;
mod stream;
mod view;
mod words;

pub use view::{ArenaView, ViewAccess};
pub use words::SharedWords;

/// The checksum that accompanies bytes from one process to another: CRC-64/NVME.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum(pub u64);

/// The checksum of bytes.
pub fn checksum(bytes: &[u8]) -> Checksum {
    Checksum(crc_fast::checksum(ALGORITHM, bytes))
}

/// The checksum of bytes that come in pieces.
#[derive(Debug, Clone)]
pub struct RunningChecksum(crc_fast::Digest);

impl RunningChecksum {
    /// Takes the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all pieces.
    pub fn finish(self) -> Checksum {
        Checksum(self.0.finalize())
    }
}

impl Default for RunningChecksum {
    fn default() -> Self {
        Self(crc_fast::Digest::new(ALGORITHM))
    }
}

/// The checksum of bytes with the checksum `first` that are followed by `n_bytes` with the checksum `second`.
pub fn combine_checksums(first: Checksum, second: Checksum, n_bytes: usize) -> Checksum {
    Checksum(combine::combine(first.0, second.0, n_bytes as u64))
}

const ALGORITHM: crc_fast::CrcAlgorithm = crc_fast::CrcAlgorithm::Crc64Nvme;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_parts_is_that_of_the_whole() {
        let bytes: Vec<u8> = (0..5000_u32).map(|place| (place * 7 % 251) as u8).collect();
        for cut in [0, 1, 63, 2500, 5000] {
            let (first, second) = bytes.split_at(cut);
            let joined = combine_checksums(checksum(first), checksum(second), second.len());
            assert_eq!(joined, checksum(&bytes), "{cut}");
            let mut running = RunningChecksum::default();
            running.update(first);
            running.update(second);
            assert_eq!(running.finish(), checksum(&bytes), "{cut}");
        }
    }

    #[test]
    fn long_parts_combine_as_the_crate_that_sums_says() {
        let lengths = [0, 1, 7, 1 << 20, (1 << 20) + 13, 32 << 20, 1 << 40, (1 << 60) + 12_345];
        for (place, n_bytes) in lengths.into_iter().enumerate() {
            let first = 0x0123_4567_89AB_CDEF_u64.rotate_left(place as u32 * 7);
            let second = first.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let expected = crc_fast::checksum_combine(ALGORITHM, first, second, n_bytes);
            let joined = combine_checksums(Checksum(first), Checksum(second), n_bytes as usize);
            assert_eq!(joined.0, expected, "{n_bytes}");
        }
    }
}
