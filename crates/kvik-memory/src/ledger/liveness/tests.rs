use super::{LockFile, LockKind, ProcessIdentity};

#[test]
fn two_descriptions_of_one_process_exclude_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    let first = LockFile::open(&path).unwrap();
    let second = LockFile::open(&path).unwrap();
    assert!(first.try_lock(3, 1, LockKind::Exclusive).unwrap());
    assert!(!second.try_lock(3, 1, LockKind::Exclusive).unwrap());
    assert!(!second.try_lock(0, 0, LockKind::Exclusive).unwrap(), "byte 3 is in the whole file");
    assert!(second.try_lock(4, 1, LockKind::Exclusive).unwrap());
    assert!(second.is_locked_by_other(3).unwrap());
    drop(first);
    assert!(!second.is_locked_by_other(3).unwrap());
}

#[test]
fn shared_locks_keep_the_exclusive_one_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lock");
    let readers = [LockFile::open(&path).unwrap(), LockFile::open(&path).unwrap()];
    let writer = LockFile::open(&path).unwrap();
    for reader in &readers {
        assert!(reader.try_lock(0, 1, LockKind::Shared).unwrap());
    }
    assert!(!writer.try_lock(0, 1, LockKind::Exclusive).unwrap());
    drop(readers);
    assert!(writer.try_lock(0, 1, LockKind::Exclusive).unwrap());
}

#[test]
fn a_process_is_gone_when_its_id_is_free_or_has_another_start() {
    let this = ProcessIdentity::current();
    assert!(this.started_ticks > 0 && this.namespace > 0);
    assert!(!this.is_gone());
    assert!(ProcessIdentity { started_ticks: this.started_ticks + 1, ..this }.is_gone());
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    child.wait().unwrap();
    assert!(ProcessIdentity { pid: pid.into(), ..this }.is_gone());
    let elsewhere = ProcessIdentity { pid: pid.into(), namespace: this.namespace + 1, ..this };
    assert!(!elsewhere.is_gone(), "a pid of another namespace says nothing");
}
