//! The whole service in one process.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::cluster::{Client, Ending};
use crate::http;
use crate::process::{self, Process, eventually};

/// Time until the service is ready, on a busy machine and in the dev profile too.
const READY: Duration = Duration::from_secs(3);

#[test]
fn up_is_ready_at_once_serves_and_ends_with_an_interrupt() {
    let start = Instant::now();
    let mut process = Process::start(process::kvik().args(["up", "--port", "0"]).stdout(Stdio::piped()));
    let mut lines = BufReader::new(process.stdout()).lines().map(Result::unwrap);
    let address =
        lines.find_map(|line| Some(line.trim().strip_prefix("gateway")?.trim().to_owned())).unwrap();
    let gateway = Client { address: address.strip_prefix("http://").unwrap().to_owned() };
    eventually("the gateway is ready", || http::get_json(&gateway.address, "/ready"));
    let elapsed = start.elapsed();
    assert!(elapsed < READY, "ready after {elapsed:?}");

    let worker = gateway.served_by("sequence");
    assert_eq!(gateway.served_by("sequence"), worker);
    let mut stream = gateway.open_stream("stream", 100);
    process.signal("INT");
    assert!(Ending::of(&mut stream).is_complete());
    let rest: Vec<String> = lines.collect();
    assert_eq!(process.ended().code(), Some(0), "{rest:#?}");
    assert!(!Path::new(&disk_folder(&rest)).is_dir(), "the disk tier's folder is left: {rest:#?}");
}

#[test]
fn up_shows_what_stored_kv_saves() {
    let mut process = Process::start(process::kvik().args(["up", "--port", "0"]).stdout(Stdio::piped()));
    let lines = BufReader::new(process.stdout()).lines().map(Result::unwrap);
    let second = lines.into_iter().find(|line| line.trim_start().starts_with("second")).unwrap();
    assert!(second.contains("tokens from engine"), "{second}");
    process.signal("INT");
    assert_eq!(process.ended().code(), Some(0));
}

#[test]
fn the_folder_of_the_disk_tier_stays_where_it_is_kept() {
    let mut process =
        Process::start(process::kvik().args(["up", "--port", "0", "--keep"]).stdout(Stdio::piped()));
    let lines = BufReader::new(process.stdout()).lines().map(Result::unwrap);
    let mut seen = Vec::new();
    for line in lines {
        let is_last = line.trim_start().starts_with("second");
        seen.push(line);
        if is_last {
            process.signal("INT");
        }
    }
    assert_eq!(process.ended().code(), Some(0));
    let folder = disk_folder(&seen);
    assert!(Path::new(&folder).join("worker-1").is_dir(), "{folder} is gone");
    std::fs::remove_dir_all(folder).unwrap();
}

/// The folder that a greeting names.
fn disk_folder(lines: &[String]) -> String {
    let line = lines.iter().find(|line| line.trim_start().starts_with("store ")).unwrap();
    let (_, folder) = line.split_once(" of disk in ").unwrap();
    folder.split(" (").next().unwrap().to_owned()
}
