//! `kvik bench codec`, with work small enough for a test.

use super::support::run;

#[test]
fn json_has_the_ratio_and_both_rates_of_every_codec_on_both_subjects() {
    let report = run(["bench", "codec", "--quick", "--json"]).json();
    assert_eq!(report["bench"], "codec");
    let results = report["results"].as_array().unwrap();
    let named = |name: String| {
        let found = results.iter().find(|result| result["name"] == name.as_str());
        found.unwrap_or_else(|| panic!("no {name}")).clone()
    };
    for subject in ["kvik_tiny", "llama_8b"] {
        for (codec, least) in
            [("lossless", 1.2), ("fp8", 1.9), ("int8", 1.85), ("int4", 3.0), ("cachegen", 3.0)]
        {
            let ratio = named(format!("{codec}_ratio_{subject}"))["value"].as_f64().unwrap();
            assert!(ratio > least, "{codec} on {subject}: {ratio}");
            for direction in ["encode", "decode"] {
                let rate = named(format!("{codec}_{direction}_gb_s_{subject}"));
                assert!(rate["value"].as_f64().is_some_and(|rate| rate > 0.0), "{rate}");
                assert_eq!(rate["baseline"]["name"], "memcpy");
            }
        }
        let goal = named(format!("cachegen_decode_gb_s_{subject}"));
        assert_eq!(goal["goal"]["at_least"], 1.0);
    }
}
