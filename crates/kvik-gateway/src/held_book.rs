//! The sequences that clients step through this gateway, as far as another worker would have to know them.
//!
//! A gateway keeps what it has passed on: the request that began a sequence, the seed, and every token with its text. So it answers steps
//! that were answered before by itself, always asks for tokens that it does not have, and has another worker go on where
//! the client is. What it forgets, because there are too many or for too long unused, only costs that ability.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use kvik_proto::journal::{JournalHead, ProgressLine};
use kvik_proto::moves::{HeldPartial, INIT_PATH, ResumeHead};
use kvik_proto::worker::{InitResponse, StepResponse};
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;

use crate::upstream::backend::Backend;

/// Most sequences that are kept.
const MAX_SEQUENCES: usize = 16_384;
/// Most bytes of requests that are kept.
const MAX_BODY_BYTES: usize = 256 << 20;
/// A sequence that was not stepped for so long is forgotten; its worker forgets it sooner.
const MAX_IDLE: Duration = Duration::from_hours(1);

/// Sequences that one call looks at, at most, while the bounds hold.
const MAX_LOOKS: usize = 64;

/// All sequences.
#[derive(Debug, Default)]
pub(crate) struct HeldBook {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_name: HashMap<String, Arc<HeldSequence>>,
    /// Each with the time of its last use when it was put here, so that no call has to look at all of them. One that has
    /// ended or has begun anew may still stand here, and then is gone already.
    order: VecDeque<(Instant, Weak<HeldSequence>)>,
    body_bytes: usize,
}

/// One sequence.
#[derive(Debug)]
pub(crate) struct HeldSequence {
    pub(crate) seq_id: String,
    /// Names this life of it.
    pub(crate) identity: String,
    pub(crate) model: String,
    /// The request that began it.
    pub(crate) body: Bytes,
    /// Of its random choices.
    seed: u64,
    last_use: Mutex<Instant>,
    /// Locked for a step.
    pub(crate) progress: AsyncMutex<HeldProgress>,
}

/// How far a sequence has come.
#[derive(Debug)]
pub(crate) struct HeldProgress {
    /// The worker that has it.
    pub(crate) owner: Arc<Backend>,
    /// Each with text that became final with it; that of a step of several tokens is at its last one.
    tokens: Vec<(u32, String)>,
    /// Text that came with the end and without a token.
    last_text: String,
    /// Tokens that the client was told.
    n_answered: u64,
    /// Why it has ended.
    finish_reason: Option<String>,
}

impl HeldBook {
    pub(crate) fn get(&self, seq_id: &str) -> Option<Arc<HeldSequence>> {
        let found = self.kept.lock().by_name.get(seq_id).map(Arc::clone)?;
        *found.last_use.lock() = Instant::now();
        Some(found)
    }

    /// Keeps a sequence in the place of an earlier one of its name.
    pub(crate) fn insert(&self, sequence: HeldSequence) {
        let (now, sequence) = (Instant::now(), Arc::new(sequence));
        let mut kept = self.kept.lock();
        kept.order.push_back((now, Arc::downgrade(&sequence)));
        kept.body_bytes += sequence.body.len();
        if let Some(earlier) = kept.by_name.insert(sequence.seq_id.clone(), sequence) {
            kept.body_bytes -= earlier.body.len();
        }
        kept.make_room(now);
    }

    /// Forgets this life of a sequence.
    pub(crate) fn remove(&self, sequence: &Arc<HeldSequence>) {
        self.kept.lock().remove(sequence);
    }
}

