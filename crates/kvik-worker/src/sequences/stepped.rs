//! One output that its client advances: what it was granted, what has come of it, and its end.
//!
//! A token is noted when it is received and stays until the sequence ends. Dropped before the engine has ended it, the
//! sequence is abandoned there.

use std::sync::Arc;

use kvik_proto::moves::INIT_PATH;
use kvik_proto::worker::{InitResponse, StepResponse};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{HeldBegun, HeldStart};
use crate::engine_thread::{EngineHandle, Origin, Submission};
use crate::error::Refusal;
use crate::events::{Event, StopCause};
use crate::generation::StageGuard;
use crate::running::{RequestProgress, RunningRequest};

/// A sequence that a client steps.
#[derive(Debug)]
pub(super) struct Stepped {
    pub(super) seq_id: String,
    pub(super) identity: Option<String>,
    pub(super) engine: EngineHandle,
    pub(super) ticket: u64,
    /// As it goes to another worker; it is in no list.
    pub(super) request: Arc<RunningRequest>,
    /// Of its random choices; known when the engine has taken it.
    pub(super) seed: Option<u64>,
    /// KV that came ahead of it, held until its first token here.
    stages: Vec<StageGuard>,
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    pub(super) n_granted: u64,
    prompt_tokens: usize,
    cached_tokens: usize,
    /// Each with the text that became final with it.
    pub(super) tokens: Vec<(u32, String)>,
    /// Tokens that steps have been answered with.
    pub(super) n_answered: u64,
    pub(super) end: Option<End>,
    pub(super) last_use: Instant,
    /// Whether the engine has nothing of it any more.
    pub(super) is_released: bool,
}

/// Why an output ended.
#[derive(Debug, Clone)]
pub(super) enum End {
    Finished {
        text: String,
        reason: &'static str,
    },
    Failed(String),
    /// The worker ends before it.
    Stopped(StopCause),
    /// Another worker has it.
    Moved,
}

impl Stepped {
    /// A sequence and what the engine is asked for: `n_first` tokens more than it has.
    pub(super) fn new(engine: &EngineHandle, start: HeldStart, n_first: u32) -> (Self, Submission) {
        let HeldStart { seq_id, identity, body, request, salt, permit, draining, begun } = start;
        let (sender, events) = mpsc::unbounded_channel();
        let ticket = engine.next_ticket();
        let came = begun.as_ref().map(|_| std::time::Instant::now());
        let (part, tokens, n_answered, stages) = match begun {
            None => (None, Vec::new(), 0, Vec::new()),
            Some(HeldBegun { part, tokens, n_answered, stages }) => (Some(part), tokens, n_answered, stages),
        };
        let running = RunningRequest {
            id: format!("held-{ticket}"),
            seq_id: Some(seq_id.clone()),
            path: INIT_PATH,
            body,
            prompt_tokens: vec![request.prompt.len()],
            n_choices: 1,
            max_tokens: request.sampling.max_tokens as usize,
            tickets: vec![ticket],
            engine: engine.clone(),
            can_move: true,
            draining,
            came,
            progress: RequestProgress::new(tokens.len()),
        };
        let stepped = Self {
            seq_id: seq_id.clone(),
            identity,
            engine: engine.clone(),
            ticket,
            request: Arc::new(running),
            seed: None,
            stages,
            events,
            n_granted: tokens.len() as u64 + u64::from(n_first),
            prompt_tokens: request.prompt.len(),
            cached_tokens: 0,
            tokens,
            n_answered,
            end: None,
            last_use: Instant::now(),
            is_released: false,
        };
        let origin = Origin {
            ticket,
            part_idx: 0,
            name: Some(seq_id),
            salt,
            credits: n_first,
            is_stepped: true,
            arrived: std::time::Instant::now(),
            permit: Arc::new(permit),
            events: sender,
        };
        (stepped, Submission { origin, request, begun: part, blend: None })
    }

    /// Whether it is the life that is asked for; without a name all are.
    pub(super) fn is_life(&self, identity: Option<&str>) -> bool {
        identity.is_none() || self.identity.as_deref() == identity
    }

