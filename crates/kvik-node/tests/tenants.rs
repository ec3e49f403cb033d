//! Tenants of one daemon, which share nothing.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod support;

use std::time::{Duration, Instant};

use kvik_node::{AttachOptions, ClientToken, NodeClient, NodeOptions, NodeServer, Tenant};
use support::{Daemon, chain, store, verify};

#[test]
fn a_tenant_finds_nothing_of_another_and_a_wrong_token_is_refused() {
    let token = |name: &str| ClientToken::try_new(format!("token of tenant {name}")).unwrap();
    let mut daemon = Daemon::start(16 << 20);
    let tenant = |name: &str| Tenant {
        name: name.to_owned(),
        token: Some(token(name)),
        store: Daemon::open_store(16 << 20),
    };
    daemon.server = None;
    let mut options = NodeOptions::new(daemon.socket.clone(), daemon.store.clone());
    options.tenants = vec![tenant("a"), tenant("b")];
    daemon.server = Some(NodeServer::start(options.clone()).unwrap());
    let attach =
        |token: Option<ClientToken>| NodeClient::attach(&AttachOptions { token, ..daemon.options() });
    let (a, b) = (attach(Some(token("a"))).unwrap(), attach(Some(token("b"))).unwrap());
    assert_eq!(store(&a, 1, 4).unwrap(), 4);
    assert_eq!(verify(&b, 1, 4).unwrap(), 0);
    // Not by its name either: names of the same tokens differ.
    assert_ne!(chain(&a, 1, 4).names(), chain(&b, 1, 4).names());
    assert!(b.open(&chain(&a, 1, 4)).unwrap_err().to_string().contains("another space"));
    assert_eq!(store(&b, 1, 4).unwrap(), 4);
    assert_eq!((verify(&a, 1, 4).unwrap(), verify(&b, 1, 4).unwrap()), (4, 4));
    for wrong in [None, Some(token("c"))] {
        let refused = attach(wrong).unwrap_err().to_string();
        assert!(refused.contains("`token`") && !refused.contains("token of tenant"), "{refused}");
    }
    assert_eq!(daemon.server.as_ref().unwrap().stats().n_refused, 2);
    options.tenants.push(Tenant { name: "c".to_owned(), ..tenant("a") });
    let same = NodeServer::start(options).unwrap_err().to_string();
    assert!(same.contains("a token that no other has"), "{same}");
    assert!(ClientToken::try_new("short").unwrap_err().to_string().contains("16 to 4096 bytes"));
}

/// How far apart two sets of times are: the rank sum of the first as a number of standard deviations (Mann and Whitney).
fn separation(first: &[Duration], second: &[Duration]) -> f64 {
    let mut all: Vec<(Duration, bool)> =
        first.iter().map(|time| (*time, true)).chain(second.iter().map(|time| (*time, false))).collect();
    all.sort_unstable();
    let rank_sum: usize =
        all.iter().enumerate().filter(|(_, (_, is_first))| *is_first).map(|(rank, _)| rank + 1).sum();
    let (n, m) = (first.len() as f64, second.len() as f64);
    let mean = n * (n + m + 1.0) / 2.0;
    (rank_sum as f64 - mean) / (n * m * (n + m + 1.0) / 12.0).sqrt()
}

#[test]
fn how_long_a_lookup_takes_does_not_tell_what_another_tenant_has() {
    const N_CHUNKS: usize = 60;
    let token = |name: &str| ClientToken::try_new(format!("token of tenant {name}")).unwrap();
    let mut daemon = Daemon::start(16 << 20);
    daemon.server = None;
    let mut options = NodeOptions::new(daemon.socket.clone(), daemon.store.clone());
    options.tenants = ["a", "b"]
        .map(|name| Tenant {
            name: name.to_owned(),
            token: Some(token(name)),
            store: Daemon::open_store(16 << 20),
        })
        .into();
    daemon.server = Some(NodeServer::start(options).unwrap());
    let attach = |name: &str| {
        NodeClient::attach(&AttachOptions { token: Some(token(name)), ..daemon.options() }).unwrap()
    };
    let (a, b) = (attach("a"), attach("b"));
    assert_eq!(store(&a, 1, N_CHUNKS).unwrap(), N_CHUNKS);
    // In turns, so that what else the machine does falls on both alike.
    let times = |client: &NodeClient| {
        let chains = [1, 2].map(|seed| chain(client, seed, N_CHUNKS));
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..1000 {
            for place in [round % 2, 1 - round % 2] {
                let begin = Instant::now();
                drop(client.open(&chains[place]).unwrap());
                times[place].push(begin.elapsed());
            }
        }
        times
    };
    let [own_hit, own_miss] = times(&a);
    assert!(separation(&own_hit, &own_miss) > 6.0, "the test would see a difference");
    let [stored_by_another, stored_by_none] = times(&b);
    let apart = separation(&stored_by_another, &stored_by_none).abs();
    assert!(apart < 6.0, "the times are {apart:.1} standard deviations apart");
}
