//! From what a user calls a model to its folder.

use std::path::{Path, PathBuf};

use kvik_types::ByteSize;

use super::cache::{NEEDED_FILES, RepositoryCache, SINGLE_WEIGHTS, WEIGHTS_INDEX, weight_files};
use super::client::{FileInfo, HubClient, Listing};
use super::config::ModelHubConfig;
use super::download::Wanted;
use super::error::HubError;
use super::repository::Repository;
use crate::shutdown::Shutdown;
use crate::terminal::ProgressLine;

/// What is fetched besides [`NEEDED_FILES`] and weights, where a repository has it.
const OPTIONAL_FILES: [&str; 6] = [
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundModel {
    /// Its folder.
    pub folder: PathBuf,
    /// Its name on the hub, if it was found by that; the folder of a snapshot is named by its commit.
    pub name: Option<String>,
}

/// Finds the folder of the model that `given` names: a folder, or `owner/name[@revision]` on a hub.
///
/// A folder that exists counts first, then the cache, which is not compared with the hub. What is missing is fetched, with a
/// line of progress if standard error is a terminal. What is not the name of a repository is returned as a folder, whether or
/// not it exists. Blocks; must not be called on a thread that serves async tasks. Ends when `shutdown` drains.
///
/// # Errors
/// If the model is not in the cache and cannot be fetched.
pub fn find_model(
    given: &Path,
    config: &ModelHubConfig,
    shutdown: &Shutdown,
) -> Result<FoundModel, HubError> {
    let as_folder = || FoundModel { folder: given.to_owned(), name: None };
    let repository = given.to_str().and_then(|text| text.parse::<Repository>().ok());
    // Where that cannot be told it is one: opening it will say why.
    let is_there = given.try_exists().unwrap_or(true);
    let Some(repository) = repository.filter(|repository| repository.has_owner() && !is_there) else {
        return Ok(as_folder());
    };
    config.validate()?;
    let cache_folder = config.cache_folder()?;
    let cache = RepositoryCache::new(&cache_folder, &repository);
    let found = |folder| FoundModel { folder, name: Some(repository.name().to_owned()) };
    if let Some(folder) = cache.find(repository.revision()) {
        tracing::info!(model = %repository, folder = %folder.display(), "found the model in the hub's cache");
        return Ok(found(folder));
    }
    if config.offline {
        return Err(HubError::Offline { name: repository.to_string(), cache: cache_folder });
    }
    // One of its own: only this thread waits for the hub, and may do so by reading and writing files.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| HubError::unavailable("start a runtime", error))?;
    let fetched = runtime.block_on(async {
        let fetching = Fetching { client: config.client()?, repository: &repository, cache: &cache };
        tokio::select! {
            fetched = fetching.run() => fetched,
            () = shutdown.draining() => Err(HubError::Stopped),
        }
    })?;
    Ok(found(fetched))
}

/// A model on its way into the cache.
struct Fetching<'a> {
    client: HubClient,
    repository: &'a Repository,
    cache: &'a RepositoryCache,
}

