//! Running the binary, and ledgers with members to run it on.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{JoinOptions, Ledger, LedgerOptions, Member};
use kvik_memory::pages::{Claim, Grants as _, Usage};
use serde_json::Value;
use tempfile::TempDir;

/// What one run of the binary gave.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) exit_code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A folder of shared memory that is removed when dropped.
#[derive(Debug)]
pub(crate) struct Folder {
    dir: TempDir,
}

/// Bytes of `n_units` of 2 MiB.
pub(crate) const fn units(n_units: u64) -> u64 {
    n_units * UNIT_BYTES
}

impl Folder {
    pub(crate) fn new() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The ledger of `device` with a budget of `n_units`.
    pub(crate) fn ledger(&self, device: &str, n_units: u64) -> Ledger {
        let budget_bytes = Some(units(n_units));
        let options =
            LedgerOptions { dir: self.path().to_owned(), budget_bytes, ..LedgerOptions::new(device) };
        Ledger::open(&options).unwrap()
    }

    /// Runs `kvctl` on this folder with nothing on standard input.
    pub(crate) fn kvctl(&self, arguments: &[&str]) -> Answer {
        self.kvctl_with_stdin(arguments, "")
    }

    pub(crate) fn kvctl_with_stdin(&self, arguments: &[&str], stdin: &str) -> Answer {
        run(env!("CARGO_BIN_EXE_kvctl"), arguments, self.path(), stdin)
    }
}

/// Runs a binary with `--dir`.
pub(crate) fn run(binary: &str, arguments: &[&str], dir: &Path, stdin: &str) -> Answer {
    let mut command = Command::new(binary);
    for name in ["CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"] {
        command.env_remove(name);
    }
    let mut child = command
        .env("NO_COLOR", "1")
        .args(arguments)
        .arg("--dir")
        .arg(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that does not read its input may have closed it already.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let output = child.wait_with_output().unwrap();
    Answer {
        exit_code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A member that holds `n_used` and `n_parked` units.
pub(crate) fn join(ledger: &Ledger, ipc_name: &str, n_used: u64, n_parked: u64) -> Member {
    let member = ledger.join(&JoinOptions::new(ipc_name, "test engine")).unwrap();
    assert_eq!(member.claim(units(n_used + n_parked)).unwrap(), Claim::Granted);
    member.publish(Usage { used_bytes: units(n_used), parked_bytes: units(n_parked) });
    member
}

impl Answer {
    /// Standard output of a run that went well and had nothing to say beside it.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert_eq!((self.exit_code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        self.stdout
    }

    /// Standard output of a run that went well: one object on one line.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let stdout = self.success();
        assert_eq!(stdout.lines().count(), 1, "{stdout}");
        serde_json::from_str(&stdout).unwrap()
    }

    /// The message of a run that failed with `exit_code` and printed nothing else.
    #[track_caller]
    pub(crate) fn failure(self, exit_code: i32) -> String {
        assert_eq!((self.exit_code, self.stdout.as_str()), (Some(exit_code), ""), "{self:?}");
        self.stderr.trim_end().to_owned()
    }
}
