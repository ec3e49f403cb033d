//! A Redis or Valkey server, or a cluster of them, as a tier.
//!
//! The client is kvik's own, because the bytes of a chunk should go from the socket to where they are wanted
//! and nowhere else: a client that builds values of its own reads at half the speed. `connection.rs` is a
//! socket with deadlines, `resp.rs` the protocol on it, `request.rs` what is asked, and `dispatch.rs` brings a batch to the servers that have its keys.
//!
//! A chunk is a string under `<prefix>:{<namespace>:<chunk>}:<rank>`. A cluster places keys by what stands
//! between the braces, so all ranks of a chunk are on one server: the loss of a server takes whole chunks
//! and leaves the others whole, instead of one rank of nearly every chunk.

mod connection;
mod dispatch;
mod request;
mod resp;
mod server_error;
mod slots;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use kvik_types::RedisUrl;
pub use resp::{Reply, ReplyReader, ValueReply};

use self::connection::{Dialer, Login};
use self::dispatch::Dispatcher;
use self::request::{CountRequest, GetRequest, MAX_VALUE_BYTES, PutRequest};
use crate::channel::Resolver;
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::tally::Tally;
use crate::tier::{Arrived, GetItem, Heads, NoHeads, PutItem, PutOutcome, Tier, TierKind, TierStat};
use crate::tls;

/// How a [`RedisTier`] works.
#[derive(Debug, Clone)]
pub struct RedisOptions {
    /// Time after which a chunk is gone, counted from when it was stored; none: the server decides by its
    /// eviction policy. Default: none.
    pub ttl: Option<Duration>,
    /// Time to connect and log in. Default: 2 s.
    pub connect_timeout: Duration,
    /// Longest silence of a server that should answer. Default: 2 s.
    pub response_timeout: Duration,
    /// Speed below which a server counts as failed: a call takes no longer than both timeouts and its bytes
    /// at this speed. Default: 16 MiB a second.
    pub min_bytes_per_s: u64,
    /// Connections to each server. Default: 4.
    pub n_connections: usize,
    /// What all keys begin with. Default: `kvik`.
    pub key_prefix: String,
    /// Authorities that sign the servers' certificates, PEM. Default: those of this system.
    pub ca_file: Option<PathBuf>,
}

/// A Redis or Valkey server, or a cluster.
///
/// Chunks have at most 512 MiB. The server's own limit on memory is its capacity: where it evicts nothing
/// and is full, chunks find [`PutOutcome::NoRoom`]. The server's answers are not verified; for a server that
/// cannot be trusted, wrap it in a decorator that verifies.
#[derive(Debug)]
pub struct RedisTier {
    dispatcher: Dispatcher,
    ttl_ms: Option<String>,
    tally: Tally,
}

impl RedisTier {
    /// A tier at `url`. Nothing is connected before the first call, so a server may come later.
    ///
    /// # Errors
    /// [`TierError::Invalid`] if an option is, [`TierError::Io`] if the authorities cannot be read.
    pub fn open(url: &RedisUrl, options: &RedisOptions) -> Result<Self> {
        options.check()?;
        let tls =
            if url.is_tls { Some(Arc::new(tls::client_config(options.ca_file.as_deref())?)) } else { None };
        let login = url.password.clone().map(|password| Login { user: url.user.clone(), password });
        let dialer = Dialer {
            tls,
            login,
            database: url.database,
            connect_timeout: options.connect_timeout,
            response_timeout: options.response_timeout,
            resolver: Resolver::new(),
        };
        let dispatcher = Dispatcher::new(
            url.is_cluster,
            url.endpoints.clone(),
            dialer,
            options.n_connections,
            options.key_prefix.clone(),
            options.min_bytes_per_s,
        );
        let ttl_ms = options.ttl.map(|ttl| ttl.as_millis().to_string());
        Ok(Self { dispatcher, ttl_ms, tally: Tally::default() })
    }

    /// Asks `command` about every key; the numbers, or the first failure.
    fn count(&self, keys: &[ChunkKey], command: &'static str) -> Result<Vec<i64>> {
        let mut requests: Vec<CountRequest> =
            keys.iter().map(|key| CountRequest::new(*key, command)).collect();
        self.dispatcher.dispatch(&mut requests);
        let counts: Result<Vec<i64>> = requests.into_iter().map(|request| request.count).collect();
        if !keys.is_empty() {
            self.tally.note_answer(counts.as_ref().err());
        }
        counts
    }
}

