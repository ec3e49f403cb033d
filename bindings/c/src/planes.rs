//! Where K and V of each layer lie in a block.

use kvik_memory::geometry::Geometry;

use crate::status::Failure;

#[cfg(test)]
mod tests;

/// Where the planes of a block lie, relative to its start in the first buffer.
///
/// A plane is K or V of one layer. The planes of a block are of one size and follow each other, layer by layer, through
/// its bytes in all buffers: so one buffer has all of them, each layer has its own, or each plane has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Planes {
    n_per_layer: u64,
    n_per_buffer: u64,
    plane_bytes: u64,
    buffer_stride_bytes: u64,
}

impl Planes {
    /// Fails where the planes cannot be of one size, or one would lie in two buffers.
    pub(crate) fn try_new(
        geometry: &Geometry,
        block_bytes: u64,
        n_layers: u32,
        has_values: bool,
    ) -> Result<Self, Failure> {
        let n_per_layer = if has_values { 2 } else { 1 };
        let n_planes = u64::from(n_layers) * n_per_layer;
        let n_buffers = u64::from(geometry.n_buffers());
        if n_planes == 0 || !n_planes.is_multiple_of(n_buffers) {
            return Err(Failure::invalid(format!(
                "`n_layers` is {n_layers}; allowed: 1 or more, {n_per_layer} planes each, as a multiple of the \
                 {n_buffers} buffers"
            )));
        }
        let n_per_buffer = n_planes / n_buffers;
        if !block_bytes.is_multiple_of(n_per_buffer) {
            return Err(Failure::invalid(format!(
                "`n_layers` is {n_layers}; allowed: as many as divide a block of {block_bytes} bytes into \
                 {n_per_buffer} planes"
            )));
        }
        Ok(Self {
            n_per_layer,
            n_per_buffer,
            plane_bytes: block_bytes / n_per_buffer,
            buffer_stride_bytes: geometry.buffer_stride_bytes(),
        })
    }

    /// Bytes from the block's start to K (`part` 0) or V (1) of `layer`.
    pub(crate) fn offset_bytes(&self, layer: u32, part: u64) -> u64 {
        let plane = u64::from(layer) * self.n_per_layer + part;
        plane / self.n_per_buffer * self.buffer_stride_bytes + plane % self.n_per_buffer * self.plane_bytes
    }
}
