//! The body of a request, as its pieces come.

use bytes::{Bytes, BytesMut};

/// Memory that is taken for a body on the word of its announced length alone; what is longer grows as it arrives.
const MAX_RESERVED_BYTES: usize = 1 << 20;

/// A body that is being collected. One that comes in one piece is not copied.
#[derive(Debug, Default)]
pub(super) struct CollectedBody {
    first: Bytes,
    /// All bytes, the first piece included, once there are more.
    joined: BytesMut,
    n_expected_bytes: usize,
}

impl CollectedBody {
    /// An empty body that is announced with so many bytes.
    pub(super) fn expecting(n_expected_bytes: usize) -> Self {
        Self { n_expected_bytes: n_expected_bytes.min(MAX_RESERVED_BYTES), ..Self::default() }
    }

    pub(super) fn push(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.first = piece;
            return;
        }
        if self.joined.is_empty() {
            self.joined.reserve(self.n_expected_bytes.max(self.first.len() + piece.len()));
            self.joined.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.joined.extend_from_slice(&piece);
    }

    pub(super) fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    /// All bytes in one piece.
    pub(super) fn take(&mut self) -> Bytes {
        if self.joined.is_empty() {
            std::mem::take(&mut self.first)
        } else {
            std::mem::take(&mut self.joined).freeze()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_the_same_in_one_piece_and_in_many() {
        let whole = Bytes::from((0..9_000_u32).map(|number| number as u8).collect::<Vec<u8>>());
        for n_piece_bytes in [1, 7, 1000, 9_000] {
            for n_expected_bytes in [0, 9_000, usize::MAX] {
                let mut body = CollectedBody::expecting(n_expected_bytes);
                body.push(Bytes::new());
                for start in (0..whole.len()).step_by(n_piece_bytes) {
                    body.push(whole.slice(start..whole.len().min(start + n_piece_bytes)));
                }
                assert_eq!(body.len(), whole.len());
                let collected = body.take();
                assert_eq!(collected, whole);
                assert_eq!(collected.as_ptr() == whole.as_ptr(), n_piece_bytes == 9_000);
                assert_eq!(body.len(), 0);
            }
        }
    }
}
