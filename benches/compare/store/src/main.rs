//! kvik's store beside foyer's hybrid cache: same disk, same bytes, same run.
//!
//! `cargo run --release --manifest-path benches/compare/store/Cargo.toml -- --dir DIR [--json]`
//!
//! For chunks of 1, 8 and 32 MiB both projects store 1 GiB in batches of 32 MiB from two threads, are closed
//! and opened again, and read everything back: in the same batches from two threads (`get`), one chunk after
//! the other in no order (`get_one`), and in batches from one thread through the memory part (`retrieve`).
//! Both have 64 MiB of memory and 2 GiB of files and go past the page cache. No read is answered from memory;
//! that is checked, and so are the bytes. Rounds alternate and begin with another project each, so that a
//! busy machine slows all; speeds and starts are the median of the rounds, quantiles are over the single
//! reads of all rounds. The p99 of 32 MiB is over few reads and close to their maximum.
//!
//! `get` and `get_one` of kvik are the nvme tier behind its checksums, `retrieve` and `retrieve_one` the
//! store over it. foyer has one way to read, which stands beside both. It runs with each of its two ways of
//! I/O, so `io_uring` must be allowed; the better is the baseline.
//!
//! foyer drops what its queues have no room for. They are made long enough here that nothing has to be; what
//! is dropped all the same is counted, and its bytes are no part of its speed. The notes that are printed say
//! what is not like for like.
//!
//! The allocator is the system's, which gives the memory of a long chunk back to the kernel each time. foyer
//! allocates for every read, kvik does not. One that keeps the memory shows foyer at its best:
//!
//!     export LD_PRELOAD=libjemalloc.so.2
//!     export MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0

mod hybrid;
mod kvik;
#[path = "../../machine.rs"]
mod machine;
mod report;
mod sample;
mod workload;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::json;

use crate::hybrid::DiskIo;
use crate::report::{Line, Rounds};
use crate::sample::{DISK_BYTES, MEMORY_BYTES, Sample};
use crate::workload::{BATCH_BYTES, MIB, N_THREADS, Workload};

const CHUNK_BYTES: [usize; 3] = [MIB, 8 * MIB, 32 * MIB];

#[derive(Parser)]
#[command(about = "Compares kvik's store with foyer's hybrid cache on one disk")]
struct Arguments {
    /// A directory on the disk; a folder is made in it, takes up to 2 GiB, and is removed.
    #[arg(long)]
    dir: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// How often everything is measured.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// MiB that are stored for each length of a chunk: a multiple of 64, at most 1024.
    #[arg(long, default_value_t = 1024)]
    mib: usize,
}

#[derive(Clone, Copy)]
enum Project {
    Kvik,
    Foyer(DiskIo),
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let n_mib = arguments.mib;
    ensure!((64..=1024).contains(&n_mib) && n_mib.is_multiple_of(64), "--mib is {n_mib}, see --help");
    ensure!(arguments.rounds > 0, "--rounds is 0, and at least 1 is needed");
    let dir = arguments.dir.join("kvik-compare-store");
    fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    let load_at_begin = machine::load_average();
    let measured = measure_all(&dir, &arguments);
    fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))?;
    let lines = measured?;
    let load_averages = [load_at_begin, machine::load_average()];
    let settings = json!({
        "stored_mib": n_mib, "batch_mib": BATCH_BYTES / MIB, "threads": N_THREADS, "rounds": arguments.rounds,
        "memory_mib": MEMORY_BYTES / MIB, "disk_mib": DISK_BYTES / MIB,
    });
    if arguments.json {
        println!("{}", report::to_json(&lines, &settings, &load_averages));
    } else {
        report::print_table(&lines, &settings, &load_averages);
    }
    Ok(())
}

fn measure_all(dir: &Path, arguments: &Arguments) -> Result<Vec<Line>> {
    let corpus = workload::corpus(arguments.mib * MIB);
    let mut lines = Vec::new();
    for chunk_bytes in CHUNK_BYTES {
        let workload = Workload::new(&corpus, chunk_bytes);
        let mut rounds = Rounds::new(chunk_bytes);
        let mut projects = [Project::Kvik, Project::Foyer(DiskIo::Uring), Project::Foyer(DiskIo::Psync)];
        for _ in 0..arguments.rounds {
            for project in projects {
                let samples = match project {
                    Project::Kvik => &mut rounds.kvik,
                    Project::Foyer(DiskIo::Uring) => &mut rounds.foyer_uring,
                    Project::Foyer(DiskIo::Psync) => &mut rounds.foyer_psync,
                };
                samples.push(measure(dir, &workload, project)?);
            }
            projects.rotate_left(1);
        }
        lines.extend(rounds.lines());
    }
    Ok(lines)
}

/// One round of one project, in a folder that is empty before and gone after.
fn measure(dir: &Path, workload: &Workload, project: Project) -> Result<Sample> {
    let dir = dir.join("files");
    fs::create_dir(&dir).context("make the folder of a round")?;
    let sample = match project {
        Project::Kvik => kvik::measure(&dir, workload)?,
        Project::Foyer(io) => hybrid::measure(&dir, workload, io)?,
    };
    fs::remove_dir_all(&dir).context("remove the folder of a round")?;
    // What the removal left to the disk is not to slow the next project.
    if let Some(parent) = dir.parent() {
        File::open(parent).and_then(|it| it.sync_all()).context("sync the directory")?;
    }
    Ok(sample)
}
