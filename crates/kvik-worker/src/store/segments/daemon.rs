//! Segments in the store of a daemon.
//!
//! They have a session of their own: the daemon keeps their tails, and tells no index of them. While the daemon is away no
//! segment is there.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kvik_model::{ComputedSegment, SegmentKv, SegmentPart};
use kvik_node::{AttachOptions, NodeClient, NodeError, NodeSession};
use kvik_store::Chain;
use kvik_types::{CacheSalt, TokenId};

use super::{ComingSegment, SegmentKind, SegmentPlace, copy_layer};
use crate::error::Result;
use crate::store::PanicGuard;
use crate::store::daemon_chunks::{copy_out, write_missing};
use crate::store::job::{Job, JobHandle};
use crate::store::loader::{Loader, Read};

/// The place of a model's segments in a daemon.
#[derive(Debug)]
pub(in crate::store) struct DaemonSegments {
    session: Arc<NodeSession>,
    loader: Loader<CopiedSegment>,
}

/// A segment that was copied out of the daemon's arena.
#[derive(Debug)]
struct CopiedSegment {
    n_tokens: usize,
    first_position: usize,
    n_layers: usize,
    /// Whole chunks, layer 0 first.
    payloads: Vec<Vec<u8>>,
}

impl DaemonSegments {
    /// Begins to attach, beside the sessions that `options` are of.
    ///
    /// # Errors
    /// If the operating system gives no thread.
    pub(in crate::store) fn start(
        options: &AttachOptions,
        kind: SegmentKind,
        panic_guard: PanicGuard,
    ) -> Result<Self> {
        let SegmentKind { namespace, format, first_position } = kind;
        let options = AttachOptions { namespace, format, is_for_segments: true, ..options.clone() };
        let session = Arc::new(NodeSession::start(options)?);
        let reading = Arc::clone(&session);
        let read = move |job: &Job<CopiedSegment>, chain: &Chain, _| {
            let copied =
                panic_guard.run(|| reading.run(|client| read(client, job, chain))).flatten().flatten();
            copied.map(|payloads| CopiedSegment::new(chain, payloads, first_position))
        };
        let read: Arc<Read<CopiedSegment>> = Arc::new(read);
        Ok(Self { session, loader: Loader::start("segments", &read)? })
    }
}

impl SegmentPlace for DaemonSegments {
    fn load(&self, tokens: &[TokenId], salt: Option<&CacheSalt>) -> Option<Box<dyn ComingSegment>> {
        let chain = self.session.space()?.salted_chain(tokens, salt);
        Some(Box::new(self.loader.begin(&chain, 0)?))
    }

    fn write(&self, segment: &ComputedSegment, salt: Option<&CacheSalt>) {
        // A segment that a daemon did not take is computed again when it is needed again.
        let _ = self.session.run(|client| write(client, segment, salt));
    }

    fn is_there(&self) -> bool {
        self.session.space().is_some()
    }

    fn close(&self) {
        self.session.end();
    }
}

impl ComingSegment for JobHandle<CopiedSegment> {
    fn is_done(&self) -> bool {
        JobHandle::is_done(self)
    }

    fn on_done(&self, callback: Box<dyn FnOnce() + Send>) {
        JobHandle::on_done(self, callback);
    }

    fn finish(self: Box<Self>) -> Option<Arc<dyn SegmentKv>> {
        self.take().map(|segment| Arc::new(segment) as Arc<dyn SegmentKv>)
    }
}

impl CopiedSegment {
    fn new(chain: &Chain, payloads: Vec<Vec<u8>>, first_position: usize) -> Self {
        let n_layers = chain.space().format().n_layers as usize;
        Self { n_tokens: chain.n_tokens(), first_position, n_layers, payloads }
    }
}

impl SegmentKv for CopiedSegment {
    fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    fn first_position(&self) -> usize {
        self.first_position
    }

    fn n_parts(&self) -> usize {
        self.payloads.len()
    }

    fn part(&self, layer_idx: usize, part_idx: usize) -> Option<SegmentPart<'_>> {
        let payload = self.payloads.get(part_idx)?;
        let section_bytes = payload.len().checked_div(self.n_layers)?;
        let section = payload.get(layer_idx * section_bytes..(layer_idx + 1) * section_bytes)?;
        let (keys, values) = section.split_at(section.len() / 2);
        (!keys.is_empty()).then_some(SegmentPart { keys, values })
    }
}

/// Copies the chunks of a segment out of the daemon's arena; `None` unless all are there.
fn read(
    client: &NodeClient,
    job: &Job<CopiedSegment>,
    chain: &Chain,
) -> Result<Option<Vec<Vec<u8>>>, NodeError> {
    let opened = client.open(chain)?;
    opened.note_request(None)?;
    if chain.n_chunks() == 0 || opened.n_found() < chain.n_chunks() {
        return Ok(None);
    }
    let lease = opened.retrieve(0)?;
    if lease.n_chunks() < chain.n_chunks() {
        return Ok(None);
    }
    copy_out(job, &lease)
}

/// Copies a segment into the daemon's arena, as far as there is room.
fn write(client: &NodeClient, segment: &ComputedSegment, salt: Option<&CacheSalt>) -> Result<(), NodeError> {
    let chain = client.space().salted_chain(&segment.tokens, salt);
    if chain.n_chunks() == 0 {
        return Ok(());
    }
    let opened = client.open(&chain)?;
    write_missing(&opened, &AtomicBool::new(false), |chunk_idx, payload| {
        let section_bytes = chain.section_bytes(chunk_idx);
        let tokens = chain.tokens_of(chunk_idx);
        for (layer, section) in segment.layers.iter().zip(payload.chunks_exact_mut(section_bytes.max(1))) {
            copy_layer(layer, &tokens, section);
        }
        true
    })
}
