//! Engines that die: killed at every step and at random instants, with and without forked children.
//!
//! The program starts itself as the engine that dies, so it has a `main` of its own.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kvik_memory::MemoryError;
use kvik_memory::ledger::{JoinOptions, Ledger, Member, clean_up, steps};
use kvik_memory::pages::{Claim, Grants as _, Usage};

mod ledger_support;
#[path = "ledger_support/waiting.rs"]
mod waiting;

use ledger_support::{files, join, open_ledger, options, take, units};
use waiting::eventually;

const BUDGET_UNITS: u64 = 40;
/// What the engine of this process holds all the time.
const OWN_UNITS: u64 = 5;
const N_RANDOM_KILLS: u64 = 400;
const MIN_KILLS: u64 = 1000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, dir, step] = arguments.as_slice()
        && role.starts_with("engine-")
    {
        return engine(role, Path::new(dir), step.parse().unwrap());
    }
    let tests: [(&str, fn()); 7] = [
        ("a_kill_at_every_step_and_at_random_instants_leaves_right_sums", kill_everywhere),
        ("a_kill_while_the_files_are_made_leaves_ones_that_work", kill_makers),
        ("a_killed_reaper_leaves_its_task_to_the_next", kill_reapers),
        ("a_waiter_wakes_when_the_holder_is_killed", wake_on_death),
        ("a_forked_child_does_not_keep_the_grants_of_its_parent", fork_keeps_nothing),
        ("a_child_that_no_handler_saw_does_not_keep_the_grants_of_its_parent", clone_keeps_nothing),
        ("a_stopped_engine_stops_no_other", stopped_engine),
    ];
    // As in the usual harness, what is not an option selects tests by name.
    let filters: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    for (name, test) in tests {
        if filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())) {
            let started = Instant::now();
            test();
            println!("test {name} ... ok ({:.1} s)", started.elapsed().as_secs_f64());
        }
    }
}

/// The life of an engine that is killed at step `step`, or by its parent if that is zero.
fn engine(role: &str, dir: &Path, step: u64) {
    match role {
        "engine-once" => {
            steps::kill_at(step);
            live_once(dir);
        }
        "engine-loop" => {
            say("ready");
            loop {
                live_once(dir);
            }
        }
        "engine-reaper" => {
            steps::kill_at(step);
            Ledger::open(&options(dir, BUDGET_UNITS)).unwrap().reap().unwrap();
        }
        "engine-holder" => {
            let member = join(&open_ledger(dir, BUDGET_UNITS), "dying");
            take(&member, step);
            say("ready");
            wait_for_end_of_input();
        }
        "engine-forker" | "engine-cloner" => {
            let member = join(&open_ledger(dir, BUDGET_UNITS), "dying");
            take(&member, step);
            fork_a_child(role, &member);
            wait_for_end_of_input();
        }
        _ => panic!("no such role: {role}"),
    }
}

/// Everything that an engine does, once.
fn live_once(dir: &Path) {
    let ledger = Ledger::open(&options(dir, BUDGET_UNITS)).unwrap();
    let member = ledger.join(&JoinOptions::new("dying", "engine")).unwrap();
    let states = member.create_page_states(64, units(1)).unwrap();
    let n_granted = [3, 4].into_iter().filter(|&n| member.claim(units(n)).unwrap() == Claim::Granted).count();
    member.publish(Usage { used_bytes: units(1), parked_bytes: units(2) });
    // More than there is: denied, queued, and others are asked.
    assert_ne!(member.claim(units(BUDGET_UNITS)).unwrap(), Claim::Granted);
    member.sync_limit();
    if n_granted > 0 {
        member.give_back(units(2));
    }
    member.stop_waiting();
    drop(states);
    drop(member);
}

fn say(word: &str) {
    println!("{word}");
    std::io::stdout().flush().unwrap();
}

fn wait_for_end_of_input() {
    let _ = std::io::stdin().read(&mut [0]);
}

fn fork_a_child(role: &str, member: &Member) {
    let pid = if role == "engine-forker" {
        // SAFETY: this process has one thread.
        i64::from(unsafe { libc::fork() })
    } else {
        // SAFETY: as fork, but without the handlers of the C library; the child only blocks.
        unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) }
    };
    assert!(pid >= 0);
    if pid == 0 {
        if role == "engine-forker" {
            assert!(matches!(member.claim(units(1)), Err(MemoryError::Forked)));
            member.give_back(units(1));
            assert!(matches!(member.ledger().snapshot(), Err(MemoryError::Forked)));
        }
        say("ready");
        wait_for_end_of_input();
        // SAFETY: ends this process without running what belongs to its parent.
        unsafe { libc::_exit(0) };
    }
}

