//! The Redis protocol (RESP 2), as far as a store of chunks needs it.
//!
//! Replies come from a server that may be broken or another program, so every size is bounded before
//! memory is taken. The bytes of a chunk go straight into the caller's buffer.

use std::io::{self, Read};

/// Room for what was read and not looked at yet, and the longest line. Small, so that of a large value all
/// but the beginning goes around it.
const READ_BUFFER_BYTES: usize = 16 << 10;
/// Longest string in a reply that is not a chunk.
const MAX_STRING_BYTES: usize = 64 << 10;
/// Most values in a reply, at all depths: far above what the largest cluster says about its slots.
const MAX_VALUES: usize = 1 << 20;
const MAX_DEPTH: usize = 8;

/// A reply that is small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A line of text.
    Status(String),
    /// A refusal: code and message.
    Error(String),
    /// A number.
    Integer(i64),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Nothing.
    Nil,
    /// Replies.
    Array(Vec<Reply>),
}

/// A reply that was to be a value of known length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueReply {
    /// The buffer is full.
    Filled,
    /// The value has another length; its bytes were passed over.
    OtherLength(u64),
    /// There is none.
    Nil,
    /// A refusal: code and message.
    Error(String),
}

/// Reads replies from a stream.
///
/// After an error the stream is at no known place and of no more use: [`io::ErrorKind::InvalidData`] if the
/// peer does not speak the protocol, otherwise what the stream said.
#[derive(Debug)]
pub struct ReplyReader<S> {
    stream: S,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<S> ReplyReader<S> {
    /// A reader at the beginning of a reply.
    pub fn new(stream: S) -> Self {
        Self { stream, buffer: vec![0; READ_BUFFER_BYTES].into(), start: 0, end: 0 }
    }

    /// The stream, to write to it.
    pub(super) fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Whether bytes were read that belong to no reply that was asked for.
    pub(super) fn has_leftover(&self) -> bool {
        self.start != self.end
    }
}

impl<S: Read> ReplyReader<S> {
    /// Reads a reply that is no value of a chunk.
    ///
    /// # Errors
    /// As the type says.
    pub fn read_reply(&mut self) -> io::Result<Reply> {
        let mut n_values_left = MAX_VALUES;
        self.read_nested(0, &mut n_values_left)
    }

    /// Reads a reply that should be a value of exactly `buffer.len()` bytes.
    ///
    /// # Errors
    /// As the type says; the buffer is then undefined.
    pub fn read_value(&mut self, buffer: &mut [u8]) -> io::Result<ValueReply> {
        self.read_value_in_two(&mut [], buffer)
    }

    /// Reads a reply that should be a value of exactly as many bytes as `head` and `buffer` have: the first go
    /// into the head, the rest into the buffer.
    ///
    /// # Errors
    /// As the type says; head and buffer are then undefined.
    pub fn read_value_in_two(&mut self, head: &mut [u8], buffer: &mut [u8]) -> io::Result<ValueReply> {
        let line = self.read_line()?;
        match split_kind(line)? {
            (b'$' | b'*', b"-1") => Ok(ValueReply::Nil),
            (b'-', message) => Ok(ValueReply::Error(text(message))),
            (b'$', length) => {
                let n_bytes = parse_length(length)?;
                if n_bytes == (head.len() + buffer.len()) as u64 {
                    self.read_exact(head)?;
                    self.read_exact(buffer)?;
                    self.read_end_of_value()?;
                    return Ok(ValueReply::Filled);
                }
                self.pass_over(n_bytes)?;
                self.read_end_of_value()?;
                Ok(ValueReply::OtherLength(n_bytes))
            }
            _ => Err(not_the_protocol("a value was asked for")),
        }
    }

    fn read_nested(&mut self, depth: usize, n_values_left: &mut usize) -> io::Result<Reply> {
        *n_values_left =
            n_values_left.checked_sub(1).ok_or_else(|| not_the_protocol("a reply has too many values"))?;
        let line = self.read_line()?;
        let (kind, rest) = split_kind(line)?;
        match kind {
            b'+' => Ok(Reply::Status(text(rest))),
            b'-' => Ok(Reply::Error(text(rest))),
            b':' => Ok(Reply::Integer(parse_integer(rest)?)),
            b'$' | b'*' if rest == b"-1" => Ok(Reply::Nil),
            b'$' => {
                let n_bytes = parse_length(rest)?;
                if n_bytes > MAX_STRING_BYTES as u64 {
                    return Err(not_the_protocol("a string is too long"));
                }
                let mut bytes = vec![0; n_bytes as usize];
                self.read_exact(&mut bytes)?;
                self.read_end_of_value()?;
                Ok(Reply::Bytes(bytes))
            }
            b'*' => {
                let n_replies = parse_length(rest)?;
                if depth == MAX_DEPTH || n_replies > *n_values_left as u64 {
                    return Err(not_the_protocol("a reply has too many values"));
                }
                // Grows with what arrives, not with what is announced.
                let mut replies = Vec::new();
                for _ in 0..n_replies {
                    replies.push(self.read_nested(depth + 1, n_values_left)?);
                }
                Ok(Reply::Array(replies))
            }
            _ => Err(not_the_protocol("a reply of unknown kind")),
        }
    }

