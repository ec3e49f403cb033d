//! All models that the index knows.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use kvik_index::holders::{HolderIndex, SourceName};
use parking_lot::RwLock;

use crate::book::{Backends, Books};
use crate::engine_feed::EngineFeed;
use crate::error::{IndexerError, Result};
use crate::feed::{Feed, FeedName, Feeds, Naming};
use crate::ingest::{Learning, ModelFeed};

/// Models that can be known at a time: each costs memory, and their names come from outside.
const MAX_MODELS: usize = 1024;
/// Longest name of a model, in bytes.
const MAX_MODEL_BYTES: usize = 1024;

/// The books of all models.
#[derive(Debug)]
pub struct Catalog {
    backends: Arc<dyn Backends>,
    learning: Learning,
    models: RwLock<BTreeMap<String, Arc<Books>>>,
}

impl Catalog {
    pub(crate) fn new(backends: Arc<dyn Backends>, learning: Learning) -> Self {
        Self { backends, learning, models: RwLock::default() }
    }

    /// The books of a model, if something is known of it.
    pub fn find(&self, model: &str) -> Option<Arc<Books>> {
        self.models.read().get(model).cloned()
    }

    /// The books of a model, also if only the server that keeps them knows it yet.
    ///
    /// # Errors
    /// If that server is away.
    pub async fn discover(&self, model: &str) -> Result<Option<Arc<Books>>> {
        if let Some(books) = self.find(model) {
            return Ok(Some(books));
        }
        // Names come from outside: only one that is known takes a place.
        let known = self.backends.known(model).await?;
        if known.is_empty() {
            return Ok(None);
        }
        let books = self.open_model(model)?;
        books.open_known(&known)?;
        Ok(Some(books))
    }

    /// All models, by name.
    pub fn all(&self) -> Vec<Arc<Books>> {
        self.models.read().values().cloned().collect()
    }

    /// The books of a model, created if missing.
    ///
    /// # Errors
    /// If the name cannot be used or there are too many models.
    pub fn open_model(&self, model: &str) -> Result<Arc<Books>> {
        if let Some(books) = self.find(model) {
            return Ok(books);
        }
        if model.is_empty() || model.len() > MAX_MODEL_BYTES {
            let allowed = format!("1 to {MAX_MODEL_BYTES} bytes");
            return Err(IndexerError::invalid("model", model, &allowed));
        }
        let mut models = self.models.write();
        if let Some(books) = models.get(model) {
            return Ok(Arc::clone(books));
        }
        if models.len() >= MAX_MODELS {
            return Err(IndexerError::invalid("model", model, "one of the 1024 that came first"));
        }
        let books = Arc::new(Books::new(model, Arc::clone(&self.backends)));
        models.insert(model.to_owned(), Arc::clone(&books));
        Ok(books)
    }

    async fn open_feed(&self, name: FeedName, naming: Naming) -> Result<Arc<dyn Feed>> {
        let FeedName { model, worker, rank } = name;
        if worker.is_empty() || worker.len() > HolderIndex::MAX_NAME_BYTES {
            let allowed = format!("1 to {} bytes", HolderIndex::MAX_NAME_BYTES);
            return Err(IndexerError::invalid("worker", worker, &allowed));
        }
        let known = self.backends.known(&model).await?;
        let books = self.open_model(&model)?;
        books.open_known(&known)?;
        let source = SourceName { worker: worker.into(), rank };
        let open = |naming| ModelFeed::new(Arc::clone(&books), source.clone(), naming, self.learning.clone());
        let feed = open(naming);
        feed.resume().await?;
        if naming != Naming::Learned {
            return Ok(Arc::new(feed));
        }
        Ok(Arc::new(EngineFeed::new(feed, open(Naming::Bridged))))
    }
}

impl Feeds for Catalog {
    fn open(&self, name: FeedName, naming: Naming) -> BoxFuture<'_, Result<Arc<dyn Feed>>> {
        Box::pin(self.open_feed(name, naming))
    }
}
