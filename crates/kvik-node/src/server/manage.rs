//! Serves a client that manages its tenant's chunks.

use std::collections::VecDeque;
use std::io::ErrorKind::{ConnectionReset, UnexpectedEof};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvik_memory::socket::{Connection, FrameBuffer, wait_ready};
use kvik_store::{Chain, Clear, Space, Store, TierName, TierWrite};
use kvik_tier::TokenDigest;
use kvik_types::{BlockHash, Namespace};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};

use super::Counters;
use super::client_file::ClientFile;
use super::control::SessionControl;
use super::records::Auditor;
use crate::error::{NodeError, Result};
use crate::manage::{MAX_PINS, ManageAnswer, ManageRequest};
use crate::operation::MAX_CHAIN_CHUNKS;
use crate::prefetch::HeldPrefetch;
use crate::report::cache_stats;

/// Prefetches of a connection that are remembered; the oldest are forgotten, and with that cancelled.
const MAX_PREFETCHES: usize = 1024;

const NO_SUCH_TIER: &str = "the store has no tier of that name";

/// The longest text that says why a tier is not up; what a server said may be in it.
const MAX_REASON_BYTES: usize = 512;

/// Time for a client to take an answer.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// How long it sleeps at most: what wakes it otherwise is a request, or the control.
const LONGEST_SLEEP: Duration = Duration::from_mins(1);

/// What a managing client may see, and what it has begun.
#[derive(Debug)]
pub(super) struct Management<'a> {
    store: &'a Store,
    space: &'a Space,
    /// That of the space, with the tenant.
    namespace: Namespace,
    rank: u16,
    auditor: &'a Auditor,
    /// The chunks of the chain that the next request is about.
    chunks: Vec<(BlockHash, TokenDigest)>,
    /// In the order in which they were begun.
    prefetches: VecDeque<(u64, Arc<HeldPrefetch>)>,
    n_prefetches: u64,
}

/// Answers a client until it or the daemon ends, or another daemon takes over. What its prefetches hold is given back then.
///
/// # Errors
/// If the client sends what is no request, or does not read its answers.
pub(super) fn run(
    mut management: Management<'_>,
    connection: &Connection,
    control: &SessionControl,
    counters: &Counters,
) -> Result<()> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let event = eventfd(0, flags).map_err(|errno| NodeError::io("make an event")(errno.into()))?;
    let event = Arc::new(event);
    let waking = Arc::clone(&event);
    control.woken_by(move || {
        // It can only fail when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&*waking, &1_u64.to_le_bytes());
    });
    let mut buffer = FrameBuffer::new();
    while !control.is_ended() {
        if control.is_moving() {
            // Before the word: a client that has it may attach to the other daemon, which needs the memory.
            management.prefetches.clear();
            return send(connection, &ManageAnswer::Moving);
        }
        let received = match connection.receive_with_descriptors(&mut buffer) {
            // It is gone.
            Err(error) if matches!(error.kind(), UnexpectedEof | ConnectionReset) => return Ok(()),
            received => received.map_err(NodeError::io("read the request of a client"))?,
        };
        let Some((frame, descriptors)) = received else {
            let mut descriptors = [
                PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN),
                PollFd::new(&*event, PollFlags::IN),
            ];
            let deadline = Instant::now() + LONGEST_SLEEP;
            wait_ready(&mut descriptors, Some(deadline)).map_err(NodeError::io("wait for a client"))?;
            let mut count = [0; 8];
            // Nothing to read is as good: there was no wake-up then.
            let _ = rustix::io::read(&*event, &mut count);
            continue;
        };
        let request = ManageRequest::decode(frame)?;
        counters.requests.fetch_add(1, Ordering::Relaxed);
        control.set_n_held(1 + management.n_loading());
        let answer = management.serve(request, descriptors.into_iter().next())?;
        control.set_n_held(management.n_loading());
        send(connection, &answer)?;
    }
    Ok(())
}

impl<'a> Management<'a> {
    /// That of a client that has asked for nothing yet.
    pub(super) fn new(
        store: &'a Store,
        space: &'a Space,
        namespace: Namespace,
        rank: u16,
        auditor: &'a Auditor,
    ) -> Self {
        let (chunks, prefetches) = (Vec::new(), VecDeque::new());
        Self { store, space, namespace, rank, auditor, chunks, prefetches, n_prefetches: 0 }
    }

