//! What settings are refused, and what plan they make.

use kvik_tier::{NumaPlacement, ThrottledOptions};

use super::*;

fn plan(yaml: &str) -> Result<Option<StorePlan>> {
    serde_json::from_str::<StoreConfig>(yaml).unwrap().resolve()
}

fn message(json: &str) -> String {
    plan(json).unwrap_err().to_string()
}

#[test]
fn without_settings_there_is_no_store() {
    assert_eq!(plan("{}").unwrap(), None);
}

#[test]
fn a_lower_tier_alone_gets_memory_to_pass_through() {
    let plan = plan(r#"{"nvme": "/cache:20GiB"}"#).unwrap().unwrap();
    assert_eq!(plan.ram_bytes, STAGING_BYTES);
    assert_eq!(plan.nvme, Some(NvmePlan { dir: "/cache".into(), capacity_bytes: 20 << 30 }));
}

#[test]
fn the_names_of_lmcache_give_the_same_plan() {
    let own = plan(
        r#"{"ram": 5000000000, "nvme": "/d:10GB", "remote": "redis://h", "chunk_tokens": 512,
            "policy": "lru", "layerwise": true}"#,
    );
    let aliases = plan(
        r#"{"local_cpu": true, "local_disk": "file:///d", "max_local_disk_size": 10,
            "remote_url": "redis://h", "chunk_size": 512, "cache_policy": "LRU", "use_layerwise": true}"#,
    );
    assert_eq!(own.unwrap(), aliases.unwrap());
    assert_eq!(
        plan(r#"{"local_cpu": true, "max_local_cpu_size": 0.5}"#).unwrap().unwrap().ram_bytes,
        500_000_000
    );
    assert_eq!(plan(r#"{"local_cpu": false}"#).unwrap(), None);
}

#[test]
fn bounds_of_a_tier_are_none_where_they_are_zero() {
    let free = ThrottledOptions::default();
    let bounded = ThrottledOptions { bytes_per_s: Some(500_000_000), max_calls: 2, ..free.clone() };
    for tier in ["remote", "nvme"] {
        let place = if tier == "remote" { "redis://h" } else { "/d:1GiB" };
        let bounds = |more: &str| {
            let plan = plan(&format!(r#"{{"{tier}": "{place}"{more}}}"#)).unwrap().unwrap();
            if tier == "remote" { plan.remote_bounds } else { plan.nvme_bounds }
        };
        assert_eq!(bounds(""), free);
        let more = format!(r#", "{tier}_bytes_per_s": "500MB", "{tier}_max_calls": 2"#);
        assert_eq!(bounds(&more), bounded);
        let text = message(&format!(r#"{{"{tier}": "{place}", "{tier}_bytes_per_s": "fast"}}"#));
        assert!(text.contains(&format!("`store.{tier}_bytes_per_s` is fast; allowed: a size")), "{text}");
    }
}

#[test]
fn memory_is_spread_over_numa_nodes_near_its_user_or_on_one_of_them() {
    let numa = |value: &str| plan(&format!(r#"{{"ram": "1GiB", "numa": {value}}}"#)).unwrap().unwrap().numa;
    assert_eq!(plan(r#"{"ram": "1GiB"}"#).unwrap().unwrap().numa, NumaPlacement::Auto);
    assert_eq!(numa(r#""interleave""#), NumaPlacement::Auto);
    assert_eq!(numa(r#""local""#), NumaPlacement::Local);
    assert_eq!((numa("1"), numa(r#""1""#)), (NumaPlacement::Node(1), NumaPlacement::Node(1)));
    let text = message(r#"{"ram": "1GiB", "numa": "near"}"#);
    assert!(text.contains("`store.numa` is near; allowed: interleave, local, or the number"), "{text}");
}

#[test]
fn workers_of_one_process_divide_a_store_and_share_no_folder() {
    let config = StoreConfig { ram: "2GiB".into(), nvme: Some("/d:20GiB".into()), ..StoreConfig::default() };
    let plan = config.share_of("worker-2", 2).unwrap().resolve().unwrap().unwrap();
    assert_eq!(plan.ram_bytes, 1 << 30);
    assert_eq!(plan.nvme, Some(NvmePlan { dir: "/d/worker-2".into(), capacity_bytes: 10 << 30 }));
    assert_eq!(StoreConfig::default().share_of("worker-1", 2).unwrap(), StoreConfig::default());
}

#[test]
fn two_names_with_two_values_are_a_contradiction() {
    for json in [
        r#"{"ram": "1GiB", "max_local_cpu_size": 2}"#,
        r#"{"chunk_tokens": 128, "chunk_size": 512}"#,
        r#"{"remote": "redis://a", "remote_url": "redis://b"}"#,
        r#"{"nvme": "/a:1GB", "local_disk": "/b", "max_local_disk_size": 1}"#,
        r#"{"policy": "arc", "cache_policy": "LRU"}"#,
    ] {
        assert!(message(json).contains("one of the two names"), "{json}");
    }
}

#[test]
fn a_bad_value_is_refused_with_its_field_and_what_is_allowed() {
    assert_eq!(
        message(r#"{"ram": "2 Gigs"}"#),
        "`store.ram` is 2 Gigs; allowed: a size such as 2GiB, 512MiB or 1073741824"
    );
    assert!(message(r#"{"nvme": "/cache"}"#).contains("`store.nvme` is /cache; allowed: DIR:SIZE"));
    assert!(message(r#"{"nvme": "/cache:0"}"#).contains("DIR:SIZE"));
    assert!(message(r#"{"ram": "1GiB", "chunk_tokens": 100}"#).contains("`store.chunk_tokens` is 100"));
    assert!(message(r#"{"cache_policy": "MRU"}"#).contains("`store.policy` is mru; allowed: lru"));
    assert!(message(r#"{"local_disk": "/d"}"#).contains("`store.max_local_disk_size` is not set"));
    assert!(message(r#"{"max_local_cpu_size": -1}"#).contains("`store.max_local_cpu_size` is -1"));
}