impl Kept {
    /// Forgets what was not used for long, and the least recently used beyond the bounds.
    fn make_room(&mut self, now: Instant) {
        let mut n_looks = 0;
        while let Some((noted, _)) = self.order.front() {
            let is_idle = MAX_IDLE <= now.saturating_duration_since(*noted);
            if !self.is_over() && (!is_idle || MAX_LOOKS <= n_looks) {
                return;
            }
            n_looks += 1;
            let Some((noted, sequence)) = self.order.pop_front() else { return };
            let Some(sequence) = sequence.upgrade() else { continue };
            let last_use = *sequence.last_use.lock();
            // It was used since: others are older. Where all were, the bounds still hold.
            if noted < last_use && n_looks <= MAX_LOOKS.max(self.by_name.len()) {
                self.order.push_back((last_use, Arc::downgrade(&sequence)));
            } else {
                self.remove(&sequence);
            }
        }
    }

    fn is_over(&self) -> bool {
        MAX_SEQUENCES < self.by_name.len() || (1 < self.by_name.len() && MAX_BODY_BYTES < self.body_bytes)
    }

    fn remove(&mut self, sequence: &Arc<HeldSequence>) {
        let is_kept = self.by_name.get(&sequence.seq_id).is_some_and(|held| Arc::ptr_eq(held, sequence));
        if is_kept {
            self.by_name.remove(&sequence.seq_id);
            self.body_bytes -= sequence.body.len();
        }
    }
}

impl HeldSequence {
    /// A sequence that `owner` has begun.
    pub(crate) fn new(
        (identity, model, body): (String, String, Bytes),
        seed: u64,
        response: &InitResponse,
        owner: Arc<Backend>,
    ) -> Self {
        let mut progress = HeldProgress {
            owner,
            tokens: Vec::new(),
            last_text: String::new(),
            n_answered: 0,
            finish_reason: None,
        };
        progress.extend(&response.tokens_so_far, &response.text, response.finish_reason.as_deref());
        progress.n_answered = progress.n_tokens();
        Self {
            seq_id: response.seq_id.clone(),
            identity,
            model,
            body,
            seed,
            last_use: Mutex::new(Instant::now()),
            progress: AsyncMutex::new(progress),
        }
    }

    /// What another worker goes on from.
    pub(crate) fn resumed(&self, progress: &HeldProgress) -> ResumeHead {
        let mut line = ProgressLine::default();
        progress.tokens.iter().for_each(|(token, _)| line.token(0, *token));
        let head = JournalHead {
            sequence: String::new(),
            id: self.identity.clone(),
            created: 0,
            seeds: vec![self.seed],
        };
        let texts = progress.tokens.iter().map(|(_, text)| text.clone()).collect();
        let partial = serde_json::to_value(HeldPartial { texts, answered: None }).ok();
        let (path, progress) = (INIT_PATH.to_owned(), line.into_items());
        ResumeHead { path, head, progress, ticket: None, partial }
    }
}

impl HeldProgress {
    pub(crate) fn n_tokens(&self) -> u64 {
        self.tokens.len() as u64
    }

