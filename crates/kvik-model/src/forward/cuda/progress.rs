//! How far a copy of KV into the device is, for the request that waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::{ModelError, Result};
use crate::forward::KvImport;
use crate::paging::BlockId;

/// How long a copy from files may stand still until it is given up, also behind others: a disk may hang.
const FILE_PATIENCE: Duration = Duration::from_secs(2);

/// How far a copy is.
#[derive(Debug)]
enum Progress {
    /// So many layers are copied.
    UnderWay(usize),
    Ended(Result<()>),
    Told,
}

/// Tells of the layers and the end of a copy.
#[derive(Debug)]
struct Ending {
    progress: Mutex<Progress>,
    changed: Condvar,
    /// Of a copy from files.
    patience: Option<Patience>,
}

/// Lets a copy be given up that stands still.
#[derive(Debug)]
struct Patience {
    /// When something came last; `None` when it was found to stand still.
    moved_at: Mutex<Option<Instant>>,
    /// Set when it is given up. Locked while blocks are written: none is after that.
    is_given_up: Mutex<bool>,
}

/// The obligation to report the end of a copy; one that is dropped reports a failure.
#[derive(Debug)]
pub(super) struct Teller(Arc<Ending>);

/// A copy under way. One from files is given up if it stands still, or when it is dropped.
#[derive(Debug)]
pub(super) struct DeviceImport {
    ending: Arc<Ending>,
    n_layers: usize,
}

/// Both sides of a copy of so many layers.
pub(super) fn begin(n_layers: usize, is_from_files: bool) -> (Teller, DeviceImport) {
    let ending = Arc::new(Ending {
        progress: Mutex::new(Progress::UnderWay(0)),
        changed: Condvar::new(),
        patience: is_from_files.then(Patience::new),
    });
    (Teller(Arc::clone(&ending)), DeviceImport { ending, n_layers })
}

impl Teller {
    /// Tells that so many layers are copied.
    pub(super) fn tell_layers(&self, n_there: usize) {
        self.0.tell_layers(n_there);
    }

    /// Writes to the blocks, unless they were given up.
    pub(super) fn write(&self, write: impl FnOnce() -> Result<()>) -> Result<()> {
        match &self.0.patience {
            Some(patience) => patience.write(write),
            None => write(),
        }
    }

    /// Tells how it ended.
    pub(super) fn end(self, result: Result<()>) {
        self.0.tell(result);
    }
}

impl Patience {
    fn new() -> Self {
        Self { moved_at: Mutex::new(Some(Instant::now())), is_given_up: Mutex::new(false) }
    }

    /// When it ends, if nothing comes until then; `None` once it has, whatever comes later.
    fn deadline(&self) -> Option<Instant> {
        let mut moved_at = self.moved_at.lock();
        *moved_at = moved_at.filter(|moved_at| moved_at.elapsed() < FILE_PATIENCE);
        moved_at.map(|moved_at| moved_at + FILE_PATIENCE)
    }

    /// Writes to the blocks, unless they were given up.
    fn write(&self, write: impl FnOnce() -> Result<()>) -> Result<()> {
        let is_given_up = self.is_given_up.lock();
        if *is_given_up {
            return Err(late());
        }
        let written = write();
        if let Some(moved_at) = &mut *self.moved_at.lock() {
            *moved_at = Instant::now();
        }
        written
    }
}

impl Ending {
    /// Waits while `is_short`; false if the copy stands still meanwhile.
    fn wait_while(
        &self,
        progress: &mut MutexGuard<'_, Progress>,
        is_short: impl Fn(&Progress) -> bool,
    ) -> bool {
        while is_short(progress) {
            match self.patience.as_ref().map(Patience::deadline) {
                None => self.changed.wait(progress),
                Some(None) => return false,
                Some(Some(deadline)) => {
                    self.changed.wait_until(progress, deadline);
                }
            }
        }
        true
    }

    /// Ends a copy from files now, if it has not ended: no block is written any more, and it has failed whatever comes.
    fn give_up(&self) {
        if let Some(patience) = &self.patience {
            *patience.is_given_up.lock() = true;
        }
        self.tell(Err(late()));
    }

    /// How it ended; said once.
    fn take_result(progress: &mut Progress) -> Result<()> {
        match std::mem::replace(progress, Progress::Told) {
            Progress::Ended(result) => result,
            Progress::UnderWay(_) | Progress::Told => Ok(()),
        }
    }

    fn tell_layers(&self, n_there: usize) {
        let mut progress = self.progress.lock();
        if let Progress::UnderWay(n_told) = &mut *progress {
            *n_told = n_there;
            self.changed.notify_all();
        }
    }

    fn tell(&self, result: Result<()>) {
        let mut progress = self.progress.lock();
        if let Progress::UnderWay(_) = *progress {
            *progress = Progress::Ended(result);
            self.changed.notify_all();
        }
    }

