//! Which library has a tier, and what it is told.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use kvik_types::HIDDEN;
use percent_encoding::percent_decode_str;

use crate::error::{Result, TierError};

/// `plugin:///path/to/library.so?options`. The options are not shown: they may have secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct PluginUrl {
    /// The library, an absolute path.
    pub path: PathBuf,
    /// What stands behind the question mark, as it is; empty without one.
    pub options: String,
}

impl PluginUrl {
    /// The only scheme.
    pub const SCHEME: &'static str = "plugin";
}

impl FromStr for PluginUrl {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self> {
        const ALLOWED: &str =
            "plugin:///path/to/library.so, an absolute path, and options behind a question mark";
        let refuse = || TierError::invalid("url", &"a plugin:// address of another form", ALLOWED);
        let rest = text.strip_prefix("plugin://").ok_or_else(refuse)?;
        let (path, options) = rest.split_once('?').unwrap_or((rest, ""));
        let path = percent_decode_str(path).decode_utf8().map_err(|_| refuse())?;
        let is_allowed =
            path.len() > 1 && path.starts_with('/') && !path.ends_with('/') && !path.contains('\0');
        if !is_allowed || options.contains('\0') {
            return Err(refuse());
        }
        Ok(Self { path: PathBuf::from(path.into_owned()), options: options.to_owned() })
    }
}

impl fmt::Display for PluginUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "plugin://{}", self.path.display())?;
        if self.options.is_empty() { Ok(()) } else { write!(formatter, "?{HIDDEN}") }
    }
}

impl fmt::Debug for PluginUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PluginUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_has_a_path_and_options_that_are_not_shown() {
        let url: PluginUrl = "plugin:///usr/lib/my%20tier.so?token=secret&size=1".parse().unwrap();
        assert_eq!(
            (url.path.to_str(), url.options.as_str()),
            (Some("/usr/lib/my tier.so"), "token=secret&size=1")
        );
        assert!(!format!("{url} {url:?}").contains("secret"));
        assert_eq!("plugin:///a.so".parse::<PluginUrl>().unwrap().to_string(), "plugin:///a.so");
        for text in
            ["plugin://", "plugin:///", "plugin://a.so", "plugin:///a/", "plugin:///a%00.so", "plugin:/a.so"]
        {
            let error = text.parse::<PluginUrl>().unwrap_err().to_string();
            assert!(error.contains("plugin:///path"), "{text}: {error}");
        }
    }
}
