//! The leader's side: takes maps and unmaps to all ranks of the group in two phases.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::exchange::{Conclusion, Script};
use self::remote::Remote;
use super::frame::{Kind, Reply, Status, is_aligned};
use super::participant::{Identity, Participant};
use super::worker::new_life;
use crate::geometry::{Extent, Geometry};
use crate::pages::{MapOutcome, PageMapper};
use crate::socket::{FrameBuffer, Owner, SocketAddress};
use crate::{MemoryError, Result};

mod exchange;
mod remote;

/// A rank in another process.
#[derive(Debug, Clone)]
pub struct RankPeer {
    /// Which rank it is.
    pub rank: u32,
    /// Where its worker listens.
    pub address: SocketAddress,
    /// The shape of its region. Stages of a pipeline may have other numbers of layers and so of
    /// buffers; the number of pages is the same on all ranks.
    pub geometry: Geometry,
}

/// How a leader treats its ranks.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RankLeaderOptions {
    /// The group of caches; 0 unless the processes have several regions.
    pub group: u32,
    /// How long the ranks may take for a transaction, and again for undoing it; 60 s unless set.
    pub timeout: Duration,
}

/// Maps and unmaps extents on all ranks of a group, or on none.
///
/// The calls of several threads are taken one after the other. A rank that is in the leader's process is
/// called directly, while the others work.
#[derive(Debug)]
pub struct RankMapper {
    geometry: Geometry,
    owner: Owner,
    ranks: Mutex<Ranks>,
}

/// All ranks and the transaction at hand.
#[derive(Debug)]
struct Ranks {
    options: RankLeaderOptions,
    local: Option<(u32, Participant)>,
    remotes: Vec<Remote>,
    latest_transaction: u64,
    buffer: FrameBuffer,
}

/// What a failed phase means for the transaction.
#[derive(Debug, Default)]
struct Damage {
    error: Option<MemoryError>,
    has_no_memory: bool,
    /// By first page; of the extents of one transaction no two have the same.
    stuck: HashSet<u32>,
    /// Some rank may hold any of the extents.
    is_all_stuck: bool,
}

impl Default for RankLeaderOptions {
    fn default() -> Self {
        Self { group: 0, timeout: Duration::from_mins(1) }
    }
}

// === impl RankMapper ===

impl RankMapper {
    /// Connects to all ranks, waiting for those that have not started yet.
    ///
    /// `local` is the rank in this process, if one is; `peers` are all others. Each rank unmaps what a
    /// former leader left. Fails with [`MemoryError::Invalid`] where the ranks are not numbered from 0
    /// on or have different numbers of pages, and with [`MemoryError::Rank`] where one cannot be
    /// reached in time, is another user's, or is not what was expected.
    pub fn connect(
        local: Option<(u32, Arc<dyn PageMapper>)>,
        peers: Vec<RankPeer>,
        options: RankLeaderOptions,
    ) -> Result<Self> {
        let geometry = check_group(local.as_ref(), &peers)?;
        let world = (peers.len() + usize::from(local.is_some())) as u32;
        let generation = new_life();
        let deadline = deadline_after(options.timeout);
        let mut buffer = FrameBuffer::new();
        let mut remotes = Vec::with_capacity(peers.len());
        for peer in peers {
            remotes.push(Remote::connect(peer, world, options.group, generation, deadline, &mut buffer)?);
        }
        let local = local.map(|(rank, mapper)| {
            let identity = Identity { rank, world, group: options.group };
            (rank, Participant::new(identity, mapper))
        });
        let ranks = Ranks { options, local, remotes, latest_transaction: 0, buffer };
        Ok(Self { geometry, owner: Owner::this_process(), ranks: Mutex::new(ranks) })
    }
}

