//! What all ways of copying take: bytes at one address that go to another.

/// One piece of a copy. One of the addresses is the GPU's, the other the host's; the driver knows which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPiece {
    /// Where the bytes go.
    pub target: u64,
    /// Where they come from.
    pub source: u64,
    /// How many.
    pub n_bytes: usize,
}
