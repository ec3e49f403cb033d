//! Clients that do harm, each a task that begins again when it is cut off.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::Attack;
use crate::gateway::load::stream_request;
use crate::gateway::mock::Pace;

/// Time for all attackers to begin.
const START_TIME: Duration = Duration::from_secs(10);
/// Time between two bytes of those that are slow.
const DRIP: Duration = Duration::from_millis(500);
/// Time between two attempts of one attacker: ports that are used up would end the honest clients too.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes that an attacker with a giant body sends at once, and how often: a hundred megabytes a second of all.
static PIECE: LazyLock<Vec<u8>> = LazyLock::new(|| vec![b' '; 64 << 10]);
const PIECE_PAUSE: Duration = Duration::from_millis(20);
/// As long as the gateway lets a body be, and far more.
const GIANT_BODY_BYTES: [usize; 2] = [16 << 20, 1 << 30];
/// More than any server reads of a head.
const HUGE_HEADER_BYTES: usize = 1 << 20;
/// Chunks of a stream that does not end within an attack.
const ENDLESS_CHUNKS: usize = 1 << 30;
/// What the kernel may take for a client that does not read, in bytes.
const SMALL_BUFFER_BYTES: u32 = 4096;
/// Addresses of the attackers, so that their ports are not those of the honest clients.
const SOURCES: [u8; 4] = [2, 3, 4, 5];

/// Attackers at work.
#[derive(Debug)]
pub(super) struct Attackers {
    tasks: JoinSet<()>,
    /// Those that have connected at least once.
    n_begun: Arc<AtomicUsize>,
}

/// One attacker.
#[derive(Debug, Clone, Copy)]
struct Attacker {
    attack: Attack,
    target: SocketAddr,
    number: usize,
}

impl Attackers {
    /// Starts `n_attackers` and waits until they have connected, or have had their time.
    pub(super) fn start(
        runtime: &Runtime,
        attack: Attack,
        target: SocketAddr,
        n_attackers: usize,
    ) -> anyhow::Result<Self> {
        let n_begun = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for number in 0..n_attackers {
            let begun = Arc::clone(&n_begun);
            tasks.spawn_on(Attacker { attack, target, number }.run(begun), runtime.handle());
        }
        let begin = std::time::Instant::now();
        // Relaxed: a count on its own.
        while n_begun.load(Ordering::Relaxed) < n_attackers && begin.elapsed() < START_TIME {
            std::thread::sleep(Duration::from_millis(5));
        }
        anyhow::ensure!(0 < n_begun.load(Ordering::Relaxed), "no attacker could connect");
        Ok(Self { tasks, n_begun })
    }

    /// Ends them all; returns how many had connected.
    pub(super) fn stop(mut self, runtime: &Runtime) -> usize {
        runtime.block_on(self.tasks.shutdown());
        self.n_begun.load(Ordering::Relaxed)
    }
}

impl Attacker {
    async fn run(self, n_begun: Arc<AtomicUsize>) {
        let mut has_begun = false;
        for round in 0.. {
            if let Ok(stream) = self.connect().await {
                if !has_begun {
                    has_begun = true;
                    n_begun.fetch_add(1, Ordering::Relaxed);
                }
                // A server that cuts an attacker off does what it should.
                let _ = self.attack(stream, round).await;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn connect(self) -> io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        if self.attack == Attack::StalledReaders {
            socket.set_recv_buffer_size(SMALL_BUFFER_BYTES)?;
        }
        let source = Ipv4Addr::new(127, 0, 0, SOURCES[self.number % SOURCES.len()]);
        socket.bind(SocketAddr::new(IpAddr::V4(source), 0))?;
        socket.connect(self.target).await
    }

    async fn attack(self, stream: TcpStream, round: usize) -> io::Result<()> {
        match self.attack {
            Attack::StalledReaders => {
                let body = stream_request(ENDLESS_CHUNKS, Pace::Saturated);
                write(&stream, head(body.len()).as_bytes()).await?;
                write(&stream, &body).await?;
                std::future::pending().await
            }
            Attack::SlowHeaders => {
                write(&stream, b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: ").await?;
                drip(&stream).await
            }
            Attack::SlowBodies => {
                write(&stream, head(1 << 20).as_bytes()).await?;
                drip(&stream).await
            }
            Attack::IdleTls | Attack::Connections => until_closed(&stream).await,
            Attack::GiantBodies => {
                let n_bytes = GIANT_BODY_BYTES[(self.number + round) % GIANT_BODY_BYTES.len()];
                write(&stream, head(n_bytes).as_bytes()).await?;
                for _ in 0..n_bytes / PIECE.len() {
                    write(&stream, &PIECE).await?;
                    tokio::time::sleep(PIECE_PAUSE).await;
                }
                until_closed(&stream).await
            }
            Attack::Malformed => {
                write(&stream, &malformed(self.number + round)).await?;
                // An answer, or the end of the connection.
                tokio::time::timeout(Duration::from_secs(1), read(&stream)).await??;
                Ok(())
            }
        }
    }
}

/// The head of a request with a body of `n_bytes`.
fn head(n_bytes: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: edges\r\n\
        content-type: application/json\r\ncontent-length: {n_bytes}\r\n\r\n"
    )
}

/// Something that is no request, of one kind after the other.
fn malformed(number: usize) -> Vec<u8> {
    let with_body = |body: &[u8]| [head(body.len()).as_bytes(), body].concat();
    match number % 6 {
        0 => noise(number as u64, 4096),
        1 => {
            let head =
                "POST /v1/chat/completions HTTP/1.1\r\nhost: edges\r\ntransfer-encoding: chunked\r\n\r\n";
            [head, "zz\r\n{}\r\n"].concat().into_bytes()
        }
        2 => with_body(br#"{"model":"bench","messages":[{"role":"#),
        3 => [b"GET /health HTTP/1.1\r\nx-huge: ".to_vec(), vec![b'x'; HUGE_HEADER_BYTES]].concat(),
        4 => with_body(
            b"{\"model\":\"bench\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\xc0\"}]}",
        ),
        _ => with_body(&[&b"[".repeat(100_000)[..], &noise(number as u64, 1024)].concat()),
    }
}

/// Bytes that are the same in every run.
fn noise(seed: u64, n_bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..n_bytes).map(|_| next()).collect()
}

/// Sends a byte from time to time until the other side closes.
async fn drip(stream: &TcpStream) -> io::Result<()> {
    loop {
        write(stream, b"x").await?;
        tokio::select! {
            outcome = until_closed(stream) => return outcome,
            () = tokio::time::sleep(DRIP) => {}
        }
    }
}

async fn until_closed(stream: &TcpStream) -> io::Result<()> {
    while 0 < read(stream).await? {}
    Ok(())
}

async fn read(stream: &TcpStream) -> io::Result<usize> {
    let mut buffer = [0; 4096];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            outcome => return outcome,
        }
    }
}

async fn write(stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        stream.writable().await?;
        match stream.try_write(rest) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            n_written => rest = &rest[n_written?..],
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_requests_are_of_every_kind_and_the_same_each_time() {
        let all: Vec<Vec<u8>> = (0..6).map(malformed).collect();
        assert_eq!(all, (0..6).map(malformed).collect::<Vec<_>>());
        for (idx, one) in all.iter().enumerate() {
            assert!(all[..idx].iter().all(|other| other != one), "{idx}");
        }
        assert!(std::str::from_utf8(&all[4]).is_err());
    }
}
