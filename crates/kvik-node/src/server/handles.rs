//! What a session holds for its client.

use std::collections::HashMap;

use kvik_store::{ChunkWriter, CommittedChunk, Layer, LayerReader, NamedChain, Retrieved};

use super::records::Record;

/// Things that a client may hold at a time. It has a few for each of its requests.
const MAX_HANDLES: usize = 4096;

/// What a handle stands for.
#[derive(Debug)]
pub(super) enum Held {
    /// A chain of names.
    Chain(NamedChain),
    /// Chunks that may be read; kept for its leases.
    #[expect(dead_code, reason = "they are held, not read")]
    Lease(Retrieved, Record),
    /// Chunks that are being written.
    Write(Writers, Record),
    /// Chunks that are read layer by layer.
    Layers(Layers, Record),
}

/// A write of chunks, one behind the other.
#[derive(Debug, Default)]
pub(super) struct Writers {
    /// `None` for those that are committed, or were there.
    writers: Vec<Option<ChunkWriter>>,
    /// Those that are committed: the next one can only be stored while they are in memory.
    committed: Vec<CommittedChunk>,
}

/// A read layer by layer, with the layer that the client copies at present.
#[derive(Debug)]
pub(super) struct Layers {
    reader: LayerReader,
    current: Option<Layer>,
}

/// All that a client holds; dropping it gives everything back.
#[derive(Debug, Default)]
pub(super) struct Handles {
    held: HashMap<u32, Held>,
    next: u32,
    /// Those that keep memory of the arena.
    n_memory: usize,
}

impl Handles {
    /// Keeps something; `None` where the client holds too much already.
    pub(super) fn add(&mut self, held: Held) -> Option<u32> {
        if self.held.len() >= MAX_HANDLES {
            return None;
        }
        // Ends, because fewer numbers are in use than there are.
        while self.held.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let handle = self.next;
        self.next = self.next.wrapping_add(1);
        self.n_memory += usize::from(held.has_memory());
        self.held.insert(handle, held);
        Some(handle)
    }

    pub(super) fn chain(&self, handle: u32) -> Option<&NamedChain> {
        match self.held.get(&handle)? {
            Held::Chain(chain) => Some(chain),
            _ => None,
        }
    }

    /// Takes the writer at `place` of a write.
    pub(super) fn take_writer(&mut self, handle: u32, place: usize) -> Option<ChunkWriter> {
        match self.held.get_mut(&handle)? {
            Held::Write(write, _) => write.writers.get_mut(place)?.take(),
            _ => None,
        }
    }

    /// Keeps a committed chunk of a write in memory as long as the handle.
    pub(super) fn keep_committed(&mut self, handle: u32, committed: Option<CommittedChunk>) {
        if let Some(Held::Write(write, _)) = self.held.get_mut(&handle) {
            write.committed.extend(committed);
        }
    }

    /// The read layer by layer that a handle stands for.
    pub(super) fn layers(&mut self, handle: u32) -> Option<(&mut Layers, &mut Record)> {
        match self.held.get_mut(&handle)? {
            Held::Layers(layers, record) => Some((layers, record)),
            _ => None,
        }
    }

    /// What will be said of a write.
    pub(super) fn record_of_write(&mut self, handle: u32) -> Option<&mut Record> {
        match self.held.get_mut(&handle)? {
            Held::Write(_, record) => Some(record),
            _ => None,
        }
    }

    pub(super) fn remove(&mut self, handle: u32) -> Option<Held> {
        let held = self.held.remove(&handle)?;
        self.n_memory -= usize::from(held.has_memory());
        Some(held)
    }

    /// Handles that keep memory of the arena: all but chains.
    pub(super) fn n_memory(&self) -> usize {
        self.n_memory
    }
}

// === impl Held ===

impl Held {
    fn has_memory(&self) -> bool {
        !matches!(self, Self::Chain(_))
    }
}

// === impl Writers ===

impl Writers {
    pub(super) fn new(writers: Vec<Option<ChunkWriter>>) -> Self {
        Self { writers, committed: Vec::new() }
    }
}

// === impl Layers ===

impl Layers {
    pub(super) fn new(reader: LayerReader) -> Self {
        Self { reader, current: None }
    }

    /// Bytes of the current layer.
    pub(super) fn n_current_bytes(&self, rank: u16) -> usize {
        let Some(layer) = &self.current else { return 0 };
        (0..layer.n_chunks()).map(|chunk_idx| layer.section(chunk_idx, rank).len()).sum()
    }

    /// Gives the current layer back and waits for the next; where each chunk's section of it starts.
    pub(super) fn next_offsets(&mut self, rank: u16) -> Vec<u64> {
        self.current = None;
        self.current = self.reader.next_layer();
        let Some(layer) = &self.current else { return Vec::new() };
        (0..layer.n_chunks()).map_while(|chunk_idx| layer.offset(chunk_idx, rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_bounded_and_their_numbers_are_used_again() {
        let mut handles = Handles { next: u32::MAX - 1, ..Handles::default() };
        let write = || Held::Write(Writers::default(), Record::default());
        let given: Vec<u32> = (0..MAX_HANDLES).map(|_| handles.add(write()).unwrap()).collect();
        assert_eq!(handles.add(write()), None);
        assert_eq!(handles.n_memory(), MAX_HANDLES);
        assert!(handles.remove(given[2]).is_some() && handles.remove(given[2]).is_none());
        assert_eq!(handles.n_memory(), MAX_HANDLES - 1);
        assert!(handles.add(write()).is_some());
        assert!(handles.chain(given[0]).is_none() && handles.take_writer(given[0], 0).is_none());
    }
}
