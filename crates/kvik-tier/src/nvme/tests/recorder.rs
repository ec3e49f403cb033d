//! Everything a tier writes, and what of it a loss of power may leave.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use parking_lot::Mutex;

use super::{SEGMENT_BYTES, device_offset, segment_path};
use crate::nvme::file::SegmentFile;
use crate::nvme::io::{Io, Positional, ReadRun, WriteRun};
use crate::random::SplitMix64;

/// What a device tears writes at.
const SECTOR_BYTES: usize = 512;

/// Writes to files, and keeps what was written in its order.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    events: Mutex<Vec<Event>>,
}

#[derive(Debug)]
enum Event {
    Write {
        number: u32,
        offset: u64,
        bytes: Vec<u8>,
    },
    /// What was written to the file before is safe.
    Sync {
        number: u32,
    },
}

/// What becomes of writes that no sync has covered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Loss {
    /// All are there: the process was killed.
    Nothing,
    /// None is there.
    Everything,
    /// Each is there or not.
    SomeWrites,
    /// Each sector of each is there or not.
    SomeSectors,
    /// All but the last, of which a part is there.
    LastTorn,
}

impl Recorder {
    /// Number of events so far.
    pub(super) fn n_events(&self) -> usize {
        self.events.lock().len()
    }

    /// Makes what is left in a folder, or on a formatted device, when the power goes after `n_events` events.
    pub(super) fn leave_image(&self, place: &Path, n_events: usize, loss: Loss, random: &mut SplitMix64) {
        let events = self.events.lock();
        let events = &events[..n_events];
        let mut n_safe: BTreeMap<u32, usize> = BTreeMap::new();
        for (event_idx, event) in events.iter().enumerate() {
            if let Event::Sync { number } = event {
                n_safe.insert(*number, event_idx);
            }
        }
        let mut files: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        for (event_idx, event) in events.iter().enumerate() {
            let Event::Write { number, offset, bytes } = event else {
                continue;
            };
            let file = files.entry(*number).or_insert_with(|| vec![0; SEGMENT_BYTES as usize]);
            let place = &mut file[*offset as usize..][..bytes.len()];
            if n_safe.get(number).is_some_and(|safe_idx| event_idx < *safe_idx) {
                place.copy_from_slice(bytes);
                continue;
            }
            let keeps_write = random.below(2) == 0;
            let n_last_sectors = random.below(1 + (bytes.len() / SECTOR_BYTES) as u64) as usize;
            let sectors = place.chunks_mut(SECTOR_BYTES).zip(bytes.chunks(SECTOR_BYTES));
            for (sector_idx, (place, sector)) in sectors.enumerate() {
                let is_kept = match loss {
                    Loss::Nothing => true,
                    Loss::Everything => false,
                    Loss::SomeWrites => keeps_write,
                    Loss::SomeSectors => random.below(2) == 0,
                    Loss::LastTorn => event_idx + 1 < n_events || sector_idx < n_last_sectors,
                };
                if is_kept {
                    place.copy_from_slice(sector);
                }
            }
        }
        for (number, bytes) in files {
            if place.is_dir() {
                std::fs::write(segment_path(place, number), bytes).unwrap();
            } else {
                let device = File::options().write(true).open(place).unwrap();
                device.write_all_at(&bytes, device_offset(number)).unwrap();
            }
        }
    }
}

impl Io for Recorder {
    fn read(&self, runs: &mut [ReadRun<'_>]) {
        Positional.read(runs);
    }

    fn write(&self, runs: &mut [WriteRun<'_>]) {
        for run in &*runs {
            let bytes = run.slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            let number = run.file.number();
            self.events.lock().push(Event::Write { number, offset: run.offset, bytes });
        }
        Positional.write(runs);
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        Positional.sync(file)?;
        self.events.lock().push(Event::Sync { number: file.number() });
        Ok(())
    }
}
