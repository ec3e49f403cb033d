//! Three coordinators on one etcd.

#[path = "../../../../tests/support/etcd.rs"]
mod server;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cluster::{Role, start, start_gateway, start_worker};
use crate::http;
use crate::process::{Process, eventually, free_address};

/// Time in which a new leader answers.
const TAKEOVER: Duration = Duration::from_secs(5);

fn start_etcd(folder: &Path) -> (Process, String) {
    let (client, peer) = (format!("http://{}", free_address()), format!("http://{}", free_address()));
    (start_etcd_at(folder, &client, &peer), client)
}

fn start_etcd_at(folder: &Path, client: &str, peer: &str) -> Process {
    let process = Process::start(&mut server::etcd_command(folder, client, peer));
    let address = client.trim_start_matches("http://");
    eventually("etcd is healthy", || (http::get_json(address, "/health")?["health"] == "true").then_some(()));
    process
}

/// Makes etcd ask for a user: `root`, and `kvik`, which may read and write below `/kvik/` only.
fn enable_authentication(address: &str) {
    let base64 = |key: &str| -> Value {
        // Of keys of six bytes, which need no padding.
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let digit = |bits: u32| char::from(DIGITS[bits as usize & 63]);
        let triples = key.as_bytes().chunks(3).map(|bytes| {
            let bits = bytes.iter().fold(0, |bits, &byte| bits << 8 | u32::from(byte));
            [18, 12, 6, 0].map(|shift| digit(bits >> shift)).iter().collect::<String>()
        });
        triples.collect::<String>().into()
    };
    let permission = json!({"permType": "READWRITE", "key": base64("/kvik/"), "range_end": base64("/kvik0")});
    let calls = [
        ("user/add", json!({"name": "root", "password": "secret of root"})),
        ("user/grant", json!({"user": "root", "role": "root"})),
        ("user/add", json!({"name": "kvik", "password": "secret of kvik"})),
        ("role/add", json!({"name": "coordinators"})),
        ("role/grant", json!({"name": "coordinators", "perm": permission})),
        ("user/grant", json!({"user": "kvik", "role": "coordinators"})),
        ("enable", json!({})),
    ];
    for (call, body) in calls {
        let mut answer = http::send(address, "POST", &format!("/v3/auth/{call}"), Some(&body)).unwrap();
        let text = answer.text().unwrap();
        assert_eq!(answer.status, 200, "{call}: {text}");
    }
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

    // Heartbeats reach the new leader: no member expires, three of its intervals later.
    let deadline = Instant::now() + Duration::from_millis(3500);
    eventually("the membership has outlived its heartbeats", || {
        let (_, found) = members(survivors[0])?;
        assert_eq!(found, registered);
        gateway.served_by("sequence");
        (deadline < Instant::now()).then_some(())
    });
    assert_eq!(gateway.usable_backends(), 2);
}

#[test]
fn coordinators_authenticate_to_etcd_and_again_when_it_has_forgotten() {
    let folder = TempDir::new().unwrap();
    let (client, peer) = (format!("http://{}", free_address()), format!("http://{}", free_address()));
    let data = folder.path().join("etcd");
    let mut etcd = start_etcd_at(&data, &client, &peer);
    enable_authentication(client.trim_start_matches("http://"));

    let start_as = |name: &str, password: &str| {
        let file = folder.path().join(format!("password-{}", password.len()));
        std::fs::write(&file, format!("{password}\n")).unwrap();
        let settings = [
            "slow_start_ms=0".to_owned(),
            format!("state.etcd.username={name}"),
            format!("state.etcd.password_file={}", file.display()),
        ];
        start("coordinator", "127.0.0.1:0", &["--etcd", &client], &settings.each_ref().map(String::as_str))
    };
    let mut stranger = start_as("kvik", "wrong");
    stranger.process.logged("failed to reach the state backend");
    assert_eq!(members(&stranger.address), None);

    let coordinator = start_as("kvik", "secret of kvik");
    let worker = start_worker("127.0.0.1:0", "worker-1", &[&coordinator.address]);
    let gateway = start_gateway("127.0.0.1:0", &[&coordinator.address], &[]);
    gateway.wait_for_backends(1);
    assert_eq!(gateway.served_by("sequence"), "worker-1");
    assert_eq!(members(&stranger.address), None, "no coordinator leads or follows without a password");

    // A token does not outlive the member of etcd that gave it.
    etcd.kill();
    let etcd = start_etcd_at(&data, &client, &peer);
    let another = start_worker("127.0.0.1:0", "worker-2", &[&coordinator.address]);
    gateway.wait_for_backends(2);
    drop((worker, another, etcd));
}
