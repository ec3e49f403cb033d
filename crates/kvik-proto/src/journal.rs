//! The journal of a stream: what a gateway needs to continue an answer on another worker.
//!
//! A worker of kvik that is asked for it by [`JOURNAL`] writes comments between the events of its stream. A line of the
//! journal stands behind the events that it covers: events are passed on when their line has come, so what a client has
//! and what the journal says never differ, wherever a stream breaks off.
//!
//! | line | meaning |
//! |---|---|
//! | `:kvik-head {json}` | [`JournalHead`]; the first line |
//! | `:kvik 17 1:23 0! 0@64,64,0,0,0,0` | [`Progress`]: tokens of output 0 and 1, the end of output 0, cached tokens of prompt 0 |
//! | `:kvik-drain` | the worker drains: the answer should go on elsewhere |
//! | `:kvik-move {json}` | [`MoveNotice`]: the sequence is frozen, and goes on where the gateway continues it |
//!
//! Outputs are numbered over all prompts of a request: those of the first prompt come first.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::openai::CachedTiers;

/// The request header by which a gateway asks for a journal; its value is `1`.
pub const JOURNAL: &str = "x-kvik-journal";

/// Start of every line of a journal.
pub const LINE_START: &[u8] = b":kvik";

/// Most outputs that a journal may have: as many as a request may ask for.
const MAX_OUTPUTS: u32 = 1 << 20;

/// What is the same in all of an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalHead {
    /// Names the running request on its worker.
    pub sequence: String,
    /// The id of the answer; empty where answers have none.
    pub id: String,
    /// When it was created, in Unix seconds.
    pub created: u64,
    /// For each prompt, the seed of its random choices.
    pub seeds: Vec<u64>,
}

/// A sequence is frozen and its KV is on another worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveNotice {
    /// Names the KV there; good once.
    pub ticket: String,
    /// The other worker's address.
    pub to: String,
}

/// One line of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalLine<'a> {
    /// The first line.
    Head(JournalHead),
    /// Items of [`Progress`].
    Progress(&'a str),
    /// The worker drains.
    Drain,
    /// The sequence is frozen.
    Move(MoveNotice),
}

/// A journal that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("journal: {0}")]
pub struct JournalError(String);

/// How far all outputs of a request have come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// By number.
    pub outputs: BTreeMap<u32, OutputProgress>,
    /// By prompt: how many of its tokens were cached, and where.
    pub cached: BTreeMap<u32, CachedTokens>,
}

/// How far one output has come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputProgress {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Whether the last of them ended it.
    pub is_ended: bool,
}

/// Tokens of a prompt whose KV was there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CachedTokens {
    /// All of them.
    pub n_tokens: usize,
    /// By where they were.
    pub tiers: CachedTiers,
}

/// Writes a line of progress, item by item; nothing if there is none.
#[derive(Debug, Default)]
pub struct ProgressLine(String);

// === impl JournalError ===

impl JournalError {
    /// An error with this message.
    pub fn new(message: &str) -> Self {
        Self(message.to_owned())
    }
}

// === impl JournalLine ===

impl<'a> JournalLine<'a> {
    /// Reads a line, without its end.
    ///
    /// # Errors
    /// If it is no line of a journal.
    pub fn parse(line: &'a str) -> Result<Self, JournalError> {
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            ":kvik" => Ok(Self::Progress(rest)),
            ":kvik-head" => json(rest).map(Self::Head),
            ":kvik-move" => json(rest).map(Self::Move),
            ":kvik-drain" => Ok(Self::Drain),
            _ => Err(JournalError("a line of no known kind".to_owned())),
        }
    }

    /// Appends the line with its end.
    pub fn write(&self, out: &mut Vec<u8>) {
        let (kind, rest) = match self {
            Self::Progress(items) => (":kvik ", (*items).to_owned()),
            Self::Head(head) => (":kvik-head ", serde_json::to_string(head).unwrap_or_default()),
            Self::Move(notice) => (":kvik-move ", serde_json::to_string(notice).unwrap_or_default()),
            Self::Drain => (":kvik-drain", String::new()),
        };
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(rest.as_bytes());
        out.extend_from_slice(b"\n\n");
    }
}

fn json<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, JournalError> {
    serde_json::from_str(text).map_err(|error| JournalError(error.to_string()))
}

// === impl ProgressLine ===

impl ProgressLine {
    /// Notes a token of an output.
    pub fn token(&mut self, output: u32, token: u32) {
        // Writing to a string does not fail.
        let _ = match output {
            0 => write!(self.0, "{token} "),
            _ => write!(self.0, "{output}:{token} "),
        };
    }

    /// Notes the end of an output.
    pub fn end(&mut self, output: u32) {
        let _ = write!(self.0, "{output}! ");
    }

    /// Notes the cached tokens of a prompt.
    pub fn cached(&mut self, prompt: u32, cached: CachedTokens) {
        let CachedTiers { engine, ram, nvme, peer, redis, object, lm, plugin } = cached.tiers;
        let n_tokens = cached.n_tokens;
        let _ = write!(self.0, "{prompt}@{n_tokens},{engine},{ram},{nvme},{peer},{redis},{object}");
        // A reader that knows neither can read all others.
        if lm > 0 || plugin > 0 {
            let _ = write!(self.0, ",{lm},{plugin}");
        }
        self.0.push(' ');
    }

