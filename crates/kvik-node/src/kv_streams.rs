//! What a daemon holds, model by model, for the indexes that follow it.
//!
//! An engine of another kind tells an index what its own memory has, but not what the store has: other engines fill that
//! too, and it outlives the engine. So the index listens to the daemon beside the engine. A stream is as that of a worker
//! ([`kv_stream`](kvik_proto::kv_stream)), with one group of chunks for each space of the model.
//!
//! **Invariant:** the groups of a log never change. A space that comes later ends the log, and a new one with a later
//! epoch begins.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvik_proto::kv_stream::BlockGroup;
use kvik_store::{Observation, Space, Store};
use parking_lot::Mutex;

use crate::kv_log::{KEPT_BYTES, KvListener, KvLog, LoggedChunks};

/// The name of a daemon in its streams.
const STORE: &str = "store";

/// Most models that are listened to or have engines: names come from outside.
const MAX_MODELS: usize = 64;

/// Most spaces of a model that are reported, the latest ones: what an index takes of one source.
const MAX_SPACES: usize = 8;

/// The streams of all models of a daemon. A model that no index asks for costs nothing.
#[derive(Debug, Default)]
pub(crate) struct KvStreams {
    models: Mutex<BTreeMap<StreamName, ModelStream>>,
}

/// What a stream is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamName {
    tenant: String,
    model: String,
}

/// Why a stream does not begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotHeard {
    UnknownTenant,
    TooMany,
}

#[derive(Debug, Default)]
struct ModelStream {
    /// In the order in which engines attached first.
    spaces: Vec<Space>,
    /// `None` until an index asks.
    open: Option<OpenStream>,
    last_epoch: u64,
}

#[derive(Debug)]
struct OpenStream {
    log: Arc<KvLog>,
    /// Dropped with the log: it gets nothing any more.
    _observations: Vec<Observation>,
}

impl StreamName {
    /// The stream of a model, whose name may be followed by `|` and what else decides its KV. Only the last part of its path
    /// counts: one engine has the folder, another a link to it, and an index the name that clients use.
    pub(crate) fn new(tenant: &str, model: &str) -> Self {
        let name = model.split('|').next().unwrap_or(model).trim_end_matches('/');
        let model = name.rsplit('/').next().unwrap_or(name);
        Self { tenant: tenant.to_owned(), model: model.to_owned() }
    }
}

impl KvStreams {
    /// Notes that an engine has attached with this space.
    pub(crate) fn note(&self, name: &StreamName, store: &Store, space: &Space) {
        let mut models = self.models.lock();
        if !models.contains_key(name) && models.len() >= MAX_MODELS {
            return;
        }
        let stream = models.entry(name.clone()).or_default();
        if stream.spaces.iter().any(|known| known.root() == space.root()) {
            return;
        }
        if stream.spaces.len() == MAX_SPACES {
            stream.spaces.remove(0);
        }
        stream.spaces.push(space.clone());
        if stream.open.is_some() {
            stream.reopen(name, store);
        }
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// [`NotHeard::TooMany`] where too many models are asked for, or too many listen.
    pub(crate) fn listen(
        &self,
        name: &StreamName,
        store: &Store,
        resume: Option<(u64, u64)>,
    ) -> Result<KvListener, NotHeard> {
        let mut models = self.models.lock();
        if !models.contains_key(name) && models.len() >= MAX_MODELS {
            return Err(NotHeard::TooMany);
        }
        let stream = models.entry(name.clone()).or_default();
        if stream.open.is_none() {
            stream.reopen(name, store);
        }
        let open = stream.open.as_ref();
        open.and_then(|open| open.log.listen(resume)).ok_or(NotHeard::TooMany)
    }

    /// Ends all streams and forgets all spaces: the stores are handed to another daemon.
    pub(crate) fn clear(&self) {
        for stream in std::mem::take(&mut *self.models.lock()).into_values() {
            stream.end();
        }
    }
}

impl ModelStream {
    fn end(&self) {
        if let Some(open) = &self.open {
            open.log.end();
        }
    }

    /// Begins a log of all spaces, with a later epoch than the one before it.
    fn reopen(&mut self, name: &StreamName, store: &Store) {
        self.end();
        self.open = None;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
        self.last_epoch = now_ns.max(self.last_epoch.saturating_add(1));
        let groups = self.spaces.iter().zip(0..).map(|(space, number)| BlockGroup {
            number,
            block_tokens: space.chunk_tokens() as u32,
            root: space.root(),
        });
        let (groups, model) = (groups.collect(), name.model.clone());
        let log = Arc::new(KvLog::new(STORE.to_owned(), self.last_epoch, model, groups, KEPT_BYTES));
        let observe = |(space, number): (&Space, u32)| {
            store.observe(space, Arc::new(LoggedChunks::new(Arc::clone(&log), number)))
        };
        let observations = self.spaces.iter().zip(0..).map(observe).collect();
        self.open = Some(OpenStream { log, _observations: observations });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_the_same_by_the_last_part_of_their_names() {
        let of = |model: &str| StreamName::new("t", model);
        assert_eq!(of("/models/tiny|None|bf16"), of("tiny"));
        assert_eq!(of("meta/tiny"), of("/mnt/tiny/"));
        assert_ne!(of("tiny"), of("tiny-2"));
        assert_ne!(of("tiny"), StreamName::new("u", "tiny"));
    }
}
