//! What the store of a node costs its engines: a daemon and clients in processes of their own, as in production.
//!
//! Rates are those of all clients together, from the first start to the last end, beside plain copies by as many
//! processes in the same run. Sources and targets are larger than the processor's caches, and all memory was touched
//! before: a daemon runs for weeks.

mod client;
mod paged;
mod peers;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvik_memory::SocketAddress;
use kvik_node::{AttachOptions, NodeClient};
use kvik_store::ChunkFormat;
use kvik_types::{BlockSize, Dtype, Namespace};
use serde_json::json;

use crate::report::{Baseline, Goal, Measurement};

pub use client::serve as serve_client;
use client::{ClientProcess, Job};

const MIB: usize = 1 << 20;

/// Bytes of a chunk: 256 tokens of a model with 32 layers and 128 KiB a token.
const CHUNK_BYTES: usize = 32 * MIB;

/// Numbers of clients that are measured.
const CLIENTS: [usize; 3] = [1, 2, 4];

/// Tokens of the prompt that is looked up.
const LOOKUP_TOKENS: u32 = 100_000;

/// Time for the daemon to answer after its start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct NodeBenchOptions {
    /// Takes less time for less precise values.
    pub is_quick: bool,
    /// Threads that copy an engine's blocks.
    pub n_threads: usize,
}

/// The measurements, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Bytes a second into and out of the store.
    Rates,
    /// The lookup of a long prompt.
    Lookup,
    /// The time to attach.
    Attach,
    /// Bytes a second from and to an engine's blocks.
    Paged,
    /// Bytes a second from another node.
    Peers,
}

/// Runs the measurements.
#[derive(Debug)]
pub struct NodeBench {
    options: NodeBenchOptions,
    daemon: Daemon,
}

/// A daemon in a folder of its own, ended and removed at the end.
#[derive(Debug)]
struct Daemon {
    process: Child,
    folder: PathBuf,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Rates, Self::Lookup, Self::Attach, Self::Paged, Self::Peers];

    /// Shown while it is measured.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rates => "rates",
            Self::Lookup => "lookup",
            Self::Attach => "attach",
            Self::Paged => "paged",
            Self::Peers => "peers",
        }
    }
}

impl NodeBench {
    /// Starts a daemon.
    ///
    /// # Errors
    /// If the program cannot be started, or does not answer.
    pub fn try_new(options: NodeBenchOptions) -> anyhow::Result<Self> {
        // Room for the chunks of the lookup.
        Ok(Self { options, daemon: Daemon::start("lookup", 256 * MIB, &[])? })
    }

    /// What is measured, for programs.
    pub fn settings(&self) -> serde_json::Value {
        json!({
            "chunk_bytes": CHUNK_BYTES,
            "chunks_per_client_and_round": round_chunks(self.options),
            "rounds": self.n_rounds(),
            "lookup_tokens": LOOKUP_TOKENS,
            "threads": self.options.n_threads,
        })
    }

    /// What is measured, for people.
    pub fn description(&self) -> String {
        let (n_rounds, n_chunks) = (self.n_rounds(), round_chunks(self.options));
        let n_mib = CHUNK_BYTES / MIB;
        format!("{n_rounds} rounds of {n_chunks} chunks of {n_mib} MiB a client, each client a process")
    }

    /// Does one kind of measurement.
    pub fn measure(&self, kind: Kind) -> anyhow::Result<Vec<Measurement>> {
        match kind {
            Kind::Rates => {
                let rates = CLIENTS.into_iter().map(|n_clients| self.measure_rates(n_clients));
                Ok(rates.collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect())
            }
            Kind::Lookup => self.measure_lookup(),
            Kind::Attach => self.measure_attach(),
            Kind::Paged => paged::measure(self.options),
            Kind::Peers => peers::measure(self.options),
        }
    }

