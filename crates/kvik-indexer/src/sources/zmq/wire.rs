//! The bytes of ZMTP.

use bytes::{BufMut as _, BytesMut};

use super::ZmtpError;

/// Length of a greeting.
pub(super) const GREETING_BYTES: usize = 64;

/// Longest command that is taken; READY with the properties that libzmq sends has below a hundred bytes.
pub(super) const MAX_COMMAND_BYTES: usize = 8 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a socket does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sources) enum SocketType {
    /// Hears what a publisher says.
    Sub,
    /// Asks a router and receives any number of answers.
    Dealer,
}

/// What stands before the body of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHead {
    pub(super) is_command: bool,
    pub(super) has_more: bool,
    /// Bytes of the head itself.
    pub(super) n_head_bytes: usize,
    pub(super) n_body_bytes: u64,
}

/// A command of a peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command<'a> {
    /// Its socket is of this type.
    Ready { socket_type: &'a [u8] },
    /// It does not go on.
    Error { reason: &'a [u8] },
    /// It wants the context back in a PONG.
    Ping { context: &'a [u8] },
    /// Anything else; also PONG, which has done its work by having come.
    Other,
}

impl SocketType {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Sub => b"SUB",
            Self::Dealer => b"DEALER",
        }
    }

    /// Whether the two can talk.
    pub(super) fn fits(self, peer: &[u8]) -> bool {
        match self {
            Self::Sub => matches!(peer, b"PUB" | b"XPUB"),
            Self::Dealer => matches!(peer, b"ROUTER" | b"REP" | b"DEALER"),
        }
    }
}

/// The greeting of a client: signature, version 3.1, mechanism NULL, not a server.
pub(super) fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[11] = 1;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Looks at a peer's greeting; returns the minor version of the protocol that it speaks.
pub(super) fn parse_greeting(greeting: &[u8; GREETING_BYTES]) -> Result<u8, ZmtpError> {
    if greeting[0] != 0xff || greeting[9] & 1 != 1 {
        return Err(ZmtpError::Protocol("does not speak ZMTP"));
    }
    if greeting[10] < 3 {
        return Err(ZmtpError::Protocol("speaks ZMTP before 3.0"));
    }
    if &greeting[12..32] != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
        return Err(ZmtpError::Protocol("asks for a security mechanism other than NULL"));
    }
    // Whatever is above is spoken as 3.1, which this side has named.
    Ok(if greeting[10] == 3 { greeting[11].min(1) } else { 1 })
}

/// Reads the head of a frame; `None` if not all of it is there.
pub(super) fn parse_head(bytes: &[u8]) -> Result<Option<FrameHead>, ZmtpError> {
    let Some((&flags, rest)) = bytes.split_first() else { return Ok(None) };
    if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
        return Err(ZmtpError::Protocol("sent a frame with unknown flags"));
    }
    let (n_head_bytes, n_body_bytes) = if flags & LONG == 0 {
        let Some(&length) = rest.first() else { return Ok(None) };
        (2, u64::from(length))
    } else {
        let Some(length) = rest.first_chunk::<8>() else { return Ok(None) };
        (9, u64::from_be_bytes(*length))
    };
    let (is_command, has_more) = (flags & COMMAND != 0, flags & MORE != 0);
    Ok(Some(FrameHead { is_command, has_more, n_head_bytes, n_body_bytes }))
}

/// Appends a message.
pub(super) fn put_message(out: &mut BytesMut, frames: &[&[u8]]) {
    for (place, frame) in frames.iter().enumerate() {
        put_frame(out, if place + 1 < frames.len() { MORE } else { 0 }, frame);
    }
}

/// Appends the READY of a socket.
pub(super) fn put_ready(out: &mut BytesMut, socket_type: SocketType) {
    let mut body = BytesMut::new();
    for (name, value) in [(&b"Socket-Type"[..], socket_type.name()), (b"Identity", b"")] {
        body.put_u8(name.len() as u8);
        body.put_slice(name);
        body.put_u32(value.len() as u32);
        body.put_slice(value);
    }
    put_command(out, b"READY", &body);
}

/// Appends a PING without a context; `ttl_ms` is after what silence the peer may give up on this side.
pub(super) fn put_ping(out: &mut BytesMut, ttl_ms: u64) {
    // In tenths of a second.
    let ttl = u16::try_from(ttl_ms / 100).unwrap_or(u16::MAX);
    put_command(out, b"PING", &ttl.to_be_bytes());
}

/// Appends the answer to a PING.
pub(super) fn put_pong(out: &mut BytesMut, context: &[u8]) {
    put_command(out, b"PONG", context);
}

