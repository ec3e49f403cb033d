//! Measuring tiers before the first prompt needs them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvik_tier::{ChunkKey, GetItem, Slot};

use super::Store;
use super::core::Core;
use crate::lower::{Lower, ReadJob};
use crate::space::Space;

/// Chunks of the calls of a measurement. Calls of several sizes tell the latency of a call from its bytes.
const CALL_CHUNKS: [usize; 4] = [1, 1, 2, 4];
/// Time after which no further call begins.
const MAX_TIME: Duration = Duration::from_millis(100);
/// Age of a measurement that is not repeated: few reads, beside what a tier does in that time.
const MAX_AGE: Duration = Duration::from_secs(30);

impl Store {
    /// Reads a few chunks of `space` from each local tier of which nothing was read for half a minute, so that a
    /// [plan](crate::plan) knows its speed from the first prompt on, and also if it was found too slow to be read.
    ///
    /// Returns at once; the tier's own threads read. Nothing is kept, and nothing in memory gives way. A tier without chunks of
    /// this space stays unmeasured.
    pub fn measure_tiers(&self, space: &Space) {
        for lower in &self.core().lowers {
            if !lower.is_local() || !lower.speed.claim_measurement(MAX_AGE) {
                continue;
            }
            let (core, space) = (Arc::downgrade(self.core()), space.clone());
            let task = move |lower: &Lower| {
                if let Some(core) = core.upgrade() {
                    core.measure(lower, &space);
                }
            };
            // A tier that is too busy to be measured is measured by what it does.
            let _ = lower.reads.push(0, ReadJob::Task(Box::new(task)));
        }
    }
}

impl Core {
    fn measure(&self, lower: &Lower, space: &Space) {
        let n_bytes = space.format().payload_bytes(space.chunk_tokens());
        let mut keys: Vec<ChunkKey> = Vec::new();
        lower.tier.visit_keys(&mut |key, _| {
            if key.namespace == space.namespace_id() && keys.len() < CALL_CHUNKS.iter().sum() {
                keys.push(key);
            }
        });
        let mut keys = &keys[..];
        let begin = Instant::now();
        for n_chunks in CALL_CHUNKS {
            let (call, rest) = keys.split_at(n_chunks.min(keys.len()));
            keys = rest;
            let mut slots: Vec<Slot> = call.iter().map_while(|_| self.ram.reserve(n_bytes)).collect();
            if slots.is_empty() || MAX_TIME < begin.elapsed() {
                return;
            }
            let items = call.iter().zip(&mut slots).map(|(key, slot)| GetItem::whole(*key, &mut slot[..]));
            lower.read(items.collect());
        }
    }
}
