//! Another process that takes and returns grants of the same ledger as fast as it can.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, ensure};
use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{JoinOptions, Ledger};
use kvik_memory::pages::{Grants as _, Usage};

use super::claim_and_give_back;
use super::stand::Stand;

const READY: &str = "ready";

/// The other process; it is ended when this is dropped.
#[derive(Debug)]
pub(super) struct Peer {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts this program again, and waits until it is at work.
    pub(super) fn start(stand: &Stand) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut child = Command::new(program)
            .args(["bench", "memory-peer"])
            .arg(stand.folder())
            .arg(stand.device_name())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start another process")?;
        let output = BufReader::new(child.stdout.take().context("read from the other process")?);
        let mut peer = Self { child, output };
        let word = peer.read_line()?;
        ensure!(word == READY, "the other process said `{word}`");
        Ok(peer)
    }

    /// Ends it; how many grants it took and returned.
    pub(super) fn finish(mut self) -> anyhow::Result<u64> {
        // It works until its input ends.
        drop(self.child.stdin.take());
        let n_pairs = self.read_line()?.parse().context("read from the other process")?;
        let status = self.child.wait().context("wait for the other process")?;
        ensure!(status.success(), "the other process ended with {status}");
        Ok(n_pairs)
    }

    fn read_line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("read from the other process")?;
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both do nothing if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The life of the other process, until its input ends.
pub fn run(folder: &Path, device: &str) -> anyhow::Result<()> {
    let ledger = Ledger::open_existing(folder, device)?.context("find the ledger")?;
    let member = ledger.join(&JoinOptions::new("peer", "kvik bench memory"))?;
    let is_over = Arc::new(AtomicBool::new(false));
    let watcher = thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            let _ = io::stdin().read(&mut [0]);
            // Only a flag: nothing is read on the strength of it.
            is_over.store(true, Ordering::Relaxed);
        }
    });
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{READY}").and_then(|()| stdout.flush()).context("write to standard output")?;
    let mut n_pairs = 0_u64;
    while !is_over.load(Ordering::Relaxed) {
        claim_and_give_back(&member)?;
        member.publish(Usage { used_bytes: UNIT_BYTES, parked_bytes: (n_pairs % 2) * UNIT_BYTES });
        n_pairs += 1;
    }
    // It has set the flag, so it is at its end.
    let _ = watcher.join();
    writeln!(stdout, "{n_pairs}").and_then(|()| stdout.flush()).context("write to standard output")
}
