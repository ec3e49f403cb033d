//! The choice of a worker for a request that another data plane sends.
//!
//! A proxy asks where a request goes, sends it there itself, and tells what it sees of the answer. Admission, index, load and ring are
//! those of a request through the gateway, read and applied by the same code, and so is `/route/explain`.

mod picked;
mod refusal;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};

pub use self::picked::Picked;
pub use self::refusal::PickRefusal;
use crate::answer::WRONG_KEY;
use crate::answer::forward::{expected_output_tokens, find_group, wait_for_turn};
use crate::answer::record::{Ending, Record};
use crate::config::{GatewayConfig, millis};
use crate::disaggregation::{Disaggregation, Prefill};
use crate::error::Refusal;
use crate::metrics::Metrics;
use crate::placement::input::RouteInput;
use crate::placement::{Placed, answering, choose_among, place, place_at};
use crate::request::headers::{request_id, request_timeout};
use crate::request::peek::Peek;
use crate::request::routing_key::tagged;
use crate::route::Route;
use crate::state::{Shared, View};
use crate::upstream::backend::Backend;
use crate::upstream::exchange::Call;
use crate::upstream::fleet::ModelGroup;

/// The header by which traces go on.
const TRACE_PARENT: &str = "traceparent";

/// Chooses workers; clones are the same one.
#[derive(Debug, Clone)]
pub struct Picker {
    shared: Arc<Shared>,
}

/// A request that needs a worker.
#[derive(Debug, Clone, Default)]
pub struct PickRequest {
    /// Its path, with or without a query.
    pub path: String,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its whole body; `None` if it has none.
    pub body: Option<Bytes>,
    /// The only endpoints that may take it, each as `host:port` or as a host with any port; `None` means all.
    pub subset: Option<Vec<String>>,
    /// Endpoints that take it in this order, whatever their load and the index say.
    pub forced: Vec<String>,
    /// Endpoints to name behind the first one, at most.
    pub max_fallbacks: usize,
    /// Whether the data plane may see the cluster's token, which workers of kvik want.
    pub shows_token: bool,
}

/// Where a request goes.
struct Chosen {
    group: Arc<ModelGroup>,
    /// In the order in which they should be tried.
    backends: Vec<Arc<Backend>>,
    prefill: Option<Prefill>,
    /// Tokens of the request on its worker, and those of them that are the answer's.
    tokens: (u64, u64),
}

impl Picker {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// The largest request body that is looked at, in bytes; a larger one is refused.
    pub fn max_body_bytes(&self) -> usize {
        self.shared.view().config.max_body_bytes
    }

    /// The time that a whole request has at most, its answer included.
    pub fn request_timeout(&self) -> Duration {
        millis(self.shared.view().config.timeouts.request_ms)
    }

    /// The refusal of a request whose body is larger than [`max_body_bytes`](Self::max_body_bytes).
    pub fn too_large(&self) -> PickRefusal {
        refused(&Refusal::too_large(self.max_body_bytes()))
    }

    /// The refusal of a request for whose body there is no room beside those of others.
    pub fn bodies_full(&self) -> PickRefusal {
        refused(&Refusal::bodies_full())
    }

    /// Chooses a worker, after the wait for the request's turn if as many run as may. The request's load is on the worker until
    /// what is returned ends or is dropped. Dropping the future gives up the turn.
    ///
    /// # Errors
    /// With what the client is to be told.
    pub async fn pick(&self, mut request: PickRequest) -> Result<Picked, PickRefusal> {
        let route = Route::of_engine_path(&request.path);
        let mut record = Record::new(Arc::clone(&self.shared), route, request_id(&request.headers));
        let parent_before = request.headers.get(TRACE_PARENT).cloned();
        record.trace(&mut request.headers);
        let trace_parent: Option<HeaderValue> = request.headers.get(TRACE_PARENT).cloned();
        match choose(&mut record, route, &request).await {
            Ok(chosen) => {
                let config = &self.shared.view().config;
                let hides_key = !config.api_keys.is_empty() && !config.forward_authorization;
                let trace_parent = trace_parent.filter(|parent| parent_before.as_ref() != Some(parent));
                Ok(Picked::new(record, chosen, trace_parent, (request.shows_token, hides_key)))
            }
            Err(refusal) => {
                record.status = refusal.status.as_u16();
                record.end(Ending::Refused);
                Err(refused(&refusal))
            }
        }
    }
}

/// Counts a refusal, and makes it public.
fn refused(refusal: &Refusal) -> PickRefusal {
    Metrics::rejected(refusal.reason);
    PickRefusal::new(refusal)
}

