//! Tokenizers from a model hub, for models that the configuration names.
//!
//! The files of a model are fetched once, beside their place, and appear there as a whole; what is there is not asked for
//! again, so that a service starts without the hub. Until they are there, prompts of the model are placed without the index.
//! Only the configuration decides what is fetched: requests cannot name repositories.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use kvik_runtime::secret::redacted_url;
use kvik_runtime::shutdown::Shutdown;
use reqwest::{Client, StatusCode};
use serde::{Deserialize, Serialize};

use crate::error::{IndexerError, Result, with_causes};

/// Models by what became of an attempt to fetch their files: `result` is `fetched` or `failed`.
const FETCHES: &str = "kvik_index_hub_fetches_total";
/// What a tokenizer is made of; only the first is needed.
const FILES: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
/// Largest file; tokenizers of 256 000 words have some 35 MB.
const MAX_FILE_BYTES: usize = 256 << 20;
/// The first wait after a failure, and the longest.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_mins(1)];
/// Longest name of a repository or a revision.
const MAX_NAME_BYTES: usize = 256;

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

/// A repository at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Repository {
    name: String,
    revision: String,
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
            repository.parse::<Repository>().map_err(|error| error.below(&format!("models.{model}")))?;
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
            Ok((model.clone(), repository.parse::<Repository>()?.folder(root)))
        };
        self.models.iter().map(place).collect()
    }
}

impl FromStr for Repository {
    type Err = IndexerError;

    fn from_str(text: &str) -> Result<Self> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let is_word = |word: &str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            !word.is_empty() && word.bytes().all(is_plain) && !word.starts_with('.')
        };
        let is_name = name.split('/').count() <= 2 && name.split('/').all(is_word);
        if text.len() > MAX_NAME_BYTES || !is_name || !is_word(revision) {
            let allowed = "owner/name or owner/name@revision, of letters, digits, `-`, `_` and `.`";
            return Err(IndexerError::invalid("repository", text, allowed));
        }
        Ok(Self { name: name.to_owned(), revision: revision.to_owned() })
    }
}

impl Repository {
    fn folder(&self, root: &Path) -> PathBuf {
        // No name has the sign, so that no repository lies within another one.
        root.join(format!("{}@{}", self.name, self.revision))
    }

    fn url(&self, hub: &str, file: &str) -> String {
        format!("{}/{}/resolve/{}/{file}", hub.trim_end_matches('/'), self.name, self.revision)
    }
}

/// Fetches the files of all models that are not there yet, each until it succeeds or the service stops.
pub(crate) async fn fetch_all(config: HubConfig, shutdown: Shutdown) {
    let Some(root) = config.folder.clone() else { return };
    let missing = config.models.iter().filter_map(|(model, repository)| {
        let repository = repository.parse::<Repository>().ok()?;
        (!is_placed(&repository.folder(&root))).then(|| (model.clone(), repository))
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
                Ok(()) => tracing::info!(%model, repository = %repository.name, "fetched a tokenizer"),
                Err(error) => {
                    tracing::warn!(%model, repository = %repository.name, %error, "failed to fetch a tokenizer");
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
    let token = match &config.token_file {
        None => None,
        Some(path) => {
            let path = path.clone();
            let read = tokio::task::spawn_blocking(move || fs::read_to_string(path)).await;
            let read = read.map_err(|error| unavailable("read the hub's token", &error))?;
            Some(read.map_err(|error| unavailable("read the hub's token", &error))?)
        }
    };
    let client = client(config)?;
    let mut files = Vec::new();
    for file in FILES {
        let url = repository.url(&config.url, file);
        let mut request = client.get(&url);
        if let Some(token) = &token {
            request = request.bearer_auth(token.trim());
        }
        let response =
            request.send().await.map_err(|error| unavailable("reach the hub", &with_causes(&error)))?;
        match response.status() {
            StatusCode::OK => files.push((file, whole(response).await?)),
            StatusCode::NOT_FOUND if file != FILES[0] => {}
            status => return Err(unavailable("ask the hub", &format!("{status} for {url}"))),
        }
    }
    let folder = repository.folder(root);
    let placed = tokio::task::spawn_blocking(move || place(&folder, &files)).await;
    placed
        .map_err(|error| unavailable("keep a tokenizer", &error))?
        .map_err(|error| unavailable("keep a tokenizer", &error))
}

fn client(config: &HubConfig) -> Result<Client> {
    // The library takes the provider of the process; if there is one already, that is as good.
    drop(rustls::crypto::ring::default_provider().install_default());
    let builder = Client::builder()
        .user_agent(concat!("kvik/", env!("CARGO_PKG_VERSION")))
        // A redirect must not lead to a connection that others can read or change.
        .https_only(config.url.starts_with("https://"))
        .connect_timeout(Duration::from_secs(10))
        .timeout(Duration::from_secs(config.timeout_s));
    builder.build().map_err(|error| unavailable("make a client for the hub", &with_causes(&error)))
}

/// The body of an answer.
async fn whole(mut response: reqwest::Response) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    loop {
        let chunk =
            response.chunk().await.map_err(|error| unavailable("read from the hub", &with_causes(&error)))?;
        let Some(chunk) = chunk else { return Ok(bytes) };
        if bytes.len() + chunk.len() > MAX_FILE_BYTES {
            let reason = format!("a file of more than {MAX_FILE_BYTES} bytes");
            return Err(unavailable("read from the hub", &reason));
        }
        bytes.extend_from_slice(&chunk);
    }
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

fn unavailable(operation: &'static str, reason: &dyn std::fmt::Display) -> IndexerError {
    IndexerError::Unavailable { operation, reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_a_name_that_leads_nowhere_else() {
        let parsed = |text: &str| text.parse::<Repository>();
        let repository = parsed("meta-llama/Llama-3.1-8B@v1.0").unwrap();
        assert_eq!(repository.folder(Path::new("/c")), Path::new("/c/meta-llama/Llama-3.1-8B@v1.0"));
        let url = "http://hub/meta-llama/Llama-3.1-8B/resolve/v1.0/tokenizer.json";
        assert_eq!(repository.url("http://hub/", "tokenizer.json"), url);
        assert_eq!(parsed("gpt2").unwrap().revision, "main");
        let long = "a".repeat(300);
        for text in ["", "a/b/c", "../b", "a/..", "a/b@../c", "a/b@", "a b/c", "a/b?x", "/a", "a/", &long] {
            assert!(matches!(parsed(text), Err(IndexerError::Invalid { .. })), "{text}");
        }
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
