//! Python's pickle, protocol 5, byte for byte as `CPython` writes it.
//!
//! Three rules of `CPython`'s writer show in the bytes:
//!
//! * Frames. Everything after the two protocol bytes lies in frames. Before each value the writer
//!   closes the open frame if it holds 64 KiB or more; the next write opens another. A frame that
//!   would close with fewer than 4 bytes loses its header.
//! * Large texts and bytes. 64 KiB and more are written between frames, not inside of one.
//! * Memo. Texts, bytes and tuples that are not empty tuples are remembered, and the second use of
//!   the same *object* is a reference. Equal values may or may not be one object, so a value that
//!   repeats a text or bytes has no single encoding: the caller must refuse it first.

use super::value::{ValueSink, append_packed};
use crate::token::TokenId;

const PROTO: [u8; 2] = [0x80, 5];
const FRAME: u8 = 0x95;
const FRAME_HEADER_BYTES: usize = 9;
const FRAME_TARGET_BYTES: usize = 64 * 1024;
const FRAME_MIN_BYTES: usize = 4;
const MARK: u8 = b'(';
const EMPTY_TUPLE: u8 = b')';
const TUPLE: u8 = b't';
const TUPLE_OF_1: u8 = 0x85;
const TUPLE_OF_2: u8 = 0x86;
const TUPLE_OF_3: u8 = 0x87;
const MEMOIZE: u8 = 0x94;
const NONE: u8 = b'N';
const INT_U8: u8 = b'K';
const INT_U16: u8 = b'M';
const INT_I32: u8 = b'J';
const INT_BYTES: u8 = 0x8a;
const SHORT_TEXT: u8 = 0x8c;
const TEXT: u8 = b'X';
const LONG_TEXT: u8 = 0x8d;
const SHORT_BYTES: u8 = b'C';
const BYTES: u8 = b'B';
const LONG_BYTES: u8 = 0x8e;
const STOP: u8 = b'.';

/// Most bytes that one token takes: the operation, a length and five bytes of number.
const MAX_TOKEN_BYTES: usize = 7;

/// Writes one pickle into a buffer.
#[derive(Debug)]
pub(super) struct Pickler<'b> {
    output: &'b mut Vec<u8>,
    /// Where the header of the open frame starts; `None` between frames.
    frame_start: Option<usize>,
}

impl<'b> Pickler<'b> {
    /// Starts a pickle at the end of `output`.
    pub(super) fn new(output: &'b mut Vec<u8>) -> Self {
        output.extend_from_slice(&PROTO);
        Self { output, frame_start: None }
    }

    /// Ends the pickle; its bytes are complete only now.
    pub(super) fn finish(mut self) {
        self.write(&[STOP]);
        self.close_frame();
    }