fn spawn(role: &str, dir: &Path, step: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([role, dir.to_str().unwrap(), &step.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn wait_until_ready(child: &mut Child) {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    assert_killed(child.wait().unwrap());
}

fn assert_killed(status: ExitStatus) {
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
}

/// The engine of this process is the only one, and the sums are what it holds.
fn assert_sums_are_right(ledger: &Ledger, own: &Member, context: &str) {
    ledger.reap().unwrap();
    let snapshot = ledger.snapshot().unwrap();
    assert_eq!(snapshot.held_bytes, units(OWN_UNITS), "{context}: {snapshot:#?}");
    assert_eq!(snapshot.members.len(), 1, "{context}: {snapshot:#?}");
    assert_eq!(own.held_bytes(), units(OWN_UNITS));
    assert_eq!(own.claimable_bytes(), units(BUDGET_UNITS));
}

fn assert_all_can_be_claimed(own: &Member) {
    take(own, BUDGET_UNITS - OWN_UNITS);
    own.give_back(units(BUDGET_UNITS - OWN_UNITS));
}

fn kill_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), BUDGET_UNITS);
    let own = join(&ledger, "living");
    take(&own, OWN_UNITS);

    let mut n_kills = 0;
    let mut n_steps = 0;
    while n_kills < MIN_KILLS - N_RANDOM_KILLS {
        for step in 1.. {
            let status = spawn("engine-once", dir.path(), step).wait().unwrap();
            if status.success() {
                n_steps = step - 1;
                break;
            }
            assert_killed(status);
            n_kills += 1;
            assert_sums_are_right(&ledger, &own, &format!("killed at step {step}"));
        }
        assert!(n_steps >= 25, "only {n_steps} steps: the hook is not where the protocol is");
        assert_all_can_be_claimed(&own);
    }

    // Any numbers do, as long as a failure can be repeated.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..N_RANDOM_KILLS {
        let mut children: Vec<Child> = (0..=round % 2).map(|_| spawn("engine-loop", dir.path(), 0)).collect();
        children.iter_mut().for_each(wait_until_ready);
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let deadline = Instant::now() + Duration::from_micros(random % 5000);
        while Instant::now() < deadline {
            std::thread::yield_now();
        }
        children.iter_mut().for_each(kill);
        n_kills += children.len() as u64;
        assert_sums_are_right(&ledger, &own, &format!("random kill {round}"));
    }
    assert!(n_kills >= MIN_KILLS);
    assert_all_can_be_claimed(&own);
    println!("{n_kills} kills, {n_steps} steps");

    drop(own);
    take(&join(&ledger, "next"), BUDGET_UNITS);
    drop(ledger);
    clean_up(dir.path()).unwrap();
    let left = files(dir.path());
    assert!(left.is_empty(), "{left:?}");
}

fn kill_makers() {
    for step in 1.. {
        let dir = tempfile::tempdir().unwrap();
        let status = spawn("engine-once", dir.path(), step).wait().unwrap();
        let ledger = open_ledger(dir.path(), BUDGET_UNITS);
        let member = join(&ledger, "dying");
        take(&member, BUDGET_UNITS);
        assert_eq!(ledger.snapshot().unwrap().members.len(), 1, "killed at step {step}");
        drop((member, ledger));
        clean_up(dir.path()).unwrap();
        let left = files(dir.path());
        assert!(left.is_empty(), "killed at step {step}: {left:?}");
        if status.success() {
            break;
        }
        assert_killed(status);
    }
}

fn kill_reapers() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), BUDGET_UNITS);
    let own = join(&ledger, "living");
    take(&own, OWN_UNITS);
    for step in 1.. {
        let mut dead = spawn("engine-holder", dir.path(), 7);
        wait_until_ready(&mut dead);
        assert_eq!(ledger.snapshot().unwrap().held_bytes, units(OWN_UNITS + 7));
        kill(&mut dead);
        let status = spawn("engine-reaper", dir.path(), step).wait().unwrap();
        assert_sums_are_right(&ledger, &own, &format!("reaper killed at step {step}"));
        if status.success() {
            assert!(step > 4, "only {step} steps");
            break;
        }
        assert_killed(status);
    }
}

fn wake_on_death() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), BUDGET_UNITS);
    let own = join(&ledger, "living");
    let mut holder = spawn("engine-holder", dir.path(), BUDGET_UNITS);
    wait_until_ready(&mut holder);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| own.claim_within(units(OWN_UNITS), Duration::from_secs(30)).unwrap());
        eventually("the engine waits", || {
            ledger.snapshot().unwrap().members.iter().any(|member| member.wanted_bytes == units(OWN_UNITS))
        });
        kill(&mut holder);
        assert_eq!(waiting.join().unwrap(), Claim::Granted);
    });
}

fn fork_keeps_nothing() {
    // The child closed its copies, so the slot itself is free again.
    parent_dies_and_child_lives("engine-forker", 1);
}

fn clone_keeps_nothing() {
    // The child keeps the lock of the slot, but the grants go by what the parent's pid says.
    parent_dies_and_child_lives("engine-cloner", 2);
}

fn parent_dies_and_child_lives(role: &str, next_slot: usize) {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), BUDGET_UNITS);
    let own = join(&ledger, "living");
    take(&own, OWN_UNITS);
    let mut parent = spawn(role, dir.path(), 9);
    // The child says so after it looked at its handles; it lives until its input ends.
    wait_until_ready(&mut parent);
    assert_eq!(ledger.reap().unwrap(), 0);
    assert_eq!(ledger.snapshot().unwrap().held_bytes, units(OWN_UNITS + 9), "the child took nothing away");
    let input = parent.stdin.take();
    kill(&mut parent);
    assert_sums_are_right(&ledger, &own, role);
    assert_all_can_be_claimed(&own);
    assert_eq!(join(&ledger, "next").slot(), next_slot);
    drop(input);
}

fn stopped_engine() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open_ledger(dir.path(), BUDGET_UNITS);
    let own = join(&ledger, "living");
    take(&own, OWN_UNITS);
    for _ in 0..50 {
        let mut child = spawn("engine-loop", dir.path(), 0);
        wait_until_ready(&mut child);
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        let started = Instant::now();
        // It may be stopped with a claim for everything in flight, so the answer may be no; there is one.
        if own.claim(units(1)).unwrap() == Claim::Granted {
            own.give_back(units(1));
        }
        assert!(started.elapsed() < Duration::from_secs(1), "a stopped engine stopped another");
        kill(&mut child);
        own.stop_waiting();
        assert_sums_are_right(&ledger, &own, "killed while stopped");
    }
}
