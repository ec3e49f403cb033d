//! Which server gets a request, over how many connections, for how long.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvik_types::RedisEndpoint as Endpoint;
use parking_lot::{Mutex, RwLock};

use super::connection::{Connection, Dialer};
use super::request::Request;
use super::slots::{SlotRange, parse_slots, slot_of_tag};
use crate::error::{Result, TierError};
use crate::key::ChunkKey;
use crate::lanes::{LaneThreads, split};
use crate::pool;

/// A call with more bytes than this for one server uses several connections: below it, waking a thread costs
/// more than it brings.
const LANE_BYTES: usize = 4 << 20;
/// Once so many bytes of chunks are on their way over a connection, in either direction, nothing more is sent. What is
/// on its way lies in buffers of the server and of both kernels: with more than this they no longer fit the caches, and
/// a single-threaded server slows down by half. The other connections keep it busy meanwhile.
const WINDOW_BYTES: usize = 1 << 20;
/// Requests without a reply at a time, for the same reason.
const WINDOW_REQUESTS: usize = 1024;
/// Servers of a cluster whose connections all have a thread at a time.
const BUSY_SERVERS: usize = 4;
/// Threads of a tier: more connections than these are used by the callers' own threads.
const MAX_THREADS: usize = 64;
/// How often a request follows its key through a cluster that is changing.
const MAX_REDIRECTIONS: usize = 5;
/// Slots are asked for at most so often: while servers are lost, every call would ask.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(200);

/// A server of Redis and the connections to it.
type Node = pool::Node<Dialer>;

/// A server or a cluster of them.
#[derive(Debug)]
pub(super) struct Dispatcher {
    is_cluster: bool,
    seeds: Vec<Endpoint>,
    dialer: Arc<Dialer>,
    n_connections: usize,
    key_prefix: String,
    min_bytes_per_s: u64,
    nodes: RwLock<HashMap<Endpoint, Arc<Node>>>,
    slots: RwLock<Vec<SlotRange>>,
    is_stale: AtomicBool,
    last_refresh: Mutex<Option<Instant>>,
    n_redirections: AtomicU64,
    lane_threads: LaneThreads,
}

/// A request and where it goes.
struct Routed<'r, R> {
    request: &'r mut R,
    name: Vec<u8>,
    /// Whether the server must be told that it is asked although the key is not its own yet.
    is_asking: bool,
    next: Option<(Endpoint, bool)>,
}

impl Dispatcher {
    pub(super) fn new(
        is_cluster: bool,
        seeds: Vec<Endpoint>,
        dialer: Dialer,
        n_connections: usize,
        key_prefix: String,
        min_bytes_per_s: u64,
    ) -> Self {
        let n_threads = if is_cluster { n_connections.saturating_mul(BUSY_SERVERS) } else { n_connections };
        Self {
            is_cluster,
            seeds,
            dialer: Arc::new(dialer),
            n_connections,
            key_prefix,
            min_bytes_per_s,
            nodes: RwLock::default(),
            slots: RwLock::default(),
            is_stale: AtomicBool::new(is_cluster),
            last_refresh: Mutex::new(None),
            n_redirections: AtomicU64::new(0),
            lane_threads: LaneThreads::new("kvik-redis", n_threads.min(MAX_THREADS)),
        }
    }

    /// Connections that were made since the start.
    pub(super) fn n_connects(&self) -> u64 {
        self.nodes.read().values().map(|node| node.n_connects()).sum()
    }

    /// Requests that were sent to another server than the first.
    pub(super) fn n_redirections(&self) -> u64 {
        self.n_redirections.load(Ordering::Relaxed)
    }

    /// Does all requests; each has its outcome afterwards, and is settled as soon as it has.
    ///
    /// Requests for one key go over one connection in their order. The time is bounded by the timeouts and
    /// the bytes.
    pub(super) fn dispatch<R: Request>(&self, requests: &mut [R]) {
        let n_bytes: usize = requests.iter().map(Request::n_bytes).sum();
        let deadline = Instant::now() + self.budget(n_bytes);
        // Relaxed: the flag only says that it is worth to ask.
        if self.is_stale.load(Ordering::Relaxed) {
            self.refresh(deadline);
        }
        let mut by_endpoint: HashMap<Endpoint, Vec<Routed<'_, R>>> = HashMap::new();
        for request in requests {
            let tag = tag(request.key());
            let Some(endpoint) = self.endpoint_of(&tag) else {
                let reason = "no server of the cluster says that it has the key";
                fail(request, TierError::remote("find the server of a key", &reason, true));
                // Relaxed: as above.
                self.is_stale.store(true, Ordering::Relaxed);
                continue;
            };
            let name = self.name(request.key(), &tag);
            let routed = Routed { request, name, is_asking: false, next: None };
            by_endpoint.entry(endpoint).or_default().push(routed);
        }
        for _ in 0..=MAX_REDIRECTIONS {
            let answered = self.round(by_endpoint, deadline);
            by_endpoint = HashMap::new();
            for mut routed in answered {
                if let Some((endpoint, is_asking)) = routed.next.take() {
                    // Relaxed: a count.
                    self.n_redirections.fetch_add(1, Ordering::Relaxed);
                    routed.is_asking = is_asking;
                    by_endpoint.entry(endpoint).or_default().push(routed);
                }
            }
            if by_endpoint.is_empty() {
                return;
            }
        }
        for routed in by_endpoint.into_values().flatten() {
            let reason = "every server says that another one has it";
            fail(routed.request, TierError::remote("follow a key", &reason, true));
        }
    }

