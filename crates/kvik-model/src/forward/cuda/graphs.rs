//! Passes of rows that decode, recorded when their shape comes again.
//!
//! The arguments of all kernels follow from the shape of the lists and from where the buffers lie: a recorded pass does what queuing
//! it kernel by kernel would do. What differs between two passes of one shape stands in the lists, which the pass fetches first.

use std::sync::Arc;

use super::device::{Device, Graph};
use super::lists::ListSizes;
use crate::error::Result;

/// Shapes that are known at a time: batch sizes of a load that comes and goes.
const MAX_SHAPES: usize = 64;

/// What the arguments of a pass follow from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PassShape {
    pub(super) sizes: ListSizes,
    /// Whether tokens are chosen.
    pub(super) chooses: bool,
    /// Counts the buffers that were replaced.
    pub(super) n_moves: u64,
}

#[derive(Debug)]
struct KnownShape {
    shape: PassShape,
    /// `None` until it comes again.
    graph: Option<Graph>,
    last_used: u64,
}

/// The recorded passes of one backend.
#[derive(Debug, Default)]
pub(super) struct PassGraphs {
    known: Vec<KnownShape>,
    n_used: u64,
    /// Whether the driver has refused: passes are queued kernel by kernel from then on.
    is_refused: bool,
}

impl PassGraphs {
    /// The recorded pass of this shape. One that was seen before and is not recorded is recorded now: `queue` queues it. `None`
    /// for a new shape, or where nothing can be recorded.
    pub(super) fn find(
        &mut self,
        device: &Arc<Device>,
        shape: PassShape,
        queue: impl FnOnce() -> Result<()>,
    ) -> Option<&Graph> {
        if self.is_refused {
            return None;
        }
        self.n_used += 1;
        // Those of buffers that are gone must not run again.
        self.known.retain(|known| known.shape.n_moves == shape.n_moves);
        let Some(idx) = self.known.iter().position(|known| known.shape == shape) else {
            self.add(shape);
            return None;
        };
        let known = &mut self.known[idx];
        known.last_used = self.n_used;
        if known.graph.is_none() {
            match device.record(queue) {
                Ok(graph) => known.graph = Some(graph),
                Err(error) => {
                    tracing::warn!(%error, "the driver records no passes; they are queued kernel by kernel");
                    self.is_refused = true;
                    return None;
                }
            }
        }
        self.known[idx].graph.as_ref()
    }

    fn add(&mut self, shape: PassShape) {
        if self.known.len() == MAX_SHAPES
            && let Some(oldest) = (0..self.known.len()).min_by_key(|&idx| self.known[idx].last_used)
        {
            self.known.swap_remove(oldest);
        }
        self.known.push(KnownShape { shape, graph: None, last_used: self.n_used });
    }
}
