//! Rules about the text of source files.

use crate::code::{
    Hit, find_paths, find_text, find_words, split_test_modules, without_comments_and_literals,
};
use crate::workspace::{SourceFile, all_files, assert_none, source_files};

/// A file longer than this has more than one subject.
const MAX_LINES: usize = 800;

/// Where unsafe code may be: what maps memory, what the processor's vector units or the kernel's
/// asynchronous I/O need, and what other languages call.
const UNSAFE_PLACES: &[&str] = &[
    "bindings",
    "crates/kvik-codec/src/simd",
    "crates/kvik-index/src/kernels",
    "crates/kvik-memory",
    "crates/kvik-model/src/forward/cuda",
    "crates/kvik-model/src/kernels",
    "crates/kvik-tier/src/arena",
    "crates/kvik-tier/src/nvme/io",
    "crates/kvik-tier/src/plugin",
];

/// Crates that are a function of their inputs.
const PURE_CRATES: &[&str] = &["crates/kvik-types/src", "crates/kvik-index/src"];

/// What would make them anything else. A `Duration` is a number; an `Instant` is a clock.
const IMPURE_PATHS: &[&str] = &[
    "tokio",
    "std::fs",
    "std::net",
    "std::process",
    "std::env",
    "std::time::Instant",
    "Instant",
    "SystemTime",
];

/// Tests' helpers that poll for a state of another task or process, within a bounded time.
const POLLING_PLACES: &[&str] = &["crates/kvik-gateway/tests/gateway/support.rs", "tests/support/poll.rs"];

/// Where the environment may be read: by the services' configuration, and by the C library, whose engine has
/// no other way to hand it settings that its functions do not take.
const ENVIRONMENT_PLACES: &[&str] =
    &["bindings/c/src/environment", "crates/kvik-runtime", "crates/kvik/src/main"];

const ENVIRONMENT_PATHS: &[&str] = &[
    "std::env::var",
    "std::env::var_os",
    "std::env::vars",
    "std::env::vars_os",
    "env::var",
    "env::var_os",
    "env::vars",
    "env::vars_os",
];

#[test]
fn no_source_file_is_too_long() {
    let mut places = Vec::new();
    for file in source_files(&["rs", "py"]) {
        let n_lines = file.text().lines().count();
        if n_lines > MAX_LINES {
            places.push(format!("{}: {n_lines} lines", file.path));
        }
    }
    assert_none(&places, &format!("files with more than {MAX_LINES} lines:"));
}

#[test]
fn sources_are_ascii() {
    let mut places = Vec::new();
    for file in all_files() {
        let is_script = file.bytes.starts_with(b"#!");
        if !is_script && !file.has_extension(&["rs", "py", "pyi", "toml", "sh"]) {
            continue;
        }
        for (line_idx, line) in file.bytes.split(|&byte| byte == b'\n').enumerate() {
            if !line.is_ascii() {
                places.push(format!(
                    "{}:{}: {}",
                    file.path,
                    line_idx + 1,
                    String::from_utf8_lossy(line).trim()
                ));
            }
        }
    }
    assert_none(&places, "lines with characters outside of ASCII (write them as escapes):");
}

#[test]
fn unsafe_code_is_only_where_it_belongs() {
    let mut places = Vec::new();
    for file in source_files(&["rs"]) {
        if !UNSAFE_PLACES.iter().any(|place| file.is_in(place)) {
            let code = without_comments_and_literals(&file.text());
            report(&file, find_words(&code, "unsafe"), &mut places);
        }
    }
    assert_none(&places, &format!("unsafe code outside of {}:", UNSAFE_PLACES.join(", ")));
}

#[test]
fn pure_crates_have_no_files_no_network_no_clock_and_no_runtime() {
    let mut places = Vec::new();
    for file in source_files(&["rs"]) {
        if PURE_CRATES.iter().any(|place| file.is_in(place)) && !file.is_test_only() {
            report(&file, find_paths(&shipped_code(&file), IMPURE_PATHS), &mut places);
        }
    }
    assert_none(&places, "kvik-types and kvik-index get time, bytes and randomness as arguments:");
}

#[test]
fn only_the_runtime_reads_the_environment() {
    let mut places = Vec::new();
    for file in source_files(&["rs"]) {
        let is_build_script = file.path.ends_with("/build.rs");
        if is_build_script || file.is_test_only() || ENVIRONMENT_PLACES.iter().any(|place| file.is_in(place))
        {
            continue;
        }
        report(&file, find_paths(&shipped_code(&file), ENVIRONMENT_PATHS), &mut places);
    }
    assert_none(&places, "the environment is configuration, and kvik-runtime reads configuration:");
}

#[test]
fn no_test_is_switched_off() {
    let mut places = Vec::new();
    for file in source_files(&["rs"]) {
        let code = without_comments_and_literals(&file.text());
        for mark in ["#[ignore", ", ignore)]", ", ignore ="] {
            report(&file, find_text(&code, mark), &mut places);
        }
    }
    assert_none(&places, "ignored tests (repair the test, or put a slow one into a target named slow_*):");
}

#[test]
fn no_test_sleeps() {
    let mut places = Vec::new();
    for file in source_files(&["rs"]) {
        let code = without_comments_and_literals(&file.text());
        let is_paused = code.contains("start_paused = true");
        let tests = if file.is_test_only() { code } else { split_test_modules(&code).1 };
        report(&file, find_text(&tests, "thread::sleep("), &mut places);
        if is_paused || POLLING_PLACES.contains(&file.path.as_str()) {
            continue;
        }
        for call in ["time::sleep(", "time::sleep_until(", " sleep(", " sleep_until("] {
            report(&file, find_text(&tests, call), &mut places);
        }
    }
    assert_none(
        &places,
        "tests that sleep (wait for the event itself, poll with tests/support/poll.rs, or pause the runtime's time):",
    );
}

/// Returns the code of a file that reaches a user.
fn shipped_code(file: &SourceFile) -> String {
    split_test_modules(&without_comments_and_literals(&file.text())).0
}

fn report(file: &SourceFile, hits: Vec<Hit>, places: &mut Vec<String>) {
    places.extend(hits.into_iter().map(|hit| format!("{}:{}: {}", file.path, hit.line, hit.what)));
}
