//! The verbs that look: list, watch, kvtop.

use std::fs;

use serde_json::json;

use crate::support::{Folder, join, run, units};

#[test]
fn list_prints_the_table() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 4096);
    let _first = join(&ledger, "kvcached_vLLM_12345", 1280, 0);
    let _second = join(&ledger, "kvcached_SGLang_67890", 0, 8);
    let words = [units(4096), units(1024), 0].map(u64::to_le_bytes).concat();
    fs::write(folder.path().join("kvcached_plain"), words).unwrap();
    insta::assert_snapshot!(folder.kvctl(&["list"]).success(), @r"
    IPC                             Limit         Used      %
    kvcached_vLLM_12345           8.00 GB      2.50 GB  31.3%
    kvcached_SGLang_67890         8.00 GB       0.00 B   0.0%
    kvcached_plain                8.00 GB      2.00 GB  25.0%  of kvcached, read only
    ");
}

#[test]
fn list_of_names_prints_those_alone() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let _members = [join(&ledger, "a", 1, 0), join(&ledger, "b", 1, 0), join(&ledger, "c", 1, 0)];
    let stdout = folder.kvctl(&["list", "c", "a"]).success();
    let names: Vec<&str> = stdout.lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["a", "c"]);
    let message = folder.kvctl(&["list", "a", "x"]).failure(1);
    assert_eq!(message, "error: unknown IPC name x; there are: a, b, c");
}

#[test]
fn list_as_json_has_every_number_in_bytes() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let member = join(&ledger, "a", 3, 1);
    let mut object = folder.kvctl(&["list", "--json"]).json();
    let group = &mut object["devices"][0]["groups"][0];
    assert_eq!(group["members"][0]["pid"], u64::from(std::process::id()));
    assert_eq!(group["members"][0]["is_live"], true);
    assert_eq!(group["members"][0]["mapped_bytes"], units(4));
    group["members"] = json!([]);
    assert_eq!(
        object,
        json!({
            "dir": folder.path(),
            "devices": [{
                "device": "host0",
                "budget_bytes": units(64),
                "granted_bytes": units(4),
                "free_bytes": units(60),
                "groups": [{
                    "ipc": "a",
                    "limit_bytes": units(64),
                    "used_bytes": units(3),
                    "parked_bytes": units(1),
                    "held_bytes": units(4),
                    "wanted_bytes": 0,
                    "entitled_bytes": object["devices"][0]["groups"][0]["entitled_bytes"],
                    "over_limit_bytes": 0,
                    "is_kept": false,
                    "policy":
                        {"min_bytes": 0, "max_bytes": null, "weight": 1, "priority": 0,
                         "revision": object["devices"][0]["groups"][0]["policy"]["revision"]},
                    "members": [],
                }],
            }],
            "kvcached": [],
            "unreadable": [],
        })
    );
    drop(member);
}

#[test]
fn an_empty_folder_is_listed_and_a_missing_one_is_not() {
    let folder = Folder::new();
    let stdout = folder.kvctl(&["list"]).success();
    assert_eq!(stdout, format!("no engine and no policy in {}\n", folder.path().display()));
    assert_eq!(folder.kvctl(&["list", "--json"]).json()["devices"], json!([]));
    let missing = folder.path().join("missing");
    let message = run(env!("CARGO_BIN_EXE_kvctl"), &["list"], &missing, "").failure(1);
    assert!(message.contains("missing") && message.contains("No such file"), "{message}");
}

