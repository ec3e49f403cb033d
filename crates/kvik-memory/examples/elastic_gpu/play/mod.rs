//! Engines that share one device and check that nothing of theirs is lost.

use std::error::Error;
use std::str::FromStr;

pub(crate) mod engine;
pub(crate) mod scenario;

mod pattern;

/// The result of everything here: what fails ends the process with its words.
pub(crate) type Answer<T> = Result<T, Box<dyn Error>>;

/// Whose memory is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Host,
    /// The first GPU.
    Cuda,
}

impl Backend {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        [Self::Host, Self::Cuda]
            .into_iter()
            .find(|backend| backend.name() == name)
            .ok_or_else(|| format!("backend is `{name}`; allowed: host or cuda"))
    }
}
