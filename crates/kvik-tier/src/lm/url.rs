//! Where a server of LMCache's protocol is.

use std::fmt;
use std::str::FromStr;

use url::Url;

use crate::error::{Result, TierError};

/// `lm://host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LmUrl {
    /// Name or address of the server, without brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
}

impl LmUrl {
    /// The only scheme.
    pub const SCHEME: &'static str = "lm";
}

impl FromStr for LmUrl {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self> {
        const ALLOWED: &str =
            "lm://host:port, such as lm://10.0.0.7:65432, without a login, a path or options";
        let refuse = || TierError::invalid("url", &"an lm:// address of another form", ALLOWED);
        let url = Url::parse(text).map_err(|_| refuse())?;
        let is_bare = url.username().is_empty()
            && url.password().is_none()
            && matches!(url.path(), "" | "/")
            && url.query().is_none()
            && url.fragment().is_none();
        let (Some(host), Some(port @ 1..)) = (url.host_str(), url.port()) else { return Err(refuse()) };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if url.scheme() != Self::SCHEME || !is_bare || host.is_empty() {
            return Err(refuse());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for LmUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(formatter, "lm://[{host}]:{port}")
        } else {
            write!(formatter, "lm://{host}:{port}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_shown() {
        for text in ["lm://localhost:65432", "lm://10.0.0.7:1", "lm://[::1]:65432"] {
            assert_eq!(text.parse::<LmUrl>().unwrap().to_string(), text);
        }
        assert_eq!("lm://h:1/".parse::<LmUrl>().unwrap().port, 1);
        let wrong = [
            "lm://h",
            "lm://h:0",
            "lm://h:70000",
            "lm://:1",
            "lm://u:secret@h:1",
            "lm://h:1/x",
            "lm://h:1?a=b",
        ];
        for text in wrong {
            let error = text.parse::<LmUrl>().unwrap_err().to_string();
            assert!(error.contains("lm://host:port") && !error.contains("secret"), "{text}: {error}");
        }
    }
}
