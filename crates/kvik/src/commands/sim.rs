//! `kvik sim`: what a cache would have found of a recorded load, policy by policy.

use std::fs::File;
use std::io::{BufReader, Write as _};

use anyhow::Context as _;
use kvik_bench::sim::{Report, Trace};

use crate::cli::SimArguments;

/// Replays a trace and prints what each policy found of it.
pub(crate) fn run(arguments: &SimArguments) -> anyhow::Result<()> {
    let path = &arguments.trace;
    let file = File::open(path).with_context(|| format!("open trace {}", path.display()))?;
    let trace =
        Trace::read(BufReader::new(file)).with_context(|| format!("read trace {}", path.display()))?;
    let report = Report::run(&trace, &arguments.policy, &arguments.capacity);
    if let Some(path) = &arguments.svg {
        std::fs::write(path, report.svg()).with_context(|| format!("write plot {}", path.display()))?;
    }
    let mut output = anstream::stdout().lock();
    if arguments.json {
        serde_json::to_writer(&mut output, &report).context("print the report")?;
        writeln!(output).context("print the report")
    } else {
        writeln!(output, "{} requests, {} blocks; blocks found:", report.n_requests, report.n_blocks)
            .and_then(|()| write!(output, "{}", report.table()))
            .context("print the report")
    }
}
