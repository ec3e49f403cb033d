//! The replay of traces: figures on traces that are made here, the optimum against brute force, and what
//! is not a trace.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::collections::{BTreeMap, BTreeSet};

use kvik_bench::sim::synthetic::{Chats, agents_and_scans, documents, shared_prompts};
use kvik_bench::sim::{Contender, Report, Trace, TraceError, TraceRequest, optimum, simulate};
use kvik_store::policy::PolicyKind;
use proptest::prelude::*;

fn trace(chains: &[Vec<u64>]) -> Trace {
    let requests = chains.iter().zip(0..).map(|(chain, number)| TraceRequest {
        timestamp: number * 1000,
        input_length: chain.len() as u64 * 512,
        output_length: 100,
        hash_ids: chain.clone(),
    });
    Trace::try_new(requests.collect()).unwrap()
}

/// The most hits of any cache: all sets of blocks that it could hold are followed.
fn best_of_all(chains: &[Vec<u64>], capacity: usize) -> u64 {
    let mut states: BTreeMap<BTreeSet<u64>, u64> = BTreeMap::from([(BTreeSet::new(), 0)]);
    for chain in chains {
        let mut next: BTreeMap<BTreeSet<u64>, u64> = BTreeMap::new();
        for (held, n_hits) in &states {
            let n_hits = n_hits + chain.iter().take_while(|id| held.contains(id)).count() as u64;
            let all: Vec<u64> =
                held.iter().chain(chain).copied().collect::<BTreeSet<_>>().into_iter().collect();
            for chosen in 0..1_u32 << all.len() {
                let kept: BTreeSet<u64> =
                    (0..all.len()).filter(|bit| chosen >> bit & 1 == 1).map(|bit| all[bit]).collect();
                if kept.len() <= capacity {
                    let best = next.entry(kept).or_default();
                    *best = n_hits.max(*best);
                }
            }
        }
        states = next;
    }
    states.into_values().max().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_optimum_equals_brute_force(
        // Paths in a binary tree of depth 3: at most 7 blocks.
        ends in prop::collection::vec(1..8_u64, 1..8),
        capacity in 0..5_usize,
    ) {
        let chains: Vec<Vec<u64>> = (ends.iter())
            .map(|&end| {
                let mut chain: Vec<u64> =
                    std::iter::successors(Some(end), |id| Some(id / 2)).take_while(|id| *id > 0).collect();
                chain.reverse();
                chain
            })
            .collect();
        prop_assert_eq!(optimum(&trace(&chains), capacity).n_hit_blocks, best_of_all(&chains, capacity));
    }
}

#[test]
fn hits_are_counted_by_the_longest_resident_prefix() {
    let chains = [vec![1, 2, 3], vec![1, 2, 4], vec![5], vec![1, 2, 3]];
    let outcome = simulate(&trace(&chains), PolicyKind::Lru, 3);
    // The second finds 1 and 2; block 5 pushes 4 out; the last finds 1 and 2 again.
    assert_eq!((outcome.n_hit_blocks, outcome.n_blocks), (4, 10));
    assert_eq!(optimum(&trace(&chains), 4).n_hit_blocks, 5);
}

/// Capacities at which the cache is far too small, too small and nearly large enough.
const CAPACITIES: [usize; 3] = [200, 1000, 4000];

fn workloads() -> Vec<(&'static str, Trace)> {
    let chats = |think_s, next_turn| Chats { n_requests: 1500, rate: 3.0, think_s, next_turn, seed: 7 };
    vec![
        ("chats, quick", chats(30.0, 0.6).trace().unwrap()),
        ("chats, slow", chats(300.0, 0.7).trace().unwrap()),
        ("shared prompts", shared_prompts(1500, 300, 0.9, 7).unwrap()),
        ("agents and scans", agents_and_scans(700, 20, 7).unwrap()),
        ("documents", documents(800, 150, 7).unwrap()),
    ]
}

#[test]
fn kvik_is_nowhere_worse_than_lru_by_more_than_a_hair() {
    for (name, trace) in workloads() {
        for capacity in CAPACITIES {
            let [lru, kvik] = [PolicyKind::Lru, PolicyKind::Kvik]
                .map(|kind| simulate(&trace, kind, capacity).hit_percent());
            assert!(kvik >= lru - 0.3, "{name} at {capacity}: kvik {kvik:.2} %, lru {lru:.2} %");
        }
    }
}

