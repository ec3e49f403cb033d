//! `kvik config`: what is in effect, and where it comes from.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::process;

#[test]
fn config_as_json_names_every_field_with_its_default() {
    let output = process::kvik().args(["config", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let config: Value = serde_json::from_slice(&output.stdout).unwrap();
    // A line a field: a changed default is a changed line.
    let mut lines = Vec::new();
    for (role, fields) in config.as_object().unwrap() {
        for (field, set) in fields.as_object().unwrap() {
            lines.push(format!("{role} {field} = {} ({})", set["value"], set["origin"].as_str().unwrap()));
        }
    }
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn config_prints_every_value_with_its_origin() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("kvik.yaml");
    fs::write(&file, "gateway:\n  max_body_bytes: 4096\ncoordinator:\n  slow_start_ms: 5\n").unwrap();
    let output = process::kvik()
        .args(["config", "--config"])
        .arg(&file)
        .env("KVIK_GATEWAY_LISTEN", "127.0.0.1:9999")
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let words: Vec<Vec<&str>> = stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    for expected in [
        ["retry.max_attempts", "2", "default"],
        ["max_body_bytes", "4096", "file"],
        ["slow_start_ms", "5", "file"],
        ["listen", "127.0.0.1:9999", "environment"],
        ["listen", "127.0.0.1:8081", "default"],
    ] {
        let [field, value, origin] = expected;
        let is_there =
            words.iter().any(|line| line.starts_with(&[field, value]) && line[2..].contains(&origin));
        assert!(is_there, "{expected:?} in\n{stdout}");
    }
    for role in ["gateway", "coordinator", "worker"] {
        assert!(words.contains(&vec![role]), "{role} in\n{stdout}");
    }
}

#[test]
fn a_misspelled_section_of_a_file_is_refused() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("kvik.yaml");
    fs::write(&file, "gatway:\n  max_body_bytes: 4096\n").unwrap();
    for command in ["config", "gateway", "worker", "coordinator", "up"] {
        let output = process::kvik().args([command, "--config"]).arg(&file).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{command}: {stderr}");
        assert!(stderr.contains("`gatway` is unknown; allowed: the sections coordinator,"), "{stderr}");
    }
}
