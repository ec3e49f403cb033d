//! The memory service with its server and clients in real processes, some of which are killed.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

#[path = "ledger_support/waiting.rs"]
mod waiting;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{Ledger, LedgerOptions, Policy};
use kvik_memory::pages::{Claim, Shortage};
use kvik_memory::service::frame::{Request, RequestBody};
use kvik_memory::service::{MemoryClient, MemoryServer, MemoryServerOptions, Notice, SessionOptions};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect, recv, send, socket,
};
use tempfile::TempDir;

use self::waiting::eventually;

const LONG: Duration = Duration::from_secs(30);

/// A folder that only this user can enter, with a socket and a ledger.
struct Scratch {
    dir: TempDir,
}

/// A child that serves, or claims what the lines of its standard input say, until it is killed.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Scratch {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        Self { dir }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("memory.sock")
    }

    fn serve(&self, n_units: u64) -> (MemoryServer, Ledger) {
        let ledger = open_ledger(self.dir.path(), n_units);
        let options =
            MemoryServerOptions { socket: self.socket(), default_ipc_name: Some("default".to_owned()) };
        (MemoryServer::start(&options, ledger.clone()).unwrap(), ledger)
    }

    fn connect(&self, ipc_name: &str) -> MemoryClient {
        MemoryClient::connect(&self.socket(), &session(ipc_name)).unwrap()
    }

    fn spawn(&self, role: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_client_that_is_killed_returns_its_grants_at_once", "--nocapture"])
            .env("KVIK_TEST_ROLE", role)
            .env("KVIK_TEST_DIR", self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut process = Process { child, input, output };
        process.wait_for("ready");
        process
    }
}

