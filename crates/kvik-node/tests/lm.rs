//! A daemon that keeps values of LMCache's clients: the tier that speaks their protocol, and raw sockets.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvik_node::{DaemonConfig, RunningDaemon, StoreDaemon};
use kvik_runtime::shutdown::Shutdown;
use kvik_tier::conformance::{self, Traits};
use kvik_tier::{
    Checksummed, LM_REPLY_BYTES, LmCommand, LmForm, LmKey, LmOptions, LmReply, LmRequest, LmTier, Tier,
};
use tokio::runtime::Runtime;

const PATIENCE: Duration = Duration::from_mins(1);
const FORM: LmForm = LmForm { format: 1, dtype: 3, shape: [2, 4, 16, 32] };

/// A daemon in a runtime of its own.
struct Node {
    daemon: Option<RunningDaemon>,
    config: DaemonConfig,
    shutdown: Shutdown,
    runtime: Runtime,
}

impl Node {
    fn start(folder: &Path, ram: &str, change: impl FnOnce(&mut DaemonConfig)) -> Self {
        let mut config = DaemonConfig { socket: folder.join("run/store.sock"), ..DaemonConfig::default() };
        ram.clone_into(&mut config.tiers.ram);
        config.lm.listen = Some("127.0.0.1:0".to_owned());
        change(&mut config);
        let runtime = Runtime::new().unwrap();
        let shutdown = Shutdown::new();
        let daemon = runtime.block_on(StoreDaemon::start(config.clone(), &shutdown)).unwrap();
        Self { daemon: Some(daemon), config, shutdown, runtime }
    }

    fn address(&self) -> SocketAddr {
        self.daemon.as_ref().unwrap().lm_address().unwrap()
    }

    fn client(&self) -> Client {
        Client::connect(self.address())
    }

    fn tier(&self, key_prefix: &str) -> LmTier {
        let options = LmOptions {
            connect_timeout: Duration::from_secs(20),
            response_timeout: Duration::from_secs(20),
            key_prefix: key_prefix.to_owned(),
            ..LmOptions::default()
        };
        LmTier::open(&format!("lm://{}", self.address()).parse().unwrap(), &options).unwrap()
    }

    fn store(&self) -> kvik_store::Store {
        self.daemon.as_ref().unwrap().server().tenants()[0].store.clone()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            self.shutdown.drain();
            self.runtime.block_on(daemon.finish());
        }
    }
}

/// A client that says what a test tells it to.
struct Client(TcpStream);

impl Client {
    fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    fn put(&mut self, key: &str, form: LmForm, value: &[u8]) {
        let request = LmRequest { command: LmCommand::Put, n_bytes: value.len(), form, key: lm_key(key) };
        self.0.write_all(&request.encode()).unwrap();
        self.0.write_all(value).unwrap();
    }

    fn ask(&mut self, command: LmCommand, key: &str) -> LmReply {
        self.0.write_all(&LmRequest::new(command, lm_key(key)).encode()).unwrap();
        let mut frame = [0; LM_REPLY_BYTES];
        self.0.read_exact(&mut frame).unwrap();
        LmReply::decode(&frame).unwrap()
    }

    fn exists(&mut self, key: &str) -> bool {
        self.ask(LmCommand::Exist, key).is_found
    }

    fn get(&mut self, key: &str) -> Option<(LmForm, Vec<u8>)> {
        let reply = self.ask(LmCommand::Get, key);
        let mut value = vec![0; reply.n_bytes];
        self.0.read_exact(&mut value).unwrap();
        reply.is_found.then_some((reply.form, value))
    }

    /// Whether the server has ended the connection.
    fn is_ended(&mut self) -> bool {
        !matches!(self.0.read(&mut [0; 1]), Ok(1..))
    }
}

fn lm_key(key: &str) -> LmKey {
    LmKey::new(key).unwrap()
}

fn name(number: usize) -> String {
    format!("org/model@2@1@{number:x}@bfloat16")
}

/// Bytes that only one value has.
fn value(number: usize, n_bytes: usize) -> Vec<u8> {
    let mut state = number as u64 + 1;
    let byte = |_| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 56) as u8
    };
    (0..n_bytes).map(byte).collect()
}

#[test]
fn the_tier_for_such_servers_conforms_on_it() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "256MiB", |_| {});
    let n_tiers = AtomicUsize::new(0);
    let make = || node.tier(&format!("t{}", n_tiers.fetch_add(1, Ordering::Relaxed)));
    let traits = Traits { knows_keys: false, knows_counts: false, ..Traits::default() };
    conformance::run(&|| Box::new(make()), &traits);
    conformance::run(&|| Box::new(Checksummed::new(make())), &traits);
}

