//! Tokenizers from a model hub, for models that the configuration names.
//!
//! The files of a model are fetched once, beside their place, and appear there as a whole; what is there is not asked for
//! again, so that a service starts without the hub. Until they are there, prompts of the model are placed without the index.
//! Only the configuration decides what is fetched: requests cannot name repositories.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_runtime::hub::{HubClient, HubError, REPOSITORY_FORM, Repository, TimeLimit};
use kvik_runtime::secret::{Secret, redacted_url};
use kvik_runtime::shutdown::Shutdown;
use serde::{Deserialize, Serialize};

use crate::error::{IndexerError, Result};

/// Models by what became of an attempt to fetch their files: `result` is `fetched` or `failed`.
const FETCHES: &str = "kvik_index_hub_fetches_total";
/// What a tokenizer is made of; only the first is needed.
const FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
/// Largest file; tokenizers of 256 000 words have some 35 MB.
const MAX_FILE_BYTES: usize = 256 << 20;
/// The first wait after a failure, and the longest.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_mins(1)];

/// A model hub.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HubConfig {
    /// Repositories by the name of their model, as `owner/name` or `owner/name@revision`; without a revision it is
    /// `main`. Default: none, nothing is fetched.
    pub models: BTreeMap<String, String>,
    /// Where the hub is; files are at `<url>/<repository>/resolve/<revision>/<file>`. Default: `https://huggingface.co`.
    pub url: String,
    /// Folder in which fetched files are kept. Needed with `models`.
    pub folder: Option<PathBuf>,
    /// File with a token for repositories that are not public. Default: none.
    pub token_file: Option<PathBuf>,
    /// Longest time for one file. Default: 120 s.
    pub timeout_s: u64,
}

impl Default for HubConfig {
    fn default() -> Self {
        Self {
            models: BTreeMap::new(),
            url: "https://huggingface.co".to_owned(),
            folder: None,
            token_file: None,
            timeout_s: 120,
        }
    }
}

impl HubConfig {
    /// Checks every value.
    pub(crate) fn check(&self) -> Result<()> {
        for (model, repository) in &self.models {
            parsed(repository).map_err(|error| error.below(&format!("models.{model}")))?;
        }
        let is_http = self.url.starts_with("https://") || self.url.starts_with("http://");
        if !is_http || self.url.contains('@') {
            let allowed = "a URL that begins with https:// or http:// and has no login; `token_file` has one";
            return Err(IndexerError::invalid("url", redacted_url(&self.url), allowed));
        }
        if self.timeout_s == 0 {
            return Err(IndexerError::invalid("timeout_s", self.timeout_s, "1 or more"));
        }
        if self.folder.is_none() && !self.models.is_empty() {
            return Err(IndexerError::invalid(
                "folder",
                "not given",
                "a folder, because `models` names some",
            ));
        }
        Ok(())
    }

    /// Where the files of each model are, or will be.
    pub(crate) fn folders(&self) -> Result<BTreeMap<String, PathBuf>> {
        let Some(root) = &self.folder else { return Ok(BTreeMap::new()) };
        let place = |(model, repository): (&String, &String)| {
            Ok((model.clone(), folder_of(&parsed(repository)?, root)))
        };
        self.models.iter().map(place).collect()
    }
}

fn parsed(repository: &str) -> Result<Repository> {
    repository.parse().map_err(|_| IndexerError::invalid("repository", repository, REPOSITORY_FORM))
}

fn folder_of(repository: &Repository, root: &Path) -> PathBuf {
    // No name has the sign, so that no repository lies within another one.
    root.join(format!("{}@{}", repository.name(), repository.revision()))
}

/// Fetches the files of all models that are not there yet, each until it succeeds or the service stops.
pub(crate) async fn fetch_all(config: HubConfig, shutdown: Shutdown) {
    let Some(root) = config.folder.clone() else { return };
    let missing = config.models.iter().filter_map(|(model, repository)| {
        let repository = parsed(repository).ok()?;
        (!is_placed(&folder_of(&repository, &root))).then(|| (model.clone(), repository))
    });
    let mut missing: Vec<(String, Repository)> = missing.collect();
    let mut wait = WAITS[0];
    while !missing.is_empty() {
        let mut failed = Vec::new();
        for (model, repository) in missing {
            let fetched = tokio::select! {
                fetched = fetch(&config, &repository, &root) => fetched,
                () = shutdown.stopping() => return,
            };
            let result = if fetched.is_ok() { "fetched" } else { "failed" };
            metrics::counter!(FETCHES, "result" => result).increment(1);
            match fetched {
                Ok(()) => tracing::info!(%model, %repository, "fetched a tokenizer"),
                Err(error) => {
                    tracing::warn!(%model, %repository, %error, "failed to fetch a tokenizer");
                    failed.push((model, repository));
                }
            }
        }
        missing = failed;
        if !missing.is_empty() {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = shutdown.stopping() => return,
            }
            wait = (2 * wait).min(WAITS[1]);
        }
    }
}

