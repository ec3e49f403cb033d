//! A rank's side of the transactions: a state machine over a mapper, without sockets.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::frame::{Body, Greeting, Kind, Reply, Request, Status};
use crate::geometry::{Extent, PageId};
use crate::pages::{MapOutcome, PageMapper};

/// How many finished transactions can be repeated.
///
/// A leader has one transaction at a time and repeats only that; more are kept for [`Body::Status`].
const MAX_FINISHED: usize = 64;

/// One rank of a group: its mapper, and what its leader has done with it.
#[derive(Debug)]
pub(super) struct Participant {
    identity: Identity,
    mapper: Arc<dyn PageMapper>,
    generation: Option<u64>,
    mapped: ExtentSet,
    /// In an unknown state since an undo or unmap failed; never touched again.
    stuck: ExtentSet,
    open: Option<OpenTransaction>,
    /// The latest transaction if it is a committed map: its leader may find that another rank failed.
    undoable: Option<(u64, Vec<Extent>)>,
    finished: VecDeque<FinishedTransaction>,
}

/// Which rank of which group this is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Identity {
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) group: u32,
}

/// What came of a request, without its addressing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) status: Status,
    pub(super) extents: Vec<Extent>,
    pub(super) detail: String,
}

#[derive(Debug)]
struct OpenTransaction {
    transaction: u64,
    kind: Kind,
    parts: Vec<Vec<Extent>>,
    claimed: ExtentSet,
    /// The answer of the part that failed; there is none after it.
    failure: Option<Answer>,
}

#[derive(Debug)]
struct FinishedTransaction {
    transaction: u64,
    kind: Kind,
    is_committed: bool,
    answer: Answer,
}

/// Extents that do not overlap.
#[derive(Debug, Default)]
struct ExtentSet {
    n_pages_by_first: BTreeMap<u32, u32>,
}

// === impl Participant ===

impl Participant {
    /// A rank that has nothing mapped yet.
    pub(super) fn new(identity: Identity, mapper: Arc<dyn PageMapper>) -> Self {
        Self {
            identity,
            mapper,
            generation: None,
            mapped: ExtentSet::default(),
            stuck: ExtentSet::default(),
            open: None,
            undoable: None,
            finished: VecDeque::with_capacity(MAX_FINISHED),
        }
    }

    /// Does what a request asks, once, or says again what came of it.
    pub(super) fn handle(&mut self, request: &Request, instance: u64) -> Reply {
        let answer = if request.group == self.identity.group {
            self.answer(request, instance)
        } else {
            Answer::refused(format!(
                "the request is for group {}, and this rank serves group {}",
                request.group, self.identity.group
            ))
        };
        answer.into_reply(request, instance)
    }

    /// Undoes what is prepared and not committed: the leader is gone, or will repeat it from the start.
    pub(super) fn roll_back(&mut self) {
        let Some(open) = self.open.take() else {
            return;
        };
        let (transaction, kind) = (open.transaction, open.kind);
        let answer = self.undo(open);
        tracing::info!(transaction, n_stuck = answer.extents.len(), "rolled back a prepared transaction");
        // One without a trace is forgotten, so that its leader can repeat it.
        if answer.status != Status::Done {
            self.finish(transaction, kind, false, answer);
        }
    }

    fn answer(&mut self, request: &Request, instance: u64) -> Answer {
        let transaction = request.transaction;
        match &request.body {
            Body::Hello(greeting) => self.greet(greeting, instance),
            Body::Prepare { kind, part, extents } => self.prepare(transaction, *kind, *part, extents),
            Body::Commit(kind) => self.commit(transaction, *kind),
            Body::Abort(kind) => self.abort(transaction, *kind),
            Body::Status => self.status(transaction),
        }
    }

    fn greet(&mut self, greeting: &Greeting, instance: u64) -> Answer {
        let Identity { rank, world, .. } = self.identity;
        if (greeting.rank, greeting.world) != (rank, world) {
            return Answer::refused(format!(
                "the leader expects rank {} of {}, and this is rank {rank} of {world}",
                greeting.rank, greeting.world
            ));
        }
        let geometry = self.mapper.geometry();
        if greeting.geometry != *geometry {
            return Answer::refused(format!(
                "the leader expects {:?}, and this rank has {geometry:?}",
                greeting.geometry
            ));
        }
        if greeting.resumed_instance == 0 {
            return self.begin(greeting.generation);
        }
        if greeting.resumed_instance != instance {
            return Answer::refused(
                "this rank was started anew: the pages that the leader had here are gone",
            );
        }
        if self.generation != Some(greeting.generation) {
            return Answer::refused("another leader has taken this rank over");
        }
        Answer::done()
    }

    /// Starts with nothing mapped under a new leader.
    fn begin(&mut self, generation: u64) -> Answer {
        self.roll_back();
        let left_behind = self.mapped.take_all();
        self.unmap(&left_behind);
        self.finished.clear();
        self.undoable = None;
        // Of these the new leader could not know, and would map over them.
        if !self.stuck.is_empty() {
            self.generation = None;
            return Answer::refused(format!(
                "{} extents of a former leader could not be unmapped: start this rank anew",
                self.stuck.n_pages_by_first.len()
            ));
        }
        self.generation = Some(generation);
        Answer::done()
    }

