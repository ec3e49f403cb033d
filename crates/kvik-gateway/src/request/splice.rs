//! Fields of a body put in, replaced and taken out, without a parse of the rest.
//!
//! The rest of the body stays as it was written, byte for byte: unknown fields, the order of fields, the way numbers and
//! strings are written. A field that occurs several times is replaced or taken out everywhere, so that it does not matter which
//! of them an engine would take, and a name with escapes is the same name.

use bytes::{BufMut as _, Bytes, BytesMut};

use crate::request::peek::scan::{ScanError, scan_members};

/// A change of one field at the top of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edit<'a> {
    /// The field, which must need no escapes.
    pub name: &'static str,
    /// Its new value as JSON text; `None` takes the field out.
    pub value: Option<&'a str>,
}

impl<'a> Edit<'a> {
    /// Gives the field this value, whether it is there or not.
    pub fn set(name: &'static str, value: &'a str) -> Self {
        Self { name, value: Some(value) }
    }

    /// Takes the field out, if it is there.
    pub fn remove(name: &'static str) -> Self {
        Self { name, value: None }
    }
}

/// The object `text` with `edits`, whose new fields come first. Allocates the new body, once.
///
/// # Errors
/// If `text` is no JSON object, as far as a scan finds out.
pub(crate) fn splice(text: &str, edits: &[Edit<'_>]) -> Result<Bytes, ScanError> {
    let n_new_bytes = |edit: &Edit<'_>| edit.value.map_or(0, |value| edit.name.len() + value.len() + 4);
    let mut body = BytesMut::with_capacity(text.len() + edits.iter().map(n_new_bytes).sum::<usize>());
    body.put_u8(b'{');
    for Edit { name, value } in edits {
        let Some(value) = value else { continue };
        put_comma(&mut body);
        body.put_u8(b'"');
        body.put_slice(name.as_bytes());
        body.put_slice(b"\":");
        body.put_slice(value.as_bytes());
    }
    // Fields that stay side by side are copied together, with what is between them.
    let mut kept: Option<(usize, usize)> = None;
    let end = scan_members(text, |member| {
        if !edits.iter().any(|edit| edit.name == member.name) {
            let start = kept.map_or(member.place.start, |(start, _)| start);
            kept = Some((start, member.place.end));
        } else if let Some(run) = kept.take() {
            put_run(&mut body, text, run);
        }
    })?;
    if let Some(run) = kept {
        put_run(&mut body, text, run);
    }
    body.put_slice(&text.as_bytes()[end..]);
    Ok(body.freeze())
}

fn put_run(body: &mut BytesMut, text: &str, (start, end): (usize, usize)) {
    put_comma(body);
    body.put_slice(&text.as_bytes()[start..end]);
}

fn put_comma(body: &mut BytesMut) {
    if 1 < body.len() {
        body.put_u8(b',');
    }
}

/// The same for any bytes; `None` if they cannot be spliced. For the fuzz target.
#[doc(hidden)]
pub fn splice_bytes(body: &[u8], edits: &[Edit<'_>]) -> Option<Bytes> {
    splice(simdutf8::basic::from_utf8(body).ok()?, edits).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const NAMES: [&str; 6] =
        ["stream", "max_tokens", "min_tokens", "kv_transfer_params", "bootstrap_room", "\u{e9}"];

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any_text().prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::vec((any_text(), inner), 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    /// Text with many of the characters that end or hide something.
    fn any_text() -> impl Strategy<Value = String> {
        prop_oneof![".{0,8}", "[\"\\\\{}\\[\\]:, \n\u{e9}\u{1f600}a]{0,20}"]
    }

    fn name() -> impl Strategy<Value = String> {
        prop_oneof![3 => prop::sample::select(NAMES.map(str::to_owned).to_vec()), 2 => any_text()]
    }

    /// An object written by hand, so that a name can occur twice, have escapes and spaces around it.
    fn object() -> impl Strategy<Value = String> {
        let field = (name(), any::<bool>(), any_json(), "[ \t\r\n]{0,3}").prop_map(
            |(name, is_escaped, value, space)| {
                let units =
                    || name.encode_utf16().fold(String::new(), |text, unit| text + &format!("\\u{unit:04x}"));
                let name = if is_escaped {
                    format!("\"{}\"", units())
                } else {
                    Value::from(name.as_str()).to_string()
                };
                format!("{space}{name}{space}:{space}{value}{space}")
            },
        );
        (prop::collection::vec(field, 0..8), "[ \t\r\n]{0,3}")
            .prop_map(|(fields, space)| format!("{space}{{{space}{}}}{space}", fields.join(",")))
    }

    fn edits() -> impl Strategy<Value = Vec<(&'static str, Option<Value>)>> {
        let edit = (prop::sample::select(NAMES.to_vec()), prop::option::of(any_json()));
        prop::collection::vec(edit, 0..5).prop_map(|mut edits| {
            let mut seen = Vec::new();
            edits.retain(|(name, _)| {
                !seen.contains(name) && {
                    seen.push(*name);
                    true
                }
            });
            edits
        })
    }

    proptest! {
        #[test]
        fn a_splice_is_what_a_parser_would_make_of_it(body in object(), edits in edits()) {
            let mut expected: Value = serde_json::from_str(&body).unwrap();
            let fields = expected.as_object_mut().unwrap();
            for (name, value) in &edits {
                match value {
                    Some(value) => fields.insert((*name).to_owned(), value.clone()),
                    None => fields.remove(*name),
                };
            }
            let texts: Vec<(&'static str, Option<String>)> =
                edits.iter().map(|(name, value)| (*name, value.as_ref().map(Value::to_string))).collect();
            let edits: Vec<Edit<'_>> =
                texts.iter().map(|(name, value)| Edit { name, value: value.as_deref() }).collect();
            let spliced = splice(&body, &edits).unwrap();
            prop_assert_eq!(serde_json::from_slice::<Value>(&spliced).unwrap(), expected);
            // No field that was changed is there twice, whatever a parser would do with it.
            let text = std::str::from_utf8(&spliced).unwrap();
            for edit in &edits {
                let mut n_found = 0;
                scan_members(text, |member| n_found += usize::from(member.name == edit.name)).unwrap();
                prop_assert_eq!(n_found, usize::from(edit.value.is_some()));
            }
        }

        #[test]
        fn any_bytes_are_spliced_or_refused(body in prop::collection::vec(any::<u8>(), 0..200)) {
            splice_bytes(&body, &[Edit::set("stream", "false"), Edit::remove("stream_options")]);
        }

        #[test]
        fn what_is_no_object_is_refused_as_a_peek_refuses_it(body in "\\{[{}\\[\\]:,\"a-z0-9\\\\ .-]{0,40}\\}") {
            let is_object = scan_members(&body, |_| {}).is_ok();
            prop_assert_eq!(splice(&body, &[]).is_ok(), is_object);
        }
    }

    #[test]
    fn the_rest_of_a_body_stays_as_it_was_written() {
        let body = "{ \"a\" : 1.50 , \"stream\":true,\"b\":\"\\u00e9\" , \"c\":[ 1 ,2] }\n";
        let spliced = splice(body, &[Edit::set("stream", "false"), Edit::set("n", "1")]).unwrap();
        let expected = "{\"stream\":false,\"n\":1,\"a\" : 1.50,\"b\":\"\\u00e9\" , \"c\":[ 1 ,2]}\n";
        assert_eq!(spliced, expected);
        assert_eq!(splice(" {} ", &[]).unwrap(), "{} ");
        assert_eq!(splice("{\"a\":1}", &[Edit::remove("a")]).unwrap(), "{}");
        assert_eq!(splice("{}", &[Edit::set("a", "1")]).unwrap(), "{\"a\":1}");
    }

    #[test]
    fn every_occurrence_of_a_field_is_replaced_however_it_is_written() {
        let body = r#"{"kv_transfer_params":{"a":1},"x":0,"kv\u005ftransfer_params":{"b":2},"kv_transfer_params":null}"#;
        let spliced = splice(body, &[Edit::set("kv_transfer_params", "{\"c\":3}")]).unwrap();
        assert_eq!(spliced, r#"{"kv_transfer_params":{"c":3},"x":0}"#);
        assert_eq!(
            serde_json::from_slice::<Value>(&spliced).unwrap(),
            json!({"kv_transfer_params": {"c": 3}, "x": 0})
        );
    }

    #[test]
    fn a_splice_allocates_its_body_once() {
        let body = format!("{{\"prompt\":\"{}\",\"stream\":true}}", "x".repeat(10_000));
        let spliced = splice(&body, &[Edit::set("stream", "false"), Edit::set("max_tokens", "1")]).unwrap();
        // A body that had outgrown its memory would have moved to twice as much.
        assert!(spliced.try_into_mut().unwrap().capacity() < 2 * body.len());
    }
}
