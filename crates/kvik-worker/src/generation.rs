//! One request to the engine, of one or several prompts.
//!
//! A reader that is slow must neither stop the engine nor fill the memory. So every output may run
//! [`WINDOW`] tokens ahead of its reader and pauses there; reading gives it credits for more. The
//! engine's thread ends an output that stays paused longer than the configured time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use kvik_model::{GenerateRequest, StageId, Staged};
use kvik_runtime::telemetry::Phases;
use kvik_types::CacheSalt;
use tokio::sync::mpsc;

use crate::admission::Permit;
use crate::engine_thread::{BegunPart, EngineHandle, Origin, StageBlocks, StageOutcome, Submission};
use crate::error::Refusal;
use crate::events::{Event, StopCause};
use crate::plan::BlendPart;

/// Tokens that an output may be ahead of its reader: at 50 tokens/s and 100 bytes an event, five
/// seconds of a stalled network in 25 KB.
pub(crate) const WINDOW: u32 = 256;
/// Tokens read before more are granted: few enough messages to the engine not to matter.
const GRANT: u32 = WINDOW / 2;

/// A request to the engine; dropping it ends it there.
#[derive(Debug)]
pub(crate) struct Generation {
    engine: EngineHandle,
    /// One for each prompt.
    parts: Vec<Part>,
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    /// Events that came before the last prompt was accepted.
    early: VecDeque<(usize, Event)>,
    n_live_choices: usize,
    has_failed: bool,
    /// Of the request's trace: it waits, its prompts are computed, its outputs grow.
    phases: Phases,
    is_admitted: bool,
    has_first_token: bool,
    /// KV that came ahead of it, held until its first token here.
    stages: Vec<StageGuard>,
}

/// What is started.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    /// One for each prompt.
    pub(crate) requests: Vec<GenerateRequest>,
    pub(crate) name: Option<&'a str>,
    /// Keeps their KV apart from that of others.
    pub(crate) salt: Option<CacheSalt>,
    /// Their place.
    pub(crate) permit: Permit,
    /// For each prompt, how far its outputs have come on another worker; empty if they begin here.
    pub(crate) begun: Vec<BegunPart>,
    pub(crate) stages: Vec<StageGuard>,
    /// How the only prompt is put together.
    pub(crate) blend: Option<BlendPart>,
}

/// Blocks of a sequence that is on its way; let go when dropped.
#[derive(Debug)]
pub(crate) struct StageGuard {
    engine: EngineHandle,
    pub(crate) stage: StageId,
    /// Blocks that were there at the start.
    pub(crate) n_first: usize,
    /// Blocks that are there or on their way to the engine.
    pub(crate) n_sent: usize,
}

/// One prompt of a request.
#[derive(Debug)]
struct Part {
    ticket: u64,
    seed: u64,
    /// For each choice: tokens read, `None` after its end.
    n_read: Vec<Option<u32>>,
    n_granted: u32,
}

impl Generation {
    /// Submits requests and waits until the engine has taken all of them. Outputs that have ended elsewhere give no events.
    ///
    /// # Errors
    /// If it refuses one; nothing stays behind then.
    pub(crate) async fn start(engine: &EngineHandle, start: Start<'_>) -> Result<Self, Refusal> {
        let Start { requests, name, salt, permit, begun, stages, blend } = start;
        let permit = Arc::new(permit);
        let (sender, events) = mpsc::unbounded_channel();
        let mut generation = Self {
            engine: engine.clone(),
            parts: Vec::with_capacity(requests.len()),
            events,
            early: VecDeque::new(),
            n_live_choices: 0,
            has_failed: false,
            phases: Phases::begin("queue"),
            is_admitted: false,
            has_first_token: false,
            stages,
        };
        let mut begun = begun.into_iter();
        let mut n_submitted = 0;
        for (part_idx, request) in requests.into_iter().enumerate() {
            let ticket = engine.next_ticket();
            let begun = begun.next();
            let mut n_read = vec![Some(0); request.sampling.n as usize];
            let ended = begun.iter().flat_map(|begun| &begun.outputs.outputs).map(|output| output.is_ended);
            for (n_read, is_ended) in n_read.iter_mut().zip(ended) {
                *n_read = n_read.filter(|_| !is_ended);
            }
            let n_live = n_read.iter().flatten().count();
            let seed = request.sampling.seed.unwrap_or_default();
            generation.parts.push(Part { ticket, seed, n_read, n_granted: WINDOW });
            if n_live == 0 {
                continue;
            }
            generation.n_live_choices += n_live;
            n_submitted += 1;
            let origin = Origin {
                ticket,
                part_idx,
                name: name.map(str::to_owned),
                salt: salt.clone(),
                credits: WINDOW,
                is_stepped: false,
                arrived: Instant::now(),
                permit: Arc::clone(&permit),
                events: sender.clone(),
            };
            engine.submit(Submission { origin, request, begun, blend: blend.clone() })?;
        }
        drop((sender, permit));
        let mut n_accepted = 0;
        while n_accepted < n_submitted {
            match generation.events.recv().await {
                Some((part_idx, Event::Accepted { seed })) => {
                    n_accepted += 1;
                    if let Some(part) = generation.parts.get_mut(part_idx) {
                        part.seed = seed;
                    }
                }
                Some((_, Event::Rejected(error))) => return Err(error.into()),
                Some((_, Event::Failed(message))) => return Err(Refusal::unavailable(message, 1)),
                Some((_, Event::Stopped(cause))) => return Err(Refusal::unavailable(cause.message(), 1)),
                // The first prompts may run before the last is taken.
                Some(event) => generation.early.push_back(event),
                None => return Err(Refusal::engine_gone()),
            }
        }
        Ok(generation)
    }

