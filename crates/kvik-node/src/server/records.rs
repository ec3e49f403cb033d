//! The audit records of one client.

use std::fmt::Display;
use std::sync::Arc;
use std::time::SystemTime;

use kvik_memory::socket::{Connection, Peer};
use kvik_store::{Chain, ChunkFormat, ChunkWriter, LayerReader, Retrieved, Space};

use crate::audit::{AuditChunks, AuditClient, AuditLine, AuditLog};
use crate::error::NodeError;
use crate::frame::{Attach, Purpose};
use crate::operation::Status;

/// The longest text of an outcome; what a client sends may be in it.
const MAX_OUTCOME_BYTES: usize = 256;

/// Says what a client does; nothing where there is no log.
#[derive(Debug, Clone, Default)]
pub(super) struct Auditor {
    log: Option<Arc<AuditLog>>,
    client: Arc<AuditClient>,
}

/// What is said of a handle when it is dropped: by the client, or at the end of its session.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// None without a log.
    line: Option<(Arc<AuditLog>, AuditLine)>,
    /// Slots of a write that were not committed.
    n_open: usize,
}

// === impl Auditor ===

impl Auditor {
    /// One for a client that has said nothing yet.
    pub(super) fn new(log: Option<&Arc<AuditLog>>, connection: &Connection) -> Self {
        let Some(log) = log else { return Self::default() };
        let (pid, uid) = match connection.peer() {
            Ok(Peer { pid, uid }) => (pid, Some(uid)),
            Err(_) => (None, None),
        };
        let client = AuditClient { pid, uid, ..AuditClient::default() };
        Self { log: Some(Arc::clone(log)), client: Arc::new(client) }
    }

    /// One for a client of which nothing is known.
    pub(super) fn unknown(log: Option<&Arc<AuditLog>>) -> Self {
        Self { log: log.cloned(), ..Self::default() }
    }

    /// Says that the client was not let in.
    pub(super) fn refused(&self, reason: &impl Display) {
        self.say("refused", reason);
    }

    /// Says who the client is, now and from now on.
    pub(super) fn attached(&mut self, tenant: &str, attach: &Attach, space: &Space) {
        if self.log.is_none() {
            return;
        }
        self.client = Arc::new(AuditClient {
            tenant: Some(tenant.to_owned()),
            model: Some(attach.namespace.model.clone()),
            namespace: Some(space.namespace_id()),
            ..AuditClient::clone(&self.client)
        });
        let outcome = match attach.purpose {
            Purpose::Session => "done",
            Purpose::Watch => "watch",
            Purpose::Manage => "manage",
            Purpose::Segments => "segments",
        };
        self.say("attach", &outcome);
    }

    /// Says that the client is gone, and by which mistake.
    pub(super) fn detached(&self, error: Option<&NodeError>) {
        match error {
            Some(error) => self.say("detach", error),
            None => self.say("detach", &"done"),
        }
    }

    /// What will be said of chunks that are read.
    pub(super) fn reads(&self, chain: &Chain, first: usize, retrieved: &Retrieved, rank: u16) -> Record {
        self.record("read", || {
            let chunks = retrieved.chunks();
            let outcome = match (chunks.is_empty(), retrieved.is_truncated()) {
                (true, _) => "miss",
                (false, true) => "truncated",
                (false, false) => "done",
            };
            let chunks = AuditChunks {
                n_tokens: chunks.iter().map(|chunk| chunk.token_range().len()).sum(),
                n_bytes: chunks.iter().map(|chunk| chunk.payload(rank).len() as u64).sum(),
                tier: retrieved.slowest_tier().cloned(),
                ..named(chain, first, chunks.len())
            };
            (chunks, outcome)
        })
    }

    /// What will be said of chunks that are read layer by layer.
    pub(super) fn reads_layers(&self, chain: &Chain, first: usize, reader: &LayerReader) -> Record {
        self.record("read", || {
            let chunks = named(chain, first, reader.n_chunks());
            let outcome = if chunks.n_chunks == 0 { "miss" } else { "done" };
            (AuditChunks { n_tokens: reader.n_tokens(), ..chunks }, outcome)
        })
    }

