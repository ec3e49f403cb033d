//! The connection to the servers: opened when it is first needed, and again after it was lost.

use std::fmt;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use kvik_types::RedisUrl;
use parking_lot::Mutex;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::{
    AsyncConnectionConfig, Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, TlsCertificates, Value,
};
use tokio::time::timeout;

use super::RedisOptions;
use crate::error::{IndexerError, Result};

/// After a connection could not be opened, calls fail at once for so long.
const RETRY_AFTER: Duration = Duration::from_millis(100);
/// So many calls in a row without an answer, and the connection is given up.
const MAX_SILENT_CALLS: u32 = 3;
/// How often a cluster is asked again where a slot moves or a member is gone.
const N_CLUSTER_RETRIES: u32 = 3;
const MAX_CLUSTER_RETRY_WAIT_MS: u64 = 100;

/// What opens connections.
#[derive(Clone)]
enum Opener {
    Server(redis::Client, AsyncConnectionConfig),
    Cluster(ClusterClient),
}

/// A connection that all callers share.
#[derive(Clone)]
enum Link {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

type Opening = Shared<BoxFuture<'static, RedisResult<Link>>>;

/// The connection of now.
#[derive(Default)]
struct Slot {
    opening: Option<Opening>,
    /// Counts openings, so that a late failure of an old connection does not close a new one.
    number: u64,
    failure: Option<(Instant, RedisError)>,
    n_silent_calls: u32,
}

/// Servers of one address, for any number of books.
///
/// Nothing is opened before the first call. Calls share a connection. One that is lost is opened again by the
/// next call; while that fails, calls fail.
pub struct RedisClient {
    url: RedisUrl,
    opener: Opener,
    slot: Mutex<Slot>,
}

/// One script, by what it does.
pub(super) struct Script {
    pub(super) operation: &'static str,
    code: String,
    sha1: String,
}

impl Script {
    pub(super) fn new(operation: &'static str, parts: &[&str]) -> Self {
        let code = parts.concat();
        let sha1 = redis::Script::new(&code).get_hash().to_owned();
        Self { operation, code, sha1 }
    }
}

impl fmt::Debug for RedisClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RedisClient").field("url", &self.url).finish_non_exhaustive()
    }
}

impl RedisClient {
    /// Prepares a connection.
    ///
    /// # Errors
    /// [`IndexerError::Invalid`] if the address or the file of authorities cannot be used.
    pub fn new(url: &RedisUrl, options: &RedisOptions) -> Result<Self> {
        let invalid = |error: &dyn fmt::Display| IndexerError::Invalid {
            field: "redis.url".into(),
            value: url.to_string(),
            allowed: error.to_string(),
        };
        if url.is_tls {
            // The library takes the provider of the process; if there is one already, that is as good.
            drop(rustls::crypto::ring::default_provider().install_default());
        }
        let root_cert = match &options.ca_file {
            Some(path) => Some(std::fs::read(path).map_err(|error| IndexerError::Invalid {
                field: "redis.ca_file".into(),
                value: path.display().to_string(),
                allowed: format!("a PEM file with certificates; {error}"),
            })?),
            None => None,
        };
        let certificates = TlsCertificates { client_tls: None, root_cert };
        let nodes = url.node_urls();
        let opener = if url.is_cluster {
            let mut builder = ClusterClient::builder(nodes.iter().map(String::as_str))
                .connection_timeout(options.connect_timeout)
                .response_timeout(options.write_timeout)
                .retries(N_CLUSTER_RETRIES)
                .max_retry_wait(MAX_CLUSTER_RETRY_WAIT_MS);
            if url.is_tls && certificates.root_cert.is_some() {
                builder = builder.certs(certificates);
            }
            Opener::Cluster(builder.build().map_err(|error| invalid(&error))?)
        } else {
            let node = nodes.first().map(String::as_str).unwrap_or_default();
            let client = if url.is_tls && certificates.root_cert.is_some() {
                redis::Client::build_with_tls(node, certificates)
            } else {
                redis::Client::open(node)
            };
            let config = AsyncConnectionConfig::new()
                .set_connection_timeout(Some(options.connect_timeout))
                .set_response_timeout(None);
            Opener::Server(client.map_err(|error| invalid(&error))?, config)
        };
        Ok(Self { url: url.clone(), opener, slot: Mutex::new(Slot::default()) })
    }

