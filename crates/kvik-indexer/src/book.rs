//! The books of a model: the holders of its blocks, one book for each way in which its engines name blocks.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use kvik_index::holders::{BlockKey, SourceName, Walk};
use kvik_types::TokenId;
use parking_lot::{Mutex, RwLock};

use crate::backend::{Backend, Row};
use crate::error::{IndexerError, Result};
use crate::keys::{KeyKind, Keys};

/// Books of one model: a naming more is a mistake or an attack, and each costs memory.
const MAX_BOOKS: usize = 16;

/// Opens the backend of a book.
pub trait Backends: Send + Sync + std::fmt::Debug {
    /// Opens or creates the book of `model` in `keys`.
    ///
    /// # Errors
    /// If the server that keeps it refuses.
    fn open(&self, model: &str, keys: &Keys) -> Result<Arc<dyn Backend>>;

    /// The keys of books of `model` that are there already, written by an earlier process or by another one.
    fn known<'a>(&'a self, model: &'a str) -> BoxFuture<'a, Result<Vec<Keys>>>;

    /// Notes that there is a book, for [`Self::known`].
    fn announce<'a>(&'a self, model: &'a str, keys: &'a Keys) -> BoxFuture<'a, Result<()>>;
}

/// A book: its keys, and where it is kept.
#[derive(Debug)]
pub struct Book {
    /// How its blocks are named.
    pub keys: Keys,
    /// Where it is kept.
    pub backend: Arc<dyn Backend>,
    /// Whether processes that start later find it.
    is_announced: AtomicBool,
    /// Sources that feeds of this process have brought and not taken away.
    brought: Mutex<HashSet<SourceName>>,
    /// Whether all that feeds of this process have brought was taken away again.
    is_abandoned: AtomicBool,
}

/// The books of one model.
#[derive(Debug)]
pub struct Books {
    model: String,
    backends: Arc<dyn Backends>,
    open: RwLock<Vec<Arc<Book>>>,
    /// What an engine's events have last proven to be its keys.
    proven: RwLock<Option<Keys>>,
}

/// What one source has of a prompt, and how long the blocks are that its row counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// What it has.
    pub row: Row,
    /// Tokens of a block.
    pub block_tokens: usize,
}

impl Books {
    /// No books yet.
    pub fn new(model: &str, backends: Arc<dyn Backends>) -> Self {
        Self { model: model.to_owned(), backends, open: RwLock::default(), proven: RwLock::default() }
    }

    /// The model.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// The book in `keys`, opened if it is not there yet.
    ///
    /// # Errors
    /// If there are too many, or the backend cannot be opened.
    pub fn open(&self, keys: &Keys) -> Result<Arc<Book>> {
        let find = |books: &[Arc<Book>]| books.iter().find(|book| book.keys == *keys).cloned();
        if let Some(book) = find(&self.open.read()) {
            return Ok(book);
        }
        let mut books = self.open.write();
        if let Some(book) = find(&books) {
            return Ok(book);
        }
        if books.len() >= MAX_BOOKS {
            let allowed = format!("{MAX_BOOKS} ways of naming blocks for one model");
            return Err(IndexerError::invalid("keys", keys.id(), &allowed));
        }
        let backend = self.backends.open(&self.model, keys)?;
        let book = Arc::new(Book {
            keys: keys.clone(),
            backend,
            is_announced: AtomicBool::new(false),
            brought: Mutex::default(),
            is_abandoned: AtomicBool::new(false),
        });
        books.push(Arc::clone(&book));
        Ok(book)
    }

    /// Whether there are any.
    pub fn has_books(&self) -> bool {
        !self.open.read().is_empty()
    }

    /// Makes a book known to processes that start later, before anything is written to it.
    pub(crate) async fn announce(&self, book: &Book) -> Result<()> {
        // Relaxed: to do it twice is harmless.
        if !book.is_announced.load(Ordering::Relaxed) {
            self.backends.announce(&self.model, &book.keys).await?;
            book.is_announced.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Opens books that are there already.
    ///
    /// # Errors
    /// If there are too many, or a backend cannot be opened.
    pub(crate) fn open_known(&self, known: &[Keys]) -> Result<()> {
        for keys in known {
            self.open(keys)?;
            if !matches!(keys.kind, KeyKind::Kvik { .. } | KeyKind::Own) {
                self.prove(keys);
            }
        }
        Ok(())
    }

    /// All books.
    pub fn all(&self) -> Vec<Arc<Book>> {
        self.open.read().clone()
    }

    /// What engines of this model have last proven to use.
    pub(crate) fn proven(&self) -> Option<Keys> {
        self.proven.read().clone()
    }

    pub(crate) fn prove(&self, keys: &Keys) {
        let mut proven = self.proven.write();
        if proven.as_ref() != Some(keys) {
            tracing::debug!(model = %self.model, keys = %keys.id(), "block keys of the model's engines");
            *proven = Some(keys.clone());
        }
    }

    /// Finds how much of a prompt with this `cache_salt` every source has. A source is in the answer once for each book
    /// that has it.
    ///
    /// # Errors
    /// If a backend is away.
    pub async fn lookup(&self, tokens: &[TokenId], salt: Option<&str>, walk: Walk) -> Result<Vec<Match>> {
        let mut matches = Vec::new();
        let mut keys: Vec<BlockKey> = Vec::new();
        for book in self.all().into_iter().filter(|book| book.is_fed()) {
            keys.clear();
            book.keys.extend_salted(tokens, salt, &mut keys);
            if keys.is_empty() {
                continue;
            }
            let block_tokens = book.keys.block_tokens.get();
            let rows = book.backend.lookup(&keys, walk).await?;
            matches.extend(rows.into_iter().map(|row| Match { row, block_tokens }));
        }
        Ok(matches)
    }
}

impl Book {
    /// A source is in it from now on.
    pub(crate) fn enter(&self, source: &SourceName) {
        self.brought.lock().insert(source.clone());
        // Relaxed: a book that was just entered has nothing yet.
        self.is_abandoned.store(false, Ordering::Relaxed);
    }

    /// A source has been taken away.
    pub(crate) fn leave(&self, source: &SourceName) {
        let mut brought = self.brought.lock();
        let was_last = brought.remove(source) && brought.is_empty();
        self.is_abandoned.store(was_last, Ordering::Relaxed);
    }

    /// Forgets the sources that no feed has brought, and returns how many these were: an earlier process
    /// knew them. Not for a book that others write to.
    ///
    /// # Errors
    /// If the backend is away.
    pub(crate) async fn forget_unheard(&self) -> Result<usize> {
        let states = self.backend.states().await?;
        let unheard: Vec<SourceName> = {
            let brought = self.brought.lock();
            let sources = states.into_iter().map(|state| state.source);
            sources.filter(|source| !brought.contains(source)).collect()
        };
        for source in &unheard {
            // A feed that takes it up just now has a gap, as after every loss.
            self.backend.remove_source(source).await?;
        }
        let brought = self.brought.lock();
        if !unheard.is_empty() && brought.is_empty() {
            self.is_abandoned.store(true, Ordering::Relaxed);
        }
        Ok(unheard.len())
    }

    /// Whether something can be found in it: a prompt need not be hashed for a book that all sources have left. Others may
    /// write to one that is shared.
    fn is_fed(&self) -> bool {
        self.backend.kind() != "memory" || !self.is_abandoned.load(Ordering::Relaxed)
    }

    /// Whether its engines' hashes are translated.
    pub fn is_bridged(&self) -> bool {
        self.keys.kind == KeyKind::Own
    }
}
