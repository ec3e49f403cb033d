//! State in the API server of Kubernetes, for any number of coordinators.
//!
//! | object | what |
//! |---|---|
//! | Lease `<name>` | the leader: who, its base address and its term, as annotations |
//! | `ConfigMap` `<name>-workers`, `<name>-stores` | the members of a kind, and the term that wrote them last |
//!
//! The API server changes one object at a time, if it is the one that the writer has seen. So terms are kept out of each
//! other's way by the members' object itself: a new leader writes its term into it before it reads the members, and from
//! then on every write of an earlier leader is refused, because that has not seen the object. What the earlier leader wrote
//! before is read by the new one.
//!
//! **Clocks.** Times in the Lease are for people. A coordinator takes a lead over when it has not seen the Lease change for
//! its duration, by its own monotonic clock; the leader counts its time from before it asked for the renewal. So
//! it stops first, whatever the clocks of the two say.
//!
//! A `ConfigMap` holds 1 MiB: some two thousand workers.

mod api;
mod objects;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::time::Duration;

use kvik_proto::coordinator::WorkerInfo;
use kvik_proto::stores::StoreInfo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

use self::api::{Failure, KubernetesApi};
use self::objects::{Lease, MemberMap};
use super::record::{StoredRecord, unix_ms};
use super::{Role, StateBackend, StateError};
use crate::config::{KubernetesStateConfig, MAX_LEASE_DURATION_S};
use crate::error::{CoordinatorError, Result};
use crate::membership::{Change, MemberInfo, Record};

/// Time between two looks of a follower at the Lease.
const FOLLOWER_INTERVAL: Duration = Duration::from_millis(500);
/// Tries of a write that others get in the way of: people and tools that annotate objects.
const MAX_TRIES: usize = 16;

/// Leader and members in the API server.
#[derive(Debug)]
pub(crate) struct KubernetesState {
    api: KubernetesApi,
    name: String,
    duration_s: u64,
    /// Base address of this coordinator.
    address: String,
    /// This life of this coordinator.
    identity: String,
    lead: Mutex<Option<Lead>>,
    seen: Mutex<Option<Seen>>,
    /// The members' objects as they were written last, by kind; locked while one is written.
    maps: tokio::sync::Mutex<BTreeMap<&'static str, Claimed>>,
}

/// A lead that is held.
#[derive(Debug, Clone)]
struct Lead {
    term: u64,
    lease: Lease,
}

/// The Lease of another holder.
#[derive(Debug)]
struct Seen {
    version: String,
    /// When this version was seen first; it was written before.
    since: Instant,
}

/// An object that has the term of this coordinator.
#[derive(Debug, Clone)]
struct Claimed {
    term: u64,
    map: MemberMap,
    members: BTreeMap<String, Value>,
}

// === impl KubernetesState ===

impl KubernetesState {
    /// The state in the API server of `config`, for the coordinator at `address`.
    ///
    /// # Errors
    /// If no namespace is configured and that of the pod cannot be read.
    pub(crate) fn new(config: &KubernetesStateConfig, address: String) -> Result<Self> {
        let namespace = match &config.namespace {
            Some(namespace) => namespace.clone(),
            None => pod_namespace(&config.namespace_file)?,
        };
        // Several tries fit into the time of a lead.
        let timeout = (Duration::from_secs(config.lease_duration_s) / 3).min(Duration::from_secs(5));
        // Unlike the address it is never that of an earlier life.
        let identity = format!("{address}_{:016x}", RandomState::new().hash_one(0));
        Ok(Self {
            api: KubernetesApi::new(config.clone(), namespace, timeout),
            name: config.name.clone(),
            duration_s: config.lease_duration_s,
            address,
            identity,
            lead: Mutex::new(None),
            seen: Mutex::new(None),
            maps: tokio::sync::Mutex::default(),
        })
    }

    /// Renews the lead; `None` if it is lost.
    async fn renew(&self, lead: Lead) -> Result<Option<Role>, StateError> {
        let Lead { term, mut lease } = lead;
        for _ in 0..MAX_TRIES {
            let sent = Instant::now();
            lease.renew();
            match self.api.replace(&self.name, &lease).await {
                Ok(renewed) => return Ok(Some(self.leader(term, renewed, sent))),
                Err(Failure::NotFound) => return Ok(None),
                Err(Failure::Conflict) => {}
                Err(failure) => return Err(failure.into()),
            }
            lease = match self.api.get(&self.name).await {
                Ok(lease) => lease,
                Err(Failure::NotFound) => return Ok(None),
                Err(failure) => return Err(failure.into()),
            };
            if lease.holder() != self.identity || lease.metadata.term() != Some(term) {
                return Ok(None);
            }
        }
        Err(Failure::Conflict.into())
    }

