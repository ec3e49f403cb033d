//! What goes over the wire: requests and replies of fixed lengths, with the bytes of a value behind some of them.
//!
//! A request is nine numbers of 32 bits (command, length of the value, format, dtype, location, four of the shape)
//! and a key of 150 bytes, filled up with spaces. A reply is nine numbers (200 or 400, length, format, dtype, four
//! of the shape, location). The bytes of a value follow a request that stores it and the reply that finds it; a
//! request that stores has no reply. Numbers are in the order of the machine, which for all that speak it is little
//! endian.

use std::fmt;

/// Length of a request without the value.
pub const LM_REQUEST_BYTES: usize = 9 * 4 + LM_KEY_BYTES;

/// Length of a reply without the value.
pub const LM_REPLY_BYTES: usize = 9 * 4;

/// The longest key.
pub const LM_KEY_BYTES: usize = 150;

/// The longest value: its length is a signed number.
pub const LM_MAX_VALUE_BYTES: usize = i32::MAX as usize;

const FOUND: i32 = 200;
const NOT_FOUND: i32 = 400;

/// What is asked of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LmCommand {
    /// Store the value that follows, in the place of any that is there. It has no reply.
    Put,
    /// Send the value.
    Get,
    /// Say whether there is a value.
    Exist,
    /// Say that the server is there.
    Health,
}

/// A request, without the bytes of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmRequest {
    /// What is asked.
    pub command: LmCommand,
    /// Bytes that follow where a value is stored; without meaning otherwise.
    pub n_bytes: usize,
    /// What the value is to its owner.
    pub form: LmForm,
    /// What it is about.
    pub key: LmKey,
}

/// A reply, without the bytes of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmReply {
    /// Whether there is a value.
    pub is_found: bool,
    /// Bytes that follow where the value was asked for.
    pub n_bytes: usize,
    /// What the value is to its owner.
    pub form: LmForm,
}

/// What a value is to its owner: numbers that a server keeps and gives back, and does not understand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LmForm {
    /// LMCache's number of a memory format.
    pub format: i32,
    /// LMCache's number of a dtype.
    pub dtype: i32,
    /// Up to four dimensions, then zeros.
    pub shape: [i32; 4],
}

/// The name of a value: 1 to 150 bytes of UTF-8 without white space at its ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LmKey {
    /// Filled up with spaces.
    padded: [u8; LM_KEY_BYTES],
}

// === impl LmCommand ===

impl LmCommand {
    const fn code(self) -> i32 {
        match self {
            Self::Put => 1,
            Self::Get => 2,
            Self::Exist => 3,
            Self::Health => 5,
        }
    }

    /// The fourth, a list of all keys, is answered by no server.
    const fn from_code(code: i32) -> Option<Self> {
        match code {
            1 => Some(Self::Put),
            2 => Some(Self::Get),
            3 => Some(Self::Exist),
            5 => Some(Self::Health),
            _ => None,
        }
    }
}

// === impl LmRequest ===

impl LmRequest {
    /// A request without a value.
    pub fn new(command: LmCommand, key: LmKey) -> Self {
        Self { command, n_bytes: 0, form: LmForm::NONE, key }
    }

    /// The bytes of the request. The length is at most [`LM_MAX_VALUE_BYTES`].
    pub fn encode(&self) -> [u8; LM_REQUEST_BYTES] {
        let LmForm { format, dtype, shape } = self.form;
        let n_bytes = length_number(self.n_bytes);
        let location = 0;
        let [first, second, third, fourth] = shape;
        let numbers = [self.command.code(), n_bytes, format, dtype, location, first, second, third, fourth];
        let mut frame = [0; LM_REQUEST_BYTES];
        let (places, key) = frame.split_at_mut(LM_REPLY_BYTES);
        write_numbers(places, &numbers);
        key.copy_from_slice(&self.key.padded);
        frame
    }

    /// Reads a request; `None` where the bytes cannot be one.
    pub fn decode(frame: &[u8; LM_REQUEST_BYTES]) -> Option<Self> {
        let (numbers, key) = frame.split_first_chunk::<LM_REPLY_BYTES>()?;
        let [command, n_bytes, format, dtype, _location, shape @ ..] = read_numbers(numbers);
        Some(Self {
            command: LmCommand::from_code(command)?,
            n_bytes: usize::try_from(n_bytes).ok()?,
            form: LmForm { format, dtype, shape },
            key: LmKey::from_padded(key)?,
        })
    }
}

// === impl LmReply ===

impl LmReply {
    /// The reply that there is nothing.
    pub const NOT_FOUND: Self = Self { is_found: false, n_bytes: 0, form: LmForm::NONE };

    /// The reply that there is something, without its bytes.
    pub const FOUND: Self = Self { is_found: true, n_bytes: 0, form: LmForm::NONE };

    /// The bytes of the reply. The length is at most [`LM_MAX_VALUE_BYTES`].
    pub fn encode(&self) -> [u8; LM_REPLY_BYTES] {
        let LmForm { format, dtype, shape: [first, second, third, fourth] } = self.form;
        let code = if self.is_found { FOUND } else { NOT_FOUND };
        let location = 0;
        let numbers =
            [code, length_number(self.n_bytes), format, dtype, first, second, third, fourth, location];
        let mut frame = [0; LM_REPLY_BYTES];
        write_numbers(&mut frame, &numbers);
        frame
    }

