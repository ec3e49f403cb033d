//! Redis servers that die, hang and lie while a tier uses them.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvik_tier::conformance::{content, content_key, get_each_once};
use kvik_tier::{
    Checksummed, ChunkKey, GetItem, GetOutcome, PutOutcome, RedisOptions, RedisTier, Tier, TierExt as _,
    TierHealth,
};

use super::server::{Certificates, RedisCluster, RedisServer, wait_until};
use super::{detail, get, open, put};

/// Timeouts that a test can wait for.
fn impatient() -> RedisOptions {
    RedisOptions {
        connect_timeout: Duration::from_millis(500),
        response_timeout: Duration::from_millis(300),
        ..RedisOptions::default()
    }
}

/// What a call with [`impatient`] timeouts may take on a machine that is busy.
const BOUND: Duration = Duration::from_secs(4);

/// Insists that all operations fail, in time, and that the tier says so.
fn assert_down(tier: &RedisTier) {
    for n_bytes in [100, 8 << 20] {
        let begin = Instant::now();
        assert!(matches!(get(tier, content_key(0), n_bytes), GetOutcome::Failed(_)));
        assert!(begin.elapsed() < BOUND, "get took {:?}", begin.elapsed());
        let begin = Instant::now();
        assert!(matches!(put(tier, content_key(1), n_bytes), PutOutcome::Failed(_)));
        assert!(begin.elapsed() < BOUND, "put took {:?}", begin.elapsed());
    }
    let begin = Instant::now();
    assert!(tier.contains(&[content_key(0)], &mut [false]).is_err());
    // A server that hangs has the command already and obeys when it wakes up.
    assert!(tier.delete(&[content_key(2)]).is_err());
    assert!(begin.elapsed() < 2 * BOUND, "contains and delete took {:?}", begin.elapsed());
    assert!(matches!(tier.stat().health, TierHealth::Down(_)));
}

/// A server on a thread that does with each connection what it is told.
fn serve(answer: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            answer(stream.unwrap());
        }
    });
    url
}

#[test]
fn a_killed_server_is_down_and_a_restarted_one_is_up() {
    let mut server = RedisServer::start(&[]);
    let tier = open(&server.url(), &impatient());
    assert!(put(&tier, content_key(0), 1000).is_present());
    server.kill();
    assert_down(&tier);
    server.restart();
    // The first call finds connections of the old server and does not fail for it.
    assert!(matches!(get(&tier, content_key(0), 1000), GetOutcome::Miss));
    assert!(matches!(put(&tier, content_key(0), 1000), PutOutcome::Stored));
    assert_eq!(tier.stat().health, TierHealth::Up);
}

#[test]
fn idle_connections_that_the_server_closed_are_replaced() {
    let server = RedisServer::start(&[]);
    let tier = open(&server.url(), &impatient());
    for round in 0..3 {
        assert!(put(&tier, content_key(round), 1000).is_present());
        server.cli(&["CLIENT", "KILL", "TYPE", "normal"]);
        assert!(get(&tier, content_key(round), 1000).is_hit());
    }
}

#[test]
fn a_server_that_hangs_costs_a_bounded_time() {
    let server = RedisServer::start(&[]);
    let tier = open(&server.url(), &impatient());
    assert!(put(&tier, content_key(0), 1000).is_present());
    server.pause();
    assert_down(&tier);
    server.resume();
    wait_until("the server answers again", || get(&tier, content_key(0), 1000).is_hit());
    assert_eq!(tier.stat().health, TierHealth::Up);
}

#[test]
fn a_tls_server_that_hangs_costs_a_bounded_time() {
    let certificates = Certificates::new();
    let server = RedisServer::start_tls(&certificates, &[]);
    let options = RedisOptions { ca_file: Some(certificates.ca_file.clone()), ..impatient() };
    let tier = open(&format!("rediss://127.0.0.1:{}", server.port()), &options);
    assert!(put(&tier, content_key(0), 1000).is_present());
    server.pause();
    assert_down(&tier);
    server.resume();
    wait_until("the server answers again", || get(&tier, content_key(0), 1000).is_hit());
}

