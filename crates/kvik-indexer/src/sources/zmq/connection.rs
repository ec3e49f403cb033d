//! One connection to a peer.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, timeout};
use tokio_util::io::{poll_read_buf, poll_write_buf};

use super::ZmtpError;
use super::endpoint::{Duplex, Endpoint};
use super::wire::{self, Command, GREETING_BYTES, MAX_COMMAND_BYTES, SocketType};

/// Most frames of a message; what engines send has three, in a replay four.
const MAX_FRAMES: usize = 8;
/// Bytes that are read at a time.
const READ_BYTES: usize = 64 << 10;
/// A buffer above this is not kept once what made it so large has been taken out.
const MAX_IDLE_BUFFER_BYTES: usize = 1 << 20;
/// Answers that a peer may have waiting before it is given up.
const MAX_OUTGOING_BYTES: usize = 64 << 10;
/// PINGs in a row that a peer may leave unanswered.
const MAX_UNANSWERED: u32 = 2;

/// What a connection may take.
#[derive(Debug, Clone, Copy)]
pub(in crate::sources) struct WireLimits {
    /// Bytes of all frames of a message.
    pub(in crate::sources) max_message_bytes: usize,
    /// Time to connect, and again to shake hands.
    pub(in crate::sources) connect: Duration,
    /// Silence after which a peer is asked whether it is there.
    pub(in crate::sources) heartbeat: Duration,
}

/// A connection that has shaken hands.
pub(in crate::sources) struct Connection {
    stream: Box<dyn Duplex>,
    limits: WireLimits,
    /// Whether the peer answers a PING: from 3.1 on.
    has_heartbeats: bool,
    incoming: BytesMut,
    outgoing: BytesMut,
    /// The frames of the message that is coming in.
    frames: Vec<Bytes>,
    n_frame_bytes: usize,
    /// When the silence has lasted too long.
    silent_at: Instant,
    n_unanswered: u32,
}

impl Connection {
    /// Connects and shakes hands.
    pub(in crate::sources) async fn open(
        endpoint: &Endpoint,
        socket_type: SocketType,
        limits: WireLimits,
    ) -> Result<Self, ZmtpError> {
        let stream = timeout(limits.connect, endpoint.connect())
            .await
            .map_err(|_| ZmtpError::TimedOut("connection"))??;
        let handshake = Self::shake_hands(stream, socket_type, limits);
        timeout(limits.connect, handshake).await.map_err(|_| ZmtpError::TimedOut("handshake"))?
    }

    async fn shake_hands(
        mut stream: Box<dyn Duplex>,
        socket_type: SocketType,
        limits: WireLimits,
    ) -> Result<Self, ZmtpError> {
        stream.write_all(&wire::greeting()).await?;
        let mut greeting = [0; GREETING_BYTES];
        stream.read_exact(&mut greeting).await?;
        let has_heartbeats = wire::parse_greeting(&greeting)? >= 1;
        let mut connection = Self {
            stream,
            limits,
            has_heartbeats,
            incoming: BytesMut::new(),
            outgoing: BytesMut::new(),
            frames: Vec::new(),
            n_frame_bytes: 0,
            silent_at: Instant::now() + limits.heartbeat,
            n_unanswered: 0,
        };
        wire::put_ready(&mut connection.outgoing, socket_type);
        loop {
            let Some((head, body)) = connection.take_frame()? else {
                connection.exchange().await?;
                continue;
            };
            if !head.is_command {
                return Err(ZmtpError::Protocol("sent a message before READY"));
            }
            match wire::parse_command(&body)? {
                Command::Ready { socket_type: peer } if socket_type.fits(peer) => return Ok(connection),
                Command::Ready { .. } => return Err(ZmtpError::Protocol("has a socket of another type")),
                Command::Error { reason } => {
                    return Err(ZmtpError::Refused(String::from_utf8_lossy(reason).into_owned()));
                }
                Command::Ping { .. } | Command::Other => {
                    return Err(ZmtpError::Protocol("sent another command before READY"));
                }
            }
        }
    }

    /// Asks for the messages whose first frame begins with `prefix`.
    pub(in crate::sources) async fn subscribe(&mut self, prefix: &[u8]) -> Result<(), ZmtpError> {
        self.send(&[&[&[1], prefix].concat()]).await
    }

