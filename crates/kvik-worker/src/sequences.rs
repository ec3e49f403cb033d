//! Outputs that their clients advance step by step.
//!
//! A sequence starts with the first token of its output. A step grants the engine credits for more
//! and waits for the tokens. Every token that was ever chosen is kept until the sequence ends, so a
//! step that is asked for again, because its answer was lost, is answered with the same tokens and
//! advances nothing. Steps of one sequence wait for each other.
//!
//! A sequence that another worker has begun goes on from its tokens with the first step here. One that goes to another worker
//! is locked until it is there, and unknown here from then on.
//!
//! Nothing here is lost if a handler is dropped half way: credits are counted when they are granted
//! and tokens when they are received.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvik_model::GenerateRequest;
use kvik_proto::journal::{JournalHead, ProgressLine};
use kvik_proto::moves::{HeldPartial, INIT_PATH, ResumeHead};
use kvik_proto::worker::{InitResponse, StepResponse};
use kvik_types::CacheSalt;
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::admission::Permit;
use crate::engine_thread::{BegunPart, EngineHandle, Origin, Submission};
use crate::error::Refusal;
use crate::events::{Event, StopCause};
use crate::generation::StageGuard;
use crate::running::{RequestProgress, RunningRequest};

/// Most tokens of one step; what a client may not read is bounded by it.
pub(crate) const MAX_STEP: u32 = 4096;

/// The sequences that clients step.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    by_id: Mutex<HashMap<String, Arc<AsyncMutex<Stepped>>>>,
}

/// What a sequence is started from.
#[derive(Debug)]
pub(crate) struct HeldStart {
    pub(crate) seq_id: String,
    /// Names this life of the sequence, if a gateway has begun it.
    pub(crate) identity: Option<String>,
    /// The request as it came.
    pub(crate) body: Bytes,
    pub(crate) request: GenerateRequest,
    pub(crate) salt: Option<CacheSalt>,
    pub(crate) permit: Permit,
    /// Cancelled when the worker drains.
    pub(crate) draining: CancellationToken,
    /// How far it has come on another worker.
    pub(crate) begun: Option<HeldBegun>,
}

/// How far a sequence has come on another worker.
#[derive(Debug)]
pub(crate) struct HeldBegun {
    pub(crate) part: BegunPart,
    /// Each with the text that became final with it.
    pub(crate) tokens: Vec<(u32, String)>,
    pub(crate) n_answered: u64,
    /// KV that came ahead of it.
    pub(crate) stages: Vec<StageGuard>,
}

/// A sequence on its way to another worker: no step advances it. Dropped, it stays.
#[derive(Debug)]
pub(crate) struct LeavingSequence {
    stepped: OwnedMutexGuard<Stepped>,
}

/// One of them.
#[derive(Debug)]
struct Stepped {
    seq_id: String,
    identity: Option<String>,
    engine: EngineHandle,
    ticket: u64,
    /// As it goes to another worker; it is in no list.
    request: Arc<RunningRequest>,
    /// Of its random choices; known when the engine has taken it.
    seed: Option<u64>,
    /// KV that came ahead of it, held until its first token here.
    stages: Vec<StageGuard>,
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    n_granted: u64,
    prompt_tokens: usize,
    cached_tokens: usize,
    /// Each with the text that became final with it.
    tokens: Vec<(u32, String)>,
    /// Tokens that steps have been answered with.
    n_answered: u64,
    end: Option<End>,
    last_use: Instant,
    /// Whether the engine has nothing of it any more.
    is_released: bool,
}

/// Why an output ended.
#[derive(Debug, Clone)]
enum End {
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

impl Sequences {
    /// Whether a sequence of this name is being stepped.
    pub(crate) fn is_active(&self, seq_id: &str) -> bool {
        let Some(sequence) = self.by_id.lock().get(seq_id).map(Arc::clone) else { return false };
        // One that is locked is at work.
        sequence.try_lock().map_or(true, |sequence| sequence.end.is_none())
    }

    /// Starts a sequence and waits for the first token of its output; also the seed of its random choices.
    pub(crate) async fn init(
        &self,
        engine: &EngineHandle,
        start: HeldStart,
    ) -> Result<(InitResponse, u64), Refusal> {
        let mut stepped = self.begin(engine, start, 1).await?;
        Ok((stepped.init_response(), stepped.seed.unwrap_or_default()))
    }

