//! The `kvctl` binary: looks at elastic memory and governs it.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    kvctl::main()
}
