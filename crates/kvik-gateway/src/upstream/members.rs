//! Which workers serve which model.
//!
//! Workers come from the coordinator's snapshots, other engines from the configuration.
//!
//! A snapshot of the same incarnation and a lower or equal `(term, version)` than the one held is ignored. A
//! snapshot of another incarnation, from the coordinator that the gateway follows, counts as one of a new term.
//! Members that a newer one of the same term lacks have left and are dropped. But a coordinator of a new term may
//! have lost its memory, and one that lists no members at all may have been cut off from all of them: the members
//! that such a snapshot lacks are retained. A retained member keeps its place on the ring until it is listed
//! again, does not answer `/ready`, or the time for retaining is over, in which every worker that lives has long
//! registered again. So a coordinator that restarts empty moves no key, and a worker that is gone leaves within a
//! few seconds.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvik_index::ring::{Ring, RingHash};
use kvik_proto::coordinator::{self, Member, RingConfig, Snapshot, WorkerRole, WorkerState};
use tokio::time::Instant;

use crate::config::{BackendConfig, GatewayConfig, PdProtocol, Role, same_url};
use crate::upstream::backend::{Backend, BackendKind};
use crate::upstream::fleet::{Fleet, ModelGroup, Part, Seat, Transfer};

/// Largest weight on the ring; a message cannot make the ring larger.
const MAX_WEIGHT: f64 = 100.0;
/// Models remembered after their last worker has gone, so that they are unavailable and not
/// unknown.
const MAX_KNOWN_MODELS: usize = 1024;

/// The members of all sources.
#[derive(Debug, Default)]
pub(crate) struct MemberBook {
    snapshot: Option<Snapshot>,
    /// By id: members that the snapshot lacks, and until when they are kept.
    retained: BTreeMap<String, (Member, Instant)>,
    engines: Vec<Engine>,
    /// By model: those of a controller of engines, with the address of the engine while it takes requests.
    managed: BTreeMap<String, Option<String>>,
    /// By id; loads and breakers live here through all changes.
    backends: HashMap<String, Arc<Backend>>,
    /// Backends that have left the fleet while answers of theirs may be on their way.
    departed: Vec<Weak<Backend>>,
    known_models: BTreeSet<String>,
}

/// An engine of the configuration, or one that was discovered.
#[derive(Debug, Clone, PartialEq)]
struct Engine {
    origin: Origin,
    /// Without a slash at the end; its id.
    url: String,
    weight: f64,
    part: Part,
    /// Whether the configuration names the model.
    is_model_given: bool,
    models: Vec<String>,
}

/// Where an engine comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Configuration,
    /// A program in this process that finds engines.
    Discovery,
}

impl MemberBook {
    /// Takes a snapshot; returns whether the fleet differs.
    pub(crate) fn apply(&mut self, snapshot: Snapshot, retain: Duration, now: Instant) -> bool {
        let held = self.snapshot.take();
        let is_restarted = held.as_ref().is_some_and(|held| held.incarnation != snapshot.incarnation);
        let is_new_term = is_restarted || held.as_ref().is_none_or(|held| held.term < snapshot.term);
        if let Some(held) = held {
            if is_restarted {
                let (term, held_term) = (snapshot.term, held.term);
                tracing::info!(term, held_term, "following another incarnation of the coordinator");
            } else if (snapshot.term, snapshot.version) <= (held.term, held.version) {
                self.snapshot = Some(held);
                return false;
            }
            if is_same_fleet(&held, &snapshot) && self.retained.is_empty() {
                self.snapshot = Some(snapshot);
                return false;
            }
            if is_new_term || snapshot.members.is_empty() {
                for member in held.members {
                    self.retained.insert(member.worker.id.clone(), (member, now + retain));
                }
            }
        }
        for member in &snapshot.members {
            self.retained.remove(&member.worker.id);
        }
        if !self.retained.is_empty() {
            let n_retained = self.retained.len();
            tracing::info!(
                term = snapshot.term,
                n_retained,
                "keeping members that the coordinator does not list"
            );
        }
        self.snapshot = Some(snapshot);
        true
    }

    /// Drops a retained member; returns whether there was one.
    pub(crate) fn drop_retained(&mut self, id: &str) -> bool {
        self.retained.remove(id).is_some()
    }

    /// Drops retained members whose time is over; returns whether there were any.
    pub(crate) fn expire_retained(&mut self, now: Instant) -> bool {
        let n_before = self.retained.len();
        self.retained.retain(|_, (_, until)| now < *until);
        n_before != self.retained.len()
    }

    /// Id and address of the retained members.
    pub(crate) fn retained(&self) -> Vec<(String, String)> {
        self.retained
            .values()
            .map(|(member, _)| (member.worker.id.clone(), member.worker.address.clone()))
            .collect()
    }

