//! Programs in C and C++ against the library: everything it does, alone and with several processes.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod support;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{Ledger, LedgerOptions};
use kvik_memory::service::{MemoryServer, MemoryServerOptions};
use support::{Linkage, Program, finish, package};
use tempfile::TempDir;

#[test]
fn every_function_answers_as_its_header_says() {
    Program::build(Path::new("api.c"), Linkage::Shared).run();
}

#[test]
fn every_function_answers_the_same_from_the_static_library() {
    Program::build(Path::new("api.c"), Linkage::Static).run();
}

#[test]
fn a_pool_is_used_by_many_threads_and_closed_under_them() {
    Program::build(Path::new("threads.c"), Linkage::Shared).run();
}

#[test]
fn a_forked_child_cannot_touch_the_parents_pool_and_opens_its_own() {
    Program::build(Path::new("fork.c"), Linkage::Shared).run();
}

#[test]
fn a_cache_manager_of_tensorrt_llm_takes_its_blocks_from_the_library() {
    for linkage in [Linkage::Shared, Linkage::Static] {
        Program::build(Path::new("cache_manager.cpp"), linkage).run();
    }
}

#[test]
fn a_gpu_allocator_maps_chunks_by_itself() {
    Program::build(Path::new("gpu_allocator.cpp"), Linkage::Shared).run();
}

#[test]
fn memory_of_any_size_is_taken_and_given_back() {
    for linkage in [Linkage::Shared, Linkage::Static] {
        Program::build(Path::new("allocations.c"), linkage).run();
    }
}

#[test]
fn the_environment_switches_to_the_devices_own_allocator() {
    let program = Program::build(Path::new("bypassed.c"), Linkage::Shared);
    finish(program.command().env("KVIK_MEMORY_BYPASS", "1"));
    let output = program.command().env("KVIK_MEMORY_BYPASS", "perhaps").output().unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && words.contains("`KVIK_MEMORY_BYPASS` is \"perhaps\""), "{words}");
}

#[test]
fn k_and_v_of_blocks_are_found_and_converted() {
    Program::build(Path::new("kv.c"), Linkage::Shared).run();
}

#[test]
fn a_leaders_blocks_have_memory_on_every_rank_or_on_none() {
    Program::build(Path::new("ranks.c"), Linkage::Shared).run();
}

/// A memory service for 8 units of a device of its own.
struct Service {
    folder: TempDir,
    _server: MemoryServer,
}

impl Service {
    fn start() -> Self {
        // As a socket needs it: of this user alone.
        let folder = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap();
        let ledger = Ledger::open(&LedgerOptions {
            dir: folder.path().to_owned(),
            budget_bytes: Some(8 * UNIT_BYTES),
            ..LedgerOptions::new("host0")
        });
        let options = MemoryServerOptions { socket: folder.path().join("socket"), default_ipc_name: None };
        let server = MemoryServer::start(&options, ledger.unwrap()).unwrap();
        Self { folder, _server: server }
    }

    fn socket(&self) -> String {
        self.folder.path().join("socket").to_str().unwrap().to_owned()
    }
}

#[test]
fn a_program_without_the_library_claims_of_memory_services() {
    let (first, second) = (Service::start(), Service::start());
    let program = Program::build(Path::new("memory_client.c"), Linkage::Without);
    program.run_with(&[&first.socket(), &second.socket()]);
}

#[test]
fn the_allocator_hook_for_tensorrt_llm_runs_on_the_host() {
    for linkage in [Linkage::Shared, Linkage::Static] {
        let printed = Program::build_example("allocator.cpp", linkage).run_with(&["-1"]);
        assert!(printed.contains("\"n_allocations_left\": 0"), "{printed}");
    }
}

#[test]
fn the_cache_manager_for_tensorrt_llm_runs_on_the_host() {
    let printed = Program::build_example("cache_manager.cpp", Linkage::Shared).run_with(&["-1"]);
    assert!(printed.contains("\"peak_used_bytes\": 18874368"), "{printed}");
}

