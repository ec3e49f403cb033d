//! Tells the binary what it was built from, for `kvik --version --verbose`: commit, target, profile, compiler, features.
//!
//! The commit is that of `KVIK_COMMIT`, of a packaged crate, or of the checkout. Of a checkout only release builds know it:
//! others would be linked again after every commit.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

const REPOSITORY: &str = "../../.git";
/// What `cargo package` notes of the checkout.
const PACKAGE_NOTE: &str = ".cargo_vcs_info.json";
const COMMIT_DIGITS: usize = 40;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=KVIK_COMMIT");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let profile = variable("PROFILE");
    let commit = Some(variable("KVIK_COMMIT"))
        .filter(|commit| !commit.is_empty())
        .or_else(packaged_commit)
        .or_else(|| (profile == "release").then(checked_out_commit).flatten())
        .unwrap_or_else(|| "not recorded".to_owned());
    let compiler = Command::new(variable("RUSTC")).arg("--version").output();
    let compiler = compiler.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    for (name, value) in [
        ("COMMIT", commit),
        ("TARGET", variable("TARGET")),
        ("PROFILE", profile),
        ("COMPILER", compiler.unwrap_or_else(|_| "not known".to_owned())),
        ("FEATURES", features()),
    ] {
        println!("cargo::rustc-env=KVIK_BUILD_{name}={value}");
    }
}

fn features() -> String {
    let names =
        env::vars().filter_map(|(name, _)| name.strip_prefix("CARGO_FEATURE_").map(str::to_ascii_lowercase));
    let mut names: Vec<String> = names.collect();
    names.sort();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn packaged_commit() -> Option<String> {
    let note = fs::read_to_string(PACKAGE_NOTE).ok()?;
    let (_, rest) = note.split_once("\"sha1\"")?;
    commit_in(rest.split('"').nth(1)?)
}

fn checked_out_commit() -> Option<String> {
    let repository = Path::new(REPOSITORY);
    let head = read_tracked(&repository.join("HEAD"))?;
    let Some(reference) = head.trim().strip_prefix("ref: ") else {
        return commit_in(&head);
    };
    if let Some(commit) = read_tracked(&repository.join(reference)) {
        return commit_in(&commit);
    }
    let packed = read_tracked(&repository.join("packed-refs"))?;
    packed.lines().find_map(|line| commit_in(line.strip_suffix(reference)?))
}

/// The text of a file whose change makes this run again.
fn read_tracked(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    println!("cargo::rerun-if-changed={}", path.display());
    Some(text)
}

fn commit_in(text: &str) -> Option<String> {
    let text = text.trim();
    (text.len() == COMMIT_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .then(|| text.to_owned())
}
