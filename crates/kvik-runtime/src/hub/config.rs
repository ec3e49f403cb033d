//! Which hub, which cache, which token.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_types::redacted_url;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::client::{HubClient, TimeLimit, is_hub_url};
use super::error::HubError;
use crate::config::variable;
use crate::error::with_causes;
use crate::secret::Secret;

/// The model hub that names of models are looked up at.
///
/// The variables of `huggingface_hub` set the fields that name them, so that kvik finds what other programs fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelHubConfig {
    /// Where the hub is; `HF_ENDPOINT` in the environment sets it too. Default: `https://huggingface.co`.
    pub url: String,
    /// Whether models come from the cache alone; `HF_HUB_OFFLINE` in the environment sets it too. Default: false, what is not
    /// there is fetched.
    #[serde(deserialize_with = "switch")]
    pub offline: bool,
    /// Folder of fetched models, in the layout of `huggingface_hub`; `HF_HUB_CACHE` in the environment sets it too. Default:
    /// none, `hub` in `hub.home`.
    pub cache: Option<PathBuf>,
    /// Folder of all that belongs to the hub; `HF_HOME` in the environment sets it too. Default: none, `huggingface` in the
    /// user's cache folder (`XDG_CACHE_HOME`, or `~/.cache`).
    pub home: Option<PathBuf>,
    /// Token for repositories that are not public; `HF_TOKEN` in the environment sets it too. Default: none.
    pub token: Option<Secret>,
    /// File with that token; `HF_TOKEN_PATH` in the environment sets it too. Default: none, `token` in `hub.home` if there is
    /// such a file.
    pub token_file: Option<PathBuf>,
    /// Longest wait for the next bytes of the hub. Default: 30 s.
    pub timeout_s: u64,
}

impl Default for ModelHubConfig {
    fn default() -> Self {
        Self {
            url: "https://huggingface.co".to_owned(),
            offline: false,
            cache: None,
            home: None,
            token: None,
            token_file: None,
            timeout_s: 30,
        }
    }
}

impl ModelHubConfig {
    /// Checks every value; fields are named below `hub`.
    ///
    /// # Errors
    /// [`HubError::InvalidConfig`] for the first value that is not allowed.
    pub fn validate(&self) -> Result<(), HubError> {
        if !is_hub_url(&self.url) {
            return Err(HubError::InvalidConfig {
                field: "hub.url",
                value: redacted_url(&self.url),
                allowed: "a URL that begins with https:// or http:// and has no login; `hub.token` has one",
            });
        }
        if self.timeout_s == 0 || 3600 < self.timeout_s {
            let value = self.timeout_s.to_string();
            return Err(HubError::InvalidConfig {
                field: "hub.timeout_s",
                value,
                allowed: "1 to 3600 (an hour)",
            });
        }
        Ok(())
    }

    /// The folder of fetched models.
    pub(super) fn cache_folder(&self) -> Result<PathBuf, HubError> {
        match &self.cache {
            Some(cache) => Ok(expanded(cache)),
            None => self.home_folder().map(|home| home.join("hub")),
        }
    }

    /// A client with the token, if there is one.
    pub(super) fn client(&self) -> Result<HubClient, HubError> {
        let limit = TimeLimit::NextBytes(Duration::from_secs(self.timeout_s));
        HubClient::try_new(&self.url, self.token()?, limit)
    }

