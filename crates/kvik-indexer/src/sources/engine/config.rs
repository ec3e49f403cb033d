//! The configuration of an engine's source.

use std::time::Duration;

use kvik_index::holders::HolderIndex;
use serde::{Deserialize, Serialize};

use crate::error::{IndexerError, Result};
use crate::sources::zmq::{Endpoint, WireLimits};

/// An engine to listen to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// Where the engine publishes: `tcp://host:port` or `ipc:///path`. Each data parallel rank has a port
    /// of its own, and so a source of its own. No default.
    pub endpoint: String,
    /// Where the engine answers what it has published. Default: none; what is missed stays missed.
    pub replay_endpoint: Option<String>,
    /// Prefix of the topics that are subscribed to. Default: `kv@`. An engine without a topic needs an empty
    /// one, `worker` and `model`.
    pub topic: String,
    /// The worker's name. Default: the pod in the topic.
    pub worker: Option<String>,
    /// The model, as requests name it. Default: the model in the topic.
    pub model: Option<String>,
    /// The data parallel rank where messages do not say. Default: 0.
    pub rank: u32,
    /// What listening may take.
    pub limits: EngineLimits,
}

/// What listening to one engine may take. Times are in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineLimits {
    /// Workers and ranks that one endpoint may speak for, from 1. Default: 64.
    pub max_feeds: usize,
    /// Longest message, in bytes. Default: 16 MiB; a step of 100 000 tokens is below one.
    pub max_message_bytes: usize,
    /// Live messages that wait while others are replayed. Default: 4096. Beyond them the engine waits, as
    /// for any slow listener.
    pub max_backlog_messages: usize,
    /// Bytes of these messages. Default: 64 MiB.
    pub max_backlog_bytes: usize,
    /// Time for one replay. Default: 120000.
    pub replay_ms: u64,
    /// Silence that ends a replay. Default: 2000.
    pub replay_idle_ms: u64,
    /// Time between two replays for gaps. Default: 30000. What comes meanwhile waits in the backlog; if that
    /// is full the gap is given up.
    pub replay_cooldown_ms: u64,
    /// Time to connect. Default: 5000.
    pub connect_ms: u64,
    /// First pause before connecting again; it doubles from there. Default: 100.
    pub reconnect_min_ms: u64,
    /// Longest pause. Default: 10000.
    pub reconnect_max_ms: u64,
    /// Silence after which the engine is asked whether it is there; after three of them it is not. Default: 10000.
    pub heartbeat_ms: u64,
}

/// A configuration that was found good.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub(super) endpoint: Endpoint,
    pub(super) replay_endpoint: Option<Endpoint>,
    pub(super) topic: String,
    pub(super) worker: Option<String>,
    pub(super) model: Option<String>,
    pub(super) rank: u32,
    pub(super) limits: EngineLimits,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            replay_endpoint: None,
            topic: "kv@".to_owned(),
            worker: None,
            model: None,
            rank: 0,
            limits: EngineLimits::default(),
        }
    }
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            max_feeds: 64,
            max_message_bytes: 16 << 20,
            max_backlog_messages: 4096,
            max_backlog_bytes: 64 << 20,
            replay_ms: 120_000,
            replay_idle_ms: 2000,
            replay_cooldown_ms: 30_000,
            connect_ms: 5000,
            reconnect_min_ms: 100,
            reconnect_max_ms: 10_000,
            heartbeat_ms: 10_000,
        }
    }
}

impl EngineConfig {
    /// Checks it before it is used.
    ///
    /// # Errors
    /// [`IndexerError::Invalid`] with the first field that cannot be used.
    pub fn check(&self) -> Result<()> {
        self.target().map(|_| ())
    }

    pub(super) fn target(&self) -> Result<Target> {
        let endpoint = |field: &str, text: &str| {
            Endpoint::parse(text).ok_or_else(|| IndexerError::invalid(field, text, Endpoint::ALLOWED))
        };
        for (field, name) in [("worker", &self.worker), ("model", &self.model)] {
            if name.as_ref().is_some_and(|name| !is_name(name)) {
                let allowed = format!("1 to {} bytes", HolderIndex::MAX_NAME_BYTES);
                return Err(IndexerError::invalid(field, name.as_deref().unwrap_or_default(), &allowed));
            }
        }
        let limits = self.limits;
        let at_least_one = [
            ("limits.max_feeds", limits.max_feeds as u64),
            ("limits.max_message_bytes", limits.max_message_bytes as u64),
            ("limits.max_backlog_messages", limits.max_backlog_messages as u64),
            ("limits.max_backlog_bytes", limits.max_backlog_bytes as u64),
            ("limits.replay_ms", limits.replay_ms),
            ("limits.replay_idle_ms", limits.replay_idle_ms),
            ("limits.connect_ms", limits.connect_ms),
            ("limits.reconnect_min_ms", limits.reconnect_min_ms),
            ("limits.heartbeat_ms", limits.heartbeat_ms),
        ];
        if let Some((field, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(IndexerError::invalid(field, "0", "1 or more"));
        }
        Ok(Target {
            endpoint: endpoint("endpoint", &self.endpoint)?,
            replay_endpoint: self
                .replay_endpoint
                .as_deref()
                .map(|text| endpoint("replay_endpoint", text))
                .transpose()?,
            topic: self.topic.clone(),
            worker: self.worker.clone(),
            model: self.model.clone(),
            rank: self.rank,
            limits,
        })
    }
}

impl EngineLimits {
    pub(super) fn wire(&self) -> WireLimits {
        WireLimits {
            max_message_bytes: self.max_message_bytes,
            connect: Duration::from_millis(self.connect_ms),
            heartbeat: Duration::from_millis(self.heartbeat_ms),
        }
    }
}

/// Whether the index takes it as a name.
pub(super) fn is_name(name: &str) -> bool {
    (1..=HolderIndex::MAX_NAME_BYTES).contains(&name.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_cannot_be_used_is_named() {
        let good = EngineConfig { endpoint: "tcp://engine:5557".to_owned(), ..EngineConfig::default() };
        assert!(good.check().is_ok());
        let failures = [
            (EngineConfig::default(), "endpoint"),
            (EngineConfig { endpoint: "tcp://*:5557".to_owned(), ..good.clone() }, "endpoint"),
            (EngineConfig { replay_endpoint: Some("5558".to_owned()), ..good.clone() }, "replay_endpoint"),
            (EngineConfig { worker: Some(String::new()), ..good.clone() }, "worker"),
            (EngineConfig { model: Some("m".repeat(513)), ..good.clone() }, "model"),
            (
                EngineConfig { limits: EngineLimits { max_feeds: 0, ..good.limits }, ..good },
                "limits.max_feeds",
            ),
        ];
        for (config, wrong) in failures {
            match config.check() {
                Err(IndexerError::Invalid { field, .. }) => assert_eq!(field, wrong),
                other => panic!("{wrong}: {other:?}"),
            }
        }
    }
}
