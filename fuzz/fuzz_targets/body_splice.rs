//! Fields of a request's body put in, replaced and taken out.
//!
//! The first byte chooses the edits; the rest is the body. A body that a parser takes must become what the parser would have made
//! of it, and one that a splice takes must have every changed field once or not at all.

#![no_main]

use kvik_gateway::{Edit, splice_bytes};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

const EDITS: [Edit<'static>; 6] = [
    Edit { name: "stream", value: Some("false") },
    Edit { name: "max_tokens", value: Some("1") },
    Edit { name: "stream_options", value: None },
    Edit { name: "max_completion_tokens", value: None },
    Edit { name: "min_tokens", value: None },
    Edit { name: "kv_transfer_params", value: Some("{\"do_remote_decode\":true}") },
];

fuzz_target!(|data: &[u8]| {
    let Some((chosen, body)) = data.split_first() else { return };
    let edits: Vec<Edit<'_>> = EDITS
        .into_iter()
        .enumerate()
        .filter(|(bit, _)| (chosen >> bit) & 1 == 1)
        .map(|(_, edit)| edit)
        .collect();
    let spliced = splice_bytes(body, &edits);
    let Ok(Value::Object(mut expected)) = serde_json::from_slice::<Value>(body) else { return };
    let spliced = spliced.expect("what a parser takes is spliced");
    for edit in &edits {
        match edit.value {
            Some(value) => expected.insert(edit.name.to_owned(), serde_json::from_str(value).expect("JSON")),
            None => expected.remove(edit.name),
        };
    }
    let parsed: Value = serde_json::from_slice(&spliced).expect("a splice of JSON is JSON");
    assert_eq!(parsed, Value::Object(expected));
});