    /// Waits until so many layers are copied, or no more will be.
    ///
    /// A copy that stands still ends here: a pass goes on without the layer, so its end must not be told as a good one.
    fn wait_layers(&self, n_layers: usize) {
        let mut progress = self.progress.lock();
        let is_short = |progress: &Progress| matches!(progress, Progress::UnderWay(n) if *n < n_layers);
        if !self.wait_while(&mut progress, is_short) {
            drop(progress);
            self.give_up();
        }
    }

    /// Waits for the end; says once how it was.
    fn wait(&self) -> Result<()> {
        let mut progress = self.progress.lock();
        if !self.wait_while(&mut progress, |progress| matches!(progress, Progress::UnderWay(_))) {
            drop(progress);
            self.give_up();
            progress = self.progress.lock();
        }
        Self::take_result(&mut progress)
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        let reason = "the thread that copies has ended".to_owned();
        self.0.tell(Err(ModelError::Device { call: "copy KV in", reason }));
    }
}

impl KvImport for DeviceImport {
    fn is_done(&self) -> bool {
        let is_under_way = matches!(*self.ending.progress.lock(), Progress::UnderWay(_));
        !is_under_way || self.ending.patience.as_ref().is_some_and(|patience| patience.deadline().is_none())
    }

    fn n_layers_there(&self) -> usize {
        match *self.ending.progress.lock() {
            Progress::UnderWay(n_there) => n_there,
            Progress::Ended(_) | Progress::Told => self.n_layers,
        }
    }

    fn take_layer(&self, layer_idx: usize, _put: &mut dyn FnMut(BlockId, &[u8])) {
        self.ending.wait_layers(layer_idx + 1);
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.ending.wait()
    }
}

impl Drop for DeviceImport {
    fn drop(&mut self) {
        // How it ended does not matter any more, but the blocks may be used again only then.
        if self.ending.patience.is_some() {
            self.ending.give_up();
        } else {
            drop(self.ending.wait());
        }
    }
}

/// Why a copy was given up.
fn late() -> ModelError {
    ModelError::request("kv", "in files that do not come", "in files that come in time")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Makes it seem that nothing has come for long.
    fn stand_still(teller: &Teller) {
        let long_ago = Instant::now().checked_sub(2 * FILE_PATIENCE);
        *teller.0.patience.as_ref().unwrap().moved_at.lock() = long_ago;
    }

    #[test]
    fn a_copy_from_files_that_stands_still_is_given_up_and_writes_no_block_afterwards() {
        let (teller, import) = begin(3, true);
        teller.write(|| Ok(())).unwrap();
        teller.tell_layers(1);
        assert!(!import.is_done());
        stand_still(&teller);
        assert!(import.is_done());
        // What comes now is too late.
        teller.write(|| Ok(())).unwrap();
        assert!(import.is_done());
        import.take_layer(2, &mut |_, _| {});
        assert!(Box::new(import).finish().unwrap_err().to_string().contains("in time"));
        assert!(teller.write(|| panic!("a block that is not the copy's any more")).is_err());
        teller.end(Ok(()));
    }

    #[test]
    fn a_pass_that_went_on_without_a_layer_is_told_so_though_the_layer_comes_later() {
        let (teller, import) = begin(3, true);
        teller.tell_layers(1);
        stand_still(&teller);
        import.take_layer(1, &mut |_, _| {});
        assert!(teller.write(|| panic!("a block that is not the copy's any more")).is_err());
        teller.tell_layers(3);
        teller.end(Ok(()));
        assert!(Box::new(import).finish().unwrap_err().to_string().contains("in time"));
    }

    #[test]
    fn a_copy_from_files_that_ends_at_the_last_moment_has_ended() {
        let (teller, import) = begin(3, true);
        stand_still(&teller);
        teller.end(Ok(()));
        assert!(import.is_done() && import.n_layers_there() == 3);
        Box::new(import).finish().unwrap();
    }

    #[test]
    fn dropping_a_copy_from_files_waits_for_the_block_that_is_written_and_for_no_more() {
        let (teller, import) = begin(3, true);
        std::thread::scope(|scope| {
            let (begun, has_begun) = mpsc::channel();
            let (release, released) = mpsc::channel::<()>();
            let writer = &teller;
            scope.spawn(move || {
                let write = || {
                    begun.send(()).unwrap();
                    released.recv().unwrap();
                    Ok(())
                };
                writer.write(write).unwrap();
            });
            has_begun.recv().unwrap();
            let dropping = scope.spawn(move || drop(import));
            release.send(()).unwrap();
            dropping.join().unwrap();
        });
        assert!(teller.write(|| Ok(())).is_err());
    }
}
