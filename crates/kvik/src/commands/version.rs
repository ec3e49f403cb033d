//! `kvik --version --verbose`: what the binary was built from.

use std::io::{self, Write};

use anyhow::Context;

/// Name and value, as the build script has set them.
const BUILD: [(&str, &str); 5] = [
    ("commit", env!("KVIK_BUILD_COMMIT")),
    ("target", env!("KVIK_BUILD_TARGET")),
    ("profile", env!("KVIK_BUILD_PROFILE")),
    ("compiler", env!("KVIK_BUILD_COMPILER")),
    ("features", env!("KVIK_BUILD_FEATURES")),
];

/// Prints the version and what the binary was built from, a line each.
pub(crate) fn run() -> anyhow::Result<()> {
    write(&mut io::stdout().lock()).context("write to standard output")
}

fn write(output: &mut impl Write) -> io::Result<()> {
    writeln!(output, "kvik {}", env!("CARGO_PKG_VERSION"))?;
    for (name, value) in BUILD {
        writeln!(output, "{name:<9} {value}")?;
    }
    output.flush()
}
