//! Storage of books: in memory, with a folder that keeps them over a restart, or on a server.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::BoxFuture;
use kvik_index::holders::IndexConfig as HolderConfig;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use xxhash_rust::xxh3::xxh3_64;

use crate::backend::Backend;
use crate::backend::memory::MemoryBackend;
use crate::backend::redis::{RedisBackend, RedisClient, RedisOptions};
use crate::book::Backends;
use crate::config::IndexConfig;
use crate::durable::{remove_unfinished, replace_file};
use crate::error::{IndexerError, Result};
use crate::keys::Keys;

/// The file that lists the books of a folder.
const LIST_FILE: &str = "books.json";
/// Books of the snapshot folder, by `outcome`: `loaded`, `lost`.
const KEPT_BOOKS: &str = "kvik_index_kept_books_total";

/// Books in memory.
#[derive(Debug)]
pub(crate) struct MemoryStorage {
    max_book_bytes: u64,
    max_worker_blocks: u64,
    folder: Option<PathBuf>,
    books: Mutex<Vec<StoredBook>>,
    /// Books of the folder that were loaded, and that could not be loaded.
    n_loaded: AtomicU64,
    n_lost: AtomicU64,
}

/// Books on a server.
#[derive(Debug)]
pub(crate) struct RedisStorage {
    client: Arc<RedisClient>,
    options: RedisOptions,
}

#[derive(Debug, Clone)]
struct StoredBook {
    title: Title,
    backend: Arc<MemoryBackend>,
}

/// The identity of a book.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Title {
    model: String,
    keys: String,
}

/// Opens the storage that a configuration names.
pub(crate) fn open_storage(config: &IndexConfig) -> Result<Storage> {
    Ok(match config.redis_url()? {
        None => Storage::Memory(Arc::new(MemoryStorage {
            max_book_bytes: config.max_book_bytes,
            max_worker_blocks: config.max_worker_blocks,
            folder: config.snapshot_folder.clone(),
            books: Mutex::default(),
            n_loaded: AtomicU64::new(0),
            n_lost: AtomicU64::new(0),
        })),
        Some(url) => {
            let options = config.redis_options();
            let client = Arc::new(RedisClient::new(&url, &options)?);
            Storage::Redis(Arc::new(RedisStorage { client, options }))
        }
    })
}

/// One of the two.
#[derive(Debug, Clone)]
pub(crate) enum Storage {
    Memory(Arc<MemoryStorage>),
    Redis(Arc<RedisStorage>),
}

impl Storage {
    pub(crate) fn backends(&self) -> Arc<dyn Backends> {
        match self {
            Self::Memory(storage) => Arc::clone(storage) as Arc<dyn Backends>,
            Self::Redis(storage) => Arc::clone(storage) as Arc<dyn Backends>,
        }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Memory(_) => "memory",
            Self::Redis(_) => "redis",
        }
    }

    /// Books of the snapshot folder that were loaded, and that could not be loaded, since the start.
    pub(crate) fn kept_counts(&self) -> (u64, u64) {
        match self {
            Self::Memory(storage) => storage.kept_counts(),
            Self::Redis(_) => (0, 0),
        }
    }
}