    /// Longest time of a call for so many bytes.
    fn budget(&self, n_bytes: usize) -> Duration {
        let transfer = Duration::from_secs_f64(n_bytes as f64 / self.min_bytes_per_s as f64);
        self.dialer.connect_timeout + self.dialer.response_timeout + transfer
    }

    /// The key as the servers know it.
    fn name(&self, key: ChunkKey, tag: &str) -> Vec<u8> {
        format!("{}:{{{tag}}}:{:04x}", self.key_prefix, key.rank).into_bytes()
    }

    fn endpoint_of(&self, tag: &str) -> Option<Endpoint> {
        if !self.is_cluster {
            return self.seeds.first().cloned();
        }
        let slot = slot_of_tag(tag.as_bytes());
        let slots = self.slots.read();
        let range = &slots[..slots.partition_point(|range| range.first <= slot)].last()?;
        (slot <= range.last).then(|| range.endpoint.clone())
    }

    fn node(&self, endpoint: &Endpoint) -> Arc<Node> {
        if let Some(node) = self.nodes.read().get(endpoint) {
            return Arc::clone(node);
        }
        let make = || Arc::new(Node::new(endpoint.clone(), Arc::clone(&self.dialer), self.n_connections));
        Arc::clone(self.nodes.write().entry(endpoint.clone()).or_insert_with(make))
    }

    /// Sends every request once, to all servers at a time.
    fn round<'r, R: Request>(
        &self,
        by_endpoint: HashMap<Endpoint, Vec<Routed<'r, R>>>,
        deadline: Instant,
    ) -> Vec<Routed<'r, R>> {
        let mut lanes: Vec<Lane<'r, R>> = Vec::new();
        for (endpoint, routed) in by_endpoint {
            let node = self.node(&endpoint);
            let n_bytes: usize = routed.iter().map(|routed| routed.request.n_bytes()).sum();
            let n_lanes = (n_bytes / LANE_BYTES).clamp(1, node.n_free()).min(routed.len());
            let weigh = |routed: &Routed<'_, R>| (routed.request.key(), routed.request.n_bytes());
            let split = split(routed, n_lanes, weigh).into_iter();
            lanes.extend(split.map(|routed| Lane { node: Arc::clone(&node), routed }));
        }
        // What a server that failed last holds up comes after the others, where one thread does several.
        lanes.sort_by_key(|lane| lane.node.is_suspect());
        self.lane_threads.run_all(&mut lanes, |lane| self.run_lane(lane, deadline));
        lanes.into_iter().flat_map(|lane| lane.routed).collect()
    }

    /// Sends a lane's requests over one connection and reads their replies.
    ///
    /// A connection that was idle may have been closed since, so where it fails the rest is sent again over
    /// a new one: all requests may be done twice.
    fn run_lane<R: Request>(&self, lane: &mut Lane<'_, R>, deadline: Instant) {
        let node = Arc::clone(&lane.node);
        let mut progress = Progress::default();
        let result = node.lend(deadline).and_then(|mut lent| {
            loop {
                let Some(connection) = lent.connection() else { return Ok(()) };
                connection.set_deadline(deadline);
                let error = match exchange(connection, node.endpoint(), &mut lane.routed, &mut progress) {
                    Ok(()) => {
                        lent.give_back();
                        return Ok(());
                    }
                    Err(error) => error,
                };
                if !lent.is_used() || error.kind() == io::ErrorKind::TimedOut {
                    node.set_suspect(true);
                    let is_transient = error.kind() != io::ErrorKind::InvalidData;
                    let action = format!("ask {}", node.endpoint());
                    return Err(TierError::remote(action, &error, is_transient));
                }
                lent.replace(deadline)?;
            }
        });
        progress.settle(&lane.routed);
        if let Err(error) = result {
            // Relaxed: the flag only says that it is worth to ask.
            self.is_stale.store(self.is_cluster, Ordering::Relaxed);
            for routed in &mut lane.routed[progress.n_answered..] {
                fail(routed.request, error.clone());
            }
        }
        if self.is_cluster {
            if lane.routed.iter().any(|routed| matches!(routed.next, Some((_, false)))) {
                self.is_stale.store(true, Ordering::Relaxed);
            }
        } else {
            // The server of a URL is the only one that is trusted.
            for routed in &mut lane.routed {
                if let Some((endpoint, _)) = routed.next.take() {
                    let reason = format!(
                        "the server is a member of a cluster and the key is at {endpoint}: use redis+cluster://"
                    );
                    fail(routed.request, TierError::remote("ask for a key", &reason, false));
                }
            }
        }
    }

    /// Asks the servers, those that answered last first, for the slots they have.
    ///
    /// What was known stays if none answers.
    fn refresh(&self, deadline: Instant) {
        let mut last_refresh = self.last_refresh.lock();
        if last_refresh.is_some_and(|last| last.elapsed() < MIN_REFRESH_INTERVAL) {
            return;
        }
        let known = self.nodes.read().values().cloned().collect::<Vec<_>>();
        let seeds = self.seeds.iter().map(|endpoint| self.node(endpoint));
        let mut candidates: Vec<Arc<Node>> = known.into_iter().chain(seeds).collect();
        candidates.sort_by_key(|node| (node.is_suspect(), node.endpoint().clone()));
        candidates.dedup_by_key(|node| node.endpoint().clone());
        for node in candidates {
            if let Ok(slots) = ask_slots(&node, deadline) {
                let is_member = |endpoint: &Endpoint| slots.iter().any(|range| range.endpoint == *endpoint);
                // Connections to servers that left are closed; the seeds stay for the day all others are new.
                let is_known = |endpoint: &Endpoint| is_member(endpoint) || self.seeds.contains(endpoint);
                self.nodes.write().retain(|endpoint, _| is_known(endpoint));
                *self.slots.write() = slots;
                // Relaxed: the flag only says that it is worth to ask.
                self.is_stale.store(false, Ordering::Relaxed);
                break;
            }
        }
        *last_refresh = Some(Instant::now());
    }
}

