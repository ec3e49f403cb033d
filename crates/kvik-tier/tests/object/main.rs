//! Object tiers on a real S3 server and on folders.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod faults;
mod server;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvik_tier::conformance::{self, Traits, content, content_key};
use kvik_tier::{
    Checksummed, ChunkKey, FaultRates, Faulty, GetItem, GetOutcome, ObjectOptions, ObjectTier, PutItem,
    PutOutcome, Tier, TierExt as _, TierHealth, TierKind,
};
use server::{ACCESS_KEY, BUCKET, S3Server, SECRET_KEY};
use tempfile::TempDir;

const TRAITS: Traits = Traits {
    knows_keys: false,
    knows_lengths: false,
    knows_counts: false,
    counts_deletes: true,
    capacity_bytes: None,
    max_chunk_bytes: 4 << 20,
};

fn options(endpoint: &str) -> ObjectOptions {
    let settings = [
        ("endpoint", endpoint),
        ("allow_http", "true"),
        ("region", "here"),
        ("access_key_id", ACCESS_KEY),
        ("secret_access_key", SECRET_KEY),
    ];
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    ObjectOptions { settings, ..ObjectOptions::default() }
}

fn open(url: &str, options: &ObjectOptions) -> ObjectTier {
    ObjectTier::open(&url.parse().unwrap(), options).unwrap()
}

fn open_bucket(server: &S3Server) -> ObjectTier {
    open(&format!("s3://{BUCKET}/p"), &options(&server.endpoint()))
}