/// Fetches the files of a model to their place, where they are all at once.
async fn fetch(config: &HubConfig, repository: &Repository, root: &Path) -> Result<()> {
    let token = match config.token_file.clone() {
        None => None,
        Some(path) => {
            let read = tokio::task::spawn_blocking(move || Secret::read(&path)).await;
            let token = read.map_err(|error| unavailable("read the hub's token", &error))??;
            Some(Secret::from(token.expose().trim()))
        }
    };
    let limit = TimeLimit::Whole(Duration::from_secs(config.timeout_s));
    let client = HubClient::try_new(&config.url, token, limit)?;
    let mut files = Vec::new();
    for file in FILES {
        if let Some(bytes) = client.small_file(repository, file, MAX_FILE_BYTES).await? {
            files.push((file, bytes));
        } else if file == FILES[0] {
            return Err(unavailable("ask the hub", &format!("{repository} has no {file}")));
        }
    }
    let folder = folder_of(repository, root);
    let placed = tokio::task::spawn_blocking(move || place(&folder, &files)).await;
    placed
        .map_err(|error| unavailable("keep a tokenizer", &error))?
        .map_err(|error| unavailable("keep a tokenizer", &error))
}

/// Writes files beside their folder and lets them appear there.
fn place(folder: &Path, files: &[(&str, Vec<u8>)]) -> std::io::Result<()> {
    let parent = folder.parent().unwrap_or(folder);
    fs::create_dir_all(parent)?;
    let mut beside = folder.as_os_str().to_owned();
    beside.push(format!(".{}.new", std::process::id()));
    let beside = PathBuf::from(beside);
    // What another life of this process id left behind.
    drop(fs::remove_dir_all(&beside));
    let written = (|| {
        fs::create_dir(&beside)?;
        for (name, bytes) in files {
            let mut file = File::create(beside.join(name))?;
            file.write_all(bytes)?;
            file.sync_all()?;
        }
        File::open(&beside)?.sync_all()?;
        fs::rename(&beside, folder)?;
        File::open(parent)?.sync_all()
    })();
    // Several processes may share the folder: the second one finds the files there.
    let written = if is_placed(folder) { Ok(()) } else { written };
    drop(fs::remove_dir_all(&beside));
    written
}

/// Whether the files are at their place. Where that cannot be told they are not: fetching them will say why.
fn is_placed(folder: &Path) -> bool {
    folder.join(FILES[0]).try_exists().unwrap_or(false)
}

impl From<HubError> for IndexerError {
    fn from(error: HubError) -> Self {
        match error {
            HubError::Unavailable { operation, reason } => Self::Unavailable { operation, reason },
            refused => unavailable("ask the hub", &refused),
        }
    }
}

fn unavailable(operation: &'static str, reason: &dyn std::fmt::Display) -> IndexerError {
    IndexerError::Unavailable { operation, reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_has_a_folder_of_its_own_and_a_bad_name_is_refused() {
        let repository = parsed("meta-llama/Llama-3.1-8B@v1.0").unwrap();
        let folder = folder_of(&repository, Path::new("/c"));
        assert_eq!(folder, Path::new("/c/meta-llama/Llama-3.1-8B@v1.0"));
        assert!(matches!(parsed("../b"), Err(IndexerError::Invalid { .. })));
    }

    #[test]
    fn a_hub_without_a_folder_or_with_another_scheme_is_refused_by_field() {
        let models = BTreeMap::from([("llama".to_owned(), "a/b".to_owned())]);
        let folder = Some(PathBuf::from("/c"));
        let sound = HubConfig { models: models.clone(), folder: folder.clone(), ..HubConfig::default() };
        sound.check().unwrap();
        HubConfig::default().check().unwrap();
        let field_of = |config: HubConfig| match config.check() {
            Err(IndexerError::Invalid { field, .. }) => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field_of(HubConfig { folder: None, ..sound.clone() }), "folder");
        assert_eq!(field_of(HubConfig { url: "ftp://hub".into(), ..sound.clone() }), "url");
        assert_eq!(field_of(HubConfig { timeout_s: 0, ..sound.clone() }), "timeout_s");
        let models = BTreeMap::from([("llama".to_owned(), "a//b".to_owned())]);
        assert_eq!(field_of(HubConfig { models, ..sound }), "models.llama.repository");
    }
}
