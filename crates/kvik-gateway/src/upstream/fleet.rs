//! The backends of every model, as one immutable snapshot.

use std::sync::Arc;
use std::time::Duration;

use kvik_index::ring::Ring;

use crate::upstream::backend::Backend;

/// All models and the backends that serve them; immutable, replaced as a whole.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    /// By model.
    pub(crate) groups: Vec<Arc<ModelGroup>>,
}

/// The backends of one model.
#[derive(Debug)]
pub(crate) struct ModelGroup {
    pub(crate) model: String,
    pub(crate) ring: Ring,
    /// Each by its place in [`Ring::members`].
    pub(crate) seats: Vec<Seat>,
    /// Each by its place in [`Ring::members`].
    pub(crate) weights: Vec<f64>,
    pub(crate) load_factor: f64,
}

/// A backend's place in a group.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) backend: Arc<Backend>,
    /// False while it drains.
    pub(crate) takes_requests: bool,
}

impl Fleet {
    /// The group of `model`.
    pub(crate) fn group(&self, model: &str) -> Option<&Arc<ModelGroup>> {
        let place = self.groups.binary_search_by(|group| group.model.as_str().cmp(model)).ok()?;
        Some(&self.groups[place])
    }

    /// The only model there is, if there is only one.
    pub(crate) fn only_group(&self) -> Option<&Arc<ModelGroup>> {
        match self.groups.as_slice() {
            [group] => Some(group),
            _ => None,
        }
    }

    /// Whether some request can be served.
    pub(crate) fn is_usable(&self) -> bool {
        self.groups.iter().any(|group| group.seats.iter().any(Seat::is_usable))
    }
}

impl ModelGroup {
    /// Time until a backend may be usable again, if none is now.
    pub(crate) fn time_to_probe(&self) -> Duration {
        let seats = self.seats.iter().filter(|seat| seat.takes_requests);
        seats.map(|seat| seat.backend.time_to_probe()).min().unwrap_or(Duration::from_secs(1))
    }
}

impl Seat {
    pub(crate) fn is_usable(&self) -> bool {
        self.takes_requests && self.backend.is_usable()
    }
}
