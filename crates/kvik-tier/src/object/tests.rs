//! Names, URLs and options; the stores themselves are tested from outside.

use std::collections::BTreeMap;

use kvik_types::BlockHash;

use super::{ObjectOptions, ObjectTier, ObjectUrl};
use crate::error::TierError;
use crate::key::{ChunkKey, NamespaceId};

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn url(text: &str) -> ObjectUrl {
    text.parse().unwrap()
}

#[test]
fn a_chunk_has_its_place_below_the_prefix() {
    let key = ChunkKey {
        namespace: NamespaceId(BlockHash([0x11; 16])),
        chunk: BlockHash(0xab00_0000_0000_0000_0000_0000_0000_00cd_u128.to_be_bytes()),
        rank: 3,
    };
    let settings = map(&[("region", "r"), ("access_key_id", "a"), ("secret_access_key", "s")]);
    let options = ObjectOptions { settings, ..ObjectOptions::default() };
    let location = url("s3://bucket/a/b").locate(&options).unwrap();
    let chunk = key.chunk.to_string();
    let expected = format!("a/b/{}/{}/{chunk}-0003", "11".repeat(16), &chunk[..2]);
    assert_eq!(location.path(key).as_ref(), expected);
    let location = url("s3://bucket").locate(&options).unwrap();
    assert_eq!(location.path(key).as_ref(), &expected[4..]);
}

#[test]
fn wrong_urls_are_refused() {
    for text in [
        "bucket",
        "http://host/x",
        "s3://",
        "s3://key:secret@bucket",
        "s3://bucket?x=1",
        "file://host/x",
        "memory:///",
    ] {
        assert!(matches!(text.parse::<ObjectUrl>(), Err(TierError::Invalid { .. })), "{text}");
    }
}

#[test]
fn an_unknown_setting_is_refused_and_an_unknown_variable_is_not() {
    let environment = map(&[("PATH", "/bin"), ("AWS_REGION", "r"), ("AWS_PROFILE", "p")]);
    let options = ObjectOptions { environment, ..ObjectOptions::default() };
    assert!(ObjectTier::open(&url("s3://bucket"), &options).is_ok());
    let options = ObjectOptions { settings: map(&[("regoin", "r")]), ..ObjectOptions::default() };
    let error = ObjectTier::open(&url("s3://bucket"), &options).unwrap_err();
    assert!(error.to_string().contains("regoin"), "{error}");
}

#[test]
fn every_kind_of_store_can_be_opened() {
    let azure = map(&[("account_name", "a"), ("account_key", "aaaa")]);
    for (text, settings) in [("gs://bucket/x", map(&[])), ("az://container/x", azure)] {
        let options = ObjectOptions { settings, ..ObjectOptions::default() };
        ObjectTier::open(&url(text), &options).unwrap();
    }
}

#[test]
fn settings_are_printed_without_values() {
    let settings = map(&[("access_key_id", "a"), ("secret_access_key", "hunter2")]);
    let options = ObjectOptions { settings, ..ObjectOptions::default() };
    let tier = ObjectTier::open(&url("s3://bucket"), &options).unwrap();
    for printed in [format!("{options:?}"), format!("{tier:?}")] {
        assert!(!printed.contains("hunter2"), "{printed}");
    }
}
