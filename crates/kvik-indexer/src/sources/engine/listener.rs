//! The task that listens.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvik_index::holders::Verdict;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, info, warn};

use super::config::Target;
use super::message::{Backlog, Message, Unusable};
use super::metrics::Tallies;
use super::slots::{Life, Mark, Replayed, Round, Slots};
use crate::error::{IndexerError, Result};
use crate::feed::{FeedBatch, FeedName, Feeds, forget};
use crate::sources::pause::Pauses;
use crate::sources::zmq::{Connection, SocketType, ZmtpError};

/// First and longest pause before an index that is away is asked again.
const INDEX_PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Attempts to tell an index that is away of a worker that is gone.
const MAX_CLOSE_ATTEMPTS: u32 = 5;

/// Listens to one engine.
pub(super) struct Listener {
    pub(super) target: Target,
    feeds: Arc<dyn Feeds>,
    pub(super) slots: Slots,
    pub(super) tallies: Arc<Tallies>,
    /// The topic that came last over the live connection.
    last_topic: Option<Bytes>,
    /// When the last replay for a gap ended.
    gap_replayed: Option<Instant>,
}

/// A live connection and what has come over it and waits.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) connection: Connection,
    pub(super) backlog: Backlog,
}

/// How a message came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Via {
    /// It has just come live.
    Live,
    /// It came live and is handed in again.
    Again,
    /// By replay.
    Replay,
}

/// What became of a message.
#[derive(Debug)]
pub(super) enum Offer {
    /// It is in the index.
    Taken,
    /// It changed nothing.
    Passed,
    /// Batches before it are missing.
    Gap { name: FeedName, got: u64 },
}

impl Listener {
    pub(super) fn new(target: Target, feeds: Arc<dyn Feeds>, tallies: Arc<Tallies>) -> Self {
        let slots = Slots::new(target.limits.max_feeds);
        Self { target, feeds, slots, tallies, last_topic: None, gap_replayed: None }
    }

    /// Listens without end.
    pub(super) async fn run(&mut self) {
        let limits = self.target.limits;
        let longest = Duration::from_millis(limits.reconnect_max_ms);
        let mut pauses = Pauses::new(Duration::from_millis(limits.reconnect_min_ms), longest);
        let mut was_reached = true;
        loop {
            let begun = Instant::now();
            let endpoint = self.target.endpoint.clone();
            match self.connect().await {
                Ok(mut live) => {
                    info!(%endpoint, "listening to an engine");
                    was_reached = true;
                    self.tallies.connections.add_one();
                    self.tallies.connected.set(1);
                    let Err(error) = self.listen(&mut live).await;
                    self.tallies.connected.set(0);
                    warn!(%endpoint, %error, "lost an engine");
                    // A connection that ends at once is as good as none.
                    if begun.elapsed() >= longest {
                        pauses.reset();
                    }
                }
                // Once an outage, not once an attempt.
                Err(error) if was_reached => {
                    was_reached = false;
                    warn!(%endpoint, %error, "cannot reach an engine; trying again");
                }
                Err(error) => debug!(%endpoint, %error, "cannot reach an engine"),
            }
            sleep(pauses.after_failure()).await;
        }
    }

    /// The worker is gone.
    pub(super) async fn close(&mut self) {
        for feed in self.slots.drain() {
            let mut pauses = Pauses::new(INDEX_PAUSES.0, INDEX_PAUSES.1);
            for attempt in 1.. {
                match feed.close().await {
                    Err(IndexerError::Unavailable { .. }) if attempt < MAX_CLOSE_ATTEMPTS => {
                        sleep(pauses.after_failure()).await;
                    }
                    Err(error) => {
                        warn!(%error, ?feed, "a worker that is gone stays in the index");
                        break;
                    }
                    Ok(()) => break,
                }
            }
        }
    }

    async fn connect(&self) -> Result<Live, ZmtpError> {
        let wire = self.target.limits.wire();
        let mut connection = Connection::open(&self.target.endpoint, SocketType::Sub, wire).await?;
        connection.subscribe(self.target.topic.as_bytes()).await?;
        Ok(Live { connection, backlog: Backlog::default() })
    }

    /// Hands in what comes until the connection ends.
    async fn listen(&mut self, live: &mut Live) -> Result<std::convert::Infallible, ZmtpError> {
        self.slots.begin_connection();
        if self.target.replay_endpoint.is_some() {
            self.replay(live, None).await?;
        }
        loop {
            let frames = match live.backlog.pop() {
                Some(frames) => frames,
                None => live.connection.receive().await?,
            };
            self.tallies.messages.add_one();
            match Message::live(frames) {
                Ok(message) => {
                    self.last_topic.clone_from(&message.topic);
                    self.take_live(&message, live).await?;
                }
                Err(_) => self.tallies.malformed.add_one(),
            }
            // Messages that lie ready must not keep a thread from others.
            tokio::task::consume_budget().await;
        }
    }

    async fn take_live(&mut self, message: &Message, live: &mut Live) -> Result<(), ZmtpError> {
        let Offer::Gap { name, got } = self.offer(message, Via::Live).await else { return Ok(()) };
        self.tallies.gaps.add_one();
        if self.target.replay_endpoint.is_some() && self.cool_down(live).await? {
            self.replay(live, Some(&name)).await?;
            self.gap_replayed = Some(Instant::now());
            if !matches!(self.offer(message, Via::Again).await, Offer::Gap { .. }) {
                return Ok(());
            }
        }
        self.skip(&name, got).await;
        self.offer(message, Via::Again).await;
        Ok(())
    }