impl Process {
    /// Waits for a line that ends in `word`; the test harness may have written before it.
    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while !line.trim_end().ends_with(word) {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it ended before it said {word}");
        }
    }

    fn claim(&mut self, n_units: u64) {
        writeln!(self.input, "{n_units}").unwrap();
        self.wait_for("granted");
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const fn units(n_units: u64) -> u64 {
    n_units * UNIT_BYTES
}

/// The ledger in `dir`, with a budget of `n_units`.
fn open_ledger(dir: &Path, n_units: u64) -> Ledger {
    let budget_bytes = Some(units(n_units));
    Ledger::open(&LedgerOptions { dir: dir.to_owned(), budget_bytes, ..LedgerOptions::new("host0") }).unwrap()
}

fn session(ipc_name: &str) -> SessionOptions {
    SessionOptions { ipc_name: ipc_name.to_owned(), label: "test".to_owned(), policy: Policy::default() }
}

/// What a child does until it is killed or its parent is gone.
#[expect(clippy::print_stdout, reason = "the parent reads it")]
fn play(role: &str) {
    let dir = PathBuf::from(std::env::var_os("KVIK_TEST_DIR").unwrap());
    let socket = dir.join("memory.sock");
    match role {
        "server" => {
            let ledger = open_ledger(&dir, 8);
            let options = MemoryServerOptions { socket, default_ipc_name: None };
            let _server = MemoryServer::start(&options, ledger).unwrap();
            println!("ready");
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        "client" => {
            let mut client = MemoryClient::connect(&socket, &session("group")).unwrap();
            println!("ready");
            for line in std::io::stdin().lines() {
                let n_units: u64 = line.unwrap().parse().unwrap();
                assert_eq!(client.claim(units(n_units), LONG).unwrap(), Claim::Granted);
                println!("granted");
            }
        }
        other => panic!("no role {other}"),
    }
}

/// Children of other tests enter here too: the role is in their environment.
#[test]
fn a_client_that_is_killed_returns_its_grants_at_once() {
    if let Ok(role) = std::env::var("KVIK_TEST_ROLE") {
        return play(&role);
    }
    let scratch = Scratch::new();
    let (_server, ledger) = scratch.serve(8);
    let mut doomed = scratch.spawn("client");
    doomed.claim(6);
    let mut client = scratch.connect("group");
    assert_eq!(client.stats().unwrap().held_bytes, units(6));
    assert_eq!(client.claim(units(4), Duration::ZERO).unwrap(), Claim::Denied(Shortage::DeviceFull));
    doomed.kill();
    assert_eq!(
        client.claim(units(8), LONG).unwrap(),
        Claim::Granted,
        "all of it, when the server has seen it"
    );
    assert_eq!(client.standing().held_bytes, units(8));
    assert_eq!(ledger.snapshot().unwrap().members.len(), 1);
    drop(client);
    eventually("a session that ends gives everything back", || ledger.snapshot().unwrap().held_bytes == 0);
}

#[test]
fn two_processes_share_one_limit_and_the_one_above_its_share_is_asked() {
    let scratch = Scratch::new();
    let (_server, ledger) = scratch.serve(8);
    let mut greedy = scratch.connect("group");
    greedy.set_limit(Some(units(6))).unwrap();
    assert_eq!(greedy.claim(units(6), Duration::ZERO).unwrap(), Claim::Granted);
    assert_eq!(greedy.claim(units(1), Duration::ZERO).unwrap(), Claim::Denied(Shortage::GroupLimit));
    assert_eq!(greedy.standing().limit_bytes, units(6));
    let mut modest = scratch.spawn("client");
    writeln!(modest.input, "2").unwrap();
    let n_bytes = loop {
        match greedy.next_notice(LONG).unwrap().unwrap() {
            Notice::Reclaim { n_bytes } => break n_bytes,
            Notice::Limit { limit_bytes } => assert_eq!(limit_bytes, units(6)),
        }
    };
    assert_eq!(n_bytes, units(2));
    greedy.give_back(n_bytes).unwrap();
    modest.wait_for("granted");
    let stats = greedy.stats().unwrap();
    assert_eq!((stats.held_bytes, stats.group_held_bytes), (units(6), units(6)));
    assert_eq!(greedy.standing().held_bytes, units(4));
    assert_eq!(ledger.snapshot().unwrap().groups[0].over_limit_bytes, 0);
}

#[test]
fn a_limit_that_another_sets_is_told_with_what_is_to_go_back() {
    let scratch = Scratch::new();
    let (_server, ledger) = scratch.serve(8);
    let mut client = scratch.connect("");
    assert_eq!(client.claim(units(5), Duration::ZERO).unwrap(), Claim::Granted);
    ledger.set_limit("default", Some(units(2)), None).unwrap();
    assert_eq!(client.next_notice(LONG).unwrap(), Some(Notice::Limit { limit_bytes: units(2) }));
    assert_eq!(client.next_notice(LONG).unwrap(), Some(Notice::Reclaim { n_bytes: units(3) }));
    client.give_back(units(3)).unwrap();
    assert_eq!(client.standing().held_bytes, units(2));
    client.set_limit(None).unwrap();
    assert_eq!(client.claim(units(6), Duration::ZERO).unwrap(), Claim::Granted);
}

#[test]
fn what_is_wrong_is_refused_and_changes_nothing() {
    let scratch = Scratch::new();
    let (_server, _ledger) = scratch.serve(8);
    let mut client = scratch.connect("group");
    assert_eq!(client.claim(units(2), Duration::ZERO).unwrap(), Claim::Granted);
    for error in [
        client.claim(1, Duration::ZERO).unwrap_err(),
        client.give_back(units(3)).unwrap_err(),
        client.give_back(1).unwrap_err(),
    ] {
        assert!(error.to_string().contains("a multiple of 2 MiB"), "{error}");
    }
    assert_eq!(client.standing().held_bytes, units(2));
    let error = MemoryClient::connect(&scratch.socket(), &session("../escape")).unwrap_err();
    assert!(error.to_string().contains("ipc_name"), "{error}");
    let mut limited = session("small");
    limited.policy = Policy { min_bytes: units(2), max_bytes: Some(units(3)), ..Policy::default() };
    let mut limited = MemoryClient::connect(&scratch.socket(), &limited).unwrap();
    assert_eq!(limited.claim(units(4), Duration::ZERO).unwrap(), Claim::Denied(Shortage::GroupLimit));
    let error = limited.set_limit(Some(units(1))).unwrap_err();
    assert!(error.to_string().contains("the guaranteed minimum"), "{error}");
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let scratch = Scratch::new();
    let (_server, _ledger) = scratch.serve(8);
    let mut client = scratch.connect("group");
    assert_eq!(client.claim(units(2), Duration::ZERO).unwrap(), Claim::Granted);
    let open = Request {
        number: 1,
        body: RequestBody::Open {
            ipc_name: "group".to_owned(),
            label: "garbage".to_owned(),
            policy: Policy::default(),
        },
    };
    let mut truncated = Request { number: 2, body: RequestBody::GiveBack { n_bytes: units(2) } }.encode();
    truncated.pop();
    for garbage in [vec![0xff; 40_000], b"KVMQ".to_vec(), truncated, vec![0]] {
        for opens_first in [false, true] {
            let stranger = raw_connection(&scratch.socket());
            if opens_first {
                send(&stranger, &open.encode(), SendFlags::empty()).unwrap();
                assert_ne!(receive(&stranger), 0, "the answer to open");
            }
            send(&stranger, &garbage, SendFlags::empty()).unwrap();
            // A refusal may come before the end.
            while receive(&stranger) != 0 {}
        }
    }
    let stats = client.stats().unwrap();
    assert_eq!(stats.held_bytes, units(2));
}

#[test]
fn clients_of_a_server_that_is_killed_see_the_end_and_find_the_next_one() {
    let scratch = Scratch::new();
    let mut server = scratch.spawn("server");
    let mut client = scratch.connect("group");
    assert_eq!(client.claim(units(8), Duration::ZERO).unwrap(), Claim::Granted);
    server.kill();
    assert!(client.next_notice(LONG).unwrap_err().to_string().contains("the connection ended"));
    assert!(client.claim(units(1), Duration::ZERO).is_err());
    assert!(MemoryClient::connect(&scratch.socket(), &session("group")).is_err());

    let _next = scratch.spawn("server");
    let mut again = scratch.connect("group");
    assert_eq!(again.claim(units(8), LONG).unwrap(), Claim::Granted, "the dead server's grants are reaped");
}

#[test]
fn a_second_server_at_one_socket_is_refused() {
    let scratch = Scratch::new();
    let (_server, ledger) = scratch.serve(8);
    let options = MemoryServerOptions { socket: scratch.socket(), default_ipc_name: None };
    let error = MemoryServer::start(&options, ledger).unwrap_err();
    assert!(error.to_string().contains("listen at"), "{error}");
    scratch.connect("group");
}

fn raw_connection(path: &Path) -> std::os::fd::OwnedFd {
    let stranger = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&stranger, &SocketAddrUnix::new(path).unwrap()).unwrap();
    stranger
}

/// Bytes of the next packet; 0 at the end.
fn receive(stranger: &std::os::fd::OwnedFd) -> usize {
    match recv(stranger, &mut [0_u8; 4096][..], RecvFlags::empty()) {
        Ok((_, n_bytes)) => n_bytes,
        Err(_) => 0,
    }
}
