//! Tiers on LMCache's own server, as a process. `KVIK_LMCACHE` names a virtual environment that has LMCache; `./check --engines`
//! makes one and runs this.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[path = "../../../tests/support/port.rs"]
mod port;

use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvik_tier::conformance::{self, Traits, content, content_key};
use kvik_tier::{Checksummed, GetOutcome, LmOptions, LmTier, PutOutcome, Tier, TierExt as _, TierHealth};

/// Imports of LMCache take a while.
const PATIENCE: Duration = Duration::from_mins(3);

/// LMCache's server, killed with the test.
struct LmcacheServer {
    process: Child,
    port: u16,
}

impl LmcacheServer {
    fn start() -> Self {
        let folder = std::env::var("KVIK_LMCACHE").expect("KVIK_LMCACHE names an environment with LMCache");
        let port = port::free_port();
        let mut server = Self { process: Self::spawn(&folder, port), port };
        server.wait();
        server
    }

    fn spawn(folder: &str, port: u16) -> Child {
        Command::new(format!("{folder}/bin/python"))
            .args(["-m", "lmcache.v1.server", "127.0.0.1", &port.to_string()])
            .envs([("LMCACHE_TRACK_USAGE", "false"), ("LMCACHE_LOG_LEVEL", "ERROR")])
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn wait(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_err() {
            assert!(self.process.try_wait().unwrap().is_none(), "LMCache's server has ended");
            assert!(Instant::now() < deadline, "LMCache's server does not start");
            thread::park_timeout(Duration::from_millis(50));
        }
    }

    fn tier(&self, key_prefix: &str) -> LmTier {
        let options = LmOptions {
            connect_timeout: Duration::from_secs(20),
            response_timeout: Duration::from_secs(20),
            key_prefix: key_prefix.to_owned(),
            ..LmOptions::default()
        };
        LmTier::open(&format!("lm://127.0.0.1:{}", self.port).parse().unwrap(), &options).unwrap()
    }
}

impl Drop for LmcacheServer {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[test]
fn lmcaches_own_server_is_a_tier() {
    let server = LmcacheServer::start();
    let n_tiers = AtomicUsize::new(0);
    let make = || server.tier(&format!("t{}", n_tiers.fetch_add(1, Ordering::Relaxed)));
    let traits = Traits { knows_keys: false, knows_counts: false, ..Traits::default() };
    conformance::run(&|| Box::new(make()), &traits);
    conformance::run(&|| Box::new(Checksummed::new(make())), &traits);
}

#[test]
fn a_chunk_of_which_lmcaches_server_got_a_half_is_corrupt_and_is_stored_again() {
    let server = LmcacheServer::start();
    let (tier, key) = (server.tier("kvik"), content_key(0));
    let chunk = content(key, 100_000);
    assert!(matches!(tier.put_one(key, &chunk), PutOutcome::Stored));
    // Another client, with the same key, that ends in the middle.
    let request = {
        let ascii = format!("kvik@0@0@{}{}@uint8", key.namespace, key.chunk);
        let form = kvik_tier::LmForm::of_bytes(100_000);
        let name = kvik_tier::LmKey::new(&ascii).unwrap();
        kvik_tier::LmRequest { command: kvik_tier::LmCommand::Put, n_bytes: 100_000, form, key: name }
            .encode()
    };
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).unwrap();
    std::io::Write::write_all(&mut stream, &[&request[..], &chunk[..5000]].concat()).unwrap();
    drop(stream);
    let deadline = Instant::now() + PATIENCE;
    let mut buffer = vec![0; 100_000];
    let outcome = loop {
        match tier.get_one(key, &mut buffer) {
            // Until the server has read the end of the connection.
            GetOutcome::Hit if Instant::now() < deadline => assert!(buffer == chunk),
            outcome => break outcome,
        }
    };
    assert!(matches!(outcome, GetOutcome::Corrupt("no bytes")), "{outcome:?}");
    let mut present = [true];
    tier.contains(&[key], &mut present).unwrap();
    assert!(!present[0]);
    assert!(matches!(tier.put_one(key, &chunk), PutOutcome::Stored));
    assert!(tier.get_one(key, &mut buffer).is_hit() && buffer == chunk);
}

#[test]
fn a_server_that_is_killed_is_down_and_nothing_is_wrong() {
    let mut server = LmcacheServer::start();
    let tier = server.tier("kvik");
    assert!(tier.put_one(content_key(0), &[7; 5000]).is_present());
    server.process.kill().unwrap();
    server.process.wait().unwrap();
    assert!(matches!(tier.get_one(content_key(0), &mut [0; 5000]), GetOutcome::Failed(_)));
    assert!(matches!(tier.stat().health, TierHealth::Down(_)));
    server.process = LmcacheServer::spawn(&std::env::var("KVIK_LMCACHE").unwrap(), server.port);
    server.wait();
    assert!(matches!(tier.get_one(content_key(0), &mut [0; 5000]), GetOutcome::Miss));
    assert!(matches!(tier.put_one(content_key(0), &[7; 5000]), PutOutcome::Stored));
}