    fn prepare(&mut self, transaction: u64, kind: Kind, part: u32, extents: &[Extent]) -> Answer {
        if let Some(finished) = self.finished(transaction) {
            return if finished.is_committed && finished.kind == kind {
                Answer::done()
            } else {
                Answer::refused("the transaction is over")
            };
        }
        let mut open = match self.open.take() {
            None => {
                if self.finished.back().is_some_and(|latest| transaction < latest.transaction) {
                    return Answer::refused("the transaction is older than the latest");
                }
                OpenTransaction::new(transaction, kind)
            }
            Some(open) if (open.transaction, open.kind) == (transaction, kind) => open,
            Some(open) => {
                let answer = Answer::refused(format!("transaction {} is not over", open.transaction));
                self.open = Some(open);
                return answer;
            }
        };
        let answer = self.prepare_part(&mut open, part as usize, extents);
        // One that was refused from the start has left nothing to abort.
        if !open.parts.is_empty() || open.failure.is_some() {
            self.open = Some(open);
        }
        answer
    }

    fn prepare_part(&mut self, open: &mut OpenTransaction, part: usize, extents: &[Extent]) -> Answer {
        if let Some(repeated) = open.parts.get(part) {
            return if repeated == extents {
                Answer::done()
            } else {
                Answer::refused("this part was prepared with other extents")
            };
        }
        if let Some(failure) = &open.failure {
            return failure.clone();
        }
        if part != open.parts.len() {
            return Answer::refused(format!("part {} is missing", open.parts.len()));
        }
        let mut claimed = ExtentSet::default();
        for &extent in extents {
            if let Err(reason) = self.check(open, extent) {
                return Answer::refused(format!(
                    "{} pages at {}: {reason}",
                    extent.n_pages, extent.first_page
                ));
            }
            if !claimed.insert(extent) {
                return Answer::refused(format!("page {} is listed twice", extent.first_page));
            }
        }
        if open.kind == Kind::Map {
            self.undoable = None;
            match self.mapper.map(extents) {
                MapOutcome::Mapped => {}
                MapOutcome::NoMemory => {
                    let answer =
                        Answer { status: Status::NoMemory, extents: Vec::new(), detail: String::new() };
                    open.failure = Some(answer.clone());
                    return answer;
                }
                MapOutcome::Failed { error, stuck } => {
                    for &extent in &stuck {
                        self.stuck.insert(extent);
                    }
                    let answer = Answer { status: Status::Failed, extents: stuck, detail: error.to_string() };
                    open.failure = Some(answer.clone());
                    return answer;
                }
            }
        }
        for &extent in extents {
            open.claimed.insert(extent);
        }
        open.parts.push(extents.to_vec());
        Answer::done()
    }

