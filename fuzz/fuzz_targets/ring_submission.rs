//! What a hostile client writes into the rings and the payload that it shares with the store daemon.
//!
//! A daemon with two tenants serves in this process. The input is a program for a client of the first: requests with
//! small or with any numbers, words of the payload, and words at places that belong to the daemon. Whatever it does, the
//! daemon does not panic, the offsets that it answers lie in the arena, the session ends when the client does and then
//! holds no memory, and the chunks of the other tenant stay as they are.

#![no_main]

use std::sync::LazyLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_memory::SocketAddress;
use kvik_memory::socket::{Connection, FrameBuffer};
use kvik_node::{Attach, ClientToken, NodeOptions, NodeServer, Purpose, Tenant};
use kvik_store::{Chain, ChunkFormat, Clear, Commit, Store, StoreOptions, Write};
use kvik_tier::shared::{SharedWords, checksum};
use kvik_tier::{Arena, ArenaOptions, RamTier};
use kvik_types::{BlockSize, Dtype, Namespace};
use libfuzzer_sys::fuzz_target;

/// The places of `ring.rs`.
const SUBMISSION_TAIL: usize = 0;
const SUBMISSION_WAKE_UPS: usize = 32;
const COMPLETION_TAIL: usize = 64;
const COMPLETION_HEAD: usize = 80;
const SUBMISSION_ENTRIES: usize = 128;
const COMPLETION_ENTRIES: usize = SUBMISSION_ENTRIES + N_ENTRIES as usize * 8;
const PAYLOAD: usize = COMPLETION_ENTRIES + N_ENTRIES as usize * 8;
const PAYLOAD_WORDS: usize = 32 << 10;
const N_ENTRIES: u64 = 256;

const OPEN: u64 = 1;
const RETRIEVE: u64 = 2;
const WRITE: u64 = 3;
const COMMIT: u64 = 4;

const CHUNK_TOKENS: usize = 16;
const BLOCK_TOKENS: usize = 4;
const CHUNK_BYTES: usize = 4096;

/// Room for 16 chunks, so that memory is soon full.
const ARENA_BYTES: u64 = 64 << 10;

/// Chunks of the other tenant.
const N_OTHER_CHUNKS: usize = 4;

/// Longer than any request takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Numbers at which something changes.
const EDGES: [u64; 8] = [1, u64::MAX, 1 << 32, 32 << 10, 1 << 63, 256, u32::MAX as u64, (32 << 10) << 32];

static DAEMON: LazyLock<Daemon> = LazyLock::new(Daemon::start);

struct Daemon {
    server: NodeServer,
    socket: SocketAddress,
    own: Store,
    other: Store,
    other_chain: Chain,
}

/// A client that keeps to no rule.
struct Client {
    connection: Connection,
    words: SharedWords,
    n_sent: u64,
    /// It has written where the daemon writes, so that nothing is known of answers any more.
    has_spoiled: bool,
}

/// The bytes of the input, one after the other; zeros behind the end.
struct Program<'a>(&'a [u8]);

fuzz_target!(|input: &[u8]| {
    let daemon = &*DAEMON;
    let mut program = Program(input);
    let mut client = Client::attach(daemon);
    while !program.0.is_empty() && !client.is_gone() {
        client.step(&mut program);
    }
    drop(client);
    until("the session ends", || daemon.server.stats().n_sessions == 0);
    daemon.own.clear(&Clear::default());
    until("all memory is free", || daemon.own.arena().stat().used_bytes == 0);
    daemon.check_other();
});