    /// Runs a script on the server of its first key, whose name `arguments` writes.
    pub(super) async fn run(
        &self,
        script: &Script,
        time_limit: Duration,
        arguments: impl Fn(&mut Cmd),
    ) -> Result<Value> {
        let build = |verb: &str, script: &str| {
            let mut command = redis::cmd(verb);
            command.arg(script);
            arguments(&mut command);
            command
        };
        let command = build("EVALSHA", &script.sha1);
        let answer = self.limited(time_limit, async {
            match self.send(&command, None).await {
                Err(error) if is_server_error(&error, ServerErrorKind::NoScript) => {
                    self.send(&build("EVAL", &script.code), None).await
                }
                answer => answer,
            }
        });
        answer.await.map_err(|reason| unavailable(script.operation, reason))
    }

    /// Sends a command to the server of a key.
    pub(super) async fn command(
        &self,
        operation: &'static str,
        time_limit: Duration,
        command: &Cmd,
        key: &[u8],
    ) -> Result<Value> {
        let answer = self.limited(time_limit, self.send(command, Some(key))).await;
        answer.map_err(|reason| unavailable(operation, reason))
    }

    async fn limited(
        &self,
        time_limit: Duration,
        answer: impl Future<Output = RedisResult<Value>>,
    ) -> Result<Value, String> {
        let Ok(answer) = timeout(time_limit, answer).await else {
            self.note_silence();
            return Err(format!("{} did not answer within {time_limit:?}", self.url));
        };
        answer.map_err(|error| {
            let is_member = !self.url.is_cluster && is_server_error(&error, ServerErrorKind::Moved);
            let hint = if is_member { " (a member of a cluster: use redis+cluster://)" } else { "" };
            format!("{}: {error}{hint}", self.url)
        })
    }

    /// Sends a command, once more if the connection turns out to be lost. All that is sent may be done twice.
    async fn send(&self, command: &Cmd, key: Option<&[u8]>) -> RedisResult<Value> {
        let mut is_second_try = false;
        loop {
            let (number, opening) = self.opening()?;
            let mut link = match opening.await {
                Ok(link) => link,
                Err(error) => {
                    self.close(number, Some(&error));
                    return Err(error);
                }
            };
            let answer = match (&mut link, key) {
                (Link::Server(link), _) => link.req_packed_command(command).await,
                (Link::Cluster(link), None) => link.req_packed_command(command).await,
                (Link::Cluster(link), Some(key)) => {
                    let route = SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master));
                    link.route_command(command.clone(), RoutingInfo::SingleNode(route)).await
                }
            };
            match answer.and_then(Value::extract_error) {
                // A server that became a replica is left too: its address may lead to another one by now.
                Err(error)
                    if error.is_unrecoverable_error()
                        || is_server_error(&error, ServerErrorKind::ReadOnly) =>
                {
                    self.close(number, None);
                    if is_second_try {
                        return Err(error);
                    }
                    is_second_try = true;
                }
                answer => {
                    self.slot.lock().n_silent_calls = 0;
                    return answer;
                }
            }
        }
    }

    /// The connection that is open or being opened.
    fn opening(&self) -> RedisResult<(u64, Opening)> {
        let mut slot = self.slot.lock();
        if let Some(opening) = &slot.opening {
            return Ok((slot.number, opening.clone()));
        }
        if let Some((at, error)) = &slot.failure
            && at.elapsed() < RETRY_AFTER
        {
            return Err(error.clone());
        }
        let opener = self.opener.clone();
        let opening = async move {
            match opener {
                Opener::Server(client, config) => {
                    client.get_multiplexed_async_connection_with_config(&config).await.map(Link::Server)
                }
                Opener::Cluster(client) => client.get_async_connection().await.map(Link::Cluster),
            }
        };
        let opening = opening.boxed().shared();
        // It goes on when the caller that began it has given up.
        tokio::spawn(opening.clone().map(drop));
        slot.number += 1;
        slot.n_silent_calls = 0;
        slot.opening = Some(opening.clone());
        Ok((slot.number, opening))
    }

    fn close(&self, number: u64, failure: Option<&RedisError>) {
        let mut slot = self.slot.lock();
        if slot.number == number {
            slot.opening = None;
            slot.failure = failure.map(|error| (Instant::now(), error.clone()));
        }
    }

    fn note_silence(&self) {
        let mut slot = self.slot.lock();
        slot.n_silent_calls += 1;
        // One that is still being opened has a limit of its own.
        if slot.n_silent_calls >= MAX_SILENT_CALLS
            && slot.opening.as_ref().is_some_and(|opening| opening.peek().is_some())
        {
            slot.opening = None;
        }
    }
}

fn is_server_error(error: &RedisError, kind: ServerErrorKind) -> bool {
    error.kind() == ErrorKind::Server(kind)
}

/// What a script answered is not what it answers.
pub(super) fn misunderstood(operation: &'static str) -> IndexerError {
    unavailable(operation, "the answer has another form".into())
}

pub(super) fn unavailable(operation: &'static str, reason: String) -> IndexerError {
    IndexerError::Unavailable { operation, reason }
}
