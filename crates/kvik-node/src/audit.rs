//! The audit log of a store daemon: which client did what with which chunks.
//!
//! One JSON object a line. Nothing of a prompt is in it: chunks are named by their hashes, which are keyed where
//! `digest_key_file` is set. Sessions put lines into a bounded queue and never wait for it; one thread writes them. Lines
//! that find the queue full are lost, and counted: in a line of their own once there is room, and in the metrics.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use kvik_store::TierName;
use kvik_tier::NamespaceId;
use kvik_types::BlockHash;
use parking_lot::{Condvar, Mutex};
use serde::{Serialize, Serializer};

use crate::error::{NodeError, Result};

/// Lines that wait to be written; each takes some 200 bytes.
const MAX_WAITING: usize = 8192;

/// How often the log is looked for under its name: something may have renamed it away.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// An open log; dropping it writes what waits and joins its thread.
#[derive(Debug)]
pub(crate) struct AuditLog {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// One line.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct AuditLine {
    #[serde(serialize_with = "as_rfc_3339")]
    pub(crate) time: SystemTime,
    #[serde(flatten, serialize_with = "as_itself")]
    pub(crate) client: Arc<AuditClient>,
    pub(crate) operation: &'static str,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) chunks: Option<AuditChunks>,
    pub(crate) outcome: String,
}

/// Which client it was.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct AuditClient {
    /// None before it has proven one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// None where the kernel does not say, as for a process of another namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_shown")]
    pub(crate) namespace: Option<NamespaceId>,
}

/// Which chunks it was about.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct AuditChunks {
    #[serde(rename = "chunks")]
    pub(crate) n_chunks: usize,
    #[serde(rename = "tokens")]
    pub(crate) n_tokens: usize,
    #[serde(rename = "bytes")]
    pub(crate) n_bytes: u64,
    /// The slowest that a chunk came from.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_shown")]
    pub(crate) tier: Option<TierName>,
    #[serde(rename = "first_chunk", skip_serializing_if = "Option::is_none", serialize_with = "as_shown")]
    pub(crate) first: Option<BlockHash>,
    #[serde(rename = "last_chunk", skip_serializing_if = "Option::is_none", serialize_with = "as_shown")]
    pub(crate) last: Option<BlockHash>,
}

/// The line that stands for lines that were lost.
#[derive(Debug, Serialize)]
struct LostLine {
    #[serde(serialize_with = "as_rfc_3339")]
    time: SystemTime,
    lost: u64,
}

/// Lines on their way to the thread that writes them.
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    n_lost: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: VecDeque<AuditLine>,
    /// Lines that found no room behind these.
    n_lost: u64,
    is_closing: bool,
}

/// The file, as the writing thread has it.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: File,
    looked_at: Instant,
    /// Lines that could not be written, and of which no line says so yet.
    n_unsaid: u64,
    /// Whether the last line was written in part.
    is_torn: bool,
    /// Whether the last attempt failed, which is said once.
    is_failing: bool,
}

// === impl AuditLog ===

impl AuditLog {
    /// Opens a log for appending, with mode 0600 where it is new, and starts its thread.
    ///
    /// # Errors
    /// If the file cannot be opened; the error names the setting.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = LogFile::open(path).map_err(|error| {
            let allowed = format!("a file that this user can append to: {error}");
            NodeError::invalid("audit_log", &path.display(), allowed)
        })?;
        let queue = Arc::new(Queue::default());
        let writing = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name("kvik-audit".to_owned())
            .spawn(move || writing.run(file))
            .map_err(NodeError::io("start the thread of the audit log"))?;
        Ok(Self { queue, thread: Mutex::new(Some(thread)) })
    }

    /// Leaves a line to the writing thread; never waits.
    pub(crate) fn record(&self, line: AuditLine) {
        self.queue.push(line);
    }

    /// Writes what waits and joins the thread; lines after it are not written.
    pub(crate) fn close(&self) {
        self.queue.waiting.lock().is_closing = true;
        self.queue.changed.notify_one();
        if let Some(thread) = self.thread.lock().take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }

    /// Lines that were lost.
    pub(crate) fn n_lost(&self) -> u64 {
        self.queue.n_lost.load(Ordering::Relaxed)
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        self.close();
    }
}

