//! The `kvctl` binary: looks at elastic memory and governs it.
//!
//! The program is inside `kvik`, which is run under the name `kvctl`: one binary holds the code of both, and is linked
//! once.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let program = kvik_beside().unwrap_or_else(|| PathBuf::from("kvik"));
    let error = Command::new(&program).arg0("kvctl").args(std::env::args_os().skip(1)).exec();
    let place = std::env::current_exe()
        .ok()
        .and_then(|path| path.parent().map(|folder| folder.as_os_str().to_owned()));
    // If standard error is gone too, the exit code still tells.
    let _ = writeln!(
        std::io::stderr(),
        "error: failed to run kvik, which holds kvctl: {error}; install kvik in {} or on the PATH",
        place.unwrap_or_else(|| OsString::from("the folder of kvctl")).display(),
    );
    ExitCode::FAILURE
}

/// The `kvik` that was installed with this program. It goes before one on the path, which may be of another version.
fn kvik_beside() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.parent()?.join("kvik");
    path.is_file().then_some(path)
}
