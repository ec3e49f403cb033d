//! This test's program run again as another process, to be killed, stopped or another user.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use kvik_memory::SocketAddress;
use kvik_memory::pages::{MapOutcome, PageMapper};
use kvik_memory::ranks::frame::{Body, Greeting, Request};
use rustix::net::SocketAddrUnix;
use rustix::process::{Pid, Signal, WaitOptions};

use crate::proxy::Packets;
use crate::support::{FakeMapper, PATIENCE, geometry, leader, page, peer, try_leader, worker};

/// The id of the user `nobody`, on every distribution.
const NOBODY: u32 = 65534;

/// What a child does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Role {
    /// Rank 1 of 2, listening at the path, until it is killed.
    Rank,
    /// A leader of ranks 0 and 1, at `<path>0` and `<path>1`, that maps page 1, unmaps it, and again.
    Leader,
    /// A process of another user, which tries to lead and then to speak at an abstract name.
    Stranger,
}

/// A child that dies with this value, and by the kernel's hand if this process dies first.
#[derive(Debug)]
pub(crate) struct ChildProcess(Child);

/// What this process is to play, if it is a child.
pub(crate) fn role_of_this_process() -> Option<Role> {
    match std::env::var("KVIK_TEST_ROLE").ok()?.as_str() {
        "Rank" => Some(Role::Rank),
        "Leader" => Some(Role::Leader),
        "Stranger" => Some(Role::Stranger),
        other => panic!("no role {other}"),
    }
}

pub(crate) fn play(role: Role) {
    let path = PathBuf::from(std::env::var_os("KVIK_TEST_PATH").unwrap());
    match role {
        Role::Rank => {
            let _worker = worker(1, 2, path, &Arc::new(FakeMapper::new()));
            // The parent's end of this pipe closes when the parent is gone.
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        Role::Leader => lead(&path),
        Role::Stranger => be_a_stranger(&path),
    }
}

pub(crate) fn spawn(role: Role, path: &Path) -> ChildProcess {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_rank_in_another_process_maps_and_unmaps", "--nocapture"])
        .env("KVIK_TEST_ROLE", format!("{role:?}"))
        .env("KVIK_TEST_PATH", path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    ChildProcess(child)
}

impl ChildProcess {
    /// Stops it and returns when none of its threads runs any more.
    pub(crate) fn stop(&self) {
        let pid = Pid::from_child(&self.0);
        rustix::process::kill_process(pid, Signal::STOP).unwrap();
        let (_, status) = rustix::process::waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
    }

    pub(crate) fn go_on(&self) {
        rustix::process::kill_process(Pid::from_child(&self.0), Signal::CONT).unwrap();
    }

    /// Kills it and returns when it is dead and its sockets are closed.
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    pub(crate) fn has_succeeded(&mut self) -> bool {
        self.0.wait().unwrap().success()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

fn lead(path: &Path) {
    let rank_path = |rank: u32| PathBuf::from(format!("{}{rank}", path.display()));
    let mapper = leader(None, vec![peer(0, rank_path(0)), peer(1, rank_path(1))]);
    // Until this process is killed, or its ranks are gone.
    while matches!(mapper.map(&[page(1), page(2)]), MapOutcome::Mapped) {
        mapper.unmap(&[page(1), page(2)]);
    }
}

fn be_a_stranger(name: &Path) {
    let name = name.to_str().unwrap();
    // SAFETY: the call takes a number and changes only the credentials of this process.
    assert_eq!(unsafe { libc::setuid(NOBODY) }, 0);
    let mut expected = peer(0, PathBuf::new());
    expected.address = SocketAddress::Abstract(name.to_owned());
    let refused = try_leader(None, vec![expected], PATIENCE).unwrap_err().to_string();
    assert!(refused.contains("the peer is user 0"), "{refused}");
    let socket =
        Packets::try_connect_to(&SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    let greeting = Greeting { generation: 1, resumed_instance: 0, rank: 0, world: 1, geometry: geometry() };
    let hello = Request { transaction: 0, group: 0, body: Body::Hello(greeting) };
    assert_eq!(socket.ask(&hello), None, "another user got an answer");
}