impl Daemon {
    fn start() -> Self {
        let folder = std::env::temp_dir().join(format!("kvik-fuzz-{}", std::process::id()));
        let socket = SocketAddress::Path(folder.join("node.sock"));
        let (own, other) = (open_store(), open_store());
        let namespace = Namespace { tenant: "other".to_owned(), ..namespace() };
        let tokens: Vec<u32> = (0..(N_OTHER_CHUNKS * CHUNK_TOKENS) as u32).collect();
        let other_chain = other.space(&namespace, format()).unwrap().chain(&tokens);
        for chunk_idx in 0..N_OTHER_CHUNKS {
            let Write::Slot(mut writer) = other.begin_write(&other_chain, chunk_idx, 0) else { unreachable!() };
            writer.payload_mut().fill(0x50 + chunk_idx as u8);
            assert_eq!(writer.commit(), Commit::Stored);
        }
        let token = ClientToken::try_new("a token that no one guesses").unwrap();
        let tenants = vec![
            Tenant { name: String::new(), token: None, store: own.clone() },
            Tenant { name: "other".to_owned(), token: Some(token), store: other.clone() },
        ];
        let options = NodeOptions { tenants, ..NodeOptions::new(socket.clone(), own.clone()) };
        Self { server: NodeServer::start(options).unwrap(), socket, own, other, other_chain }
    }

    fn check_other(&self) {
        let retrieved = self.other.retrieve(&self.other_chain, 0);
        assert_eq!(retrieved.chunks().len(), N_OTHER_CHUNKS);
        for (chunk_idx, chunk) in retrieved.chunks().iter().enumerate() {
            assert!(chunk.payload(0).iter().all(|byte| *byte == 0x50 + chunk_idx as u8));
        }
        assert_eq!(self.other.arena().stat().used_bytes, (N_OTHER_CHUNKS * CHUNK_BYTES) as u64);
    }
}

impl Client {
    fn attach(daemon: &Daemon) -> Self {
        let connection = Connection::open(&daemon.socket).unwrap();
        let (namespace, token) = (namespace(), String::new());
        let attach = Attach { namespace, format: format(), rank: 0, token, purpose: Purpose::Session };
        assert!(connection.send(&attach.encode()).unwrap());
        let mut buffer = FrameBuffer::new();
        let begin = Instant::now();
        loop {
            if let Some((_, descriptors)) = connection.receive_with_descriptors(&mut buffer).unwrap() {
                let file = descriptors.into_iter().next().unwrap();
                let words = SharedWords::map(file, PAYLOAD + PAYLOAD_WORDS).unwrap();
                return Self { connection, words, n_sent: 0, has_spoiled: false };
            }
            assert!(begin.elapsed() < PATIENCE, "the daemon does not let a client in");
            std::thread::yield_now();
        }
    }

    fn is_gone(&self) -> bool {
        self.connection.receive(&mut FrameBuffer::new()).is_err()
    }

    fn store(&self, word: usize, value: u64) {
        self.words.words()[word].store(value, Ordering::Release);
    }

    fn load(&self, word: usize) -> u64 {
        self.words.words()[word].load(Ordering::Acquire)
    }

    fn step(&mut self, program: &mut Program<'_>) {
        let choice = program.byte();
        match choice % 12 {
            code @ 0..8 => self.ask(u64::from(code) + 1, program, choice >= 128),
            8 => {
                let entry = std::array::from_fn(|_| program.number());
                self.send(entry);
            }
            9 => {
                let (first, n_words) = (program.small() * 8, program.small());
                for word in first..first + n_words {
                    let value = program.number();
                    self.store(PAYLOAD + word, value);
                }
            }
            10 => {
                let (word, value) = (program.small() % SUBMISSION_ENTRIES, program.number());
                self.has_spoiled = true;
                self.store(word, value);
                self.wake();
            }
            _ => self.wait_for_answers(),
        }
    }