#[test]
fn devices_are_told_apart_and_chosen() {
    let folder = Folder::new();
    let (first, second) = (folder.ledger("host0", 64), folder.ledger("host1", 64));
    let _members = [join(&first, "a", 1, 0), join(&second, "a", 2, 0)];
    let stdout = folder.kvctl(&["list"]).success();
    assert!(stdout.contains("on host0") && stdout.contains("on host1"), "{stdout}");
    let object = folder.kvctl(&["--device", "host1", "list", "--json"]).json();
    assert_eq!(object["devices"].as_array().unwrap().len(), 1);
    assert_eq!(object["devices"][0]["groups"][0]["used_bytes"], units(2));
    let message = folder.kvctl(&["list", "--device", "host2"]).failure(1);
    let dir = folder.path().display();
    assert_eq!(message, format!("error: no ledger of device host2 in {dir}; there are: host0, host1"));
    let message = folder.kvctl(&["limit", "a", "2m"]).failure(1);
    assert_eq!(message, "error: a is on several devices: host0, host1; choose one with --device DEVICE");
}

#[test]
fn a_ledger_that_cannot_be_read_does_not_hide_the_others() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let _member = join(&ledger, "a", 1, 0);
    let foreign = folder.ledger("host1", 64);
    let _user = join(&foreign, "b", 1, 0);
    // Another version, in use.
    let path = folder.path().join("kvik_host1");
    let mut bytes = fs::read(&path).unwrap();
    bytes[8] = 99;
    fs::write(&path, bytes).unwrap();
    let answer = folder.kvctl(&["list"]);
    assert_eq!(answer.exit_code, Some(0), "{answer:?}");
    assert!(answer.stderr.starts_with("warning: ledger of host1: ") && answer.stderr.contains("version 99"));
    let answer = folder.kvctl(&["list", "--json"]).json();
    assert_eq!(answer["unreadable"][0]["device"], "host1");
    assert_eq!(answer["devices"][0]["groups"][0]["ipc"], "a");
    assert!(folder.kvctl(&["gc"]).stderr.contains("left the ledger of host1 alone"));
}

#[test]
fn watch_prints_the_list_as_often_as_asked() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let _member = join(&ledger, "a", 1, 0);
    let stdout = folder.kvctl(&["watch", "-n", "0.1", "--count", "2", "a"]).success();
    assert_eq!(stdout.lines().filter(|line| line.starts_with("IPC ")).count(), 2, "{stdout}");
    let stdout = folder.kvctl(&["watch", "-n", "0.1", "--count", "3", "--json"]).success();
    let objects: Vec<serde_json::Value> =
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(objects.len(), 3);
    assert!(folder.kvctl(&["watch", "--count", "1", "x"]).failure(1).contains("unknown IPC name x"));
    assert!(folder.kvctl(&["watch", "-n", "0"]).failure(2).contains("0.1 to 3600"));
}

#[test]
fn kvtop_measures_once_as_json_and_needs_a_terminal_otherwise() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let _member = join(&ledger, "a", 1, 0);
    let object = folder.kvctl(&["kvtop", "--json", "-r", "0.1"]).json();
    assert_eq!(object["devices"][0]["groups"][0]["members"][0]["map_bytes_per_s"], 0.0);
    let message = folder.kvctl(&["kvtop"]).failure(1);
    assert_eq!(message, "error: kvtop needs a terminal; `kvctl list` and --json do not");
    assert!(folder.kvctl(&["kvtop", "x"]).failure(1).contains("unknown IPC name x; there are: a"));
    let top = run(env!("CARGO_BIN_EXE_kvik"), &["top", "--json", "-r", "0.1"], folder.path(), "").json();
    assert_eq!(top["devices"][0]["groups"][0]["ipc"], "a");
}

#[test]
fn help_explains_units_defaults_and_exit_codes() {
    let folder = Folder::new();
    let help = folder.kvctl(&["--help"]).success();
    for text in ["powers of 1024", "/dev/shm", "Exit codes", "kvctl limit vllm_a 20G"] {
        assert!(help.contains(text), "{text}: {help}");
    }
    for verb in
        ["list", "watch", "limit", "limit-percent", "policy", "delete", "gc", "trim", "kvtop", "shell"]
    {
        let help = folder.kvctl(&[verb, "--help"]).success();
        assert!(help.contains("--json") && help.contains("--device"), "{help}");
    }
}
