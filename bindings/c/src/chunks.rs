//! Physical memory that the engine maps by itself, in chunks of a page.

use std::collections::{BTreeMap, BTreeSet};

use kvik_memory::pages::Shortage;
use parking_lot::Mutex;

use crate::backend::{Backend, Chunk};
use crate::status::{Failure, kvik_status};

/// The chunks of a pool, by what the engine calls them.
#[derive(Debug, Default)]
pub(crate) struct Chunks {
    by_number: Mutex<BTreeMap<u64, Chunk>>,
}

impl Chunks {
    /// Creates `n_chunks` chunks or none; the caller holds their grants.
    pub(crate) fn create(
        &self,
        backend: &Backend,
        chunk_bytes: u64,
        n_chunks: usize,
    ) -> Result<Vec<u64>, Unmade> {
        let mut numbers = Vec::new();
        if numbers.try_reserve(n_chunks).is_err() {
            return Err(Unmade { failure: Failure::no_heap(), n_stuck: 0 });
        }
        while numbers.len() < n_chunks {
            let failure = match backend.create_chunk(chunk_bytes) {
                Ok(Some(chunk)) => {
                    numbers.push(chunk.number);
                    self.by_number.lock().insert(chunk.number, chunk);
                    continue;
                }
                Ok(None) => Failure::shortage(Shortage::DeviceFull),
                Err(error) => error.into(),
            };
            let stuck = numbers.iter().filter(|&&number| self.release_one(backend, number).is_err());
            return Err(Unmade { failure, n_stuck: stuck.count() as u64 });
        }
        Ok(numbers)
    }

    /// Releases the chunks called `numbers`; says how many were, and why the rest was not.
    ///
    /// Fails as a whole where one of them is no chunk of this pool or is listed twice.
    pub(crate) fn release(&self, backend: &Backend, numbers: &[u64]) -> (u64, Result<(), Failure>) {
        if let Err(failure) = self.check(numbers) {
            return (0, Err(failure));
        }
        let mut n_released = 0;
        for &number in numbers {
            if let Err(failure) = self.release_one(backend, number) {
                return (n_released, Err(failure));
            }
            n_released += 1;
        }
        (n_released, Ok(()))
    }

    /// Releases everything.
    pub(crate) fn release_all(&self, backend: &Backend) {
        for chunk in std::mem::take(&mut *self.by_number.lock()).values() {
            if let Err(error) = backend.release_chunk(chunk) {
                tracing::warn!(number = chunk.number, %error, "could not release a chunk on close");
            }
        }
    }

    fn check(&self, numbers: &[u64]) -> Result<(), Failure> {
        let by_number = self.by_number.lock();
        let mut seen = BTreeSet::new();
        match numbers.iter().find(|number| !by_number.contains_key(number) || !seen.insert(**number)) {
            Some(&number) => Err(not_a_chunk(number)),
            None => Ok(()),
        }
    }

    fn release_one(&self, backend: &Backend, number: u64) -> Result<(), Failure> {
        // Taken out first: of two threads that release one chunk, one does.
        let Some(chunk) = self.by_number.lock().remove(&number) else { return Err(not_a_chunk(number)) };
        backend.release_chunk(&chunk).map_err(|error| {
            self.by_number.lock().insert(number, chunk);
            error.into()
        })
    }
}

/// Chunks that could not be created.
#[derive(Debug)]
pub(crate) struct Unmade {
    pub(crate) failure: Failure,
    /// Chunks that exist nevertheless, since they could not be released again: their grants must be kept.
    pub(crate) n_stuck: u64,
}

fn not_a_chunk(number: u64) -> Failure {
    Failure::new(
        kvik_status::KVIK_ERROR_NOT_ALLOCATED,
        format!("release chunk {number}: it is no chunk of this pool, or is listed twice"),
    )
}
