//! Services as processes of their own: children of this process that end with their owner.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Time for a role to be ready; the bundled model loads in a fraction of it.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two looks at a child that should end.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// One child.
#[derive(Debug)]
pub(crate) struct Role {
    child: Child,
    name: String,
    /// `HOST:PORT` that it listens on.
    pub(crate) address: String,
    log_reader: Option<JoinHandle<()>>,
}

impl Role {
    /// The command of a role that listens on a free port of loopback and logs what [`Role::start`] reads.
    pub(crate) fn command(program: &Path, name: &str) -> Command {
        let mut command = Command::new(program);
        command.args([name, "--listen", "127.0.0.1:0", "--log", "info", "--log-format", "json"]);
        command
    }

    /// Starts a role and waits until its log says that it is ready.
    ///
    /// # Errors
    /// If it ends, or is not ready in 30 seconds.
    pub(crate) fn start(command: &mut Command, name: &str) -> anyhow::Result<Self> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let child = child.with_context(|| format!("start the {name}"))?;
        let mut role = Self { child, name: name.to_owned(), address: String::new(), log_reader: None };
        let stderr = role.child.stderr.take().context("read the log")?;
        let (sender, lines) = mpsc::channel();
        // Reads to the end, so that the child never waits for room in the pipe.
        role.log_reader = Some(thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // Only the lines up to the one that says ready are read.
                let _ = sender.send(line);
            }
        }));
        let ready = format!("{name} is ready");
        let mut last_line = String::new();
        loop {
            let line = match lines.recv_timeout(START_TIMEOUT) {
                Ok(line) => line,
                Err(mpsc::RecvTimeoutError::Timeout) => anyhow::bail!("start the {name}: not ready in 30 s"),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    anyhow::bail!("start the {name}: it ended: {last_line}")
                }
            };
            let fields = serde_json::from_str::<Value>(&line).unwrap_or_default();
            let message = fields["message"].as_str().or_else(|| fields["fields"]["message"].as_str());
            if message == Some(ready.as_str()) {
                let address = fields["address"].as_str().or_else(|| fields["fields"]["address"].as_str());
                address.unwrap_or_default().clone_into(&mut role.address);
                ensure!(!role.address.is_empty(), "start the {name}: its log has no address: {line}");
                return Ok(role);
            }
            last_line = line;
        }
    }

    /// Its base address.
    pub(crate) fn base(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Asks it to end, as `kill -TERM` does.
    ///
    /// # Errors
    /// If it has ended already.
    pub(crate) fn terminate(&self) -> anyhow::Result<()> {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM).with_context(|| format!("end the {}", self.name))
    }

    /// Waits until it has ended by itself. Cancel safe.
    ///
    /// # Errors
    /// If it has not after `limit`.
    pub(crate) async fn ended(&mut self, limit: Duration) -> anyhow::Result<ExitStatus> {
        let begin = Instant::now();
        loop {
            if let Some(status) =
                self.child.try_wait().with_context(|| format!("wait for the {}", self.name))?
            {
                return Ok(status);
            }
            ensure!(begin.elapsed() < limit, "the {} has not ended after {limit:?}", self.name);
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }
}

/// Kills it as `kill -9` does.
impl Drop for Role {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.log_reader.take() {
            // A reader that panicked has nothing to say here.
            let _ = reader.join();
        }
    }
}
