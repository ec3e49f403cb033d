use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// What a full parse of `body` says, in the form of a peek: the fields, or that one has a wrong type.
fn expected(full: &Value) -> Option<Seen> {
    let get = |name: &str| full.get(name).filter(|value| !value.is_null());
    let is_valid = ["model", "seq_id", "prompt_cache_key", "user", "cache_salt"]
        .iter()
        .all(|name| get(name).is_none_or(Value::is_string))
        && ["max_tokens", "max_completion_tokens"].iter().all(|name| get(name).is_none_or(Value::is_u64))
        && get("stream").is_none_or(Value::is_boolean);
    let text = |name: &str| get(name).and_then(Value::as_str).map(str::to_owned);
    is_valid.then(|| Seen {
        texts: ["model", "seq_id", "prompt_cache_key", "user", "cache_salt"].map(text),
        is_stream: get("stream").and_then(Value::as_bool).unwrap_or(false),
        max_tokens: get("max_completion_tokens").or(get("max_tokens")).and_then(Value::as_u64),
        values: [get("prompt").or(get("token_ids")), get("messages"), get("sampling")]
            .map(Option::<&Value>::cloned),
    })
}

#[derive(Debug, PartialEq)]
struct Seen {
    texts: [Option<String>; 5],
    is_stream: bool,
    max_tokens: Option<u64>,
    values: [Option<Value>; 3],
}

/// A peek with its values parsed; `None` if one of them is no JSON.
fn seen(peek: &Peek<'_>) -> Option<Seen> {
    let text = |text: &Option<Cow<'_, str>>| text.as_deref().map(str::to_owned);
    let parsed = |text: Option<&str>| text.map(serde_json::from_str::<Value>).transpose().ok();
    Some(Seen {
        texts: [&peek.model, &peek.seq_id, &peek.prompt_cache_key, &peek.user, &peek.cache_salt].map(text),
        is_stream: peek.is_stream,
        max_tokens: peek.max_tokens,
        values: [parsed(peek.prompt)?, parsed(peek.messages)?, parsed(peek.sampling)?],
    })
}

/// Compares a peek at any bytes with a full parse of them.
fn check(body: &[u8]) -> Result<(), TestCaseError> {
    let full = serde_json::from_slice::<Value>(body).ok().filter(Value::is_object);
    match (Peek::read(body), full) {
        // A parser of the body refuses it.
        (_, None) => {}
        (Err(error), Some(full)) => {
            prop_assert!(expected(&full).is_none(), "refused: {}", error.message);
            prop_assert!(error.param.is_some());
        }
        (Ok(peek), Some(full)) => prop_assert_eq!(seen(&peek), expected(&full)),
    }
    Ok(())
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any_text().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((any_text(), inner), 0..6)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Text with many of the characters that end or hide something.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![".{0,12}", "[\"\\\\{}\\[\\]:, \n\u{e9}\u{1f600}a]{0,40}"]
}

fn field_name() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(Field::ALL.map(|field| field.name().to_owned()).to_vec()),
        1 => any_text(),
    ]
}

/// A value that may or may not fit the field.
fn field_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any_json(),
        any_text().prop_map(Value::from),
        Just(json!([{"role": "user", "content": "a\"b\\"}])),
        (0..5_u64).prop_map(Value::from),
    ]
}

/// An object written by hand, so that a name can occur twice, have escapes and spaces around it.
fn object() -> impl Strategy<Value = String> {
    let field = (field_name(), any::<bool>(), field_value(), "[ \t\r\n]{0,3}").prop_map(
        |(name, is_escaped, value, space)| {
            let name = if is_escaped { escaped(&name) } else { Value::from(name).to_string() };
            format!("{space}{name}{space}:{space}{value}{space}")
        },
    );
    (prop::collection::vec(field, 0..12), "[ \t\r\n]{0,3}")
        .prop_map(|(fields, space)| format!("{space}{{{space}{}}}{space}", fields.join(",")))
}

/// A string of nothing but escapes.
fn escaped(text: &str) -> String {
    let units = text.encode_utf16().fold(String::new(), |units, unit| units + &format!("\\u{unit:04x}"));
    format!("\"{units}\"")
}

