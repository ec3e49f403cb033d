//! Where books stand: in memory, with a folder that keeps them over a restart, or on a server.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use kvik_index::holders::IndexConfig as HolderConfig;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::backend::Backend;
use crate::backend::memory::MemoryBackend;
use crate::backend::redis::{RedisBackend, RedisClient, RedisOptions};
use crate::book::Backends;
use crate::config::IndexConfig;
use crate::error::{IndexerError, Result};
use crate::keys::Keys;

/// The file that lists the books of a folder.
const LIST_FILE: &str = "books.json";

/// Books in memory.
#[derive(Debug)]
pub(crate) struct MemoryShelf {
    max_book_bytes: u64,
    max_worker_blocks: u64,
    folder: Option<PathBuf>,
    books: Mutex<Vec<ShelvedBook>>,
}

/// Books on a server.
#[derive(Debug)]
pub(crate) struct RedisShelf {
    client: Arc<RedisClient>,
    options: RedisOptions,
}

#[derive(Debug, Clone)]
struct ShelvedBook {
    title: Title,
    backend: Arc<MemoryBackend>,
}

/// What tells books apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Title {
    model: String,
    keys: String,
}

/// The shelf that a configuration asks for.
pub(crate) fn open_shelf(config: &IndexConfig) -> Result<Shelf> {
    Ok(match config.redis_url()? {
        None => Shelf::Memory(Arc::new(MemoryShelf {
            max_book_bytes: config.max_book_bytes,
            max_worker_blocks: config.max_worker_blocks,
            folder: config.snapshot_folder.clone(),
            books: Mutex::default(),
        })),
        Some(url) => {
            let options = config.redis_options();
            let client = Arc::new(RedisClient::new(&url, &options)?);
            Shelf::Redis(Arc::new(RedisShelf { client, options }))
        }
    })
}

/// One of the two.
#[derive(Debug, Clone)]
pub(crate) enum Shelf {
    Memory(Arc<MemoryShelf>),
    Redis(Arc<RedisShelf>),
}

impl Shelf {
    pub(crate) fn backends(&self) -> Arc<dyn Backends> {
        match self {
            Self::Memory(shelf) => Arc::clone(shelf) as Arc<dyn Backends>,
            Self::Redis(shelf) => Arc::clone(shelf) as Arc<dyn Backends>,
        }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Memory(_) => "memory",
            Self::Redis(_) => "redis",
        }
    }
}

impl MemoryShelf {
    /// The books that the folder keeps, by model; none where there is no folder.
    pub(crate) fn kept(&self) -> Vec<(String, Keys)> {
        let Some(folder) = &self.folder else { return Vec::new() };
        let path = folder.join(LIST_FILE);
        let titles: Vec<Title> = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                tracing::warn!(path = %path.display(), %error, "starting with an empty index");
                Vec::new()
            }),
            Err(error) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    tracing::warn!(path = %path.display(), %error, "starting with an empty index");
                }
                Vec::new()
            }
        };
        let keys = |title: Title| title.keys.parse().ok().map(|keys| (title.model, keys));
        titles.into_iter().filter_map(keys).collect()
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
        MemoryBackend::load(config, &path).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "starting with an empty book");
            None
        })
    }
}

impl Backends for MemoryShelf {
    fn open(&self, model: &str, keys: &Keys) -> Result<Arc<dyn Backend>> {
        let title = Title { model: model.to_owned(), keys: keys.id() };
        let config = HolderConfig {
            budget_bytes: self.max_book_bytes,
            max_blocks_per_source: self.max_worker_blocks,
            salt: random_number(),
            block_tokens: keys.block_tokens.get() as u32,
            key_mode: xxh3_64(title.keys.as_bytes()) as u32,
            ..HolderConfig::default()
        };
        let backend = self.load(&title, config).unwrap_or_else(|| MemoryBackend::new(config));
        let backend = Arc::new(backend);
        self.books.lock().push(ShelvedBook { title, backend: Arc::clone(&backend) });
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

impl Backends for RedisShelf {
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

/// A number that nobody outside knows.
fn random_number() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(0)
}

fn replace_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let beside = path.with_added_extension("new");
    fs::write(&beside, bytes)?;
    fs::rename(&beside, path)
}
