//! A client process of the bench: reads one job a line from standard input and runs it.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, anyhow, bail, ensure};
use kvik_memory::SocketAddress;
use kvik_node::NodeClient;
use kvik_store::Commit;

use super::{CHUNK_BYTES, attach_options};

/// Buffers that a client copies from and to in turns: more than the processor's caches have room for.
const N_BUFFERS: usize = 4;

/// What a client does in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Job {
    /// Stores chunks.
    Put,
    /// Reads the chunks that it stored.
    Get,
    /// Copies as many bytes from its buffers to memory of its own.
    CopyIn,
    /// Copies them back.
    CopyOut,
}

/// A client of the bench.
#[derive(Debug)]
pub(super) struct ClientProcess {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// What a client did: bytes, and the times of its start and end.
#[derive(Debug, Clone, Copy)]
struct Done {
    n_bytes: u64,
    begin_ns: u128,
    end_ns: u128,
}

impl Job {
    const ALL: [(Self, &'static str); 4] =
        [(Self::Put, "put"), (Self::Get, "get"), (Self::CopyIn, "copy_in"), (Self::CopyOut, "copy_out")];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(job, _)| *job == self).map_or("", |(_, name)| name)
    }
}

impl FromStr for Job {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        let found = Self::ALL.iter().find(|(_, other)| *other == name);
        found.map(|(job, _)| *job).ok_or_else(|| anyhow!("{name} is no job"))
    }
}

// === impl ClientProcess ===

impl ClientProcess {
    pub(super) fn start(socket: &SocketAddress, number: usize, n_chunks: usize) -> anyhow::Result<Self> {
        let SocketAddress::Path(socket) = socket else { bail!("the socket has no path") };
        let program = std::env::current_exe().context("find this program")?;
        let mut process = Command::new(program)
            .args(["bench", "node-client"])
            .arg(socket)
            .args([number.to_string(), n_chunks.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a client")?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("a client has no pipes");
        };
        let mut client = Self { process, input, output: BufReader::new(output) };
        let ready = client.read_line()?;
        ensure!(ready == "ready", "a client said {ready:?}");
        Ok(client)
    }

    /// Has all clients do a job at once; bytes a second of all together, in GB/s.
    pub(super) fn run_all(clients: &mut [Self], job: Job, round: usize) -> anyhow::Result<f64> {
        for client in &mut *clients {
            writeln!(client.input, "{} {round}", job.name()).context("tell a client")?;
        }
        let done = clients.iter_mut().map(|client| client.read_line()?.parse::<Done>());
        let done = done.collect::<anyhow::Result<Vec<_>>>()?;
        let n_bytes: u64 = done.iter().map(|done| done.n_bytes).sum();
        let begin_ns = done.iter().map(|done| done.begin_ns).min().unwrap_or(0);
        let end_ns = done.iter().map(|done| done.end_ns).max().unwrap_or(0);
        ensure!(begin_ns < end_ns, "the clock went backwards");
        Ok(n_bytes as f64 / (end_ns - begin_ns) as f64)
    }

    fn read_line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("read from a client")?;
        ensure!(!line.is_empty(), "a client ended; what it said is above");
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl FromStr for Done {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> anyhow::Result<Self> {
        let mut fields = line.split(' ');
        let mut field = || fields.next().ok_or_else(|| anyhow!("a client said {line:?}"));
        Ok(Self { n_bytes: field()?.parse()?, begin_ns: field()?.parse()?, end_ns: field()?.parse()? })
    }
}

/// A client's memory.
struct ClientState {
    client: NodeClient,
    number: u32,
    n_chunks: usize,
    buffers: Vec<Vec<u8>>,
    /// As large as all chunks of a round.
    own: Vec<u8>,
}

/// Does jobs that are named on standard input, one a line, until it ends.
///
/// # Errors
/// If the daemon is gone, or a chunk is not there.
pub fn serve(socket: &Path, number: u32, n_chunks: usize) -> anyhow::Result<()> {
    let options = attach_options(SocketAddress::Path(socket.to_owned()), 32, 4096);
    let client = NodeClient::attach(&options).context("attach")?;
    let buffers = (0..N_BUFFERS).map(|idx| vec![idx as u8 + 1; CHUNK_BYTES]).collect();
    let own = vec![1; n_chunks * CHUNK_BYTES];
    let mut state = ClientState { client, number, n_chunks, buffers, own };
    let mut output = std::io::stdout().lock();
    writeln!(output, "ready")?;
    output.flush()?;
    for line in std::io::stdin().lines() {
        let line = line.context("read a job")?;
        let (job, round) = line.split_once(' ').context("read a job")?;
        let (job, round): (Job, u32) = (job.parse()?, round.parse()?);
        let begin_ns = now_ns()?;
        state.run(job, round)?;
        let end_ns = now_ns()?;
        writeln!(output, "{} {begin_ns} {end_ns}", n_chunks * CHUNK_BYTES)?;
        output.flush()?;
    }
    Ok(())
}

/// The time that all processes of the machine agree on.
fn now_ns() -> anyhow::Result<u128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("read the clock")?.as_nanos())
}

impl ClientState {
    fn run(&mut self, job: Job, round: u32) -> anyhow::Result<()> {
        match job {
            Job::Put => self.put(round),
            Job::Get => self.get(round),
            Job::CopyIn => {
                for (idx, target) in self.own.chunks_exact_mut(CHUNK_BYTES).enumerate() {
                    target.copy_from_slice(&self.buffers[idx % N_BUFFERS]);
                }
                Ok(())
            }
            Job::CopyOut => {
                for (idx, source) in self.own.chunks_exact(CHUNK_BYTES).enumerate() {
                    self.buffers[idx % N_BUFFERS].copy_from_slice(source);
                }
                Ok(())
            }
        }
    }

    /// The chunks of a client in a round; no other client and round has them.
    fn tokens(&self, round: u32) -> Vec<u32> {
        let n_tokens = (self.n_chunks * self.client.space().chunk_tokens()) as u32;
        (0..n_tokens).map(|place| place ^ self.number << 14 ^ round << 24).collect()
    }

    fn put(&self, round: u32) -> anyhow::Result<()> {
        let chain = self.client.space().chain(&self.tokens(round));
        let opened = self.client.open(&chain)?;
        opened.note_request(None)?;
        let mut write = opened.write(0, self.n_chunks)?;
        ensure!(write.n_chunks() == self.n_chunks, "there is room for {} chunks", write.n_chunks());
        for place in 0..self.n_chunks {
            write.write_chunk(place, &self.buffers[place % N_BUFFERS])?;
        }
        let outcomes = write.finish()?;
        let is_stored = outcomes.iter().all(|outcome| *outcome == Some(Commit::Stored));
        ensure!(is_stored, "chunks were not stored: {outcomes:?}");
        Ok(())
    }

    fn get(&mut self, round: u32) -> anyhow::Result<()> {
        let chain = self.client.space().chain(&self.tokens(round));
        let lease = self.client.open(&chain)?.retrieve(0)?;
        ensure!(lease.n_chunks() == self.n_chunks, "only {} chunks were there", lease.n_chunks());
        for place in 0..self.n_chunks {
            lease.copy_out(place, 0, &mut self.buffers[place % N_BUFFERS])?;
        }
        Ok(())
    }
}
