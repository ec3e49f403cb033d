//! Keys that move between the servers of a cluster.

use kvik_tier::conformance::{content, content_key, get_each_once};
use kvik_tier::{ChunkKey, GetItem, GetOutcome, PutOutcome};

use super::server::{RedisCluster, wait_until};
use super::{detail, get, name_of, open, patient, put};

#[test]
fn ranks_of_a_chunk_are_on_one_server() {
    let cluster = RedisCluster::start();
    let tier = open(&cluster.url(), &patient());
    for chunk_idx in 0..20 {
        let ranks: Vec<ChunkKey> = (0..4).map(|rank| ChunkKey { rank, ..content_key(chunk_idx) }).collect();
        for key in &ranks {
            assert!(matches!(put(&tier, *key, 100), PutOutcome::Stored));
        }
        let owner = cluster.owner_of(&name_of(ranks[0]));
        for key in &ranks {
            assert_eq!(cluster.servers[owner].cli(&["EXISTS", &name_of(*key)]), "1");
        }
    }
    assert_eq!(detail(&tier, "redirections"), 0);
}

#[test]
fn a_key_is_followed_while_it_moves() {
    let cluster = RedisCluster::start();
    let tier = open(&cluster.url(), &patient());
    let key = content_key(7);
    let name = name_of(key);
    assert!(put(&tier, key, 10_000).is_present());
    let from = cluster.owner_of(&name);
    let to = (from + 1) % 3;
    let (from_id, to_id) = (cluster.id_of(from), cluster.id_of(to));
    let slot = cluster.servers[from].cli(&["CLUSTER", "KEYSLOT", &name]);
    cluster.servers[to].cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]);
    cluster.servers[from].cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]);
    let to_port = cluster.servers[to].port().to_string();
    cluster.servers[from].cli(&["MIGRATE", "127.0.0.1", &to_port, &name, "0", "5000"]);
    // The key is at its new server and the slot is not.
    assert!(get(&tier, key, 10_000).is_hit());
    assert_eq!(detail(&tier, "redirections"), 1);
    // So are all commands of a read that takes several.
    let (mut head, mut buffer) = ([0; 100], [0; 1000]);
    let mut batch = [GetItem::with_head(key, &mut head, 5000, &mut buffer)];
    get_each_once(&tier, &mut batch);
    assert!(batch[0].outcome.is_hit(), "{:?}", batch[0].outcome);
    let chunk = content(key, 10_000);
    assert!(head == chunk[..100] && buffer == chunk[5000..6000]);
    assert_eq!(detail(&tier, "redirections"), 2);
    let rank = ChunkKey { rank: 1, ..key };
    assert!(matches!(put(&tier, rank, 5000), PutOutcome::Stored));
    assert_eq!(detail(&tier, "redirections"), 3);
    for server_idx in [to, from, (from + 2) % 3] {
        cluster.servers[server_idx].cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]);
    }
    // The slot has moved; it is told once and then known.
    assert!(get(&tier, key, 10_000).is_hit());
    assert_eq!(detail(&tier, "redirections"), 4);
    wait_until("the new slots are known", || {
        let n_before = detail(&tier, "redirections");
        assert!(get(&tier, rank, 5000).is_hit());
        detail(&tier, "redirections") == n_before
    });
}

#[test]
fn a_member_of_a_cluster_is_not_taken_for_a_server() {
    let cluster = RedisCluster::start();
    let tier = open(&cluster.servers[0].url(), &patient());
    let failure = (0..20).find_map(|chunk_idx| match put(&tier, content_key(chunk_idx), 100) {
        PutOutcome::Failed(error) => Some(error),
        _ => None,
    });
    let error = failure.expect("some keys belong to other servers");
    assert!(error.to_string().contains("redis+cluster://"), "{error}");
    assert!(!error.is_transient());
    let mut buffers = [[0; 100]; 20];
    let items = buffers.iter_mut().zip(0..).map(|(buffer, idx)| GetItem::whole(content_key(idx), buffer));
    let mut batch: Vec<GetItem<'_>> = items.collect();
    get_each_once(&tier, &mut batch);
    assert!(batch.iter().any(|item| matches!(item.outcome, GetOutcome::Failed(_))));
}
