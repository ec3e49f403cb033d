//! The files of a ledger: which users may open them, what happens when they do not fit, and what happens
//! when they hold something else than expected.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvik_memory::MemoryError;
use kvik_memory::geometry::PageId;
use kvik_memory::ledger::layout::{LEDGER_BYTES, LEDGER_MAGIC, LEDGER_VERSION};
use kvik_memory::ledger::{JoinOptions, Ledger, PageStates, Policy, clean_up};
use kvik_memory::pages::{Claim, GrantEvents as _, Grants as _, PageState, Usage};
use proptest::prelude::*;

mod ledger_support;
use ledger_support::{files, join, open_ledger, options, take, units};

fn write_word(path: &Path, index: u64, word: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&word.to_le_bytes(), index * 8).unwrap();
}

fn make_private(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn all_files_are_for_their_owner_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    let _states = member.create_page_states(10, units(1)).unwrap();
    let names = files(dir.path());
    assert_eq!(names.len(), 5);
    for name in names {
        assert_eq!(mode(&dir.path().join(&name)), 0o600, "{name}");
    }
}

#[test]
fn a_ledger_that_others_can_write_is_refused() {
    for name in ["kvik_host0", "kvik_host0_lock"] {
        let dir = tempfile::tempdir().unwrap();
        drop(open_ledger(dir.path(), 10));
        std::fs::set_permissions(dir.path().join(name), std::fs::Permissions::from_mode(0o666)).unwrap();
        let error = Ledger::open(&options(dir.path(), 10)).unwrap_err();
        assert!(matches!(error, MemoryError::Segment { .. }), "{error:?}");
        assert!(error.to_string().contains("mode is 0666, allowed is 0600"), "{error}");
    }
}

#[test]
fn symbolic_links_are_not_followed() {
    for name in ["kvik_host0", "kvik_host0_lock", "chat", "chat_lock"] {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("precious");
        std::fs::write(&target, b"do not touch").unwrap();
        make_private(&target);
        symlink(&target, dir.path().join(name)).unwrap();
        let result = Ledger::open(&options(dir.path(), 10))
            .and_then(|ledger| ledger.join(&JoinOptions::new("chat", "engine")));
        assert!(matches!(result, Err(MemoryError::Segment { .. })), "{name}: {result:?}");
        assert_eq!(std::fs::read(&target).unwrap(), b"do not touch");
        assert!(dir.path().join(name).is_symlink(), "{name} is left alone");
    }
}

#[test]
fn what_is_not_a_plain_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("kvik_host0")).unwrap();
    assert!(matches!(Ledger::open(&options(dir.path(), 10)), Err(MemoryError::Segment { .. })));
}

#[test]
fn a_foreign_file_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvik_host0");
    std::fs::write(&path, b"a foreign file").unwrap();
    make_private(&path);
    let error = Ledger::open(&options(dir.path(), 10)).unwrap_err();
    assert!(matches!(error, MemoryError::ForeignSegment { .. }), "{error:?}");
    assert!(error.to_string().contains(&format!("expected magic {LEDGER_MAGIC:#018x}")), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"a foreign file");
}

#[test]
fn a_segment_of_an_old_tool_under_our_name_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let path = dir.path().join("chat");
    std::fs::write(&path, [7; 24]).unwrap();
    make_private(&path);
    let error = ledger.join(&JoinOptions::new("chat", "engine")).unwrap_err();
    assert!(matches!(error, MemoryError::ForeignSegment { .. }), "{error:?}");
    assert_eq!(std::fs::read(&path).unwrap(), [7; 24]);
    assert!(ledger.snapshot().unwrap().groups.is_empty(), "the group went with the failed join");
    assert_eq!(files(dir.path()), ["chat", "kvik_host0", "kvik_host0_lock"]);
}

#[test]
fn another_version_is_refused_while_it_is_used_and_replaced_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvik_host0");
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    take(&member, 3);
    write_word(&path, 1, LEDGER_VERSION + 1);
    let error = Ledger::open(&options(dir.path(), 10)).unwrap_err();
    let expected = format!("version {}", LEDGER_VERSION + 1);
    assert!(matches!(error, MemoryError::ForeignSegment { .. }), "{error:?}");
    assert!(error.to_string().contains(&expected), "{error}");
    assert_eq!(member.held_bytes(), units(3), "its member goes on");
    drop(member);
    let error = Ledger::open_existing(dir.path(), "host0").unwrap_err();
    assert!(error.to_string().contains(&expected), "a reader replaces nothing: {error}");
    let ledger = open_ledger(dir.path(), 20);
    assert_eq!(ledger.budget_bytes(), units(20));
    take(&join(&ledger, "chat"), 20);
}

