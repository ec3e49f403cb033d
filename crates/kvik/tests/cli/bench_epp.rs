//! `kvik bench epp`, with work small enough for a test.

use super::support::run;

#[test]
fn json_has_all_figures_of_the_picker_with_those_of_the_gateway() {
    let report = run(["bench", "epp", "--quick", "--json"]).json();
    assert_eq!(report["bench"], "epp");
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
            ["rate_2kB_concurrency_20", "requests/s", "gateway"],
            ["cpu_per_request_2kB", "us", "gateway"],
            ["rate_220kB_concurrency_20", "requests/s", "gateway"],
            ["cpu_per_request_220kB", "us", "gateway"],
        ]
    );
    for result in results {
        assert!(result["baseline"]["value"].as_f64().is_some_and(|value| 0.0 < value), "{result}");
        assert!(result["value"].as_f64().is_some_and(|value| 0.0 < value), "{result}");
    }
}
