//! Devices that are full and directories that cannot be written.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use kvik_tier::conformance::{content, content_key};
use kvik_tier::{Checksummed, NvmeOptions, NvmeTier, PutOutcome, Tier, TierExt, TierHealth};

/// The role of a process whose directory is a file system of 7 MiB.
pub(crate) const SMALL_DEVICE: &str = "small-device";

/// The role of a process that may write no file of 1 MiB.
pub(crate) const SMALL_FILES: &str = "small-files";

/// The role of a process whose directory cannot be written.
pub(crate) const READ_ONLY: &str = "read-only";

/// Segments of 2 MiB.
const CAPACITY_BYTES: u64 = 16 << 20;
const CHUNK_BYTES: usize = 200_000;

/// What the shell says if it may not mount.
const NO_MOUNT: i32 = 77;

/// A file system that is smaller than the capacity.
pub(crate) fn fill_in_a_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let status = run_in_namespace(r#"mount -t tmpfs -o size=7m none "$1""#, SMALL_DEVICE, dir.path());
    assert!(status.is_none_or(|status| status.success()), "{status:?}");
}

/// A limit on the length of files that is below that of a segment.
pub(crate) fn forbid_long_files() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(r#"trap '' XFSZ; ulimit -f 512; exec "$0" {SMALL_FILES} "$1""#);
    let program = std::env::current_exe().unwrap();
    let status = Command::new("sh").arg("-c").arg(script).arg(program).arg(dir.path()).status().unwrap();
    assert!(status.success(), "{status}");
}

pub(crate) fn read_what_is_read_only() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(dir.path());
    (0..10).for_each(|chunk_idx| assert!(put(&tier, chunk_idx).is_present()));
    drop(tier);
    let mounts = r#"mount --bind "$1" "$1" && mount -o remount,ro,bind "$1""#;
    let status = run_in_namespace(mounts, READ_ONLY, dir.path());
    assert!(status.is_none_or(|status| status.success()), "{status:?}");
    // The same by permissions, which do not bind the superuser.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o555)).unwrap();
    if fs::write(dir.path().join("probe"), b"").is_err() {
        use_a_read_only_directory(dir.path());
    }
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let tier = open(dir.path());
    assert!((0..10).all(|chunk_idx| is_hit(&tier, chunk_idx)));
}

pub(crate) fn fill_a_small_device(dir: &Path) {
    let tier = open(dir);
    let mut n_stored = 0;
    loop {
        match put(&tier, n_stored) {
            PutOutcome::Stored => n_stored += 1,
            PutOutcome::NoRoom => break,
            outcome => panic!("chunk {n_stored}: {outcome:?}"),
        }
        assert!(n_stored < 40, "{n_stored} chunks of {CHUNK_BYTES} bytes on 7 MiB");
    }
    assert!(n_stored >= 5, "only {n_stored} chunks on 7 MiB");
    assert!(matches!(tier.stat().health, TierHealth::ReadOnly(reason) if reason.contains("No space")));
    assert!((0..n_stored).all(|chunk_idx| is_hit(&tier, chunk_idx)));
    // What its owner deletes makes room, again and again.
    for chunk_idx in n_stored..n_stored + 100 {
        let mut n_deleted = 0;
        while !put(&tier, chunk_idx).is_present() {
            n_deleted += 1;
            assert!(n_deleted <= n_stored, "no room on an empty device");
            let oldest = (0..chunk_idx).find(|old_idx| is_hit(&tier, *old_idx)).unwrap();
            tier.delete(&[content_key(oldest)]).unwrap();
        }
        assert!(is_hit(&tier, chunk_idx));
    }
    assert_eq!(tier.stat().health, TierHealth::Up, "the last put was good");
    tier.flush().unwrap();
}

pub(crate) fn use_a_device_without_room(dir: &Path) {
    let tier = open(dir);
    for chunk_idx in 0..3 {
        let outcome = put(&tier, chunk_idx);
        assert!(matches!(outcome, PutOutcome::NoRoom), "{outcome:?}");
    }
    assert!(matches!(tier.stat().health, TierHealth::ReadOnly(_)));
    assert!(!is_hit(&tier, 0));
    tier.flush().unwrap();
}

pub(crate) fn use_a_read_only_directory(dir: &Path) {
    let tier = open(dir);
    assert!(matches!(tier.stat().health, TierHealth::ReadOnly(_)));
    assert!((0..10).all(|chunk_idx| is_hit(&tier, chunk_idx)));
    assert!(matches!(put(&tier, 3), PutOutcome::Present));
    assert!(matches!(put(&tier, 100), PutOutcome::Failed(_)));
    assert_eq!(tier.delete(&[content_key(3)]).unwrap(), 1);
    assert!(!is_hit(&tier, 3));
    tier.flush().unwrap();
}

/// Runs a role of this program in namespaces of its own, in which a shell has done `preparation`; none where
/// those are not allowed.
fn run_in_namespace(preparation: &str, role: &str, dir: &Path) -> Option<ExitStatus> {
    const NAMESPACES: [&str; 3] = ["--user", "--map-root-user", "--mount"];
    let is_allowed = Command::new("unshare").args(NAMESPACES).arg("true").status();
    if !is_allowed.is_ok_and(|status| status.success()) {
        println!("no namespaces here: {role} is not tried");
        return None;
    }
    let script = format!(r#"{preparation} || exit {NO_MOUNT}; exec "$0" {role} "$1""#);
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new("unshare");
    command.args(NAMESPACES).args(["sh", "-c"]).arg(script).arg(program).arg(dir);
    let status = command.status().unwrap();
    assert_ne!(status.code(), Some(NO_MOUNT), "mounts are refused inside of a namespace");
    Some(status)
}

fn open(dir: &Path) -> Checksummed<NvmeTier> {
    Checksummed::new(NvmeTier::open(&NvmeOptions::new(dir, CAPACITY_BYTES)).unwrap())
}

fn put(tier: &dyn Tier, chunk_idx: u64) -> PutOutcome {
    tier.put_one(content_key(chunk_idx), &content(content_key(chunk_idx), CHUNK_BYTES))
}

fn is_hit(tier: &dyn Tier, chunk_idx: u64) -> bool {
    let key = content_key(chunk_idx);
    let mut buffer = vec![0; CHUNK_BYTES];
    let is_hit = tier.get_one(key, &mut buffer).is_hit();
    assert!(!is_hit || buffer == content(key, CHUNK_BYTES), "chunk {chunk_idx} hits with other bytes");
    is_hit
}