    /// Replaces the engines of an origin; what was learned about those that stay is kept. Returns whether the fleet differs. An engine that
    /// both origins name is that of the configuration.
    pub(crate) fn set_backends(&mut self, origin: Origin, backends: &[BackendConfig]) -> bool {
        let before = self.engines.clone();
        self.engines.retain(|engine| engine.origin != origin);
        for backend in backends {
            let learned = before.iter().find(|engine| same_url(&engine.url, &backend.url));
            let learned = learned.filter(|engine| !engine.is_model_given).map(|engine| engine.models.clone());
            self.engines.push(Engine {
                origin,
                url: backend.url.trim_end_matches('/').to_owned(),
                weight: backend.weight.unwrap_or(1.0),
                part: part(backend),
                is_model_given: backend.model.is_some(),
                models: backend.model.clone().map_or(learned.unwrap_or_default(), |model| vec![model]),
            });
        }
        let rank = |engine: &Engine| (engine.origin == Origin::Discovery, engine.url.clone());
        self.engines.sort_by_key(rank);
        let mut known = BTreeSet::new();
        self.engines.retain(|engine| known.insert(engine.url.clone()));
        before != self.engines
    }

    /// Sets where the engine of a managed model takes requests, if it does now; returns whether the fleet differs.
    pub(crate) fn manage(&mut self, model: &str, url: Option<&str>) -> bool {
        let url = url.map(|url| url.trim_end_matches('/').to_owned());
        let before = self.managed.insert(model.to_owned(), url.clone());
        before != Some(url)
    }

    /// Forgets a managed model; returns whether there was one.
    pub(crate) fn unmanage(&mut self, model: &str) -> bool {
        self.known_models.remove(model);
        self.managed.remove(model).is_some()
    }

    /// Addresses of engines whose models are to be asked for, and whether they are known.
    pub(crate) fn engines_to_ask(&self) -> Vec<(String, bool)> {
        let asked = self.engines.iter().filter(|engine| !engine.is_model_given);
        asked.map(|engine| (engine.url.clone(), !engine.models.is_empty())).collect()
    }

    /// Takes what an engine lists; returns whether the fleet differs.
    pub(crate) fn learn_models(&mut self, url: &str, models: Vec<String>) -> bool {
        let asked = self.engines.iter_mut().find(|engine| engine.url == url && !engine.is_model_given);
        let Some(engine) = asked else { return false };
        let is_new = engine.models != models;
        engine.models = models;
        is_new
    }

    /// The fleet of all sources; backends that are no longer in it are forgotten.
    pub(crate) fn fleet(&mut self, config: &GatewayConfig) -> Fleet {
        let ring = self.snapshot.as_ref().map_or(config.routing.ring, |snapshot| snapshot.ring);
        let mut before = std::mem::take(&mut self.backends);
        let mut left = Vec::new();
        let mut by_model: BTreeMap<String, Vec<(Seat, f64)>> = BTreeMap::new();
        let listed = self.snapshot.iter().flat_map(|snapshot| &snapshot.members);
        let members: Vec<&Member> = listed.chain(self.retained.values().map(|(member, _)| member)).collect();
        let parted = members.iter().filter(|member| member.worker.role != WorkerRole::Both);
        let parted: BTreeSet<&str> = parted.map(|member| member.worker.model.as_str()).collect();
        for member in &members {
            let worker = &member.worker;
            let life = (BackendKind::Worker, worker.epoch, worker.address.as_str());
            let backend = adopt(&mut before, &mut left, &worker.id, life);
            let takes_requests = member.state == WorkerState::Ready;
            let part = worker_part(worker.role, parted.contains(worker.model.as_str()));
            let seat = Seat { backend: Arc::clone(&backend), takes_requests, part };
            by_model.entry(worker.model.clone()).or_default().push((seat, member.ring_weight));
            self.backends.insert(worker.id.clone(), backend);
        }
        for engine in &self.engines {
            let life = (BackendKind::OpenAi, 0, engine.url.as_str());
            let backend = adopt(&mut before, &mut left, &engine.url, life);
            for model in &engine.models {
                let part = engine.part.clone();
                let seat = Seat { backend: Arc::clone(&backend), takes_requests: true, part };
                by_model.entry(model.clone()).or_default().push((seat, engine.weight));
            }
            self.backends.insert(engine.url.clone(), backend);
        }
        for (model, url) in &self.managed {
            let seats = by_model.entry(model.clone()).or_default();
            let Some(url) = url else { continue };
            let backend = adopt(&mut before, &mut left, url, (BackendKind::OpenAi, 0, url));
            let part = Part::default();
            seats.push((Seat { backend: Arc::clone(&backend), takes_requests: true, part }, 1.0));
            self.backends.insert(url.clone(), backend);
        }
        self.departed.retain(|backend| 0 < backend.strong_count());
        left.extend(before.into_values());
        for backend in left {
            backend.leave();
            self.departed.push(Arc::downgrade(&backend));
        }
        for model in by_model.keys() {
            if self.known_models.len() < MAX_KNOWN_MODELS {
                self.known_models.insert(model.clone());
            }
        }
        for model in &self.known_models {
            by_model.entry(model.clone()).or_default();
        }
        let groups = by_model.into_iter().map(|(model, seats)| {
            let is_managed = self.managed.contains_key(&model);
            Arc::new(ModelGroup { is_managed, ..group(model, seats, ring) })
        });
        Fleet { groups: groups.collect() }
    }