    /// A line without its end.
    fn read_line(&mut self) -> io::Result<&[u8]> {
        let mut n_seen = 0;
        loop {
            let unread = &self.buffer[self.start..self.end];
            if let Some(newline) = unread[n_seen..].iter().position(|byte| *byte == b'\n') {
                let line_start = self.start;
                let line_end = line_start + n_seen + newline;
                self.start = line_end + 1;
                return match self.buffer[line_start..line_end].split_last() {
                    Some((b'\r', line)) => Ok(line),
                    _ => Err(not_the_protocol("a line ends without a carriage return")),
                };
            }
            n_seen = unread.len();
            self.fill()?;
        }
    }

    /// Reads more behind what is there.
    fn fill(&mut self) -> io::Result<()> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.buffer.len() {
            return Err(not_the_protocol("a line is too long"));
        }
        let n_read = read_some(&mut self.stream, &mut self.buffer[self.end..])?;
        self.end += n_read;
        Ok(())
    }

    fn read_exact(&mut self, target: &mut [u8]) -> io::Result<()> {
        let n_buffered = target.len().min(self.end - self.start);
        let (head, mut rest) = target.split_at_mut(n_buffered);
        head.copy_from_slice(&self.buffer[self.start..self.start + n_buffered]);
        self.start += n_buffered;
        while !rest.is_empty() {
            let n_read = read_some(&mut self.stream, rest)?;
            rest = &mut rest[n_read..];
        }
        Ok(())
    }

    fn pass_over(&mut self, n_bytes: u64) -> io::Result<()> {
        let mut n_left = n_bytes;
        while n_left > 0 {
            if self.start == self.end {
                self.fill()?;
            }
            let n_passed = n_left.min((self.end - self.start) as u64);
            self.start += n_passed as usize;
            n_left -= n_passed;
        }
        Ok(())
    }

    fn read_end_of_value(&mut self) -> io::Result<()> {
        let mut end = [0; 2];
        self.read_exact(&mut end)?;
        if end == *b"\r\n" { Ok(()) } else { Err(not_the_protocol("a value does not end where it should")) }
    }
}

/// Appends the beginning of a command of `n_arguments` arguments, its name included.
pub(super) fn push_command(out: &mut Vec<u8>, n_arguments: usize) {
    push_header(out, b'*', n_arguments);
}

/// Appends an argument.
pub(super) fn push_argument(out: &mut Vec<u8>, argument: &[u8]) {
    push_header(out, b'$', argument.len());
    out.extend_from_slice(argument);
    out.extend_from_slice(b"\r\n");
}

/// Appends the length of an argument whose bytes, and the end of a line, are written by the caller.
pub(super) fn push_argument_length(out: &mut Vec<u8>, n_bytes: usize) {
    push_header(out, b'$', n_bytes);
}

fn push_header(out: &mut Vec<u8>, kind: u8, number: usize) {
    out.push(kind);
    out.extend_from_slice(number.to_string().as_bytes());
    out.extend_from_slice(b"\r\n");
}

fn split_kind(line: &[u8]) -> io::Result<(u8, &[u8])> {
    line.split_first().map(|(kind, rest)| (*kind, rest)).ok_or_else(|| not_the_protocol("an empty line"))
}

fn parse_length(digits: &[u8]) -> io::Result<u64> {
    let number = parse_integer(digits)?;
    u64::try_from(number).map_err(|_| not_the_protocol("a length is negative"))
}

fn parse_integer(digits: &[u8]) -> io::Result<i64> {
    std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| not_the_protocol("a number is none"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn read_some(stream: &mut impl Read, target: &mut [u8]) -> io::Result<usize> {
    loop {
        match stream.read(target) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n_read) => return Ok(n_read),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn not_the_protocol(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}