impl MemoryStorage {
    /// The books that the folder keeps, by model; none where there is no folder.
    pub(crate) fn kept(&self) -> Vec<(String, Keys)> {
        let Some(folder) = &self.folder else { return Vec::new() };
        remove_unfinished(folder);
        let path = folder.join(LIST_FILE);
        let list = fs::read(&path).and_then(|bytes| Ok(serde_json::from_slice::<Vec<Json>>(&bytes)?));
        let entries = match list {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "starting with an empty index");
                self.note_lost();
                Vec::new()
            }
        };
        let kept = |entry: Json| {
            let named = entry.to_string();
            Self::read_entry(folder, entry).inspect_err(|reason| self.skip(&named, reason)).ok()
        };
        entries.into_iter().filter_map(kept).collect()
    }

    /// Notes that a book of the folder's list is skipped.
    pub(crate) fn skip(&self, book: &str, reason: &dyn std::fmt::Display) {
        tracing::warn!(%book, %reason, "starting without a book of the snapshot folder");
        self.note_lost();
    }

    fn kept_counts(&self) -> (u64, u64) {
        // Relaxed: counts.
        (self.n_loaded.load(Ordering::Relaxed), self.n_lost.load(Ordering::Relaxed))
    }

    /// Writes all books to the folder; blocks.
    ///
    /// # Errors
    /// If a file cannot be written; what was there before stays.
    pub(crate) fn save(&self) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let unavailable = |error: std::io::Error| IndexerError::Unavailable {
            operation: "keep the index",
            reason: format!("{}: {error}", folder.display()),
        };
        fs::create_dir_all(folder).map_err(unavailable)?;
        let books = self.books.lock().clone();
        for book in &books {
            book.backend.save(&folder.join(book.title.file_name()))?;
        }
        // Last: a list never names a book that is not there.
        let titles: Vec<&Title> = books.iter().map(|book| &book.title).collect();
        let list = serde_json::to_vec_pretty(&titles).map_err(|error| unavailable(error.into()))?;
        replace_file(&folder.join(LIST_FILE), &list).map_err(unavailable)
    }

    fn load(&self, title: &Title, config: HolderConfig) -> Option<MemoryBackend> {
        let path = self.folder.as_ref()?.join(title.file_name());
        match MemoryBackend::load(config, &path) {
            Ok(Some(backend)) => {
                // Relaxed: a count.
                self.n_loaded.fetch_add(1, Ordering::Relaxed);
                metrics::counter!(KEPT_BOOKS, "outcome" => "loaded").increment(1);
                Some(backend)
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "starting with an empty book");
                self.note_lost();
                None
            }
        }
    }

    /// What an entry of the list names, or why it names nothing.
    fn read_entry(folder: &Path, entry: Json) -> std::result::Result<(String, Keys), String> {
        let title: Title = serde_json::from_value(entry).map_err(|error| error.to_string())?;
        let keys = title.keys.parse().map_err(|error: IndexerError| error.to_string())?;
        match folder.join(title.file_name()).try_exists() {
            Ok(true) => Ok((title.model, keys)),
            Ok(false) => Err("its file is missing".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn note_lost(&self) {
        // Relaxed: a count.
        self.n_lost.fetch_add(1, Ordering::Relaxed);
        metrics::counter!(KEPT_BOOKS, "outcome" => "lost").increment(1);
    }
}

impl Backends for MemoryStorage {
    fn open(&self, model: &str, keys: &Keys) -> Result<Arc<dyn Backend>> {
        let title = Title { model: model.to_owned(), keys: keys.id() };
        let config = HolderConfig {
            budget_bytes: self.max_book_bytes,
            max_blocks_per_source: self.max_worker_blocks,
            hash_seed: random_number(),
            block_tokens: keys.block_tokens.get() as u32,
            key_mode: xxh3_64(title.keys.as_bytes()) as u32,
            ..HolderConfig::default()
        };
        let backend = self.load(&title, config).unwrap_or_else(|| MemoryBackend::new(config));
        let backend = Arc::new(backend);
        self.books.lock().push(StoredBook { title, backend: Arc::clone(&backend) });
        Ok(backend)
    }

    fn known<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<Vec<Keys>>> {
        // What the folder keeps is opened at the start, all at once.
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn announce<'a>(&'a self, _: &'a str, _: &'a Keys) -> BoxFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Backends for RedisStorage {
    fn open(&self, model: &str, keys: &Keys) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(RedisBackend::new(Arc::clone(&self.client), &self.options, model, &keys.id())))
    }

    fn known<'a>(&'a self, model: &'a str) -> BoxFuture<'a, Result<Vec<Keys>>> {
        Box::pin(async move {
            let namings = RedisBackend::namings(&self.client, &self.options, model).await?;
            Ok(namings.iter().filter_map(|naming| naming.parse().ok()).collect())
        })
    }

    fn announce<'a>(&'a self, model: &'a str, keys: &'a Keys) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { RedisBackend::announce(&self.client, &self.options, model, &keys.id()).await })
    }
}

impl Title {
    fn file_name(&self) -> String {
        let hash = xxh3_64(format!("{}\0{}", self.model, self.keys).as_bytes());
        format!("{hash:016x}.book")
    }
}

/// A number that an outsider cannot guess.
fn random_number() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0)
}