#[test]
fn a_file_that_shrank_is_replaced_when_it_is_unused_and_refused_otherwise() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kvik_host0");
    drop(open_ledger(dir.path(), 10));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    // A member of another version holds a slot: any lock on the lock file says so.
    let holder =
        std::fs::OpenOptions::new().write(true).read(true).open(dir.path().join("kvik_host0_lock")).unwrap();
    let lock = |kind: libc::c_int| {
        // SAFETY: flock is a plain struct of integers.
        let mut range: libc::flock = unsafe { std::mem::zeroed() };
        range.l_type = kind as libc::c_short;
        range.l_start = 5;
        range.l_len = 1;
        // SAFETY: the descriptor is open and the range is valid.
        let code =
            unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&holder), libc::F_OFD_SETLK, &range) };
        assert_eq!(code, 0);
    };
    lock(libc::F_WRLCK);
    let error = Ledger::open(&options(dir.path(), 10)).unwrap_err();
    assert!(error.to_string().contains("4096 bytes"), "{error}");
    lock(libc::F_UNLCK);
    take(&join(&open_ledger(dir.path(), 10), "chat"), 10);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), LEDGER_BYTES as u64);
}

#[test]
fn threads_that_create_one_ledger_at_a_time_share_one() {
    let dir = tempfile::tempdir().unwrap();
    let barrier = std::sync::Barrier::new(8);
    let members: Vec<_> = std::thread::scope(|scope| {
        let open = || {
            barrier.wait();
            let member = join(&open_ledger(dir.path(), 8), "chat");
            take(&member, 1);
            member
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(members[0].ledger().snapshot().unwrap().held_bytes, units(8));
    assert_ne!(members[0].claim(units(1)).unwrap(), Claim::Granted);
}

/// A filesystem of one size, or a limit on the size of files where mounting is not permitted.
enum SmallDisk {
    Mounted(PathBuf),
    Limited,
}

impl SmallDisk {
    fn new(dir: &Path, n_bytes: u64) -> Self {
        let options = std::ffi::CString::new(format!("size={n_bytes}")).unwrap();
        let target = std::ffi::CString::new(dir.to_str().unwrap()).unwrap();
        // SAFETY: all pointers are to strings that end in zero.
        let code = unsafe {
            libc::mount(c"tmpfs".as_ptr(), target.as_ptr(), c"tmpfs".as_ptr(), 0, options.as_ptr().cast())
        };
        if code == 0 {
            return Self::Mounted(dir.to_owned());
        }
        Self::Limited
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Self::Mounted(dir) = self {
            let target = std::ffi::CString::new(dir.to_str().unwrap()).unwrap();
            // SAFETY: the pointer is to a string that ends in zero.
            unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

/// Runs `test` in a forked child whose files may not grow past `n_bytes`; says whether it succeeded.
fn with_file_limit(n_bytes: u64, test: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs the test and exits without returning into the harness.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let limit = libc::rlimit { rlim_cur: n_bytes, rlim_max: n_bytes };
        // SAFETY: plain calls with valid arguments; the signal must not end the child, the error should be seen.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
            libc::_exit(i32::from(!test()));
        }
    }
    let mut status = 0;
    // SAFETY: waits for the child that was just made.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    status == 0
}

#[test]
fn a_full_filesystem_is_an_error_at_the_start_that_names_the_size_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let is_refused = |dir: &Path| {
        let error = Ledger::open(&options(dir, 10)).unwrap_err().to_string();
        error.contains(&format!("{LEDGER_BYTES} bytes are needed")) && files(dir).is_empty()
    };
    match SmallDisk::new(dir.path(), 4096) {
        _disk @ SmallDisk::Mounted(_) => assert!(is_refused(dir.path())),
        SmallDisk::Limited => assert!(with_file_limit(4096, || is_refused(dir.path()))),
    }
}

#[test]
fn a_join_that_does_not_fit_leaves_nothing() {
    // The ledger fits, and then neither the lock of the group, nor its file, nor the states of its pages.
    let n_ledger_bytes = (LEDGER_BYTES as u64).next_multiple_of(4096);
    let is_refused = |dir: &Path| {
        let ledger = open_ledger(dir, 10);
        let refusal = match ledger.join(&JoinOptions::new("chat", "engine")) {
            Ok(member) => member.create_page_states(4_000_000, units(1)).map(|_| ()),
            Err(error) => Err(error),
        };
        let is_clean = files(dir) == ["kvik_host0", "kvik_host0_lock"];
        matches!(refusal, Err(error) if error.to_string().contains(" bytes ")) && is_clean
    };
    for n_more_bytes in [0, 4096, 8192] {
        let dir = tempfile::tempdir().unwrap();
        let n_bytes = n_ledger_bytes + n_more_bytes;
        match SmallDisk::new(dir.path(), n_bytes) {
            _disk @ SmallDisk::Mounted(_) => assert!(is_refused(dir.path()), "{n_bytes} bytes"),
            SmallDisk::Limited => assert!(with_file_limit(n_bytes, || is_refused(dir.path()))),
        }
    }
}

/// Does everything once; errors are fine, panics and hangs are not.
fn use_everything(dir: &Path) {
    let Ok(ledger) = Ledger::open(&options(dir, 10)) else { return };
    let _ = ledger.snapshot();
    let _ = ledger.reap();
    let _ = ledger.set_policy("tools", &Policy::default());
    let _ = ledger.set_limit("chat", Some(units(5)), Some(3));
    let _ = ledger.request_trim("chat");
    if let Ok(member) = ledger.join(&JoinOptions::new("chat", "engine")) {
        use_member(&member);
    }
    let _ = ledger.delete_group("tools");
    let _ = ledger.clean_up();
}

fn use_member(member: &kvik_memory::ledger::Member) {
    if matches!(member.claim(units(2)), Ok(Claim::Granted)) {
        member.publish(Usage { used_bytes: units(1), parked_bytes: units(1) });
        member.give_back(units(2));
    }
    let _ = member.claim_within(units(11), Duration::from_millis(1));
    let _ = member.wait(Duration::from_millis(1));
    let _ = member.claimable_bytes();
    if let Ok(states) = member.create_page_states(40, units(1)) {
        states.set(PageId(3), 2, PageState::Used);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn any_words_anywhere_make_neither_panics_nor_hangs(
        writes in proptest::collection::vec((0..5_usize, any::<prop::sample::Index>(), any_word()), 1..60),
        is_under_a_member in any::<bool>(),
        length in proptest::option::of(0..LEDGER_BYTES as u64),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let ledger = open_ledger(dir.path(), 10);
        let member = join(&ledger, "chat");
        let states = member.create_page_states(100, units(1)).unwrap();
        take(&member, 2);
        let names = ["kvik_host0", "kvik_host0_lock", "chat", "chat_lock", "chat_page_0"];
        let mut attacks: Vec<(PathBuf, u64, u64)> = Vec::new();
        for (file, place, word) in writes {
            let path = dir.path().join(names[file]);
            let n_words = (std::fs::metadata(&path).unwrap().len() / 8).max(1) as usize;
            attacks.push((path, place.index(n_words) as u64, word));
        }
        if is_under_a_member {
            for (path, index, word) in &attacks {
                write_word(path, *index, *word);
            }
            use_member(&member);
            let _ = states.counts();
            let _ = PageStates::open(dir.path(), "chat", 0).map(|states| states.map(|states| states.counts()));
            let _ = ledger.snapshot();
            drop(member);
        } else {
            drop(states);
            drop(member);
            drop(ledger);
            for (path, index, word) in &attacks {
                if path.try_exists().unwrap() {
                    write_word(path, *index, *word);
                }
            }
            if let Some(length) = length {
                let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("kvik_host0")).unwrap();
                file.set_len(length).unwrap();
            }
        }
        use_everything(dir.path());
        let _ = clean_up(dir.path());
    }

    #[test]
    fn any_bytes_instead_of_a_ledger_are_refused_or_replaced(bytes in proptest::collection::vec(any::<u8>(), 0..4096)) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["kvik_host0", "chat", "chat_page_0"] {
            std::fs::write(dir.path().join(name), &bytes).unwrap();
            make_private(&dir.path().join(name));
        }
        let _ = PageStates::open(dir.path(), "chat", 0).map(|states| states.map(|states| states.counts()));
        use_everything(dir.path());
        if bytes.len() >= 8 && bytes[..8] != LEDGER_MAGIC.to_le_bytes() {
            prop_assert_eq!(std::fs::read(dir.path().join("kvik_host0")).unwrap(), bytes);
        }
    }
}

/// Numbers that mean something, and any others.
fn any_word() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), Just(2), Just(u64::MAX), Just(u64::MAX >> 32), 0..200_u64, any::<u64>()]
}