#[test]
fn no_policy_beats_the_optimum() {
    for (name, trace) in workloads() {
        let report = Report::run(&trace, &PolicyKind::ALL, &[300]);
        let best = report.of(Contender::Optimum).next().unwrap().n_hit_blocks;
        assert!(
            report.outcomes.iter().all(|outcome| outcome.n_hit_blocks <= best),
            "{name}\n{}",
            report.table()
        );
    }
}

#[test]
fn figures_on_agents_between_scans_are_these() {
    // No logarithm goes into this trace, so it is the same on every machine.
    let trace = agents_and_scans(1000, 30, 3).unwrap();
    let report = Report::run(&trace, &PolicyKind::ALL, &[600]);
    let hits: Vec<(&str, u64)> =
        report.outcomes.iter().map(|outcome| (outcome.contender.name(), outcome.n_hit_blocks)).collect();
    let expected = [
        ("lru", 10_060),
        ("lfu", 13_797),
        ("fifo", 10_060),
        ("s3fifo", 14_527),
        ("arc", 13_931),
        ("cost", 10_060),
        ("kvik", 15_741),
        ("optimum", 18_428),
    ];
    assert_eq!(hits, expected);
}

#[test]
fn kvik_learns_that_scans_do_not_come_back() {
    let trace = agents_and_scans(1500, 50, 3).unwrap();
    let [lru, s3fifo, kvik] = [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Kvik]
        .map(|kind| simulate(&trace, kind, 1000).hit_percent());
    assert!(
        kvik > lru + 5.0 && kvik > s3fifo + 1.0,
        "kvik {kvik:.2} %, lru {lru:.2} %, s3fifo {s3fifo:.2} %"
    );
}

#[test]
fn a_report_is_a_table_json_and_a_plot() {
    let trace = shared_prompts(300, 40, 1.0, 1).unwrap();
    let report = Report::run(&trace, &[PolicyKind::Lru, PolicyKind::Kvik], &[50, 200]);
    let table = report.table();
    let rows: Vec<&str> = table.lines().collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert_eq!(rows[0].split_whitespace().collect::<Vec<_>>(), ["capacity", "lru", "kvik", "optimum"]);
    let percent = report.outcomes[0].hit_percent();
    assert!(rows[1].contains(&format!("{percent:.2} %")), "{table}");

    let json: serde_json::Value = serde_json::to_value(&report).unwrap();
    assert_eq!(json["outcomes"][2]["contender"], "optimum");
    assert_eq!(json["outcomes"][5]["capacity_blocks"], 200);

    let svg = report.svg();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<polyline").count(), 3);
    for text in ["capacity in blocks", "block hit ratio", ">kvik</text>", ">200</text>", ">0 %</text>"] {
        assert!(svg.contains(text), "{text} is missing");
    }
    assert!(!svg.contains("NaN"));
}

fn refusal(text: &str) -> TraceError {
    Trace::read(text.as_bytes()).unwrap_err()
}

const GOOD: &str = r#"{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;

#[test]
fn a_trace_is_read_line_by_line() {
    let trace = Trace::read(format!("{GOOD}\n\n{GOOD}\n").as_bytes()).unwrap();
    assert_eq!((trace.requests().len(), trace.n_blocks()), (2, 4));
    assert_eq!(trace.requests()[0].hash_ids, [1, 2]);
}

#[test]
fn a_bad_line_is_named_by_its_number() {
    let bad = [
        ("{", "line 2: not a request"),
        (r#"{"timestamp": 6, "input_length": 600, "output_length": 1}"#, "line 2: not a request"),
        (
            r#"{"timestamp": -6, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#,
            "line 2: not a request",
        ),
        (
            r#"{"timestamp": 6, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}"#,
            "line 2: 2 blocks for 1",
        ),
        (r#"{"timestamp": 6, "input_length": 0, "output_length": 1, "hash_ids": []}"#, "line 2: 0 blocks"),
        (
            r#"{"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": [1]}"#,
            "line 2: timestamp 4 after 5",
        ),
        (
            r#"{"timestamp": 6, "input_length": 1, "output_length": 1, "hash_ids": [2]}"#,
            "line 2: block 2 comes",
        ),
        (
            r#"{"timestamp": 6, "input_length": 999, "output_length": 1, "hash_ids": [1, 1]}"#,
            "line 2: block 1 comes",
        ),
    ];
    for (line, message) in bad {
        let error = refusal(&format!("{GOOD}\n{line}\n")).to_string();
        assert!(error.starts_with(message), "{error}");
    }
    assert!(matches!(Trace::read(&b"\xff\n"[..]).unwrap_err(), TraceError::Io { line: 1, .. }));
}
