//! An engine's half of `ZeroMQ`, written from the protocol's text and sharing nothing with the crate's own half.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use kvik_indexer::feed::FeedName;
use kvik_indexer::sources::engine::{EngineConfig, EngineLimits};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::PATIENCE;

pub(crate) const TOPIC: &[u8] = b"kv@pod1@tiny";
const END: [u8; 8] = [0xff; 8];

/// An engine with a port that publishes, served by the test, and one that replays, served by itself.
pub(crate) struct Engine {
    live: TcpListener,
    replay_address: SocketAddr,
    pub(crate) book: Arc<Mutex<Book>>,
}

/// What a replay answers.
#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) batches: BTreeMap<u64, Vec<u8>>,
    /// Whether answers are those of vLLM before 0.26, which have no topic.
    pub(crate) has_no_topic: bool,
    /// Answers that are lost the first time.
    pub(crate) lost_once: BTreeSet<u64>,
    /// Whether the end is lost, the first time.
    pub(crate) loses_end: bool,
    /// Where the replays that were asked for began.
    pub(crate) starts: Vec<u64>,
}

/// A connection after the handshake.
pub(crate) struct Peer<S> {
    pub(crate) stream: S,
}

/// The name of the feed that [`TOPIC`] speaks for.
pub(crate) fn pod1() -> FeedName {
    FeedName { model: "tiny".to_owned(), worker: "pod1".to_owned(), rank: 0 }
}

/// Times that let a test go through an outage in a moment.
pub(crate) fn quick() -> EngineLimits {
    EngineLimits {
        replay_idle_ms: 200,
        replay_cooldown_ms: 0,
        reconnect_min_ms: 5,
        reconnect_max_ms: 50,
        ..EngineLimits::default()
    }
}

impl Engine {
    pub(crate) async fn bind() -> Self {
        Self::new(TcpListener::bind("127.0.0.1:0").await.unwrap()).await
    }

    /// An engine on another address than the loopback interface's.
    #[cfg(feature = "kubernetes-tests")]
    pub(crate) async fn bind_at(address: std::net::IpAddr) -> Self {
        Self::new(TcpListener::bind((address, 0)).await.unwrap()).await
    }

    /// Two engines on neighboring ports.
    pub(crate) async fn bind_pair() -> (Self, Self) {
        loop {
            let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let Some(port) = first.local_addr().unwrap().port().checked_add(1) else { continue };
            // Another process may have it.
            if let Ok(second) = TcpListener::bind(("127.0.0.1", port)).await {
                return (Self::new(first).await, Self::new(second).await);
            }
        }
    }

    async fn new(live: TcpListener) -> Self {
        let replay = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let replay_address = replay.local_addr().unwrap();
        let book = Arc::new(Mutex::new(Book::default()));
        let served = Arc::clone(&book);
        tokio::spawn(async move {
            while let Ok((stream, _)) = replay.accept().await {
                tokio::spawn(serve_replays(stream, Arc::clone(&served)));
            }
        });
        Self { live, replay_address, book }
    }

    /// Where it publishes.
    pub(crate) fn port(&self) -> u16 {
        self.live.local_addr().unwrap().port()
    }

    /// A configuration without a replay.
    pub(crate) fn config(&self) -> EngineConfig {
        let endpoint = format!("tcp://{}", self.live.local_addr().unwrap());
        EngineConfig { endpoint, limits: quick(), ..EngineConfig::default() }
    }

    pub(crate) fn config_with_replay(&self) -> EngineConfig {
        EngineConfig { replay_endpoint: Some(format!("tcp://{}", self.replay_address)), ..self.config() }
    }

    /// Waits for a subscriber.
    pub(crate) async fn accept(&self) -> Peer<TcpStream> {
        let (mut peer, prefix) = self.accept_any().await;
        assert_eq!(prefix, b"kv@");
        // So that a test can write what it wants to be read as one.
        peer.stream.set_nodelay(true).unwrap();
        peer.stream.flush().await.unwrap();
        peer
    }

    /// Waits for a subscriber; returns the prefix that it wants too.
    pub(crate) async fn accept_any(&self) -> (Peer<TcpStream>, Vec<u8>) {
        let (stream, _) = tokio::time::timeout(PATIENCE, self.live.accept()).await.unwrap().unwrap();
        let mut peer = Peer::shake_hands(stream, b"PUB").await;
        let subscription = peer.receive().await.unwrap();
        assert_eq!((subscription.len(), subscription[0][0]), (1, 1), "{subscription:?}");
        (peer, subscription[0][1..].to_vec())
    }

    /// Waits for a connection and says nothing.
    pub(crate) async fn accept_raw(&self) -> TcpStream {
        tokio::time::timeout(PATIENCE, self.live.accept()).await.unwrap().unwrap().0
    }

