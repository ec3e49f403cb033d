//! Object stores that are gone, hang or refuse.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvik_tier::conformance::content_key;
use kvik_tier::{Checksummed, GetOutcome, ObjectOptions, ObjectTier, PutOutcome, Tier as _, TierHealth};

use super::server::{BUCKET, S3Server};
use super::{get, open, open_folder, options, put};

/// What a call with [`impatient`] timeouts may take on a machine that is busy.
const BOUND: Duration = Duration::from_secs(5);

/// Timeouts that a test can wait for.
fn impatient(endpoint: &str) -> ObjectOptions {
    ObjectOptions {
        connect_timeout: Duration::from_millis(300),
        timeout: Duration::from_millis(600),
        ..options(endpoint)
    }
}

/// Insists that all operations fail, in time, and that the tier says so.
fn assert_down(tier: &ObjectTier) {
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
    assert!(tier.delete(&[content_key(0)]).is_err());
    assert!(begin.elapsed() < 2 * BOUND, "contains and delete took {:?}", begin.elapsed());
    assert!(matches!(tier.stat().health, TierHealth::Down(_)));
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < Duration::from_secs(30), "this never came: {what}");
        thread::park_timeout(Duration::from_millis(5));
    }
}

#[test]
fn a_stopped_store_is_down_and_a_started_one_is_up() {
    let mut server = S3Server::start();
    let tier = open(&format!("s3://{BUCKET}"), &impatient(&server.endpoint()));
    assert!(put(&tier, content_key(0), 1000).is_present());
    server.stop();
    assert_down(&tier);
    server.restart();
    wait_until("the store answers again", || get(&tier, content_key(0), 1000).is_hit());
    assert_eq!(tier.stat().health, TierHealth::Up);
}

#[test]
fn a_store_that_hangs_costs_a_bounded_time() {
    // Connections are taken by the operating system, and never answered.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    assert_down(&open(&format!("s3://{BUCKET}"), &impatient(&endpoint)));
}

#[test]
fn callers_get_right_bytes_or_none_while_the_store_stops_and_starts() {
    let mut server = S3Server::start();
    let tier = Checksummed::new(open(&format!("s3://{BUCKET}"), &impatient(&server.endpoint())));
    let is_over = AtomicBool::new(false);
    let n_hits = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for chunk_idx in 0..8 {
                        put(&tier, content_key(chunk_idx), 30_000);
                        if get(&tier, content_key(chunk_idx), 30_000).is_hit() {
                            n_hits.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        for _ in 0..3 {
            let n_before = n_hits.load(Ordering::Relaxed);
            wait_until("callers hit", || n_hits.load(Ordering::Relaxed) > n_before + 20);
            server.stop();
            server.restart();
        }
        let n_before = n_hits.load(Ordering::Relaxed);
        wait_until("callers hit again", || n_hits.load(Ordering::Relaxed) > n_before + 20);
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_wrong_secret_is_no_transient_failure() {
    let server = S3Server::start();
    let mut options = options(&server.endpoint());
    options.settings.insert("secret_access_key".to_owned(), "hunter2".to_owned());
    let tier = open(&format!("s3://{BUCKET}"), &options);
    let GetOutcome::Failed(error) = get(&tier, content_key(0), 100) else { panic!("no failure") };
    assert!(!error.is_transient(), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
    assert!(matches!(put(&tier, content_key(0), 100), PutOutcome::Failed(error) if !error.is_transient()));
}

#[test]
fn a_folder_that_cannot_be_written_fails_to_store() {
    let folder = tempfile::tempdir().unwrap();
    let tier = open_folder(folder.path());
    assert!(put(&tier, content_key(0), 1000).is_present());
    // A file stands where the folder of the namespace should be.
    let namespace = folder.path().join(content_key(0).namespace.to_string());
    std::fs::remove_dir_all(&namespace).unwrap();
    std::fs::write(&namespace, b"in the way").unwrap();
    assert!(matches!(put(&tier, content_key(0), 1000), PutOutcome::Failed(_)));
    assert!(matches!(tier.stat().health, TierHealth::Down(_)));
}
