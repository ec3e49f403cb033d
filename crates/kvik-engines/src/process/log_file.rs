//! The log of an engine: a file that the engine itself writes to, so that it goes on without the controller.
//!
//! A file that is too long is copied to a second one and emptied: the engine keeps writing to the file it has. What it
//! writes between the two steps is lost, at most a few lines.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Most bytes that are read for the last lines.
const TAIL_BYTES: u64 = 8192;
/// Longest line that is shown, in characters.
const MAX_LINE_CHARS: usize = 300;

/// The log of one engine.
#[derive(Debug, Clone)]
pub(crate) struct LogFile {
    path: PathBuf,
    max_bytes: u64,
}

impl LogFile {
    pub(crate) fn new(path: PathBuf, max_bytes: u64) -> Self {
        Self { path, max_bytes }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it for an engine, which appends to it.
    pub(crate) fn open(&self) -> io::Result<File> {
        self.rotate()?;
        OpenOptions::new().create(true).append(true).mode(0o600).open(&self.path)
    }

    /// Moves what is there to the second file if it is too long; returns whether it was.
    pub(crate) fn rotate(&self) -> io::Result<bool> {
        match fs::metadata(&self.path) {
            Ok(metadata) if self.max_bytes < metadata.len() => {}
            Ok(_) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        }
        let mut old = self.path.clone().into_os_string();
        old.push(".1");
        fs::copy(&self.path, old)?;
        OpenOptions::new().write(true).truncate(true).open(&self.path)?;
        Ok(true)
    }

    /// The last lines, at most `n_lines`, without what could steer a terminal.
    pub(crate) fn last_lines(&self, n_lines: usize) -> Vec<String> {
        let Ok(mut file) = File::open(&self.path) else { return Vec::new() };
        let n_bytes = file.metadata().map_or(0, |metadata| metadata.len());
        let mut bytes = Vec::new();
        let start = SeekFrom::Start(n_bytes.saturating_sub(TAIL_BYTES));
        if file.seek(start).and_then(|_| file.take(TAIL_BYTES).read_to_end(&mut bytes)).is_err() {
            return Vec::new();
        }
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(n_lines)..];
        let clean = |line: &&str| line.chars().filter(|c| !c.is_control()).take(MAX_LINE_CHARS).collect();
        last.iter().map(clean).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_log_that_is_too_long_is_moved_while_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let log = LogFile::new(folder.path().join("a.log"), 10);
        let mut file = log.open().unwrap();
        writeln!(file, "0123456789").unwrap();
        assert!(log.rotate().unwrap());
        writeln!(file, "next").unwrap();
        assert!(!log.rotate().unwrap());
        assert_eq!(fs::read_to_string(folder.path().join("a.log")).unwrap(), "next\n");
        assert_eq!(fs::read_to_string(folder.path().join("a.log.1")).unwrap(), "0123456789\n");
    }

    #[test]
    fn the_last_lines_have_no_control_characters() {
        let folder = tempfile::tempdir().unwrap();
        let log = LogFile::new(folder.path().join("a.log"), 1 << 20);
        assert!(log.last_lines(3).is_empty());
        let mut file = log.open().unwrap();
        for number in 0..5000 {
            writeln!(file, "line {number}\n\x1b[31mred\x1b[0m").unwrap();
        }
        assert_eq!(log.last_lines(2), ["line 4999", "[31mred[0m"]);
    }
}
