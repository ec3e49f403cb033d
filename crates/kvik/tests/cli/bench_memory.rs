//! `kvik bench memory`, with work small enough for a test.

use super::support::run;

const SMALL: [&str; 3] = ["bench", "memory", "--quick"];

#[test]
fn json_has_blocks_pages_grants_extents_and_growth() {
    let report = run(SMALL.into_iter().chain(["--json"])).json();
    assert_eq!(report["bench"], "memory");
    assert_eq!(report["settings"]["device"], "host0");
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
            ["block_alloc_free_1_p50", "ns", ""],
            ["block_alloc_free_1_p99", "ns", ""],
            ["block_alloc_free_4_p50", "ns", ""],
            ["block_alloc_free_16_p50", "ns", ""],
            ["block_alloc_free_64_p50", "ns", ""],
            ["block_alloc_free_256_p50", "ns", ""],
            ["page_alloc_free_parked_p50", "ns", "kvcached_0.1.6_earlier_without_gpu"],
            ["page_alloc_free_parked_p99", "ns", ""],
            ["page_alloc_free_parked_contended_p50", "ns", "alone"],
            ["page_alloc_free_parked_contended_p99", "ns", "alone"],
            ["claim_give_back_p50", "ns", ""],
            ["claim_give_back_of_8_processes_p50", "ns", "alone"],
            ["claim_give_back_p99", "ns", ""],
            ["claim_give_back_contended_p50", "ns", "alone"],
            ["claim_give_back_contended_p99", "ns", "alone"],
            ["map_on_4_ranks_p50", "us", ""],
            ["unmap_on_4_ranks_p50", "us", ""],
            ["map_extent_1_pages", "us", ""],
            ["unmap_extent_1_pages", "us", ""],
            ["map_extent_8_pages", "us", ""],
            ["unmap_extent_8_pages", "us", ""],
            ["map_extent_32_pages", "us", ""],
            ["unmap_extent_32_pages", "us", ""],
            ["open_64_gib_reservation", "ms", ""],
            ["grow_512_mib", "ms", ""],
            ["grow_512_mib_slowest", "ms", ""],
            ["grow_1_gib_at_once", "ms", ""],
            ["free_1_gib_grown_at_once", "ms", ""],
            ["free_1_gib_grown_by_512_mib", "ms", ""],
        ]
    );
    for result in results {
        let [lowest, value, highest] =
            ["lowest", "value", "highest"].map(|name| result[name].as_f64().unwrap());
        assert!(0.0 < lowest && lowest <= value && value <= highest, "{result}");
    }
    assert_eq!(results[0]["goal"]["at_most"], 100.0);
    assert_eq!(results[6]["goal"]["at_most"], 1000.0);
}

#[test]
fn the_table_has_a_line_for_each_measurement_and_no_progress_bar() {
    let table = run(SMALL).success();
    assert_eq!(table.lines().filter(|line| line.contains(" to ")).count(), 29, "{table}");
    assert!(table.is_ascii(), "{table}");
}

#[test]
fn a_device_that_is_none_is_refused() {
    let answer = run(["bench", "memory", "--device", "cuda"]);
    assert_eq!(answer.exit_code, Some(2), "{answer:?}");
    assert!(answer.stderr.contains("allowed: `host`, or `cuda:` and the number of a GPU"), "{answer:?}");
    // No machine has so many.
    let message = run(["bench", "memory", "--device", "cuda:4000"]).failure(1);
    assert!(message.starts_with("error: failed to open the device: open device cuda:4000"), "{message}");
}
