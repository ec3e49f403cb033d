//! From a URL to an object store.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use kvik_types::redacted_url;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{ClientConfigKey, HttpClient, HttpConnector};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use super::ObjectOptions;
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tls;

const ALLOWED: &str = "s3://bucket[/prefix], gs://bucket[/prefix], az://container[/prefix], file:///folder";

/// A bucket, a container or a folder, and what the names of all objects in it begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectUrl {
    kind: StoreKind,
    url: Url,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreKind {
    S3,
    Google,
    Azure,
    Folder,
}

/// An object store and the place in it.
#[derive(Debug)]
pub(super) struct Location {
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) prefix: Path,
    /// The folder, where the store is one of this machine.
    pub(super) folder: Option<PathBuf>,
}

/// Makes HTTP clients whose TLS is the same as everywhere else in kvik.
#[derive(Debug)]
struct Connector {
    tls: rustls::ClientConfig,
    connect_timeout: Duration,
}

impl ObjectUrl {
    /// Whether `scheme` is one of an object store.
    pub(crate) fn has_scheme(scheme: &str) -> bool {
        StoreKind::of_scheme(scheme).is_some()
    }

    /// # Errors
    /// As [`ObjectTier::open`](super::ObjectTier::open).
    pub(super) fn locate(&self, options: &ObjectOptions) -> Result<Location> {
        if self.kind == StoreKind::Folder {
            return self.locate_folder();
        }
        let connector = Connector {
            tls: tls::client_config(options.ca_file.as_deref())?,
            connect_timeout: options.connect_timeout,
        };
        let retry = RetryConfig {
            max_retries: options.n_retries,
            retry_timeout: options.timeout,
            ..RetryConfig::default()
        };
        // The three builders have the same methods and no trait in common.
        macro_rules! build {
            ($builder:ty, $key:ty, $variables:expr) => {{
                let mut builder = <$builder>::new();
                for (name, value) in options.environment_of($variables) {
                    if let Ok(key) = name.parse::<$key>() {
                        builder = builder.with_config(key, value);
                    }
                }
                for (name, value) in &options.settings {
                    let key = name.parse::<$key>().map_err(|error| unknown_setting(name, &error))?;
                    builder = builder.with_config(key, value);
                }
                let store = builder
                    .with_url(self.url.as_str())
                    .with_retry(retry)
                    .with_http_connector(connector)
                    .build()
                    .map_err(|error| TierError::invalid("url", &self.url, error.to_string()))?;
                Arc::new(store) as Arc<dyn ObjectStore>
            }};
        }
        let store = match self.kind {
            StoreKind::S3 => build!(AmazonS3Builder, AmazonS3ConfigKey, "aws_"),
            StoreKind::Google => build!(GoogleCloudStorageBuilder, GoogleConfigKey, "google_"),
            StoreKind::Azure => build!(MicrosoftAzureBuilder, AzureConfigKey, "azure_"),
            StoreKind::Folder => return self.locate_folder(),
        };
        let prefix = Path::from_url_path(self.url.path())
            .map_err(|error| TierError::invalid("url", &self.url, error.to_string()))?;
        Ok(Location { store, prefix, folder: None })
    }

    fn locate_folder(&self) -> Result<Location> {
        let folder = self.url.to_file_path().map_err(|()| TierError::invalid("url", &self.url, ALLOWED))?;
        let action = || format!("open folder {}", folder.display());
        fs::create_dir_all(&folder).map_err(|error| TierError::io(action(), error))?;
        let store = LocalFileSystem::new_with_prefix(&folder)
            .map_err(|error| TierError::remote(action(), &error, false))?;
        Ok(Location { store: Arc::new(store), prefix: Path::default(), folder: Some(folder) })
    }
}

impl FromStr for ObjectUrl {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self> {
        // The text itself is not repeated: it may have a password.
        let url = Url::parse(text).map_err(|error| TierError::invalid("url", &error, ALLOWED))?;
        let kind = StoreKind::of_scheme(url.scheme())
            .ok_or_else(|| TierError::invalid("url", &url.scheme(), ALLOWED))?;
        if !url.username().is_empty() || url.password().is_some() {
            let allowed = "credentials are settings, not a part of the URL";
            return Err(TierError::invalid("url", &"with a login", allowed));
        }
        let has_host = url.host_str().is_some_and(|host| !host.is_empty());
        let is_folder = kind == StoreKind::Folder;
        if has_host == is_folder || url.query().is_some() || url.fragment().is_some() {
            return Err(TierError::invalid("url", &redacted_url(text), ALLOWED));
        }
        Ok(Self { kind, url })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(formatter)
    }
}

impl StoreKind {
    fn of_scheme(scheme: &str) -> Option<Self> {
        Some(match scheme {
            "s3" => Self::S3,
            "gs" => Self::Google,
            "az" => Self::Azure,
            "file" => Self::Folder,
            _ => return None,
        })
    }
}

impl Location {
    /// The name of a chunk. The first byte of its hash stands before it, so that listing and moving a part
    /// of a namespace is possible and folders of a file system stay small.
    pub(super) fn path(&self, key: ChunkKey) -> Path {
        let chunk = key.chunk.to_string();
        let first_byte = chunk.get(..2).unwrap_or_default();
        Path::from(format!("{}/{}/{first_byte}/{chunk}-{:04x}", self.prefix, key.namespace, key.rank))
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let failed = |error: reqwest::Error| object_store::Error::Generic {
            store: "HTTP client",
            source: Box::new(error),
        };
        let allow_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(self.tls.clone())
            .https_only(allow_http.as_deref() != Some("true"))
            .connect_timeout(self.connect_timeout)
            .user_agent(concat!("kvik/", env!("CARGO_PKG_VERSION")))
            // Objects are bytes, and a redirection would take the signature elsewhere.
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy();
        if let Some(proxy) = options.get_config_value(&ClientConfigKey::ProxyUrl) {
            builder = builder.proxy(reqwest::Proxy::all(proxy).map_err(failed)?);
        }
        Ok(HttpClient::new(builder.build().map_err(failed)?))
    }
}

fn unknown_setting(name: &str, error: &object_store::Error) -> TierError {
    TierError::invalid("settings", &name, format!("settings of the object store; {error}"))
}
