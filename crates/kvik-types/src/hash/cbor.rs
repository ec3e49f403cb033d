//! Canonical CBOR (RFC 8949): definite lengths and the shortest form of every number.

use super::value::{ValueSink, append_packed};
use crate::token::TokenId;

const MAJOR_UNSIGNED: u8 = 0;
const MAJOR_NEGATIVE: u8 = 1;
const MAJOR_BYTES: u8 = 2;
const MAJOR_TEXT: u8 = 3;
const MAJOR_ARRAY: u8 = 4;
const MAJOR_MAP: u8 = 5;
const NULL: u8 = 0xf6;
// Low bits of a head that say how many bytes of argument follow.
const ARGUMENT_BYTE: u8 = 0x18;
const ARGUMENT_SHORT: u8 = 0x19;
const ARGUMENT_WORD: u8 = 0x1a;
const ARGUMENT_LONG: u8 = 0x1b;

/// Appends CBOR to a buffer.
#[derive(Debug)]
pub(super) struct CborEncoder<'b> {
    output: &'b mut Vec<u8>,
}

impl<'b> CborEncoder<'b> {
    /// Starts an encoding at the end of `output`.
    pub(super) fn new(output: &'b mut Vec<u8>) -> Self {
        Self { output }
    }

    /// Appends an unsigned number, which may be larger than [`ValueSink::int`] takes.
    pub(super) fn unsigned(&mut self, value: u64) {
        self.head(MAJOR_UNSIGNED, value);
    }

    /// Starts a map of `n_entries`; the caller sends key, value, key, value next.
    pub(super) fn start_map(&mut self, n_entries: usize) {
        self.head(MAJOR_MAP, n_entries as u64);
    }

    #[inline]
    fn head(&mut self, major: u8, argument: u64) {
        let major = major << 5;
        if argument < 24 {
            self.output.push(major | argument as u8);
        } else if let Ok(byte) = u8::try_from(argument) {
            self.output.extend_from_slice(&[major | ARGUMENT_BYTE, byte]);
        } else if let Ok(short) = u16::try_from(argument) {
            let [high, low] = short.to_be_bytes();
            self.output.extend_from_slice(&[major | ARGUMENT_SHORT, high, low]);
        } else if let Ok(word) = u32::try_from(argument) {
            let [a, b, c, d] = word.to_be_bytes();
            self.output.extend_from_slice(&[major | ARGUMENT_WORD, a, b, c, d]);
        } else {
            self.output.push(major | ARGUMENT_LONG);
            self.output.extend_from_slice(&argument.to_be_bytes());
        }
    }
}

impl<'a> ValueSink<'a> for CborEncoder<'_> {
    fn start_tuple(&mut self, n_items: usize) {
        self.head(MAJOR_ARRAY, n_items as u64);
    }

    fn end_tuple(&mut self, _n_items: usize) {}

    fn none(&mut self) {
        self.output.push(NULL);
    }

    #[inline]
    fn int(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(unsigned) => self.head(MAJOR_UNSIGNED, unsigned),
            // CBOR stores -1 - n, which is the complement of the bits.
            Err(_) => self.head(MAJOR_NEGATIVE, !(value as u64)),
        }
    }

    fn text(&mut self, value: &'a str) {
        self.head(MAJOR_TEXT, value.len() as u64);
        self.output.extend_from_slice(value.as_bytes());
    }

    fn bytes(&mut self, value: &'a [u8]) {
        self.head(MAJOR_BYTES, value.len() as u64);
        self.output.extend_from_slice(value);
    }

    fn tokens(&mut self, tokens: &[TokenId]) {
        self.head(MAJOR_ARRAY, tokens.len() as u64);
        append_packed(self.output, tokens, pack_token);
    }
}

/// Gives the bytes that [`ValueSink::int`] writes for a token, without a branch on its size.
#[inline]
fn pack_token(token: TokenId) -> (u64, usize) {
    const HEADS: [u8; 5] = [0, ARGUMENT_BYTE, ARGUMENT_SHORT, 0, ARGUMENT_WORD];
    let n_argument_bytes =
        usize::from(token >= 24) + usize::from(token > 0xff) + 2 * usize::from(token > 0xffff);
    let head = if n_argument_bytes == 0 { token as u8 } else { HEADS[n_argument_bytes] };
    // The argument's bytes, most significant first, from the low end of the word on.
    let argument = ((u64::from(token) << (32 - 8 * n_argument_bytes)) as u32).swap_bytes();
    (u64::from(head) | u64::from(argument) << 8, 1 + n_argument_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(write: impl FnOnce(&mut CborEncoder<'_>)) -> Vec<u8> {
        let mut output = Vec::new();
        write(&mut CborEncoder::new(&mut output));
        output
    }

    /// The examples of RFC 8949, appendix A, that use these kinds of values.
    #[test]
    fn numbers_take_their_shortest_form() {
        for (value, expected) in [
            (0, &[0x00][..]),
            (23, &[0x17]),
            (24, &[0x18, 0x18]),
            (255, &[0x18, 0xff]),
            (256, &[0x19, 0x01, 0x00]),
            (1000, &[0x19, 0x03, 0xe8]),
            (65536, &[0x1a, 0x00, 0x01, 0x00, 0x00]),
            (1_000_000, &[0x1a, 0x00, 0x0f, 0x42, 0x40]),
            (1_000_000_000_000, &[0x1b, 0x00, 0x00, 0x00, 0xe8, 0xd4, 0xa5, 0x10, 0x00]),
            (-1, &[0x20]),
            (-3, &[0x22]),
            (-100, &[0x38, 0x63]),
            (-1000, &[0x39, 0x03, 0xe7]),
        ] {
            assert_eq!(encoded(|encoder| encoder.int(value)), expected, "{value}");
        }
        assert_eq!(
            encoded(|encoder| encoder.unsigned(u64::MAX)),
            [0x1b, 255, 255, 255, 255, 255, 255, 255, 255]
        );
    }

    #[test]
    fn packed_tokens_are_the_same_numbers() {
        for token in [0, 23, 24, 255, 256, 65_535, 65_536, 0x0102_0304, u32::MAX] {
            let (packed, n_bytes) = pack_token(token);
            let expected = encoded(|encoder| encoder.int(i64::from(token)));
            assert_eq!(packed.to_le_bytes()[..n_bytes], expected, "{token}");
        }
    }

    #[test]
    fn texts_bytes_arrays_and_maps_carry_their_length() {
        assert_eq!(encoded(|encoder| encoder.text("IETF")), b"\x64IETF");
        assert_eq!(encoded(|encoder| encoder.bytes(&[1, 2, 3, 4])), [0x44, 1, 2, 3, 4]);
        assert_eq!(encoded(|encoder| encoder.tokens(&[1, 2, 3])), [0x83, 1, 2, 3]);
        assert_eq!(encoded(|encoder| encoder.start_map(1)), [0xa1]);
        assert_eq!(encoded(|encoder| encoder.none()), [0xf6]);
    }
}