    /// Tries to become leader.
    async fn campaign(&self) -> Result<Role, StateError> {
        let (mut lease, is_new) = match self.api.get(&self.name).await {
            Ok(lease) => (lease, false),
            Err(Failure::NotFound) => (Lease::new(&self.name), true),
            Err(failure) => return Err(failure.into()),
        };
        if !is_new && !self.is_free(&lease) {
            return Ok(self.follower(&lease));
        }
        let term = match lease.metadata.term() {
            Some(term) => term.saturating_add(1),
            // The Lease is new, or has lost its term: later than any that was counted up from a clock.
            None => unix_ms().max(self.last_term().await?.saturating_add(1)),
        };
        lease.take(&self.identity, &self.address, term, self.duration_s);
        let sent = Instant::now();
        let taken =
            if is_new { self.api.create(&lease).await } else { self.api.replace(&self.name, &lease).await };
        match taken {
            Ok(lease) => Ok(self.leader(term, lease, sent)),
            // Another one was faster; the next look tells which.
            Err(Failure::Conflict | Failure::NotFound) => Ok(Role::Follower { leader: None }),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Says whether the lead may be taken: it was given up, its holder does not renew it, or it was taken by a campaign of
    /// this very process whose answer was lost.
    fn is_free(&self, lease: &Lease) -> bool {
        if lease.holder().is_empty() || lease.holder() == self.identity {
            return true;
        }
        let now = Instant::now();
        let mut seen = self.seen.lock();
        match &*seen {
            Some(seen) if seen.version == lease.metadata.resource_version => {
                // The holder's promise, unless it is one that would keep others out for long.
                let duration_s = lease.duration_s().unwrap_or(self.duration_s).min(MAX_LEASE_DURATION_S);
                Duration::from_secs(duration_s) <= now.saturating_duration_since(seen.since)
            }
            _ => {
                *seen = Some(Seen { version: lease.metadata.resource_version.clone(), since: now });
                false
            }
        }
    }

    /// The highest term under which members were written.
    async fn last_term(&self) -> Result<u64, StateError> {
        let mut last = 0;
        for folder in [WorkerInfo::FOLDER, StoreInfo::FOLDER] {
            match self.api.get::<MemberMap>(&self.map_name(folder)).await {
                Ok(map) => last = last.max(map.metadata.term().unwrap_or_default()),
                Err(Failure::NotFound) => {}
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(last)
    }

    fn leader(&self, term: u64, lease: Lease, sent: Instant) -> Role {
        *self.lead.lock() = Some(Lead { term, lease });
        *self.seen.lock() = None;
        Role::Leader { term, until: Some(sent + Duration::from_secs(self.duration_s)) }
    }

    fn follower(&self, lease: &Lease) -> Role {
        // Our own address is what is left of an earlier life.
        let leader = lease.address().filter(|address| *address != self.address);
        Role::Follower { leader: leader.map(ToOwned::to_owned) }
    }

    fn map_name(&self, folder: &str) -> String {
        format!("{}-{folder}", self.name)
    }

    /// Puts the term into the members' object, which ends the writes of earlier terms.
    async fn claim(&self, term: u64, folder: &'static str) -> Result<Claimed, StateError> {
        let name = self.map_name(folder);
        for _ in 0..MAX_TRIES {
            let written = match self.api.get::<MemberMap>(&name).await {
                Ok(mut map) => {
                    if map.metadata.term().is_some_and(|held| term < held) {
                        return Err(StateError::Fenced);
                    }
                    map.metadata.set_term(term);
                    self.api.replace(&name, &map).await
                }
                Err(Failure::NotFound) => {
                    let mut map = MemberMap::new(&name);
                    map.metadata.set_term(term);
                    self.api.create(&map).await
                }
                Err(failure) => return Err(failure.into()),
            };
            match written {
                Ok(map) => {
                    let members = map.members();
                    return Ok(Claimed { term, map, members });
                }
                // An earlier leader wrote meanwhile, or a later one claimed: look again.
                Err(Failure::Conflict | Failure::NotFound) => {}
                Err(failure) => return Err(failure.into()),
            }
        }
        Err(Failure::Conflict.into())
    }

    fn is_led_under(&self, term: u64) -> bool {
        self.lead.lock().as_ref().is_some_and(|lead| lead.term == term)
    }
}

impl StateBackend for KubernetesState {
    fn incarnation(&self) -> u64 {
        0
    }

    fn elect_interval(&self, role: &Role) -> Duration {
        match role {
            Role::Leader { .. } => Duration::from_secs(self.duration_s) / 4,
            Role::Follower { .. } => FOLLOWER_INTERVAL,
        }
    }

    async fn elect(&self) -> Result<Role, StateError> {
        let lead = self.lead.lock().clone();
        if let Some(lead) = lead {
            match self.renew(lead).await? {
                Some(role) => return Ok(role),
                None => *self.lead.lock() = None,
            }
        }
        self.campaign().await
    }

    async fn resign(&self) {
        *self.lead.lock() = None;
        // A campaign whose answer is not known may have taken the Lease too: the identity tells.
        for _ in 0..MAX_TRIES {
            let released = match self.api.get::<Lease>(&self.name).await {
                Ok(lease) if lease.holder() != self.identity => return,
                Ok(mut lease) => {
                    lease.release();
                    self.api.replace(&self.name, &lease).await
                }
                Err(failure) => Err(failure),
            };
            match released {
                Ok(_) | Err(Failure::NotFound) => return,
                Err(Failure::Conflict) => {}
                Err(Failure::Other(error)) => {
                    // It runs out by itself.
                    tracing::debug!(error, "failed to give the Lease up");
                    return;
                }
            }
        }
    }

    async fn load<I: MemberInfo>(&self, term: u64) -> Result<Vec<Record<I>>, StateError> {
        if !self.is_led_under(term) {
            return Err(StateError::Fenced);
        }
        let mut maps = self.maps.lock().await;
        let claimed = self.claim(term, I::FOLDER).await?;
        let now_ms = unix_ms();
        let mut records = Vec::new();
        for member in claimed.members.values() {
            match serde_json::from_value::<StoredRecord<I>>(member.clone()) {
                Ok(stored) => records.push(stored.into_record(now_ms)),
                Err(error) => tracing::warn!(%error, "passed over a member that cannot be read"),
            }
        }
        maps.insert(I::FOLDER, claimed);
        Ok(records)
    }

    async fn write<I: MemberInfo>(&self, term: u64, changes: &[Change<I>]) -> Result<(), StateError> {
        if !self.is_led_under(term) {
            return Err(StateError::Fenced);
        }
        let mut maps = self.maps.lock().await;
        let Some(claimed) = maps.get_mut(I::FOLDER).filter(|claimed| claimed.term == term) else {
            return Err(StateError::Fenced);
        };
        let name = self.map_name(I::FOLDER);
        for _ in 0..MAX_TRIES {
            let mut next = claimed.clone();
            apply(&mut next.members, changes)?;
            next.map.set_members(&next.members);
            match self.api.replace(&name, &next.map).await {
                Ok(map) => {
                    *claimed = Claimed { map, ..next };
                    return Ok(());
                }
                // A later leader has claimed it; or a person has changed or removed it, and what is here counts.
                Err(Failure::Conflict | Failure::NotFound) => {
                    claimed.map = self.claim(term, I::FOLDER).await?.map;
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Err(Failure::Conflict.into())
    }
}

fn apply<I: MemberInfo>(
    members: &mut BTreeMap<String, Value>,
    changes: &[Change<I>],
) -> Result<(), StateError> {
    for change in changes {
        match change {
            Change::Put(record) => {
                let stored = serde_json::to_value(StoredRecord::from_record(record, unix_ms()))
                    .map_err(|error| StateError::Unavailable(format!("write a member: {error}")))?;
                members.insert(change.id().to_owned(), stored);
            }
            Change::Delete(id) | Change::Expire(id) => {
                members.remove(id);
            }
        }
    }
    Ok(())
}

fn pod_namespace(file: &Path) -> Result<String> {
    let namespace = std::fs::read_to_string(file)
        .map_err(|source| CoordinatorError::Io { path: file.to_owned(), source })?;
    Ok(namespace.trim().to_owned())
}