// === impl Queue ===

impl Queue {
    fn push(&self, line: AuditLine) {
        let mut waiting = self.waiting.lock();
        // Behind a loss nothing is taken before these are taken away to be written: its place in the log stays true.
        if waiting.lines.len() >= MAX_WAITING || waiting.n_lost > 0 {
            waiting.n_lost += 1;
            self.n_lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.lines.push_back(line);
        drop(waiting);
        self.changed.notify_one();
    }

    /// Writes lines until the log is closed and all are written.
    fn run(&self, mut file: LogFile) {
        loop {
            let mut waiting = self.waiting.lock();
            while waiting.lines.is_empty() && !waiting.is_closing {
                self.changed.wait(&mut waiting);
            }
            let is_last = waiting.is_closing;
            drop(waiting);
            self.drain(&mut file);
            if is_last {
                return;
            }
        }
    }

    /// Writes what waits now, and how many lines were lost behind it.
    fn drain(&self, file: &mut LogFile) {
        let mut waiting = self.waiting.lock();
        let lines = std::mem::take(&mut waiting.lines);
        let n_lost = std::mem::take(&mut waiting.n_lost);
        drop(waiting);
        let n_lines = lines.len() as u64;
        let mut text = Vec::new();
        if file.n_unsaid > 0 {
            push_line(&mut text, &LostLine { time: SystemTime::now(), lost: file.n_unsaid });
        }
        for line in &lines {
            push_line(&mut text, line);
        }
        if n_lost > 0 {
            push_line(&mut text, &LostLine { time: SystemTime::now(), lost: n_lost });
        }
        if file.write(&text) {
            file.n_unsaid = 0;
        } else {
            file.n_unsaid += n_lines + n_lost;
            self.n_lost.fetch_add(n_lines, Ordering::Relaxed);
        }
    }
}

// === impl LogFile ===

impl LogFile {
    fn open(path: &Path) -> io::Result<Self> {
        let path = path.to_owned();
        let file = open_for_appending(&path)?;
        Ok(Self { path, file, looked_at: Instant::now(), n_unsaid: 0, is_torn: false, is_failing: false })
    }

    /// Appends whole lines; false where they may not all be there.
    fn write(&mut self, text: &[u8]) -> bool {
        if text.is_empty() {
            return true;
        }
        let written = self.open_again_if_renamed().and_then(|()| {
            // What was written in part ends where the next line begins.
            if self.is_torn {
                self.write_all(b"\n")?;
            }
            self.write_all(text)
        });
        match written {
            Ok(()) => {
                self.is_failing = false;
                true
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(path = %self.path.display(), %error, "lose lines of the audit log");
                }
                false
            }
        }
    }

    fn write_all(&mut self, mut text: &[u8]) -> io::Result<()> {
        while !text.is_empty() {
            match self.file.write(text) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n_bytes) => {
                    self.is_torn = text[n_bytes - 1] != b'\n';
                    text = &text[n_bytes..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Opens the file again where its name means another one, or none: a rotation has renamed it.
    fn open_again_if_renamed(&mut self) -> io::Result<()> {
        if self.looked_at.elapsed() < LOOK_INTERVAL && !self.is_failing {
            return Ok(());
        }
        let own = self.file.metadata()?;
        let is_ours = std::fs::metadata(&self.path)
            .is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino()));
        if !is_ours {
            self.file = open_for_appending(&self.path)?;
            self.is_torn = false;
        }
        self.looked_at = Instant::now();
        Ok(())
    }
}

fn open_for_appending(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

fn push_line(text: &mut Vec<u8>, line: &impl Serialize) {
    let n_bytes_before = text.len();
    match serde_json::to_writer(&mut *text, line) {
        Ok(()) => text.push(b'\n'),
        // It cannot fail for these types; half a line must not be in the log.
        Err(_) => text.truncate(n_bytes_before),
    }
}

fn as_rfc_3339<S: Serializer>(time: &SystemTime, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*time))
}

fn as_itself<S: Serializer>(
    client: &Arc<AuditClient>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    (**client).serialize(serializer)
}