impl PageMapper for RankMapper {
    /// The shape of the local rank's region, or of the first peer's.
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn map(&self, extents: &[Extent]) -> MapOutcome {
        if extents.is_empty() {
            return MapOutcome::Mapped;
        }
        // A child's frames would mix with its parent's on the same connection.
        if !self.owner.is_this_process() {
            return MapOutcome::Failed { error: MemoryError::Forked, stuck: Vec::new() };
        }
        if let Some(extent) = extents.iter().find(|extent| !is_aligned(**extent)) {
            let value = format!("{} pages at {}", extent.n_pages, extent.first_page);
            let error = invalid("extent", &value, "1, 2, 4 .. 32 pages, aligned".to_owned());
            return MapOutcome::Failed { error, stuck: Vec::new() };
        }
        self.ranks.lock().map(extents)
    }

    fn unmap(&self, extents: &[Extent]) -> Vec<Extent> {
        if extents.is_empty() {
            return Vec::new();
        }
        if !self.owner.is_this_process() || !extents.iter().all(|extent| is_aligned(*extent)) {
            return extents.to_vec();
        }
        self.ranks.lock().unmap(extents)
    }
}

// === impl Ranks ===

impl Ranks {
    fn map(&mut self, extents: &[Extent]) -> MapOutcome {
        let deadline = deadline_after(self.options.timeout);
        if let Err(error) = self.resume_lost(deadline) {
            return MapOutcome::Failed { error, stuck: Vec::new() };
        }
        let script = self.begin(Kind::Map, extents);
        let mut damage = Damage::default();
        let prepared = self.run(script.prepares(), 0, deadline);
        damage.add(prepared);
        if damage.is_none() {
            let committed = self.run(script.all(), script.prepares().len(), deadline);
            damage.add(committed);
        }
        if damage.is_none() {
            return MapOutcome::Mapped;
        }
        self.note_unresolved(script.transaction());
        let abort = [script.abort()];
        let aborted = self.run(&abort, 0, deadline_after(self.options.timeout));
        self.note_unresolved(script.transaction());
        damage.add_undo(aborted);
        damage.into_outcome(extents)
    }

    fn unmap(&mut self, extents: &[Extent]) -> Vec<Extent> {
        let deadline = deadline_after(self.options.timeout);
        if let Err(error) = self.resume_lost(deadline) {
            tracing::warn!(%error, n_extents = extents.len(), "could not unmap: a rank is lost");
            return extents.to_vec();
        }
        let script = self.begin(Kind::Unmap, extents);
        let mut damage = Damage::default();
        let prepared = self.run(script.prepares(), 0, deadline);
        damage.add(prepared);
        if damage.is_none() {
            let committed = self.run(script.all(), script.prepares().len(), deadline);
            damage.add_undo(committed);
        } else {
            let abort = [script.abort()];
            // A rank that does not get it drops the transaction with the connection.
            self.run(&abort, 0, deadline_after(self.options.timeout));
            damage.is_all_stuck = true;
        }
        damage.into_left(extents)
    }

    fn begin(&mut self, kind: Kind, extents: &[Extent]) -> Script {
        self.latest_transaction += 1;
        Script::new(kind, self.latest_transaction, self.options.group, extents)
    }

    /// Connects again to ranks that were lost in former transactions; nothing is sent before all are there.
    fn resume_lost(&mut self, deadline: Instant) -> Result<()> {
        for remote in &mut self.remotes {
            if !remote.is_connected() {
                remote
                    .resume(deadline, &mut self.buffer)
                    .map_err(|reason| MemoryError::Rank { rank: remote.rank(), reason })?;
            }
        }
        Ok(())
    }

    /// A rank that is lost now gets the order to undo the transaction when it is found again.
    fn note_unresolved(&mut self, transaction: u64) {
        for remote in self.remotes.iter_mut().filter(|remote| !remote.is_connected()) {
            remote.set_unresolved(transaction);
        }
    }

    fn run(&mut self, script: &[exchange::Frame], start: usize, deadline: Instant) -> Vec<Conclusion> {
        exchange::run(&mut self.remotes, self.local.as_mut(), script, start, deadline, &mut self.buffer)
    }
}

// === impl Damage ===

impl Damage {
    fn is_none(&self) -> bool {
        self.error.is_none() && !self.has_no_memory
    }

