//! Keys from a file that may change.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::keys::KeyRing;
use crate::decorator::clock::{Clock, SystemClock};
use crate::error::{Result, TierError};

/// How long a file may have changed before it is noticed.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The longest file: more is no list of keys.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Permissions that a key file may not have: any for others, and writing for its group.
///
/// Its group may read it, because that is how Kubernetes hands a secret to a process that is not root.
const FORBIDDEN_MODE: u32 = 0o027;

/// The keys of a file, as it is now: it is looked at again when they are used, at most once a second.
///
/// A file that has become unreadable, wrong or open to others changes nothing: the keys from before stay, and a
/// warning says so once for each change.
#[derive(Debug)]
pub struct EncryptionKeys {
    path: PathBuf,
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ring: Arc<KeyRing>,
    looked_at: Instant,
    /// The file at the last look; none where it could not be opened.
    stamp: Option<Stamp>,
}

/// What differs between two contents of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    n_bytes: u64,
    modified_ns: (i64, i64),
    changed_ns: (i64, i64),
}

impl EncryptionKeys {
    /// Reads a file of keys, in the form of [`KeyRing::parse`].
    ///
    /// # Errors
    /// If it cannot be read, others than its user and group can use it, or it has no keys.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        Self::open_with_clock(path, Arc::new(SystemClock))
    }

    /// The same with another clock.
    ///
    /// # Errors
    /// As of [`Self::open`].
    pub fn open_with_clock(path: impl Into<PathBuf>, clock: Arc<dyn Clock>) -> Result<Self> {
        let path = path.into();
        let (mut file, stamp) = open(&path)?;
        let ring = Arc::new(read(&path, &mut file)?);
        let state = State { ring, looked_at: clock.now(), stamp: Some(stamp) };
        Ok(Self { path, clock, state: Mutex::new(state) })
    }

    /// The keys now.
    pub fn current(&self) -> Arc<KeyRing> {
        let now = self.clock.now();
        let mut state = self.state.lock();
        if now.saturating_duration_since(state.looked_at) < LOOK_INTERVAL {
            return Arc::clone(&state.ring);
        }
        // Others use the keys from before meanwhile: a file may be slow.
        state.looked_at = now;
        let seen = state.stamp;
        drop(state);
        let (read, stamp) = self.read_if_changed(seen);
        let mut state = self.state.lock();
        state.stamp = stamp;
        match read {
            None => {}
            Some(Ok(ring)) => {
                tracing::info!(path = %self.path.display(), n_keys = ring.n_keys(), "read encryption keys again");
                state.ring = Arc::new(ring);
            }
            Some(Err(error)) => {
                tracing::warn!(path = %self.path.display(), %error, "keep the encryption keys from before");
            }
        }
        Arc::clone(&state.ring)
    }

    /// The keys if the file is another than the one seen last, and what it is now.
    fn read_if_changed(&self, seen: Option<Stamp>) -> (Option<Result<KeyRing>>, Option<Stamp>) {
        match open(&self.path) {
            Ok((_, stamp)) if seen == Some(stamp) => (None, seen),
            Ok((mut file, stamp)) => (Some(read(&self.path, &mut file)), Some(stamp)),
            // Said once, not every second.
            Err(error) => (seen.is_some().then_some(Err(error)), None),
        }
    }
}

/// Opens the file; its stamp is older than what is read of it, so a change while it is read is seen at the next look.
fn open(path: &Path) -> Result<(File, Stamp)> {
    let failed = |error| TierError::io(format!("read the encryption keys in {}", path.display()), error);
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let stamp = Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        n_bytes: metadata.len(),
        modified_ns: (metadata.mtime(), metadata.mtime_nsec()),
        changed_ns: (metadata.ctime(), metadata.ctime_nsec()),
    };
    Ok((file, stamp))
}

fn read(path: &Path, file: &mut File) -> Result<KeyRing> {
    let failed = |error| TierError::io(format!("read the encryption keys in {}", path.display()), error);
    let mode = file.metadata().map_err(failed)?.mode() & 0o7777;
    if mode & FORBIDDEN_MODE != 0 {
        let value = format!("{mode:04o} of {}", path.display());
        return Err(TierError::invalid("mode of the encryption keys", &value, "0400, 0600, 0440 or 0640"));
    }
    let mut text = String::new();
    file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let allowed = format!("at most {MAX_FILE_BYTES} bytes");
        return Err(TierError::invalid("file of encryption keys", &path.display(), allowed));
    }
    KeyRing::parse(&text)
}
