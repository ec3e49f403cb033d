//! Books on one Redis server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use kvik_index::holders::{BlockKey, Event, SourceName, Tier, Verdict, Walk};
use kvik_indexer::IndexerError;
use kvik_indexer::backend::redis::{RedisBackend, RedisClient, RedisOptions};
use kvik_indexer::backend::{Backend, KeyedBatch, KeyedHolding};

use crate::conformance::{self, check_lookups, check_states, key, rows};
use crate::model::{Model, name};
use crate::server::{Certificates, RedisServer, wait_until};

/// Time limits that a busy machine keeps.
pub(crate) fn patient() -> RedisOptions {
    RedisOptions {
        lookup_timeout: Duration::from_secs(10),
        write_timeout: Duration::from_secs(10),
        connect_timeout: Duration::from_secs(10),
        ..RedisOptions::default()
    }
}

pub(crate) fn open(url: &str, options: &RedisOptions, model: &str) -> RedisBackend {
    let client = RedisClient::new(&url.parse().unwrap(), options).unwrap();
    RedisBackend::new(Arc::new(client), options, model, "naming")
}

/// Runs the suite on books that share a server.
pub(crate) fn conform(url: &str, options: &RedisOptions, n_cases: u32) {
    let n_books = AtomicUsize::new(0);
    let make = |first_sequence| -> Box<dyn Backend> {
        let book = format!("model {}", n_books.fetch_add(1, Ordering::Relaxed));
        let options = RedisOptions { first_sequence, ..options.clone() };
        Box::new(open(url, &options, &book))
    };
    conformance::run(&make, n_cases);
}

pub(crate) fn batch<'a>(epoch: Option<u64>, sequence: u64, events: &'a [Event<'a>]) -> KeyedBatch<'a> {
    KeyedBatch { epoch, sequence, replayed: false, published_s: sequence as f64, events }
}

pub(crate) fn stored(keys: &[BlockKey]) -> Event<'_> {
    Event::Stored { tier: Tier::Gpu, parent: None, keys }
}

/// Blocks from the first on that a source has.
pub(crate) async fn prefix(backend: &RedisBackend, source: &SourceName, keys: &[BlockKey]) -> u32 {
    let rows = backend.lookup(keys, Walk::Prefix).await.unwrap();
    rows.iter().find(|row| row.source == *source).map_or(0, |row| row.prefix_in.iter().sum())
}

#[test]
fn redis_conforms() {
    let server = RedisServer::start(&[]);
    conform(&server.url(), &patient(), 24);
}

#[test]
fn redis_conforms_on_a_socket_and_without_expiry() {
    let server = RedisServer::start_with(|_, folder| {
        vec!["--unixsocket".to_owned(), folder.join("redis.sock").display().to_string()]
    });
    let url = format!("unix://{}", server.folder().join("redis.sock").display());
    conform(&url, &RedisOptions { block_ttl: Duration::ZERO, ..patient() }, 4);
    assert_eq!(server.cli(&["INFO", "keyspace"]).matches("expires=0").count(), 1);
}

#[test]
fn redis_conforms_behind_tls() {
    let certificates = Certificates::new();
    let server = RedisServer::start_tls(&certificates, &[]);
    let url = format!("rediss://127.0.0.1:{}", server.port());
    conform(&url, &RedisOptions { ca_file: Some(certificates.ca_file.clone()), ..patient() }, 2);
}

