//! Where ranks listen, and which users may connect.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use kvik_memory::SocketAddress;
use kvik_memory::pages::PageMapper;
use kvik_memory::ranks::{RankWorker, RankWorkerOptions};

use crate::children::{self, Role};
use crate::support::{
    FakeMapper, PATIENCE, assert_mapped, leader, page, peer, scratch_directory, try_leader, worker,
};

fn try_worker(address: SocketAddress) -> kvik_memory::Result<RankWorker> {
    let options = RankWorkerOptions { rank: 0, world: 1, group: 0, address };
    RankWorker::start(&options, Arc::new(FakeMapper::new()))
}

#[test]
fn a_directory_that_others_can_enter_is_refused() {
    let directory = scratch_directory();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let refused = try_worker(SocketAddress::Path(directory.path().join("r0"))).unwrap_err().to_string();
    assert!(refused.contains("mode 755") && refused.contains("rank 0"), "{refused}");
}

#[test]
fn a_directory_behind_a_link_is_refused() {
    let directory = scratch_directory();
    std::fs::create_dir(directory.path().join("real")).unwrap();
    std::os::unix::fs::symlink(directory.path().join("real"), directory.path().join("link")).unwrap();
    assert!(try_worker(SocketAddress::Path(directory.path().join("link/r0"))).is_err());
}

#[test]
fn a_missing_directory_is_made_for_this_user_alone() {
    let directory = scratch_directory();
    let made = directory.path().join("ranks");
    let worker = try_worker(SocketAddress::Path(made.join("r0"))).unwrap();
    assert_eq!(std::fs::metadata(&made).unwrap().permissions().mode() & 0o7777, 0o700);
    drop(worker);
    assert!(!made.join("r0").try_exists().unwrap(), "the socket goes with its worker");
}

#[test]
fn an_address_is_listened_at_once_and_again_after_a_kill() {
    let directory = scratch_directory();
    let path = directory.path().join("r1");
    let mut child = children::spawn(Role::Rank, &path);
    let local = Arc::new(FakeMapper::new());
    let mapper = leader(Some(&local), vec![peer(1, path.clone())]);
    let refused = try_worker(SocketAddress::Path(path.clone())).unwrap_err().to_string();
    assert!(refused.contains("in use"), "{refused}");
    assert_mapped(&mapper.map(&[page(1)]));
    child.kill();
    assert!(path.try_exists().unwrap(), "a killed worker leaves its file");
    drop(mapper);
    let _worker = worker(1, 2, path.clone(), &Arc::new(FakeMapper::new()));
    assert_mapped(&leader(Some(&Arc::new(FakeMapper::new())), vec![peer(1, path)]).map(&[page(1)]));
}

#[test]
fn a_name_that_is_too_long_is_refused() {
    let long = "x".repeat(200);
    assert!(try_worker(SocketAddress::Abstract(long.clone())).is_err());
    assert!(try_worker(SocketAddress::Path(scratch_directory().path().join(long))).is_err());
}

#[test]
fn a_rank_listens_at_an_abstract_name_and_only_for_its_own_user() {
    let name = format!("kvik-test-{}", std::process::id());
    let _worker = try_worker(SocketAddress::Abstract(name.clone())).unwrap();
    // Only root can become another user; elsewhere the own user's part is all that can be seen.
    if rustix::process::geteuid().is_root() {
        let mut stranger = children::spawn(Role::Stranger, Path::new(&name));
        assert!(stranger.has_succeeded(), "another user was served, or failed otherwise");
    }
    let mut expected = peer(0, name.clone().into());
    expected.address = SocketAddress::Abstract(name);
    assert_mapped(&try_leader(None, vec![expected], PATIENCE).unwrap().map(&[page(1)]));
}
