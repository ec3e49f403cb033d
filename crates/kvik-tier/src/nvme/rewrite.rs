//! A chunk that gets other bytes under its key.
//!
//! The new bytes are appended like those of a new chunk, with a higher sequence number, and synced; then the index changes, under the
//! lock of the key. So a reader finds the old place or the new one, and after a death the higher number counts if its batch was
//! written, and else the old one. Room of both is claimed until then.

use std::sync::Arc;

use super::format::{Content, Entry};
use super::index::Location;
use super::transfer::Gather;
use super::{NvmeTier, Writing, file};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tier::{Change, GetItem, Rewritten, Tier as _};

impl NvmeTier {
    /// Puts what `change` makes of a chunk in its place.
    pub(super) fn rewrite_chunk(&self, key: ChunkKey, change: Change<'_>) -> Result<Rewritten> {
        if let Some(reason) = &self.read_only {
            let error = std::io::Error::new(std::io::ErrorKind::ReadOnlyFilesystem, reason.as_str());
            return Err(TierError::io("change a chunk", error));
        }
        let Some(Location { n_bytes, .. }) = self.log.index.get(&key) else { return Ok(Rewritten::Missing) };
        let mut bytes = vec![0; n_bytes as usize];
        let mut batch = [GetItem::whole(key, &mut bytes)];
        self.get(&mut batch);
        let [GetItem { outcome, .. }] = batch;
        if !outcome.is_hit() {
            return Ok(Rewritten::Missing);
        }
        let Some((changed, _)) = change(&bytes) else { return Ok(Rewritten::Kept) };
        let n_after_bytes = changed.len() as u64;
        if !self.log.index.claim(n_after_bytes) {
            return Ok(Rewritten::NoRoom);
        }
        let placed = self.append(key, &changed);
        match placed {
            Ok(Some(true)) => Ok(Rewritten::Changed { n_before_bytes: n_bytes, n_after_bytes }),
            // It was deleted meanwhile, and stays so.
            Ok(Some(false)) => Ok(Rewritten::Missing),
            Ok(None) => {
                self.log.index.unclaim(n_after_bytes);
                Ok(Rewritten::NoRoom)
            }
            Err(error) => {
                self.log.index.unclaim(n_after_bytes);
                Err(error)
            }
        }
    }

    /// Writes bytes whose room is claimed and makes them those of a key; false if it has gone, and `None` where there is no room.
    fn append(&self, key: ChunkKey, bytes: &[u8]) -> Result<Option<bool>> {
        let Some(reservation) = self.log.reserve(&[(key, bytes.len() as u64)])? else { return Ok(None) };
        let mut writing = Writing { log: &self.log, reservation, is_written: false };
        let parts = [bytes];
        let mut gather = Gather::default();
        gather.add_chunk(&parts);
        let staging = gather.staging();
        let segment = Arc::clone(&writing.reservation.segment);
        let written = self.log.write(&writing.reservation, &gather.slices(&staging)).and_then(|()| {
            // The new entry counts after a loss of power: its bytes have to be there then.
            self.log.sync_unless_never(&segment.file)
        });
        if let Err(error) = written {
            if file::is_no_space(&error) {
                return Ok(None);
            }
            return Err(self.log.note("change a chunk", error));
        }
        let Some(offset) = writing.reservation.chunks().first().map(Entry::offset) else { return Ok(None) };
        let location = Location { segment, offset, n_bytes: bytes.len() as u64 };
        let is_placed = self.log.index.replace(key, location);
        if !is_placed {
            // The deletion is older than what was just written: it has to be said again.
            let gone = Entry { key, sequence: self.log.next_sequence(), content: Content::Gone };
            self.log.add_gone(vec![gone]);
        }
        writing.is_written = true;
        Ok(Some(is_placed))
    }
}