    /// Appends bytes that belong together, in a new frame if none is open.
    fn write(&mut self, bytes: &[u8]) {
        if self.frame_start.is_none() {
            self.frame_start = Some(self.output.len());
            self.output.extend_from_slice(&[FRAME, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
        self.output.extend_from_slice(bytes);
    }

    fn open_frame_bytes(&self) -> usize {
        self.frame_start.map_or(0, |start| self.output.len() - start - FRAME_HEADER_BYTES)
    }

    /// Closes the open frame if it is full; called before each value, as `CPython` does.
    fn start_value(&mut self) {
        if self.open_frame_bytes() >= FRAME_TARGET_BYTES {
            self.close_frame();
        }
    }

    fn close_frame(&mut self) {
        let n_bytes = self.open_frame_bytes();
        let Some(start) = self.frame_start.take() else {
            return;
        };
        let header_end = start + FRAME_HEADER_BYTES;
        if n_bytes >= FRAME_MIN_BYTES {
            self.output[start + 1..header_end].copy_from_slice(&(n_bytes as u64).to_le_bytes());
        } else {
            self.output.drain(start..header_end);
        }
    }

    /// Writes a text or bytes with the operation that fits the length.
    fn write_sized(&mut self, [short, medium, long]: [u8; 3], content: &[u8]) {
        self.start_value();
        let mut header = [0; 9];
        let n_header_bytes = if let Ok(n_bytes) = u8::try_from(content.len()) {
            header[..2].copy_from_slice(&[short, n_bytes]);
            2
        } else if let Ok(n_bytes) = u32::try_from(content.len()) {
            header[0] = medium;
            header[1..5].copy_from_slice(&n_bytes.to_le_bytes());
            5
        } else {
            header[0] = long;
            header[1..].copy_from_slice(&(content.len() as u64).to_le_bytes());
            9
        };
        if content.len() >= FRAME_TARGET_BYTES {
            self.close_frame();
            self.output.extend_from_slice(&header[..n_header_bytes]);
            self.output.extend_from_slice(content);
        } else {
            self.write(&header[..n_header_bytes]);
            self.write(content);
        }
        self.write(&[MEMOIZE]);
    }
}

impl<'a> ValueSink<'a> for Pickler<'_> {
    fn start_tuple(&mut self, n_items: usize) {
        self.start_value();
        match n_items {
            0 => self.write(&[EMPTY_TUPLE]),
            1..=3 => {}
            _ => self.write(&[MARK]),
        }
    }

    fn end_tuple(&mut self, n_items: usize) {
        match n_items {
            0 => {}
            1 => self.write(&[TUPLE_OF_1, MEMOIZE]),
            2 => self.write(&[TUPLE_OF_2, MEMOIZE]),
            3 => self.write(&[TUPLE_OF_3, MEMOIZE]),
            _ => self.write(&[TUPLE, MEMOIZE]),
        }
    }

    fn none(&mut self) {
        self.start_value();
        self.write(&[NONE]);
    }

    fn int(&mut self, value: i64) {
        self.start_value();
        // Opens the frame; the number itself is appended by the function shared with `tokens`.
        self.write(&[]);
        append_int(self.output, value);
    }

    fn text(&mut self, value: &'a str) {
        self.write_sized([SHORT_TEXT, TEXT, LONG_TEXT], value.as_bytes());
    }

    fn bytes(&mut self, value: &'a [u8]) {
        self.write_sized([SHORT_BYTES, BYTES, LONG_BYTES], value);
    }

    fn tokens(&mut self, tokens: &[TokenId]) {
        self.start_tuple(tokens.len());
        let most_bytes = self.open_frame_bytes() + MAX_TOKEN_BYTES * tokens.len();
        if self.frame_start.is_some() && most_bytes < FRAME_TARGET_BYTES {
            // The frame cannot fill up on the way, so the check before each value can be left out.
            append_packed(self.output, tokens, pack_token);
        } else {
            for token in tokens {
                self.int(i64::from(*token));
            }
        }
        self.end_tuple(tokens.len());
    }
}

/// Gives the bytes that [`append_int`] writes for a token, without a branch on its size.
#[inline]
fn pack_token(token: TokenId) -> (u64, usize) {
    const LONG_OPERATION: u64 = u64::from_le_bytes([INT_BYTES, 5, 0, 0, 0, 0, 0, 0]);
    let value = u64::from(token);
    let (operation, n_bytes) = if token > 0xffff { (INT_I32, 5) } else { (INT_U16, 3) };
    let (operation, n_bytes) = if token > 0xff { (operation, n_bytes) } else { (INT_U8, 2) };
    if token > i32::MAX.cast_unsigned() {
        (LONG_OPERATION | value << 16, MAX_TOKEN_BYTES)
    } else {
        (u64::from(operation) | value << 8, n_bytes)
    }
}

fn append_int(output: &mut Vec<u8>, value: i64) {
    if let Ok(byte) = u8::try_from(value) {
        output.extend_from_slice(&[INT_U8, byte]);
    } else if let Ok(short) = u16::try_from(value) {
        let [low, high] = short.to_le_bytes();
        output.extend_from_slice(&[INT_U16, low, high]);
    } else if let Ok(word) = i32::try_from(value) {
        let [a, b, c, d] = word.to_le_bytes();
        output.extend_from_slice(&[INT_I32, a, b, c, d]);
    } else {
        // The fewest bytes of two's complement that keep the sign.
        let n_sign_bits = if value < 0 { value.leading_ones() } else { value.leading_zeros() };
        let n_bytes = (64 - n_sign_bits as usize) / 8 + 1;
        output.extend_from_slice(&[INT_BYTES, n_bytes as u8]);
        output.extend_from_slice(&value.to_le_bytes()[..n_bytes]);
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    fn pickled(write: impl FnOnce(&mut Pickler<'_>)) -> Vec<u8> {
        let mut output = Vec::new();
        let mut pickler = Pickler::new(&mut output);
        write(&mut pickler);
        pickler.finish();
        output
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"))
    }

    /// `pickle.dumps(value, protocol=5).hex()` for each value.
    #[test]
    fn numbers_are_written_as_cpython_does() {
        for (value, expected) in [
            (-1, "80059506000000000000004affffffff2e"),
            (-128, "80059506000000000000004a80ffffff2e"),
            (-2_147_483_648, "80059506000000000000004a000000802e"),
            (-2_147_483_649, "80059508000000000000008a05ffffff7fff2e"),
            (2_147_483_648, "80059508000000000000008a0500000080002e"),
            (549_755_813_888, "80059509000000000000008a060000000080002e"),
            (-549_755_813_888, "80059508000000000000008a0500000000802e"),
            (1_099_511_627_775, "80059509000000000000008a06ffffffffff002e"),
            (i64::MAX, "8005950b000000000000008a08ffffffffffffff7f2e"),
            (i64::MIN, "8005950b000000000000008a0800000000000000802e"),
        ] {
            assert_eq!(hex(&pickled(|pickler| pickler.int(value))), expected, "{value}");
        }
    }

    #[test]
    fn packed_tokens_are_the_same_numbers() {
        for token in [0, 255, 256, 65_535, 65_536, 0x0102_0304, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
            let (packed, n_bytes) = pack_token(token);
            let mut expected = Vec::new();
            append_int(&mut expected, i64::from(token));
            assert_eq!(packed.to_le_bytes()[..n_bytes], expected, "{token}");
        }
    }

    /// `pickle.dumps((), protocol=5).hex()` and so on; a body under 4 bytes has no frame.
    #[test]
    fn short_bodies_have_no_frame() {
        assert_eq!(hex(&pickled(|pickler| pickler.tokens(&[]))), "8005292e");
        assert_eq!(hex(&pickled(|pickler| pickler.none())), "80054e2e");
        assert_eq!(hex(&pickled(|pickler| pickler.int(7))), "80054b072e");
        assert_eq!(hex(&pickled(|pickler| pickler.tokens(&[7]))), "80059505000000000000004b0785942e");
    }

    /// `hashlib.sha256(pickle.dumps("s" * n, protocol=5)).hexdigest()`.
    #[test]
    fn a_large_text_lies_outside_of_the_frames() {
        for (n_bytes, expected) in [(65_535, TEXT_65535), (65_536, TEXT_65536)] {
            let text = "s".repeat(n_bytes);
            let output = pickled(|pickler| pickler.text(&text));
            assert_eq!(hex(&Sha256::digest(&output)), expected, "{n_bytes}");
        }
    }

    const TEXT_65535: &str = "bdded84786d264a6147835be09eaab1400af0408da66fc6b8771b9e215007b5e";
    const TEXT_65536: &str = "6a9c809ce84e4e489db2302b4bc559a71e9e1963e8108426d81553f2c3f1a251";
}