    /// Waits until the engine may be asked again; what comes meanwhile goes to the backlog. False if that is full
    /// before.
    async fn cool_down(&mut self, live: &mut Live) -> Result<bool, ZmtpError> {
        let limits = self.target.limits;
        let Some(replayed) = self.gap_replayed else { return Ok(true) };
        let cooled = replayed + Duration::from_millis(limits.replay_cooldown_ms);
        while Instant::now() < cooled {
            if live.backlog.is_full(&limits) {
                return Ok(false);
            }
            tokio::select! {
                () = sleep_until(cooled) => {}
                frames = live.connection.receive() => live.backlog.push(&frames?),
            }
        }
        Ok(true)
    }

    /// Reads a message and hands it in. An index that is away is waited for.
    pub(super) async fn offer(&mut self, message: &Message, via: Via) -> Offer {
        let mut pauses = Pauses::new(INDEX_PAUSES.0, INDEX_PAUSES.1);
        let mut via = via;
        loop {
            match self.try_offer(message, via).await {
                Ok(offer) => return offer,
                Err(IndexerError::Unavailable { operation, reason }) => {
                    debug!(operation, reason, "the index is away; an engine's events wait");
                    sleep(pauses.after_failure()).await;
                    // It has been noted that it came.
                    via = if via == Via::Live { Via::Again } else { via };
                }
                Err(error) => {
                    debug!(%error, "the index does not take a batch");
                    self.tallies.dropped.add_one();
                    return Offer::Passed;
                }
            }
        }
    }

    async fn try_offer(&mut self, message: &Message, via: Via) -> Result<Offer> {
        let (name, batch) = match message.read(&self.target, self.last_topic.as_ref()) {
            Ok(read) => read,
            Err(Unusable::Malformed) => {
                self.tallies.malformed.add_one();
                return Ok(Offer::Passed);
            }
            Err(Unusable::Unnamed) => {
                self.tallies.refused.add_one();
                return Ok(Offer::Passed);
            }
        };
        let sequence = message.sequence;
        let mark = Mark { sequence, published_s: batch.published_s };
        if self.slots.get_mut(&name).is_none() && !self.slots.open(&name, &*self.feeds).await? {
            self.tallies.refused.add_one();
            return Ok(Offer::Passed);
        }
        let Some(slot) = self.slots.get_mut(&name) else { return Ok(Offer::Passed) };
        let mut replayed = true;
        let mut is_restart = false;
        match via {
            Via::Live => {
                replayed = !slot.note_live(sequence);
                is_restart = !replayed && slot.last.is_some_and(|last| sequence <= last.sequence);
            }
            Via::Again => replayed = slot.was_replayed(sequence),
            Via::Replay => match slot.judge_replayed(mark) {
                Replayed::Pass => return Ok(Offer::Passed),
                Replayed::Take => {}
                Replayed::BeginLife => {
                    is_restart = true;
                    // A number that falls is a restart to the feed too, and to other gateways that write the same book.
                    if slot.feed.position().await?.1.is_none_or(|due| sequence < due) {
                        replayed = false;
                    } else {
                        forget(&*slot.feed).await?;
                    }
                }
            },
        }
        let published_s = batch.published_s;
        let batch = FeedBatch { epoch: None, sequence, replayed, published_s, events: batch.events };
        let verdict = slot.feed.apply(batch).await?;
        slot.life = if slot.life == Life::New { Life::Same } else { slot.life };
        if is_restart {
            self.tallies.restarts.add_one();
        }
        match verdict {
            Verdict::Applied | Verdict::Restarted => {
                slot.last = Some(mark);
                slot.life = Life::Same;
                if via == Via::Replay {
                    slot.round = Round::Begun;
                    self.tallies.replayed_batches.add_one();
                }
                Ok(Offer::Taken)
            }
            Verdict::Gap { .. } if via == Via::Replay && slot.round == Round::Begun => {
                slot.round = Round::Broken;
                Ok(Offer::Passed)
            }
            Verdict::Gap { got, .. } => Ok(Offer::Gap { name, got }),
            Verdict::Duplicate | Verdict::OldEpoch => Ok(Offer::Passed),
            // The index forgot the worker; the next batch begins anew.
            Verdict::UnknownSource => {
                self.slots.remove(&name);
                self.tallies.dropped.add_one();
                Ok(Offer::Passed)
            }
        }
    }

    /// Gives up on what is missing before `next`. An index that is away is waited for.
    pub(super) async fn skip(&mut self, name: &FeedName, next: u64) {
        let Some(slot) = self.slots.get_mut(name) else { return };
        let feed = Arc::clone(&slot.feed);
        let mut pauses = Pauses::new(INDEX_PAUSES.0, INDEX_PAUSES.1);
        loop {
            match feed.skip_gap(next).await {
                Ok(()) => break,
                Err(IndexerError::Unavailable { .. }) => sleep(pauses.after_failure()).await,
                Err(error) => {
                    debug!(%error, "the index does not skip a gap");
                    return;
                }
            }
        }
        self.tallies.skipped_gaps.add_one();
        warn!(worker = name.worker, rank = name.rank, next, "events of an engine are lost; it stays unsure");
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Listener").field("target", &self.target).finish_non_exhaustive()
    }
}
