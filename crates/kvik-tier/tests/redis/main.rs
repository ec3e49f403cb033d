//! Redis tiers on real servers: alone, behind TLS, on a socket, in a cluster.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod cluster;
mod faults;
#[path = "../../../../tests/support/redis.rs"]
mod server;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvik_tier::conformance::{self, Traits, content, content_key};
use kvik_tier::{
    Checksummed, ChunkKey, Encrypted, EncryptionKeys, FaultRates, Faulty, GetItem, GetOutcome, PutItem,
    PutOutcome, RedisOptions, RedisTier, Tier, TierExt as _, TierHealth,
};
use server::{Certificates, RedisCluster, RedisServer, wait_until};

const TRAITS: Traits = Traits {
    knows_keys: false,
    knows_lengths: false,
    knows_counts: false,
    counts_deletes: true,
    capacity_bytes: None,
    max_chunk_bytes: 4 << 20,
};

/// Waits as long as a busy machine needs.
fn patient() -> RedisOptions {
    RedisOptions {
        connect_timeout: Duration::from_secs(20),
        response_timeout: Duration::from_secs(20),
        ..RedisOptions::default()
    }
}

fn open(url: &str, options: &RedisOptions) -> RedisTier {
    RedisTier::open(&url.parse().unwrap(), options).unwrap()
}

/// Runs the suite on tiers that share a server: each has keys of its own.
fn conform(url: &str, options: &RedisOptions) {
    let n_tiers = AtomicUsize::new(0);
    let make = || {
        let tier_idx = n_tiers.fetch_add(1, Ordering::Relaxed);
        open(url, &RedisOptions { key_prefix: format!("t{tier_idx}"), ..options.clone() })
    };
    conformance::run(&|| Box::new(make()), &TRAITS);
    conformance::run(&|| Box::new(Checksummed::new(make())), &TRAITS);
    let keys = encryption_keys();
    conformance::run(&|| Box::new(Encrypted::new(make(), Arc::clone(&keys))), &TRAITS);
}

fn encryption_keys() -> Arc<EncryptionKeys> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    fs::write(&path, "5e".repeat(32)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    // What it has read stays when the file goes.
    Arc::new(EncryptionKeys::open(path).unwrap())
}

/// Runs the suite on tiers whose server loses, tears, flips and mixes what it has.
fn endure(url: &str) {
    let make = |seed: u64| -> Box<dyn Tier> {
        let options = RedisOptions { key_prefix: format!("faulty{seed}"), ..patient() };
        Box::new(Checksummed::new(Faulty::new(open(url, &options), fault_rates(), seed)))
    };
    let n_hits = conformance::run_under_faults(&make, 0..8);
    assert!(n_hits > 100, "{n_hits} hits");
}

fn fault_rates() -> FaultRates {
    FaultRates {
        fail: 50,
        fail_late: 50,
        lose: 30,
        tear: 30,
        shorten: 30,
        duplicate: 30,
        flip: 30,
        mix: 30,
        ..FaultRates::default()
    }
}

/// The name under which a server has a chunk.
fn name_of(key: ChunkKey) -> String {
    format!("kvik:{{{}:{}}}:{:04x}", key.namespace, key.chunk, key.rank)
}

fn put(tier: &impl Tier, key: ChunkKey, n_bytes: usize) -> PutOutcome {
    tier.put_one(key, &content(key, n_bytes))
}

/// Reads a chunk and insists that a hit is right.
fn get(tier: &impl Tier, key: ChunkKey, n_bytes: usize) -> GetOutcome {
    let mut buffer = vec![0; n_bytes];
    let outcome = tier.get_one(key, &mut buffer);
    assert!(!outcome.is_hit() || buffer == content(key, n_bytes), "a hit with other bytes");
    outcome
}

fn detail(tier: &impl Tier, name: &str) -> u64 {
    tier.stat().details.into_iter().find(|(detail, _)| *detail == name).unwrap().1
}

#[test]
fn a_server_conforms() {
    let server = RedisServer::start(&[]);
    conform(&server.url(), &patient());
}

#[test]
fn a_server_that_fails_in_every_way_gives_right_bytes_or_none() {
    let server = RedisServer::start(&[]);
    endure(&server.url());
}

#[test]
fn a_cluster_that_fails_in_every_way_gives_right_bytes_or_none() {
    let cluster = RedisCluster::start();
    endure(&cluster.url());
}

