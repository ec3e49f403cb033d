//! KV of ended sequences that the device writes to the disk by itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvik_model::{BLOCK_TOKENS, EndedSequence};
use kvik_store::{Chain, FileWrite, Store};

/// Failures to write in a row after which nothing is written so any more: what fails so often is not one chunk.
const MAX_FAILURES: usize = 3;

/// How long a section may be, and how often the device failed.
#[derive(Debug)]
pub(super) struct DirectWrites {
    max_section_bytes: usize,
    failures_in_a_row: AtomicUsize,
}

impl DirectWrites {
    pub(super) fn new(max_section_bytes: usize) -> Arc<Self> {
        Arc::new(Self { max_section_bytes, failures_in_a_row: AtomicUsize::new(0) })
    }

    /// Has the device write a chunk of a sequence to the store's disk.
    pub(super) fn store(
        &self,
        store: &Store,
        chain: &Chain,
        chunk_idx: usize,
        sequence: &EndedSequence,
    ) -> FileWrite {
        // Relaxed, as everywhere here: a thread that does not see it yet finds out for itself.
        let has_failed_often = MAX_FAILURES <= self.failures_in_a_row.load(Ordering::Relaxed);
        let tokens = chain.tokens_of(chunk_idx);
        let blocks = tokens.start / BLOCK_TOKENS..tokens.end / BLOCK_TOKENS;
        let section_bytes = chain.section_bytes(chunk_idx);
        // The room in the file is of this length: the device would write over what follows.
        let is_same_length = section_bytes == blocks.len() * sequence.block_layer_bytes();
        if has_failed_often || self.max_section_bytes < section_bytes || !is_same_length {
            return FileWrite::Elsewhere;
        }
        let written = store.write_to_file(chain, chunk_idx, &mut |file, offset| {
            let written = sequence.write_file(blocks.clone(), file, offset);
            written.map_err(|error| {
                tracing::warn!(%error, "the device could not write KV to the disk");
                io::Error::other(error)
            })
        });
        self.note(written);
        written
    }

    fn note(&self, written: FileWrite) {
        match written {
            FileWrite::Stored => self.failures_in_a_row.store(0, Ordering::Relaxed),
            FileWrite::Failed
                if self.failures_in_a_row.fetch_add(1, Ordering::Relaxed) + 1 == MAX_FAILURES =>
            {
                tracing::warn!(
                    "chunks could not be written by the device {MAX_FAILURES} times in a row; they go by way of memory now"
                );
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kvik_model::{CpuBackendOptions, EngineOptions, GenerateRequest, KvSink, Model, SamplingParams};
    use kvik_store::{ChunkFormat, StoreOptions};
    use kvik_tier::{Arena, ArenaOptions, Checksummed, NvmeOptions, NvmeTier, RamTier};
    use kvik_types::{BlockSize, Dtype, Namespace};

    use super::*;

    /// Passes on what it is offered.
    #[derive(Debug)]
    struct Passing(mpsc::Sender<EndedSequence>);

    impl KvSink for Passing {
        fn offer(&mut self, sequence: EndedSequence) {
            self.0.send(sequence).unwrap();
        }
    }

    #[test]
    fn a_device_that_keeps_failing_to_write_is_not_asked_any_more() {
        let mut backend = CpuBackendOptions::default();
        backend.n_threads = 1;
        let mut engine = Model::bundled().unwrap().cpu_engine(&backend, EngineOptions::default()).unwrap();
        let (sender, offered) = mpsc::channel();
        engine.set_kv_sink(Box::new(Passing(sender)));
        let prompt = (100..150).collect();
        engine.submit(GenerateRequest { prompt, sampling: SamplingParams::greedy(2) }).unwrap();
        engine.run_until_idle().unwrap();
        // A CPU has no memory of its own to write from: each write fails.
        let sequence = offered.recv().unwrap();

        let dir = tempfile::tempdir().unwrap();
        let disk = Checksummed::new(NvmeTier::open(&NvmeOptions::new(dir.path(), 32 << 20)).unwrap());
        let ram = RamTier::new(Arena::new(ArenaOptions::new(1 << 20)).unwrap());
        let block_tokens = BlockSize::try_new(BLOCK_TOKENS).unwrap();
        let options = StoreOptions { chunk_tokens: block_tokens, ..StoreOptions::default() };
        let store = Store::builder(options, ram).local(Arc::new(disk)).open().unwrap();
        let namespace =
            Namespace { model: "m".into(), dtype: Dtype::F32, layout: "l".into(), tenant: String::new() };
        let section_bytes = sequence.block_layer_bytes();
        let (n_layers, token_layer_bytes) =
            (sequence.n_layers() as u32, (section_bytes / BLOCK_TOKENS) as u64);
        let format = ChunkFormat { n_layers, token_layer_bytes, n_ranks: 1, block_tokens };
        let chain = store.space(&namespace, format).unwrap().chain(sequence.tokens());
        let long = DirectWrites::new(section_bytes - 1);
        assert_eq!(long.store(&store, &chain, 0, &sequence), FileWrite::Elsewhere, "too long a layer");
        let writes = DirectWrites::new(section_bytes);
        for _ in 0..MAX_FAILURES {
            assert_eq!(writes.store(&store, &chain, 0, &sequence), FileWrite::Failed);
        }
        assert_eq!(writes.store(&store, &chain, 0, &sequence), FileWrite::Elsewhere);
        assert_eq!(store.stats().n_failed_direct_writes, MAX_FAILURES as u64);
        assert_eq!(store.lookup_local(&chain).n_chunks, 0);
    }
}
