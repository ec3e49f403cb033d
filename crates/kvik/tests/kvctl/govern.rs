//! The verbs that change something: limit, limit-percent, policy, delete, gc, trim.

use std::fs;
use std::io::Write as _;
use std::time::Duration;

use kvik_memory::ledger::Policy;
use kvik_memory::pages::{Claim, Event, GrantEvents as _, Grants as _, Shortage};
use serde_json::json;

use crate::support::{Folder, join, units};

#[test]
fn a_limit_holds_at_once() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let member = join(&ledger, "a", 1, 0);
    let stdout = folder.kvctl(&["limit", "a", "8m"]).success();
    assert_eq!(stdout, "Updated kv cache limit for a on host0 to 8.00 MB (8388608 bytes)\n");
    assert_eq!(member.claim(units(4)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    assert_eq!(member.claim(units(3)).unwrap(), Claim::Granted);
    let object = folder.kvctl(&["limit", "a", "none", "--json"]).json();
    assert_eq!((&object["status"], &object["limit_bytes"]), (&json!("applied"), &json!(null)));
    assert_eq!(member.claim(units(4)).unwrap(), Claim::Granted);
}

#[test]
fn a_limit_is_rounded_down_and_says_so() {
    let folder = Folder::new();
    let _member = join(&folder.ledger("host0", 64), "a", 0, 0);
    let stdout = folder.kvctl(&["limit", "a", "5,000,000"]).success();
    assert!(stdout.contains("to 4.00 MB (4194304 bytes), rounded down to 2 MB"), "{stdout}");
}

#[test]
fn a_limit_below_what_is_held_is_applied_and_the_members_are_asked() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let members = [join(&ledger, "a", 8, 0), join(&ledger, "a", 8, 0)];
    let stdout = folder.kvctl(&["limit", "a", "20mb"]).success();
    let expected = "it counts for new memory: 32.00 MB is held, 12.00 MB above it, and its 2 engines were asked to give that back\n";
    assert!(stdout.ends_with(expected), "{stdout}");
    assert_eq!(members[0].wait(Duration::from_secs(10)), Event::LimitChanged);
    let object = folder.kvctl(&["limit", "a", "20mb", "--json"]).json();
    assert_eq!(object["status"], "deferred");
    assert_eq!(object["over_limit_bytes"], 12 << 20);
    assert_eq!(object["held_bytes"], 32 << 20);
}

#[test]
fn a_limit_below_the_minimum_is_refused() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    ledger.set_policy("a", &Policy { min_bytes: units(8), ..Policy::default() }).unwrap();
    let message = folder.kvctl(&["limit", "a", "4m", "--json"]).failure(1);
    assert!(message.contains("4.00 MB is below its minimum of 16.00 MB"), "{message}");
    assert_eq!(ledger.snapshot().unwrap().groups[0].policy.max_bytes, None);
}

#[test]
fn a_percentage_is_of_the_budget_of_the_device() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let _member = join(&ledger, "a", 0, 0);
    assert_eq!(folder.kvctl(&["limit-percent", "a", "25", "--json"]).json()["limit_bytes"], units(16));
    assert!(folder.kvctl(&["limit-percent", "a", "101"]).failure(2).contains("0 to 100"));
    folder.kvctl(&["policy", "b", "--weight", "2", "--device", "host1"]).success();
    assert!(folder.kvctl(&["limit-percent", "b", "25"]).failure(1).contains("no budget yet"));
}

#[test]
fn what_does_not_exist_is_named_with_what_does() {
    let folder = Folder::new();
    let dir = folder.path().display().to_string();
    let message = folder.kvctl(&["limit", "x", "1g"]).failure(1);
    assert_eq!(message, format!("error: unknown IPC name x; there is no ledger in {dir}"));
    let ledger = folder.ledger("host0", 64);
    for verb in [&["limit", "x", "1g"][..], &["delete", "x"], &["trim", "x"], &["policy", "x"]] {
        assert_eq!(folder.kvctl(verb).failure(1), "error: unknown IPC name x; there are none");
    }
    let _members = [join(&ledger, "b", 0, 0), join(&ledger, "a", 0, 0)];
    for verb in [&["limit", "x", "1g"][..], &["limit-percent", "x", "5"], &["delete", "x"], &["trim", "x"]] {
        assert_eq!(folder.kvctl(verb).failure(1), "error: unknown IPC name x; there are: a, b");
    }
}

#[test]
fn a_wrong_command_line_is_exit_code_2() {
    let folder = Folder::new();
    for arguments in
        [&["limit", "a", "much"][..], &["limit", "a"], &["nonsense"], &["policy", "a", "--weight", "0"], &[]]
    {
        let message = folder.kvctl(arguments).failure(2);
        assert!(message.starts_with("error: "), "{message}");
    }
}

