//! The side that answers: one connection, until it ends.

use std::fmt;
use std::io::{self, IoSlice, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_keepalive;

use super::frame::{LM_REQUEST_BYTES, LmCommand, LmForm, LmKey, LmReply, LmRequest};
use crate::channel::{Channel, TimedSocket, write_all_slices};
use crate::error::{Result, TierError};

/// Longest silence in the middle of a request or of its answer.
const SILENCE: Duration = Duration::from_secs(30);

/// Speed below which a client is taken for one that holds memory on purpose.
const MIN_BYTES_PER_S: u64 = 1 << 20;

/// A client may keep a connection without a request for as long as its machine is there: LMCache's does not connect again.
const IDLE_TIME: Duration = Duration::from_hours(24 * 365);

/// Values that are not kept are read past in such pieces.
const SKIP_BYTES: usize = 16 << 10;

/// What is handed to clients.
pub trait LmSource: Send + Sync + fmt::Debug {
    /// Whether there is a value.
    fn exists(&self, key: &LmKey) -> bool;

    /// Hands a value to `send`, which may take its time; false where the key has no value.
    ///
    /// # Errors
    /// Those of `send`.
    fn read(&self, key: &LmKey, send: &mut dyn FnMut(LmForm, &[u8]) -> io::Result<()>) -> io::Result<bool>;

    /// Memory for a value of so many bytes, at least one; `None` where no memory is free.
    fn begin(&self, n_bytes: usize) -> Option<Box<dyn LmWriter + '_>>;

    /// Removes a value.
    fn remove(&self, key: &LmKey);
}

/// Memory for a value. Dropping it leaves nothing behind.
pub trait LmWriter {
    /// All bytes of the value, undefined at first.
    fn memory(&mut self) -> &mut [u8];

    /// Makes the value that is in the memory that of a key, in the place of any other.
    fn commit(self: Box<Self>, key: &LmKey, form: LmForm);
}

/// Serves one client until it or the caller ends the connection.
///
/// No length that a client says takes memory of this process: a value goes where `source` says, or nowhere.
///
/// # Errors
/// Why the connection ended, where it was not the client's wish.
pub fn serve_lm(stream: TcpStream, source: &dyn LmSource) -> Result<()> {
    let failed = |error: io::Error| TierError::remote("serve a client of LMCache", &error, true);
    // A machine that is gone ends its connections too.
    set_socket_keepalive(&stream, true).map_err(|errno| failed(errno.into()))?;
    let socket = TimedSocket::accepted(stream, SILENCE, Instant::now() + SILENCE).map_err(failed)?;
    let mut channel = Channel::Plain(socket);
    loop {
        let Some(frame) = read_request(&mut channel).map_err(failed)? else { return Ok(()) };
        let request = LmRequest::decode(&frame).ok_or_else(|| {
            let shown = format!("{:02x?}", &frame[..8]);
            TierError::invalid("request of a client of LMCache", &shown, "put, get, exist or health of a key")
        })?;
        channel.set_deadline(Instant::now() + SILENCE);
        let LmRequest { command, n_bytes, form, key } = request;
        match command {
            LmCommand::Put => take_value(&mut channel, source, &key, form, n_bytes),
            LmCommand::Get => send_value(&mut channel, source, &key),
            LmCommand::Exist => {
                let is_found = source.exists(&key);
                channel.set_deadline(Instant::now() + SILENCE);
                channel.write_all(&LmReply { is_found, ..LmReply::NOT_FOUND }.encode())
            }
            LmCommand::Health => channel.write_all(&LmReply::FOUND.encode()),
        }
        .map_err(failed)?;
    }
}

/// Waits for a request for as long as it takes, and for the rest of one that has begun for a bounded time; `None` where
/// the client has ended the connection between two requests.
fn read_request(channel: &mut Channel) -> io::Result<Option<[u8; LM_REQUEST_BYTES]>> {
    let mut frame = [0; LM_REQUEST_BYTES];
    let n_first = loop {
        let idle_end = Instant::now() + IDLE_TIME;
        channel.set_deadline(idle_end);
        match channel.read(&mut frame) {
            Ok(0) => return Ok(None),
            Ok(n_first) => break n_first,
            // The longest silence is over, which between two requests means nothing.
            Err(error) if error.kind() == io::ErrorKind::TimedOut && Instant::now() < idle_end => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error),
        }
    };
    channel.set_deadline(Instant::now() + SILENCE);
    channel.read_exact(&mut frame[n_first..])?;
    Ok(Some(frame))
}

fn take_value(
    channel: &mut Channel,
    source: &dyn LmSource,
    key: &LmKey,
    form: LmForm,
    n_bytes: usize,
) -> io::Result<()> {
    if n_bytes == 0 {
        source.remove(key);
        return Ok(());
    }
    let writer = source.begin(n_bytes);
    channel.set_deadline(Instant::now() + time_for(n_bytes));
    let Some(mut writer) = writer else { return skip(channel, n_bytes) };
    channel.read_exact(writer.memory())?;
    writer.commit(key, form);
    Ok(())
}

fn send_value(channel: &mut Channel, source: &dyn LmSource, key: &LmKey) -> io::Result<()> {
    let mut send = |form: LmForm, value: &[u8]| {
        channel.set_deadline(Instant::now() + time_for(value.len()));
        let reply = LmReply { is_found: true, n_bytes: value.len(), form }.encode();
        write_all_slices(channel, &mut [IoSlice::new(&reply), IoSlice::new(value)])
    };
    if source.read(key, &mut send)? {
        return Ok(());
    }
    channel.set_deadline(Instant::now() + SILENCE);
    channel.write_all(&LmReply::NOT_FOUND.encode())
}

/// Reads past a value that is not kept: there is no reply that could say so.
fn skip(channel: &mut Channel, n_bytes: usize) -> io::Result<()> {
    let mut scratch = [0; SKIP_BYTES];
    let mut n_left = n_bytes;
    while n_left > 0 {
        let piece = &mut scratch[..n_left.min(SKIP_BYTES)];
        channel.read_exact(piece)?;
        n_left -= piece.len();
    }
    Ok(())
}

/// The longest time for so many bytes.
fn time_for(n_bytes: usize) -> Duration {
    SILENCE + Duration::from_secs_f64(n_bytes as f64 / MIN_BYTES_PER_S as f64)
}