    /// For each prompt, the seed of its random choices.
    pub(crate) fn seeds(&self) -> Vec<u64> {
        self.parts.iter().map(|part| part.seed).collect()
    }

    /// Names the prompts towards the engine.
    pub(crate) fn tickets(&self) -> Vec<u64> {
        self.parts.iter().map(|part| part.ticket).collect()
    }

    /// The next event; `None` after the end of all outputs or a failure. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<(usize, Event)> {
        if self.n_live_choices == 0 || self.has_failed {
            return None;
        }
        let event = match self.early.pop_front() {
            Some(event) => Some(event),
            None => self.events.recv().await,
        };
        Some(self.note(event))
    }

    /// The next event if it is there already.
    pub(crate) fn try_next(&mut self) -> Option<(usize, Event)> {
        if self.n_live_choices == 0 || self.has_failed {
            return None;
        }
        if let Some(event) = self.early.pop_front() {
            return Some(self.note(Some(event)));
        }
        match self.events.try_recv() {
            Ok(event) => Some(self.note(Some(event))),
            Err(mpsc::error::TryRecvError::Empty) => None,
            Err(mpsc::error::TryRecvError::Disconnected) => Some(self.note(None)),
        }
    }

    fn note(&mut self, event: Option<(usize, Event)>) -> (usize, Event) {
        let Some((part_idx, event)) = event else {
            self.has_failed = true;
            return (0, Event::Stopped(StopCause::Ended));
        };
        match &event {
            Event::Token(token) => {
                if !self.has_first_token {
                    self.has_first_token = true;
                    self.stages.clear();
                    self.phases.enter_at("decode", Instant::now());
                }
                self.note_read(part_idx, token.choice);
            }
            Event::Finished { choice, usage, .. } => {
                self.n_live_choices -= 1;
                self.phases.set("gen_ai.usage.input_tokens", usage.prompt_tokens as i64);
                self.phases.set("gen_ai.usage.output_tokens", usage.completion_tokens as i64);
                self.phases.set("kvik.cached_tokens", usage.cached_tokens as i64);
                if let Some(n_read) = self.choice_mut(part_idx, *choice) {
                    *n_read = None;
                }
                self.grant(part_idx);
            }
            Event::Failed(_) | Event::Rejected(_) | Event::Stopped(_) => self.has_failed = true,
            Event::Admitted { at, .. } => {
                if !self.is_admitted {
                    self.is_admitted = true;
                    self.phases.enter_at("prefill", *at);
                }
            }
            Event::Accepted { .. } | Event::Frozen(_) => {}
        }
        (part_idx, event)
    }

    fn choice_mut(&mut self, part_idx: usize, choice: u32) -> Option<&mut Option<u32>> {
        self.parts.get_mut(part_idx)?.n_read.get_mut(choice as usize)
    }

    fn note_read(&mut self, part_idx: usize, choice: u32) {
        if let Some(Some(n_read)) = self.choice_mut(part_idx, choice) {
            *n_read += 1;
        }
        self.grant(part_idx);
    }

    /// Lets the choices of a prompt run as far ahead of the slowest of them as the window is wide.
    fn grant(&mut self, part_idx: usize) {
        let Some(part) = self.parts.get_mut(part_idx) else { return };
        let Some(n_read) = part.n_read.iter().flatten().min() else { return };
        let allowed = n_read.saturating_add(WINDOW);
        let n_new = allowed.saturating_sub(part.n_granted);
        if GRANT <= n_new {
            part.n_granted = allowed;
            self.engine.grant(part.ticket, n_new);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if self.n_live_choices == 0 {
            return;
        }
        for part in &self.parts {
            self.engine.abandon(part.ticket);
        }
    }
}

impl StageGuard {
    /// Begins to hold the blocks of a sequence that starts with `prompt`.
    ///
    /// # Errors
    /// If the engine has ended.
    pub(crate) async fn begin(
        engine: &EngineHandle,
        prompt: &[u32],
        salt: Option<CacheSalt>,
    ) -> Result<Self, Refusal> {
        let (engine, prompt) = (engine.clone(), prompt.to_vec());
        // A task of its own: a caller that leaves while the engine answers must not leave blocks behind.
        let beginning = tokio::spawn(async move {
            let blocks = StageBlocks {
                stage: None,
                prompt,
                salt,
                first_block: 0,
                tokens: Vec::new(),
                kv: Bytes::new(),
            };
            let StageOutcome { stage, staged: Staged { n_blocks, .. } } = engine.begin_stage(blocks)?.await?;
            Ok(Self { engine, stage, n_first: n_blocks, n_sent: n_blocks })
        });
        beginning.await.map_err(|_| Refusal::engine_gone())?
    }
}

impl Drop for StageGuard {
    fn drop(&mut self) {
        self.engine.unstage(self.stage);
    }
}
