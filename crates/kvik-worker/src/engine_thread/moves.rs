//! Requests that leave the engine for another worker, and blocks of those that come.

use std::time::Instant;

use kvik_model::{LentBlocks, ModelError, StageId, Staged};
use kvik_proto::journal::MoveNotice;
use kvik_types::CacheSalt;
use tokio::sync::oneshot;

use super::lends::{LendRequest, LendWait, WaitingLend};
use super::run::EngineThread;
use super::{Command, EngineHandle};
use crate::error::Refusal;
use crate::events::Event;

/// Blocks of a sequence that is on its way here.
#[derive(Debug)]
pub(crate) struct StageBlocks {
    /// Where they go; `None` for a new sequence.
    pub(crate) stage: Option<StageId>,
    /// What a new sequence starts with.
    pub(crate) prompt: Vec<u32>,
    pub(crate) salt: Option<CacheSalt>,
    pub(crate) first_block: usize,
    /// Those of the blocks.
    pub(crate) tokens: Vec<u32>,
    /// Block by block, and of each all layers.
    pub(crate) kv: bytes::Bytes,
}

/// What the engine has of a sequence that is on its way here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageOutcome {
    pub(crate) stage: StageId,
    pub(crate) staged: Staged,
}

impl EngineThread {
    /// Freezes the requests that have not ended; false if there are none, or the KV of one is on its way from the store.
    pub(super) fn freeze(&mut self, tickets: &[u64], notice: Option<MoveNotice>) -> bool {
        let is_coming = |ticket: u64| self.loads.contains(ticket) || self.blends.contains(ticket);
        if tickets.iter().any(|ticket| is_coming(*ticket)) {
            return false;
        }
        let now = Instant::now();
        let mut last = None;
        for ticket in tickets {
            if let Some(entry) = self.entries.get_mut(*ticket) {
                entry.set_frozen(true, now);
                self.engine.set_frozen(entry.id, true);
                last = Some(*ticket);
            }
        }
        let Some(entry) = last.and_then(|ticket| self.entries.get_mut(ticket)) else { return false };
        entry.send(Event::Frozen(notice));
        true
    }

    pub(super) fn thaw(&mut self, tickets: &[u64]) {
        let now = Instant::now();
        for ticket in tickets {
            if let Some(entry) = self.entries.get_mut(*ticket) {
                entry.set_frozen(false, now);
                self.engine.set_frozen(entry.id, false);
            }
        }
    }

    /// Lends blocks, now or when there are some.
    pub(super) fn lend(&mut self, request: LendRequest, reply: oneshot::Sender<Option<LentBlocks>>) {
        let lent = self.lent(request);
        if lent.is_none() && self.may_lend_later(request) {
            self.lends.push(WaitingLend { request, reply });
        } else {
            let _ = reply.send(lent);
        }
    }

    /// Answers loans that there are blocks for now, and those that there will be none for.
    pub(super) fn answer_lends(&mut self) {
        for WaitingLend { request, reply } in std::mem::take(&mut self.lends) {
            if !reply.is_closed() {
                self.lend(request, reply);
            }
        }
    }

    fn lent(&mut self, request: LendRequest) -> Option<LentBlocks> {
        let LendRequest { ticket, choice, first_block, max_blocks, .. } = request;
        let id = self.entries.get_mut(ticket)?.id;
        self.engine.lend_blocks(id, choice, first_block, max_blocks)
    }

    fn may_lend_later(&mut self, request: LendRequest) -> bool {
        let LendRequest { ticket, choice, wait, .. } = request;
        let entry = self.entries.get_mut(ticket);
        match (wait, entry) {
            (LendWait::No, _) => false,
            (LendWait::Block, entry) => entry.is_some_and(|entry| self.engine.is_advancing(entry.id, choice)),
            (LendWait::Prompt, Some(entry)) => !entry.has_tokens(),
            (LendWait::Prompt, None) => self.loads.contains(ticket) || self.blends.contains(ticket),
        }
    }

    pub(super) fn stage(&mut self, blocks: &StageBlocks) -> Result<StageOutcome, ModelError> {
        let Some(stage) = blocks.stage else {
            let (stage, staged) = self.engine.stage(&blocks.prompt, blocks.salt.clone());
            return Ok(StageOutcome { stage, staged });
        };
        let staged = self.engine.stage_blocks(stage, blocks.first_block, &blocks.tokens, &blocks.kv)?;
        Ok(StageOutcome { stage, staged })
    }
}

impl EngineHandle {
    /// Freezes all requests of `tickets` that have not ended; their client is sent the notice behind everything else. False if
    /// there is nothing to freeze, or not yet.
    pub(crate) async fn freeze(
        &self,
        tickets: Vec<u64>,
        notice: Option<MoveNotice>,
    ) -> Result<bool, Refusal> {
        self.ask(|reply| Command::Freeze { tickets, notice, reply }).await
    }

    /// Lets frozen requests go on.
    pub(crate) fn thaw(&self, tickets: Vec<u64>) {
        // A thread that has ended has ended the requests.
        let _ = self.send(Command::Thaw { tickets });
    }

    /// Lends full blocks of an output from a block on; `None` if there are none and none is waited for.
    pub(crate) async fn lend(&self, request: LendRequest) -> Result<Option<LentBlocks>, Refusal> {
        self.ask(|reply| Command::Lend { request, reply }).await
    }

    /// Takes blocks of a sequence that is on its way here, in the order of calls, also if the result is not waited for.
    pub(crate) fn begin_stage(
        &self,
        blocks: StageBlocks,
    ) -> Result<impl Future<Output = Result<StageOutcome, Refusal>> + Send + use<>, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Stage { blocks, reply })?;
        Ok(async { answer.await.map_err(|_| Refusal::engine_gone())?.map_err(Refusal::from) })
    }

    /// Lets the blocks of a sequence go.
    pub(crate) fn unstage(&self, stage: StageId) {
        // An engine that has ended holds nothing.
        let _ = self.send(Command::Unstage { stage });
    }
}