#[expect(clippy::ref_option, reason = "serde hands over the field")]
fn as_shown<S: Serializer>(
    value: &Option<impl std::fmt::Display>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use serde_json::Value;

    use super::*;

    fn line(outcome: &str) -> AuditLine {
        let client = AuditClient { uid: Some(7), ..AuditClient::default() };
        AuditLine {
            time: SystemTime::UNIX_EPOCH + Duration::from_millis(1_800_000_000_042),
            client: Arc::new(client),
            operation: "read",
            chunks: None,
            outcome: outcome.to_owned(),
        }
    }

    fn lines_of(path: &Path) -> Vec<Value> {
        std::fs::read_to_string(path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}")))
            .collect()
    }

    #[test]
    fn a_line_is_one_object_with_time_and_what_is_known() {
        let mut text = Vec::new();
        let chunks = AuditChunks { n_chunks: 2, n_tokens: 64, n_bytes: 5, ..AuditChunks::default() };
        push_line(&mut text, &AuditLine { chunks: Some(chunks), ..line("a \"b\"\nc") });
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "{\"time\":\"2027-01-15T08:00:00.042Z\",\"uid\":7,\"operation\":\"read\",\"chunks\":2,\"tokens\":64,\
             \"bytes\":5,\"outcome\":\"a \\\"b\\\"\\nc\"}\n"
        );
    }

    #[test]
    fn lines_beyond_the_queue_are_counted_and_said_in_their_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let (queue, mut file) = (Queue::default(), LogFile::open(&path).unwrap());
        for _ in 0..MAX_WAITING + 3 {
            queue.push(line("early"));
        }
        queue.drain(&mut file);
        queue.push(line("late"));
        queue.drain(&mut file);
        let lines = lines_of(&path);
        assert_eq!(lines.len(), MAX_WAITING + 2);
        assert_eq!(lines[MAX_WAITING - 1]["outcome"], "early");
        assert_eq!(lines[MAX_WAITING]["lost"], 3);
        assert_eq!(lines[MAX_WAITING + 1]["outcome"], "late");
        assert_eq!(queue.n_lost.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn lines_that_cannot_be_written_are_lost_and_the_next_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        let (queue, mut file) = (Queue::default(), LogFile::open(&path).unwrap());
        let writable = std::mem::replace(&mut file.file, File::open("/dev/null").unwrap());
        std::fs::write(&path, "{\"half\":").unwrap();
        // The name is another file's than the one that fails: it would be opened again, so it stays away.
        let away = folder.path().join("away");
        std::fs::rename(&path, &away).unwrap();
        std::fs::create_dir(&path).unwrap();
        queue.push(line("lost"));
        queue.drain(&mut file);
        queue.push(line("lost too"));
        queue.drain(&mut file);
        assert_eq!(queue.n_lost.load(Ordering::Relaxed), 2);
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&away, &path).unwrap();
        (file.file, file.is_torn) = (writable, true);
        queue.drain(&mut file);
        queue.push(line("kept"));
        queue.drain(&mut file);
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "{\"half\":");
        assert!(lines[1].contains("\"lost\":2") && lines[2].contains("kept"), "{text}");
    }

    #[test]
    fn a_log_that_was_renamed_away_is_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let (path, rotated) = (folder.path().join("audit"), folder.path().join("audit.1"));
        let (queue, mut file) = (Queue::default(), LogFile::open(&path).unwrap());
        let mut write = |outcome: &str, may_look: bool| {
            if may_look {
                file.looked_at = Instant::now().checked_sub(LOOK_INTERVAL).unwrap();
            }
            queue.push(line(outcome));
            queue.drain(&mut file);
        };
        write("first", true);
        std::fs::rename(&path, &rotated).unwrap();
        write("second", false);
        write("third", true);
        write("fourth", true);
        let outcomes = |path: &Path| -> Vec<Value> {
            lines_of(path).iter().map(|line| line["outcome"].clone()).collect()
        };
        assert_eq!(outcomes(&rotated), ["first", "second"]);
        assert_eq!(outcomes(&path), ["third", "fourth"]);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_dropped_log_has_written_everything() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit");
        for n_lines in [1, 1000] {
            let log = AuditLog::open(&path).unwrap();
            (0..n_lines).for_each(|_| log.record(line("done")));
        }
        assert_eq!(lines_of(&path).len(), 1001);
        let error = AuditLog::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("`audit_log` is"), "{error}");
    }
}
