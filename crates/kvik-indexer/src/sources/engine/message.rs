//! What engines send, as it came.

use std::collections::VecDeque;

use bytes::Bytes;
use kvik_proto::events::{EventBatch, Topic, parse_sequence};

use super::config::{EngineLimits, Target, is_name};
use crate::feed::FeedName;

/// A message whose payload has not been read. It is read where it is handed in, which may be more than once.
#[derive(Debug, Clone)]
pub(super) struct Message {
    /// `None` in the replays of old engines.
    pub(super) topic: Option<Bytes>,
    pub(super) sequence: u64,
    payload: Bytes,
}

/// Why a message is of no use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It cannot be read.
    Malformed,
    /// It does not say whose it is, or in a name that cannot be used.
    Unnamed,
}

/// An answer of a replay.
#[derive(Debug, Clone)]
pub(super) enum Answer {
    Message(Message),
    /// There is no more.
    End,
}

/// Live messages that wait while others are replayed.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    messages: VecDeque<Vec<Bytes>>,
    n_bytes: usize,
}

impl Message {
    /// Reads the frames of a live message: topic, number, payload.
    pub(super) fn live(frames: Vec<Bytes>) -> Result<Self, Unusable> {
        let [topic, number, payload] = <[Bytes; 3]>::try_from(frames).map_err(|_| Unusable::Malformed)?;
        let sequence = parse_sequence(&number).map_err(|_| Unusable::Malformed)?;
        Ok(Self { topic: Some(topic), sequence, payload })
    }

    /// Whose it is and what it says. `last_topic` stands in where a replay does not name one.
    pub(super) fn read(
        &self,
        target: &Target,
        last_topic: Option<&Bytes>,
    ) -> Result<(FeedName, EventBatch), Unusable> {
        let topic = self.topic.as_ref().or(last_topic);
        let (worker, model) = names(target, topic.map_or(&[], |topic| topic))?;
        let batch = EventBatch::decode(&self.payload).map_err(|_| Unusable::Malformed)?;
        Ok((FeedName { model, worker, rank: batch.data_parallel_rank.unwrap_or(target.rank) }, batch))
    }
}

impl Answer {
    /// Reads the frames of an answer: an empty one, the topic (not before vLLM 0.26), number, payload. The
    /// last answer has the number -1.
    pub(super) fn parse(frames: Vec<Bytes>) -> Result<Self, Unusable> {
        let mut frames = VecDeque::from(frames);
        if frames.front().is_some_and(Bytes::is_empty) {
            frames.pop_front();
        }
        let topic = if frames.len() == 3 { frames.pop_front() } else { None };
        let (Some(number), Some(payload), None) =
            (frames.pop_front(), frames.pop_front(), frames.pop_front())
        else {
            return Err(Unusable::Malformed);
        };
        let sequence = parse_sequence(&number).map_err(|_| Unusable::Malformed)?;
        if sequence == u64::MAX {
            return Ok(Self::End);
        }
        Ok(Self::Message(Message { topic, sequence, payload }))
    }
}

impl Backlog {
    pub(super) fn is_full(&self, limits: &EngineLimits) -> bool {
        self.messages.len() >= limits.max_backlog_messages || self.n_bytes >= limits.max_backlog_bytes
    }

    pub(super) fn push(&mut self, frames: &[Bytes]) {
        self.n_bytes += frames.iter().map(Bytes::len).sum::<usize>();
        // Copied: as they came, a few bytes would keep the whole buffer of a read.
        self.messages.push_back(frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect());
    }

    pub(super) fn pop(&mut self) -> Option<Vec<Bytes>> {
        let frames = self.messages.pop_front()?;
        self.n_bytes -= frames.iter().map(Bytes::len).sum::<usize>();
        Some(frames)
    }
}

/// Worker and model: configured, else from the topic.
fn names(target: &Target, topic: &[u8]) -> Result<(String, String), Unusable> {
    if let (Some(worker), Some(model)) = (&target.worker, &target.model) {
        return Ok((worker.clone(), model.clone()));
    }
    let topic = Topic::parse(topic).map_err(|_| Unusable::Unnamed)?;
    let worker = target.worker.as_deref().unwrap_or(topic.pod);
    let model = target.model.as_deref().or(topic.model).ok_or(Unusable::Unnamed)?;
    if !is_name(worker) || !is_name(model) {
        return Err(Unusable::Unnamed);
    }
    Ok((worker.to_owned(), model.to_owned()))
}