    /// What will be said of chunks that are written.
    pub(super) fn writes(
        &self,
        chain: &Chain,
        first: usize,
        writers: &[Option<ChunkWriter>],
        status: Status,
    ) -> Record {
        let n_open = writers.iter().flatten().count();
        let mut record = self.record("store", || {
            let outcome = if status == Status::Done && n_open == 0 { Status::Present } else { status };
            // Chunks count when they are committed.
            (AuditChunks { n_chunks: 0, ..named(chain, first, writers.len()) }, word(outcome))
        });
        record.n_open = n_open;
        record
    }

    /// Says what a managing client did with the first `n_chunks` chunks of a chain.
    pub(super) fn managed(&self, operation: &'static str, chain: &Chain, n_chunks: usize, outcome: &str) {
        self.say_of(operation, outcome, || AuditChunks {
            n_tokens: chain.tokens_of(n_chunks).start,
            ..named(chain, 0, n_chunks)
        });
    }

    /// Says that a managing client cleared its namespace.
    pub(super) fn cleared_namespace(&self, n_chunks: usize) {
        self.say_of("clear", "done", || AuditChunks { n_chunks, ..AuditChunks::default() });
    }

    fn say_of(&self, operation: &'static str, outcome: &str, describe: impl FnOnce() -> AuditChunks) {
        let Some(log) = &self.log else { return };
        let (time, client, chunks) = (SystemTime::now(), Arc::clone(&self.client), Some(describe()));
        log.record(AuditLine { time, client, operation, chunks, outcome: outcome.to_owned() });
    }

    fn say(&self, operation: &'static str, outcome: &impl Display) {
        let Some(log) = &self.log else { return };
        let mut outcome = outcome.to_string();
        outcome.truncate(outcome.floor_char_boundary(MAX_OUTCOME_BYTES));
        let client = Arc::clone(&self.client);
        log.record(AuditLine { time: SystemTime::now(), client, operation, chunks: None, outcome });
    }

    fn record(
        &self,
        operation: &'static str,
        describe: impl FnOnce() -> (AuditChunks, &'static str),
    ) -> Record {
        let Some(log) = &self.log else { return Record::default() };
        let (chunks, outcome) = describe();
        let (time, client) = (SystemTime::now(), Arc::clone(&self.client));
        let line = AuditLine { time, client, operation, chunks: Some(chunks), outcome: outcome.to_owned() };
        Record { line: Some((Arc::clone(log), line)), n_open: 0 }
    }
}

// === impl Record ===

impl Record {
    /// Counts bytes that were handed to the client.
    pub(super) fn add_bytes(&mut self, n_bytes: impl FnOnce() -> usize) {
        if let Some(chunks) = self.chunks() {
            chunks.n_bytes += n_bytes() as u64;
        }
    }

    /// Counts a chunk of a write: by its bytes where it is stored, and as the outcome where it is not.
    pub(super) fn add_commit(&mut self, status: Status, n_bytes: usize, format: &ChunkFormat) {
        self.n_open = self.n_open.saturating_sub(1);
        let Some((_, line)) = &mut self.line else { return };
        if status != Status::Done {
            word(status).clone_into(&mut line.outcome);
        } else if let Some(chunks) = &mut line.chunks {
            chunks.n_chunks += 1;
            chunks.n_tokens += n_bytes.checked_div(format.payload_bytes(1)).unwrap_or(0);
            chunks.n_bytes += n_bytes as u64;
        }
    }

    fn chunks(&mut self) -> Option<&mut AuditChunks> {
        self.line.as_mut().and_then(|(_, line)| line.chunks.as_mut())
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let Some((log, mut line)) = self.line.take() else { return };
        line.time = SystemTime::now();
        if self.n_open > 0 && line.outcome == word(Status::Done) {
            "unfinished".clone_into(&mut line.outcome);
        }
        log.record(line);
    }
}

/// So many chunks of a chain, by their names.
fn named(chain: &Chain, first: usize, n_chunks: usize) -> AuditChunks {
    let names = chain.names().get(first..first.saturating_add(n_chunks)).unwrap_or_default();
    AuditChunks {
        n_chunks,
        first: names.first().copied(),
        last: names.last().copied(),
        ..AuditChunks::default()
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Done => "done",
        Status::NoRoom => "no_room",
        Status::NoParent => "no_parent",
        Status::Collision => "collision",
        Status::Cleared => "cleared",
        Status::Present => "present",
        Status::Corrupt => "corrupt",
        Status::TooMany => "too_many",
        Status::Moving => "moving",
    }
}