fn open_folder(folder: &Path) -> ObjectTier {
    open(&format!("file://{}", folder.display()), &ObjectOptions::default())
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

/// Where a chunk lies below the prefix.
fn place_of(key: ChunkKey) -> String {
    let chunk = key.chunk.to_string();
    format!("{}/{}/{chunk}-{:04x}", key.namespace, &chunk[..2], key.rank)
}

/// Runs the suite on tiers that `open` makes for the names of prefixes.
fn conform(open: &dyn Fn(&str) -> ObjectTier) {
    let n_tiers = AtomicUsize::new(0);
    let make = || open(&format!("t{}", n_tiers.fetch_add(1, Ordering::Relaxed)));
    conformance::run(&|| Box::new(make()), &TRAITS);
    conformance::run(&|| Box::new(Checksummed::new(make())), &TRAITS);
}

#[test]
fn a_bucket_conforms() {
    let server = S3Server::start();
    let mut options = options(&server.endpoint());
    // The server's hashes are not optimized in a test; that signatures cover bytes is tested with less.
    options.settings.insert("unsigned_payload".to_owned(), "true".to_owned());
    // It also answers with an error where an object is deleted while it is being stored.
    options.n_retries = 10;
    conform(&|prefix| open(&format!("s3://{BUCKET}/{prefix}"), &options));
}

#[test]
fn a_folder_conforms() {
    let folder = tempfile::tempdir().unwrap();
    conform(&|prefix| open_folder(&folder.path().join(prefix)));
}

#[test]
fn a_store_that_fails_in_every_way_gives_right_bytes_or_none() {
    let rates = FaultRates {
        fail: 50,
        fail_late: 50,
        lose: 30,
        tear: 30,
        shorten: 30,
        duplicate: 30,
        flip: 30,
        mix: 30,
        ..FaultRates::default()
    };
    let server = S3Server::start();
    let folder = tempfile::tempdir().unwrap();
    let open_bucket = |seed: u64| open(&format!("s3://{BUCKET}/{seed}"), &options(&server.endpoint()));
    let open_folder = |seed: u64| open_folder(&folder.path().join(seed.to_string()));
    let faulty = |tier: ObjectTier, seed: u64| -> Box<dyn Tier> {
        Box::new(Checksummed::new(Faulty::new(tier, rates.clone(), seed)))
    };
    let n_hits = conformance::run_under_faults(&|seed| faulty(open_bucket(seed), seed), 0..2);
    assert!(n_hits > 20, "{n_hits} hits");
    let n_hits = conformance::run_under_faults(&|seed| faulty(open_folder(seed), seed), 0..4);
    assert!(n_hits > 40, "{n_hits} hits");
}

#[test]
fn settings_come_from_the_environment_that_is_handed_in() {
    let server = S3Server::start();
    let endpoint = server.endpoint();
    let variables = [
        ("AWS_ENDPOINT_URL", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", ACCESS_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET_KEY),
        ("AWS_REGION", "here"),
        ("PATH", "/bin"),
    ];
    let environment = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let tier = open(&format!("s3://{BUCKET}"), &ObjectOptions { environment, ..ObjectOptions::default() });
    assert!(matches!(put(&tier, content_key(0), 1000), PutOutcome::Stored));
    assert!(server.bucket().join(place_of(content_key(0))).is_file());
}

#[test]
fn plain_http_must_be_allowed() {
    let server = S3Server::start();
    let mut options = options(&server.endpoint());
    options.settings.remove("allow_http");
    let tier = open(&format!("s3://{BUCKET}"), &options);
    assert!(matches!(put(&tier, content_key(0), 1000), PutOutcome::Failed(_)));
    assert!(!server.bucket().join(place_of(content_key(0))).is_file());
}

#[test]
fn a_chunk_is_an_object_below_the_prefix_and_is_not_replaced() {
    let server = S3Server::start();
    let tier = open_bucket(&server);
    assert_eq!(tier.kind(), TierKind::Object);
    assert!(matches!(put(&tier, content_key(3), 5000), PutOutcome::Stored));
    let path = server.bucket().join("p").join(place_of(content_key(3)));
    assert_eq!(std::fs::read(path).unwrap(), content(content_key(3), 5000));
    assert!(matches!(put(&tier, content_key(3), 5000), PutOutcome::Present));
}

#[test]
fn a_large_chunk_goes_in_parts() {
    let n_bytes = (64 << 20) + 12_345;
    let key = content_key(0);
    let chunk = content(key, n_bytes);
    let parts: Vec<&[u8]> = chunk.chunks(10_000_001).collect();
    let server = S3Server::start();
    let folder = tempfile::tempdir().unwrap();
    for tier in [open_bucket(&server), open_folder(folder.path())] {
        for expected in [PutOutcome::Stored, PutOutcome::Present] {
            let mut batch = [PutItem::new(key, &parts)];
            tier.put(&mut batch);
            let [item] = batch;
            assert_eq!(format!("{:?}", item.outcome), format!("{expected:?}"));
        }
        let mut buffer = vec![0; n_bytes];
        assert!(tier.get_one(key, &mut buffer).is_hit());
        assert!(buffer == chunk, "other bytes");
        let mut batch = [GetItem::range(key, 60 << 20, &mut buffer[..9 << 10])];
        tier.get(&mut batch);
        assert!(batch[0].outcome.is_hit());
        assert!(buffer[..9 << 10] == chunk[60 << 20..][..9 << 10], "other bytes");
    }
}

#[test]
fn a_folder_has_its_chunks_after_it_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open_folder(&folder.path().join("made/by/the/tier"));
    assert!(put(&tier, content_key(0), 1000).is_present());
    tier.flush().unwrap();
    drop(tier);
    let tier = open_folder(&folder.path().join("made/by/the/tier"));
    assert!(get(&tier, content_key(0), 1000).is_hit());
}

#[test]
fn a_tier_can_be_used_and_dropped_on_every_thread_of_another_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let tier = Arc::new(open_folder(folder.path()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    runtime.block_on(async {
        assert!(put(&*tier, content_key(0), 1000).is_present());
        let shared = Arc::clone(&tier);
        tokio::task::spawn_blocking(move || assert!(get(&*shared, content_key(0), 1000).is_hit()))
            .await
            .unwrap();
        tokio::spawn(async move {
            assert!(get(&*tier, content_key(0), 1000).is_hit());
            drop(tier);
        })
        .await
        .unwrap();
    });
}

#[test]
fn what_changed_in_a_store_is_corrupt() {
    let server = S3Server::start();
    let folder: TempDir = tempfile::tempdir().unwrap();
    for (tier, place) in [
        (open_bucket(&server), server.bucket().join("p")),
        (open_folder(folder.path()), folder.path().to_owned()),
    ] {
        let tier = Checksummed::new(tier);
        let (key, other) = (content_key(0), content_key(1));
        let path = place.join(place_of(key));
        assert!(put(&tier, other, 10_000).is_present());
        let lies: [&dyn Fn(Vec<u8>) -> Vec<u8>; 4] = [
            &|mut bytes| {
                bytes[9000] ^= 1;
                bytes
            },
            &|mut bytes| {
                bytes.truncate(9000);
                bytes
            },
            &|_| Vec::new(),
            &|_| std::fs::read(place.join(place_of(other))).unwrap(),
        ];
        for lie in lies {
            tier.delete(&[key]).unwrap();
            assert!(matches!(put(&tier, key, 10_000), PutOutcome::Stored));
            assert!(get(&tier, key, 10_000).is_hit());
            std::fs::write(&path, lie(std::fs::read(&path).unwrap())).unwrap();
            let outcome = get(&tier, key, 10_000);
            assert!(matches!(outcome, GetOutcome::Corrupt(_)), "{outcome:?}");
        }
        assert_eq!(tier.stat().health, TierHealth::Up);
    }
}