#[tokio::test]
async fn another_gateway_sees_what_one_wrote_and_goes_on() {
    let server = RedisServer::start(&[]);
    let (source, keys) = (name("worker", 0), [key(1), key(2)]);
    let old = open(&server.url(), &patient(), "model");
    assert_eq!(old.apply(&source, batch(Some(1), 0, &[stored(&keys)])).await.unwrap(), Verdict::Applied);
    drop(old);
    let new = open(&server.url(), &patient(), "model");
    assert_eq!(prefix(&new, &source, &keys).await, 2);
    assert_eq!(new.apply(&source, batch(Some(1), 0, &[stored(&keys)])).await.unwrap(), Verdict::Duplicate);
    assert_eq!(new.apply(&source, batch(Some(1), 1, &[])).await.unwrap(), Verdict::Applied);
    for (model, naming) in [("model", "other"), ("other", "naming"), ("modelnaming", "")] {
        let client = RedisClient::new(&server.url().parse().unwrap(), &patient()).unwrap();
        let other = RedisBackend::new(Arc::new(client), &patient(), model, naming);
        assert!(other.lookup(&keys, Walk::All).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_batch_that_two_gateways_deliver_counts_once() {
    // Without epochs, each gateway behind the other by turns, over restarts.
    let server = RedisServer::start(&[]);
    let gateways = [(); 2].map(|()| open(&server.url(), &patient(), "model"));
    let source = name("worker", 0);
    let mut model = Model::new(0);
    let mut log: Vec<(u64, f64, Vec<BlockKey>, bool)> = Vec::new();
    let mut now_s = 0.0;
    for life in 0..6_u64 {
        for sequence in 0..7 {
            now_s += 1.0;
            let keys = (sequence / 2..sequence + 4).map(|at| key(life % 2 * 3 + at)).collect();
            log.push((sequence, now_s, keys, sequence % 3 == 2));
        }
    }
    let mut positions = [0; 2];
    let mut n_model = 0;
    let mut seed = 1_u64;
    while positions.iter().any(|position| *position < log.len()) {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let gateway = (seed >> 40) as usize % 2;
        let at = positions[gateway];
        let Some((sequence, published_s, keys, removes)) = log.get(at) else { continue };
        positions[gateway] += 1;
        let event = if *removes { Event::Removed { tier: Tier::Gpu, keys } } else { stored(keys) };
        let events = [event];
        let batch = KeyedBatch { published_s: *published_s, ..batch(None, *sequence, &events) };
        let verdict = gateways[gateway].apply(&source, batch).await.unwrap();
        if at == n_model {
            assert_eq!(verdict, model.apply(&source, batch));
            n_model += 1;
        } else {
            assert!(matches!(verdict, Verdict::Duplicate | Verdict::OldEpoch), "{verdict:?}");
        }
        let prompt: Vec<BlockKey> = (0..16).map(key).collect();
        check_lookups(&gateways[1 - gateway], &model, &prompt).await;
        check_states(&gateways[gateway], &model).await;
    }
}

#[tokio::test]
async fn parts_of_a_batch_count_once_from_any_gateway() {
    let server = RedisServer::start(&[]);
    let gateways = [(); 3].map(|()| open(&server.url(), &patient(), "model"));
    let source = name("worker", 0);
    let keys: Vec<BlockKey> = (0..30_000).map(key).collect();
    let events = [stored(&keys)];
    for sequence in 0..3 {
        let verdicts = futures_util::future::join_all(
            gateways.iter().map(|gateway| gateway.apply(&source, batch(Some(1), sequence, &events))),
        );
        let verdicts: Vec<Verdict> = verdicts.await.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            verdicts.iter().filter(|verdict| **verdict == Verdict::Applied).count(),
            1,
            "{verdicts:?}"
        );
        assert!(verdicts.iter().all(|verdict| matches!(verdict, Verdict::Applied | Verdict::Duplicate)));
    }
    assert_eq!(prefix(&gateways[0], &source, &keys).await, 30_000);
    let removed = [Event::Removed { tier: Tier::Gpu, keys: &keys }];
    for (sequence, expected) in [(3, 30_000), (4, 30_000), (5, 0)] {
        assert_eq!(
            gateways[0].apply(&source, batch(Some(1), sequence, &removed)).await.unwrap(),
            Verdict::Applied
        );
        assert_eq!(prefix(&gateways[1], &source, &keys).await, expected);
    }
    assert_eq!(server.cli(&["DBSIZE"]), "1", "only the register is left");
}

#[tokio::test]
async fn a_replacement_is_seen_whole_or_not_at_all() {
    let server = RedisServer::start(&[]);
    let (writer, reader) =
        (open(&server.url(), &patient(), "model"), open(&server.url(), &patient(), "model"));
    let source = name("worker", 0);
    let keys: Vec<BlockKey> = (0..20_000).map(key).collect();
    writer.apply(&source, batch(Some(1), 0, &[stored(&keys[..3])])).await.unwrap();
    let runs = [(Tier::Cpu, keys.clone())];
    let holding = KeyedHolding { epoch: Some(1), next_sequence: 9, runs: &runs };
    let mut n_old = 0;
    let mut replace = writer.replace(&source, holding);
    loop {
        tokio::select! {
            replaced = &mut replace => {
                assert!(replaced.unwrap());
                break;
            }
            row = reader.lookup(&keys[..4], Walk::Prefix) => {
                let prefix_in = row.unwrap()[0].prefix_in;
                assert!(prefix_in == [3, 0, 0, 0] || prefix_in == [0, 4, 0, 0], "{prefix_in:?}");
                n_old += u32::from(prefix_in[0] == 3);
            }
        }
    }
    assert!(n_old > 0, "the replacement was watched");
    assert_eq!(prefix(&reader, &source, &keys).await, 20_000);
    // Nothing is known of the old life, and the number of the holding is due.
    assert_eq!(reader.apply(&source, batch(Some(1), 9, &[])).await.unwrap(), Verdict::Applied);
}

/// Lets a replacement go until some of its parts are done.
async fn begin(server: &RedisServer, replace: &mut BoxFuture<'_, Result<bool, IndexerError>>) {
    while server.cli(&["DBSIZE"]).parse::<usize>().unwrap() < 100 {
        tokio::select! {
            replaced = &mut *replace => panic!("it ended too soon: {replaced:?}"),
            () = tokio::task::yield_now() => {}
        }
    }
}

#[tokio::test]
async fn an_abandoned_replacement_is_never_counted_and_leaves() {
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let source = name("worker", 0);
    let keys: Vec<BlockKey> = (0..20_000).map(key).collect();
    backend.apply(&source, batch(Some(1), 0, &[stored(&keys[..3])])).await.unwrap();
    let runs = [(Tier::Cpu, keys.clone())];
    let mut replace =
        backend.replace(&source, KeyedHolding { epoch: Some(1), next_sequence: 9, runs: &runs });
    begin(&server, &mut replace).await;
    // Its gateway is gone.
    drop(replace);
    assert_eq!(prefix(&backend, &source, &keys).await, 3);
    // The restart ends it, and a lookup then takes its blocks away.
    assert_eq!(backend.apply(&source, batch(Some(2), 0, &[])).await.unwrap(), Verdict::Restarted);
    assert!(backend.lookup(&keys, Walk::All).await.unwrap().is_empty());
    assert_eq!(server.cli(&["DBSIZE"]), "1");
}

#[tokio::test]
async fn a_replacement_that_another_gateway_overtakes_is_given_up() {
    let server = RedisServer::start(&[]);
    let (slow, fast) = (open(&server.url(), &patient(), "model"), open(&server.url(), &patient(), "model"));
    let source = name("worker", 0);
    let keys: Vec<BlockKey> = (0..20_000).map(key).collect();
    let (slow_runs, fast_runs) = ([(Tier::Cpu, keys.clone())], [(Tier::Gpu, keys[..5].to_vec())]);
    let mut replace =
        slow.replace(&source, KeyedHolding { epoch: Some(1), next_sequence: 9, runs: &slow_runs });
    begin(&server, &mut replace).await;
    let holding = KeyedHolding { epoch: Some(1), next_sequence: 11, runs: &fast_runs };
    assert!(fast.replace(&source, holding).await.unwrap());
    let error = replace.await.unwrap_err();
    assert!(error.to_string().contains("another gateway"), "{error}");
    assert_eq!(prefix(&slow, &source, &keys).await, 5);
    assert_eq!(slow.state(&source).await.unwrap().unwrap().due_sequence, Some(11));
}

#[tokio::test]
async fn a_restart_takes_constant_time_and_dead_blocks_leave_when_they_are_met() {
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let keys: Vec<BlockKey> = (0..3000).map(key).collect();
    for worker in ["a", "b"] {
        backend.apply(&name(worker, 0), batch(Some(1), 0, &[stored(&keys)])).await.unwrap();
    }
    backend.apply(&name("a", 0), batch(Some(2), 0, &[])).await.unwrap();
    assert!(backend.remove_source(&name("b", 0)).await.unwrap());
    assert_eq!(server.cli(&["DBSIZE"]), "3001");
    assert!(backend.lookup(&keys[..1], Walk::Prefix).await.unwrap().is_empty());
    assert_eq!(server.cli(&["DBSIZE"]), "3000", "the lookup stopped at the first block");
    assert!(backend.lookup(&keys[..1000], Walk::All).await.unwrap().is_empty());
    assert_eq!(server.cli(&["DBSIZE"]), "2001");
    // A store writes only holders that live.
    backend.apply(&name("a", 0), batch(Some(2), 1, &[stored(&keys[1000..])])).await.unwrap();
    assert_eq!(server.cli(&["EVAL", "return #redis.call('GET', KEYS[1])", "1", &block_name(&server)]), "8");
}

/// The name of some block.
fn block_name(server: &RedisServer) -> String {
    // A name has bytes that a terminal does not show, so it is renamed.
    let script = "for _, name in ipairs(redis.call('KEYS', '*')) do \
        if redis.call('TYPE', name).ok == 'string' then redis.call('RENAME', name, 'x') return 'x' end end";
    server.cli(&["EVAL", script, "0"])
}

#[tokio::test]
async fn blocks_of_the_same_holders_have_the_same_value_in_whatever_order_they_were_stored() {
    // What makes a run of blocks one step of a lookup.
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let sources = ["a", "b", "c"].map(|worker| name(worker, 0));
    for source in &sources {
        backend.apply(source, batch(Some(1), 0, &[stored(&[key(0)])])).await.unwrap();
    }
    for (at, order) in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]].into_iter().enumerate() {
        for source in order {
            let sequence = 1 + at as u64;
            let verdict =
                backend.apply(&sources[source], batch(Some(1), sequence, &[stored(&[key(sequence)])])).await;
            assert_eq!(verdict.unwrap(), Verdict::Applied);
        }
    }
    let n_values = "local values, n = {}, 0 for _, name in ipairs(redis.call('KEYS', '*:b:*')) do \
        local value = redis.call('GET', name) \
        if not values[value] then values[value] = true n = n + 1 end end return n";
    assert_eq!(server.cli(&["EVAL", n_values, "0"]), "1");
}