#[test]
fn values_come_back_with_what_they_are_to_their_owner() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "64MiB", |_| {});
    let mut client = node.client();
    assert!(client.ask(LmCommand::Health, "any@1@0@0@half").is_found);
    for (number, n_bytes) in [1, 100, 255, 256, 257, 4096, 100_000, 3 << 20].into_iter().enumerate() {
        assert!(!client.exists(&name(number)) && client.get(&name(number)).is_none());
        let form = LmForm { shape: [number as i32, -1, i32::MAX, i32::MIN], ..FORM };
        client.put(&name(number), form, &value(number, n_bytes));
        assert!(client.exists(&name(number)), "{n_bytes}");
        assert!(node.client().get(&name(number)) == Some((form, value(number, n_bytes))), "{n_bytes}");
    }
}

#[test]
fn the_last_value_of_a_key_stays_and_one_without_bytes_removes_it() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "64MiB", |_| {});
    let mut client = node.client();
    let (key, other) = (name(0), name(1));
    client.put(&other, FORM, &value(9, 1000));
    for round in 0..5 {
        let form = LmForm { format: round, ..FORM };
        for n_bytes in [1000, 1000, 5000] {
            let bytes = value(round as usize, n_bytes);
            client.put(&key, form, &bytes);
            client.put(&key, form, &bytes);
            assert!(client.get(&key) == Some((form, bytes)), "round {round}, {n_bytes} bytes");
        }
        client.put(&key, form, &[]);
        assert!(!client.exists(&key) && client.get(&key).is_none());
    }
    assert!(client.get(&other) == Some((FORM, value(9, 1000))), "another key is left alone");
}

#[test]
fn memory_is_bounded_and_what_was_used_last_stays() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "32MiB", |_| {});
    let mut client = node.client();
    let n_values = 100;
    for number in 0..n_values {
        client.put(&name(number), FORM, &value(number, 1 << 20));
        // In use all the time.
        assert!(client.get(&name(0)).is_some(), "after {number}");
    }
    let kept = (0..n_values).filter(|number| {
        let found = client.get(&name(*number));
        assert!(found.is_none() || found == Some((FORM, value(*number, 1 << 20))), "{number}");
        found.is_some()
    });
    let n_kept = kept.count();
    assert!((4..32).contains(&n_kept), "{n_kept} of {n_values}");
    let stat = node.store().arena().stat();
    assert!(stat.capacity_bytes <= 32 << 20);
    // More than there is memory for is not kept, and the connection goes on.
    client.put("large@1@0@1@half", FORM, &value(0, 40 << 20));
    assert!(!client.exists("large@1@0@1@half"));
    assert!(client.exists(&name(0)));
}

#[test]
fn a_disk_keeps_values_through_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let disk = format!("{}:256MiB", folder.path().join("disk").display());
    let start = || Node::start(folder.path(), "64MiB", |config| config.tiers.nvme = Some(disk.clone()));
    let node = start();
    let mut client = node.client();
    for number in 0..8 {
        client.put(&name(number), FORM, &value(number, 200_000));
    }
    client.put(&name(3), FORM, &value(33, 100_000));
    client.put(&name(4), FORM, &[]);
    assert!(client.exists(&name(7)) && node.store().flush(PATIENCE));
    drop(node);
    let node = start();
    let mut client = node.client();
    for number in 0..8 {
        let expected = match number {
            3 => Some((FORM, value(33, 100_000))),
            4 => None,
            _ => Some((FORM, value(number, 200_000))),
        };
        assert!(client.get(&name(number)) == expected, "{number}");
    }
}

#[test]
fn frames_that_are_none_end_their_own_connection_only() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "64MiB", |_| {});
    let mut good = node.client();
    good.put(&name(0), FORM, &value(0, 1000));
    let request = LmRequest { command: LmCommand::Put, n_bytes: 0, form: FORM, key: lm_key("k") }.encode();
    let changed = |place: usize, number: i32| {
        let mut frame = request.to_vec();
        frame[4 * place..][..4].copy_from_slice(&number.to_le_bytes());
        frame
    };
    let mut wrong_key = request.to_vec();
    wrong_key[36..].fill(0xff);
    let frames = [changed(0, 0), changed(0, 4), changed(0, -7), changed(1, -1), wrong_key, vec![b'G'; 500]];
    for frame in frames {
        let mut bad = node.client();
        bad.0.write_all(&frame).unwrap();
        assert!(bad.is_ended(), "{:?}", &frame[..8]);
    }
    assert!(good.get(&name(0)) == Some((FORM, value(0, 1000))));
}

