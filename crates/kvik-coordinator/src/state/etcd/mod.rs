//! State in etcd, for any number of coordinators.
//!
//! Under the prefix lie three kinds of keys:
//!
//! | key | value | session |
//! |---|---|---|
//! | `/leader` | the leader's base address | `session_ttl_s`, renewed four times in it |
//! | `/workers/<id>` | a worker | [`RECORD_TTL_S`], renewed with the other one |
//! | `/stores/<id>` | a store daemon | the same |
//!
//! The coordinator that creates `/leader` leads, and the revision at which it was created is the term: it
//! rises with every leader and everything the leader writes depends on it. The leader counts its time
//! from before it asked for the renewal, so it stops before etcd gives the lead to another one.
//!
//! Members hang on a session so that nothing stays behind when all coordinators are gone for good. It
//! is long because it must outlive any change of leaders; which member missed heartbeats is the leader's to
//! say. A new leader puts all members under a session of its own.

mod api;

use std::time::Duration;

use kvik_proto::client::HttpClient;
use parking_lot::Mutex;
use tokio::time::Instant;

use self::api::{Credentials, EtcdApi};
use super::record::{StoredRecord, unix_ms};
use super::{Role, StateBackend, StateError};
use crate::config::EtcdConfig;
use crate::error::{CoordinatorError, Result};
use crate::membership::{Change, MemberInfo, Record};

/// Time that members are kept while no coordinator lives, in seconds: longer than a rollout of all
/// coordinators takes.
const RECORD_TTL_S: u64 = 300;
/// Time between two looks of a follower at the leader's key.
const FOLLOWER_INTERVAL: Duration = Duration::from_millis(250);
/// Changes in one transaction; etcd takes 128 operations by default.
const MAX_TXN_CHANGES: usize = 100;

/// Leader and members in etcd.
#[derive(Debug)]
pub(crate) struct EtcdState {
    api: EtcdApi,
    leader_key: String,
    /// Without a slash at the end.
    prefix: String,
    session_ttl_s: u64,
    /// Base address of this coordinator.
    address: String,
    lead: Mutex<Option<Lead>>,
    /// The sessions of a campaign whose end is not known; locked while a campaign runs.
    candidacy: tokio::sync::Mutex<Option<Candidacy>>,
}

/// The sessions of a campaign. While they live, the leader's key may have been created with them.
#[derive(Debug, Clone, Copy)]
struct Candidacy {
    session: i64,
    records_session: i64,
}

/// A lead that is held.
#[derive(Debug, Clone, Copy)]
struct Lead {
    /// Creation revision of the leader's key.
    term: i64,
    session: i64,
    records_session: i64,
}

// === impl EtcdState ===

impl EtcdState {
    /// The state in the cluster of `config`, for the coordinator at `address`.
    ///
    /// # Errors
    /// If the file with the password cannot be read.
    pub(crate) fn new(http: HttpClient, config: &EtcdConfig, address: String) -> Result<Self> {
        // Several tries fit into the time of a lead.
        let timeout = Duration::from_secs(config.session_ttl_s) / 3;
        let credentials = match (&config.username, &config.password_file) {
            (Some(name), Some(path)) => {
                let password = std::fs::read_to_string(path)
                    .map_err(|source| CoordinatorError::Io { path: path.clone(), source })?;
                Some(Credentials::new(name, password.trim_end_matches(['\r', '\n'])))
            }
            _ => None,
        };
        let timeout = timeout.min(Duration::from_secs(2));
        Ok(Self {
            api: EtcdApi::new(http, &config.endpoints, credentials, timeout),
            leader_key: format!("{}/leader", config.prefix),
            prefix: config.prefix.clone(),
            session_ttl_s: config.session_ttl_s,
            address,
            lead: Mutex::new(None),
            candidacy: tokio::sync::Mutex::default(),
        })
    }

    /// Renews the lead; `None` if it is lost.
    async fn renew(&self, lead: Lead) -> Result<Option<Role>, StateError> {
        let sent = Instant::now();
        let session = self.api.keep_alive(lead.session).await?;
        let records = self.api.keep_alive(lead.records_session).await?;
        // A session that lives is not enough: the key may have been removed by hand.
        let key = self.api.get(&self.leader_key).await?;
        let is_ours = key.is_some_and(|key| key.create_revision == lead.term);
        if session.ttl_s == 0 || records.ttl_s == 0 || !is_ours {
            return Ok(None);
        }
        Ok(Some(self.leader(lead, sent)))
    }

    /// Tries to become leader. A campaign that failed or was dropped may have created the leader's key; its sessions are
    /// revoked by the next one or by [`StateBackend::resign`].
    async fn campaign(&self) -> Result<Role, StateError> {
        let mut candidacy = self.candidacy.lock().await;
        self.withdraw(&mut candidacy).await;
        if let Some(key) = self.api.get(&self.leader_key).await? {
            return Ok(self.follower(&key.value));
        }
        let sent = Instant::now();
        let session = self.api.grant(self.session_ttl_s).await?;
        let records_session = self.api.grant(RECORD_TTL_S).await?;
        *candidacy = Some(Candidacy { session: session.id, records_session: records_session.id });
        let create = api::put(&self.leader_key, self.address.as_bytes(), session.id);
        let answer = self.api.txn_if_created_at(&self.leader_key, 0, &[create]).await?;
        let (term, value) = if answer.succeeded {
            (answer.revision(), Vec::new())
        } else {
            // A lost answer to a try that succeeded looks like a failure: the key has our session.
            match answer.into_key_value() {
                Some(key) if key.session == session.id => (key.create_revision, Vec::new()),
                Some(key) => (0, key.value),
                None => (0, Vec::new()),
            }
        };
        if term == 0 {
            self.withdraw(&mut candidacy).await;
            return Ok(self.follower(&value));
        }
        let lead = Lead { term, session: session.id, records_session: records_session.id };
        *self.lead.lock() = Some(lead);
        *candidacy = None;
        Ok(self.leader(lead, sent))
    }

