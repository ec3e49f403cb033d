//! etcd as a process of a test.

use std::path::Path;
use std::process::{Command, Stdio};

/// A server that keeps its data in `folder`, for clients at `url`. It does not wait for the disk: no test cuts the power.
pub(crate) fn etcd_command(folder: &Path, url: &str, peer_url: &str) -> Command {
    let mut command = Command::new("etcd");
    command
        .arg("--data-dir")
        .arg(folder)
        .args(["--listen-client-urls", url, "--advertise-client-urls", url])
        .args(["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url])
        .args(["--initial-cluster", &format!("default={peer_url}"), "--unsafe-no-fsync"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}