    /// Does what is asked.
    ///
    /// # Errors
    /// If it cannot be meant.
    fn serve(&mut self, request: ManageRequest, file: Option<OwnedFd>) -> Result<ManageAnswer> {
        Ok(match request {
            ManageRequest::Chunks(chunks) => {
                let n_chunks = self.chunks.len() + chunks.len();
                if n_chunks > MAX_CHAIN_CHUNKS {
                    let allowed = format!("at most {MAX_CHAIN_CHUNKS}");
                    return Err(NodeError::invalid("chunks of a chain", &n_chunks, allowed));
                }
                self.chunks.extend(chunks);
                ManageAnswer::Done
            }
            ManageRequest::Lookup { n_tokens, is_local } => {
                let chain = self.chain(n_tokens)?;
                let store = self.store;
                ManageAnswer::Found(if is_local { store.lookup_local(&chain) } else { store.lookup(&chain) })
            }
            ManageRequest::Prefetch { n_tokens, tier } => {
                let chain = self.chain(n_tokens)?;
                self.prefetch(&chain, tier.as_ref())
            }
            ManageRequest::IsLoading { prefetch } => {
                ManageAnswer::Is(self.find(prefetch).is_some_and(HeldPrefetch::is_loading))
            }
            ManageRequest::Cancel { prefetch } => {
                ManageAnswer::Is(self.find(prefetch).is_some_and(HeldPrefetch::cancel))
            }
            ManageRequest::Pin { n_tokens } => {
                let chain = self.chain(n_tokens)?;
                self.pin(&chain, None)
            }
            ManageRequest::PinFor { n_tokens, time_ms } => {
                let chain = self.chain(n_tokens)?;
                self.pin(&chain, Some(Duration::from_millis(time_ms)))
            }
            ManageRequest::Unpin { n_tokens } => {
                let chain = self.chain(n_tokens)?;
                let was_pinned = self.store.unpin(&chain);
                let n_chunks = if was_pinned { chain.n_chunks() } else { 0 };
                let outcome = if was_pinned { "done" } else { "not_pinned" };
                self.auditor.managed("unpin", &chain, n_chunks, outcome);
                ManageAnswer::Is(was_pinned)
            }
            ManageRequest::Relocate { n_tokens, from, to, keeps_source } => {
                let chain = self.chain(n_tokens)?;
                let n_chunks = self.store.relocate(&chain, from.clone(), to.clone(), keeps_source);
                let verb = if keeps_source { "copied" } else { "moved" };
                self.auditor.managed("move", &chain, n_chunks, &format!("{verb} from {from} to {to}"));
                ManageAnswer::Count(n_chunks as u64)
            }
            ManageRequest::Clear { n_tokens, tiers } => {
                let chain = n_tokens.map(|n_tokens| self.chain(n_tokens)).transpose()?;
                self.clear(chain.as_ref(), tiers)
            }
            ManageRequest::Stats => self.stats(),
            ManageRequest::Read { n_tokens, tier } => {
                let chain = self.chain(n_tokens)?;
                self.read_from(&chain, &tier, &ClientFile::try_new(file)?)
            }
            ManageRequest::Write { n_tokens, tier } => {
                let chain = self.chain(n_tokens)?;
                self.write_to(&chain, &tier, &ClientFile::try_new(file)?)
            }
        })
    }

    /// The chain of the chunks that were sent, which are then forgotten.
    fn chain(&mut self, n_tokens: u64) -> Result<Chain> {
        let (names, digests): (Vec<BlockHash>, Vec<TokenDigest>) =
            std::mem::take(&mut self.chunks).into_iter().unzip();
        let n_chunks = names.len();
        let named =
            usize::try_from(n_tokens).ok().and_then(|n_tokens| self.space.named_chain(names, n_tokens));
        let proven = named.and_then(|named| named.proven(digests));
        proven.ok_or_else(|| NodeError::invalid("n_tokens", &n_tokens, format!("those of {n_chunks} chunks")))
    }

    fn prefetch(&mut self, chain: &Chain, tier: Option<&TierName>) -> ManageAnswer {
        let begun = match tier {
            None => Some(self.store.prefetch(chain, 0)),
            Some(tier) => self.store.prefetch_from(chain, 0, tier),
        };
        let Some(prefetch) = begun else {
            self.auditor.managed("prefetch", chain, 0, "no_such_tier");
            return ManageAnswer::Refused { reason: NO_SUCH_TIER.to_owned() };
        };
        let held = HeldPrefetch::hold(prefetch);
        let is_loading = held.is_loading();
        let number = self.n_prefetches;
        self.n_prefetches += 1;
        if self.prefetches.len() == MAX_PREFETCHES {
            self.prefetches.pop_front();
        }
        self.prefetches.push_back((number, held));
        let outcome = tier.map_or_else(|| "begun".to_owned(), |tier| format!("begun from {tier}"));
        self.auditor.managed("prefetch", chain, chain.n_chunks(), &outcome);
        ManageAnswer::Prefetch { number, is_loading }
    }

