//! The journal that a worker writes beside the events of a stream; see [`kvik_proto::journal`].

use kvik_proto::journal::{CachedTokens, JournalHead, JournalLine, ProgressLine};

use crate::events::Event;
use crate::plan::Plan;

/// Writes the journal of one stream.
#[derive(Debug)]
pub(super) struct JournalWriter {
    /// Until it is written.
    head: Option<JournalHead>,
    line: ProgressLine,
    /// Outputs of each prompt.
    n_choices: u32,
    has_told_of_drain: bool,
}

impl JournalWriter {
    pub(super) fn new(plan: &Plan, head: JournalHead) -> Self {
        let (head, n_choices) = (Some(head), plan.sampling.n);
        Self { head, line: ProgressLine::default(), n_choices, has_told_of_drain: false }
    }

    /// Appends the head, once.
    pub(super) fn begin(&mut self, out: &mut Vec<u8>) {
        if let Some(head) = self.head.take() {
            JournalLine::Head(head).write(out);
        }
    }

    /// Notes an event; one that freezes the request is written at once, behind the line of what was before.
    pub(super) fn note(&mut self, part_idx: usize, event: &Event, out: &mut Vec<u8>) {
        let output = |choice: u32| (part_idx as u32).wrapping_mul(self.n_choices).wrapping_add(choice);
        match event {
            Event::Token(token) => self.line.token(output(token.choice), token.id),
            Event::Finished { choice, .. } => self.line.end(output(*choice)),
            Event::Admitted { cached_tokens, tiers, .. } => {
                self.line.cached(part_idx as u32, CachedTokens { n_tokens: *cached_tokens, tiers: *tiers });
            }
            Event::Frozen(Some(notice)) => {
                self.line.write(out);
                JournalLine::Move(notice.clone()).write(out);
            }
            _ => {}
        }
    }

    /// Appends the line that covers all events so far.
    pub(super) fn cover(&mut self, out: &mut Vec<u8>) {
        let n_bytes = out.len();
        self.line.write(out);
        // Events without tokens, such as the end of the stream, are covered too.
        if n_bytes == out.len() && 0 < n_bytes {
            JournalLine::Progress("").write(out);
        }
    }

    /// Appends that the worker drains.
    pub(super) fn drain(&mut self, out: &mut Vec<u8>) {
        self.has_told_of_drain = true;
        JournalLine::Drain.write(out);
    }

    pub(super) fn has_told_of_drain(&self) -> bool {
        self.has_told_of_drain
    }
}