#[test]
fn callers_get_right_bytes_or_none_while_the_server_dies_and_returns() {
    let mut server = RedisServer::start(&[]);
    let tier = Checksummed::new(open(&server.url(), &impatient()));
    let is_over = AtomicBool::new(false);
    let n_hits = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for chunk_idx in 0..8 {
                        put(&tier, content_key(chunk_idx), 300_000);
                        if get(&tier, content_key(chunk_idx), 300_000).is_hit() {
                            n_hits.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        for _ in 0..3 {
            let n_before = n_hits.load(Ordering::Relaxed);
            wait_until("callers hit", || n_hits.load(Ordering::Relaxed) > n_before + 20);
            server.kill();
            server.restart();
        }
        let n_before = n_hits.load(Ordering::Relaxed);
        wait_until("callers hit again", || n_hits.load(Ordering::Relaxed) > n_before + 20);
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_lost_server_of_a_cluster_takes_its_slots_only() {
    let mut cluster = RedisCluster::start();
    let tier = open(&cluster.url(), &impatient());
    let keys: Vec<ChunkKey> = (0..60).map(content_key).collect();
    for key in &keys {
        assert!(put(&tier, *key, 1000).is_present());
    }
    let is_hit: Vec<bool> = keys.iter().map(|key| get(&tier, *key, 1000).is_hit()).collect();
    assert!(is_hit.iter().all(|is_hit| *is_hit));
    cluster.servers[1].kill();
    let outcomes: Vec<GetOutcome> = keys.iter().map(|key| get(&tier, *key, 1000)).collect();
    let n_hits = outcomes.iter().filter(|outcome| outcome.is_hit()).count();
    let n_failed = outcomes.iter().filter(|outcome| matches!(outcome, GetOutcome::Failed(_))).count();
    assert_eq!(n_hits + n_failed, 60);
    assert!((20..60).contains(&n_hits), "{n_hits} of 60 keys are left");
    // One call for all keys fails for those of the lost server and for no other.
    let mut buffers = vec![[0; 1000]; keys.len()];
    let mut batch: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, buffer)| GetItem::whole(*key, buffer)).collect();
    let begin = Instant::now();
    get_each_once(&tier, &mut batch);
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    assert_eq!(batch.iter().filter(|item| item.outcome.is_hit()).count(), n_hits);
    cluster.servers[1].restart();
    wait_until("all slots are served again", || keys.iter().all(|key| put(&tier, *key, 1000).is_present()));
    assert!(keys.iter().all(|key| get(&tier, *key, 1000).is_hit()));
}

#[test]
fn a_server_of_a_cluster_that_hangs_costs_a_bounded_time() {
    let cluster = RedisCluster::start();
    let tier = open(&cluster.url(), &impatient());
    let keys: Vec<ChunkKey> = (0..30).map(content_key).collect();
    for key in &keys {
        assert!(put(&tier, *key, 1000).is_present());
    }
    cluster.servers[0].pause();
    let begin = Instant::now();
    let mut present = vec![false; keys.len()];
    assert!(tier.contains(&keys, &mut present).is_err());
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    let mut n_hits = 0;
    for key in &keys {
        let begin = Instant::now();
        n_hits += usize::from(get(&tier, *key, 1000).is_hit());
        assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    }
    assert!((1..keys.len()).contains(&n_hits), "{n_hits} keys are at servers that answer");
    cluster.servers[0].resume();
    wait_until("all keys are served again", || keys.iter().all(|key| get(&tier, *key, 1000).is_hit()));
}

#[test]
fn a_server_that_speaks_something_else_is_down() {
    let url = serve(|mut stream| {
        drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n"));
        drop(stream.read(&mut [0; 1024]));
    });
    assert_down(&open(&url, &impatient()));
}

#[test]
fn a_server_that_dribbles_costs_a_bounded_time() {
    let url = serve(|mut stream| {
        // Every byte comes before the silence is too long, and the value would take days.
        drop(stream.write_all(b"$1000000\r\n"));
        while stream.write_all(b"x").is_ok() {
            thread::park_timeout(Duration::from_millis(50));
        }
    });
    let tier = open(&url, &impatient());
    let begin = Instant::now();
    assert!(
        matches!(get(&tier, content_key(0), 1_000_000), GetOutcome::Failed(error) if error.is_transient())
    );
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
}

#[test]
fn unrequested_replies_are_not_taken_for_others() {
    let url = serve(|mut stream| {
        // Two values for the first question: the second must not answer the next one.
        let value = content(content_key(0), 100);
        let reply = [b"$100\r\n", value.as_slice(), b"\r\n"].concat();
        drop(stream.read(&mut [0; 1024]));
        drop(stream.write_all(&reply.repeat(2)));
        drop(stream.read(&mut [0; 1024]));
    });
    let tier = open(&url, &RedisOptions { n_connections: 1, ..impatient() });
    let mut buffer = vec![0; 100];
    assert!(tier.get_one(content_key(0), &mut buffer).is_hit());
    // The helper insists that a hit has the bytes of its own key, and each connection answers only once.
    for chunk_idx in 1..4 {
        buffer.fill(0);
        let outcome = tier.get_one(content_key(chunk_idx), &mut buffer);
        assert!(matches!(outcome, GetOutcome::Hit | GetOutcome::Failed(_)));
    }
    assert_eq!(detail(&tier, "connects"), 4);
}

#[test]
fn a_name_without_an_address_fails_in_time() {
    let tier = open("redis://no-such-host.invalid:6379", &impatient());
    let begin = Instant::now();
    assert!(matches!(get(&tier, content_key(0), 100), GetOutcome::Failed(_)));
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
}

#[test]
fn a_range_that_is_gone_is_told_from_one_that_is_missing() {
    // The head is there, the range is not, and this is how long the value is after that.
    for (length, is_gone) in [(0, true), (4096, false)] {
        let url = serve(move |mut stream| {
            drop(stream.read(&mut [0; 1024]));
            let behind = format!("\r\n$0\r\n\r\n:{length}\r\n");
            drop(stream.write_all(&[b"$100\r\n", [7; 100].as_slice(), behind.as_bytes()].concat()));
            drop(stream.read(&mut [0; 1024]));
        });
        let tier = open(&url, &impatient());
        let (mut head, mut buffer) = ([0; 100], [0; 100]);
        let mut batch = [GetItem::with_head(content_key(0), &mut head, 5000, &mut buffer)];
        get_each_once(&tier, &mut batch);
        let [GetItem { outcome, .. }] = batch;
        match outcome {
            GetOutcome::Miss => assert!(is_gone),
            GetOutcome::Corrupt("length") => assert!(!is_gone),
            outcome => panic!("{outcome:?}"),
        }
    }
}

#[test]
fn every_item_arrives_once_whatever_the_server_does() {
    let value = content(content_key(0), 1 << 20);
    let reply = [b"$1048576\r\n", value.as_slice(), b"\r\n"].concat();
    // It closes after so many bytes, in the middle of the first value, of the second, and behind it.
    for n_sent in [0, 10, 1 << 19, reply.len() + (1 << 19), 2 * reply.len()] {
        let replies = [reply.clone(), reply.clone()].concat();
        let url = serve(move |mut stream| {
            drop(stream.read(&mut [0; 64]));
            drop(stream.write_all(&replies[..n_sent]));
        });
        let tier = open(&url, &impatient());
        let mut buffers = vec![vec![0; 1 << 20]; 20];
        let items = buffers.iter_mut().zip(0..).map(|(buffer, idx)| GetItem::whole(content_key(idx), buffer));
        let mut batch: Vec<GetItem<'_>> = items.collect();
        get_each_once(&tier, &mut batch);
        let n_failed = batch.iter().filter(|item| matches!(item.outcome, GetOutcome::Failed(_))).count();
        assert!((12..=20).contains(&n_failed), "{n_failed} of 20 failed");
    }
}
