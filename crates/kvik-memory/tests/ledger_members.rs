//! Engines that share a ledger: limits, shares, waiting, and what tools see of it.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvik_memory::geometry::PageId;
use kvik_memory::ledger::{Deletion, JoinOptions, LimitStatus, PageStates, Policy, clean_up, list_devices};
use kvik_memory::pages::{Claim, Event, GrantEvents as _, Grants as _, PageState, Shortage, Usage};
use kvik_memory::vmm::MemoryInfo;

mod ledger_support;
#[path = "ledger_support/waiting.rs"]
mod waiting;

use ledger_support::{files, join, open_ledger, take, units};
use waiting::eventually;

const LONG: Duration = Duration::from_secs(30);

fn limited(max_units: u64) -> Policy {
    Policy { max_bytes: Some(units(max_units)), ..Policy::default() }
}

fn prefix_word(path: &std::path::Path, index: u64) -> u64 {
    let mut bytes = [0; 8];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, index * 8).unwrap();
    u64::from_le_bytes(bytes)
}

#[test]
fn two_engines_with_one_name_are_under_one_limit() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 100);
    ledger.set_policy("chat", &limited(10)).unwrap();
    // The second engine opens the files as another process would.
    let other_ledger = open_ledger(dir.path(), 100);
    let (first, second) = (join(&ledger, "chat"), join(&other_ledger, "chat"));
    take(&first, 6);
    assert_eq!(second.claim(units(5)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    assert_eq!(second.claimable_bytes(), units(4));
    take(&second, 4);
    let snapshot = ledger.snapshot().unwrap();
    assert_eq!(snapshot.groups.len(), 1);
    assert_eq!((snapshot.groups[0].n_members, snapshot.groups[0].held_bytes), (2, units(10)));
}

#[test]
fn what_an_engine_gave_back_is_there_for_all_others_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let other_ledger = open_ledger(dir.path(), 10);
    let (first, second) = (join(&ledger, "chat"), join(&other_ledger, "code"));
    // The first return finds that no claim waits; what comes back after it stays with the engine as slack.
    for n_units in [3, 10, 7, 10] {
        take(&first, n_units);
        first.give_back(units(n_units));
        assert_eq!((first.held_bytes(), second.claimable_bytes()), (0, units(10)));
        assert_eq!(ledger.snapshot().unwrap().held_bytes, 0);
    }
    take(&second, 10);
    assert_eq!(first.claim(units(1)).unwrap(), Claim::Denied(Shortage::DeviceFull));
    second.give_back(units(10));
    take(&first, 10);
    assert_eq!(second.claim(units(1)).unwrap(), Claim::Denied(Shortage::DeviceFull));
}

#[test]
fn a_limit_that_is_lowered_holds_for_what_was_given_back_before_and_after() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 100);
    ledger.set_policy("chat", &limited(10)).unwrap();
    let first = join(&ledger, "chat");
    for n_units in [10, 10] {
        take(&first, n_units);
        first.give_back(units(n_units));
    }
    take(&first, 8);
    ledger.set_policy("chat", &limited(5)).unwrap();
    assert_eq!(first.claim(units(1)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    first.stop_waiting();
    for n_units in [1, 2] {
        first.give_back(units(n_units));
        assert_eq!(first.claim(units(1)).unwrap(), Claim::Denied(Shortage::GroupLimit));
        first.stop_waiting();
    }
    first.give_back(units(1));
    take(&first, 1);
    assert_eq!(first.claim(units(1)).unwrap(), Claim::Denied(Shortage::GroupLimit));
}

#[test]
fn the_exit_of_one_engine_leaves_the_files_of_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 100);
    let first = join(&ledger, "chat");
    let second = join(&ledger, "chat");
    let _pages = second.create_page_states(100, units(1)).unwrap();
    take(&second, 7);
    drop(first);
    assert_eq!(files(dir.path()), ["chat", "chat_lock", "chat_page_0", "kvik_host0", "kvik_host0_lock"]);
    assert_eq!(second.held_bytes(), units(7));
    drop(second);
    assert_eq!(files(dir.path()), ["kvik_host0", "kvik_host0_lock"]);
    assert_eq!(ledger.snapshot().unwrap().held_bytes, 0);
}

