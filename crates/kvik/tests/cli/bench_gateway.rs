//! `kvik bench gateway`, with work small enough for a test.

use super::support::run;

const SMALL: [&str; 5] = ["bench", "gateway", "--quick", "--requests", "2000"];

#[test]
fn json_has_all_figures_with_what_they_are_compared_with() {
    let report = run(SMALL.into_iter().chain(["--json"])).json();
    assert_eq!(report["bench"], "gateway");
    for name in ["cpu", "cores", "isa", "os", "kvik"] {
        assert!(!report["machine"][name].is_null(), "{name}");
    }
    let results = report["results"].as_array().unwrap();
    let shapes: Vec<[&str; 3]> = results
        .iter()
        .map(|result| {
            [&result["name"], &result["unit"], &result["baseline"]["name"]]
                .map(|value| value.as_str().unwrap_or_default())
        })
        .collect();
    assert_eq!(
        shapes,
        [
            ["added_p50_concurrency_1", "us", "direct_p50"],
            ["rate_220kB_concurrency_20", "requests/s", "direct"],
            ["cpu_per_chunk", "us", "byte_relay"],
            ["cpu_per_chunk_paced_2ms", "us", "byte_relay"],
            ["cpu_per_chunk_paced_2ms_above_relay", "us", "byte_relay"],
            ["memory_growth_100", "bytes", "resident_before"],
        ]
    );
    for result in results {
        assert!(result["baseline"]["value"].as_f64().is_some_and(|value| 0.0 < value), "{result}");
        assert!(result["value"].is_f64() && result["ratio"].is_f64(), "{result}");
    }
    // Speeds depend on the machine; that a gateway cannot be faster than none does not.
    let rate = &results[1];
    assert!(0.0 < rate["value"].as_f64().unwrap() && rate["ratio"].as_f64().unwrap() < 1.5, "{rate}");
    assert_eq!(rate["goal"]["ratio_at_least"], 0.8);
}

#[test]
fn the_table_has_a_line_for_each_measurement_and_no_progress_bar() {
    let table = run(SMALL).success();
    let measurements = table.lines().filter(|line| line.contains(" to "));
    assert_eq!(measurements.count(), 6, "{table}");
    assert!(table.contains("cpu_per_chunk"), "{table}");
    assert!(table.is_ascii(), "{table}");
}

#[test]
fn no_requests_are_refused() {
    let answer = run(["bench", "gateway", "--requests", "0"]);
    assert_eq!(answer.exit_code, Some(2), "{answer:?}");
}