    /// Takes a sequence that another worker has begun; the next step goes on with it.
    pub(crate) async fn resume(&self, engine: &EngineHandle, start: HeldStart) -> Result<(), Refusal> {
        self.begin(engine, start, 0).await.map(drop)
    }

    /// Has the engine take a sequence, and waits for `n_first` tokens.
    async fn begin(
        &self,
        engine: &EngineHandle,
        start: HeldStart,
        n_first: u32,
    ) -> Result<OwnedMutexGuard<Stepped>, Refusal> {
        let (stepped, submission) = Stepped::new(engine, start, n_first);
        let (seq_id, identity) = (stepped.seq_id.clone(), stepped.identity.clone());
        let wanted = stepped.n_granted;
        let sequence = Arc::new(AsyncMutex::new(stepped));
        self.insert(&seq_id, identity.as_deref(), &sequence)?;
        let mut stepped = Arc::clone(&sequence).lock_owned().await;
        let started = match engine.submit(submission) {
            Ok(()) => stepped.taken(wanted).await,
            Err(refusal) => Err(refusal),
        };
        if let Err(refusal) = started {
            drop(stepped);
            self.remove(&seq_id, &sequence);
            return Err(refusal);
        }
        Ok(stepped)
    }

    /// Advances a sequence to `n` tokens after `step_index`, by default after the last answer.
    pub(crate) async fn step(
        &self,
        seq_id: &str,
        identity: Option<&str>,
        step_index: Option<u64>,
        n: u32,
    ) -> Result<StepResponse, Refusal> {
        let sequence = self.get(seq_id)?;
        let mut stepped = sequence.lock().await;
        if !stepped.is_life(identity) || matches!(stepped.end, Some(End::Moved)) {
            return Err(unknown(seq_id));
        }
        stepped.last_use = Instant::now();
        let first = step_index.unwrap_or(stepped.n_answered);
        let n_known = stepped.tokens.len() as u64;
        if n_known < first {
            let message = format!(
                "`step_index` is {first}; allowed: 0 to {n_known}, the number of tokens of the output"
            );
            return Err(Refusal::conflict(message, Some("step_index")));
        }
        let wanted = first + u64::from(n);
        if stepped.end.is_none() && stepped.n_granted < wanted {
            let n_new = wanted - stepped.n_granted;
            stepped.n_granted = wanted;
            stepped.engine.grant(stepped.ticket, u32::try_from(n_new).unwrap_or(u32::MAX));
        }
        stepped.receive(wanted).await?;
        stepped.last_use = Instant::now();
        Ok(stepped.step_response(first, wanted))
    }

    /// Ends a sequence; returns its tokens that stay resident. A sequence that is resident only can
    /// be ended too, which matters if it is forgotten.
    pub(crate) async fn finish(
        &self,
        engine: &EngineHandle,
        seq_id: &str,
        identity: Option<&str>,
        forgets: bool,
    ) -> Result<usize, Refusal> {
        let Ok(sequence) = self.get(seq_id) else {
            let is_resident = engine.export_kv(seq_id, 0..0).await?.is_some();
            if !is_resident {
                return Err(unknown(seq_id));
            }
            return engine.finish(None, seq_id, forgets).await;
        };
        let mut stepped = sequence.lock().await;
        if !stepped.is_life(identity) {
            return Err(unknown(seq_id));
        }
        self.remove(seq_id, &sequence);
        stepped.is_released = true;
        stepped.engine.finish(Some(stepped.ticket), seq_id, forgets).await
    }

    /// Ends the sequences that were unused for `idle`; they stay resident.
    pub(crate) fn end_idle(&self, idle: Duration) {
        let mut abandoned = Vec::new();
        self.by_id.lock().retain(|_, sequence| {
            let is_idle = sequence.try_lock().is_ok_and(|stepped| idle <= stepped.last_use.elapsed());
            if is_idle {
                abandoned.push(Arc::clone(sequence));
            }
            !is_idle
        });
        if !abandoned.is_empty() {
            tracing::info!(sequences = abandoned.len(), "ended abandoned sequences");
        }
    }

    /// The names of all.
    pub(crate) fn names(&self) -> Vec<String> {
        self.by_id.lock().keys().cloned().collect()
    }

    /// Locks a sequence that goes on, so that it can go to another worker; a step that is under way ends first. `None` if there
    /// is nothing to go on with.
    pub(crate) async fn leave(&self, seq_id: &str) -> Option<LeavingSequence> {
        let stepped = self.get(seq_id).ok()?.lock_owned().await;
        (stepped.end.is_none() && stepped.seed.is_some()).then_some(LeavingSequence { stepped })
    }