#[test]
fn a_limit_that_was_set_before_the_engine_started_holds_for_its_first_claim() {
    let dir = tempfile::tempdir().unwrap();
    open_ledger(dir.path(), 100).set_policy("chat", &limited(3)).unwrap();
    let ledger = open_ledger(dir.path(), 100);
    let mut options = JoinOptions::new("chat", "engine");
    options.policy = limited(90);
    let member = ledger.join(&options).unwrap();
    assert_eq!(member.claim(units(4)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    take(&member, 3);
    assert_eq!(prefix_word(&dir.path().join("chat"), 0), units(3), "old tools see the limit");
    drop(member);
    assert_eq!(ledger.snapshot().unwrap().groups[0].policy, limited(3), "the policy outlives the engine");
}

#[test]
fn the_budget_is_never_exceeded_by_threads_of_several_groups() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 20);
    ledger.set_policy("group0", &limited(12)).unwrap();
    // What is really there, as a device would count it: more after a grant, less before its return.
    let n_device_units = AtomicU64::new(0);
    let n_group0_units = AtomicU64::new(0);
    let n_granted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for index in 0..4 {
            let (ledger, n_device_units, n_group0_units, n_granted) =
                (ledger.clone(), &n_device_units, &n_group0_units, &n_granted);
            scope.spawn(move || {
                let member = join(&ledger, &format!("group{}", index % 2));
                let counted = [(n_device_units, 20), (n_group0_units, 12)];
                let counted = if index % 2 == 0 { &counted[..] } else { &counted[..1] };
                for round in 0..2000 {
                    let n_units = 1 + (round + index) % 9;
                    if member.claim(units(n_units)).unwrap() == Claim::Granted {
                        n_granted.fetch_add(1, Ordering::Relaxed);
                        for (count, limit) in counted {
                            assert!(count.fetch_add(n_units, Ordering::SeqCst) + n_units <= *limit);
                        }
                        std::thread::yield_now();
                        for (count, _) in counted {
                            count.fetch_sub(n_units, Ordering::SeqCst);
                        }
                        member.give_back(units(n_units));
                    }
                }
            });
        }
    });
    assert!(n_granted.load(Ordering::Relaxed) > 100);
    assert_eq!(ledger.snapshot().unwrap().held_bytes, 0);
}

#[test]
fn a_waiter_wakes_when_memory_returns() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let holder = join(&ledger, "first");
    take(&holder, 10);
    std::thread::scope(|scope| {
        let waiter = join(&ledger, "second");
        let waiting = scope.spawn(move || {
            let started = Instant::now();
            assert_eq!(waiter.claim_within(units(4), LONG).unwrap(), Claim::Granted);
            assert!(started.elapsed() < LONG);
            waiter
        });
        // The holder of it all is asked for what the other one waits for.
        let Event::ReclaimRequested { n_bytes } = holder.wait(LONG) else { panic!("not asked") };
        assert_eq!(n_bytes, units(4));
        holder.give_back(n_bytes);
        let waiter = waiting.join().unwrap();
        let snapshot = ledger.snapshot().unwrap();
        let member = snapshot.members.iter().find(|member| member.slot == waiter.slot()).unwrap();
        assert_eq!((member.n_waits, member.wanted_bytes), (1, 0));
        assert_eq!(snapshot.held_bytes, units(10));
    });
}

#[test]
fn a_waiter_wakes_when_its_limit_is_raised() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    ledger.set_policy("chat", &limited(1)).unwrap();
    std::thread::scope(|scope| {
        let waiter = join(&ledger, "chat");
        let waiting = scope.spawn(move || waiter.claim_within(units(4), LONG).unwrap());
        eventually("the member waits", || ledger.snapshot().unwrap().members[0].wanted_bytes == units(4));
        let change = ledger.set_limit("chat", Some(units(4)), None).unwrap();
        assert_eq!(change.status, LimitStatus::Applied);
        assert_eq!(waiting.join().unwrap(), Claim::Granted);
    });
}

#[test]
fn a_wait_that_ends_without_memory_gives_its_place_up() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let holder = join(&ledger, "first");
    let waiter = join(&ledger, "second");
    take(&holder, 8);
    assert_eq!(
        waiter.claim_within(units(5), Duration::from_millis(5)).unwrap(),
        Claim::Denied(Shortage::DeviceFull)
    );
    // No member waits any more, so the holder may take the rest although it is above its share.
    take(&holder, 2);
}

#[test]
fn a_holder_above_its_share_gets_nothing_new_while_another_waits() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let (holder, waiter) = (join(&ledger, "first"), join(&ledger, "second"));
    take(&holder, 8);
    assert_eq!(waiter.claim(units(4)).unwrap(), Claim::Denied(Shortage::DeviceFull));
    assert_eq!(holder.claim(units(1)).unwrap(), Claim::Denied(Shortage::OverShare));
    holder.give_back(units(2));
    assert_eq!(waiter.wait(LONG), Event::CapacityReturned);
    take(&waiter, 4);
    assert_eq!(waiter.wait(Duration::ZERO), Event::Timeout);
}