#[test]
fn a_server_conforms_over_one_connection_and_with_a_ttl() {
    let server = RedisServer::start(&[]);
    let ttl = Some(Duration::from_hours(1));
    conform(&server.url(), &RedisOptions { n_connections: 1, ttl, ..patient() });
}

#[test]
fn a_server_behind_tls_with_users_conforms() {
    let certificates = Certificates::new();
    let server = RedisServer::start_tls(
        &certificates,
        &["--requirepass", "p@ss", "--user", "kvik", "on", ">se:cret", "~*", "+@all"],
    );
    let options = RedisOptions { ca_file: Some(certificates.ca_file.clone()), ..patient() };
    conform(&format!("rediss://kvik:se%3Acret@127.0.0.1:{}", server.port()), &options);
    // By name, and with the password of the default user.
    let tier = open(&format!("rediss://:p@ss@localhost:{}", server.port()), &options);
    assert!(matches!(put(&tier, content_key(0), 100_000), PutOutcome::Stored));
}

#[test]
fn a_server_that_cannot_be_trusted_is_not_asked() {
    let certificates = Certificates::new();
    let server = RedisServer::start_tls(&certificates, &[]);
    let others = Certificates::new();
    let options = RedisOptions { ca_file: Some(others.ca_file.clone()), ..patient() };
    let tier = open(&format!("rediss://127.0.0.1:{}", server.port()), &options);
    assert!(matches!(put(&tier, content_key(0), 100), PutOutcome::Failed(_)));
    assert!(matches!(tier.stat().health, TierHealth::Down(_)));
}

#[test]
fn a_wrong_password_is_no_transient_failure() {
    let server = RedisServer::start(&["--requirepass", "right"]);
    let tier = open(&format!("redis://:wrong@127.0.0.1:{}", server.port()), &patient());
    let GetOutcome::Failed(error) = get(&tier, content_key(0), 100) else { panic!("no failure") };
    assert!(!error.is_transient(), "{error}");
    assert!(!error.to_string().contains("wrong@"), "{error}");
    let tier = open(&server.url(), &patient());
    let PutOutcome::Failed(error) = put(&tier, content_key(0), 100) else { panic!("no failure") };
    assert!(!error.is_transient(), "{error}");
}

#[test]
fn a_unix_socket_and_another_database_conform() {
    let server = RedisServer::start_with(|_, folder| {
        vec!["--unixsocket".to_owned(), folder.join("redis.sock").display().to_string()]
    });
    conform(&format!("unix://{}?db=3", server.folder().join("redis.sock").display()), &patient());
    assert!(server.cli(&["INFO", "keyspace"]).contains("db3:"));
    assert!(!server.cli(&["INFO", "keyspace"]).contains("db0:"));
}

#[test]
fn a_cluster_conforms() {
    let cluster = RedisCluster::start();
    conform(&cluster.url(), &patient());
    for server in &cluster.servers {
        assert_ne!(server.cli(&["DBSIZE"]), "0", "a server of the cluster has no keys");
    }
}

#[test]
fn a_large_batch_goes_over_several_connections() {
    let server = RedisServer::start(&[]);
    let tier = open(&server.url(), &patient());
    let keys: Vec<ChunkKey> = (0..24).map(content_key).collect();
    let chunks: Vec<Vec<u8>> = keys.iter().map(|key| content(*key, 1 << 20)).collect();
    let parts: Vec<[&[u8]; 2]> = chunks.iter().map(|chunk| chunk.split_at(999).into()).collect();
    let mut batch: Vec<PutItem<'_>> =
        keys.iter().zip(&parts).map(|(key, parts)| PutItem::new(*key, parts)).collect();
    tier.put(&mut batch);
    assert!(batch.iter().all(|item| matches!(item.outcome, PutOutcome::Stored)));
    let mut buffers = vec![vec![0; 1 << 20]; keys.len()];
    let mut batch: Vec<GetItem<'_>> =
        keys.iter().zip(&mut buffers).map(|(key, buffer)| GetItem::whole(*key, buffer)).collect();
    tier.get(&mut batch);
    assert!(batch.iter().all(|item| item.outcome.is_hit()));
    assert!(buffers == chunks);
    assert_eq!(detail(&tier, "connects"), 4);
    assert_eq!(detail(&tier, "hits"), 24);
    assert_eq!(detail(&tier, "stored"), 24);
}

