//! The name of a repository.

use std::fmt;
use std::str::FromStr;

/// What the name of a repository may be, for messages.
pub const REPOSITORY_FORM: &str = "owner/name or owner/name@revision, of letters, digits, `-`, `_` and `.`";

/// Longest name of a repository with its revision.
const MAX_NAME_BYTES: usize = 256;

/// The revision of a repository whose name says none.
const DEFAULT_REVISION: &str = "main";

/// A repository at a revision, as `owner/name` or `owner/name@revision`; without a revision it is `main`.
///
/// Its words can be parts of paths and addresses: they lead nowhere else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    name: String,
    revision: String,
}

/// The text is not the name of a repository; [`REPOSITORY_FORM`] says what one is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidRepository;

impl FromStr for Repository {
    type Err = InvalidRepository;

    fn from_str(text: &str) -> Result<Self, InvalidRepository> {
        let (name, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let is_name = name.split('/').count() <= 2 && name.split('/').all(is_word);
        if text.len() > MAX_NAME_BYTES || !is_name || !is_word(revision) {
            return Err(InvalidRepository);
        }
        Ok(Self { name: name.to_owned(), revision: revision.to_owned() })
    }
}

impl Repository {
    /// The owner and the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Whether its name has an owner; what has none may be meant as a folder.
    pub(super) fn has_owner(&self) -> bool {
        self.name.contains('/')
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.name)?;
        if self.revision != DEFAULT_REVISION {
            write!(formatter, "@{}", self.revision)?;
        }
        Ok(())
    }
}

/// Whether a text can be a part of a path without leading elsewhere, and of an address as it stands.
pub(super) fn is_word(word: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !word.is_empty() && word.len() <= MAX_NAME_BYTES && word.bytes().all(is_plain) && !word.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_is_a_name_that_leads_nowhere_else() {
        let parsed = |text: &str| text.parse::<Repository>();
        let repository = parsed("meta-llama/Llama-3.1-8B@v1.0").unwrap();
        assert_eq!((repository.name(), repository.revision()), ("meta-llama/Llama-3.1-8B", "v1.0"));
        assert_eq!(repository.to_string(), "meta-llama/Llama-3.1-8B@v1.0");
        assert_eq!(parsed("gpt2").unwrap().revision(), "main");
        assert_eq!(parsed("a/b").unwrap().to_string(), "a/b");
        let long = "a".repeat(300);
        for text in ["", "a/b/c", "../b", "a/..", "a/b@../c", "a/b@", "a b/c", "a/b?x", "/a", "a/", &long] {
            assert_eq!(parsed(text), Err(InvalidRepository), "{text}");
        }
    }
}
