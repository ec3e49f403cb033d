//! Tiers in libraries: the example in C, and one whose every answer is nonsense.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::path::{Path, PathBuf};
use std::process::Command;

use kvik_tier::conformance::{self, Traits, content, content_key};
use kvik_tier::{
    Checksummed, FaultRates, Faulty, GetItem, GetOutcome, PluginTier, PutOutcome, RemoteOptions, RemoteUrl,
    Tier, TierExt as _, TierHealth, TierKind, open_remote,
};
use tempfile::TempDir;

const CAPACITY_BYTES: u64 = 64 << 20;

const TRAITS: Traits = Traits {
    knows_keys: false,
    knows_lengths: false,
    knows_counts: false,
    counts_deletes: true,
    capacity_bytes: Some(CAPACITY_BYTES),
    max_chunk_bytes: 4 << 20,
};

/// A library that was compiled from C.
struct Compiled {
    _folder: TempDir,
    path: PathBuf,
}

impl Compiled {
    fn of(source: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tier.so");
        let include = c_folder().join("include");
        let status = Command::new("cc")
            .args([
                "-std=c11",
                "-Wall",
                "-Wextra",
                "-Wpedantic",
                "-Werror",
                "-O1",
                "-shared",
                "-fPIC",
                "-pthread",
                "-I",
            ])
            .args([include.as_path(), source, Path::new("-o"), path.as_path()])
            .status();
        assert!(status.unwrap().success(), "{}", source.display());
        Self { _folder: folder, path }
    }

    fn example() -> Self {
        Self::of(&c_folder().join("examples/map_tier.c"))
    }

    fn of_test(name: &str) -> Self {
        Self::of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugin").join(name))
    }

    fn url(&self, options: &str) -> String {
        format!("plugin://{}?{options}", self.path.display())
    }

    fn open(&self, options: &str) -> PluginTier {
        PluginTier::open(&self.url(options).parse().unwrap()).unwrap()
    }
}

fn c_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bindings/c")
}

#[test]
fn the_example_conforms_bare_and_with_checksums() {
    let example = Compiled::example();
    let options = format!("max_bytes={CAPACITY_BYTES}");
    conformance::run(&|| Box::new(example.open(&options)), &TRAITS);
    let unbounded = Traits { capacity_bytes: None, ..TRAITS };
    conformance::run(&|| Box::new(Checksummed::new(example.open(""))), &unbounded);
}

#[test]
fn whatever_fails_around_the_example_a_hit_is_what_was_stored() {
    let example = Compiled::example();
    let rates =
        FaultRates { fail: 50, lose: 30, tear: 30, shorten: 30, flip: 30, mix: 30, ..FaultRates::default() };
    let make = |seed: u64| -> Box<dyn Tier> {
        Box::new(Checksummed::new(Faulty::new(example.open(""), rates.clone(), seed)))
    };
    let n_hits = conformance::run_under_faults(&make, 0..8);
    assert!(n_hits > 100, "{n_hits} hits");
}

#[test]
fn a_url_opens_it_and_two_of_them_are_two_tiers() {
    let example = Compiled::example();
    let url = example.url("max_bytes=1000").parse::<RemoteUrl>().unwrap();
    assert_eq!(url.kind(), TierKind::Plugin);
    let open = || open_remote(&url, &RemoteOptions::default()).unwrap();
    let (one, other) = (open(), open());
    assert!(one.put_one(content_key(0), &content(content_key(0), 800)).is_present());
    assert!(matches!(other.get_one(content_key(0), &mut [0; 800]), GetOutcome::Miss));
    assert!(matches!(one.put_one(content_key(1), &[7; 201]), PutOutcome::NoRoom));
}

#[test]
fn a_library_that_does_not_open_says_why() {
    let example = Compiled::example();
    let other_version = Compiled::of_test("other_version.c");
    let not_a_tier = Compiled::of_test("not_a_tier.c");
    for (url, reason) in [
        ("plugin:///nowhere/tier.so".to_owned(), "/nowhere/tier.so"),
        (example.url("colour=crimson"), "max_bytes=NUMBER"),
        (other_version.url(""), "version 2"),
        (not_a_tier.url(""), "kvik_tier_open"),
    ] {
        let error = PluginTier::open(&url.parse().unwrap()).unwrap_err();
        assert!(error.to_string().contains(reason) && !error.is_transient(), "{error}");
        assert!(!error.to_string().contains("crimson"), "{error}");
    }
}

#[test]
fn nonsense_of_a_library_is_no_hit_and_does_no_harm() {
    let library = Compiled::of_test("nonsense.c");
    let n_kinds = 8;
    for kind in 0..n_kinds {
        let tier = library.open(&format!("{kind}"));
        let mut buffer = vec![0; 1000];
        let outcome = tier.get_one(content_key(0), &mut buffer);
        assert!(!outcome.is_hit() && !matches!(outcome, GetOutcome::Pending), "{kind}: {outcome:?}");
        let mut head = [0; 100];
        let mut batch = [GetItem::with_head(content_key(0), &mut head, u64::MAX - 5, &mut buffer)];
        tier.get(&mut batch);
        assert!(!batch[0].outcome.is_hit(), "{kind}: {:?}", batch[0].outcome);
        let outcome = tier.put_one(content_key(0), &[1; 100]);
        assert!(matches!(outcome, PutOutcome::Failed(_)), "{kind}: {outcome:?}");
        assert!(tier.delete(&[content_key(0)]).is_err());
        assert!(tier.contains(&[content_key(0)], &mut [false]).is_err());
        assert!(tier.flush().is_err());
        assert!(matches!(tier.stat().health, TierHealth::Down(_)));
    }
}
