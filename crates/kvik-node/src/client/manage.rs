//! A client that manages its tenant's chunks.

mod link;

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvik_memory::socket::Connection;
use kvik_proto::cache::CacheStats;
use kvik_store::{Chain, Lookup, Space, TierName};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fs::{MemfdFlags, memfd_create};

use self::link::{Failure, Link, gone, unexpected};
use super::{AttachOptions, connect};
use crate::error::{NodeError, Result};
use crate::frame::Purpose;
use crate::manage::{ManageAnswer, ManageRequest};

/// Time for the daemon to answer. Moving a long chain between slow tiers takes several times their own timeouts.
const CALL_TIMEOUT: Duration = Duration::from_mins(1);

/// Longest time that a call waits for a daemon that takes over.
const MOVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time between two attempts to attach while another daemon takes over.
const MOVE_INTERVAL: Duration = Duration::from_millis(5);

/// Asks a daemon for what people and tools do with a store; attaches when it is first asked, and again when the daemon was
/// gone and is back.
///
/// May be used from any thread; calls go one after the other. A call ends within a minute, and after one without an answer
/// the next one attaches again: whether it was done is not known then. While another daemon takes over, calls wait for
/// it, at most 5 s. Dropping it ends its prefetches; its pins stay.
#[derive(Debug)]
pub struct NodeManager {
    options: AttachOptions,
    timeout: Duration,
    state: Mutex<ManagerState>,
    /// That of the attachment, to end it while a call has the state.
    connection: Mutex<Weak<Connection>>,
    is_closed: AtomicBool,
    /// Waited on between two attempts to attach.
    retry: Condvar,
}

#[derive(Debug, Default)]
struct ManagerState {
    link: Option<Link>,
    /// Attachments so far: a prefetch belongs to one of them.
    n_links: u64,
}

/// A prefetch that a daemon does for a manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemotePrefetch {
    /// The attachment that it belongs to.
    link: u64,
    number: u64,
    /// Whether it still loaded when it was begun.
    pub is_loading: bool,
}

impl NodeManager {
    /// One that has not attached yet.
    pub fn new(options: AttachOptions) -> Self {
        Self {
            options,
            timeout: CALL_TIMEOUT,
            state: Mutex::default(),
            connection: Mutex::new(Weak::new()),
            is_closed: AtomicBool::new(false),
            retry: Condvar::new(),
        }
    }

