//! `kvik bench edges`, with attacks small enough for a test.

use super::support::run;

const ATTACKS: [&str; 7] = [
    "stalled_readers",
    "slow_headers",
    "idle_tls",
    "giant_bodies",
    "slow_bodies",
    "connections",
    "malformed",
];

#[test]
fn json_has_the_share_served_and_the_ratio_of_times_for_each_attack() {
    let report = run(["bench", "edges", "--quick", "--json"]).json();
    assert_eq!(report["bench"], "edges");
    let results = report["results"].as_array().unwrap();
    let named = |name: String| {
        let found = results.iter().find(|result| result["name"] == name.as_str());
        found.unwrap_or_else(|| panic!("no {name}"))
    };
    let mut best_share = 0.0_f64;
    for attack in ATTACKS {
        let share = named(format!("served_share_during_{attack}"));
        assert_eq!(share["goal"]["at_least"], 0.99);
        assert!(share["value"].as_f64().is_some_and(|share| (0.0..=1.0).contains(&share)), "{share}");
        best_share = best_share.max(share["value"].as_f64().unwrap());
        let ratio = named(format!("p99_ratio_during_{attack}"));
        assert!(ratio["value"].as_f64().is_some_and(|ratio| 0.0 < ratio), "{ratio}");
        assert!(report["settings"]["attackers"][attack].as_u64().is_some_and(|n| 0 < n));
    }
    // How many are served in one second depends on what else the machine does; that some are does not.
    assert!(best_share > 0.5, "{best_share}");
    assert!(named("connections_opened".to_owned())["value"].as_f64().is_some_and(|n| 0.0 < n));
    assert!(named("p99_before".to_owned())["value"].as_f64().is_some_and(|time| 0.0 < time));
}