#[test]
fn giant_lengths_and_half_values_take_no_memory_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "32MiB", |_| {});
    let mut good = node.client();
    good.put(&name(0), FORM, &value(0, 1000));
    // Many that promise 2 GiB and do not send it, and many that stop in the middle of a frame or a value.
    let giant =
        LmRequest { command: LmCommand::Put, n_bytes: i32::MAX as usize, form: FORM, key: lm_key("g") }
            .encode();
    let half = LmRequest { command: LmCommand::Put, n_bytes: 1 << 20, form: FORM, key: lm_key("h") }.encode();
    let mut open = Vec::new();
    for _ in 0..20 {
        for bytes in [&giant[..], &giant[..100], &[&half[..], &[7; 5000]].concat()] {
            let mut client = node.client();
            client.0.write_all(bytes).unwrap();
            open.push(client);
        }
    }
    let mut client = node.client();
    for number in 1..20 {
        client.put(&name(number), FORM, &value(number, 100_000));
        assert!(good.get(&name(0)).is_some() && !good.exists("g") && !good.exists("h"), "{number}");
    }
    drop(open);
    // What half values held is given back when their connections end.
    let deadline = Instant::now() + PATIENCE;
    loop {
        good.put("whole@1@0@1@half", FORM, &value(5, 16 << 20));
        if good.get("whole@1@0@1@half") == Some((FORM, value(5, 16 << 20))) {
            break;
        }
        assert!(Instant::now() < deadline, "memory is held by clients that are gone");
    }
}

#[test]
fn many_clients_at_a_time_get_whole_values() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "128MiB", |_| {});
    let address = node.address();
    thread::scope(|scope| {
        for client_idx in 0..32 {
            scope.spawn(move || {
                let mut client = Client::connect(address);
                for round in 0..20 {
                    let number = (client_idx + round) % 5;
                    // All clients put the same keys, each with bytes of its own.
                    client.put(&name(number), FORM, &value(client_idx, 20_000 + number));
                    let found = client.get(&name(number));
                    let is_of = |other: usize| {
                        found.as_ref().is_some_and(|(_, bytes)| *bytes == value(other, 20_000 + number))
                    };
                    assert!(found.is_none() || (0..32).any(is_of), "round {round} of {client_idx}");
                }
            });
        }
    });
    let mut client = node.client();
    for number in 0..5 {
        client.put(&name(number), FORM, &value(99, 20_000));
        assert!(client.get(&name(number)) == Some((FORM, value(99, 20_000))), "{number}");
    }
}

#[test]
fn the_end_of_a_daemon_ends_its_connections() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "64MiB", |_| {});
    let mut client = node.client();
    assert!(!client.exists(&name(0)));
    let begin = Instant::now();
    drop(node);
    assert!(begin.elapsed() < PATIENCE && client.is_ended());
}

#[test]
fn a_daemon_that_takes_over_has_the_values_of_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = Node::start(folder.path(), "64MiB", |_| {});
    let address = first.address();
    let mut client = first.client();
    for number in 0..10 {
        client.put(&name(number), FORM, &value(number, 100_000));
    }
    assert!(client.exists(&name(9)));
    let mut config = first.config.clone();
    config.lm.listen = Some(address.to_string());
    let runtime = Runtime::new().unwrap();
    let shutdown = Shutdown::new();
    let taking_over = StoreDaemon::take_over(config.clone(), &shutdown);
    let daemon = thread::scope(|scope| {
        // The old daemon ends when it is told that the other one serves, and gives its addresses back.
        let ending = scope.spawn(|| {
            let (draining, daemon) = (first.shutdown.clone(), first.daemon.take().unwrap());
            first.runtime.block_on(async {
                draining.draining().await;
                daemon.finish().await;
            });
        });
        let daemon = runtime.block_on(taking_over).unwrap();
        ending.join().unwrap();
        daemon
    });
    let second = Node { daemon: Some(daemon), config, shutdown, runtime };
    assert!(client.is_ended(), "the connection was to the old daemon");
    assert_eq!(second.address(), address);
    let mut client = second.client();
    for number in 0..10 {
        assert!(client.get(&name(number)) == Some((FORM, value(number, 100_000))), "{number}");
    }
}

#[test]
fn an_address_of_other_machines_needs_consent_and_a_tenant_must_be_there() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |change: fn(&mut DaemonConfig)| {
        let mut config = DaemonConfig { socket: folder.path().join("run/s.sock"), ..DaemonConfig::default() };
        "32MiB".clone_into(&mut config.tiers.ram);
        config.lm.listen = Some("127.0.0.1:0".to_owned());
        change(&mut config);
        let runtime = Runtime::new().unwrap();
        runtime.block_on(StoreDaemon::start(config, &Shutdown::new())).unwrap_err().to_string()
    };
    let error = refused(|config| config.lm.listen = Some("0.0.0.0:0".to_owned()));
    assert!(error.contains("`lm.listen`") && error.contains("lm.insecure"), "{error}");
    let error = refused(|config| config.lm.tenant = Some("nobody".to_owned()));
    assert!(error.contains("`lm.tenant`"), "{error}");
}

/// Values are apart from the chunks of engines and from those of other tenants.
#[test]
fn a_tier_and_lmcache_share_a_daemon_without_meeting() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::start(folder.path(), "64MiB", |_| {});
    let tier = node.tier("kvik");
    let key = conformance::content_key(0);
    let mut client = node.client();
    client.put(&name(0), FORM, &value(0, 1000));
    let mut present = [false];
    tier.contains(&[key], &mut present).unwrap();
    assert!(!present[0]);
    assert_eq!(tier.delete(&[key]).unwrap(), 0);
    assert!(client.get(&name(0)).is_some());
}