    /// Adds what ranks said to a prepare or to the commit of a map: an undo follows.
    fn add(&mut self, conclusions: Vec<Conclusion>) {
        for conclusion in conclusions {
            match conclusion {
                Conclusion::Answered(_, reply) if reply.status == Status::Done => {}
                Conclusion::Answered(_, reply) if reply.status == Status::NoMemory => {
                    self.has_no_memory = true;
                }
                Conclusion::Answered(rank, reply) => self.add_reply(rank, reply),
                Conclusion::Unreached { rank, reason } => self.set_error(rank, reason),
                Conclusion::Lost { rank, reason } => {
                    self.is_all_stuck = true;
                    self.set_error(rank, reason);
                }
            }
        }
    }

    /// Adds what ranks said to an undo or to the commit of an unmap: whatever is not done stays.
    fn add_undo(&mut self, conclusions: Vec<Conclusion>) {
        for conclusion in conclusions {
            match conclusion {
                Conclusion::Answered(_, reply) if reply.status == Status::Done => {}
                Conclusion::Answered(rank, reply) => {
                    self.is_all_stuck |= reply.status != Status::Failed;
                    self.add_reply(rank, reply);
                }
                Conclusion::Unreached { rank, reason } | Conclusion::Lost { rank, reason } => {
                    self.is_all_stuck = true;
                    self.set_error(rank, reason);
                }
            }
        }
    }

    fn add_reply(&mut self, rank: u32, reply: Reply) {
        self.is_all_stuck |= reply.whole;
        self.stuck.extend(reply.extents.iter().map(|extent| extent.first_page.0));
        self.set_error(rank, reply.detail);
    }

    /// Keeps the first error, which is the cause of the others most likely.
    fn set_error(&mut self, rank: u32, reason: String) {
        if self.error.is_none() {
            self.error = Some(MemoryError::Rank { rank, reason });
        }
    }

    fn stuck_of(&self, extents: &[Extent]) -> Vec<Extent> {
        let is_stuck = |extent: &&Extent| self.is_all_stuck || self.stuck.contains(&extent.first_page.0);
        extents.iter().filter(is_stuck).copied().collect()
    }

    fn into_outcome(self, extents: &[Extent]) -> MapOutcome {
        let stuck = self.stuck_of(extents);
        match self.error {
            Some(error) => MapOutcome::Failed { error, stuck },
            None => MapOutcome::NoMemory,
        }
    }

    fn into_left(self, extents: &[Extent]) -> Vec<Extent> {
        let left = self.stuck_of(extents);
        if let Some(error) = self.error {
            tracing::warn!(%error, n_extents = extents.len(), n_left = left.len(), "could not unmap");
        }
        left
    }
}

/// The end of a timeout that starts now; one beyond the clock's range is a year.
fn deadline_after(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + Duration::from_hours(365 * 24))
}

/// Checks that the ranks are 0 to world - 1 with the same pages, and gives the leader's geometry.
fn check_group(local: Option<&(u32, Arc<dyn PageMapper>)>, peers: &[RankPeer]) -> Result<Geometry> {
    let local = local.map(|(rank, mapper)| (*rank, *mapper.geometry()));
    let members: Vec<(u32, Geometry)> =
        local.into_iter().chain(peers.iter().map(|peer| (peer.rank, peer.geometry))).collect();
    let Some(&(_, geometry)) = members.first() else {
        return Err(invalid("ranks", "none", "1 or more".to_owned()));
    };
    let mut ranks: Vec<u32> = members.iter().map(|&(rank, _)| rank).collect();
    ranks.sort_unstable();
    if ranks.iter().enumerate().any(|(expected, &rank)| expected != rank as usize) {
        return Err(invalid("ranks", &format!("{ranks:?}"), format!("0 to {}, each once", ranks.len() - 1)));
    }
    for (rank, other) in members {
        if other.capacity_pages() != geometry.capacity_pages() {
            let value = format!("{} on rank {rank}", other.capacity_pages());
            return Err(invalid(
                "capacity_pages",
                &value,
                format!("{} on all ranks", geometry.capacity_pages()),
            ));
        }
    }
    Ok(geometry)
}

fn invalid(field: &'static str, value: &str, allowed: String) -> MemoryError {
    MemoryError::Invalid { field, value: value.to_owned(), allowed }
}