#[test]
fn the_coordinator_for_tensorrt_llm_runs_on_the_host() {
    let service = Service::start();
    let program = Program::build_example("coordinator.c", Linkage::Without);
    let printed = program.run_with(&[&service.socket(), "-1"]);
    assert!(printed.contains(&format!("\"peak_bytes\": {}", 6 * UNIT_BYTES)), "{printed}");
}

#[test]
fn the_allocation_trace_is_replayed_on_all_allocators() {
    let program = Program::build_example("alloc_trace.c", Linkage::Shared);
    let arguments = ["--steps", "40", "--weights-mib", "8", "--rounds", "1"];
    let (first, second) = (program.run_with(&arguments), program.run_with(&arguments));
    for part in ["\"allocator\": \"plain\"", "\"allocator\": \"bypassed\"", "\"allocator\": \"hook\""] {
        assert!(first.contains(part), "{first}");
    }
    let trace_of = |printed: &str| printed.split("\"allocators\"").next().unwrap().to_owned();
    assert_eq!(trace_of(&first), trace_of(&second), "one seed is one trace");
    let output = program.command().args(["--steps", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_example_of_the_readme_runs() {
    let readme = fs::read_to_string(package().join("README.md")).unwrap();
    let (_, example) = readme.split_once("```c\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    let source = tempfile::Builder::new().suffix(".c").tempfile().unwrap();
    fs::write(source.path(), example).unwrap();
    Program::build(source.path(), Linkage::Shared).run();
}

/// An engine in a process of its own that runs the commands of its input.
struct Engine {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Engine {
    /// An engine with blocks of 1 MiB under a limit of 16 MiB.
    fn start(program: &Program, ipc_name: &str) -> Self {
        let mut process = program
            .command()
            .env("KVCACHED_IPC_NAME", ipc_name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, answers) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let mut engine = Self { process, orders, answers: BufReader::new(answers) };
        assert_eq!(engine.answer(), "ready");
        engine
    }

    fn take(&mut self, n_blocks: u32) -> u32 {
        writeln!(self.orders, "take {n_blocks}").unwrap();
        self.answer().parse().unwrap()
    }

    fn give_back_all(&mut self) {
        writeln!(self.orders, "give").unwrap();
        assert_eq!(self.answer(), "0");
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn take_eventually(&mut self, n_blocks: u32) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.take(n_blocks) != n_blocks {
            assert!(Instant::now() < deadline, "{n_blocks} blocks did not come free");
            std::thread::yield_now();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn two_processes_with_one_name_share_one_limit() {
    let program = Program::build(Path::new("engine.c"), Linkage::Shared);
    let (mut first, mut second) = (Engine::start(&program, "shared"), Engine::start(&program, "shared"));
    assert_eq!(first.take(10), 10);
    assert_eq!(second.take(10), 0);
    assert_eq!(second.take(6), 6);
    assert_eq!(first.take(1), 0);
    first.give_back_all();
    second.take_eventually(10);
    assert_eq!(first.take(1), 0);
}

#[test]
fn two_processes_with_two_names_have_a_limit_each() {
    let program = Program::build(Path::new("engine.c"), Linkage::Shared);
    let (mut first, mut second) = (Engine::start(&program, "one"), Engine::start(&program, "two"));
    assert_eq!(first.take(16), 16);
    assert_eq!(second.take(16), 16);
    assert_eq!(first.take(1), 0);
}

#[test]
fn the_memory_of_a_killed_process_goes_to_the_other() {
    let program = Program::build(Path::new("engine.c"), Linkage::Shared);
    let (mut first, mut second) = (Engine::start(&program, "killed"), Engine::start(&program, "killed"));
    assert_eq!(first.take(16), 16);
    assert_eq!(second.take(1), 0);
    first.process.kill().unwrap();
    second.take_eventually(16);
}
