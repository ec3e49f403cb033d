//! Servers that die, hang and come back, with and without what they had.

use std::time::{Duration, Instant};

use kvik_index::holders::{SourceName, Verdict, Walk};
use kvik_indexer::IndexerError;
use kvik_indexer::backend::Backend as _;
use kvik_indexer::backend::redis::{RedisBackend, RedisOptions};

use crate::conformance::key;
use crate::model::name;
use crate::poll::poll;
use crate::redis::{batch, open, patient, prefix, stored};
use crate::server::RedisServer;

/// What a call may take on a busy machine whose limits are those of [`impatient`].
const BOUND: Duration = Duration::from_secs(4);

fn impatient() -> RedisOptions {
    RedisOptions {
        connect_timeout: Duration::from_millis(500),
        write_timeout: Duration::from_millis(300),
        lookup_timeout: Duration::from_millis(100),
        ..RedisOptions::default()
    }
}

/// Insists that every call fails, in time.
async fn assert_away(backend: &RedisBackend) {
    let source = name("worker", 0);
    for _ in 0..3 {
        let begin = Instant::now();
        for error in [
            backend.lookup(&[key(1)], Walk::Prefix).await.map(drop).unwrap_err(),
            backend.apply(&source, batch(Some(1), 1, &[])).await.map(drop).unwrap_err(),
            backend.forget(&source, &[key(1)]).await.unwrap_err(),
            backend.states().await.map(drop).unwrap_err(),
        ] {
            assert!(matches!(error, IndexerError::Unavailable { .. }), "{error}");
        }
        assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    }
}

/// Waits until a lookup gets an answer.
pub(crate) async fn until_it_answers(backend: &RedisBackend) {
    let lookup = async || backend.lookup(&[key(1)], Walk::Prefix).await.ok();
    poll(Duration::from_secs(30), "an answer of the server", lookup).await;
}

/// A book on a server, and a worker that has block 1 in it.
async fn begin(server: &RedisServer, options: &RedisOptions) -> (RedisBackend, SourceName) {
    let backend = open(&server.url(), options, "model");
    let source = name("worker", 0);
    backend.apply(&source, batch(Some(1), 0, &[stored(&[key(1)])])).await.unwrap();
    (backend, source)
}

/// Kills a server and waits until it serves again.
async fn bring_back(server: &mut RedisServer, backend: &RedisBackend) {
    server.kill();
    assert_away(backend).await;
    server.restart();
    until_it_answers(backend).await;
}

#[tokio::test]
async fn a_server_that_comes_back_empty_is_told_by_a_gap() {
    let mut server = RedisServer::start(&[]);
    let (backend, source) = begin(&server, &impatient()).await;
    bring_back(&mut server, &backend).await;
    assert_eq!(prefix(&backend, &source, &[key(1)]).await, 0);
    assert_eq!(
        backend.apply(&source, batch(Some(1), 1, &[])).await.unwrap(),
        Verdict::Gap { expected: 0, got: 1 }
    );
}

#[tokio::test]
async fn a_server_that_comes_back_with_its_data_goes_on_where_it_was() {
    let mut server = RedisServer::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let (backend, source) = begin(&server, &impatient()).await;
    bring_back(&mut server, &backend).await;
    // The disk of a busy machine may be slower than an impatient client: a call that was given up may be done all the same.
    let patient = open(&server.url(), &patient(), "model");
    assert_eq!(prefix(&patient, &source, &[key(1)]).await, 1);
    let first = backend.apply(&source, batch(Some(1), 1, &[])).await;
    assert!(matches!(first, Ok(Verdict::Applied) | Err(IndexerError::Unavailable { .. })), "{first:?}");
    let again = patient.apply(&source, batch(Some(1), 1, &[])).await.unwrap();
    assert!(matches!((first, again), (Ok(_), Verdict::Duplicate) | (Err(_), _)), "{again:?}");
}

#[tokio::test]
async fn a_lost_connection_is_opened_again_by_the_call_that_finds_out() {
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let source = name("worker", 0);
    for sequence in 0..4 {
        backend.apply(&source, batch(Some(1), sequence, &[stored(&[key(sequence)])])).await.unwrap();
        server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
        assert_eq!(prefix(&backend, &source, &[key(sequence)]).await, 1);
        server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
    }
}

#[tokio::test]
async fn a_server_that_hangs_costs_a_bounded_time() {
    let server = RedisServer::start(&[]);
    let (backend, source) = begin(&server, &impatient()).await;
    server.pause();
    assert_away(&backend).await;
    server.resume();
    until_it_answers(&backend).await;
    // A call that was given up may be done when the server wakes up; to make it again is safe.
    let verdict = backend.apply(&source, batch(Some(1), 1, &[])).await.unwrap();
    assert!(matches!(verdict, Verdict::Applied | Verdict::Duplicate), "{verdict:?}");
    assert_eq!(backend.state(&source).await.unwrap().unwrap().due_sequence, Some(2));
}

#[tokio::test]
async fn a_server_that_is_not_there_yet_is_no_error_until_it_is_asked() {
    let mut server = RedisServer::start(&[]);
    server.kill();
    let backend = open(&server.url(), &impatient(), "model");
    assert_away(&backend).await;
    server.restart();
    until_it_answers(&backend).await;
}

#[tokio::test]
async fn a_server_without_memory_refuses_a_batch_as_a_whole() {
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let source = name("worker", 0);
    let keys = [1, 2, 3].map(key);
    backend.apply(&source, batch(Some(1), 0, &[stored(&keys)])).await.unwrap();
    server.cli(&["CONFIG", "SET", "maxmemory", "1"]);
    let error = backend.apply(&source, batch(Some(1), 1, &[stored(&[key(4)])])).await.unwrap_err();
    assert!(matches!(&error, IndexerError::Unavailable { reason, .. } if reason.contains("OOM")), "{error}");
    assert_eq!(prefix(&backend, &source, &[key(4)]).await, 0);
    assert_eq!(prefix(&backend, &source, &keys).await, 3);
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    let verdict = backend.apply(&source, batch(Some(1), 1, &[stored(&[key(4)])])).await.unwrap();
    assert_eq!(verdict, Verdict::Applied);
    assert_eq!(prefix(&backend, &source, &[key(4)]).await, 1);
}

#[tokio::test]
async fn a_server_that_became_a_replica_is_left_for_the_one_at_its_address() {
    let server = RedisServer::start(&[]);
    let (backend, source) = begin(&server, &patient()).await;
    let n_before = n_connections(&server);
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = backend.apply(&source, batch(Some(1), 1, &[])).await.unwrap_err();
    assert!(
        matches!(&error, IndexerError::Unavailable { reason, .. } if reason.contains("read only replica")),
        "{error}"
    );
    // Two of the tool that asks here, and one that was opened for the second try.
    assert_eq!(n_connections(&server), n_before + 3);
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    assert_eq!(backend.apply(&source, batch(Some(1), 1, &[])).await.unwrap(), Verdict::Applied);
}

/// How many connections a server has taken.
fn n_connections(server: &RedisServer) -> u32 {
    let stats = server.cli(&["INFO", "stats"]);
    let line = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    line.unwrap().trim().parse().unwrap()
}
