//! From a URL to a remote tier.

use std::fmt;
use std::str::FromStr;

use kvik_types::{HIDDEN, RedisUrl, RedisUrlError};

use crate::error::{Result, TierError};
use crate::lm::{LmOptions, LmTier, LmUrl};
use crate::object::{ObjectOptions, ObjectTier, ObjectUrl};
use crate::plugin::{PluginTier, PluginUrl};
use crate::redis::{RedisOptions, RedisTier};
use crate::tier::{Tier, TierKind};

/// The address of a remote tier; its scheme says of which kind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoteUrl {
    /// `redis://`, `rediss://`, `redis+cluster://`, `rediss+cluster://`, `unix://`.
    Redis(RedisUrl),
    /// `s3://`, `gs://`, `az://`, `file://`.
    Object(ObjectUrl),
    /// `lm://`.
    Lm(LmUrl),
    /// `plugin://`, `mooncakestore://`.
    Plugin(PluginUrl),
}

/// How remote tiers work; those of one kind read their own part.
#[derive(Clone, Debug, Default)]
pub struct RemoteOptions {
    /// For Redis.
    pub redis: RedisOptions,
    /// For object stores.
    pub object: ObjectOptions,
    /// For servers of LMCache's protocol.
    pub lm: LmOptions,
}

/// Opens the tier at `url`.
///
/// No server is asked, so one that is down is found at the first call and not here. A plugin is loaded.
///
/// # Errors
/// [`TierError::Invalid`] if the URL or an option is, [`TierError::Io`] if this machine refuses, [`TierError::Remote`] if a
/// plugin does.
///
/// ```
/// use kvik_tier::{RemoteOptions, TierKind, open_remote};
///
/// let tier = open_remote(&"redis://127.0.0.1:6379".parse()?, &RemoteOptions::default())?;
/// assert_eq!(tier.kind(), TierKind::Redis);
/// # Ok::<(), kvik_tier::TierError>(())
/// ```
pub fn open_remote(url: &RemoteUrl, options: &RemoteOptions) -> Result<Box<dyn Tier>> {
    Ok(match url {
        RemoteUrl::Redis(url) => Box::new(RedisTier::open(url, &options.redis)?),
        RemoteUrl::Object(url) => Box::new(ObjectTier::open(url, &options.object)?),
        RemoteUrl::Lm(url) => Box::new(LmTier::open(url, &options.lm)?),
        RemoteUrl::Plugin(url) => Box::new(PluginTier::open(url)?),
    })
}

impl RemoteUrl {
    /// The kind of tier that is there.
    pub fn kind(&self) -> TierKind {
        match self {
            Self::Redis(_) => TierKind::Redis,
            Self::Object(_) => TierKind::Object,
            Self::Lm(_) => TierKind::Lm,
            Self::Plugin(_) => TierKind::Plugin,
        }
    }
}

impl FromStr for RemoteUrl {
    type Err = TierError;

    fn from_str(text: &str) -> Result<Self> {
        let scheme = text.split_once("://").map_or("", |(scheme, _)| scheme);
        if RedisUrl::has_scheme(scheme) {
            let url = text.parse::<RedisUrl>();
            return url
                .map(Self::Redis)
                .map_err(|error| TierError::invalid("url", &error.reason, RedisUrlError::ALLOWED));
        }
        if ObjectUrl::has_scheme(scheme) {
            return text.parse().map(Self::Object);
        }
        if scheme == LmUrl::SCHEME {
            return text.parse().map(Self::Lm);
        }
        if scheme == PluginUrl::SCHEME {
            return text.parse().map(Self::Plugin);
        }
        if scheme == PluginUrl::MOONCAKE_SCHEME {
            return PluginUrl::of_mooncake(text).map(Self::Plugin);
        }
        let allowed = "redis, rediss, valkey, valkeys, each also with +cluster, unix, s3, gs, az, file, lm, plugin, mooncakestore";
        // A password may have `://` in it; what stands before that is no scheme.
        let is_scheme =
            scheme.len() <= 32 && scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'+');
        let shown = if is_scheme { scheme } else { HIDDEN };
        Err(TierError::invalid("scheme of a remote URL", &shown, allowed))
    }
}

impl fmt::Display for RemoteUrl {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Redis(url) => url.fmt(formatter),
            Self::Object(url) => url.fmt(formatter),
            Self::Lm(url) => url.fmt(formatter),
            Self::Plugin(url) => url.fmt(formatter),
        }
    }
}