#[tokio::test]
async fn blocks_and_register_expire() {
    let server = RedisServer::start(&[]);
    let source = name("worker", 0);
    let options = RedisOptions { block_ttl: Duration::from_secs(1), ..patient() };
    let backend = open(&server.url(), &options, "model");
    backend.apply(&source, batch(Some(1), 0, &[stored(&[key(1)])])).await.unwrap();
    wait_until("all keys expire", || server.cli(&["DBSIZE"]) == "0");
    // The book begins anew, and what is missing is told.
    assert_eq!(
        backend.apply(&source, batch(Some(1), 1, &[])).await.unwrap(),
        Verdict::Gap { expected: 0, got: 1 }
    );
    let backend = open(&server.url(), &patient(), "day");
    backend.apply(&source, batch(Some(1), 0, &[stored(&[key(1)])])).await.unwrap();
    let ttls = server.cli(&[
        "EVAL",
        "local r = {} for _, n in ipairs(redis.call('KEYS', '*')) do \
        r[#r + 1] = redis.call('TTL', n) end table.sort(r) return r[#r - 1] .. ' ' .. r[#r]",
        "0",
    ]);
    let ttls: Vec<i64> = ttls.split(' ').map(|ttl| ttl.parse().unwrap()).collect();
    assert!((86_000..=86_400).contains(&ttls[0]) && (172_000..=172_800).contains(&ttls[1]), "{ttls:?}");
}