    pub(crate) fn n_answered(&self) -> u64 {
        self.n_answered
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// Takes the answer to a step behind the last token; false if it is one to another step.
    pub(crate) fn take(&mut self, response: &StepResponse) -> bool {
        if response.step_index != self.n_tokens() {
            return false;
        }
        self.extend(&response.tokens, &response.text, response.finish_reason.as_deref());
        true
    }

    fn extend(&mut self, tokens: &[u32], text: &str, finish_reason: Option<&str>) {
        self.tokens.extend(tokens.iter().map(|token| (*token, String::new())));
        match self.tokens.last_mut() {
            Some((_, last)) if !tokens.is_empty() => last.push_str(text),
            _ => self.last_text.push_str(text),
        }
        self.finish_reason = finish_reason.map(str::to_owned);
    }

    /// The answer to a step from `first` up to `wanted` tokens, as a worker gives it.
    pub(crate) fn answer(&mut self, seq_id: &str, first: u64, wanted: u64) -> StepResponse {
        let n_tokens = self.tokens.len();
        let until = n_tokens.min(usize::try_from(wanted).unwrap_or(usize::MAX));
        let range = usize::try_from(first).unwrap_or(n_tokens).min(until)..until;
        self.n_answered = self.n_answered.max(until as u64);
        let finish_reason = self.finish_reason.clone().filter(|_| until == n_tokens);
        let tokens: Vec<u32> = self.tokens[range.clone()].iter().map(|(token, _)| *token).collect();
        let mut text: String = self.tokens[range].iter().map(|(_, text)| text.as_str()).collect();
        if finish_reason.is_some() {
            text.push_str(&self.last_text);
        }
        StepResponse {
            seq_id: seq_id.to_owned(),
            step_index: first,
            token: if wanted == first + 1 { tokens.first().copied() } else { None },
            tokens,
            text,
            finished: finish_reason.is_some(),
            finish_reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::backend::BackendKind;

    fn sequence(seq_id: &str, n_body_bytes: usize) -> HeldSequence {
        let owner = Arc::new(Backend::new("w".to_owned(), BackendKind::Worker, 1, "http://127.0.0.1:1"));
        let response = InitResponse {
            seq_id: seq_id.to_owned(),
            status: "ready".to_owned(),
            prompt_tokens: 4,
            cached_tokens: 0,
            tokens_so_far: vec![7],
            text: "a".to_owned(),
            finished: false,
            finish_reason: None,
        };
        let body = Bytes::from(vec![b' '; n_body_bytes]);
        HeldSequence::new((format!("life-{seq_id}"), "m".to_owned(), body), 5, &response, owner)
    }

    fn step(step_index: u64, tokens: &[u32], text: &str, finish_reason: Option<&str>) -> StepResponse {
        StepResponse {
            seq_id: "s".to_owned(),
            step_index,
            token: None,
            tokens: tokens.to_vec(),
            text: text.to_owned(),
            finished: finish_reason.is_some(),
            finish_reason: finish_reason.map(str::to_owned),
        }
    }

    #[tokio::test]
    async fn a_step_is_answered_again_with_the_same_tokens_and_text() {
        let sequence = sequence("s", 1);
        let mut progress = sequence.progress.lock().await;
        assert!(progress.take(&step(1, &[8, 9], "bc", None)));
        assert!(!progress.take(&step(1, &[8, 9], "bc", None)), "it has these");
        assert!(progress.take(&step(3, &[10], "d", None)));
        assert_eq!(progress.answer("s", 3, 4), StepResponse { token: Some(10), ..step(3, &[10], "d", None) });
        assert!(progress.take(&step(4, &[], "!", Some("stop"))));
        for _ in 0..2 {
            assert_eq!(progress.answer("s", 1, 3), step(1, &[8, 9], "bc", None));
            let last = step(3, &[10], "d!", Some("stop"));
            assert_eq!(progress.answer("s", 3, 4), StepResponse { token: Some(10), ..last });
        }
        assert_eq!(progress.answer("s", 0, 9), step(0, &[7, 8, 9, 10], "abcd!", Some("stop")));
        assert_eq!((progress.n_answered(), progress.is_ended()), (4, true));
        let resumed = sequence.resumed(&progress);
        assert_eq!((resumed.progress.trim(), resumed.head.seeds), ("7 8 9 10", vec![5]));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_kept_is_bounded_and_the_least_recently_used_goes_first() {
        let book = HeldBook::default();
        for number in 0..3 {
            book.insert(sequence(&format!("s{number}"), MAX_BODY_BYTES / 3));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert!(book.get("s0").is_some());
        book.insert(sequence("s3", MAX_BODY_BYTES / 3));
        assert!(book.get("s1").is_none() && book.get("s0").is_some() && book.get("s3").is_some());
        tokio::time::advance(MAX_IDLE).await;
        book.insert(sequence("s4", 1));
        assert!(book.get("s0").is_none() && book.get("s4").is_some());
        let held = book.get("s4").unwrap();
        book.insert(sequence("s4", 1));
        book.remove(&held);
        assert!(book.get("s4").is_some(), "another life of it");
    }
}
