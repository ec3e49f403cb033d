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

mod stepped;

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
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::stepped::{End, Stepped, unknown};
use crate::admission::Permit;
use crate::engine_thread::{BegunPart, EngineHandle};
use crate::error::Refusal;
use crate::generation::StageGuard;
use crate::running::RunningRequest;

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