/// Requests that go over one connection.
struct Lane<'r, R> {
    node: Arc<Node>,
    routed: Vec<Routed<'r, R>>,
}

/// How far a lane is.
#[derive(Default)]
struct Progress {
    /// Requests with all their replies, from the first on.
    n_answered: usize,
    /// Those of them that are settled, or sent on to another server.
    n_settled: usize,
}

impl Progress {
    /// Settles the requests that are answered.
    fn settle<R: Request>(&mut self, lane: &[Routed<'_, R>]) {
        for routed in &lane[self.n_settled..self.n_answered] {
            if routed.next.is_none() {
                routed.request.settle();
            }
        }
        self.n_settled = self.n_answered;
    }
}

/// Sends requests and reads replies, several on their way at a time, from the first that has no reply on.
fn exchange<R: Request>(
    connection: &mut Connection,
    endpoint: &Endpoint,
    lane: &mut [Routed<'_, R>],
    progress: &mut Progress,
) -> io::Result<()> {
    let mut n_sent = progress.n_answered;
    let mut awaited_bytes = 0;
    while progress.n_answered < lane.len() {
        while let Some(routed) = lane.get(n_sent) {
            let n_awaited = n_sent - progress.n_answered;
            if awaited_bytes >= WINDOW_BYTES || n_awaited >= WINDOW_REQUESTS {
                break;
            }
            for command_idx in 0..routed.request.n_commands() {
                if routed.is_asking {
                    connection.send(&[b"ASKING"])?;
                }
                routed.request.send(command_idx, &routed.name, connection)?;
            }
            awaited_bytes += routed.request.n_bytes();
            n_sent += 1;
        }
        connection.flush()?;
        // The server works on the next request meanwhile.
        progress.settle(lane);
        let routed = &mut lane[progress.n_answered];
        awaited_bytes -= routed.request.n_bytes();
        let mut error = None;
        for command_idx in 0..routed.request.n_commands() {
            if routed.is_asking {
                connection.replies()?.read_reply()?;
            }
            error = error.or(routed.request.receive(command_idx, connection)?);
        }
        if let Some(error) = error {
            routed.next = error.redirection(endpoint);
            if routed.next.is_none() {
                routed.request.refuse(&error);
            }
        }
        progress.n_answered += 1;
    }
    Ok(())
}

/// Ends a request without a reply.
fn fail(request: &mut impl Request, error: TierError) {
    request.fail(error);
    request.settle();
}

fn ask_slots(node: &Node, deadline: Instant) -> Result<Vec<SlotRange>> {
    let failed = |reason: &str| {
        TierError::remote(format!("ask {} for the slots of its cluster", node.endpoint()), &reason, true)
    };
    let mut lent = node.lend(deadline)?;
    loop {
        let Some(connection) = lent.connection() else { return Err(failed("no connection")) };
        connection.set_deadline(deadline);
        match connection.ask(&["CLUSTER", "SLOTS"]) {
            Ok(reply) => {
                lent.give_back();
                return parse_slots(&reply, node.endpoint()).ok_or_else(|| failed("not understood"));
            }
            Err(error) if lent.is_used() && error.kind() != io::ErrorKind::TimedOut => {
                lent.replace(deadline)?;
            }
            Err(error) => {
                node.set_suspect(true);
                return Err(failed(&error.to_string()));
            }
        }
    }
}

/// What stands between the braces of a key: all ranks of a chunk have one tag, so they are in one slot.
fn tag(key: ChunkKey) -> String {
    format!("{}:{}", key.namespace, key.chunk)
}