async fn choose(record: &mut Record, route: Route, request: &PickRequest) -> Result<Chosen, Refusal> {
    let shared = Arc::clone(record.shared());
    let view = shared.view();
    let config = &*view.config;
    if !view.keys.accepts(&request.headers) {
        return Err(Refusal::unauthorized(WRONG_KEY));
    }
    let deadline = record.started() + request_timeout(&request.headers, config)?;
    let peek = match &request.body {
        None => None,
        Some(body) => match Peek::read(body) {
            Ok(peek) => Some(peek),
            // What another path takes need not be JSON.
            Err(_) if route == Route::Other => None,
            Err(error) => return Err(Refusal::invalid(error.message, error.param)),
        },
    };
    let named = peek.as_ref().filter(|peek| peek.model.is_some() || route != Route::Other);
    let named = match named {
        Some(peek) => Some((peek, Arc::clone(find_group(&view.fleet, peek)?))),
        None => None,
    };
    let n_body_bytes = request.body.as_ref().map_or(0, Bytes::len);
    record.permit = Some(wait_for_turn(record, n_body_bytes, config, deadline).await?);
    let (group, input, placed) = if let Some((peek, group)) = named {
        let output_tokens = expected_output_tokens(route, peek, config);
        let asked = (route, peek);
        let input =
            RouteInput::read(&shared, &group, asked, &request.headers, &config.routing, output_tokens).await;
        let placed = place_request(&group, &input, config, request);
        let placed = placed.ok_or_else(|| Refusal::no_backend(group.time_to_probe().as_secs() + 1))?;
        (group, input, placed)
    } else {
        let input = RouteInput::without_prompt(tagged(b'r', record.request_id.as_bytes()).into_owned());
        let (group, placed) = place_anywhere(&view, &input, config, request)?;
        (group, input, placed)
    };
    record.group = Some(Arc::clone(&group));
    record.is_stream = peek.as_ref().is_some_and(|peek| peek.is_stream);
    let Placed { load, reason } = placed;
    shared.metrics.decision(reason);
    let backend = Arc::clone(&load.backend);
    let tokens = (load.n_tokens, input.output_tokens);
    record.place(load, &group, input.lookup.as_ref());
    let call = Call {
        route,
        path: None,
        headers: &request.headers,
        query: None,
        body: request.body.clone().unwrap_or_default(),
        decode_at: None,
        until: deadline,
        deadline,
    };
    let parts = Disaggregation::new(&shared, config, &group, input.prompt());
    let prefill = parts.place_partner(&backend, &call)?;
    if prefill.is_some() {
        record.note_foreign_kv();
    }
    let backends = in_order(&group, &input, config, request, backend);
    Ok(Chosen { group, backends, prefill, tokens })
}

/// Places a request on the first usable one of the forced endpoints, else by the index, load and ring.
fn place_request(
    group: &ModelGroup,
    input: &RouteInput,
    config: &GatewayConfig,
    request: &PickRequest,
) -> Option<Placed> {
    if request.forced.is_empty() {
        return place(group, input.wanted(), &config.routing, &excluded(group, request));
    }
    let forced = request.forced.iter().find_map(|name| {
        let is_named = |backend: &&Arc<Backend>| is_endpoint(backend, name) && is_allowed(backend, request);
        let mut backends = group.seats.iter().filter(|seat| seat.is_usable()).map(|seat| &seat.backend);
        backends.find(is_named)
    })?;
    place_at(group, input.wanted(), &forced.base)
}

/// Places a request that names no model: on a backend of the first model that has one for it.
fn place_anywhere(
    view: &View,
    input: &RouteInput,
    config: &GatewayConfig,
    request: &PickRequest,
) -> Result<(Arc<ModelGroup>, Placed), Refusal> {
    for group in &view.fleet.groups {
        if let Some(placed) = place_request(group, input, config, request) {
            return Ok((Arc::clone(group), placed));
        }
    }
    let times = view.fleet.groups.iter().map(|group| group.time_to_probe());
    Err(Refusal::no_backend(times.min().unwrap_or_default().as_secs() + 1))
}

/// The chosen backend, then those that the same choice would take without the ones before.
fn in_order(
    group: &ModelGroup,
    input: &RouteInput,
    config: &GatewayConfig,
    request: &PickRequest,
    chosen: Arc<Backend>,
) -> Vec<Arc<Backend>> {
    let mut backends = vec![chosen];
    for name in &request.forced {
        let is_next = |other: &&Arc<Backend>| {
            is_endpoint(other, name)
                && is_allowed(other, request)
                && !backends.iter().any(|backend| Arc::ptr_eq(backend, other))
        };
        let mut usable = group.seats.iter().filter(|seat| seat.is_usable()).map(|seat| &seat.backend);
        let next = usable.find(is_next).map(Arc::clone);
        backends.extend(next);
    }
    let mut excluded = excluded(group, request);
    excluded.extend(backends.iter().map(Arc::clone));
    while request.forced.is_empty() && backends.len() <= request.max_fallbacks {
        let allowed = answering(group, &excluded);
        let Some(choice) = choose_among(group, input.wanted(), &config.routing, allowed) else { break };
        let next = &group.seats[choice.member].backend;
        backends.push(Arc::clone(next));
        excluded.push(Arc::clone(next));
    }
    backends
}

/// The backends that the subset of a request does not have.
fn excluded(group: &ModelGroup, request: &PickRequest) -> Vec<Arc<Backend>> {
    let backends = group.seats.iter().map(|seat| &seat.backend);
    backends.filter(|backend| !is_allowed(backend, request)).map(Arc::clone).collect()
}

fn is_allowed(backend: &Backend, request: &PickRequest) -> bool {
    request.subset.as_ref().is_none_or(|names| names.iter().any(|name| is_endpoint(backend, name)))
}

/// Whether a backend is at the endpoint `name`, which may be a host alone.
fn is_endpoint(backend: &Backend, name: &str) -> bool {
    let name = name.trim();
    let host = backend.endpoint.rsplit_once(':').map_or("", |(host, _)| host);
    backend.endpoint == name || host == name || host.trim_matches(['[', ']']) == name
}
