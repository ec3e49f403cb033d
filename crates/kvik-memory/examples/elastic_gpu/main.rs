//! Three processes take turns at most of a device's memory and check every word of it.
//!
//!     cargo run --release --package kvik-memory --example elastic_gpu -- host
//!     cargo run --release --package kvik-memory --example elastic_gpu -- cuda
//!
//! With a second argument, the MiB that all engines together may hold. On a GPU every page is filled and
//! checked by kernels. Ends with 1 if a word was lost or an engine did not get its memory.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "printing is its purpose")]

mod play;

use std::path::Path;
use std::process::ExitCode;

use kvik_memory::ledger::DEFAULT_DIR;

use play::scenario::{Played, Scenario, play};
use play::{Answer, Backend};

/// On the host the memory is touched, so it is not left to what the machine has.
const HOST_BUDGET_BYTES: u64 = 1 << 30;

fn main() -> ExitCode {
    match run() {
        Ok(0) => ExitCode::SUCCESS,
        Ok(n_words_lost) => {
            eprintln!("error: {n_words_lost} words were lost");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The number of words that were lost.
fn run() -> Answer<u64> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, rest @ ..] = arguments.as_slice()
        && role == "engine"
    {
        return play::engine::run(rest).map(|()| 0);
    }
    let (backend, mib) = match arguments.as_slice() {
        [backend] => (backend.parse()?, None),
        [backend, mib] => (backend.parse()?, Some(mib.parse::<u64>()?)),
        _ => return Err("usage: elastic_gpu host|cuda [MiB]".into()),
    };
    let budget_bytes = mib.map(|mib| mib << 20).or(match backend {
        Backend::Host => Some(HOST_BUDGET_BYTES),
        Backend::Cuda => None,
    });
    let scenario = Scenario { backend, budget_bytes, n_buffers: 8, n_rounds: 2 };
    let played = play(scenario, &std::env::current_exe()?, Path::new(DEFAULT_DIR))?;
    print_table(&played);
    Ok(played.n_words_lost())
}

fn print_table(played: &Played) {
    let mib = |n_bytes: u64| n_bytes >> 20;
    println!("device {}, budget of three engines {} MiB", played.device, mib(played.budget_bytes));
    println!(
        "{:<8} {:<22} {:>10} {:>12} {:>10} {:>10} {:>12} {:>6}",
        "engine", "what", "holds MiB", "memory ms", "fill ms", "check ms", "checked MiB", "lost"
    );
    for turn in &played.turns {
        let report = &turn.report;
        let ms = |us: u64| us as f64 / 1e3;
        println!(
            "{:<8} {:<22} {:>10} {:>12.1} {:>10.1} {:>10.1} {:>12} {:>6}",
            turn.engine,
            turn.what,
            mib(report.n_blocks * played.block_bytes),
            ms(report.memory_us),
            ms(report.fill_us),
            ms(report.check_us),
            mib(report.n_words_checked * 8),
            report.n_words_lost
        );
    }
    println!(
        "checked {} MiB in {} turns, {} words lost",
        mib(played.n_words_checked() * 8),
        played.turns.len(),
        played.n_words_lost()
    );
}