#[test]
fn segments_of_kvcached_are_only_read() {
    let folder = Folder::new();
    let path = folder.path().join("plain");
    let words = [units(4), units(1), 0].map(u64::to_le_bytes).concat();
    fs::File::create(&path).unwrap().write_all(&words).unwrap();
    for verb in [&["limit", "plain", "2m"][..], &["delete", "plain"], &["trim", "plain"]] {
        let message = folder.kvctl(verb).failure(1);
        assert_eq!(message, "error: plain is a segment of kvcached itself, which kvctl only reads");
    }
    folder.kvctl(&["gc"]).success();
    assert_eq!(fs::read(&path).unwrap(), words);
    assert_eq!(folder.kvctl(&["list", "--json"]).json()["kvcached"][0]["limit_bytes"], units(4));
}

#[test]
fn a_policy_waits_for_its_engine() {
    let folder = Folder::new();
    let message = folder.kvctl(&["policy", "a", "--min", "4m"]).failure(1);
    assert!(message.contains("--device"), "{message}");
    let arguments = ["policy", "a", "--min", "4m", "--max", "16m", "--priority", "7", "--device", "host0"];
    let stdout = folder.kvctl(&arguments).success();
    insta::assert_snapshot!(stdout, @r"
    a on host0
      min       4.00 MB
      max       16.00 MB
      weight    1
      priority  7
    ");
    let ledger = folder.ledger("host0", 64);
    let member = join(&ledger, "a", 8, 0);
    assert_eq!(member.claim(units(1)).unwrap(), Claim::Denied(Shortage::GroupLimit));
    // What is not given stays.
    let object = folder.kvctl(&["policy", "a", "--weight", "3", "--json"]).json();
    assert_eq!(
        (&object["min_bytes"], &object["max_bytes"], &object["weight"], &object["priority"]),
        (&json!(4 << 20), &json!(16 << 20), &json!(3), &json!(7))
    );
    let object = folder.kvctl(&["policy", "a", "--json"]).json();
    assert_eq!((&object["is_changed"], &object["weight"]), (&json!(false), &json!(3)));
    // The one ledger needs no --device.
    folder.kvctl(&["policy", "b", "--max", "none"]).success();
    let message = folder.kvctl(&["policy", "a", "--min", "32m"]).failure(1);
    assert!(message.contains("min_bytes"), "{message}");
    let message = folder.kvctl(&["policy", "kvik_x", "--min", "2m"]).failure(1);
    assert!(message.contains("ipc_name"), "{message}");
}

#[test]
fn a_new_name_among_several_devices_needs_one() {
    let folder = Folder::new();
    let _ledgers = [folder.ledger("host0", 64), folder.ledger("host1", 64)];
    let message = folder.kvctl(&["policy", "a", "--min", "2m"]).failure(1);
    assert!(message.contains("host0, host1") && message.contains("--device"), "{message}");
}

#[test]
fn a_name_in_use_is_not_deleted() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let member = join(&ledger, "a", 1, 0);
    folder.kvctl(&["policy", "a", "--weight", "2"]).success();
    let message = folder.kvctl(&["delete", "a"]).failure(1);
    assert_eq!(message, "error: a is in use by an engine: stop it first");
    drop(member);
    assert_eq!(folder.kvctl(&["delete", "a", "--json"]).json()["is_deleted"], true);
    assert!(folder.kvctl(&["delete", "a"]).failure(1).contains("unknown IPC name a"));
}

#[test]
fn gc_removes_unused_files() {
    let folder = Folder::new();
    drop(folder.ledger("host0", 64));
    let object = folder.kvctl(&["gc", "--json"]).json();
    assert_eq!(object["n_reaped"], 0);
    assert!(!object["removed"].as_array().unwrap().is_empty(), "{object}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    assert_eq!(folder.kvctl(&["gc"]).success(), "Reaped 0 dead engines, removed 0 files\n");
}

#[test]
fn trim_asks_every_engine_of_the_name() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let members = [join(&ledger, "a", 1, 4), join(&ledger, "a", 1, 2)];
    let stdout = folder.kvctl(&["trim", "a"]).success();
    assert_eq!(stdout, "Asked 2 engines of a on host0 for their parked pages, 12.00 MB\n");
    let reclaim = Event::ReclaimRequested { n_bytes: units(4) };
    assert_eq!(members[0].wait(Duration::from_secs(10)), reclaim);
    assert_eq!(folder.kvctl(&["trim", "a", "--json"]).json()["n_asked"], 2);
    folder.kvctl(&["policy", "idle", "--weight", "1"]).success();
    assert_eq!(folder.kvctl(&["trim", "idle"]).success(), "idle on host0 has no engine: nothing to trim\n");
}
