//! Books on a cluster.

use kvik_index::holders::{Verdict, Walk};
use kvik_indexer::IndexerError;
use kvik_indexer::backend::Backend as _;

use crate::conformance::key;
use crate::faults::until_it_answers;
use crate::model::name;
use crate::redis::{batch, conform, open, patient, prefix, stored};
use crate::server::RedisCluster;

#[test]
fn a_cluster_conforms() {
    let cluster = RedisCluster::start();
    conform(&cluster.url(), &patient(), 6);
    let n_keys = cluster.servers.iter().filter(|server| server.cli(&["DBSIZE"]) != "0").count();
    assert!(n_keys > 1, "books are spread over the members");
}

#[tokio::test]
async fn a_book_is_followed_when_its_slot_moves() {
    let cluster = RedisCluster::start();
    let backend = open(&cluster.url(), &patient(), "model");
    let source = name("worker", 0);
    let keys: Vec<_> = (0..20).map(key).collect();
    backend.apply(&source, batch(Some(1), 0, &[stored(&keys)])).await.unwrap();
    let from = cluster.servers.iter().position(|server| server.cli(&["DBSIZE"]) == "21").unwrap();
    let to = (from + 1) % 3;
    let register = cluster.servers[from].cli(&["--scan", "--pattern", "*:r"]);
    assert_eq!(cluster.owner_of(&register), from);
    let slot = cluster.servers[from].cli(&["CLUSTER", "KEYSLOT", &register]);
    let (from_id, to_id) = (cluster.id_of(from), cluster.id_of(to));
    cluster.servers[to].cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
    cluster.servers[from].cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
    let to_port = cluster.servers[to].port().to_string();
    cluster.servers[from].cli(&["MIGRATE", "127.0.0.1", &to_port, &register, "0", "5000"]);
    // The register and the blocks are on two servers: neither can judge the batch, and neither applies half of it.
    let error = backend.apply(&source, batch(Some(1), 1, &[stored(&keys)])).await.unwrap_err();
    assert!(matches!(error, IndexerError::Unavailable { .. }), "{error}");
    // Names of blocks are bytes that a terminal does not carry.
    let mut connection =
        ::redis::Client::open(cluster.servers[from].url()).unwrap().get_connection().unwrap();
    let names: Vec<Vec<u8>> = ::redis::cmd("KEYS").arg("*").query(&mut connection).unwrap();
    let mut migrate = ::redis::cmd("MIGRATE");
    migrate.arg("127.0.0.1").arg(&to_port).arg("").arg(0).arg(5000).arg("KEYS").arg(&names);
    migrate.exec(&mut connection).unwrap();
    for server in [to, from, (from + 2) % 3] {
        cluster.servers[server].cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
    }
    assert_eq!(prefix(&backend, &source, &keys).await, 20);
    assert_eq!(backend.apply(&source, batch(Some(1), 1, &[stored(&keys)])).await.unwrap(), Verdict::Applied);
    assert_eq!(cluster.servers[to].cli(&["DBSIZE"]), "21");
}

#[tokio::test]
async fn a_member_of_a_cluster_is_not_taken_for_a_server() {
    let cluster = RedisCluster::start();
    let mut errors = Vec::new();
    for book in 0..20 {
        let backend = open(&cluster.servers[0].url(), &patient(), &format!("model {book}"));
        errors.extend(backend.lookup(&[key(1)], Walk::Prefix).await.err());
    }
    let error = errors.first().expect("some books belong to other servers").to_string();
    assert!(error.contains("redis+cluster://"), "{error}");
}

#[tokio::test]
async fn a_lost_member_takes_only_its_books() {
    let mut cluster = RedisCluster::start();
    let url = cluster.url();
    let books: Vec<_> = (0..20).map(|book| open(&url, &patient(), &format!("model {book}"))).collect();
    let source = name("worker", 0);
    for book in &books {
        book.apply(&source, batch(Some(1), 0, &[stored(&[key(1)])])).await.unwrap();
    }
    cluster.servers[1].kill();
    let mut n_away = 0;
    for book in &books {
        match book.lookup(&[key(1)], Walk::Prefix).await {
            Ok(rows) => assert_eq!(rows.len(), 1),
            Err(error) => {
                assert!(matches!(error, IndexerError::Unavailable { .. }), "{error}");
                n_away += 1;
            }
        }
    }
    assert!((1..20).contains(&n_away), "{n_away} books are away");
    cluster.servers[1].restart();
    for book in &books {
        until_it_answers(book).await;
    }
}