fn put_command(out: &mut BytesMut, name: &[u8], data: &[u8]) {
    let mut body = BytesMut::with_capacity(1 + name.len() + data.len());
    body.put_u8(name.len() as u8);
    body.put_slice(name);
    body.put_slice(data);
    put_frame(out, COMMAND, &body);
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    if let Ok(length) = u8::try_from(body.len()) {
        out.put_slice(&[flags, length]);
    } else {
        out.put_u8(flags | LONG);
        out.put_u64(body.len() as u64);
    }
    out.put_slice(body);
}

/// Reads the body of a command.
pub(super) fn parse_command(body: &[u8]) -> Result<Command<'_>, ZmtpError> {
    const BAD: ZmtpError = ZmtpError::Protocol("sent a command that cannot be read");
    let (name, data) = short_text(body).ok_or(BAD)?;
    Ok(match name {
        b"READY" => Command::Ready { socket_type: property(data, b"Socket-Type").ok_or(BAD)? },
        b"ERROR" => Command::Error { reason: short_text(data).map_or(&[], |(reason, _)| reason) },
        // Two bytes of its patience, then up to 16 of context.
        b"PING" => match data.get(2..) {
            Some(context) if context.len() <= 16 => Command::Ping { context },
            _ => return Err(BAD),
        },
        _ => Command::Other,
    })
}

/// The value of a property in the metadata of a READY.
fn property<'a>(mut data: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    loop {
        let (name, rest) = short_text(data)?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        data = rest;
    }
}

/// One byte of length and what follows, and the rest.
fn short_text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&length, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(bytes: &[u8]) -> Option<FrameHead> {
        parse_head(bytes).unwrap()
    }

    #[test]
    fn heads_are_read_once_they_are_whole() {
        let mut out = BytesMut::new();
        put_message(&mut out, &[b"", &[7; 255], &[8; 256]]);
        assert_eq!(head(&out[..1]), None);
        let first = head(&out).unwrap();
        assert_eq!((first.has_more, first.n_head_bytes, first.n_body_bytes), (true, 2, 0));
        let second = head(&out[2..]).unwrap();
        assert_eq!((second.has_more, second.n_head_bytes, second.n_body_bytes), (true, 2, 255));
        let third = &out[2 + 257..];
        assert_eq!(head(&third[..8]), None);
        let third = head(third).unwrap();
        assert_eq!((third.has_more, third.n_head_bytes, third.n_body_bytes), (false, 9, 256));
    }

    #[test]
    fn reserved_flags_and_commands_in_parts_are_refused() {
        for flags in [0x08, 0x80, 0x05, 0xff] {
            assert!(parse_head(&[flags, 0]).is_err(), "{flags:#x}");
        }
    }

    #[test]
    fn a_ready_is_read_as_it_is_written() {
        let mut out = BytesMut::new();
        put_ready(&mut out, SocketType::Dealer);
        let frame = head(&out).unwrap();
        assert!(frame.is_command);
        let body = &out[frame.n_head_bytes..];
        assert_eq!(parse_command(body).unwrap(), Command::Ready { socket_type: b"DEALER" });
    }

    #[test]
    fn a_command_with_lengths_beyond_its_end_is_an_error() {
        let ready = b"\x05READY\x0bSocket-Type\0\0\0\x03PUB";
        assert!(parse_command(ready).is_ok());
        for n_bytes in 0..ready.len() {
            let cut = parse_command(&ready[..n_bytes]);
            assert!(!matches!(cut, Ok(Command::Ready { .. })), "{n_bytes}");
        }
        assert!(parse_command(b"\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB").is_err());
        assert!(parse_command(b"\x04PING\0").is_err());
        assert!(parse_command(b"\x04PING\0\x0100000000000000000").is_err());
        assert_eq!(parse_command(b"\x04PING\0\x01ab").unwrap(), Command::Ping { context: b"ab" });
        assert_eq!(parse_command(b"\x05ERROR\x02no").unwrap(), Command::Error { reason: b"no" });
        assert_eq!(parse_command(b"\x05ERROR").unwrap(), Command::Error { reason: b"" });
    }

    #[test]
    fn greetings_of_other_protocols_and_mechanisms_are_refused() {
        assert_eq!(parse_greeting(&greeting()).unwrap(), 1);
        let changed = |place: usize, byte: u8| {
            let mut greeting = greeting();
            greeting[place] = byte;
            parse_greeting(&greeting)
        };
        assert_eq!(changed(11, 0).unwrap(), 0);
        assert_eq!(changed(11, 7).unwrap(), 1);
        assert_eq!(changed(10, 4).unwrap(), 1);
        for (place, byte) in [(0, b'H'), (9, 0), (10, 1), (12, b'C'), (16, b'!')] {
            assert!(changed(place, byte).is_err(), "{place} {byte}");
        }
    }
}
