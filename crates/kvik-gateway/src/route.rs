//! The paths whose requests go to a worker.

/// A path whose requests go to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Completions,
    Chat,
    Generate,
    Tokenize,
    Detokenize,
}

impl Route {
    /// In the order of their numbers.
    pub(crate) const ALL: [Self; 5] =
        [Self::Completions, Self::Chat, Self::Generate, Self::Tokenize, Self::Detokenize];

    /// The path, which is also its name in metrics and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Generate => "/generate",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
        }
    }

    /// Whether a request keeps a worker generating.
    pub(crate) fn is_generation(self) -> bool {
        matches!(self, Self::Completions | Self::Chat | Self::Generate)
    }
}
