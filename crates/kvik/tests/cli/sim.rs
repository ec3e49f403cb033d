//! `kvik sim`, on traces of a few lines.

use std::fs;

use tempfile::TempDir;

use super::support::run;

/// Two prefixes in turn, each of two full blocks and a partly full one.
fn trace(n_requests: u64) -> (TempDir, String) {
    let lines = (0..n_requests).map(|number| {
        let (prefix, tail) = (1 + number % 2 * 2, 100 + number);
        format!(
            r#"{{"timestamp": {}, "input_length": 1100, "output_length": 9, "hash_ids": [{prefix}, {}, {tail}]}}"#,
            number * 1000,
            prefix + 1,
        )
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.jsonl");
    fs::write(&path, lines.collect::<Vec<_>>().join("\n")).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

#[test]
fn every_policy_and_the_optimum_are_told_at_every_capacity() {
    let (folder, path) = trace(10);
    let plot = folder.path().join("plot.svg");
    let arguments =
        ["sim", "--trace", &path, "--policy", "lru,kvik", "--capacity", "4,100", "--json", "--svg"];
    let report = run(arguments.into_iter().chain([plot.to_str().unwrap()])).json();
    assert_eq!(report["n_requests"], 10);
    assert_eq!(report["n_blocks"], 30);
    let outcomes: Vec<(&str, u64)> = report["outcomes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|outcome| (outcome["contender"].as_str().unwrap(), outcome["capacity_blocks"].as_u64().unwrap()))
        .collect();
    assert_eq!(
        outcomes,
        [("lru", 4), ("kvik", 4), ("optimum", 4), ("lru", 100), ("kvik", 100), ("optimum", 100)]
    );
    // With room for all, everything but the first two requests and the tails is found.
    assert_eq!(report["outcomes"][3]["n_hit_blocks"], 16);
    assert_eq!(report["outcomes"][5]["n_hit_blocks"], 16);
    assert!(fs::read_to_string(plot).unwrap().starts_with("<svg"));
}

#[test]
fn the_table_has_a_row_for_each_capacity() {
    let (_folder, path) = trace(10);
    let answer = run(["sim", "--trace", &path, "--capacity", "4,100"]);
    let table = answer.success();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "10 requests, 30 blocks; blocks found:");
    assert!(lines[1].ends_with("lru   s3fifo     kvik  optimum"), "{table}");
    assert!(lines[3].starts_with("     100 blocks  53.33 %"), "{table}");
}

#[test]
fn a_bad_line_is_refused_with_its_number() {
    let (folder, path) = trace(2);
    fs::write(&path, fs::read_to_string(&path).unwrap() + "\n{\"timestamp\": 3}\n").unwrap();
    let answer = run(["sim", "--trace", &path, "--capacity", "4"]);
    assert_eq!(answer.exit_code, Some(3), "{answer:?}");
    assert!(answer.stderr.contains("line 3: not a request"), "{answer:?}");
    drop(folder);
}

#[test]
fn an_unknown_policy_and_an_empty_cache_are_refused() {
    let (_folder, path) = trace(2);
    let answer = run(["sim", "--trace", &path, "--policy", "lru,best", "--capacity", "4"]);
    assert_eq!(answer.exit_code, Some(2), "{answer:?}");
    assert!(answer.stderr.contains("best"), "{answer:?}");
    let answer = run(["sim", "--trace", &path, "--capacity", "0"]);
    assert_eq!(answer.exit_code, Some(2), "{answer:?}");
    assert!(answer.stderr.contains("at least 1"), "{answer:?}");
}