    fn home_folder(&self) -> Result<PathBuf, HubError> {
        if let Some(home) = &self.home {
            return Ok(expanded(home));
        }
        let cache = variable("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(variable("HOME")?).join(".cache")));
        cache.map(|cache| cache.join("huggingface")).ok_or(HubError::InvalidConfig {
            field: "hub.home",
            value: "not given, and there is no HOME".to_owned(),
            allowed: "a folder",
        })
    }

    fn token(&self) -> Result<Option<Secret>, HubError> {
        if let Some(token) = self.token.as_ref().filter(|token| !token.expose().trim().is_empty()) {
            return Ok(Some(Secret::from(token.expose().trim())));
        }
        let read = |path: &Path| {
            let token = Secret::read(path).map_err(|error| HubError::InvalidConfig {
                field: "hub.token_file",
                value: format!("{}: {}", path.display(), with_causes(&error)),
                allowed: "a file with a token",
            })?;
            Ok(Some(Secret::from(token.expose().trim())).filter(|token| !token.expose().is_empty()))
        };
        if let Some(path) = &self.token_file {
            return read(&expanded(path));
        }
        match self.home_folder().map(|home| home.join("token")) {
            Ok(path) if path.is_file() => read(&path),
            _ => Ok(None),
        }
    }
}

/// The path with the user's folder in the place of a `~` at its beginning, as `huggingface_hub` reads its variables.
fn expanded(path: &Path) -> PathBuf {
    match (path.strip_prefix("~"), variable("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.to_owned(),
    }
}

/// Reads what `huggingface_hub` takes for true and false.
fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    let given = Value::deserialize(deserializer)?;
    let text = match &given {
        Value::Bool(is_on) => return Ok(*is_on),
        Value::String(text) => text.to_ascii_lowercase(),
        other => other.to_string(),
    };
    match text.as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "" | "null" | "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(D::Error::custom("true, false, 1, 0, yes, no, on or off")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sources;

    #[derive(Debug, Default, Serialize, Deserialize)]
    #[serde(default)]
    struct Section {
        hub: ModelHubConfig,
    }

    fn from_environment(variables: &[(&str, &str)]) -> crate::Result<ModelHubConfig> {
        let environment =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let sources = Sources { environment, ..Sources::default() };
        Ok(sources.load::<Section>("worker")?.value.hub)
    }

    #[test]
    fn the_variables_of_other_programs_set_the_hub() {
        let hub = from_environment(&[
            ("HF_ENDPOINT", "http://mirror:1"),
            ("HF_HOME", "/hf"),
            ("HF_HUB_OFFLINE", "1"),
            ("HF_TOKEN", "canary"),
        ])
        .unwrap();
        assert_eq!(hub.url, "http://mirror:1");
        assert!(hub.offline);
        assert_eq!(hub.cache_folder().unwrap(), Path::new("/hf/hub"));
        assert_eq!(hub.token().unwrap().unwrap().expose(), "canary");
        assert!(!format!("{hub:?}").contains("canary"));
        let hub = from_environment(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c"), ("HF_TOKEN", "")]).unwrap();
        assert_eq!(hub.cache_folder().unwrap(), Path::new("/c"));
        assert_eq!(hub.token().unwrap(), None);
        let error = from_environment(&[("HF_HUB_OFFLINE", "perhaps")]).unwrap_err().to_string();
        assert!(error.contains("HF_HUB_OFFLINE") && error.contains("true, false"), "{error}");
    }

    #[test]
    fn a_token_comes_from_the_home_folder_and_a_named_file_must_exist() {
        let home = tempfile::tempdir().unwrap();
        let hub = ModelHubConfig { home: Some(home.path().to_owned()), ..ModelHubConfig::default() };
        assert_eq!(hub.token().unwrap(), None);
        std::fs::write(home.path().join("token"), "of the home\n").unwrap();
        assert_eq!(hub.token().unwrap().unwrap().expose(), "of the home");
        let hub = ModelHubConfig { token_file: Some(home.path().join("none")), ..hub };
        assert!(hub.token().unwrap_err().to_string().contains("`hub.token_file`"));
    }

    #[test]
    fn a_bad_address_and_a_bad_time_are_refused_by_field() {
        ModelHubConfig::default().validate().unwrap();
        let message = |hub: ModelHubConfig| hub.validate().unwrap_err().to_string();
        let login = message(ModelHubConfig { url: "https://u:canary@h".to_owned(), ..Default::default() });
        assert!(login.contains("`hub.url`") && !login.contains("canary"), "{login}");
        let zero = message(ModelHubConfig { timeout_s: 0, ..Default::default() });
        assert_eq!(zero, "`hub.timeout_s` is 0; allowed: 1 to 3600 (an hour)");
    }
}
