//! Values of a configuration that are never printed.
//!
//! [`Secret`] and [`SecretUrl`] give their text to callers of `expose` only. Every other way out, `Debug`, `Display`
//! and `Serialize`, shows [`HIDDEN`] in place of what is secret, so configurations can be dumped, compared and logged
//! whole. An error of reading one never repeats what was given.

use std::cell::Cell;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::LazyLock;

pub use kvik_types::{HIDDEN, redacted_url};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use subtle::ConstantTimeEq as _;

use crate::error::{Result, RuntimeError};

/// Largest file of a secret, in bytes; more is no token or password.
const MAX_FILE_BYTES: u64 = 64 << 10;

thread_local! {
    /// Whether secrets are serialized as marks that differ where the secrets do.
    static IS_COMPARING: Cell<bool> = const { Cell::new(false) };
}

/// A password, a key or a token.
#[derive(Clone, Default)]
pub struct Secret(String);

/// An address that may carry a login, such as that of a Redis server.
///
/// It is printed as [`redacted_url`] shows it.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SecretUrl(String);

// === impl Secret ===

impl Secret {
    /// The text, for the place that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Reads a secret from a file, without line breaks at its end.
    ///
    /// # Errors
    /// If the file cannot be read, has more than 64 KiB, or is not UTF-8.
    pub fn read(path: &Path) -> Result<Self> {
        let io = |source| RuntimeError::Io { path: path.to_owned(), source };
        let n_bytes = std::fs::metadata(path).map_err(io)?.len();
        if MAX_FILE_BYTES < n_bytes {
            let reason = format!("{n_bytes} bytes; allowed: at most {MAX_FILE_BYTES}");
            return Err(RuntimeError::InvalidFile { path: path.to_owned(), reason });
        }
        let text = std::fs::read_to_string(path).map_err(io)?;
        Ok(Self(text.trim_end_matches(['\r', '\n']).to_owned()))
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl PartialEq for Secret {
    /// Takes a time that says nothing but whether the lengths differ.
    fn eq(&self, other: &Self) -> bool {
        self.0.as_bytes().ct_eq(other.0.as_bytes()).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(HIDDEN)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(HIDDEN)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(&self.0, HIDDEN, serializer)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize(deserializer).map(Self)
    }
}

// === impl SecretUrl ===

impl SecretUrl {
    /// The whole address, for the place that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for SecretUrl {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for SecretUrl {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}", redacted_url(&self.0))
    }
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&redacted_url(&self.0))
    }
}

impl Serialize for SecretUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(&self.0, &redacted_url(&self.0), serializer)
    }
}

impl<'de> Deserialize<'de> for SecretUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize(deserializer).map(Self)
    }
}

// === both ===

/// Runs `serialize` with secrets serialized as marks, which differ where the secrets do and mean nothing outside this
/// process.
pub(crate) fn comparing<T>(serialize: impl FnOnce() -> T) -> T {
    /// Ends the mode on every way out.
    struct End(bool);
    impl Drop for End {
        fn drop(&mut self) {
            IS_COMPARING.set(self.0);
        }
    }
    let _end = End(IS_COMPARING.replace(true));
    serialize()
}

fn serialize<S: Serializer>(text: &str, shown: &str, serializer: S) -> Result<S::Ok, S::Error> {
    /// Keyed by randomness of this process: a mark cannot be searched for.
    static MARKS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    if IS_COMPARING.get() {
        return serializer.serialize_u64(MARKS.hash_one(text));
    }
    serializer.serialize_str(shown)
}

fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    // Not as a string: the error would repeat what is there instead.
    match Value::deserialize(deserializer)? {
        Value::String(text) if text.contains(HIDDEN) => {
            Err(D::Error::custom(format!("the secret itself; `{HIDDEN}` stands for it where it is printed")))
        }
        Value::String(text) => Ok(text),
        _ => Err(D::Error::custom("text, in quotes if it looks like a number")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_way_of_printing_shows_a_secret() {
        let secret = Secret::from("canary");
        let url = SecretUrl::from("redis://u:canary@host:1/2");
        let json = serde_json::to_string(&(&secret, &url)).unwrap();
        assert_eq!(json, r#"["(hidden)","redis://(hidden)@host:1/2"]"#);
        for shown in [format!("{secret:?} {secret} {url:?} {url}"), json] {
            assert!(!shown.contains("canary"), "{shown}");
        }
        assert_eq!((secret.expose(), url.expose()), ("canary", "redis://u:canary@host:1/2"));
    }

    #[test]
    fn an_error_does_not_repeat_what_was_given() {
        for wrong in [json!(31_337), json!(true), json!(["31337"]), json!({"31337": 1}), json!("(hidden)")] {
            for error in [
                serde_json::from_value::<Secret>(wrong.clone()).unwrap_err(),
                serde_json::from_value::<SecretUrl>(wrong.clone()).unwrap_err(),
            ] {
                assert!(!error.to_string().contains("31337"), "{error}");
            }
        }
        assert_eq!(serde_json::from_value::<Option<Secret>>(json!("x")).unwrap(), Some("x".into()));
        assert_eq!(serde_json::from_value::<Option<Secret>>(Value::Null).unwrap(), None);
    }

    #[test]
    fn a_file_is_read_without_its_last_line_break() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "a b \r\n").unwrap();
        assert_eq!(Secret::read(&path).unwrap(), Secret::from("a b "));
        assert!(Secret::read(&folder.path().join("none")).unwrap_err().to_string().contains("none"));
        std::fs::write(&path, vec![b'x'; (64 << 10) + 1]).unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("65537 bytes"));
    }
}