    /// All backends whose health matters: those of the fleet, and those that have left it and still
    /// answer requests.
    pub(crate) fn probed_backends(&self) -> Vec<Arc<Backend>> {
        let departed = self.departed.iter().filter_map(Weak::upgrade);
        let answering = departed.filter(|backend| 0 < backend.outstanding_tokens());
        self.backends().into_iter().chain(answering).collect()
    }

    /// All backends.
    pub(crate) fn backends(&self) -> Vec<Arc<Backend>> {
        self.backends.values().map(Arc::clone).collect()
    }
}

/// Takes the backend that is there if it is the same life at the same address, or makes a new one and adds the other to
/// those that `left`.
fn adopt(
    before: &mut HashMap<String, Arc<Backend>>,
    left: &mut Vec<Arc<Backend>>,
    id: &str,
    (kind, epoch, address): (BackendKind, u64, &str),
) -> Arc<Backend> {
    let is_same = |backend: &Backend| {
        backend.kind == kind && backend.epoch == epoch && same_url(&backend.base, address)
    };
    match before.remove(id) {
        Some(backend) if is_same(&backend) => backend,
        replaced => {
            left.extend(replaced);
            Arc::new(Backend::new(id.to_owned(), kind, epoch, address))
        }
    }
}

/// The part of a worker; requests move between those of a model only if one of them says that it takes a part.
fn worker_part(role: WorkerRole, is_parted: bool) -> Part {
    let role = match role {
        WorkerRole::Prefill => Role::Prefill,
        WorkerRole::Decode => Role::Decode,
        WorkerRole::Both => Role::Both,
    };
    let transfer = Transfer { protocol: PdProtocol::Kvik, host: String::new(), port: 0 };
    Part { role, transfer: is_parted.then(|| Arc::new(transfer)) }
}

/// The part of an engine of the configuration.
fn part(backend: &BackendConfig) -> Part {
    let transfer = backend.pd.map(|protocol| {
        let host = || {
            let uri = backend.url.parse::<http::Uri>().ok();
            uri.and_then(|uri| Some(uri.host()?.trim_matches(['[', ']']).to_owned())).unwrap_or_default()
        };
        let host = backend.pd_host.clone().unwrap_or_else(host);
        let port = backend.pd_port.or(protocol.default_port()).unwrap_or(0);
        Arc::new(Transfer { protocol, host, port })
    });
    Part { role: backend.role, transfer }
}

fn group(model: String, mut seats: Vec<(Seat, f64)>, ring_config: RingConfig) -> ModelGroup {
    let hash = match ring_config.hash {
        coordinator::RingHash::Xxh3 => RingHash::Xxh3,
        coordinator::RingHash::Md5 => RingHash::Md5,
    };
    seats.sort_by(|left, right| left.0.backend.id.cmp(&right.0.backend.id));
    seats.dedup_by(|left, right| left.0.backend.id == right.0.backend.id);
    let weights: Vec<(&str, f64)> =
        seats.iter().map(|(seat, weight)| (seat.backend.id.as_str(), sane_weight(*weight))).collect();
    let ring = Ring::build(hash, ring_config.virtual_nodes.clamp(1, 640), &weights);
    let ring = ring.or_else(|error| {
        // Weights are clamped and ids are distinct.
        tracing::error!(%model, %error, "the ring cannot be built; no worker of the model is used");
        Ring::build::<&str>(hash, 1, &[])
    });
    let weights: Vec<f64> = weights.iter().map(|(_, weight)| *weight).collect();
    ModelGroup {
        model,
        ring: ring.expect("an empty ring has no weight that could be wrong"),
        seats: seats.into_iter().map(|(seat, _)| seat).collect(),
        weights,
        load_factor: ring_config.load_factor,
        is_managed: false,
    }
}

fn sane_weight(weight: f64) -> f64 {
    if weight.is_finite() { weight.clamp(0.0, MAX_WEIGHT) } else { 1.0 }
}

/// Whether two snapshots route alike: everything but the loads, which this gateway counts itself.
fn is_same_fleet(left: &Snapshot, right: &Snapshot) -> bool {
    let is_same_member = |(left, right): (&Member, &Member)| {
        left.worker == right.worker
            && left.state == right.state
            && left.ring_weight.to_bits() == right.ring_weight.to_bits()
    };
    left.ring == right.ring
        && left.members.len() == right.members.len()
        && left.members.iter().zip(&right.members).all(is_same_member)
}
