//! Three coordinators on one etcd.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{Role, start, start_gateway, start_worker};
use crate::http;
use crate::process::{Process, eventually, free_address};

/// Time in which a new leader answers.
const TAKEOVER: Duration = Duration::from_secs(5);

fn start_etcd(folder: &Path) -> (Process, String) {
    let (client, peer) = (format!("http://{}", free_address()), format!("http://{}", free_address()));
    let process = Process::start(
        Command::new("etcd")
            .arg("--data-dir")
            .arg(folder)
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}"), "--unsafe-no-fsync"])
            .stdin(Stdio::null())
            .stdout(Stdio::null()),
    );
    let address = client.trim_start_matches("http://");
    eventually("etcd is healthy", || (http::get_json(address, "/health")?["health"] == "true").then_some(()));
    (process, client)
}

/// Ids and epochs of the members, and the term of the leader that tells them.
fn members(address: &str) -> Option<(u64, Vec<(Value, Value)>)> {
    let snapshot = http::get_json(address, "/workers")?;
    let members = snapshot["members"].as_array().unwrap().iter();
    let members = members.map(|member| (member["worker"]["id"].clone(), member["worker"]["epoch"].clone()));
    Some((snapshot["term"].as_u64().unwrap(), members.collect()))
}

#[test]
fn another_coordinator_leads_within_five_seconds_and_no_worker_is_lost() {
    let folder = TempDir::new().unwrap();
    let (_etcd, etcd) = start_etcd(folder.path());
    let mut coordinators: Vec<Role> = (0..3)
        .map(|_| start("coordinator", "127.0.0.1:0", &["--etcd", &etcd], &["slow_start_ms=0"]))
        .collect();
    let addresses: Vec<String> = coordinators.iter().map(|role| role.address.clone()).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let workers = ["worker-1", "worker-2"].map(|id| start_worker("127.0.0.1:0", id, &addresses));
    let gateway = start_gateway("127.0.0.1:0", &addresses, &[]);
    gateway.wait_for_backends(workers.len() as u64);
    let (term, registered) = members(addresses[0]).unwrap();
    assert_eq!(registered.len(), workers.len());

    let leader = coordinators.iter_mut().position(|role| role.process.has_logged("became leader")).unwrap();
    let mut killed = coordinators.remove(leader);
    killed.process.kill();
    let start = Instant::now();

    let survivors: Vec<&str> = coordinators.iter().map(|role| role.address.as_str()).collect();
    eventually("a new leader answers", || {
        let answers: Vec<_> = survivors.iter().filter_map(|address| members(address)).collect();
        for (_, found) in &answers {
            assert_eq!(*found, registered, "a registration was lost");
        }
        // The clients of the service notice nothing.
        gateway.served_by("sequence");
        (answers.len() == survivors.len() && answers.iter().all(|(new, _)| term < *new)).then_some(())
    });
    let elapsed = start.elapsed();
    assert!(elapsed < TAKEOVER, "a new leader answered after {elapsed:?}");

    // Heartbeats reach the new leader: nobody expires, three of its intervals later.
    let deadline = Instant::now() + Duration::from_millis(3500);
    eventually("the membership has outlived its heartbeats", || {
        let (_, found) = members(survivors[0])?;
        assert_eq!(found, registered);
        gateway.served_by("sequence");
        (deadline < Instant::now()).then_some(())
    });
    assert_eq!(gateway.usable_backends(), 2);
}
