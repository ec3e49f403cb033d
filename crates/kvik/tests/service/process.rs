//! Processes that end with the test that started them.

#[path = "../../../../tests/support/port.rs"]
mod port;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest time that anything here may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A child, killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    /// Lines of standard error, as they come.
    log: Receiver<String>,
    /// Lines that were read.
    lines: Vec<String>,
}

/// The binary, without what the caller's environment would change in its answers.
pub(crate) fn kvik() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvik"));
    let names = std::env::vars_os().map(|(name, _)| name);
    let is_ours = |name: &str| name.starts_with("KVIK_") || name.starts_with("OTEL_");
    for name in names.filter(|name| is_ours(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    command.env("NO_COLOR", "1").stdin(Stdio::null());
    command
}

/// Looks again and again until `look` gives something; a look is a round trip to another process.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "still waiting after {PATIENCE:?}: {what}");
        thread::yield_now();
    }
}

/// An address on loopback without a listener, and that no other call gets.
pub(crate) fn free_address() -> String {
    format!("127.0.0.1:{}", port::free_port())
}

impl Process {
    /// Starts `command` and collects what it says on standard error.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = child.stderr.take().unwrap();
        let (sender, log) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // The test may have ended.
                let _ = sender.send(line);
            }
        });
        Self { child, log, lines: Vec::new() }
    }

    /// Waits for a JSON log line with this message.
    #[track_caller]
    pub(crate) fn logged(&mut self, message: &str) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.log.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.lines.push(line),
                Err(error) => panic!("no log line `{message}` ({error}): {:#?}", self.lines),
            }
            if let Some(found) = self.lines.last().and_then(|line| with_message(line, message)) {
                return found;
            }
        }
    }

    /// Whether a JSON log line with this message has come by now.
    pub(crate) fn has_logged(&mut self, message: &str) -> bool {
        self.lines.extend(self.log.try_iter());
        self.lines.iter().any(|line| with_message(line, message).is_some())
    }

    /// All that has come on standard error by now.
    pub(crate) fn logged_text(&mut self) -> String {
        self.lines.extend(self.log.try_iter());
        self.lines.join("\n")
    }

    /// Standard output, to be read while the process runs.
    pub(crate) fn stdout(&mut self) -> impl Read + use<> {
        self.child.stdout.take().unwrap()
    }

    /// Memory of the process, in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
    }

    /// Sends a signal by its name, such as `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let status =
            Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status().unwrap();
        assert!(status.success(), "kill -{name}");
    }

    /// Ends the process as kill -9 does, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the process has ended by itself.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        // Standard error closes when the process ends.
        loop {
            match self.log.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => self.lines.push(line),
                Err(RecvTimeoutError::Disconnected) => return self.child.wait().unwrap(),
                Err(RecvTimeoutError::Timeout) => panic!("does not end: {:#?}", self.lines),
            }
        }
    }
}

impl Drop for Process {
    #[expect(clippy::print_stdout, reason = "what a process said explains why its test failed")]
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            self.lines.extend(self.log.try_iter());
            let start = self.lines.len().saturating_sub(40);
            println!("last lines of process {}: {:#?}", self.child.id(), &self.lines[start..]);
        }
    }
}

fn with_message(line: &str, message: &str) -> Option<Value> {
    let record: Value = serde_json::from_str(line).ok()?;
    (record["message"] == message).then_some(record)
}
