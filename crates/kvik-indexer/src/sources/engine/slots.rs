//! The feeds of one source, and what each has received of its engine.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::Result;
use crate::feed::{Feed, FeedName, Feeds, Naming};

/// A worker that has been silent for so long makes place for a new one where there is no other.
const SILENT: Duration = Duration::from_mins(10);

/// The feeds of one source.
#[derive(Debug)]
pub(super) struct Slots {
    by_name: HashMap<FeedName, Slot>,
    max_feeds: usize,
}

/// A feed, and where its engine's stream stands.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) feed: Arc<dyn Feed>,
    /// The last batch that was taken.
    pub(super) last: Option<Mark>,
    pub(super) life: Life,
    /// The last number that came live over this connection.
    last_live: Option<u64>,
    /// The first and the last number that came by replay during this connection.
    replayed: Option<(u64, u64)>,
    pub(super) round: Round,
    heard: Instant,
}

/// Tells a batch from one with the same number of another life of the engine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    pub(super) sequence: u64,
    pub(super) published_s: f64,
}

/// Whether the engine behind this connection is the one whose batches were taken before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Life {
    /// It is, or nothing was taken before.
    Same,
    /// Not known: the connection was lost since.
    Unproven,
    /// It is not: what is known must be forgotten.
    New,
}

/// What to do with a batch that came by replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replayed {
    /// Nothing.
    Pass,
    /// Hand it in.
    Take,
    /// Hand it in as the first one of a new life.
    BeginLife,
}

/// What one round of a replay has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Round {
    /// Nothing: what is missing before its first batch is gone for good.
    Fresh,
    /// Something: what is missing after it was lost on the way.
    Begun,
    /// Something is missing in the middle: nothing more is taken in this round.
    Broken,
}

impl Mark {
    pub(super) fn is_same(self, other: Self) -> bool {
        self.sequence == other.sequence && self.published_s.to_bits() == other.published_s.to_bits()
    }
}

impl Slots {
    pub(super) fn new(max_feeds: usize) -> Self {
        Self { by_name: HashMap::new(), max_feeds }
    }

    pub(super) fn get_mut(&mut self, name: &FeedName) -> Option<&mut Slot> {
        self.by_name.get_mut(name)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&FeedName, &mut Slot)> {
        self.by_name.iter_mut()
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Arc<dyn Feed>> {
        self.by_name.drain().map(|(_, slot)| slot.feed)
    }

    pub(super) fn remove(&mut self, name: &FeedName) {
        self.by_name.remove(name);
    }

    /// A connection begins: until a replay shows it, it is not known whether the engine has been restarted.
    pub(super) fn begin_connection(&mut self) {
        for slot in self.by_name.values_mut() {
            slot.last_live = None;
            slot.replayed = None;
            slot.life = if slot.last.is_some() { Life::Unproven } else { Life::Same };
        }
    }

    pub(super) fn begin_round(&mut self) {
        for slot in self.by_name.values_mut() {
            slot.round = Round::Fresh;
        }
    }

    /// Opens the feed of a name that has none; false if there is no place for it.
    pub(super) async fn open(&mut self, name: &FeedName, feeds: &dyn Feeds) -> Result<bool> {
        if self.by_name.len() >= self.max_feeds {
            let silent = self.by_name.iter().min_by_key(|(_, slot)| slot.heard);
            let silent =
                silent.filter(|(_, slot)| slot.heard.elapsed() >= SILENT).map(|(name, _)| name.clone());
            let Some(silent) = silent else { return Ok(false) };
            if let Some(slot) = self.by_name.get(&silent) {
                slot.feed.close().await?;
            }
            self.by_name.remove(&silent);
        }
        let feed = feeds.open(name.clone(), Naming::Learned).await?;
        let slot = Slot {
            feed,
            last: None,
            life: Life::Same,
            last_live: None,
            replayed: None,
            round: Round::Fresh,
            heard: Instant::now(),
        };
        self.by_name.insert(name.clone(), slot);
        Ok(true)
    }
}

impl Slot {
    /// Takes note of a live number; returns whether the batch is to be judged as a live one.
    ///
    /// A live stream rises. A number that rises, and that a replay over this connection has brought
    /// before, is a duplicate; one that falls is of a new life.
    pub(super) fn note_live(&mut self, sequence: u64) -> bool {
        self.heard = Instant::now();
        if self.last_live.is_some_and(|last| sequence <= last) {
            self.replayed = None;
        }
        self.last_live = Some(sequence);
        !self.was_replayed(sequence)
    }

    /// Takes note of a batch that came by replay; says what to do with it.
    pub(super) fn judge_replayed(&mut self, mark: Mark) -> Replayed {
        self.heard = Instant::now();
        if self.round == Round::Broken {
            return Replayed::Pass;
        }
        match (self.life, self.last) {
            (Life::Unproven, Some(last)) if mark.sequence < last.sequence => return Replayed::Pass,
            (Life::Unproven, Some(last)) if !mark.is_same(last) => {
                // Another batch under that number, or none any more: what is known cannot be continued.
                self.begin_new_life();
                self.round = Round::Broken;
                return Replayed::Pass;
            }
            _ => {}
        }
        let is_proof = self.life == Life::Unproven;
        if is_proof {
            self.life = Life::Same;
            self.round = Round::Begun;
        }
        let (first, last) = self.replayed.unwrap_or((mark.sequence, mark.sequence));
        self.replayed = Some((first.min(mark.sequence), last.max(mark.sequence)));
        match self.life {
            Life::New => Replayed::BeginLife,
            _ if is_proof => Replayed::Pass,
            _ => Replayed::Take,
        }
    }

    /// Whether a replay over this connection brought this number.
    pub(super) fn was_replayed(&self, sequence: u64) -> bool {
        self.replayed.is_some_and(|(first, last)| (first..=last).contains(&sequence))
    }

    /// The engine behind this connection is another one than before.
    pub(super) fn begin_new_life(&mut self) {
        self.last = None;
        self.replayed = None;
        self.life = Life::New;
    }
}