    /// A request with small numbers, of which many are right.
    fn ask(&mut self, code: u64, program: &mut Program<'_>, waits: bool) {
        let handle = program.small() as u64 % 16 | (program.small() as u64 % 8) << 32;
        let (first_word, n_chunks) = (64 * (program.small() as u64 % 4), program.small() as u64 % 20);
        let place = program.small() as u64 % 20;
        let argument = match (code, program.byte()) {
            (OPEN, 0..128) => n_chunks * CHUNK_TOKENS as u64,
            (OPEN, tail) => n_chunks * CHUNK_TOKENS as u64 - n_chunks.min(1) * u64::from(tail % 4) * 4,
            // No client writes bytes here, so chunks are of zeros.
            (COMMIT, tail @ 0..224) => {
                let n_tokens = CHUNK_TOKENS - if tail < 192 { 0 } else { tail as usize % 4 * BLOCK_TOKENS };
                checksum(&vec![0; n_tokens * CHUNK_BYTES / CHUNK_TOKENS]).0
            }
            (_, argument) => argument.into(),
        };
        let number = self.n_sent;
        self.send([code | place << 32, number, handle, first_word | n_chunks << 32, argument, 0, 0, 0]);
        if waits {
            self.wait_for_answers();
            if matches!(code, RETRIEVE | WRITE) && !self.has_spoiled && !self.is_gone() {
                self.check_offsets(number, PAYLOAD + first_word as usize);
            }
        }
    }

    fn send(&mut self, entry: [u64; 8]) {
        let first = SUBMISSION_ENTRIES + (self.n_sent % N_ENTRIES) as usize * 8;
        for (word, value) in entry.into_iter().enumerate() {
            self.store(first + word, value);
        }
        self.n_sent += 1;
        self.store(SUBMISSION_TAIL, self.n_sent);
        self.wake();
    }

    fn wake(&self) {
        self.words.words()[SUBMISSION_WAKE_UPS].fetch_add(1, Ordering::Release);
        self.words.wake(SUBMISSION_WAKE_UPS);
    }

    /// Reads all answers. A client that has spoiled the rings has no right to any.
    fn wait_for_answers(&self) {
        if self.has_spoiled {
            return;
        }
        until("the daemon answers or ends the session", || {
            self.load(COMPLETION_TAIL) == self.n_sent || self.is_gone()
        });
        self.store(COMPLETION_HEAD, self.load(COMPLETION_TAIL));
    }

    /// The offsets of an answer lie in the arena, at the start of a unit.
    fn check_offsets(&self, number: u64, first: usize) {
        let answer = COMPLETION_ENTRIES + (number % N_ENTRIES) as usize * 8;
        assert_eq!(self.load(answer + 1), number);
        let n_chunks = (self.load(answer) >> 32) as usize;
        for place in 0..n_chunks {
            let offset = self.load(first + place);
            // A chunk that is there needs no place.
            if offset != u64::MAX {
                let offset = offset & ((1 << 56) - 1);
                assert!(offset.is_multiple_of(4096) && offset + CHUNK_BYTES as u64 <= ARENA_BYTES, "{offset}");
            }
        }
    }
}

impl Program<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn small(&mut self) -> usize {
        self.byte().into()
    }

    /// A small number, one at an edge, or any.
    fn number(&mut self) -> u64 {
        let choice = self.byte();
        match choice {
            0..128 => choice.into(),
            128..192 => EDGES[choice as usize % EDGES.len()],
            192..224 => EDGES[choice as usize % EDGES.len()].wrapping_sub(self.byte().into()),
            224.. => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }
}

fn open_store() -> Store {
    let ram = RamTier::new(Arena::new(ArenaOptions::new(ARENA_BYTES)).unwrap());
    let chunk_tokens = BlockSize::try_new(CHUNK_TOKENS).unwrap();
    let options = StoreOptions { chunk_tokens, stores_tails: true, ..StoreOptions::default() };
    Store::builder(options, ram).open().unwrap()
}

fn namespace() -> Namespace {
    Namespace { model: "m".to_owned(), dtype: Dtype::BF16, layout: "l".to_owned(), tenant: String::new() }
}

/// Chunks of [`CHUNK_BYTES`].
fn format() -> ChunkFormat {
    let block_tokens = BlockSize::try_new(BLOCK_TOKENS).unwrap();
    ChunkFormat { n_layers: 2, token_layer_bytes: 128, n_ranks: 1, block_tokens }
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "it does not happen that {what}");
        std::thread::yield_now();
    }
}
