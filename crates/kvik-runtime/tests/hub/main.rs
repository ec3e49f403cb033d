//! Models from a hub that redirects, cuts connections, damages files and refuses.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod server;

use std::fs;
use std::path::{Path, PathBuf};

use kvik_runtime::hub::{FoundModel, HubError, ModelHubConfig, find_model};
use kvik_runtime::shutdown::Shutdown;
use server::{Hub, git_name, sha256};
use tempfile::TempDir;

const CONFIG: &[u8] = b"{\"model_type\": \"llama\"}";
const TOKENIZER: &[u8] = b"{\"version\": \"1.0\"}";
const INDEX: &[u8] = br#"{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}"#;

/// More than what a connection holds at a time, so that a cut leaves some of it.
fn weights() -> Vec<u8> {
    (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn model(weights: &[u8]) -> Vec<(&str, &[u8])> {
    vec![
        ("config.json", CONFIG),
        ("tokenizer.json", TOKENIZER),
        ("generation_config.json", b"{}"),
        ("README.md", b"not fetched"),
        ("pytorch_model.bin", b"not fetched"),
        ("original/consolidated.safetensors", b"not fetched"),
        ("model.safetensors", weights),
    ]
}

fn config(hub: &Hub, cache: &TempDir) -> ModelHubConfig {
    ModelHubConfig {
        url: hub.url.clone(),
        // The user's own must not be read.
        home: Some(cache.path().join("home")),
        cache: Some(cache.path().to_owned()),
        timeout_s: 30,
        ..ModelHubConfig::default()
    }
}

fn find(name: &str, config: &ModelHubConfig) -> Result<FoundModel, HubError> {
    find_model(Path::new(name), config, &Shutdown::new())
}

fn blobs(cache: &TempDir) -> PathBuf {
    cache.path().join("models--owner--name/blobs")
}

#[test]
fn a_model_is_fetched_once_in_the_layout_that_other_programs_read() {
    let (weights, cache) = (weights(), tempfile::tempdir().unwrap());
    let hub = Hub::start(&model(&weights));
    let mut config = config(&hub, &cache);
    config.token = Some("canary".into());
    let found = find("owner/name", &config).unwrap();
    let snapshot = cache.path().join("models--owner--name/snapshots/c0ffee");
    assert_eq!(found, FoundModel { folder: snapshot.clone(), name: Some("owner/name".to_owned()) });
    let mut files: Vec<_> =
        fs::read_dir(&snapshot).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights);
    assert_eq!(fs::read(blobs(&cache).join(sha256(&weights))).unwrap(), weights);
    assert_eq!(fs::read(blobs(&cache).join(git_name(CONFIG))).unwrap(), CONFIG);
    let link = fs::read_link(snapshot.join("config.json")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(git_name(CONFIG)));
    assert_eq!(fs::read_dir(blobs(&cache)).unwrap().count(), 4, "nothing is left beside the blobs");
    let main = fs::read_to_string(cache.path().join("models--owner--name/refs/main")).unwrap();
    assert_eq!(main, "c0ffee");

    // The token is for the hub alone.
    assert!(
        hub.hub_requests().iter().all(|request| request.header("authorization") == Some("bearer canary"))
    );
    assert!(hub.store_requests().iter().all(|request| request.header("authorization").is_none()));
    assert_eq!(hub.store_requests().len(), 1);

    // Nothing listens there.
    config.url = "http://127.0.0.1:1".to_owned();
    assert_eq!(find("owner/name", &config).unwrap(), found);
    config.offline = true;
    assert_eq!(find("owner/name@c0ffee", &config).unwrap(), found);
}

#[test]
fn a_download_that_is_cut_goes_on_where_it_ended() {
    let (weights, cache) = (weights(), tempfile::tempdir().unwrap());
    let hub = Hub::start(&model(&weights));
    hub.set(|behavior| behavior.cuts = vec![1_000_000, 500_000]);
    let found = find("owner/name", &config(&hub, &cache)).unwrap();
    assert_eq!(fs::read(found.folder.join("model.safetensors")).unwrap(), weights);
    let offset = |request: &server::Request| {
        let range = request.header("range")?.trim_start_matches("bytes=").trim_end_matches('-').to_owned();
        range.parse::<usize>().ok()
    };
    let offsets: Vec<_> = hub.store_requests().iter().map(offset).collect();
    assert_eq!(offsets.len(), 3);
    assert_eq!(offsets[0], None);
    assert!(offsets[1] < offsets[2] && offsets[2] <= Some(1_500_000), "{offsets:?}");
}

#[test]
fn what_an_earlier_process_fetched_is_gone_on_with() {
    let (weights, cache) = (weights(), tempfile::tempdir().unwrap());
    let hub = Hub::start(&model(&weights));
    let config = config(&hub, &cache);
    fs::create_dir_all(blobs(&cache)).unwrap();
    let incomplete = blobs(&cache).join(format!("{}.incomplete", sha256(&weights)));
    fs::write(&incomplete, &weights[..2_000_000]).unwrap();
    let found = find("owner/name", &config).unwrap();
    assert_eq!(fs::read(found.folder.join("model.safetensors")).unwrap(), weights);
    assert_eq!(hub.store_requests()[0].header("range"), Some("bytes=2000000-"));
    assert!(!incomplete.is_file());

    // A server that gives no parts sends all of it again.
    let cache = tempfile::tempdir().unwrap();
    let config = ModelHubConfig { cache: Some(cache.path().to_owned()), ..config };
    fs::create_dir_all(blobs(&cache)).unwrap();
    let incomplete = blobs(&cache).join(format!("{}.incomplete", sha256(&weights)));
    fs::write(&incomplete, &weights[..2_000_000]).unwrap();
    hub.set(|behavior| behavior.is_without_ranges = true);
    let found = find("owner/name", &config).unwrap();
    assert_eq!(fs::read(found.folder.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn a_damaged_file_is_refused_and_removed() {
    let (weights, cache) = (weights(), tempfile::tempdir().unwrap());
    let hub = Hub::start(&model(&weights));
    hub.set(|behavior| behavior.is_damaging = true);
    let config = config(&hub, &cache);
    let error = find("owner/name", &config).unwrap_err();
    let HubError::Checksum { file, expected, found, .. } = &error else { panic!("{error}") };
    assert_eq!((file.as_str(), expected), ("model.safetensors", &sha256(&weights)));
    assert_ne!(expected, found);
    let is_of_weights = |name: &str| name.starts_with(&sha256(&weights));
    let mut left = fs::read_dir(blobs(&cache)).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!left.any(|name| is_of_weights(name.to_str().unwrap())));
    hub.set(|behavior| behavior.is_damaging = false);
    find("owner/name", &config).unwrap();
}

#[test]
fn refusals_are_told_apart_and_say_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&model(b"w"));
    let config = config(&hub, &cache);
    let refused = |status| {
        hub.set(|behavior| behavior.status = status);
        find("owner/name", &config).unwrap_err()
    };
    let error = refused(Some(401));
    assert!(
        matches!(error, HubError::Unauthorized { .. }) && error.to_string().contains("HF_TOKEN"),
        "{error}"
    );
    let error = refused(Some(403));
    assert!(matches!(error, HubError::Forbidden { .. }), "{error}");
    assert!(error.to_string().ends_with(&format!("ask for access at {}/owner/name", hub.url)), "{error}");
    let error = refused(Some(404));
    assert!(matches!(error, HubError::NotFound { .. }) && error.is_refused_input(), "{error}");
    let error = refused(Some(503));
    assert!(matches!(error, HubError::Unavailable { .. }) && !error.is_refused_input(), "{error}");
    hub.set(|behavior| behavior.status = None);
    let error = find("owner/name@other", &config).unwrap_err();
    assert!(matches!(&error, HubError::NotFound { name, .. } if name == "owner/name@other"), "{error}");
    let offline = ModelHubConfig { offline: true, ..config.clone() };
    let error = find("owner/name", &offline).unwrap_err();
    assert!(
        matches!(error, HubError::Offline { .. }) && error.to_string().contains("HF_HUB_OFFLINE"),
        "{error}"
    );
    let away = ModelHubConfig { url: "http://127.0.0.1:1".to_owned(), ..config };
    assert!(matches!(find("owner/name", &away), Err(HubError::Unavailable { .. })));
    assert!(!cache.path().join("models--owner--name").is_dir(), "nothing is made for what is refused");
}

#[test]
fn a_repository_that_lacks_what_the_engine_needs_is_refused_before_anything_is_fetched() {
    let cache = tempfile::tempdir().unwrap();
    let hub =
        Hub::start(&[("config.json", CONFIG), ("tokenizer.json", TOKENIZER), ("pytorch_model.bin", b"w")]);
    let config = config(&hub, &cache);
    let error = find("owner/name", &config).unwrap_err().to_string();
    assert!(error.contains("weights") && error.ends_with("it has pytorch_model.bin"), "{error}");
    hub.commit("main", "c0ffee", &[("config.json", CONFIG), ("model.safetensors", b"w")]);
    assert_eq!(find("owner/name", &config).unwrap_err().to_string(), "owner/name has no tokenizer.json");
    assert!(hub.store_requests().is_empty());
}

#[test]
fn a_split_model_has_the_files_that_its_list_names() {
    let cache = tempfile::tempdir().unwrap();
    let base: [(&str, &[u8]); 2] = [("config.json", CONFIG), ("tokenizer.json", TOKENIZER)];
    let hub = Hub::start(&[]);
    let config = config(&hub, &cache);
    let with = |files: &[(&'static str, &'static [u8])]| [&base, files].concat();
    let list = "model.safetensors.index.json";
    hub.commit("main", "c1", &with(&[(list, INDEX), ("part-1.safetensors", b"1")]));
    let error = find("owner/name", &config).unwrap_err().to_string();
    assert!(error.starts_with("owner/name has no part-2.safetensors"), "{error}");
    let escape = br#"{"weight_map": {"a": "../../../escape"}}"#;
    hub.commit("main", "c2", &with(&[(list, escape), ("part-1.safetensors", b"1")]));
    assert!(find("owner/name", &config).unwrap_err().to_string().contains("../../../escape"));
    let all = [
        (list, INDEX),
        ("part-1.safetensors", &b"1"[..]),
        ("part-2.safetensors", &b"2"[..]),
        ("x.safetensors", &b"3"[..]),
    ];
    hub.commit("main", "c3", &with(&all));
    let folder = find("owner/name", &config).unwrap().folder;
    assert_eq!(fs::read(folder.join("part-2.safetensors")).unwrap(), b"2");
    assert!(!folder.join("x.safetensors").is_file());
}

#[test]
fn a_revision_has_a_snapshot_of_its_own() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&model(b"weights of main"));
    hub.commit("v2", "beef", &model(b"weights of v2"));
    let config = config(&hub, &cache);
    for (name, expected) in [("owner/name", "weights of main"), ("owner/name@v2", "weights of v2")] {
        let found = find(name, &config).unwrap();
        assert_eq!(fs::read_to_string(found.folder.join("model.safetensors")).unwrap(), expected);
        assert_eq!(found.name.as_deref(), Some("owner/name"));
    }
    assert_eq!(fs::read_to_string(cache.path().join("models--owner--name/refs/v2")).unwrap(), "beef");
    // What both have is there once.
    assert_eq!(fs::read_dir(blobs(&cache)).unwrap().count(), 3 + 2);
}