    fn check(&self, open: &OpenTransaction, extent: Extent) -> Result<(), &'static str> {
        let capacity_pages = self.mapper.geometry().capacity_pages();
        match open.kind {
            _ if open.claimed.overlaps(extent) => Err("listed twice in the transaction"),
            Kind::Unmap if !self.mapped.contains(extent) => Err("not mapped as one extent"),
            Kind::Map if end_page(extent) > u64::from(capacity_pages) => Err("beyond the reservation"),
            Kind::Map if self.mapped.overlaps(extent) => Err("mapped already"),
            Kind::Map if self.stuck.overlaps(extent) => Err("in an unknown state since a call failed"),
            Kind::Map | Kind::Unmap => Ok(()),
        }
    }

    fn commit(&mut self, transaction: u64, kind: Kind) -> Answer {
        if let Some(finished) = self.finished(transaction) {
            return if finished.is_committed && finished.kind == kind {
                finished.answer.clone()
            } else {
                Answer::refused("the transaction was aborted")
            };
        }
        let is_ready = |open: &mut OpenTransaction| {
            (open.transaction, open.kind) == (transaction, kind) && open.failure.is_none()
        };
        let Some(open) = self.open.take_if(is_ready) else {
            return Answer::refused("the transaction is not prepared");
        };
        let extents = open.parts.concat();
        let answer = match kind {
            Kind::Map => {
                for &extent in &extents {
                    self.mapped.insert(extent);
                }
                self.undoable = Some((transaction, extents));
                Answer::done()
            }
            Kind::Unmap => {
                self.undoable = None;
                for &extent in &extents {
                    self.mapped.remove(extent);
                }
                Answer::left(self.unmap(&extents))
            }
        };
        self.finish(transaction, kind, true, answer.clone());
        answer
    }

    fn abort(&mut self, transaction: u64, kind: Kind) -> Answer {
        if let Some(open) = self.open.take_if(|open| (open.transaction, open.kind) == (transaction, kind)) {
            let answer = self.undo(open);
            self.finish(transaction, kind, false, answer.clone());
            return answer;
        }
        match self.finished(transaction) {
            // Never begun, or forgotten when a connection ended: there is nothing of it.
            None => Answer::done(),
            Some(finished) if finished.kind != kind => {
                Answer::refused("the transaction is of the other kind")
            }
            Some(finished) if !finished.is_committed => finished.answer.clone(),
            Some(_) => {
                let Some((_, extents)) = self.undoable.take_if(|(undoable, _)| *undoable == transaction)
                else {
                    return Answer::refused("the transaction was committed");
                };
                for &extent in &extents {
                    self.mapped.remove(extent);
                }
                let answer = Answer::left(self.unmap(&extents));
                self.finished.retain(|finished| finished.transaction != transaction);
                self.finish(transaction, kind, false, answer.clone());
                answer
            }
        }
    }

    fn status(&self, transaction: u64) -> Answer {
        let status = match self.finished(transaction) {
            Some(finished) if finished.is_committed => Status::Committed,
            Some(_) => Status::Aborted,
            None if self.open.as_ref().is_some_and(|open| open.transaction == transaction) => {
                Status::Prepared
            }
            None => Status::Unknown,
        };
        Answer { status, extents: Vec::new(), detail: String::new() }
    }

    /// Takes back what a transaction has done so far; the answer lists what could not be.
    fn undo(&mut self, open: OpenTransaction) -> Answer {
        if open.kind == Kind::Unmap {
            return Answer::done();
        }
        let mut left = self.unmap(&open.parts.concat());
        if let Some(failure) = open.failure {
            left.extend(failure.extents);
        }
        Answer::left(left)
    }

    /// Unmaps extents that the caller no longer counts; those that stay mapped are stuck.
    fn unmap(&mut self, extents: &[Extent]) -> Vec<Extent> {
        if extents.is_empty() {
            return Vec::new();
        }
        let left = self.mapper.unmap(extents);
        for &extent in &left {
            self.stuck.insert(extent);
        }
        left
    }

    fn finished(&self, transaction: u64) -> Option<&FinishedTransaction> {
        // The latest is asked for first, nearly always.
        self.finished.iter().rev().find(|finished| finished.transaction == transaction)
    }

    fn finish(&mut self, transaction: u64, kind: Kind, is_committed: bool, answer: Answer) {
        if self.finished.len() == MAX_FINISHED {
            self.finished.pop_front();
        }
        self.finished.push_back(FinishedTransaction { transaction, kind, is_committed, answer });
    }
}

// === impl Answer ===

impl Answer {
    fn done() -> Self {
        Self { status: Status::Done, extents: Vec::new(), detail: String::new() }
    }

    pub(super) fn refused(detail: impl Into<String>) -> Self {
        Self { status: Status::Refused, extents: Vec::new(), detail: detail.into() }
    }

    /// Done, but for `extents`.
    fn left(extents: Vec<Extent>) -> Self {
        if extents.is_empty() {
            return Self::done();
        }
        let detail = format!("{} extents could not be unmapped", extents.len());
        Self { status: Status::Failed, extents, detail }
    }

    pub(super) fn into_reply(self, request: &Request, instance: u64) -> Reply {
        Reply {
            op: request.op(),
            transaction: request.transaction,
            part: request.part(),
            instance,
            status: self.status,
            extents: self.extents,
            whole: false,
            detail: self.detail,
        }
    }
}

// === impl OpenTransaction ===

impl OpenTransaction {
    fn new(transaction: u64, kind: Kind) -> Self {
        Self { transaction, kind, parts: Vec::new(), claimed: ExtentSet::default(), failure: None }
    }
}

// === impl ExtentSet ===

impl ExtentSet {
    fn is_empty(&self) -> bool {
        self.n_pages_by_first.is_empty()
    }

    fn contains(&self, extent: Extent) -> bool {
        self.n_pages_by_first.get(&extent.first_page.0) == Some(&extent.n_pages)
    }

    fn overlaps(&self, extent: Extent) -> bool {
        let end = u32::try_from(end_page(extent)).unwrap_or(u32::MAX);
        self.n_pages_by_first.range(..end).next_back().is_some_and(|(&first, &n_pages)| {
            end_page(Extent { first_page: PageId(first), n_pages }) > u64::from(extent.first_page.0)
        })
    }

    /// Adds an extent; `false` where it overlaps one that is there.
    fn insert(&mut self, extent: Extent) -> bool {
        if self.overlaps(extent) {
            return false;
        }
        self.n_pages_by_first.insert(extent.first_page.0, extent.n_pages);
        true
    }

    fn remove(&mut self, extent: Extent) {
        self.n_pages_by_first.remove(&extent.first_page.0);
    }

    fn take_all(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.n_pages_by_first)
            .into_iter()
            .map(|(first, n_pages)| Extent { first_page: PageId(first), n_pages })
            .collect()
    }
}

fn end_page(extent: Extent) -> u64 {
    u64::from(extent.first_page.0) + u64::from(extent.n_pages)
}