#[test]
fn a_value_that_is_too_long_is_refused() {
    let server = RedisServer::start(&[]);
    let tier = open(&server.url(), &patient());
    let part = vec![0; 1 << 20];
    let parts = vec![part.as_slice(); 513];
    let mut batch = [PutItem::new(content_key(0), &parts), PutItem::new(content_key(1), &parts[..1])];
    tier.put(&mut batch);
    let [long, short] = batch;
    assert!(matches!(long.outcome, PutOutcome::Failed(error) if !error.is_transient()));
    assert!(matches!(short.outcome, PutOutcome::Stored));
}

#[test]
fn a_full_server_has_no_room() {
    let capacity_bytes = 32 << 20;
    let server = RedisServer::start(&["--maxmemory", &capacity_bytes.to_string()]);
    let traits = Traits { capacity_bytes: Some(capacity_bytes), ..TRAITS };
    let name = "a_full_tier_says_so_and_has_room_again_after_deleting";
    let behavior = conformance::BEHAVIORS.iter().find(|behavior| behavior.name == name).unwrap();
    behavior.check(&|| Box::new(open(&server.url(), &patient())), &traits);
}

#[test]
fn a_chunk_is_gone_after_its_ttl() {
    let server = RedisServer::start(&[]);
    let ttl = Some(Duration::from_millis(700));
    let tier = open(&server.url(), &RedisOptions { ttl, ..patient() });
    let outcome = put(&tier, content_key(0), 1000);
    assert!(matches!(outcome, PutOutcome::Stored), "{outcome:?}");
    let left_ms: i64 = server.cli(&["PTTL", &name_of(content_key(0))]).parse().unwrap();
    assert!(left_ms <= 700, "{left_ms}");
    wait_until("the chunk is gone", || matches!(get(&tier, content_key(0), 1000), GetOutcome::Miss));
    let outcome = put(&tier, content_key(0), 1000);
    assert!(matches!(outcome, PutOutcome::Stored), "{outcome:?}");
    let forever = open(&server.url(), &patient());
    put(&forever, content_key(1), 1000);
    assert_eq!(server.cli(&["PTTL", &name_of(content_key(1))]), "-1");
}

#[test]
fn a_replica_is_read_only() {
    let primary = RedisServer::start(&[]);
    let replica = RedisServer::start(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    wait_until("the replica follows", || {
        replica.cli(&["INFO", "replication"]).contains("master_link_status:up")
    });
    let writer = open(&primary.url(), &patient());
    let reader = open(&replica.url(), &patient());
    assert!(put(&writer, content_key(0), 1000).is_present());
    wait_until("the replica has the chunk", || get(&reader, content_key(0), 1000).is_hit());
    assert_eq!(reader.stat().health, TierHealth::Up);
    assert!(matches!(put(&reader, content_key(1), 1000), PutOutcome::Failed(_)));
    assert!(matches!(reader.stat().health, TierHealth::ReadOnly(_)));
    // Reading does not make it writable.
    assert!(get(&reader, content_key(0), 1000).is_hit());
    assert!(matches!(reader.stat().health, TierHealth::ReadOnly(_)));
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
    assert!(put(&reader, content_key(1), 1000).is_present());
    assert_eq!(reader.stat().health, TierHealth::Up);
}

#[test]
fn what_a_server_changed_or_mixed_up_is_corrupt() {
    let server = RedisServer::start(&[]);
    let tier = Checksummed::new(open(&server.url(), &patient()));
    let (key, other) = (content_key(0), content_key(1));
    for chunk_idx in 0..2 {
        assert!(put(&tier, content_key(chunk_idx), 10_000).is_present());
    }
    let lies: [&[&str]; 3] = [
        &["COPY", &name_of(other), &name_of(key), "REPLACE"],
        &["SETRANGE", &name_of(key), "9000", "x"],
        &["SET", &name_of(key), "nothing"],
    ];
    for lie in lies {
        tier.delete(&[key]).unwrap();
        assert!(put(&tier, key, 10_000).is_present());
        assert!(get(&tier, key, 10_000).is_hit());
        server.cli(lie);
        let outcome = get(&tier, key, 10_000);
        assert!(matches!(outcome, GetOutcome::Corrupt(_)), "{lie:?}: {outcome:?}");
    }
    // A value of another type is no chunk either.
    server.cli(&["DEL", &name_of(key)]);
    server.cli(&["LPUSH", &name_of(key), "x"]);
    assert!(matches!(get(&tier, key, 10_000), GetOutcome::Failed(_)));
    assert!(get(&tier, other, 10_000).is_hit());
}
