//! Asking an engine for what it has published before.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tracing::{debug, info};

use super::listener::{Listener, Live, Offer, Via};
use super::message::{Answer, Message};
use super::slots::{Life, Round};
use crate::error::Result;
use crate::feed::{FeedName, forget};
use crate::sources::zmq::{Connection, SocketType, ZmtpError};

/// How a round ended.
#[derive(Debug)]
enum Ending {
    /// All that the engine has was looked at.
    Complete,
    /// Something of it must be asked for again.
    Again,
    /// The engine did not answer.
    Failed(String),
}

impl Listener {
    /// Asks for what is missing of one feed, or of all at the start of a connection. Live messages go to the
    /// backlog meanwhile; when that is full they stay in the connection.
    ///
    /// # Errors
    /// If the live connection ends. A replay that fails is counted, and what is missing stays so.
    pub(super) async fn replay(&mut self, live: &mut Live, only: Option<&FeedName>) -> Result<(), ZmtpError> {
        let Some(endpoint) = self.target.replay_endpoint.clone() else { return Ok(()) };
        self.tallies.replays.add_one();
        let limits = self.target.limits;
        let deadline = Instant::now() + Duration::from_millis(limits.replay_ms);
        let opened = Connection::open(&endpoint, SocketType::Dealer, limits.wire()).await;
        let mut dealer = match opened {
            Ok(dealer) => dealer,
            Err(error) => {
                self.tallies.failed_replays.add_one();
                info!(%endpoint, %error, "an engine cannot be asked for what is missing");
                return Ok(());
            }
        };
        loop {
            let ending = match self.first_wanted(only).await {
                Ok(Some(start)) => self.round(&mut dealer, start, deadline, live).await?,
                Ok(None) => Ending::Complete,
                Err(error) => Ending::Failed(error.to_string()),
            };
            match ending {
                Ending::Complete => return Ok(()),
                Ending::Again => {}
                Ending::Failed(reason) => {
                    self.tallies.failed_replays.add_one();
                    info!(%endpoint, reason, "an engine did not replay all that is missing");
                    return Ok(());
                }
            }
        }
    }

    /// The number to begin with; `None` if nothing can be missing.
    async fn first_wanted(&mut self, only: Option<&FeedName>) -> Result<Option<u64>> {
        let mut is_empty = true;
        let mut first = None;
        for (name, slot) in self.slots.iter_mut() {
            if only.is_some_and(|only| only != name) {
                continue;
            }
            is_empty = false;
            let wanted = match (slot.life, slot.last) {
                (Life::New, _) => Some(0),
                (Life::Unproven, Some(last)) => Some(last.sequence),
                _ => slot.feed.position().await?.1,
            };
            first = first.into_iter().chain(wanted).min();
        }
        Ok(if is_empty { Some(0) } else { first })
    }

    /// Asks once, from `start`, and takes the answers.
    async fn round(
        &mut self,
        dealer: &mut Connection,
        start: u64,
        deadline: Instant,
        live: &mut Live,
    ) -> Result<Ending, ZmtpError> {
        let limits = self.target.limits;
        debug!(start, "asking an engine for what is missing");
        if let Err(error) = dealer.send(&[b"", &start.to_be_bytes()]).await {
            return Ok(Ending::Failed(error.to_string()));
        }
        self.slots.begin_round();
        let mut has_progress = false;
        let mut silent_at = Instant::now() + Duration::from_millis(limits.replay_idle_ms);
        loop {
            // Looked at here too: a peer that always has something to say never runs into a timer.
            if Instant::now() >= deadline {
                return Ok(Ending::Failed("out of time".to_owned()));
            }
            let received = tokio::select! {
                received = timeout_at(silent_at.min(deadline), dealer.receive()) => received,
                frames = live.connection.receive(), if !live.backlog.is_full(&limits) => {
                    live.backlog.push(&frames?);
                    continue;
                }
            };
            let frames = match received {
                Ok(Ok(frames)) => frames,
                Ok(Err(error)) => return Ok(Ending::Failed(error.to_string())),
                Err(_) if Instant::now() >= deadline => continue,
                // The end was lost on the way, as anything may be that the engine sends faster than it is read.
                Err(_) if has_progress => return Ok(Ending::Again),
                Err(_) => return Ok(Ending::Failed("no answer".to_owned())),
            };
            match Answer::parse(frames) {
                Ok(Answer::Message(message)) => has_progress |= self.take_answer(&message).await,
                Ok(Answer::End) => return Ok(self.end_round(start).await),
                Err(_) => self.tallies.malformed.add_one(),
            }
            silent_at = Instant::now() + Duration::from_millis(limits.replay_idle_ms);
        }
    }

    /// Takes one answer; whether it brought the feed forward.
    async fn take_answer(&mut self, message: &Message) -> bool {
        let mut offer = self.offer(message, Via::Replay).await;
        // The engine was asked for what is missing before it and has it no longer.
        if let Offer::Gap { name, got } = &offer {
            self.skip(name, *got).await;
            offer = self.offer(message, Via::Replay).await;
        }
        matches!(offer, Offer::Taken)
    }

    /// Looks at what a round from `start` on did not bring.
    async fn end_round(&mut self, start: u64) -> Ending {
        let mut ending = Ending::Complete;
        for (name, slot) in self.slots.iter_mut() {
            match (slot.life, slot.last) {
                // It was asked for and is not there.
                (Life::Unproven, Some(last)) if last.sequence >= start => {
                    slot.begin_new_life();
                    ending = Ending::Again;
                }
                // Lost on the way, or of a new life that showed only now.
                _ if slot.round == Round::Broken => ending = Ending::Again,
                // Nothing of the new life is there.
                (Life::New, _) if start == 0 => {
                    self.tallies.restarts.add_one();
                    match forget(&*slot.feed).await {
                        Ok(()) => slot.life = Life::Same,
                        Err(error) => {
                            info!(%error, worker = name.worker, "what an engine held before is not forgotten");
                        }
                    }
                }
                (Life::New, _) => ending = Ending::Again,
                _ => {}
            }
        }
        ending
    }
}