    /// The items alone.
    pub fn into_items(self) -> String {
        self.0.trim_end().to_owned()
    }

    /// Appends the line, if there is something in it, and begins the next one.
    pub fn write(&mut self, out: &mut Vec<u8>) {
        if !self.0.is_empty() {
            JournalLine::Progress(self.0.trim_end()).write(out);
            self.0.clear();
        }
    }
}

// === impl Progress ===

impl Progress {
    /// Reads all items of a journal.
    ///
    /// # Errors
    /// If an item cannot be read, or an output goes on after its end.
    pub fn parse(items: &str) -> Result<Self, JournalError> {
        let mut progress = Self::default();
        for item in items.split_ascii_whitespace() {
            let unreadable =
                || JournalError(format!("the item `{}`", item.chars().take(80).collect::<String>()));
            progress.read(item).ok_or_else(unreadable)?;
        }
        Ok(progress)
    }

    fn read(&mut self, item: &str) -> Option<()> {
        if let Some((prompt, counts)) = item.split_once('@') {
            let prompt = number(prompt)?;
            let mut counts: Vec<usize> =
                counts.split(',').map(|count| count.parse().ok()).collect::<Option<_>>()?;
            if counts.len() == 7 {
                counts.extend([0, 0]);
            }
            let [n_tokens, engine, ram, nvme, peer, redis, object, lm, plugin] =
                <[usize; 9]>::try_from(counts).ok()?;
            let tiers = CachedTiers { engine, ram, nvme, peer, redis, object, lm, plugin };
            self.cached.insert(prompt, CachedTokens { n_tokens, tiers });
            return Some(());
        }
        if let Some(output) = item.strip_suffix('!') {
            self.growing(number(output)?)?.is_ended = true;
            return Some(());
        }
        let (output, token) = item.split_once(':').unwrap_or(("0", item));
        let token = token.parse().ok()?;
        self.growing(number(output)?)?.tokens.push(token);
        Some(())
    }

    fn growing(&mut self, output: u32) -> Option<&mut OutputProgress> {
        Some(self.outputs.entry(output).or_default()).filter(|output| !output.is_ended)
    }

    /// The output `number`; an empty one if nothing is known of it.
    pub fn output(&self, number: u32) -> OutputProgress {
        self.outputs.get(&number).cloned().unwrap_or_default()
    }
}

fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number| *number < MAX_OUTPUTS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn progress_is_read_as_it_was_written(
            items in prop::collection::vec((0..4_u32, any::<u32>(), any::<bool>()), 0..40),
            n_cached in 0..9000_usize,
        ) {
            let mut expected = Progress::default();
            let mut lines = String::new();
            let mut line = ProgressLine::default();
            let cached = CachedTokens { n_tokens: n_cached, tiers: CachedTiers { ram: n_cached, ..CachedTiers::default() } };
            line.cached(0, cached);
            expected.cached.insert(0, cached);
            for (output, token, ends) in items {
                let known = expected.outputs.entry(output).or_default();
                if known.is_ended {
                    continue;
                }
                known.tokens.push(token);
                line.token(output, token);
                if ends {
                    known.is_ended = true;
                    line.end(output);
                    let mut bytes = Vec::new();
                    line.write(&mut bytes);
                    let text = String::from_utf8(bytes).unwrap();
                    let parsed = JournalLine::parse(text.trim_end()).unwrap();
                    let JournalLine::Progress(items) = parsed else { panic!("{parsed:?}") };
                    lines.push_str(items);
                    lines.push(' ');
                }
            }
            let mut rest = Vec::new();
            line.write(&mut rest);
            let rest = String::from_utf8(rest).unwrap();
            lines.push_str(rest.trim_end().strip_prefix(":kvik ").unwrap_or_default());
            prop_assert_eq!(Progress::parse(&lines).unwrap(), expected);
        }

        #[test]
        fn no_bytes_break_the_reader(text in ".{0,200}") {
            let _ = JournalLine::parse(&text);
            let _ = Progress::parse(&text);
        }
    }

    #[test]
    fn an_output_does_not_go_on_after_its_end() {
        assert!(Progress::parse("1 2 0! 3").is_err());
        assert!(Progress::parse("1:5 1! 1!").is_err());
        assert!(Progress::parse("1:5 1! 0!").is_ok());
    }

    #[test]
    fn heads_and_notices_are_read_as_they_were_written() {
        let head =
            JournalHead { sequence: "s".into(), id: "cmpl-1".into(), created: 7, seeds: vec![u64::MAX] };
        let notice = MoveNotice { ticket: "t".into(), to: "http://127.0.0.1:1".into() };
        for line in [JournalLine::Head(head), JournalLine::Move(notice), JournalLine::Drain] {
            let mut bytes = Vec::new();
            line.write(&mut bytes);
            let text = String::from_utf8(bytes).unwrap();
            assert!(text.ends_with("\n\n") && !text.trim_end().contains('\n'));
            assert_eq!(JournalLine::parse(text.trim_end()).unwrap(), line);
        }
        assert!(JournalLine::parse(":kvik-other").is_err());
    }
}