impl Fetching<'_> {
    /// Fetches what is missing; the folder of the snapshot.
    async fn run(&self) -> Result<PathBuf, HubError> {
        let listing = self.client.list(self.repository).await?;
        self.check_listing(&listing)?;
        let commit = listing.commit.as_str();
        self.cache.make_folders(commit)?;
        let has = |file: &str| listing.files.iter().any(|listed| listed == file);
        let is_single = has(SINGLE_WEIGHTS);
        let optional = OPTIONAL_FILES.into_iter().filter(|file| has(file));
        let index = [WEIGHTS_INDEX].into_iter().filter(|_| !is_single);
        let texts: Vec<&str> = NEEDED_FILES.into_iter().chain(optional).chain(index).collect();
        tracing::info!(model = %self.repository, commit, "fetching a model from the hub");
        self.fetch_all(commit, &texts).await?;
        let weights = if is_single { vec![SINGLE_WEIGHTS.to_owned()] } else { self.split_weights(&listing)? };
        // Last: a snapshot with weights counts as complete.
        self.fetch_all(commit, &weights.iter().map(String::as_str).collect::<Vec<_>>()).await?;
        self.cache.refer(self.repository.revision(), commit)?;
        let folder = self.cache.snapshot(commit);
        tracing::info!(model = %self.repository, folder = %folder.display(), "fetched a model");
        Ok(folder)
    }

    /// Refuses a repository before anything of it is fetched.
    fn check_listing(&self, listing: &Listing) -> Result<(), HubError> {
        let has = |file: &str| listing.files.iter().any(|listed| listed == file);
        let lacks = |what: String| Err(HubError::Incomplete { name: self.repository.to_string(), what });
        if !has(SINGLE_WEIGHTS) && !has(WEIGHTS_INDEX) {
            let is_other = |file: &&String| {
                [".bin", ".pt", ".pth", ".gguf", ".onnx", ".safetensors", ".msgpack", ".h5"]
                    .iter()
                    .any(|end| file.ends_with(end))
            };
            let others: Vec<&str> =
                listing.files.iter().filter(is_other).take(3).map(String::as_str).collect();
            let others =
                if others.is_empty() { String::new() } else { format!("; it has {}", others.join(", ")) };
            return lacks(format!("weights that kvik reads, {SINGLE_WEIGHTS} or {WEIGHTS_INDEX}{others}"));
        }
        match NEEDED_FILES.into_iter().find(|file| !has(file)) {
            Some(file) => lacks(file.to_owned()),
            None => Ok(()),
        }
    }

    /// The files that the fetched list of weights names.
    fn split_weights(&self, listing: &Listing) -> Result<Vec<String>, HubError> {
        let incomplete = |what| HubError::Incomplete { name: self.repository.to_string(), what };
        let files = weight_files(&self.cache.snapshot(&listing.commit))
            .map_err(|reason| incomplete(format!("usable {WEIGHTS_INDEX}: {reason}")))?;
        match files.iter().find(|file| !listing.files.contains(file)) {
            Some(file) => Err(incomplete(format!("{file}, which its {WEIGHTS_INDEX} names"))),
            None => Ok(files.into_iter().collect()),
        }
    }

    /// Fetches files one after the other, if there is room for all of them.
    async fn fetch_all(&self, commit: &str, files: &[&str]) -> Result<(), HubError> {
        let mut infos: Vec<(&str, FileInfo)> = Vec::new();
        for &file in files {
            if !self.cache.snapshot(commit).join(file).is_file() {
                infos.push((file, self.client.file_info(self.repository, commit, file).await?));
            }
        }
        let wanted: Vec<Wanted<'_>> = infos
            .iter()
            .map(|(file, info)| Wanted { repository: self.repository, commit, file, info })
            .collect();
        let n_bytes = wanted.iter().map(|file| file.missing_bytes(self.cache)).fold(0, u64::saturating_add);
        self.check_room(commit, n_bytes)?;
        let mut progress = ProgressLine::new(&format!("fetching {}", self.repository), n_bytes);
        for wanted in wanted {
            tracing::info!(file = wanted.file, size = %ByteSize(wanted.info.n_bytes), "fetching a file");
            wanted.fetch(&self.client, self.cache, &mut progress).await?;
        }
        Ok(())
    }

    fn check_room(&self, commit: &str, n_bytes: u64) -> Result<(), HubError> {
        let folder = self.cache.snapshot(commit);
        // Where the file system does not tell, writing will.
        let Ok(status) = rustix::fs::statvfs(&folder) else { return Ok(()) };
        let n_free_bytes = status.f_bavail.saturating_mul(status.f_frsize);
        if n_free_bytes < n_bytes {
            return Err(HubError::DiskFull { folder, n_bytes, n_free_bytes: Some(n_free_bytes) });
        }
        Ok(())
    }
}