    /// Ends the sessions of a campaign, and with them the leader's key if it was created. They are forgotten only then, so
    /// that a call that is dropped meanwhile loses nothing.
    async fn withdraw(&self, candidacy: &mut Option<Candidacy>) {
        if let Some(Candidacy { session, records_session }) = *candidacy {
            self.release(session).await;
            self.release(records_session).await;
            *candidacy = None;
        }
    }

    fn leader(&self, lead: Lead, sent: Instant) -> Role {
        let until = sent + Duration::from_secs(self.session_ttl_s);
        Role::Leader { term: lead.term as u64, until: Some(until) }
    }

    fn follower(&self, leader: &[u8]) -> Role {
        let leader = String::from_utf8_lossy(leader).into_owned();
        // Our own name is what is left of a lead that we gave up or of an earlier life.
        let is_other = !leader.is_empty() && leader != self.address;
        Role::Follower { leader: is_other.then_some(leader) }
    }

    /// Ends a session; one that cannot be ended runs out by itself.
    async fn release(&self, session: i64) {
        if let Err(error) = self.api.revoke(session).await {
            tracing::debug!(%error, "failed to revoke a session");
        }
    }

    /// Where members of a kind lie, with a slash at the end.
    fn folder<I: MemberInfo>(&self) -> String {
        format!("{}/{}/", self.prefix, I::FOLDER)
    }

    fn operation<I: MemberInfo>(
        &self,
        change: &Change<I>,
        records_session: i64,
    ) -> Result<serde_json::Value, StateError> {
        let key = format!("{}{}", self.folder::<I>(), change.id());
        match change {
            Change::Put(record) => {
                let stored = serde_json::to_vec(&StoredRecord::from_record(record, unix_ms()))
                    .map_err(|error| StateError::Unavailable(format!("write a member: {error}")))?;
                Ok(api::put(&key, &stored, records_session))
            }
            Change::Delete(_) | Change::Expire(_) => Ok(api::delete(&key)),
        }
    }
}

impl StateBackend for EtcdState {
    fn incarnation(&self) -> u64 {
        0
    }

    fn elect_interval(&self, role: &Role) -> Duration {
        match role {
            Role::Leader { .. } => Duration::from_secs(self.session_ttl_s) / 4,
            Role::Follower { .. } => FOLLOWER_INTERVAL,
        }
    }

    async fn elect(&self) -> Result<Role, StateError> {
        let lead = *self.lead.lock();
        if let Some(lead) = lead {
            match self.renew(lead).await? {
                Some(role) => return Ok(role),
                None => self.resign().await,
            }
        }
        self.campaign().await
    }

    async fn resign(&self) {
        let lead = self.lead.lock().take();
        // The members stay: the next leader takes them over.
        if let Some(lead) = lead {
            self.release(lead.session).await;
        }
        // A campaign that runs ends by itself; one that was dropped has left its lock.
        if let Ok(mut candidacy) = self.candidacy.try_lock() {
            self.withdraw(&mut candidacy).await;
        }
    }

    async fn load<I: MemberInfo>(&self, term: u64) -> Result<Vec<Record<I>>, StateError> {
        let now_ms = unix_ms();
        let mut records = Vec::new();
        for key_value in self.api.list(&self.folder::<I>()).await? {
            match serde_json::from_slice::<StoredRecord<I>>(&key_value.value) {
                Ok(stored) => records.push(stored.into_record(now_ms)),
                Err(error) => tracing::warn!(%error, "passed over a member that cannot be read"),
            }
        }
        let puts: Vec<Change<I>> =
            records.iter().map(|record| Change::Put(Box::new(record.clone()))).collect();
        self.write(term, &puts).await?;
        Ok(records)
    }

    async fn write<I: MemberInfo>(&self, term: u64, changes: &[Change<I>]) -> Result<(), StateError> {
        let lead = *self.lead.lock();
        let Some(lead) = lead.filter(|lead| lead.term as u64 == term) else {
            return Err(StateError::Fenced);
        };
        for changes in changes.chunks(MAX_TXN_CHANGES) {
            let operations = last_of_each_member(changes)
                .map(|change| self.operation(change, lead.records_session))
                .collect::<Result<Vec<_>, _>>()?;
            let answer = self.api.txn_if_created_at(&self.leader_key, lead.term, &operations).await?;
            if !answer.succeeded {
                return Err(StateError::Fenced);
            }
        }
        Ok(())
    }
}

/// The last change of each member: etcd refuses a transaction that changes a key twice.
fn last_of_each_member<I: MemberInfo>(changes: &[Change<I>]) -> impl Iterator<Item = &Change<I>> {
    changes.iter().enumerate().filter_map(|(place, change)| {
        let is_last = changes[place + 1..].iter().all(|later| later.id() != change.id());
        is_last.then_some(change)
    })
}