    /// Sends a message, in the time that a handshake may take. Not cancel safe: what is cancelled may
    /// go out later.
    pub(in crate::sources) async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        wire::put_message(&mut self.outgoing, frames);
        let Self { stream, outgoing, limits, .. } = self;
        let write = async {
            while !outgoing.is_empty() {
                if stream.write_buf(outgoing).await? == 0 {
                    return Err(ZmtpError::Closed);
                }
            }
            Ok(())
        };
        timeout(limits.connect, write).await.map_err(|_| ZmtpError::TimedOut("room to send"))?
    }

    /// Waits for the next message. Cancel safe: what has come is kept.
    pub(in crate::sources) async fn receive(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            let Some((head, body)) = self.take_frame()? else {
                self.exchange_or_ping().await?;
                continue;
            };
            if head.is_command {
                match wire::parse_command(&body)? {
                    Command::Ping { context } => {
                        if self.outgoing.len() > MAX_OUTGOING_BYTES {
                            return Err(ZmtpError::Protocol("asks without reading the answers"));
                        }
                        wire::put_pong(&mut self.outgoing, context);
                    }
                    Command::Error { reason } => {
                        return Err(ZmtpError::Refused(String::from_utf8_lossy(reason).into_owned()));
                    }
                    Command::Ready { .. } | Command::Other => {}
                }
                continue;
            }
            self.n_frame_bytes += body.len();
            self.frames.push(body);
            if !head.has_more {
                self.n_frame_bytes = 0;
                return Ok(std::mem::take(&mut self.frames));
            }
        }
    }

    /// Takes a frame off what has come in; `None` if not all of it has.
    fn take_frame(&mut self) -> Result<Option<(wire::FrameHead, Bytes)>, ZmtpError> {
        let Some(head) = wire::parse_head(&self.incoming)? else { return Ok(None) };
        let max_bytes = if head.is_command {
            MAX_COMMAND_BYTES
        } else if self.frames.len() == MAX_FRAMES {
            return Err(ZmtpError::Protocol("sent a message of too many frames"));
        } else {
            self.limits.max_message_bytes - self.n_frame_bytes
        };
        let n_body_bytes = usize::try_from(head.n_body_bytes).unwrap_or(usize::MAX);
        if n_body_bytes > max_bytes {
            return Err(ZmtpError::Protocol("sent a message that is too large"));
        }
        if self.incoming.len() - head.n_head_bytes < n_body_bytes {
            return Ok(None);
        }
        self.incoming.advance(head.n_head_bytes);
        let body = self.incoming.split_to(n_body_bytes).freeze();
        if self.incoming.len() <= READ_BYTES && self.incoming.capacity() > MAX_IDLE_BUFFER_BYTES {
            self.incoming = BytesMut::from(&self.incoming[..]);
        }
        Ok(Some((head, body)))
    }

    /// Reads or writes something; asks a peer that is silent for long whether it is there.
    async fn exchange_or_ping(&mut self) -> Result<(), ZmtpError> {
        if !self.has_heartbeats {
            return self.exchange().await;
        }
        // The exchange is looked at before the clock, so time in which this task was not polled does not count
        // against the peer.
        if let Ok(exchanged) = tokio::time::timeout_at(self.silent_at, self.exchange()).await {
            return exchanged;
        }
        if self.n_unanswered == MAX_UNANSWERED {
            return Err(ZmtpError::TimedOut("sign of life"));
        }
        self.n_unanswered += 1;
        self.silent_at = Instant::now() + self.limits.heartbeat;
        let patience = self.limits.heartbeat * (MAX_UNANSWERED + 2);
        wire::put_ping(&mut self.outgoing, patience.as_millis() as u64);
        Ok(())
    }

    /// Writes what there is to write until something has been read. Cancel safe.
    async fn exchange(&mut self) -> Result<(), ZmtpError> {
        let Self { stream, incoming, outgoing, .. } = self;
        // Memory for what comes, not for what is announced; growth is by doubling.
        incoming.reserve(READ_BYTES);
        let n_bytes = poll_fn(|context| {
            while !outgoing.is_empty() {
                match poll_write_buf(Pin::new(&mut *stream), context, outgoing) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(Err(ZmtpError::Closed)),
                    Poll::Ready(Ok(_)) => {}
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error.into())),
                    Poll::Pending => break,
                }
            }
            poll_read_buf(Pin::new(&mut *stream), context, incoming).map_err(ZmtpError::from)
        })
        .await?;
        if n_bytes == 0 {
            return Err(ZmtpError::Closed);
        }
        self.n_unanswered = 0;
        self.silent_at = Instant::now() + self.limits.heartbeat;
        Ok(())
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Connection").field("limits", &self.limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: WireLimits = WireLimits {
        max_message_bytes: 16 << 20,
        connect: Duration::from_secs(30),
        heartbeat: Duration::from_secs(30),
    };

    /// A connection to a peer that has sent `bytes` after the handshake, and closed if `is_closed`.
    async fn connection(bytes: &[u8], is_closed: bool) -> (Connection, Option<tokio::io::DuplexStream>) {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let mut sent = BytesMut::from(&wire::greeting()[..]);
        sent.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
        sent.extend_from_slice(bytes);
        theirs.write_all(&sent).await.unwrap();
        let connection = Connection::shake_hands(Box::new(ours), SocketType::Sub, LIMITS).await.unwrap();
        (connection, (!is_closed).then_some(theirs))
    }

    #[tokio::test]
    async fn memory_is_taken_for_what_has_come_and_not_for_what_is_announced() {
        let announced = [&[2_u8][..], &(16_u64 << 20).to_be_bytes(), b"begin"].concat();
        let (mut connection, peer) = connection(&announced, false).await;
        let mut peer = peer.unwrap();
        for n_bytes in [0, 5 << 10, 500 << 10] {
            peer.write_all(&vec![0; n_bytes]).await.unwrap();
            let none = timeout(Duration::from_millis(20), connection.receive()).await;
            assert!(none.is_err(), "{none:?}");
        }
        assert!(connection.incoming.len() > 500 << 10);
        assert!(connection.incoming.capacity() < 2 << 20, "{}", connection.incoming.capacity());
    }

    #[tokio::test]
    async fn a_large_buffer_is_not_kept_and_a_message_may_come_byte_by_byte() {
        let (mut connection, peer) = connection(b"", false).await;
        let mut peer = peer.unwrap();
        let large = vec![7; 4 << 20];
        let mut bytes = BytesMut::new();
        wire::put_message(&mut bytes, &[b"a", &large]);
        let sent = tokio::spawn(async move {
            peer.write_all(&bytes).await.unwrap();
            let mut bytes = BytesMut::new();
            wire::put_message(&mut bytes, &[b"b", &[8; 300]]);
            for byte in bytes {
                peer.write_all(&[byte]).await.unwrap();
                tokio::task::yield_now().await;
            }
            peer
        });
        assert_eq!(connection.receive().await.unwrap(), [&b"a"[..], &large]);
        assert!(
            connection.incoming.capacity() <= MAX_IDLE_BUFFER_BYTES,
            "{}",
            connection.incoming.capacity()
        );
        // Cancelled again and again, nothing is lost.
        let message = loop {
            if let Ok(message) = timeout(Duration::from_micros(50), connection.receive()).await {
                break message.unwrap();
            }
        };
        assert_eq!(message, [&b"b"[..], &[8; 300]]);
        sent.await.unwrap();
    }

    #[tokio::test]
    async fn random_bytes_end_a_connection_and_nothing_else() {
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u8
        };
        for _ in 0..2000 {
            // Flags and lengths are small more often than not, so that most streams begin well.
            let bytes: Vec<u8> =
                (0..200).map(|_| if random() < 200 { random() % 8 } else { random() }).collect();
            let (mut connection, _) = connection(&bytes, true).await;
            while connection.receive().await.is_ok() {}
        }
    }

    #[tokio::test]
    async fn a_peer_that_only_asks_is_left() {
        let ping = b"\x04\x07\x04PING\0\0";
        let (mut connection, peer) = connection(b"", false).await;
        let mut peer = peer.unwrap();
        // Its answers are never read, so they pile up here once the pipe is full.
        let flood = tokio::spawn(async move { while peer.write_all(&ping.repeat(1000)).await.is_ok() {} });
        let error = timeout(Duration::from_secs(30), connection.receive()).await.unwrap().unwrap_err();
        assert!(matches!(error, ZmtpError::Protocol("asks without reading the answers")), "{error}");
        drop(connection);
        flood.await.unwrap();
    }
}
