//! What the processes of these tests share: their chunks, and how they are started and asked.

#![allow(dead_code, reason = "each program uses some of it")]

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_node::AttachOptions;
use kvik_store::ChunkFormat;
use kvik_types::{BlockSize, Dtype, Namespace};

pub(crate) const N_CLIENTS: usize = 3;
pub(crate) const CHUNK_TOKENS: usize = 32;
pub(crate) const TOKEN_LAYER_BYTES: u64 = 256;
pub(crate) const N_LAYERS: u32 = 4;
pub(crate) const CHUNK_BYTES: usize = CHUNK_TOKENS * TOKEN_LAYER_BYTES as usize * N_LAYERS as usize;

/// Numbers that are the same in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % bound
    }
}

pub(crate) fn attach_options(socket: &Path) -> AttachOptions {
    let namespace =
        Namespace { model: "m".into(), dtype: Dtype::BF16, layout: "l".into(), tenant: String::new() };
    let block_tokens = BlockSize::try_new(16).unwrap();
    let format =
        ChunkFormat { n_layers: N_LAYERS, token_layer_bytes: TOKEN_LAYER_BYTES, n_ranks: 1, block_tokens };
    AttachOptions::new(SocketAddress::Path(socket.to_owned()), namespace, format)
}

pub(crate) fn tokens(chain_number: u64, n_chunks: usize) -> Vec<u32> {
    (0..(n_chunks * CHUNK_TOKENS) as u32).map(|place| place ^ (chain_number as u32) << 16).collect()
}

/// The bytes of a chunk, which no other has.
pub(crate) fn content(chain_number: u64, place: usize) -> Vec<u8> {
    let mut random = Random(chain_number << 32 | place as u64 | 1 << 60);
    let words = (0..CHUNK_BYTES / 4).flat_map(|_| (random.below(1 << 31) as u32).to_le_bytes());
    words.collect()
}

/// A daemon that says when it is ready, and answers questions about itself.
pub(crate) struct DaemonProcess {
    pub(crate) process: Child,
    pub(crate) input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl DaemonProcess {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut process = start_process(arguments);
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let mut daemon = Self { process, input, output: BufReader::new(output) };
        assert_eq!(daemon.read_line(), "ready");
        daemon
    }

    fn read_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Its sessions, and the bytes of its arena that are in use.
    pub(crate) fn ask(&mut self, question: &str) -> (u64, u64) {
        writeln!(self.input, "{question}").unwrap();
        let line = self.read_line();
        let (n_sessions, used_bytes) = line.split_once(' ').unwrap();
        (n_sessions.parse().unwrap(), used_bytes.parse().unwrap())
    }

    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Starts this program again, with pipes to its input and from its output.
pub(crate) fn start_process(arguments: &[&str]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until a client has done so many turns from now on.
pub(crate) fn wait_for_turns(client: &mut Child, n_turns: u64) {
    let output = client.stdout.as_mut().unwrap();
    let mut turns = vec![0; n_turns as usize];
    output.read_exact(&mut turns).expect("a client ended by itself; what it said is above");
}

#[track_caller]
pub(crate) fn within(timeout: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < timeout, "{what} did not happen within {timeout:?}");
        std::thread::yield_now();
    }
}
