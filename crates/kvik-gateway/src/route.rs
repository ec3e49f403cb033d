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
    /// Any other path; only data planes that ask for a worker have such requests.
    Other,
}

impl Route {
    /// Those that are served, in the order of their numbers; [`Other`](Self::Other) has the number after them.
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
            Self::Other => "other",
        }
    }

    /// The route of a request to an engine, by its path.
    pub(crate) fn of_engine_path(path: &str) -> Self {
        let path = path.split('?').next().unwrap_or_default();
        [Self::Completions, Self::Chat].into_iter().find(|route| route.name() == path).unwrap_or(Self::Other)
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