    /// Puts batches where replays find them; batch `n` stores block `1000 + n`.
    pub(crate) fn remember(&self, sequences: impl IntoIterator<Item = u64>) {
        self.book.lock().batches.extend(sequences.into_iter().map(|sequence| (sequence, stored(sequence))));
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Peer<S> {
    pub(crate) async fn shake_hands(mut stream: S, socket_type: &[u8]) -> Self {
        let mut greeting = [0; 64];
        greeting[0] = 0xff;
        greeting[9..12].copy_from_slice(&[0x7f, 3, 1]);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await.unwrap();
        let mut theirs = [0; 64];
        stream.read_exact(&mut theirs).await.unwrap();
        assert_eq!((theirs[0], theirs[9], theirs[10]), (0xff, 0x7f, 3));
        assert_eq!(&theirs[12..17], b"NULL\0");
        let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        ready.push(socket_type.len() as u8);
        ready.extend_from_slice(socket_type);
        stream.write_all(&frame(4, &ready)).await.unwrap();
        let mut peer = Self { stream };
        let (flags, theirs) = peer.receive_frame().await.unwrap();
        assert_eq!((flags, &theirs[..6]), (4, &b"\x05READY"[..]));
        peer
    }

    pub(crate) async fn send(&mut self, frames: &[&[u8]]) {
        self.stream.write_all(&message(frames)).await.unwrap();
    }

    /// Publishes a batch that stores block `1000 + sequence`.
    pub(crate) async fn publish(&mut self, sequence: u64) {
        self.send(&[TOPIC, &sequence.to_be_bytes(), &stored(sequence)]).await;
    }

    /// The next message; `None` when the other side has gone.
    pub(crate) async fn receive(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.receive_frame().await?;
            assert_eq!(flags & 4, 0, "a command: {body:?}");
            frames.push(body);
            if flags & 1 == 0 {
                return Some(frames);
            }
        }
    }

    pub(crate) async fn receive_frame(&mut self) -> Option<(u8, Vec<u8>)> {
        let flags = self.stream.read_u8().await.ok()?;
        let length = match flags & 2 {
            0 => u64::from(self.stream.read_u8().await.ok()?),
            _ => self.stream.read_u64().await.ok()?,
        };
        let mut body = vec![0; usize::try_from(length).unwrap()];
        self.stream.read_exact(&mut body).await.ok()?;
        Some((flags & !2, body))
    }
}

async fn serve_replays(stream: TcpStream, book: Arc<Mutex<Book>>) {
    let mut peer = Peer::shake_hands(stream, b"ROUTER").await;
    while let Some(request) = peer.receive().await {
        let [empty, start] = &request[..] else { panic!("{request:?}") };
        assert!(empty.is_empty());
        let start = u64::from_be_bytes(start.as_slice().try_into().unwrap());
        let mut answers = Vec::new();
        {
            let mut book = book.lock();
            book.starts.push(start);
            let has_no_topic = book.has_no_topic;
            let lost = std::mem::take(&mut book.lost_once);
            for (sequence, payload) in book.batches.range(start..) {
                if lost.contains(sequence) {
                    continue;
                }
                let number = sequence.to_be_bytes();
                let all: [&[u8]; 4] = [b"", TOPIC, &number, payload];
                answers.extend(if has_no_topic { message(&[all[0], all[2], all[3]]) } else { message(&all) });
            }
            if !std::mem::take(&mut book.loses_end) {
                let end: &[&[u8]] = if has_no_topic { &[b"", &END, b""] } else { &[b"", b"", &END, b""] };
                answers.extend(message(end));
            }
        }
        if peer.stream.write_all(&answers).await.is_err() {
            return;
        }
    }
}

/// The bytes of a message.
pub(crate) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let last = frames.len() - 1;
    frames.iter().enumerate().flat_map(|(place, body)| frame(u8::from(place != last), body)).collect()
}

/// The bytes of a frame.
pub(crate) fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = match u8::try_from(body.len()) {
        Ok(length) => vec![flags, length],
        Err(_) => [&[flags | 2][..], &(body.len() as u64).to_be_bytes()].concat(),
    };
    bytes.extend_from_slice(body);
    bytes
}

/// A payload that stores block `1000 + sequence`, published that many seconds after the start of 1970.
pub(crate) fn stored(sequence: u64) -> Vec<u8> {
    payload(sequence as f64, 1000_u64.wrapping_add(sequence), 0)
}

/// A payload that stores one block.
pub(crate) fn payload(published_s: f64, hash: u64, rank: u8) -> Vec<u8> {
    let mut bytes = vec![0x93, 0xcb];
    bytes.extend_from_slice(&published_s.to_be_bytes());
    bytes.extend_from_slice(b"\x91\x97\xabBlockStored\x91\xcf");
    bytes.extend_from_slice(&hash.to_be_bytes());
    // No parent, a block of four tokens, no adapter, on the device.
    bytes.extend_from_slice(b"\xc0\x94\x01\x02\x03\x04\x04\xc0\xa3GPU");
    bytes.push(rank);
    bytes
}