#[tokio::test]
async fn numbers_of_holders_are_not_used_again_when_the_register_is_lost() {
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let (one, two) = (name("one", 0), name("two", 0));
    backend.apply(&one, batch(Some(1), 0, &[stored(&[key(1)])])).await.unwrap();
    server.cli(&[
        "EVAL",
        "for _, name in ipairs(redis.call('KEYS', '*:r')) do redis.call('DEL', name) end",
        "0",
    ]);
    assert!(backend.states().await.unwrap().is_empty());
    // In the same second numbers would collide if they were the time alone.
    let second = server.cli(&["TIME"]).lines().next().unwrap().to_owned();
    wait_until("the next second", || server.cli(&["TIME"]).lines().next().unwrap() != second);
    backend.apply(&two, batch(Some(1), 0, &[stored(&[key(2)])])).await.unwrap();
    assert!(backend.lookup(&[key(1)], Walk::All).await.unwrap().is_empty());
    assert_eq!(prefix(&backend, &two, &[key(2)]).await, 1);
}

#[tokio::test]
async fn what_others_wrote_under_our_keys_is_no_block_and_a_foreign_register_an_error() {
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let (source, keys) = (name("worker", 0), [key(1), key(2), key(3)]);
    backend.apply(&source, batch(Some(1), 0, &[stored(&keys)])).await.unwrap();
    let spoil = |command: &str| {
        let script = format!(
            "for _, name in ipairs(redis.call('KEYS', '*:b:*')) do redis.call('DEL', name) {command} end"
        );
        server.cli(&["EVAL", &script, "0"]);
    };
    for (sequence, command) in [
        (1, "redis.call('RPUSH', name, 'x')"),
        (2, "redis.call('SET', name, 'x')"),
        (3, "redis.call('SET', name, string.rep('x', 4096))"),
    ] {
        spoil(command);
        assert!(backend.lookup(&keys, Walk::All).await.unwrap().is_empty());
        spoil(command);
        let verdict = backend.apply(&source, batch(Some(1), sequence, &[stored(&keys)])).await.unwrap();
        assert_eq!(verdict, Verdict::Applied);
        assert_eq!(prefix(&backend, &source, &keys).await, 3);
    }
    server.cli(&[
        "EVAL",
        "for _, name in ipairs(redis.call('KEYS', '*:r')) do \
        redis.call('DEL', name) redis.call('SET', name, 'x') end",
        "0",
    ]);
    let n_keys = server.cli(&["DBSIZE"]);
    for error in [
        backend.apply(&source, batch(Some(1), 2, &[stored(&keys)])).await.map(drop).unwrap_err(),
        backend.lookup(&keys, Walk::All).await.map(drop).unwrap_err(),
        backend.states().await.map(drop).unwrap_err(),
        backend.state(&source).await.map(drop).unwrap_err(),
        backend.remove_source(&source).await.map(drop).unwrap_err(),
    ] {
        assert!(
            matches!(&error, IndexerError::Unavailable { reason, .. } if reason.contains("WRONGTYPE")),
            "{error}"
        );
    }
    assert_eq!(server.cli(&["DBSIZE"]), n_keys, "a refused script changes nothing");
}

