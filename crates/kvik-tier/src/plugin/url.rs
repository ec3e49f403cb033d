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
    /// The scheme of any library.
    pub const SCHEME: &'static str = "plugin";

    /// The scheme of the library for Mooncake's store.
    pub const MOONCAKE_SCHEME: &'static str = "mooncakestore";

    /// Where the library for Mooncake's store is unless `library=` says so.
    pub const MOONCAKE_LIBRARY: &'static str = "/usr/lib/kvik/mooncake_tier.so";

    /// Reads `mooncakestore://master:port?options`: the library for Mooncake's store, which is told where the master is.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if it has another form.
    pub fn of_mooncake(text: &str) -> Result<Self> {
        const ALLOWED: &str =
            "mooncakestore://host:port of Mooncake's master, and options behind a question mark";
        let refuse = || TierError::invalid("url", &"a mooncakestore:// address of another form", ALLOWED);
        let rest = text.strip_prefix("mooncakestore://").ok_or_else(refuse)?;
        let (master, options) = rest.split_once('?').unwrap_or((rest, ""));
        let master = master.strip_suffix('/').unwrap_or(master);
        let (host, port) = master.rsplit_once(':').ok_or_else(refuse)?;
        let is_host = !host.is_empty()
            && !host.contains(['/', '@', '&', '=', '\0'])
            && !host.contains(char::is_whitespace);
        if !is_host || port.parse::<u16>().is_err() || options.contains('\0') {
            return Err(refuse());
        }
        let mut library = Self::MOONCAKE_LIBRARY;
        let mut told = format!("master={master}");
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.strip_prefix("library=") {
                Some(path) => library = path,
                None => told.extend(["&", option]),
            }
        }
        format!("plugin://{library}?{told}").parse()
    }
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
    fn an_address_of_mooncakes_master_is_its_library_and_what_that_is_told() {
        for (text, path, options) in [
            ("mooncakestore://10.0.0.7:50051", PluginUrl::MOONCAKE_LIBRARY, "master=10.0.0.7:50051"),
            ("mooncakestore://[::1]:50051/", PluginUrl::MOONCAKE_LIBRARY, "master=[::1]:50051"),
            (
                "mooncakestore://h:1/?local=a&library=/opt/m.so&protocol=rdma",
                "/opt/m.so",
                "master=h:1&local=a&protocol=rdma",
            ),
        ] {
            let url = PluginUrl::of_mooncake(text).unwrap();
            assert_eq!((url.path.to_str(), url.options.as_str()), (Some(path), options), "{text}");
        }
        for text in [
            "mooncakestore://",
            "mooncakestore://h",
            "mooncakestore://:1",
            "mooncakestore://h:x",
            "mooncakestore://a@h:1",
            "mooncakestore://h:1?library=m.so",
        ] {
            assert!(PluginUrl::of_mooncake(text).is_err(), "{text}");
        }
    }

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