#[test]
fn a_claim_that_is_not_tried_again_loses_its_reservation() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let (holder, waiter) = (join(&ledger, "first"), join(&ledger, "second"));
    take(&holder, 8);
    assert_eq!(waiter.claim(units(4)).unwrap(), Claim::Denied(Shortage::DeviceFull));
    assert_eq!(holder.claim(units(2)).unwrap(), Claim::Denied(Shortage::OverShare));
    // As if the waiter were stopped: it does not try again.
    eventually("the rest goes to the holder", || holder.claim(units(2)).unwrap() == Claim::Granted);
    assert_eq!(waiter.wait(LONG), Event::CapacityReturned, "it is told all the same");
}

#[test]
fn an_idle_engine_is_told_of_a_lower_limit_at_once_and_asked_for_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    take(&member, 8);
    let change = ledger.set_limit("chat", Some(units(5)), Some(7)).unwrap();
    assert_eq!((change.status, change.over_limit_bytes), (LimitStatus::Deferred, units(3)));
    assert_eq!(member.wait(LONG), Event::LimitChanged);
    assert_eq!(member.wait(LONG), Event::ReclaimRequested { n_bytes: units(3) });
    assert_eq!(member.claim(units(1)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    assert_eq!(member.claimable_bytes(), units(5));
    member.give_back(units(3));
    assert_eq!(ledger.set_limit("chat", Some(units(5)), Some(7)).unwrap().status, LimitStatus::Applied);
}

#[test]
fn a_limit_of_zero_is_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    ledger.set_limit("chat", Some(0), None).unwrap();
    assert_eq!(member.claim(units(1)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    ledger.set_limit("chat", None, None).unwrap();
    take(&member, 10);
}

#[test]
fn limits_have_revisions_that_only_rise() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let status = |n_units, revision| ledger.set_limit("chat", Some(units(n_units)), revision).unwrap().status;
    assert_eq!(status(5, Some(1)), LimitStatus::Unavailable);
    ledger.set_policy("chat", &Policy { min_bytes: units(2), ..limited(9) }).unwrap();
    assert_eq!(status(5, Some(10)), LimitStatus::Applied);
    assert_eq!(status(5, Some(10)), LimitStatus::Applied, "the same again is the same");
    assert_eq!(status(6, Some(10)), LimitStatus::Conflict);
    assert_eq!(status(6, Some(9)), LimitStatus::Stale);
    assert_eq!(status(1, Some(11)), LimitStatus::Rejected);
    let group = ledger.snapshot().unwrap().groups.remove(0);
    assert_eq!((group.policy.max_bytes, group.revision), (Some(units(5)), 10));
}

#[test]
fn a_limit_that_an_old_tool_writes_into_the_file_is_adopted() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    take(&member, 6);
    member.publish(Usage { used_bytes: units(5), parked_bytes: units(1) });
    let path = dir.path().join("chat");
    assert_eq!([0, 1, 2].map(|index| prefix_word(&path, index)), [units(10), units(5), units(1)]);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&(units(4) + 5).to_le_bytes(), 0).unwrap();
    assert_eq!(member.wait(LONG), Event::LimitChanged);
    assert_eq!(member.wait(LONG), Event::ReclaimRequested { n_bytes: units(2) });
    assert_eq!(ledger.snapshot().unwrap().groups[0].policy.max_bytes, Some(units(4)));
    assert_eq!(member.claim(units(1)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    // A change by a new tool goes the other way.
    ledger.set_limit("chat", Some(units(8)), None).unwrap();
    assert_eq!(member.wait(LONG), Event::LimitChanged);
    eventually("the file follows", || {
        member.sync_limit();
        prefix_word(&path, 0) == units(8)
    });
    assert_eq!(ledger.snapshot().unwrap().groups[0].policy.max_bytes, Some(units(8)));
}

#[test]
fn a_trim_asks_for_the_parked_pages() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    take(&member, 6);
    member.publish(Usage { used_bytes: units(2), parked_bytes: units(4) });
    assert_eq!(ledger.request_trim("chat").unwrap(), 1);
    assert_eq!(ledger.request_trim("nobody").unwrap(), 0);
    assert_eq!(member.wait(LONG), Event::ReclaimRequested { n_bytes: units(4) });
}

#[test]
fn an_interrupt_ends_the_wait_that_runs_or_comes() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    member.interrupt();
    assert_eq!(member.wait(LONG), Event::Timeout);
    std::thread::scope(|scope| {
        let started = Instant::now();
        let waiting = scope.spawn(|| member.wait(LONG));
        member.interrupt();
        assert_eq!(waiting.join().unwrap(), Event::Timeout);
        assert!(started.elapsed() < LONG);
    });
}