#[test]
fn downloads_of_one_model_at_a_time_fetch_it_once() {
    let (weights, cache) = (weights(), tempfile::tempdir().unwrap());
    let hub = Hub::start(&model(&weights));
    hub.set(|behavior| behavior.cuts = vec![1_000_000]);
    let config = config(&hub, &cache);
    std::thread::scope(|scope| {
        let finding: Vec<_> = (0..4).map(|_| scope.spawn(|| find("owner/name", &config).unwrap())).collect();
        for found in finding {
            let folder = found.join().unwrap().folder;
            assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), weights);
        }
    });
    assert_eq!(hub.store_requests().len(), 2, "one that was cut, and the rest");
}

#[test]
fn a_disk_without_room_is_told_before_the_weights_are_fetched() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&model(b"w"));
    hub.set(|behavior| behavior.said_bytes = Some(1 << 60));
    let error = find("owner/name", &config(&hub, &cache)).unwrap_err();
    assert!(matches!(error, HubError::DiskFull { n_bytes, .. } if n_bytes == 1 << 60), "{error}");
    assert!(error.to_string().contains("1.0 EiB are needed"), "{error}");
    assert!(hub.store_requests().is_empty());
}

#[test]
fn a_stop_ends_a_download_and_keeps_what_came() {
    let (weights, cache) = (weights(), tempfile::tempdir().unwrap());
    let hub = Hub::start(&model(&weights));
    hub.set(|behavior| behavior.is_stalling = true);
    let (config, shutdown) = (config(&hub, &cache), Shutdown::new());
    let incomplete = blobs(&cache).join(format!("{}.incomplete", sha256(&weights)));
    std::thread::scope(|scope| {
        let finding = scope.spawn(|| find_model(Path::new("owner/name"), &config, &shutdown));
        while fs::metadata(&incomplete).map_or(0, |metadata| metadata.len()) < weights.len() as u64 / 2 {
            std::thread::yield_now();
        }
        shutdown.drain();
        assert!(matches!(finding.join().unwrap(), Err(HubError::Stopped)));
    });
    hub.set(|behavior| behavior.is_stalling = false);
    let found = find("owner/name", &config).unwrap();
    assert_eq!(fs::read(found.folder.join("model.safetensors")).unwrap(), weights);
    assert!(hub.store_requests()[1].header("range").is_some());
}

#[test]
fn a_folder_counts_before_a_name_and_other_texts_are_folders() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(&model(b"w"));
    let config = config(&hub, &cache);
    for text in ["/does/not/exist", "./owner/name", "../name", "name", "a/b/c", "src/hub"] {
        let found = find(text, &config).unwrap();
        assert_eq!(found, FoundModel { folder: PathBuf::from(text), name: None });
    }
    assert!(hub.hub_requests().is_empty());
}