    /// Waits until the engine has taken it and the output has `wanted` tokens or has ended. Cancel safe.
    pub(super) async fn taken(&mut self, wanted: u64) -> Result<(), Refusal> {
        while self.seed.is_none() && self.end.is_none() {
            match self.events.recv().await.map(|(_, event)| event) {
                Some(event) => self.note(event)?,
                None => self.set_end(End::Stopped(StopCause::Ended)),
            }
        }
        self.receive(wanted).await
    }

    /// Receives until the output has `wanted` tokens or has ended. Cancel safe.
    pub(super) async fn receive(&mut self, wanted: u64) -> Result<(), Refusal> {
        while self.end.is_none() && (self.tokens.len() as u64) < wanted {
            match self.events.recv().await.map(|(_, event)| event) {
                Some(event) => self.note(event)?,
                None => self.set_end(End::Stopped(StopCause::Ended)),
            }
        }
        // The end comes right behind the last token: a step that takes that one tells it.
        while self.end.is_none()
            && let Ok((_, event)) = self.events.try_recv()
        {
            self.note(event)?;
        }
        match &self.end {
            Some(End::Failed(message)) => Err(Refusal::failed(message.clone())),
            // Another worker can go on with it.
            Some(End::Stopped(cause)) => Err(Refusal::unavailable(cause.message(), 1)),
            Some(End::Moved) => Err(unknown(&self.seq_id)),
            Some(End::Finished { .. }) | None => Ok(()),
        }
    }

    fn note(&mut self, event: Event) -> Result<(), Refusal> {
        match event {
            Event::Accepted { seed } => self.seed = Some(seed),
            Event::Frozen(_) => {}
            Event::Rejected(error) => {
                self.set_end(End::Failed(error.to_string()));
                return Err(error.into());
            }
            Event::Admitted { cached_tokens, .. } => self.cached_tokens = cached_tokens,
            Event::Token(token) => {
                self.stages.clear();
                self.tokens.push((token.id, token.text));
            }
            Event::Finished { text, reason, usage, .. } => {
                self.cached_tokens = usage.cached_tokens;
                self.set_end(End::Finished { text, reason: reason.as_str() });
            }
            Event::Failed(message) => self.set_end(End::Failed(message)),
            Event::Stopped(cause) => self.set_end(End::Stopped(cause)),
        }
        Ok(())
    }

    pub(super) fn set_end(&mut self, end: End) {
        self.end = Some(end);
        self.is_released = true;
    }

    pub(super) fn init_response(&mut self) -> InitResponse {
        let n_tokens = self.tokens.len() as u64;
        let step = self.step_response(0, n_tokens);
        InitResponse {
            seq_id: step.seq_id,
            status: "ready".to_owned(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            tokens_so_far: step.tokens,
            text: step.text,
            finished: step.finished,
            finish_reason: step.finish_reason,
        }
    }

    /// The answer to a step from `first` up to `wanted` tokens.
    pub(super) fn step_response(&mut self, first: u64, wanted: u64) -> StepResponse {
        let n_tokens = self.tokens.len();
        let until = n_tokens.min(usize::try_from(wanted).unwrap_or(usize::MAX));
        let range = usize::try_from(first).unwrap_or(n_tokens).min(until)..until;
        self.n_answered = self.n_answered.max(until as u64);
        let mut text: String = self.tokens[range.clone()].iter().map(|(_, text)| text.as_str()).collect();
        let mut finish_reason = None;
        if let Some(End::Finished { text: rest, reason }) = &self.end
            && until == n_tokens
        {
            text.push_str(rest);
            finish_reason = Some((*reason).to_owned());
        }
        let tokens: Vec<u32> = self.tokens[range].iter().map(|(token, _)| *token).collect();
        StepResponse {
            seq_id: self.seq_id.clone(),
            step_index: first,
            token: if wanted == first + 1 { tokens.first().copied() } else { None },
            tokens,
            text,
            finished: finish_reason.is_some(),
            finish_reason,
        }
    }
}

impl Drop for Stepped {
    fn drop(&mut self) {
        if !self.is_released {
            self.engine.abandon(self.ticket);
        }
    }
}

pub(super) fn unknown(seq_id: &str) -> Refusal {
    let shown: String = seq_id.chars().take(200).collect();
    Refusal::not_found(format!("`seq_id` is `{shown}`, which is not known here"), Some("seq_id"))
}
