//! The paths whose requests go to a worker.

/// A path whose requests go to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    Completions,
    Chat,
    Generate,
    Tokenize,
    Detokenize,
    /// Begins a sequence that its client steps.
    Init,
    Step,
    Finish,
}

impl Route {
    /// In the order of their numbers.
    pub(crate) const ALL: [Self; 8] = [
        Self::Completions,
        Self::Chat,
        Self::Generate,
        Self::Tokenize,
        Self::Detokenize,
        Self::Init,
        Self::Step,
        Self::Finish,
    ];

    /// The path, which is also its name in metrics and logs.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Generate => "/generate",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::Init => "/inference/init",
            Self::Step => "/inference/step",
            Self::Finish => "/inference/finish",
        }
    }

    /// Whether it is a call about a sequence that its client steps.
    pub(crate) fn is_held(self) -> bool {
        matches!(self, Self::Init | Self::Step | Self::Finish)
    }

    /// Whether a request keeps a worker generating.
    pub(crate) fn is_generation(self) -> bool {
        matches!(self, Self::Completions | Self::Chat | Self::Generate)
    }
}
