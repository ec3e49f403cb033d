//! `kvik demo`: both runs with real processes.

use crate::support::run;

#[test]
fn a_demo_measures_both_runs_kills_a_worker_and_draws_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("demo.svg");
    let svg = picture.display().to_string();
    let flags = ["--seconds", "2", "--workers", "2", "--clients", "2", "--svg", &svg, "--json"];
    let report = run(["demo"].into_iter().chain(flags)).json();
    assert_eq!(report["bench"], "demo");
    let value = |name: &str| {
        let results = report["results"].as_array().unwrap();
        let row =
            results.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no {name}: {report}"));
        assert!(row["baseline"]["value"].is_number(), "{row}");
        row["value"].as_f64().unwrap()
    };
    assert!(0.0 < value("requests_served"));
    assert!(0.0 < value("ttft_p50"));
    assert!((0.0..=1.0).contains(&value("hit_ratio")));
    let drawing = std::fs::read_to_string(&picture).unwrap();
    assert!(drawing.starts_with("<svg") && drawing.contains("a worker is killed"), "{drawing}");
}

#[test]
fn a_gateway_that_is_no_address_is_refused_by_name() {
    let answer = run(["demo", "--gateway", "localhost"]);
    assert_eq!(answer.exit_code, Some(3), "{answer:?}");
    assert!(answer.stderr.contains("--gateway: `localhost`; allowed: http://HOST:PORT"), "{answer:?}");
}
