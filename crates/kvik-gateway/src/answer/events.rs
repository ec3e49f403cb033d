//! Whole events of a stream on their way to the client.
//!
//! A stream of events never ends in silence. If the worker breaks off, the client gets one last
//! event that says so. For that to be an event of its own, half an event at the end of a frame is
//! held back until its rest arrives.

use bytes::{Bytes, BytesMut};
use kvik_proto::openai::ErrorBody;

use crate::answer::record::Ending;

/// Longest half event that is held back, in bytes; a longer one passes as it comes.
const MAX_HELD_BYTES: usize = 64 << 10;
const DONE_EVENT: &[u8] = b"data: [DONE]\n\n";

/// What a stream of events looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Chunks of the `OpenAI` API.
    OpenAi,
    /// `GenerateEvent`s of `/generate`; always ends with `[DONE]` unless it fails.
    Generate,
}

/// Passes whole events.
#[derive(Debug)]
pub(crate) struct Events {
    dialect: Dialect,
    /// Whether only `[DONE]` tells a complete stream from a broken one: the answer has neither a
    /// length nor chunks.
    pub(crate) needs_done: bool,
    /// Half an event.
    held: Bytes,
    /// What was passed last.
    last: Bytes,
}

impl Events {
    pub(crate) fn new(dialect: Dialect, needs_done: bool) -> Self {
        Self { dialect, needs_done, held: Bytes::new(), last: Bytes::new() }
    }

    /// Returns the whole events that `data` completes and holds back the rest.
    pub(crate) fn pass(&mut self, data: Bytes) -> Option<Bytes> {
        let data = if self.held.is_empty() { data } else { join(&[&self.held, &data]) };
        let mut n_whole = whole_events(&data);
        if MAX_HELD_BYTES < data.len() - n_whole {
            n_whole = data.len();
        }
        let mut whole = data;
        self.held = whole.split_off(n_whole);
        if whole.is_empty() {
            return None;
        }
        self.last = whole.clone();
        Some(whole)
    }

    /// What is left to send after a complete stream.
    pub(crate) fn finish(&mut self) -> Option<Bytes> {
        let rest = std::mem::take(&mut self.held);
        let is_done = self.is_done() || self.last.windows(14).any(|window| window == b"\"type\":\"error\"");
        let rest = match self.dialect {
            Dialect::Generate if !is_done => join(&[&rest, DONE_EVENT]),
            Dialect::Generate | Dialect::OpenAi => rest,
        };
        (!rest.is_empty()).then_some(rest)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.last.trim_ascii_end().ends_with(b"[DONE]")
    }

    /// The last event of a stream that cannot go on.
    pub(crate) fn failure(&self, ending: Ending) -> Bytes {
        let message = match ending {
            Ending::DeadlinePassed => "the answer was not complete within the request's time",
            Ending::UpstreamSilent => "the worker fell silent before the answer was complete",
            _ => "the worker broke off before the answer was complete",
        };
        failure_event(self.dialect, message)
    }
}

/// An event that says that a stream failed.
pub(crate) fn failure_event(dialect: Dialect, message: &str) -> Bytes {
    let error = serde_json::to_value(ErrorBody::server(message)).unwrap_or_default();
    let event = match dialect {
        Dialect::OpenAi => error,
        // Readable as a `GenerateEvent` and as an error of the OpenAI API.
        Dialect::Generate => {
            serde_json::json!({ "type": "error", "message": message, "error": error["error"] })
        }
    };
    Bytes::from(format!("data: {event}\n\n"))
}

/// Length of the whole events at the start of `data`.
fn whole_events(data: &[u8]) -> usize {
    let ends_event =
        |head: &[u8]| head.ends_with(b"\n\n") || head.ends_with(b"\r\n\r\n") || head.ends_with(b"\r\r");
    // Nearly always a frame is one event and the first look suffices.
    let mut end = data.len();
    while 0 < end && !ends_event(&data[..end]) {
        end -= 1;
    }
    end
}

fn join(parts: &[&[u8]]) -> Bytes {
    let mut joined = BytesMut::with_capacity(parts.iter().map(|part| part.len()).sum());
    for part in parts {
        joined.extend_from_slice(part);
    }
    joined.freeze()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn events_pass_byte_for_byte_and_only_whole_ones(
            events in prop::collection::vec("data: [a-z\n]{0,12}", 0..9),
            cut in 1..20_usize,
        ) {
            let stream: Vec<u8> = events.iter().flat_map(|event| [event.as_bytes(), b"\n\n"].concat()).collect();
            let mut filter = Events::new(Dialect::OpenAi, false);
            let mut passed = Vec::new();
            for piece in stream.chunks(cut) {
                if let Some(whole) = filter.pass(Bytes::copy_from_slice(piece)) {
                    prop_assert!(whole.ends_with(b"\n\n"));
                    passed.extend_from_slice(&whole);
                }
            }
            if let Some(rest) = filter.finish() {
                passed.extend_from_slice(&rest);
            }
            prop_assert_eq!(passed, stream);
        }
    }

    #[test]
    fn an_event_without_end_does_not_fill_the_memory() {
        let mut filter = Events::new(Dialect::OpenAi, false);
        let mut n_passed = 0;
        for _ in 0..200 {
            n_passed += filter.pass(Bytes::from_static(&[b'x'; 1000])).map_or(0, |whole| whole.len());
            assert!(filter.held.len() <= MAX_HELD_BYTES);
        }
        assert!(0 < n_passed);
    }

    #[test]
    fn a_generate_stream_always_ends_with_done() {
        let mut filter = Events::new(Dialect::Generate, false);
        filter.pass(Bytes::from_static(b"data: {}\n\n"));
        assert_eq!(filter.finish().unwrap(), DONE_EVENT);
        filter.pass(Bytes::from_static(b"data: {}\n\ndata: [DONE]\n\n"));
        assert_eq!(filter.finish(), None);
        filter.pass(Bytes::from_static(b"data: {\"type\":\"error\",\"message\":\"no\"}\n\n"));
        assert_eq!(filter.finish(), None);
    }

    #[test]
    fn a_failure_can_be_read_in_both_dialects() {
        for dialect in [Dialect::OpenAi, Dialect::Generate] {
            let event = failure_event(dialect, "gone");
            let data = std::str::from_utf8(&event).unwrap().strip_prefix("data: ").unwrap();
            let body: ErrorBody = serde_json::from_str(data).unwrap();
            assert_eq!(body.error.message, "gone");
        }
        let event = failure_event(Dialect::Generate, "gone");
        let parsed: kvik_proto::worker::GenerateEvent = serde_json::from_slice(&event[6..]).unwrap();
        assert!(matches!(parsed, kvik_proto::worker::GenerateEvent::Error { message } if message == "gone"));
    }
}
