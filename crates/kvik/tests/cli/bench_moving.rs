//! `kvik bench moving` that is ended before its time.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::kvik;

/// Longest time that a step here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// Coordinator, gateway and two workers.
const N_PROCESSES: usize = 4;

/// A child, killed when dropped.
struct Bench(Child);

impl Drop for Bench {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Parent and state of a process, by its id; `None` if it has ended.
fn status_of(process: u32) -> Option<(u32, String)> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    Some((field("PPid:")?.parse().ok()?, field("State:")?.to_owned()))
}

fn children_of(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap();
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id| status_of(*id).is_some_and(|(of, _)| of == parent)).collect()
}

#[track_caller]
fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "still waiting after {PATIENCE:?}: {what}");
        thread::yield_now();
    }
}

#[test]
fn a_bench_that_is_ended_early_leaves_no_process_behind() {
    for signal in ["TERM", "INT"] {
        let mut command = kvik();
        command.args(["bench", "moving", "--quick"]).stdin(Stdio::null());
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut bench = Bench(child);
        let id = bench.0.id();
        let children = wait_for("all roles run", || {
            let children = children_of(id);
            (children.len() == N_PROCESSES).then_some(children)
        });

        let sent = Command::new("kill").arg(format!("-{signal}")).arg(id.to_string()).status().unwrap();
        assert!(sent.success());

        let status = wait_for("the bench ends", || bench.0.try_wait().unwrap());
        assert_eq!(status.code(), Some(1), "{signal}");
        let left: Vec<_> = children.iter().filter_map(|child| status_of(*child)).collect();
        assert!(left.is_empty(), "{signal}: {left:?}");
        let folder = std::env::temp_dir().join(format!("kvik-moving-{id}"));
        assert!(!folder.try_exists().unwrap(), "{signal}");
    }
}
