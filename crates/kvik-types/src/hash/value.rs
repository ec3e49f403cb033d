//! The few kinds of values that engines put into a block hash, independent of how they are encoded.

use crate::token::TokenId;

/// Receives a nested value in order and encodes it.
///
/// `'a` is the life of the texts and bytes, for sinks that keep them.
pub(super) trait ValueSink<'a> {
    /// Starts a tuple of exactly `n_items` values; the caller sends them next and then ends it.
    fn start_tuple(&mut self, n_items: usize);

    /// Ends the tuple that [`start_tuple`](Self::start_tuple) started with the same `n_items`.
    fn end_tuple(&mut self, n_items: usize);

    fn none(&mut self);

    fn int(&mut self, value: i64);

    fn text(&mut self, value: &'a str);

    fn bytes(&mut self, value: &'a [u8]);

    /// Sends a tuple of tokens.
    fn tokens(&mut self, tokens: &[TokenId]) {
        self.start_tuple(tokens.len());
        for token in tokens {
            self.int(i64::from(*token));
        }
        self.end_tuple(tokens.len());
    }
}

/// Appends every token in the form that `pack` gives: bytes in little endian order, and how many of
/// the eight count.
///
/// All eight are written each time and the next token overwrites what did not count. The lengths of
/// neighboring tokens are as good as random, so a branch on them would mispredict once a token.
#[inline]
pub(super) fn append_packed(
    output: &mut Vec<u8>,
    tokens: &[TokenId],
    pack: impl Fn(TokenId) -> (u64, usize),
) {
    let mut end = output.len();
    output.resize(end + 8 * tokens.len(), 0);
    for token in tokens {
        let (packed, n_bytes) = pack(*token);
        output[end..end + 8].copy_from_slice(&packed.to_le_bytes());
        end += n_bytes.min(8);
    }
    output.truncate(end);
}