#[tokio::test]
async fn a_name_of_a_megabyte_is_a_short_key() {
    let server = RedisServer::start(&[]);
    let long = "m".repeat(1 << 20);
    let backend = open(&server.url(), &patient(), &long);
    let source = name("worker", 0);
    backend.apply(&source, batch(Some(1), 0, &[stored(&[key(1)])])).await.unwrap();
    assert_eq!(prefix(&backend, &source, &[key(1)]).await, 1);
    let longest =
        "local n = 0 for _, name in ipairs(redis.call('KEYS', '*')) do n = math.max(n, #name) end return n";
    assert_eq!(server.cli(&["EVAL", longest, "0"]), "34");
}

#[tokio::test]
async fn scripts_that_the_server_forgot_are_sent_again() {
    let server = RedisServer::start(&[]);
    let backend = open(&server.url(), &patient(), "model");
    let source = name("worker", 0);
    for sequence in 0..3 {
        server.cli(&["SCRIPT", "FLUSH"]);
        backend.apply(&source, batch(Some(1), sequence, &[stored(&[key(sequence)])])).await.unwrap();
        assert_eq!(prefix(&backend, &source, &[key(sequence)]).await, 1);
    }
    assert_eq!(rows(&backend, &[key(0), key(1), key(2)], Walk::All).await[0].covered_in, [3, 0, 0, 0]);
}