    /// Ends a sequence here that another worker has now.
    pub(crate) fn end_left(&self, leaving: LeavingSequence) {
        let LeavingSequence { mut stepped } = leaving;
        self.by_id.lock().remove(&stepped.seq_id);
        stepped.engine.abandon(stepped.ticket);
        stepped.set_end(End::Moved);
    }

    fn get(&self, seq_id: &str) -> Result<Arc<AsyncMutex<Stepped>>, Refusal> {
        self.by_id.lock().get(seq_id).map(Arc::clone).ok_or_else(|| unknown(seq_id))
    }

    /// Adds a sequence, in the place of one of the same name whose output has ended or that is an earlier copy of the same life.
    fn insert(
        &self,
        seq_id: &str,
        identity: Option<&str>,
        sequence: &Arc<AsyncMutex<Stepped>>,
    ) -> Result<(), Refusal> {
        let mut by_id = self.by_id.lock();
        let is_other = |before: &Stepped| identity.is_none() || before.identity.as_deref() != identity;
        if let Some(before) = by_id.get(seq_id)
            && before.try_lock().map_or(true, |before| before.end.is_none() && is_other(&before))
        {
            let message = format!("`seq_id` is `{seq_id}`, which is being stepped; finish it first");
            return Err(Refusal::conflict(message, Some("seq_id")));
        }
        by_id.insert(seq_id.to_owned(), Arc::clone(sequence));
        Ok(())
    }

    fn remove(&self, seq_id: &str, sequence: &Arc<AsyncMutex<Stepped>>) {
        let mut by_id = self.by_id.lock();
        if by_id.get(seq_id).is_some_and(|held| Arc::ptr_eq(held, sequence)) {
            by_id.remove(seq_id);
        }
    }
}

impl LeavingSequence {
    /// As other workers are offered it.
    pub(crate) fn request(&self) -> &Arc<RunningRequest> {
        &self.stepped.request
    }

    /// What another worker goes on from, with the KV of `ticket`.
    pub(crate) fn head(&self, ticket: String) -> ResumeHead {
        let stepped = &self.stepped;
        let mut progress = ProgressLine::default();
        stepped.tokens.iter().for_each(|(token, _)| progress.token(0, *token));
        let partial = HeldPartial {
            texts: stepped.tokens.iter().map(|(_, text)| text.clone()).collect(),
            answered: Some(stepped.n_answered),
        };
        ResumeHead {
            path: INIT_PATH.to_owned(),
            head: JournalHead {
                sequence: stepped.request.id.clone(),
                id: stepped.identity.clone().unwrap_or_default(),
                created: 0,
                seeds: stepped.seed.into_iter().collect(),
            },
            progress: progress.into_items(),
            ticket: Some(ticket),
            // Texts and a number: nothing that JSON cannot say.
            partial: serde_json::to_value(partial).ok(),
        }
    }
}

impl Stepped {
    /// A sequence and what the engine is asked for: `n_first` tokens more than it has.
    fn new(engine: &EngineHandle, start: HeldStart, n_first: u32) -> (Self, Submission) {
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
    fn is_life(&self, identity: Option<&str>) -> bool {
        identity.is_none() || self.identity.as_deref() == identity
    }

    /// Waits until the engine has taken it and the output has `wanted` tokens or has ended. Cancel safe.
    async fn taken(&mut self, wanted: u64) -> Result<(), Refusal> {
        while self.seed.is_none() && self.end.is_none() {
            match self.events.recv().await.map(|(_, event)| event) {
                Some(event) => self.note(event)?,
                None => self.set_end(End::Stopped(StopCause::Ended)),
            }
        }
        self.receive(wanted).await
    }

    /// Receives until the output has `wanted` tokens or has ended. Cancel safe.
    async fn receive(&mut self, wanted: u64) -> Result<(), Refusal> {
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

    fn set_end(&mut self, end: End) {
        self.end = Some(end);
        self.is_released = true;
    }

    fn init_response(&mut self) -> InitResponse {
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
    fn step_response(&mut self, first: u64, wanted: u64) -> StepResponse {
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

fn unknown(seq_id: &str) -> Refusal {
    let shown: String = seq_id.chars().take(200).collect();
    Refusal::not_found(format!("`seq_id` is `{shown}`, which is not known here"), Some("seq_id"))
}
