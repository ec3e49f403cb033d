//! `kvik bench engine`, with work small enough for a test.

use super::support::run;

const SMALL: [&str; 12] = [
    "bench",
    "engine",
    "--batch",
    "1,3",
    "--prefill-tokens",
    "32",
    "--decode-tokens",
    "4",
    "--context",
    "16",
    "--seconds",
    "0",
];

#[test]
fn json_has_prefill_and_decode_for_each_batch_size() {
    let report = run(SMALL.into_iter().chain(["--json"])).json();
    assert_eq!(report["bench"], "engine");
    for name in ["cpu", "cores", "isa", "os", "kvik"] {
        assert!(!report["machine"][name].is_null(), "{name}");
    }
    let results = report["results"].as_array().unwrap();
    let names: Vec<&str> = results.iter().filter_map(|result| result["name"].as_str()).collect();
    assert_eq!(names, ["prefill_batch_1", "prefill_batch_3", "decode_batch_1", "decode_batch_3"]);
    for result in results {
        assert_eq!(result["unit"], "tokens/s");
        assert!(3 <= result["repeats"].as_u64().unwrap());
        let [lowest, value, highest] =
            ["lowest", "value", "highest"].map(|name| result[name].as_f64().unwrap());
        assert!(0.0 < lowest && lowest <= value && value <= highest, "{result}");
    }
}

#[test]
fn the_table_has_a_line_for_each_measurement_and_no_progress_bar() {
    let table = run(SMALL).success();
    let measurements = table.lines().filter(|line| line.contains("tokens/s"));
    assert_eq!(measurements.count(), 4, "{table}");
    assert!(table.is_ascii(), "{table}");
}

#[test]
fn lengths_that_do_not_fit_into_the_context_are_refused() {
    let message = run(["bench", "engine", "--prefill-tokens", "4096"]).failure(3);
    assert_eq!(
        message,
        "error: failed to read the options: `prefill_tokens` is 4096; \
         allowed: 1 to 4095, less than the model's context"
    );
    let message = run(["bench", "engine", "--context", "4000"]).failure(3);
    assert!(message.contains("`context` is 4000; allowed: less than "), "{message}");
}