    /// Reads a reply; `None` where the bytes cannot be one.
    pub fn decode(frame: &[u8; LM_REPLY_BYTES]) -> Option<Self> {
        let [code, n_bytes, format, dtype, first, second, third, fourth, _location] = read_numbers(frame);
        let is_found = match code {
            FOUND => true,
            NOT_FOUND => false,
            _ => return None,
        };
        let form = LmForm { format, dtype, shape: [first, second, third, fourth] };
        Some(Self { is_found, n_bytes: usize::try_from(n_bytes).ok()?, form })
    }
}

// === impl LmForm ===

impl LmForm {
    /// What stands where there is no value: LMCache refuses numbers that it does not know.
    pub const NONE: Self = Self { format: 1, dtype: 2, shape: [0; 4] };

    /// Plain bytes, so many.
    pub fn of_bytes(n_bytes: usize) -> Self {
        Self { format: 4, dtype: 6, shape: [length_number(n_bytes), 0, 0, 0] }
    }
}

// === impl LmKey ===

impl LmKey {
    /// A key; `None` where the text is empty, too long, or has white space at its ends.
    pub fn new(text: &str) -> Option<Self> {
        let is_allowed = !text.is_empty() && text.len() <= LM_KEY_BYTES && text.trim() == text;
        is_allowed.then(|| {
            let mut padded = [b' '; LM_KEY_BYTES];
            padded[..text.len()].copy_from_slice(text.as_bytes());
            Self { padded }
        })
    }

    /// Reads a key that is filled up with spaces; `None` for bytes that are not a key.
    fn from_padded(bytes: &[u8]) -> Option<Self> {
        Self::new(std::str::from_utf8(bytes).ok()?.trim())
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.padded).unwrap_or_default().trim_end()
    }
}

impl fmt::Debug for LmKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "LmKey({:?})", self.as_str())
    }
}

fn length_number(n_bytes: usize) -> i32 {
    i32::try_from(n_bytes).unwrap_or(i32::MAX)
}

fn write_numbers(places: &mut [u8], numbers: &[i32; 9]) {
    let (places, _) = places.as_chunks_mut::<4>();
    for (place, number) in places.iter_mut().zip(numbers) {
        *place = number.to_le_bytes();
    }
}

fn read_numbers(places: &[u8; LM_REPLY_BYTES]) -> [i32; 9] {
    let (places, _) = places.as_chunks::<4>();
    std::array::from_fn(|place| i32::from_le_bytes(places[place]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> LmRequest {
        let form = LmForm { format: 1, dtype: 3, shape: [2, 16, 256, 1024] };
        let key = LmKey::new("meta-llama/Llama-3@1@0@6f0d@bfloat16@tag%a b").unwrap();
        LmRequest { command: LmCommand::Put, n_bytes: 16 << 20, form, key }
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        for command in [LmCommand::Put, LmCommand::Get, LmCommand::Exist, LmCommand::Health] {
            let request = LmRequest { command, ..request() };
            assert_eq!(LmRequest::decode(&request.encode()), Some(request));
        }
        for is_found in [true, false] {
            let reply = LmReply { is_found, n_bytes: LM_MAX_VALUE_BYTES, form: request().form };
            assert_eq!(LmReply::decode(&reply.encode()), Some(reply));
        }
    }

    #[test]
    fn the_bytes_of_a_request_are_those_of_lmcache() {
        let frame = request().encode();
        let numbers: Vec<i32> =
            frame[..36].chunks(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect();
        assert_eq!(numbers, [1, 16 << 20, 1, 3, 0, 2, 16, 256, 1024]);
        assert!(frame[36..].starts_with(b"meta-llama/Llama-3@1@0@6f0d@bfloat16@tag%a b   "));
        assert_eq!((frame.len(), frame.last()), (186, Some(&b' ')));
    }

    #[test]
    fn what_cannot_be_a_frame_is_none() {
        let changed = |place: usize, number: i32| {
            let mut frame = request().encode();
            frame[place * 4..][..4].copy_from_slice(&number.to_le_bytes());
            LmRequest::decode(&frame)
        };
        for code in [0, 4, 6, -1, i32::MAX] {
            assert_eq!(changed(0, code), None, "command {code}");
        }
        assert_eq!(changed(1, -1), None);
        let mut frame = request().encode();
        frame[36..].fill(b' ');
        assert_eq!(LmRequest::decode(&frame), None, "no key");
        frame[36..].fill(0xff);
        assert_eq!(LmRequest::decode(&frame), None, "no text");
        let mut frame = LmReply::FOUND.encode();
        frame[4..8].copy_from_slice(&(-5_i32).to_le_bytes());
        assert_eq!(LmReply::decode(&frame), None);
        frame.fill(0);
        assert_eq!(LmReply::decode(&frame), None);
    }

    #[test]
    fn a_key_has_a_length_and_no_white_space_at_its_ends() {
        assert_eq!(LmKey::new(&"k".repeat(150)).unwrap().as_str().len(), 150);
        for text in ["", " a", "a ", "a\n", "\u{2003}a", &"k".repeat(151)] {
            assert_eq!(LmKey::new(text), None, "{text:?}");
        }
    }
}