    fn find(&self, number: u64) -> Option<&HeldPrefetch> {
        self.prefetches.iter().find(|(other, _)| *other == number).map(|(_, held)| &**held)
    }

    fn n_loading(&self) -> usize {
        self.prefetches.iter().filter(|(_, held)| held.is_loading()).count()
    }

    fn pin(&self, chain: &Chain, time: Option<Duration>) -> ManageAnswer {
        if self.store.n_pins() >= MAX_PINS {
            self.auditor.managed("pin", chain, 0, "too_many");
            return ManageAnswer::Refused { reason: format!("a tenant has at most {MAX_PINS} pins") };
        }
        let n_tokens = match time {
            Some(time) => self.store.pin_for(chain, time),
            None => self.store.pin(chain),
        };
        let n_chunks = n_tokens.div_ceil(self.space.chunk_tokens());
        let outcome = if n_chunks < chain.n_chunks() { "truncated" } else { "done" };
        self.auditor.managed("pin", chain, n_chunks, outcome);
        ManageAnswer::Count(n_tokens as u64)
    }

    fn clear(&self, chain: Option<&Chain>, tiers: Option<Vec<TierName>>) -> ManageAnswer {
        let namespace = chain.is_none().then(|| self.namespace.clone());
        let cleared = self.store.clear(&Clear { namespace, chain: chain.cloned(), tiers });
        let n_chunks = cleared.chunks.iter().map(|(_, n_chunks)| *n_chunks).max().unwrap_or(0);
        match chain {
            Some(chain) => self.auditor.managed("clear", chain, n_chunks, "done"),
            None => self.auditor.cleared_namespace(n_chunks),
        }
        ManageAnswer::Cleared(cleared.chunks)
    }

    fn read_from(&self, chain: &Chain, tier: &TierName, file: &ClientFile) -> ManageAnswer {
        let Some(retrieved) = self.store.retrieve_from(chain, 0, tier) else {
            self.auditor.managed("read", chain, 0, "no_such_tier");
            return ManageAnswer::Refused { reason: NO_SUCH_TIER.to_owned() };
        };
        let payloads = retrieved.chunks().iter().map(|chunk| chunk.payload(self.rank));
        let n_chunks = file.write_all(payloads);
        self.auditor.managed("read", chain, n_chunks, &format!("from {tier}"));
        ManageAnswer::Count(n_chunks as u64)
    }

    fn write_to(&self, chain: &Chain, tier: &TierName, file: &ClientFile) -> ManageAnswer {
        let (mut n_stored, mut n_present, mut offset) = (0, 0, 0);
        for chunk_idx in 0..chain.n_chunks() {
            // Read before memory is taken: a chunk that is not whole is never stored.
            let Some(payload) = file.read(offset, chain.payload_bytes(chunk_idx)) else { break };
            offset += payload.len() as u64;
            let fill = |memory: &mut [u8]| memory.copy_from_slice(&payload);
            match self.store.write_to(chain, chunk_idx, self.rank, tier, fill) {
                TierWrite::Stored => n_stored += 1,
                TierWrite::Present => n_present += 1,
                TierWrite::Refused => break,
            }
        }
        let n_chunks = (n_stored + n_present) as usize;
        self.auditor.managed("store", chain, n_chunks, &format!("to {tier}"));
        ManageAnswer::Written { n_stored, n_present }
    }

    fn stats(&self) -> ManageAnswer {
        let mut stats = cache_stats(self.store);
        for reason in stats.tiers.iter_mut().filter_map(|tier| tier.reason.as_mut()) {
            reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
        }
        ManageAnswer::Stats(Box::new(stats))
    }
}

fn send(connection: &Connection, answer: &ManageAnswer) -> Result<()> {
    let frame = answer.encode();
    let deadline = Instant::now() + SEND_TIMEOUT;
    while !connection.send(&frame).map_err(NodeError::io("answer a client"))? {
        let mut descriptors = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::OUT)];
        if !wait_ready(&mut descriptors, Some(deadline)).map_err(NodeError::io("wait for a client"))? {
            return Err(NodeError::Gone { reason: "the client does not read" });
        }
    }
    Ok(())
}
