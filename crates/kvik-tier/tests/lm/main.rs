//! Tiers on servers of LMCache's plain remote protocol.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod faults;
mod server;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvik_tier::conformance::{self, Traits, content, content_key};
use kvik_tier::{
    Checksummed, FaultRates, Faulty, GetItem, GetOutcome, LmCommand, LmOptions, LmTier, PutOutcome,
    RemoteOptions, RemoteUrl, Tier, TierExt as _, TierHealth, TierKind, open_remote,
};
use server::MapServer;

const TRAITS: Traits = Traits {
    knows_keys: false,
    knows_lengths: false,
    knows_counts: false,
    counts_deletes: true,
    capacity_bytes: None,
    max_chunk_bytes: 4 << 20,
};

/// Waits as long as a busy machine needs.
fn patient() -> LmOptions {
    LmOptions {
        connect_timeout: Duration::from_secs(20),
        response_timeout: Duration::from_secs(20),
        ..LmOptions::default()
    }
}

fn open(url: &str, options: &LmOptions) -> LmTier {
    LmTier::open(&url.parse().unwrap(), options).unwrap()
}

#[test]
fn a_tier_on_a_server_conforms_bare_and_with_checksums() {
    let server = MapServer::start();
    let n_tiers = AtomicUsize::new(0);
    let make = || {
        let tier_idx = n_tiers.fetch_add(1, Ordering::Relaxed);
        open(&server.url(), &LmOptions { key_prefix: format!("t{tier_idx}"), ..patient() })
    };
    conformance::run(&|| Box::new(make()), &TRAITS);
    conformance::run(&|| Box::new(Checksummed::new(make())), &TRAITS);
}

#[test]
fn whatever_a_server_does_a_hit_is_what_was_stored() {
    let server = MapServer::start();
    let rates = FaultRates {
        fail: 50,
        fail_late: 50,
        lose: 30,
        tear: 30,
        shorten: 30,
        flip: 30,
        mix: 30,
        ..FaultRates::default()
    };
    let make = |seed: u64| -> Box<dyn Tier> {
        let options = LmOptions { key_prefix: format!("faulty{seed}"), ..patient() };
        Box::new(Checksummed::new(Faulty::new(open(&server.url(), &options), rates.clone(), seed)))
    };
    let n_hits = conformance::run_under_faults(&make, 0..8);
    assert!(n_hits > 100, "{n_hits} hits");
}

#[test]
fn a_large_batch_goes_over_several_connections() {
    let server = MapServer::start();
    let tier = open(&server.url(), &patient());
    let n_bytes = 2 << 20;
    let chunks: Vec<Vec<u8>> = (0..16).map(|idx| content(content_key(idx), n_bytes)).collect();
    for (chunk, idx) in chunks.iter().zip(0..) {
        assert!(matches!(tier.put_one(content_key(idx), chunk), PutOutcome::Stored));
    }
    let mut buffers = vec![vec![0; n_bytes]; 16];
    let mut batch: Vec<GetItem<'_>> =
        buffers.iter_mut().zip(0..).map(|(buffer, idx)| GetItem::whole(content_key(idx), buffer)).collect();
    conformance::get_each_once(&tier, &mut batch);
    assert!(batch.iter().all(|item| item.outcome.is_hit()));
    assert!(buffers == chunks);
    let connects = tier.stat().details.iter().find(|(name, _)| *name == "connects").map(|(_, count)| *count);
    assert!(connects > Some(1), "{connects:?} connections");
}

#[test]
fn a_deleted_chunk_is_gone_for_other_clients_when_they_read_it() {
    let server = MapServer::start();
    let (one, other) = (open(&server.url(), &patient()), open(&server.url(), &patient()));
    let (key, chunk) = (content_key(0), content(content_key(0), 5000));
    assert!(one.put_one(key, &chunk).is_present());
    assert_eq!(one.delete(&[key]).unwrap(), 1);
    assert_eq!(server.n_value_bytes(), 0, "its memory is given back");
    let mut present = [false];
    other.contains(&[key], &mut present).unwrap();
    assert!(present[0], "the server says so");
    assert!(matches!(other.get_one(key, &mut vec![0; 5000]), GetOutcome::Miss));
    other.contains(&[key], &mut present).unwrap();
    assert!(!present[0], "a read knows better");
    assert!(matches!(other.put_one(key, &chunk), PutOutcome::Stored));
    let mut buffer = vec![0; 5000];
    assert!(one.get_one(key, &mut buffer).is_hit() && buffer == chunk);
}

#[test]
fn its_keys_are_none_of_lmcaches_and_are_told_apart() {
    let server = MapServer::start();
    let tier = open(&server.url(), &patient());
    for key in [content_key(0), content_key(1)] {
        assert!(tier.put_one(key, b"chunk").is_present());
    }
    let keys = server.keys();
    assert_eq!(keys.len(), 2);
    for key in keys {
        let parts: Vec<&str> = key.split('@').collect();
        let [model, ranks, rank, hash, dtype] = parts[..] else { panic!("{key}") };
        assert_eq!((model, ranks, rank, hash.len(), dtype), ("kvik", "0", "0", 64, "uint8"));
    }
    assert!(server.commands().contains(&LmCommand::Exist));
}

#[test]
fn a_url_opens_it_and_an_unknown_scheme_names_it() {
    let server = MapServer::start();
    let url = server.url().parse::<RemoteUrl>().unwrap();
    assert_eq!((url.kind(), url.to_string()), (TierKind::Lm, server.url()));
    let tier = open_remote(&url, &RemoteOptions::default()).unwrap();
    assert_eq!((tier.kind(), tier.stat().health), (TierKind::Lm, TierHealth::Up));
    assert!(tier.put_one(content_key(0), b"chunk").is_present());
    let error = "infinistore://h:1".parse::<RemoteUrl>().unwrap_err().to_string();
    assert!(error.contains("infinistore") && error.contains("lm"), "{error}");
}

#[test]
fn options_that_cannot_work_are_refused_by_name() {
    for (options, field) in [
        (LmOptions { key_prefix: "a@b".to_owned(), ..patient() }, "key_prefix"),
        (LmOptions { key_prefix: String::new(), ..patient() }, "key_prefix"),
        (LmOptions { n_connections: 0, ..patient() }, "n_connections"),
        (LmOptions { min_bytes_per_s: 0, ..patient() }, "min_bytes_per_s"),
        (LmOptions { connect_timeout: Duration::ZERO, ..patient() }, "connect_timeout"),
    ] {
        let error = LmTier::open(&"lm://h:1".parse().unwrap(), &options).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")), "{error}");
    }
}