proptest! {
    #[test]
    fn a_peek_sees_what_a_full_parse_sees(body in object()) {
        prop_assert!(serde_json::from_str::<Value>(&body).is_ok_and(|full| full.is_object()));
        check(body.as_bytes())?;
    }

    #[test]
    fn a_peek_agrees_with_a_full_parse_after_any_change_of_bytes(
        body in object(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut body = body.into_bytes();
        for (place, byte) in changes {
            let place = place.index(body.len());
            body[place] = byte;
        }
        check(&body)?;
    }

    #[test]
    fn every_beginning_of_an_object_is_refused(body in object()) {
        let whole = body.trim_end().len();
        for end in 0..whole {
            prop_assert!(Peek::read(&body.as_bytes()[..end]).is_err(), "{}", &body.as_bytes()[..end].escape_ascii());
        }
    }

    #[test]
    fn whatever_follows_an_object_is_refused(body in object(), rest in "[{}\\[\\]\",:a0]") {
        let body = [body, rest].concat();
        prop_assert!(Peek::read(body.as_bytes()).is_err());
    }

    #[test]
    fn any_bytes_are_read_or_refused(body in prop::collection::vec(any::<u8>(), 0..300)) {
        check(&body)?;
    }

    #[test]
    fn any_text_like_json_is_read_or_refused(body in "\\{[{}\\[\\]:,\"a-z0-9\\\\ .-]{0,80}\\}") {
        check(body.as_bytes())?;
    }

    #[test]
    fn strings_end_where_a_parser_ends_them(text in any_text(), rest in any_text()) {
        let written = Value::from(text).to_string();
        let all = format!("{written}{rest}");
        prop_assert_eq!(scan::string_end(all.as_bytes(), 1), Some(written.len()));
    }

    #[test]
    fn the_next_structure_is_found_at_every_distance(space in "[a-z0-9,:. \u{e9}]{0,100}", byte in "[\"{}\\[\\]]") {
        let text = format!("{space}{byte}{{");
        prop_assert_eq!(scan::next_structure(text.as_bytes(), 0), Some(space.len()));
        prop_assert_eq!(scan::next_structure(space.as_bytes(), 0), None);
    }
}

#[test]
fn an_error_names_the_field() {
    for (body, param) in [
        (r#"{"max_tokens": "ten"}"#, "max_tokens"),
        (r#"{"max_completion_tokens": -1}"#, "max_completion_tokens"),
        (r#"{"stream": 1}"#, "stream"),
        (r#"{"model": {}}"#, "model"),
        (r#"{"seq_id": 7}"#, "seq_id"),
    ] {
        let error = Peek::read(body.as_bytes()).unwrap_err();
        assert_eq!(error.param, Some(param));
        assert!(error.message.contains(param), "{}", error.message);
    }
}

#[test]
fn bodies_that_are_no_objects_are_refused_with_the_place() {
    for (body, place) in [
        ("", "`{` at byte 0"),
        ("[]", "`{` at byte 0"),
        ("\"x\"", "`{` at byte 0"),
        ("{", "a field's name at byte 1"),
        ("{} {}", "the end of the body at byte 3"),
        ("{\"a\":}", "a value at byte 5"),
        ("{\"a\":tru}", "a value at byte 5"),
        ("{\"a\" 1}", "`:` at byte 5"),
        ("{\"a\":1 \"b\":2}", "`,` or `}` at byte 7"),
        ("{\"a\":1,}", "a field's name at byte 7"),
        ("{\"a\":\"\\\"}", "the end of the string at byte 5"),
        ("{\"a\":[{}}", "`,` or `}` at byte 9"),
        ("{\"a\":[[1]", "the closing bracket of the value at byte 5"),
        ("{\"\\x\":1}", "a field's name at byte 1"),
    ] {
        let error = Peek::read(body.as_bytes()).unwrap_err();
        assert_eq!(error.param, None, "{body}");
        assert!(error.message.ends_with(place), "{body}: {}", error.message);
    }
    assert!(Peek::read(b"{\"other\": \"\xff\"}").is_err());
}

#[test]
fn a_nesting_without_end_takes_no_stack() {
    let deep = 1 << 20;
    let body = format!("{{\"a\":{}{},\"user\":\"u\"}}", "[{\"b\":".repeat(deep), "}]".repeat(deep));
    assert_eq!(Peek::read(body.as_bytes()).unwrap().user.as_deref(), Some("u"));
    assert!(Peek::read(&body.as_bytes()[..body.len() / 2]).is_err());
}

#[test]
fn strings_are_borrowed_unless_they_have_escapes() {
    let peek = Peek::read(br#"{"model":"a/b","user":"\u00e9","prompt":"x \" y"}"#).unwrap();
    assert!(matches!(peek.model, Some(Cow::Borrowed("a/b"))));
    assert_eq!(peek.user.as_deref(), Some("\u{e9}"));
    assert_eq!(peek.prompt, Some(r#""x \" y""#));
}
