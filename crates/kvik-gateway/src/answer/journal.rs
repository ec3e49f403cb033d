//! The journal of a worker's stream, as the gateway keeps it; see [`kvik_proto::journal`].
//!
//! Events pass when the line has come that covers them, so that the journal says exactly what the client got. A worker
//! writes both in one piece, so nothing waits for long. Lines are kept as they are and read only if the answer must go on
//! elsewhere.

use bytes::{Bytes, BytesMut};
use kvik_proto::journal::{JournalError, JournalHead, JournalLine, LINE_START, MoveNotice};
use memchr::memmem;

/// Most bytes without a line that covers them: far more than a worker writes at once.
const MAX_HELD_BYTES: usize = 4 << 20;
/// Most bytes of progress that are kept: some hundred thousand tokens. A longer answer ends where its worker does.
const MAX_PROGRESS_BYTES: usize = 4 << 20;

/// What is known of a stream.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    head: Option<JournalHead>,
    /// The items of all lines.
    progress: String,
    /// Events that no line covers yet.
    held: Bytes,
    notice: Option<MoveNotice>,
    is_draining: bool,
    /// Whether the whole answer has passed.
    is_done: bool,
    is_too_long: bool,
}

impl Journal {
    /// Takes bytes of the stream; the events that may pass.
    ///
    /// # Errors
    /// If a line cannot be read, or too many bytes have none: the stream is not one of a worker.
    pub(crate) fn pass(&mut self, data: Bytes) -> Result<Bytes, JournalError> {
        let data = if self.held.is_empty() { data } else { joined(&self.held, &data) };
        let mut passed = Bytes::new();
        let (mut first_held, mut at) = (0, 0);
        while let Some(n_bytes) = memmem::find(&data[at..], b"\n\n") {
            let end = at + n_bytes + 2;
            if data[at..].starts_with(LINE_START) {
                let covered = data.slice(first_held..at);
                self.look(&covered);
                passed = if passed.is_empty() { covered } else { joined(&passed, &covered) };
                self.read(&data[at..end - 2])?;
                first_held = end;
            }
            at = end;
        }
        self.held = data.slice(first_held..);
        if MAX_HELD_BYTES < self.held.len() {
            return Err(JournalError::new("events without a line"));
        }
        Ok(passed)
    }

    fn look(&mut self, covered: &[u8]) {
        self.is_done |=
            covered.ends_with(b"data: [DONE]\n\n") || memmem::find(covered, b"\"error\":{").is_some();
    }

    fn read(&mut self, line: &[u8]) -> Result<(), JournalError> {
        let text = std::str::from_utf8(line).map_err(|_| JournalError::new("a line that is not UTF-8"))?;
        match JournalLine::parse(text)? {
            JournalLine::Progress(items) if MAX_PROGRESS_BYTES < self.progress.len() + items.len() => {
                self.is_too_long = true;
            }
            JournalLine::Progress(items) => {
                self.progress.push_str(items);
                self.progress.push(' ');
            }
            JournalLine::Head(head) => self.head = Some(head),
            JournalLine::Drain => self.is_draining = true,
            JournalLine::Move(notice) => self.notice = Some(notice),
        }
        Ok(())
    }

    /// Whether the answer is complete, or has failed for a reason that another worker would not change.
    pub(crate) fn is_done(&self) -> bool {
        self.is_done
    }

    /// What the answer can be continued from; `None` if that is not possible.
    pub(crate) fn continuable(&self) -> Option<(&JournalHead, &str)> {
        let head = self.head.as_ref().filter(|_| !self.is_done && !self.is_too_long)?;
        Some((head, self.progress.trim_end()))
    }

    /// The name of the request on its worker; `None` if the answer is complete.
    pub(crate) fn sequence(&self) -> Option<&str> {
        self.head.as_ref().filter(|_| !self.is_done).map(|head| head.sequence.as_str())
    }

    /// Takes the notice of a frozen request.
    pub(crate) fn take_notice(&mut self) -> Option<MoveNotice> {
        self.notice.take()
    }

    /// Whether the worker said that it drains, once.
    pub(crate) fn take_draining(&mut self) -> bool {
        std::mem::take(&mut self.is_draining)
    }

    /// Forgets what its worker has sent and no line covers: another one sends it again.
    pub(crate) fn drop_held(&mut self) {
        self.held = Bytes::new();
    }
}

fn joined(first: &[u8], second: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(first.len() + second.len());
    bytes.extend_from_slice(first);
    bytes.extend_from_slice(second);
    bytes.freeze()
}

#[cfg(test)]
mod tests {
    use kvik_proto::journal::Progress;
    use proptest::prelude::*;

    use super::*;

    const STREAM: &[u8] = b":kvik-head {\"sequence\":\"s\",\"id\":\"i\",\"created\":1,\"seeds\":[7]}\n\n\
        data: {\"text\":\"a :kvik b\"}\n\n:kvik 11 12\n\n:kvik 13\n\ndata: {\"text\":\"c\"}\n\n:kvik 14\n\n\
        data: {\"text\":\"d\"}\n\n";

    proptest! {
        #[test]
        fn only_covered_events_pass_however_the_bytes_are_cut(cut in 1..80_usize, end in 0..STREAM.len()) {
            let mut journal = Journal::default();
            let mut passed = Vec::new();
            for piece in STREAM[..end].chunks(cut) {
                passed.extend_from_slice(&journal.pass(Bytes::copy_from_slice(piece)).unwrap());
            }
            let text = String::from_utf8(passed).unwrap();
            let n_tokens = journal.continuable().map_or(0, |(_, progress)| {
                Progress::parse(progress).unwrap().output(0).tokens.len()
            });
            // What the client has is what the journal says, wherever the stream ends.
            prop_assert_eq!(text.contains("a :kvik b"), 2 <= n_tokens);
            prop_assert_eq!(text.contains("\"c\""), 4 <= n_tokens);
            prop_assert!(!text.contains("\"d\"") && !text.contains("\n:kvik"));
        }
    }

    #[test]
    fn the_end_of_a_stream_is_known_by_its_mark() {
        let mut journal = Journal::default();
        journal
            .pass(Bytes::from_static(
                b":kvik-head {\"sequence\":\"s\",\"id\":\"\",\"created\":0,\"seeds\":[]}\n\n",
            ))
            .unwrap();
        assert!(journal.continuable().is_some());
        assert!(journal.pass(Bytes::from_static(b"data: [DONE]\n\n")).unwrap().is_empty());
        assert!(!journal.is_done());
        assert_eq!(journal.pass(Bytes::from_static(b":kvik \n\n")).unwrap(), b"data: [DONE]\n\n".as_slice());
        assert!(journal.is_done() && journal.continuable().is_none());
    }

    #[test]
    fn bytes_without_lines_do_not_fill_the_memory() {
        let mut journal = Journal::default();
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        assert!((0..8).any(|_| journal.pass(piece.clone()).is_err()));
    }
}
