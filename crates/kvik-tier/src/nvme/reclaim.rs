//! Room for the next segment: files that were never used, segments with nothing alive, and at last the one with
//! the least alive, which moves.
//!
//! Two files are kept free where possible, the next segment and a spare, so that there is always a place
//! to move to. Moving fills a part of the next segment before any other writer appends to it; the emptied
//! file becomes the spare.

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::SyncMode;
use super::aligned::AlignedBuffer;
use super::file::{self, SegmentFile};
use super::format::{BLOCK_BYTES, Content, Entry, MAX_BATCH_ENTRIES, SegmentHeader, batch_header_bytes};
use super::format::{footer_bytes, padded};
use super::io::ReadRun;
use super::log::Log;
use super::segment::{OpenSegment, Reservation, SealedSegment, Segment};
use crate::key::ChunkKey;

/// Chunks that move are read and written in groups of about so many bytes.
const GROUP_BYTES: u64 = 8 << 20;

/// Chunks and deletions of a segment that still matter.
struct Remains {
    /// In the order of their place.
    chunks: Vec<Entry>,
    gone: Vec<Entry>,
}

impl Log {
    /// A segment with room for a chunk of so many bytes; none if there is no room for one.
    ///
    /// One thread at a time calls this.
    pub(crate) fn next_segment(&self, chunk_bytes: u64) -> io::Result<Option<OpenSegment>> {
        loop {
            self.make_free_files()?;
            if self.free.len() < 2 && self.drop_dead_segments()? > 0 {
                // Files of another length are exchanged first.
                continue;
            }
            if self.free.len() >= 2 {
                return self.free.take().map(|file| self.begin_segment(file)).transpose();
            }
            if self.free.len() == 1 && self.is_unused() {
                // A device with room for one file: what it takes is better than nothing.
                return self.free.take().map(|file| self.begin_segment(file)).transpose();
            }
            if self.free.len() == 1
                && let Some(victim) = self.choose_victim(chunk_bytes)
            {
                return self.free.take().map(|file| self.move_to(file, &victim)).transpose();
            }
            if !self.wait_for_change() {
                return Ok(None);
            }
        }
    }

    /// Gives a file its next life.
    fn begin_segment(&self, file: Arc<SegmentFile>) -> io::Result<OpenSegment> {
        let header = SegmentHeader {
            generation: random_generation()?,
            segment_bytes: file.n_bytes(),
            // Relaxed: all numbers that this thread has seen in use are lower.
            first_sequence: self.next_sequence.load(Ordering::Relaxed),
        };
        let segment = Segment::new(file, header.generation, header.first_sequence, Arc::clone(&self.free));
        segment.file.begin_write();
        self.io.write_one(&segment.file, 0, &AlignedBuffer::copy_of(&header.encode()))?;
        // Batches that outlived their header would overwrite what an older header still describes.
        self.sync_unless_never(&segment.file)?;
        self.counters.written_bytes.add(BLOCK_BYTES);
        Ok(OpenSegment::new(Arc::new(segment)))
    }