impl Tier for RedisTier {
    fn kind(&self) -> TierKind {
        TierKind::Redis
    }

    fn put(&self, batch: &mut [PutItem<'_>]) {
        self.put_each(batch, &NoHeads);
    }

    fn put_each(&self, batch: &mut [PutItem<'_>], heads: &dyn Heads) {
        let mut requests = Vec::with_capacity(batch.len());
        for (item_idx, item) in batch.iter_mut().enumerate() {
            let n_bytes = heads.n_bytes() + item.n_bytes();
            if n_bytes > MAX_VALUE_BYTES {
                let error = TierError::invalid("chunk length", &n_bytes, "at most 512 MiB in Redis");
                item.outcome = PutOutcome::Failed(error);
                continue;
            }
            let ttl_ms = self.ttl_ms.as_deref();
            requests.push(PutRequest { item_idx, item, heads, ttl_ms, read_only: None });
        }
        self.dispatcher.dispatch(&mut requests);
        let read_only = requests.into_iter().find_map(|request| request.read_only);
        self.tally.note_put(batch, read_only);
    }

    fn get(&self, batch: &mut [GetItem<'_>]) {
        self.get_each(batch, &|_, _| {});
    }

    fn get_each(&self, batch: &mut [GetItem<'_>], arrived: Arrived<'_>) {
        let items = batch.iter_mut().enumerate();
        let mut requests: Vec<GetRequest<'_, '_>> =
            items.map(|(item_idx, item)| GetRequest { item_idx, item, arrived }).collect();
        self.dispatcher.dispatch(&mut requests);
        self.tally.note_get(batch);
    }

    fn contains(&self, keys: &[ChunkKey], present: &mut [bool]) -> Result<()> {
        let counts = self.count(keys, "EXISTS")?;
        for (is_present, count) in present.iter_mut().zip(counts) {
            *is_present = count > 0;
        }
        Ok(())
    }

    /// Removes the keys. The server frees their memory in the background.
    fn delete(&self, keys: &[ChunkKey]) -> Result<usize> {
        let counts = self.count(keys, "UNLINK")?;
        Ok(counts.into_iter().filter(|count| *count > 0).count())
    }

    fn visit_keys(&self, _visit: &mut dyn FnMut(ChunkKey, u64)) {}

    /// Does nothing: what a server keeps through a loss of power is its own configuration.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn stat(&self) -> TierStat {
        let mut details = self.tally.counts();
        details.push(("connects", self.dispatcher.n_connects()));
        details.push(("redirections", self.dispatcher.n_redirections()));
        TierStat { health: self.tally.health(), details, ..TierStat::default() }
    }
}

impl RedisOptions {
    fn check(&self) -> Result<()> {
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"{}".contains(&byte);
        if self.key_prefix.is_empty() || !self.key_prefix.bytes().all(is_plain) {
            let allowed = "printable ASCII without spaces and braces";
            return Err(TierError::invalid("key_prefix", &self.key_prefix, allowed));
        }
        if self.n_connections == 0 {
            return Err(TierError::invalid("n_connections", &0, "1 or more"));
        }
        if self.min_bytes_per_s == 0 {
            return Err(TierError::invalid("min_bytes_per_s", &0, "1 or more"));
        }
        if self.ttl.is_some_and(|ttl| ttl.as_millis() == 0 || ttl.as_secs() > MAX_TTL_S) {
            return Err(TierError::invalid("ttl", &format!("{:?}", self.ttl), "1 ms to 100 years"));
        }
        for (field, timeout) in
            [("connect_timeout", self.connect_timeout), ("response_timeout", self.response_timeout)]
        {
            if timeout < Duration::from_millis(1) || timeout > MAX_TIMEOUT {
                return Err(TierError::invalid(field, &format!("{timeout:?}"), "1 ms to 1 hour"));
            }
        }
        Ok(())
    }
}

/// Above it, servers begin to refuse times of their own.
const MAX_TTL_S: u64 = 100 * 365 * 86_400;
const MAX_TIMEOUT: Duration = Duration::from_hours(1);

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            ttl: None,
            connect_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(2),
            min_bytes_per_s: 16 << 20,
            n_connections: 4,
            key_prefix: "kvik".to_owned(),
            ca_file: None,
        }
    }
}