    /// The same with another time for the daemon to answer a call.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Where chains are made for its calls.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn space(&self) -> Result<Space> {
        let mut state = self.state.lock();
        self.attach(&mut state, None)?;
        state.link.as_ref().map(|link| link.space.clone()).ok_or_else(gone)
    }

    /// How much of a chain is there; without remote tiers if `is_local`.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn lookup(&self, chain: &Chain, is_local: bool) -> Result<Lookup> {
        let request = ManageRequest::Lookup { n_tokens: chain.n_tokens() as u64, is_local };
        match self.ask_of(chain, &request)? {
            (ManageAnswer::Found(lookup), _) => Ok(lookup),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// Begins to load a chain into the daemon's memory, from one tier alone where one is named.
    ///
    /// # Errors
    /// If the daemon is gone, or has no such tier.
    pub fn prefetch(&self, chain: &Chain, tier: Option<&TierName>) -> Result<RemotePrefetch> {
        let request = ManageRequest::Prefetch { n_tokens: chain.n_tokens() as u64, tier: tier.cloned() };
        match self.ask_of(chain, &request)? {
            (ManageAnswer::Prefetch { number, is_loading }, link) => {
                Ok(RemotePrefetch { link, number, is_loading })
            }
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// Whether a prefetch still loads; `None` where its attachment has ended, which ended it too.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn is_loading(&self, prefetch: &RemotePrefetch) -> Result<Option<bool>> {
        self.ask_about(prefetch, &ManageRequest::IsLoading { prefetch: prefetch.number })
    }

    /// Ends a prefetch; says whether it still loaded, and `None` where its attachment has ended, which ended it too.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn cancel(&self, prefetch: &RemotePrefetch) -> Result<Option<bool>> {
        self.ask_about(prefetch, &ManageRequest::Cancel { prefetch: prefetch.number })
    }

    /// Keeps a chain in the daemon's memory until it is unpinned as often as it was pinned, by this client or another of the
    /// tenant; returns the tokens that are kept.
    ///
    /// # Errors
    /// If the daemon is gone, or the tenant has too many pins.
    pub fn pin(&self, chain: &Chain) -> Result<usize> {
        self.count(chain, &ManageRequest::Pin { n_tokens: chain.n_tokens() as u64 })
    }

    /// As [`pin`](Self::pin), for some time at most; a take-over by another daemon ends it too, as every pin.
    ///
    /// # Errors
    /// If the daemon is gone, or the tenant has too many pins.
    pub fn pin_for(&self, chain: &Chain, time: Duration) -> Result<usize> {
        let time_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.count(chain, &ManageRequest::PinFor { n_tokens: chain.n_tokens() as u64, time_ms })
    }

    /// Takes one pin away; false where there is none.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn unpin(&self, chain: &Chain) -> Result<bool> {
        match self.ask_of(chain, &ManageRequest::Unpin { n_tokens: chain.n_tokens() as u64 })? {
            (ManageAnswer::Is(was_pinned), _) => Ok(was_pinned),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// Copies or moves a chain to another tier; returns the chunks that are there.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn relocate(
        &self,
        chain: &Chain,
        from: impl Into<TierName>,
        to: impl Into<TierName>,
        keeps_source: bool,
    ) -> Result<usize> {
        let (n_tokens, from, to) = (chain.n_tokens() as u64, from.into(), to.into());
        self.count(chain, &ManageRequest::Relocate { n_tokens, from, to, keeps_source })
    }

    /// Forgets a chain, or all of the client's namespace, in some tiers or in all; returns how many chunks left each.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn clear(
        &self,
        chain: Option<&Chain>,
        tiers: Option<Vec<TierName>>,
    ) -> Result<Vec<(TierName, usize)>> {
        let n_tokens = chain.map(|chain| chain.n_tokens() as u64);
        match self.ask(chain, &ManageRequest::Clear { n_tokens, tiers })? {
            (ManageAnswer::Cleared(chunks), _) => Ok(chunks),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// What the store counted, and the state of its tiers.
    ///
    /// # Errors
    /// If the daemon is gone.
    pub fn stats(&self) -> Result<CacheStats> {
        match self.ask(None, &ManageRequest::Stats)? {
            (ManageAnswer::Stats(stats), _) => Ok(*stats),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// The bytes of a chain's chunks, from the first on, as far as one tier has them.
    ///
    /// # Errors
    /// If the daemon is gone or has no such tier, or if there is no memory for the bytes.
    pub fn read_from(&self, chain: &Chain, tier: &TierName) -> Result<Vec<Vec<u8>>> {
        let file = memory_file()?;
        let request = ManageRequest::Read { n_tokens: chain.n_tokens() as u64, tier: tier.clone() };
        let n_chunks = match self.ask_with(Some(chain), &request, Some(file.as_fd()))? {
            (ManageAnswer::Count(n_chunks), _) => n_chunks,
            (answer, _) => return Err(unexpected(&answer)),
        };
        let mut offset = 0;
        let read = |chunk_idx: usize| {
            let mut bytes = vec![0; chain.payload_bytes(chunk_idx)];
            file.read_exact_at(&mut bytes, offset).map_err(NodeError::io("read what the daemon wrote"))?;
            offset += bytes.len() as u64;
            Ok(bytes)
        };
        (0..chain.n_chunks().min(usize::try_from(n_chunks).unwrap_or(usize::MAX))).map(read).collect()
    }

    /// Stores the first chunks of a chain in one tier alone, up to the first that the tier refuses; `chunks` has the
    /// parts of each. Returns how many are new, and how many were there.
    ///
    /// # Errors
    /// If the daemon is gone, or there is no memory for the bytes.
    pub fn write_to(&self, chain: &Chain, chunks: &[Vec<&[u8]>], tier: &TierName) -> Result<(usize, usize)> {
        let mut file = memory_file()?;
        for part in chunks.iter().flatten() {
            file.write_all(part).map_err(NodeError::io("write to memory"))?;
        }
        let request = ManageRequest::Write { n_tokens: chain.n_tokens() as u64, tier: tier.clone() };
        match self.ask_with(Some(chain), &request, Some(file.as_fd()))? {
            (ManageAnswer::Written { n_stored, n_present }, _) => Ok((n_stored as usize, n_present as usize)),
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    /// Ends the attachment, and with it its prefetches; the call that runs fails, and every later one.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        if let Some(connection) = self.connection.lock().upgrade() {
            connection.close();
        }
    }

    fn count(&self, chain: &Chain, request: &ManageRequest) -> Result<usize> {
        match self.ask_of(chain, request)? {
            (ManageAnswer::Count(count), _) => {
                usize::try_from(count).map_err(|_| NodeError::invalid("count", &count, "that of a chain"))
            }
            (answer, _) => Err(unexpected(&answer)),
        }
    }

    fn ask_about(&self, prefetch: &RemotePrefetch, request: &ManageRequest) -> Result<Option<bool>> {
        let mut state = self.state.lock();
        if prefetch.link != state.n_links {
            return Ok(None);
        }
        let Some(link) = state.link.as_mut() else { return Ok(None) };
        match link.exchange(None, request, None, self.timeout) {
            Ok(ManageAnswer::Is(is_so)) => Ok(Some(is_so)),
            Ok(answer) => Err(unexpected(&answer)),
            // With the attachment its prefetches ended.
            Err(Failure::NotAsked(_)) => {
                state.link = None;
                Ok(None)
            }
            Err(Failure::Lost(error)) => {
                state.link = None;
                Err(error)
            }
        }
    }

    fn ask_of(&self, chain: &Chain, request: &ManageRequest) -> Result<(ManageAnswer, u64)> {
        self.ask(Some(chain), request)
    }

    /// Asks, of the daemon that is there; again where another one has taken over, or was started, before anything was done.
    fn ask(&self, chain: Option<&Chain>, request: &ManageRequest) -> Result<(ManageAnswer, u64)> {
        self.ask_with(chain, request, None)
    }

    /// As [`Self::ask`], with a file that goes with the request.
    fn ask_with(
        &self,
        chain: Option<&Chain>,
        request: &ManageRequest,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<(ManageAnswer, u64)> {
        let mut state = self.state.lock();
        // While it is set, attempts to attach go on until then.
        let mut moving_until: Option<Instant> = None;
        loop {
            self.attach(&mut state, moving_until)?;
            let Some(link) = state.link.as_mut() else { return Err(gone()) };
            match link.exchange(chain, request, file, self.timeout) {
                Ok(ManageAnswer::Refused { reason }) => return Err(NodeError::Refused { reason }),
                Ok(answer) => return Ok((answer, state.n_links)),
                Err(Failure::Lost(error)) => {
                    state.link = None;
                    return Err(error);
                }
                Err(Failure::NotAsked(error)) => {
                    state.link = None;
                    let until = *moving_until.get_or_insert(Instant::now() + MOVE_TIMEOUT);
                    if Instant::now() >= until {
                        return Err(error);
                    }
                    // A daemon that is simply gone is not waited for.
                    if !matches!(error, NodeError::Moving) {
                        moving_until = Some(Instant::now());
                    }
                }
            }
        }
    }

    /// Attaches where it is not; until a time where one is given, and else once.
    fn attach(&self, state: &mut MutexGuard<'_, ManagerState>, until: Option<Instant>) -> Result<()> {
        while state.link.is_none() {
            let attached = connect(&self.options, Purpose::Manage).and_then(|(connection, attached, _)| {
                let space = attached.space(&self.options.namespace, self.options.format)?;
                Ok(Link::new(connection, space))
            });
            match attached {
                Ok(link) => {
                    let mut connection = self.connection.lock();
                    // With the lock: what closes it afterwards finds the connection.
                    if self.is_closed.load(Ordering::Acquire) {
                        return Err(NodeError::Gone { reason: "the client is closed" });
                    }
                    *connection = Arc::downgrade(&link.connection);
                    state.link = Some(link);
                    state.n_links += 1;
                }
                Err(error) if until.is_none_or(|until| Instant::now() >= until) => return Err(error),
                Err(_) => drop(self.retry.wait_for(state, MOVE_INTERVAL)),
            }
        }
        Ok(())
    }
}

fn memory_file() -> Result<File> {
    let file = memfd_create("kvik-bytes", MemfdFlags::CLOEXEC);
    file.map(File::from).map_err(|errno| NodeError::io("make a memory file")(errno.into()))
}
