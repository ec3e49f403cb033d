//! The body of a request on its way in.
//!
//! It is bounded by its announced and by its real length; the listener bounds its time and the bytes of all
//! bodies that arrive. The memory of long bodies is used again, because
//! an allocator would ask the system for it each time.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::Body;
use kvik_runtime::http::{RequestBodyError, discard};
use tokio::time::Instant;

use crate::error::Refusal;

/// Memory that is taken for a body on the word of its announced length alone; what is longer grows
/// as it arrives.
const MAX_RESERVED_BYTES: usize = 1 << 20;

/// Lengths of bodies whose memory is kept. Shorter ones are cheap to allocate; for longer ones an
/// allocator asks the system, which clears every page.
const SPARE_BYTES: RangeInclusive<usize> = (32 << 10)..=MAX_RESERVED_BYTES;
/// Bodies whose memory a thread keeps.
const MAX_SPARE: usize = 4;

thread_local! {
    static SPARE: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
}

/// Reads a body of at most `max_bytes`.
pub(crate) async fn read_body(
    mut body: axum::body::Body,
    headers: &HeaderMap,
    max_bytes: usize,
    deadline: Instant,
) -> Result<Bytes, Refusal> {
    let announced =
        headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|announced| max_bytes < announced) {
        discard(&mut body, max_bytes).await;
        return Err(Refusal::too_large(max_bytes));
    }
    let reading = collect(Limited::new(&mut body, max_bytes), announced.unwrap_or(0));
    match tokio::time::timeout_at(deadline, reading).await {
        Err(_) => Err(Refusal::slow_body()),
        Ok(Ok(body)) => Ok(body),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(Refusal::too_large(max_bytes)),
        Ok(Err(error)) => Err(match RequestBodyError::find(&*error) {
            Some(RequestBodyError::Slow) => Refusal::slow_body(),
            Some(RequestBodyError::NoRoom) => {
                discard(&mut body, max_bytes).await;
                Refusal::bodies_full()
            }
            _ => Refusal::invalid(format!("the body cannot be read: {error}"), None),
        }),
    }
}

/// Reads a body of about `n_expected` bytes. One that arrived in one piece is not copied; of others
/// each piece is copied and let go at once, so that the connection reads into the same memory again.
async fn collect<B: Body<Data = Bytes> + Unpin>(mut body: B, n_expected: usize) -> Result<Bytes, B::Error> {
    let mut first = Bytes::new();
    let mut joined = BytesMut::new();
    // A body of known length ends with its last byte; the end itself need not be waited for.
    while !body.is_end_stream() {
        let Some(frame) = body.frame().await else { break };
        let Ok(data) = frame?.into_data() else { continue };
        if first.is_empty() && joined.is_empty() {
            first = data;
            continue;
        }
        if joined.is_empty() {
            joined = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
            joined.reserve(n_expected.min(MAX_RESERVED_BYTES).max(first.len() + data.len()));
            joined.extend_from_slice(&std::mem::take(&mut first));
        }
        joined.extend_from_slice(&data);
    }
    Ok(if joined.is_empty() { first } else { joined.freeze() })
}

/// Keeps the memory of a long body without readers for the next one.
pub(crate) fn keep_memory(body: Bytes) {
    if !SPARE_BYTES.contains(&body.len()) {
        return;
    }
    let Ok(mut memory) = body.try_into_mut() else { return };
    SPARE.with_borrow_mut(|spare| {
        if spare.len() < MAX_SPARE && memory.capacity() <= *SPARE_BYTES.end() {
            memory.clear();
            spare.push(memory);
        }
    });
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use hyper::body::{Frame, SizeHint};

    use super::*;

    /// A body of pieces; `n_left` is `None` for one of unknown length.
    struct Pieces {
        pieces: VecDeque<Bytes>,
        n_left: Option<usize>,
    }

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            assert_ne!(self.n_left, Some(0), "asked for more than there is");
            let piece = self.pieces.pop_front();
            if let Some(n_left) = &mut self.n_left {
                *n_left -= piece.as_ref().map_or(0, Bytes::len);
            }
            Poll::Ready(piece.map(|piece| Ok(Frame::data(piece))))
        }

        fn is_end_stream(&self) -> bool {
            self.n_left == Some(0)
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::default()
        }
    }

    #[tokio::test]
    async fn a_body_is_the_same_in_one_piece_and_in_many() {
        let text: Vec<u8> = (0..9_000_u32).map(|number| number as u8).collect();
        for piece_bytes in [1, 7, 1000, 9_000] {
            for (is_length_known, n_expected) in [(true, 9_000), (false, 0), (false, usize::MAX)] {
                let pieces = text.chunks(piece_bytes).map(Bytes::copy_from_slice).collect();
                let body = Pieces { pieces, n_left: is_length_known.then_some(text.len()) };
                assert_eq!(collect(body, n_expected).await.unwrap(), text);
            }
        }
        let whole = Bytes::from_static(b"not copied");
        let body = Pieces { pieces: [whole.clone()].into(), n_left: None };
        assert_eq!(collect(body, 10).await.unwrap().as_ptr(), whole.as_ptr());
        let body = Pieces { pieces: VecDeque::new(), n_left: Some(0) };
        assert!(collect(body, 0).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn the_memory_of_a_long_body_serves_the_next_one() {
        let read = |byte: u8| {
            let piece = Bytes::from(vec![byte; 50_000]);
            collect(Pieces { pieces: [piece.clone(), piece].into(), n_left: None }, 100_000)
        };
        let first = read(1).await.unwrap();
        let place = first.as_ptr();
        let held = first.clone();
        keep_memory(first);
        let second = read(2).await.unwrap();
        assert_ne!(second.as_ptr(), place, "the first one still has a reader");
        drop(second);
        keep_memory(held);
        let third = read(3).await.unwrap();
        assert_eq!(third.as_ptr(), place);
        assert_eq!(third, vec![3; 100_000]);
    }
}
