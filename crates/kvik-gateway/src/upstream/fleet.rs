//! The backends of every model, as one immutable snapshot.

use std::sync::Arc;
use std::time::Duration;

use kvik_index::ring::Ring;

use crate::config::{PdProtocol, Role};
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
    /// Whether its backend is there when a request needs it, though it may have none now.
    pub(crate) is_managed: bool,
}

/// A backend's place in a group.
#[derive(Debug, Clone)]
pub(crate) struct Seat {
    pub(crate) backend: Arc<Backend>,
    /// False while it drains.
    pub(crate) takes_requests: bool,
    pub(crate) part: Part,
}

/// Which part of requests a backend takes, and how KV moves between it and others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) role: Role,
    /// `None` if KV does not move: it takes whole requests.
    pub(crate) transfer: Option<Arc<Transfer>>,
}

/// How KV moves between a backend and other engines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) protocol: PdProtocol,
    /// Where other engines reach it, if the protocol needs that.
    pub(crate) host: String,
    pub(crate) port: u16,
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
        self.groups.iter().any(|group| group.is_managed || group.seats.iter().any(Seat::is_usable))
    }
}

impl ModelGroup {
    /// Time until a backend may be usable again, if none is now.
    pub(crate) fn time_to_probe(&self) -> Duration {
        let seats = self.seats.iter().filter(|seat| seat.takes_requests);
        seats.map(|seat| seat.backend.time_to_probe()).min().unwrap_or(Duration::from_secs(1))
    }

    /// Whether requests for it can be served, now or after a wait.
    pub(crate) fn is_served(&self) -> bool {
        self.is_managed || !self.seats.is_empty()
    }

    /// The seat of a backend, and its number.
    pub(crate) fn seat_of(&self, backend: &Arc<Backend>) -> Option<(usize, &Seat)> {
        self.seats.iter().enumerate().find(|(_, seat)| Arc::ptr_eq(&seat.backend, backend))
    }

    /// Whether KV moves between some of its backends.
    pub(crate) fn has_parts(&self) -> bool {
        self.seats.iter().any(|seat| seat.part.transfer.is_some())
    }
}

impl Seat {
    pub(crate) fn is_usable(&self) -> bool {
        self.takes_requests && self.backend.is_usable()
    }

    /// Whether a request can be left to it alone.
    pub(crate) fn serves_whole_requests(&self) -> bool {
        // A server of SGLang that was started for one part refuses requests that name no other server.
        self.part.protocol() != Some(PdProtocol::Sglang)
    }
}

impl Part {
    /// How KV moves.
    pub(crate) fn protocol(&self) -> Option<PdProtocol> {
        self.transfer.as_ref().map(|transfer| transfer.protocol)
    }

    /// Whether it can compute prompts for a backend that takes KV over by `protocol`.
    pub(crate) fn prefills_by(&self, protocol: PdProtocol) -> bool {
        self.role.prefills() && self.protocol() == Some(protocol)
    }
}
