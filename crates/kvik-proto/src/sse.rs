//! Server-sent events: frames on the wire.

/// Longest event that a decoder takes, in bytes; one that promises more is refused instead of
/// filling the memory.
pub const MAX_EVENT_BYTES: usize = 64 << 20;

/// Appends an event with `data` to `out`. Lines inside of `data` become lines of the event.
pub fn encode(data: &str, out: &mut Vec<u8>) {
    for line in data.split('\n') {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
    out.push(b'\n');
}

/// A stream of events was not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("event stream: {0}")]
pub struct SseError(&'static str);

/// Cuts bytes, as they come, into the data of events.
#[derive(Debug, Default)]
pub struct SseDecoder {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
}

impl SseDecoder {
    /// Takes the next bytes and calls `event` with the data of each event that they complete.
    ///
    /// # Errors
    /// If an event is longer than [`MAX_EVENT_BYTES`] or not UTF-8.
    pub fn push(&mut self, bytes: &[u8], mut event: impl FnMut(&str)) -> Result<(), SseError> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            self.line.extend_from_slice(&rest[..end]);
            rest = &rest[end + 1..];
            self.end_line(&mut event)?;
        }
        self.line.extend_from_slice(rest);
        if MAX_EVENT_BYTES < self.line.len() + self.data.len() {
            return Err(SseError("an event is too long"));
        }
        Ok(())
    }

    fn end_line(&mut self, event: &mut impl FnMut(&str)) -> Result<(), SseError> {
        if self.line.last() == Some(&b'\r') {
            self.line.pop();
        }
        if MAX_EVENT_BYTES < self.line.len() + self.data.len() {
            return Err(SseError("an event is too long"));
        }
        if self.line.is_empty() {
            if self.has_data {
                let text = std::str::from_utf8(&self.data).map_err(|_| SseError("an event is not UTF-8"))?;
                event(text);
            }
            self.data.clear();
            self.has_data = false;
        } else if let Some(value) = self.line.strip_prefix(b"data:") {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.has_data = true;
        }
        self.line.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn events_come_out_as_they_went_in_however_the_bytes_are_cut(
            events in prop::collection::vec("[a-z \n\u{e9}]{0,20}", 0..8),
            cut in 1..9_usize,
        ) {
            let mut bytes = Vec::new();
            for event in &events {
                encode(event, &mut bytes);
            }
            let mut decoder = SseDecoder::default();
            let mut decoded = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.push(piece, |event| decoded.push(event.to_owned())).unwrap();
            }
            prop_assert_eq!(decoded, events);
        }

        #[test]
        fn any_bytes_are_events_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = SseDecoder::default().push(&bytes, |_| {});
        }
    }

    #[test]
    fn comments_other_fields_and_carriage_returns_are_passed_over() {
        let mut decoder = SseDecoder::default();
        let mut events = Vec::new();
        decoder
            .push(b": hi\r\nid: 3\r\ndata:a\r\ndata: b\r\n\r\n\n", |event| events.push(event.to_owned()))
            .unwrap();
        assert_eq!(events, ["a\nb"]);
    }
}
