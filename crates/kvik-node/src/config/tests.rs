//! What settings are refused, and what plan they make.

use kvik_tier::{NumaPlacement, ThrottledOptions};

use super::plan::STAGING_BYTES;
use super::*;
use crate::error::Result;

fn plan(yaml: &str) -> Result<Option<StorePlan>> {
    serde_json::from_str::<StoreConfig>(yaml).unwrap().resolve()
}

/// Names, paths and sizes of the disks of a plan.
fn disks(plan: &StorePlan) -> Vec<(String, PathBuf, Option<u64>)> {
    let disks = plan.tiers.iter().filter_map(|plan| match &plan.place {
        TierPlace::Nvme(disk) => Some((plan.name.to_string(), disk.path.clone(), disk.capacity_bytes)),
        TierPlace::Peer | TierPlace::Remote(_) => None,
    });
    disks.collect()
}

fn names(plan: &StorePlan) -> Vec<&str> {
    plan.tiers.iter().map(|plan| plan.name.as_str()).collect()
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
    assert_eq!(disks(&plan), [("nvme".to_owned(), "/cache".into(), Some(20 << 30))]);
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
            let tiers = plan.tiers.into_iter().filter(|plan| plan.place != TierPlace::Peer);
            tiers.map(|plan| plan.bounds).next().unwrap()
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
    assert_eq!(disks(&plan), [("nvme".to_owned(), "/d/worker-2".into(), Some(10 << 30))]);
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
    let allowed = "`store.gpu_direct` is yes; allowed: off, auto or on";
    assert!(message(r#"{"gpu_direct": "yes"}"#).contains(allowed));
    let allowed = "`store.gpu_direct_writes` is true; allowed: false where `store.gpu_direct` is off";
    assert!(message(r#"{"ram": "1GiB", "gpu_direct_writes": true}"#).contains(allowed));
    let allowed = "`store.gpu_direct_writes` is true; allowed: false where `store.write_back` is reuse";
    let both = r#"{"ram": "1GiB", "gpu_direct": "on", "gpu_direct_writes": true, "write_back": "reuse"}"#;
    assert!(message(both).contains(allowed));
    for (given, read) in [("true", "on"), ("false", "off"), (r#""auto""#, "auto")] {
        let config = serde_json::from_str::<StoreConfig>(&format!(r#"{{"gpu_direct": {given}}}"#)).unwrap();
        assert_eq!(config.gpu_direct, read);
    }
}

const TIERS: &str = r#"{"tiers": [
    {"name": "fast", "nvme": "/mnt/a:200GiB"},
    {"name": "slow", "nvme": "/mnt/b:2TiB", "bytes_per_s": "1GB", "max_calls": 8, "max_bytes_in_flight": "64MiB"},
    {"peer": true},
    {"remote": "redis://h"},
    {"name": "far", "remote": "s3://bucket", "timeout_ms": 5000, "options": {"region": "eu"}}
]}"#;

#[test]
fn a_list_names_tiers_of_one_kind_and_orders_them() {
    let plan = plan(TIERS).unwrap().unwrap();
    assert_eq!(names(&plan), ["fast", "slow", "peer", "redis", "far"]);
    let [_, slow, _, near, far] = &plan.tiers[..] else { panic!("{:?}", plan.tiers) };
    assert_eq!((slow.bounds.bytes_per_s, slow.bounds.max_calls), (Some(1_000_000_000), 8));
    assert_eq!(slow.bounds.max_bytes_in_flight, 64 << 20);
    let timeout = |plan: &TierPlan| match &plan.place {
        TierPlace::Remote(remote) => (remote.timeout.as_millis(), remote.options.len()),
        other => panic!("{other:?}"),
    };
    assert_eq!((timeout(near), timeout(far)), ((2000, 0), (5000, 1)));
}

#[test]
fn tiers_without_names_get_that_of_their_kind_and_other_nodes_come_before_remotes() {
    let plan = plan(r#"{"tiers": [{"nvme": "/a:1GiB"}, {"nvme": "/b:1GiB"}, {"remote": "redis://h"}]}"#);
    assert_eq!(names(&plan.unwrap().unwrap()), ["nvme", "nvme-2", "peer", "redis"]);
}

#[test]
fn servers_of_lmcache_and_libraries_are_remotes_under_both_names() {
    for (url, name) in [
        ("lm://cache:65432", "lm"),
        ("plugin:///usr/lib/kvik/map_tier.so?a=b", "plugin"),
        ("mooncakestore://h:50051/", "plugin"),
    ] {
        for field in ["remote", "remote_url"] {
            let plan = plan(&format!(r#"{{"{field}": "{url}"}}"#)).unwrap().unwrap();
            assert_eq!(names(&plan), ["peer", name]);
        }
    }
    let text = message(r#"{"remote": "infinistore://cache:1"}"#);
    assert!(text.contains("lm, plugin, mooncakestore") && text.contains("redis"), "{text}");
}

#[test]
fn a_block_device_needs_no_size() {
    let plan = plan(r#"{"tiers": [{"nvme": "/dev/nvme1n1"}, {"nvme": "/dev/sdb:1GiB"}]}"#).unwrap().unwrap();
    let device = |name: &str, path: &str, size| (name.to_owned(), PathBuf::from(path), size);
    let expected = [device("nvme", "/dev/nvme1n1", None), device("nvme-2", "/dev/sdb", Some(1 << 30))];
    assert_eq!(disks(&plan), expected);
}

#[test]
fn workers_of_one_process_share_no_folder_of_any_disk() {
    let config = serde_json::from_str::<StoreConfig>(TIERS).unwrap();
    let plan = config.share_of("worker-2", 2).unwrap().resolve().unwrap().unwrap();
    assert_eq!(
        disks(&plan),
        [
            ("fast".to_owned(), "/mnt/a/worker-2".into(), Some(100 << 30)),
            ("slow".to_owned(), "/mnt/b/worker-2".into(), Some(1 << 40)),
        ]
    );
    let device = serde_json::from_str::<StoreConfig>(r#"{"nvme": "/dev/sdb:1GiB"}"#).unwrap();
    assert!(device.share_of("worker-1", 2).unwrap_err().to_string().contains("a folder where several"));
}

#[test]
fn a_list_that_makes_no_sense_is_refused_with_what_is_allowed() {
    let of = |entry: &str| message(&format!(r#"{{"tiers": [{entry}]}}"#));
    for (entry, allowed) in [
        (r#"{"name": "a"}"#, "`store.tiers` is a; allowed: exactly one of `nvme`, `peer: true` and `remote`"),
        (r#"{"nvme": "/a:1GiB", "remote": "redis://h"}"#, "exactly one of"),
        (r#"{"name": "ram", "nvme": "/a:1GiB"}"#, "`ram` is memory"),
        (r#"{"name": "Fast", "nvme": "/a:1GiB"}"#, "`store.tiers.name` is Fast; allowed: 1 to 32 of a-z"),
        (r#"{"name": "a", "nvme": "/a:1GiB"}, {"name": "a", "nvme": "/b:1GiB"}"#, "a name that no other"),
        (r#"{"nvme": "/a:1GiB", "ttl_s": 1}"#, "these beside `remote` only"),
        (r#"{"remote": "redis://h", "io": "auto"}"#, "it beside `nvme` only"),
        (r#"{"peer": true, "max_calls": 1}"#, "`name` beside `peer: true`"),
        (r#"{"peer": true}, {"name": "b", "peer": true}"#, "one entry with `peer: true` at most"),
        (r#"{"nvme": "/a"}"#, "DIR:SIZE"),
        (r#"{"nvme": "/a:1GiB", "io": "fast"}"#, "auto, uring or positional"),
        (&[r#"{"nvme": "/a:1GiB"}"#; 7].join(","), "at most 7 tiers"),
    ] {
        assert!(of(entry).contains(allowed), "{entry}: {}", of(entry));
    }
    for short in [r#""nvme": "/a:1GiB""#, r#""remote_url": "redis://h""#, r#""nvme_max_calls": 1"#] {
        let text = message(&format!(r#"{{"tiers": [{{"nvme": "/b:1GiB"}}], {short}}}"#));
        assert!(text.contains("the short form of a list with one of each"), "{short}: {text}");
    }
}

#[test]
fn a_codec_is_planned_for_its_tier_and_a_lossy_one_must_be_allowed_by_name() {
    let codecs = |json: &str| -> Vec<Option<String>> {
        plan(json).unwrap().unwrap().tiers.into_iter().map(|tier| tier.codec).collect()
    };
    let short = r#"{"nvme": "/d:1GiB", "remote": "redis://h", "remote_codec": "lossless"}"#;
    assert_eq!(codecs(short), [None, None, Some("lossless".to_owned())]);
    let list = r#"{"tiers": [{"nvme": "/d:1GiB", "codec": "none"}, {"nvme": "/e:1GiB", "codec": "int4"}],
        "allow_lossy": ["int8", "int4", "int8"]}"#;
    assert_eq!(codecs(list), [None, Some("int4".to_owned()), None]);
    assert_eq!(plan(list).unwrap().unwrap().allow_lossy, ["int4", "int8"]);
    let codecs = "none, lossless, or one of fp8, int8, int4 and cachegen that `store.allow_lossy` names";
    for (json, field, value) in [
        (r#"{"nvme": "/d:1GiB", "nvme_codec": "int8"}"#, "store.nvme_codec", "int8"),
        (r#"{"nvme": "/d:1GiB", "remote_codec": "zip"}"#, "store.remote_codec", "zip"),
        (
            r#"{"tiers": [{"nvme": "/d:1GiB", "codec": "fp8"}], "allow_lossy": ["int8"]}"#,
            "store.tiers.codec",
            "fp8",
        ),
    ] {
        assert_eq!(message(json), format!("`{field}` is {value}; allowed: {codecs}"));
    }
    let not_lossy = message(r#"{"nvme": "/d:1GiB", "allow_lossy": ["lossless"]}"#);
    assert_eq!(
        not_lossy,
        "`store.allow_lossy` is lossless; allowed: lossy codecs: fp8, int8, int4 and cachegen"
    );
    assert!(plan(r#"{"tiers": [{"peer": true, "codec": "lossless"}]}"#).is_err());
    assert!(plan(r#"{"tiers": [{"nvme": "/d:1GiB"}], "nvme_codec": "lossless"}"#).is_err());
}

#[test]
fn a_daemon_allows_no_lossy_codec() {
    let mut config = DaemonConfig::default();
    "1MiB".clone_into(&mut config.tiers.ram);
    config.tiers.allow_lossy = vec!["int8".to_owned()];
    let message = config.terms().unwrap_err().to_string();
    let allowed = "none: only a worker's own store may be approximate";
    assert_eq!(message, format!("`tiers.allow_lossy` is int8; allowed: {allowed}"));
}
