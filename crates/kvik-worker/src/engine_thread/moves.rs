//! Requests that leave the engine for another worker, and blocks of those that come.

use std::time::Instant;

use kvik_model::{LentBlocks, ModelError, StageId, Staged};
use kvik_proto::journal::MoveNotice;
use kvik_types::CacheSalt;
use tokio::sync::oneshot;

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
        if tickets.iter().any(|ticket| self.loads.contains(*ticket)) {
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

    pub(super) fn lend(
        &mut self,
        ticket: u64,
        choice: u32,
        first_block: usize,
        max_blocks: usize,
    ) -> Option<LentBlocks> {
        let id = self.entries.get_mut(ticket)?.id;
        self.engine.lend_blocks(id, choice, first_block, max_blocks)
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
        // A thread that has ended has told the requests so.
        let _ = self.send(Command::Thaw { tickets });
    }

    /// Lends full blocks of an output from `first_block` on; `None` if there are none.
    pub(crate) async fn lend(
        &self,
        ticket: u64,
        choice: u32,
        first_block: usize,
        max_blocks: usize,
    ) -> Result<Option<LentBlocks>, Refusal> {
        self.ask(|reply: oneshot::Sender<Option<LentBlocks>>| Command::Lend {
            ticket,
            choice,
            first_block,
            max_blocks,
            reply,
        })
        .await
    }

    /// Takes blocks of a sequence that is on its way here.
    pub(crate) async fn stage(&self, blocks: StageBlocks) -> Result<StageOutcome, Refusal> {
        let outcome = self.ask(|reply| Command::Stage { blocks, reply }).await?;
        outcome.map_err(Refusal::from)
    }

    /// Lets the blocks of a sequence go.
    pub(crate) fn unstage(&self, stage: StageId) {
        // An engine that has ended holds nothing.
        let _ = self.send(Command::Unstage { stage });
    }
}