#[test]
fn page_states_are_seen_by_tools_and_go_with_the_member() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    let states = member.create_page_states(100, units(3)).unwrap();
    states.set(PageId(0), 40, PageState::Parked);
    states.set(PageId(30), 5, PageState::Used);
    states.set(PageId(99), 20, PageState::Quarantined);
    let seen = PageStates::open(dir.path(), "chat", states.number()).unwrap().unwrap();
    assert_eq!((seen.n_pages(), seen.page_cost_bytes()), (100, units(3)));
    let counts = seen.counts();
    assert_eq!((counts.n_parked, counts.n_used, counts.n_quarantined, counts.n_unmapped), (35, 5, 1, 59));
    let state_of = |page| seen.get(PageId(page));
    assert_eq!(
        [29, 30, 34, 35].map(state_of),
        [Some(PageState::Parked), Some(PageState::Used), Some(PageState::Used), Some(PageState::Parked)]
    );
    assert_eq!(state_of(100), None);
    drop(member);
    assert!(PageStates::open(dir.path(), "chat", 0).unwrap().is_none());
}

#[test]
fn a_group_with_members_is_not_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 10);
    ledger.set_policy("chat", &limited(5)).unwrap();
    let member = join(&ledger, "chat");
    assert_eq!(ledger.delete_group("chat").unwrap(), Deletion::InUse { n_members: 1 });
    drop(member);
    assert_eq!(ledger.delete_group("chat").unwrap(), Deletion::Deleted);
    assert_eq!(ledger.delete_group("chat").unwrap(), Deletion::NotFound);
    assert!(ledger.snapshot().unwrap().groups.is_empty());
}

#[test]
fn a_cleanup_removes_what_is_ours_and_unused_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("other_lock"), b"").unwrap();
    std::fs::write(dir.path().join("other_page_0"), b"").unwrap();
    std::fs::write(dir.path().join("kvik_notes"), b"not a ledger").unwrap();
    let ledger = open_ledger(dir.path(), 10);
    let member = join(&ledger, "chat");
    assert_eq!(list_devices(dir.path()).unwrap(), ["host0"]);
    assert_eq!(clean_up(dir.path()).unwrap().removed, Vec::<std::path::PathBuf>::new());
    drop(member);
    drop(ledger);
    assert_eq!(clean_up(dir.path()).unwrap().removed.len(), 2, "the empty ledger and its lock");
    assert_eq!(files(dir.path()), ["kvik_notes", "other_lock", "other_page_0"]);
}

#[test]
fn a_ledger_that_was_removed_is_not_joined_through_an_old_handle() {
    let dir = tempfile::tempdir().unwrap();
    let old = open_ledger(dir.path(), 10);
    clean_up(dir.path()).unwrap();
    let new = open_ledger(dir.path(), 10);
    let error = old.join(&JoinOptions::new("chat", "engine")).unwrap_err();
    assert!(error.to_string().contains("open it again"), "{error}");
    take(&join(&new, "chat"), 10);
}

#[test]
fn the_budget_follows_the_memory_of_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 0);
    let memory = |free_units| MemoryInfo { total_bytes: units(100), free_bytes: units(free_units) };
    assert_eq!(ledger.reconcile(memory(80), 0.9).unwrap(), units(70), "others use 20");
    let member = join(&ledger, "chat");
    take(&member, 30);
    member.publish(Usage { used_bytes: units(30), parked_bytes: 0 });
    assert_eq!(ledger.reconcile(memory(50), 0.9).unwrap(), units(70), "our own use is not counted twice");
    assert_eq!(ledger.reconcile(memory(10), 0.9).unwrap(), units(30), "others grew");
    assert_eq!(member.claim(units(1)).unwrap(), Claim::Denied(Shortage::DeviceFull));
    assert!(ledger.reconcile(memory(10), 1.5).is_err());
}

#[test]
fn sixty_four_engines_fit_and_the_next_is_refused_until_one_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 64);
    let mut members: Vec<_> = (0..64).map(|_| join(&ledger, "chat")).collect();
    for member in &members {
        take(member, 1);
    }
    let error = ledger.join(&JoinOptions::new("more", "engine")).unwrap_err();
    assert!(error.to_string().contains("all 64 slots are taken"), "{error}");
    assert!(!dir.path().join("more").try_exists().unwrap(), "nothing is left behind");
    members.swap_remove(17);
    let member = join(&ledger, "more");
    assert_eq!(member.slot(), 17);
    take(&member, 1);
}

#[test]
fn names_that_could_be_other_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), 1);
    for name in ["", "../chat", "a/b", "kvik_host0", "chat_lock", "chat_page_3", "\u{e9}", &"x".repeat(65)] {
        let error = ledger.join(&JoinOptions::new(name, "engine")).unwrap_err();
        assert!(error.to_string().starts_with("`ipc_name` is"), "{name}: {error}");
    }
}