    fn measure_rates(&self, n_clients: usize) -> anyhow::Result<Vec<Measurement>> {
        // What the clients write in a round, twice: chunks of a round leave when those of the next but one come.
        let ram_bytes = 2 * n_clients * round_chunks(self.options) * (CHUNK_BYTES + MIB);
        let daemon = Daemon::start(&format!("rates-{n_clients}"), ram_bytes, &[])?;
        let socket = daemon.socket();
        let mut clients = (0..n_clients)
            .map(|idx| ClientProcess::start(&socket, idx, round_chunks(self.options)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let jobs = [Job::Put, Job::CopyIn, Job::Get, Job::CopyOut];
        let mut rates = jobs.map(|_| Vec::new());
        // The first rounds touch all of the memory.
        let n_warm_up = 4;
        for round in 0..n_warm_up + self.n_rounds() {
            for (job, rates) in jobs.iter().zip(&mut rates) {
                let rate = ClientProcess::run_all(&mut clients, *job, round)?;
                if round >= n_warm_up {
                    rates.push(rate);
                }
            }
        }
        let [puts, copies_in, gets, copies_out] = rates;
        let row = |name: &str, rates, baseline| {
            let result = Measurement::from_repeats(format!("{name}_clients_{n_clients}"), "GB/s", rates);
            let baseline = Baseline::new("memcpy", baseline);
            result.map(|result| result.compared_with(baseline, Some(Goal::RatioAtLeast(0.9))))
        };
        Ok(row("get", gets, copies_out).into_iter().chain(row("put", puts, copies_in)).collect())
    }

    fn measure_lookup(&self) -> anyhow::Result<Vec<Measurement>> {
        // Small chunks, so that all of a long prompt are there.
        let mut options = attach_options(self.daemon.socket(), 2, 64);
        options.namespace.model.push_str("-lookup");
        let client = NodeClient::attach(&options).context("attach")?;
        let prompt: Vec<u32> =
            (0..LOOKUP_TOKENS).map(|place| place.wrapping_mul(2_654_435_761) % 128_000).collect();
        let chain = client.space().chain(&prompt);
        let opened = client.open(&chain).context("look up")?;
        let mut write = opened.write(0, chain.n_chunks()).context("write")?;
        for place in 0..write.n_chunks() {
            write
                .write_chunk(place, &vec![place as u8; chain.payload_bytes(place)])
                .context("write a chunk")?;
        }
        write.finish().context("write the chunks")?;
        let unknown: Vec<u32> = prompt.iter().map(|token| token ^ 1).collect();
        let hit = self.time_lookups("lookup_100k_tokens", &client, &prompt, chain.n_tokens())?;
        let miss = self.time_lookups("lookup_100k_tokens_miss", &client, &unknown, 0)?;
        Ok(hit.into_iter().chain(miss).collect())
    }

    /// Looks a prompt up, of which `n_expected` tokens are there, from its tokens on.
    fn time_lookups(
        &self,
        name: &str,
        client: &NodeClient,
        prompt: &[u32],
        n_expected: usize,
    ) -> anyhow::Result<Option<Measurement>> {
        let n_repeats = if self.options.is_quick { 100 } else { 2000 };
        let mut times_us = Vec::with_capacity(n_repeats);
        for _ in 0..n_repeats {
            let begin = Instant::now();
            let opened = client.open(&client.space().chain(prompt)).context("look up")?;
            times_us.push(begin.elapsed().as_secs_f64() * 1e6);
            if opened.n_found_tokens() != n_expected {
                bail!("{} tokens were found, not {n_expected}", opened.n_found_tokens());
            }
        }
        Ok(Measurement::from_repeats(name.to_owned(), "us", times_us))
    }

    fn measure_attach(&self) -> anyhow::Result<Vec<Measurement>> {
        let options = attach_options(self.daemon.socket(), 32, 4096);
        let n_repeats = if self.options.is_quick { 10 } else { 100 };
        let mut times_ms = Vec::with_capacity(n_repeats);
        for _ in 0..n_repeats {
            let begin = Instant::now();
            let client = NodeClient::attach(&options).context("attach")?;
            times_ms.push(begin.elapsed().as_secs_f64() * 1e3);
            drop(client);
        }
        Ok(Measurement::from_repeats("attach_ms".to_owned(), "ms", times_ms).into_iter().collect())
    }

    fn n_rounds(&self) -> usize {
        if self.options.is_quick { 2 } else { 7 }
    }
}

/// Chunks that a client writes and reads in a round.
fn round_chunks(options: NodeBenchOptions) -> usize {
    if options.is_quick { 4 } else { 16 }
}

fn attach_options(socket: SocketAddress, n_layers: u32, token_layer_bytes: u64) -> AttachOptions {
    let namespace = Namespace {
        model: "bench".to_owned(),
        dtype: Dtype::BF16,
        layout: "bench".to_owned(),
        tenant: String::new(),
    };
    // The tokens of a block of most engines.
    let block_tokens = BlockSize::try_new(16).expect("16 tokens are a block");
    let format = ChunkFormat { n_layers, token_layer_bytes, n_ranks: 1, block_tokens };
    AttachOptions::new(socket, namespace, format)
}

impl Daemon {
    fn start(name: &str, ram_bytes: usize, more: &[&str]) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("kvik-bench-node-{}-{name}", std::process::id()));
        let program = std::env::current_exe().context("find this program")?;
        let socket = folder.join("store.sock");
        let process = Command::new(program)
            .args(["store", "serve", "--log", "warn", "--set", "tiers.policy=lru"])
            .args(more)
            .args(["--ram", &ram_bytes.to_string(), "--socket"])
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start the store daemon")?;
        let daemon = Self { process, folder };
        let options = attach_options(daemon.socket(), 32, 4096);
        let begin = Instant::now();
        while let Err(error) = NodeClient::attach(&options) {
            if begin.elapsed() > START_TIMEOUT {
                return Err(error).context("wait for the store daemon");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }

    fn socket(&self) -> SocketAddress {
        SocketAddress::Path(self.folder.join("store.sock"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has nothing to write down.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