    /// Makes files until two are free or the capacity is taken.
    fn make_free_files(&self) -> io::Result<()> {
        // Only this thread takes files out, so what is counted stays.
        for odd in self.free.take_of_other_size(self.segment_bytes) {
            // One that cannot be removed is no longer used, and no longer counted.
            if let Err(error) = odd.remove() {
                tracing::warn!(segment = odd.number(), %error, "segment cannot be removed");
            }
            self.state.lock().files.retain(|file| file.number() != odd.number());
        }
        while self.free.len() < 2 {
            let number = {
                let mut state = self.state.lock();
                let taken_bytes: u64 = state.files.iter().map(|file| file.n_bytes()).sum();
                if taken_bytes + self.segment_bytes > self.capacity_bytes {
                    return Ok(());
                }
                state.next_number += 1;
                state.next_number - 1
            };
            match SegmentFile::create(&self.dir, number, self.segment_bytes, self.sync != SyncMode::Never) {
                Ok(file) => {
                    let file = Arc::new(file);
                    self.state.lock().files.push(Arc::clone(&file));
                    self.free.put_back(file);
                }
                Err(error) if file::is_no_space(&error) => {
                    // The device is smaller than the capacity: what is there must do.
                    let trouble = self.trouble.lock().replace(format!("make a segment: {error}"));
                    // Told once: every put comes here while the device is full, and the counter has them all.
                    if trouble.is_none() {
                        tracing::warn!(%error, "no room for another segment");
                    }
                    self.counters.n_no_space.add(1);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Frees the segments of which nothing matters; returns how many.
    fn drop_dead_segments(&self) -> io::Result<usize> {
        let mut n_dropped = 0;
        for victim in self.idle_segments() {
            if victim.segment.live_bytes() == 0 {
                let remains = self.remains_of(&victim);
                if remains.chunks.is_empty() && remains.gone.is_empty() {
                    self.retire(&victim)?;
                    n_dropped += 1;
                }
            }
        }
        Ok(n_dropped)
    }

    /// The segment with the least alive, if that leaves room for a chunk of so many bytes.
    fn choose_victim(&self, chunk_bytes: u64) -> Option<SealedSegment> {
        let victim = self.idle_segments().into_iter().min_by_key(|sealed| sealed.segment.live_bytes())?;
        let n_entries = victim.entries.len();
        let live_bytes = victim.segment.live_bytes();
        let n_batches = live_bytes / GROUP_BYTES + (n_entries / MAX_BATCH_ENTRIES) as u64 + 2;
        let overhead_bytes = BLOCK_BYTES
            + n_batches * BLOCK_BYTES
            + batch_header_bytes(n_entries)
            + batch_header_bytes(1)
            + footer_bytes(n_entries + 1);
        let needed_bytes = live_bytes.checked_add(overhead_bytes)?.checked_add(padded(chunk_bytes))?;
        (needed_bytes <= self.segment_bytes).then_some(victim)
    }

    /// Waits for what can give room without a deletion: readers, writers, and the open segment, which is
    /// sealed. False if there is nothing to wait for.
    fn wait_for_change(&self) -> bool {
        let mut state = self.state.lock();
        if !state.sealing.is_empty() {
            self.changed.wait(&mut state);
            return true;
        }
        let n_used = state.sealed.len() + usize::from(state.open.is_some());
        let (n_files, n_free) = (state.files.len(), self.free.len());
        if n_files > n_used + n_free {
            drop(state);
            // The rest was retired and has readers, and readers wait for no other thread.
            self.free.wait_for_more_than(n_free);
            return true;
        }
        if n_files > 2 {
            return false;
        }
        // So few files, because the device is full: the open segment is the only one to empty.
        let open = state.open.take();
        let is_detached = open.is_some();
        state.sealing.extend(open);
        drop(state);
        self.seal_idle();
        is_detached
    }

    /// Begins a segment with what matters of `victim`, and frees that.
    ///
    /// The index knows the new places only when all of them are written, so a failure changes nothing.
    fn move_to(&self, file: Arc<SegmentFile>, victim: &SealedSegment) -> io::Result<OpenSegment> {
        let mut next = self.begin_segment(file)?;
        let remains = self.remains_of(victim);
        let moved = self.copy(&mut next, victim, &remains);
        let moved = moved.and_then(|moved| {
            self.sync_unless_never(&next.segment.file)?;
            Ok(moved)
        });
        let moved = match moved {
            Ok(moved) => moved,
            Err(error) => {
                let _ = self.blank(&next.segment);
                return Err(error);
            }
        };
        for (from, to) in &moved {
            if let (Content::Chunk { offset: from, .. }, Content::Chunk { offset: to_offset, n_bytes }) =
                (from.content, to.content)
            {
                self.index.relocate(&to.key, (&victim.segment, from), (&next.segment, to_offset));
                self.counters.copied_bytes.add(n_bytes);
            }
        }
        if let Err(error) = self.retire(victim) {
            // It is found dead when the next segment is looked for, and tried again then.
            self.note("blank a segment", error);
        }
        Ok(next)
    }

    /// Appends what matters of `victim`; returns the old and the new entry of each chunk.
    fn copy(
        &self,
        next: &mut OpenSegment,
        victim: &SealedSegment,
        remains: &Remains,
    ) -> io::Result<Vec<(Entry, Entry)>> {
        for gone in remains.gone.chunks(MAX_BATCH_ENTRIES) {
            self.append_private(next, &[], gone, &[])?;
        }
        let mut moved = Vec::with_capacity(remains.chunks.len());
        let mut rest = remains.chunks.as_slice();
        while !rest.is_empty() {
            let mut group_bytes = 0;
            let n_in_group = rest.iter().take(MAX_BATCH_ENTRIES).take_while(|entry| {
                let fits = group_bytes < GROUP_BYTES;
                group_bytes += padded(entry.n_bytes());
                fits
            });
            let (group, behind) = rest.split_at(n_in_group.count());
            rest = behind;
            let (group, buffers) = self.read_group(victim, group);
            if group.is_empty() {
                continue;
            }
            let slices: Vec<&[u8]> = buffers.iter().map(|buffer| &**buffer).collect();
            let reservation = self.append_private(next, &group, &[], &slices)?;
            moved.extend(group.into_iter().zip(reservation.entries));
        }
        Ok(moved)
    }

    /// Appends a batch to a segment that has no other writer; chunks keep their sequence numbers.
    fn append_private(
        &self,
        next: &mut OpenSegment,
        chunks: &[Entry],
        gone: &[Entry],
        slices: &[&[u8]],
    ) -> io::Result<Reservation> {
        let lengths: Vec<(ChunkKey, u64)> = chunks.iter().map(|entry| (entry.key, entry.n_bytes())).collect();
        let mut sequences = chunks.iter().map(|entry| entry.sequence);
        let reservation = next
            .reserve(&lengths, gone, || sequences.next().unwrap_or_default())
            .filter(|reservation| reservation.chunks().len() == chunks.len())
            .ok_or(io::ErrorKind::StorageFull)?;
        let outcome = self.write(&reservation, slices);
        next.finish(&reservation, outcome.is_ok());
        outcome.map(|()| reservation)
    }

    /// Reads chunks; those that cannot be read are forgotten.
    fn read_group(&self, victim: &SealedSegment, group: &[Entry]) -> (Vec<Entry>, Vec<AlignedBuffer>) {
        let file = &victim.segment.file;
        let mut buffers: Vec<AlignedBuffer> =
            group.iter().map(|entry| AlignedBuffer::new(padded(entry.n_bytes()) as usize)).collect();
        let mut runs: Vec<ReadRun<'_>> = group
            .iter()
            .zip(&mut buffers)
            .map(|(entry, buffer)| ReadRun {
                file,
                offset: entry.offset(),
                slices: vec![IoSliceMut::new(buffer)],
                outcome: Ok(()),
            })
            .collect();
        self.io.read(&mut runs);
        let are_read: Vec<bool> = runs.into_iter().map(|run| run.outcome.is_ok()).collect();
        let mut read = (Vec::new(), Vec::new());
        for ((entry, buffer), is_read) in group.iter().zip(buffers).zip(are_read) {
            if is_read {
                read.0.push(*entry);
                read.1.push(buffer);
            } else if self.index.remove_at(&entry.key, &victim.segment, entry.offset()) {
                self.counters.n_lost_chunks.add(1);
            }
        }
        read
    }

    /// What must not be lost with a segment: the chunks that the index places there, and the deletions of
    /// keys of which another segment still has an older chunk.
    fn remains_of(&self, victim: &SealedSegment) -> Remains {
        let chunks = victim
            .entries
            .iter()
            .filter(|entry| entry.is_chunk() && self.index.is_at(&entry.key, &victim.segment, entry.offset()))
            .copied()
            .collect();
        let mut last_gone: HashMap<ChunkKey, Entry> = HashMap::new();
        for entry in victim.entries.iter().filter(|entry| !entry.is_chunk()) {
            let last = last_gone.entry(entry.key).or_insert(*entry);
            last.sequence = last.sequence.max(entry.sequence);
        }
        if last_gone.is_empty() {
            return Remains { chunks, gone: Vec::new() };
        }
        let mut others: Vec<SealedSegment> = Vec::new();
        {
            let state = self.state.lock();
            others.extend(state.sealed.iter().cloned());
            others.extend(state.sealing.iter().chain(&state.open).map(|open| SealedSegment {
                segment: Arc::clone(&open.segment),
                entries: open.entries.as_slice().into(),
            }));
        }
        others.retain(|other| !Arc::ptr_eq(&other.segment, &victim.segment));
        let mut gone = Vec::new();
        for entry in others.iter().flat_map(|other| other.entries.iter()).filter(|entry| entry.is_chunk()) {
            if last_gone.get(&entry.key).is_some_and(|last| last.sequence > entry.sequence) {
                gone.extend(last_gone.remove(&entry.key));
            }
        }
        Remains { chunks, gone }
    }

    /// Takes a segment of which nothing matters out of service; its file is free when its readers are gone.
    fn retire(&self, victim: &SealedSegment) -> io::Result<()> {
        self.blank(&victim.segment)?;
        self.state.lock().sealed.retain(|sealed| !Arc::ptr_eq(&sealed.segment, &victim.segment));
        self.counters.n_reclaimed_segments.add(1);
        Ok(())
    }

    /// Makes a start find nothing in a file. Readers of its chunks are not disturbed.
    fn blank(&self, segment: &Segment) -> io::Result<()> {
        segment.file.begin_write();
        self.io.write_one(&segment.file, 0, &AlignedBuffer::new(BLOCK_BYTES as usize))?;
        self.counters.written_bytes.add(BLOCK_BYTES);
        // Deletions of its chunks are forgotten from here on, so it must not come back.
        self.sync_unless_never(&segment.file)
    }

    /// Whether there is no segment at all.
    fn is_unused(&self) -> bool {
        let state = self.state.lock();
        state.sealed.is_empty() && state.sealing.is_empty() && state.open.is_none()
    }

    /// The sealed segments whose footer is not being written at present.
    fn idle_segments(&self) -> Vec<SealedSegment> {
        let state = self.state.lock();
        let is_sealing = |sealed: &SealedSegment| {
            state.sealing.iter().any(|open| Arc::ptr_eq(&open.segment, &sealed.segment))
        };
        state.sealed.iter().filter(|sealed| !is_sealing(sealed)).cloned().collect()
    }
}

/// Bits that no earlier life of the file has had.
fn random_generation() -> io::Result<u64> {
    let mut bytes = [0; 8];
    let n_bytes = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if n_bytes == bytes.len() {
        Ok(u64::from_le_bytes(bytes))
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}
