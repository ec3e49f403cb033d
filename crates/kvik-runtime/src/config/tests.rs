use serde::{Deserialize, Serialize};
use serde_json::json;

use super::*;
use crate::RuntimeError;
use crate::secret::{Secret, SecretUrl};

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Example {
    port: u16,
    name: Option<String>,
    limits: Limits,
    peers: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    body_bytes: u64,
    ratio: f64,
}

impl Default for Example {
    fn default() -> Self {
        Self { port: 8080, name: None, limits: Limits { body_bytes: 100, ratio: 0.25 }, peers: Vec::new() }
    }
}

fn sources(yaml: &str, environment: &[(&str, &str)], flags: Value) -> Sources {
    Sources {
        file: Some(("kvik.yaml".to_owned(), serde_saphyr::from_str(yaml).unwrap())),
        environment: environment.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
        flags,
    }
}

#[test]
fn a_later_layer_wins_and_every_value_knows_its_origin() {
    let sources = sources(
        "example: {port: 1, name: file, limits: {ratio: 0.5}, peers: [a, b]}",
        &[("KVIK_EXAMPLE_PORT", "2"), ("KVIK_EXAMPLE_LIMITS_BODY_BYTES", "7"), ("KVIK_OTHER_PORT", "9")],
        json!({"port": 3}),
    );
    let effective = sources.load::<Example>("example").unwrap();
    let expected = Example {
        port: 3,
        name: Some("file".into()),
        limits: Limits { body_bytes: 7, ratio: 0.5 },
        peers: vec!["a".into(), "b".into()],
    };
    assert_eq!(effective.value, expected);
    assert_eq!(effective.fields["port"].1, Origin::Flag);
    assert_eq!(effective.fields["name"].1.to_string(), "file kvik.yaml");
    assert_eq!(
        effective.fields["limits.body_bytes"].1.to_string(),
        "environment KVIK_EXAMPLE_LIMITS_BODY_BYTES"
    );
}

#[test]
fn a_variable_that_others_know_sets_its_field_unless_our_own_does() {
    #[derive(Default, Serialize, Deserialize)]
    struct Traced {
        tracing: crate::telemetry::TracingConfig,
    }
    let standard = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://standard:4318");
    let own = ("KVIK_TRACED_TRACING_OTLP_ENDPOINT", "http://own:4318");
    for (environment, expected) in [(vec![standard], standard), (vec![standard, own], own)] {
        let yaml = "traced: {tracing: {otlp_endpoint: 'http://file:4318'}}";
        let effective = sources(yaml, &environment, Value::Null).load::<Traced>("traced").unwrap();
        assert_eq!(effective.value.tracing.otlp_endpoint.as_deref(), Some(expected.1));
        let origin = &effective.fields["tracing.otlp_endpoint"].1;
        assert_eq!(*origin, Origin::Environment(expected.0.to_owned()));
    }
}

#[test]
fn no_source_gives_the_defaults() {
    let effective = Sources::default().load::<Example>("example").unwrap();
    assert_eq!(effective.value, Example::default());
    assert!(effective.fields.values().all(|(_, origin)| *origin == Origin::Default));
}

#[test]
fn an_unknown_field_is_refused_with_the_known_ones() {
    let error =
        sources("example: {limits: {ratoi: 1}}", &[], Value::Null).load::<Example>("example").unwrap_err();
    let message = error.to_string();
    assert_eq!(message, "file kvik.yaml: `limits.ratoi` is unknown; allowed: body_bytes, ratio");
}

#[test]
fn an_unknown_section_is_refused_with_those_that_there_are() {
    let check = |yaml: &str| sources(yaml, &[], Value::Null).check_sections(&["example", "other"]);
    for sound in ["{}", "example: {}", "other: {port: 1}\nexample: null"] {
        check(sound).unwrap();
    }
    Sources::default().check_sections(&[]).unwrap();
    let message = |yaml: &str| check(yaml).unwrap_err().to_string();
    let allowed = "allowed: the sections example, other";
    assert_eq!(message("exmaple: {port: 1}"), format!("file kvik.yaml: `exmaple` is unknown; {allowed}"));
    assert_eq!(message("[1]"), format!("file kvik.yaml: `the file` is [\"(hidden)\"]; {allowed}"));
}

#[test]
fn a_value_of_the_wrong_type_names_field_value_and_origin() {
    let sources = sources("{}", &[("KVIK_EXAMPLE_PORT", "eighty")], Value::Null);
    let error = sources.load::<Example>("example").unwrap_err();
    let RuntimeError::InvalidField { origin, field, value, .. } = &error else { panic!("{error}") };
    assert_eq!(
        (origin.as_str(), field.as_str(), value.as_str()),
        ("environment KVIK_EXAMPLE_PORT", "port", "\"eighty\"")
    );
}

#[test]
fn a_scalar_where_a_map_belongs_is_refused() {
    let error = sources("example: {limits: 3}", &[], Value::Null).load::<Example>("example").unwrap_err();
    assert_eq!(error.to_string(), "file kvik.yaml: `limits` is 3; allowed: a map of body_bytes, ratio");
}

#[test]
fn a_reload_lists_what_changed() {
    let load = |yaml| sources(yaml, &[], Value::Null).load::<Example>("example").unwrap().value;
    let changed = changes(&load("example: {port: 1}"), &load("example: {port: 2}")).unwrap();
    assert_eq!(changed, [FieldChange { field: "port".into(), before: json!(1), after: json!(2) }]);
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Guarded {
    token: Option<Secret>,
    server: Option<SecretUrl>,
    plain_server: Option<String>,
    options: BTreeMap<String, Secret>,
    keys: Vec<Key>,
    limit: u64,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Key {
    name: String,
    digest: Secret,
}

const GUARDED: &str = "guarded: {token: canary, server: 'redis://u:canary@h', plain_server: 'http://u:canary@h', \
    options: {secret: canary}, keys: [{name: me, digest: canary}]}";

#[test]
fn fields_differences_and_debug_forms_have_no_secret() {
    let load = |yaml: &str| sources(yaml, &[], Value::Null).load::<Guarded>("guarded").unwrap();
    let effective = load(GUARDED);
    assert_eq!(effective.value.token, Some("canary".into()));
    assert_eq!(effective.fields["token"].0, json!("(hidden)"));
    assert_eq!(effective.fields["server"].0, json!("redis://(hidden)@h"));
    assert_eq!(effective.fields["options"].0, json!({"secret": "(hidden)"}));
    let plain = load("{}").value;
    let mut changed = changes(&plain, &effective.value).unwrap();
    assert_eq!(changed.len(), 5);
    let other = load(&GUARDED.replace("canary", "canary2")).value;
    // What differs in nothing but a secret is a change all the same.
    changed.extend(changes(&effective.value, &other).unwrap());
    assert_eq!(changed.len(), 10);
    assert_eq!(changes(&effective.value, &load(GUARDED).value).unwrap(), []);
    let sources = sources(GUARDED, &[("KVIK_GUARDED_TOKEN", "canary")], json!({"token": "canary"}));
    // A login in a field that is none for secrets shows in the structure itself alone.
    let Guarded { token, server, options, keys, .. } = &effective.value;
    let shown =
        format!("{sources:?} {:?} {changed:?} {token:?} {server:?} {options:?} {keys:?}", effective.fields);
    assert!(!shown.contains("canary"), "{shown}");
}

#[test]
fn errors_have_no_secret() {
    for yaml in [
        "guarded: {token: 31337}",
        "guarded: {token: [31337]}",
        "guarded: {server: 31337}",
        "guarded: {options: 31337}",
        "guarded: {options: {key: 31337}}",
        "guarded: {keys: '31337'}",
        "guarded: {keys: ['31337']}",
        "guarded: {keys: [31337]}",
        "guarded: {keys: [{name: me, digest: 31337}]}",
        "guarded: {keys: [{name: me, digest: '31337', more: '31337'}]}",
        "guarded: 'redis://u:31337@h'",
    ] {
        let error = sources(yaml, &[], Value::Null).load::<Guarded>("guarded").unwrap_err().to_string();
        assert!(!error.contains("31337") && error.starts_with("file kvik.yaml: `"), "{yaml}: {error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kvik.yaml");
    for text in
        ["guarded:\n  token: 31337\n  limit: [", "31337", "- 31337", "guarded: {token: 31337, token: 1}"]
    {
        std::fs::write(&path, text).unwrap();
        let checked = Sources::read(Some(&path)).and_then(|sources| sources.check_sections(&["guarded"]));
        let error = checked.unwrap_err().to_string();
        assert!(!error.contains("31337") && error.contains("kvik.yaml"), "{error}");
    }
}

#[test]
fn a_variable_is_the_secret_as_it_stands_and_text_where_no_number_fits() {
    for text in ["0123", "1e5", "a # b", "'quoted'", "null", "x: y"] {
        let variables = [("KVIK_GUARDED_TOKEN", text), ("KVIK_GUARDED_PLAIN_SERVER", "42")];
        let loaded = sources("{}", &variables, Value::Null).load::<Guarded>("guarded").unwrap().value;
        assert_eq!(loaded.token.as_ref().map(Secret::expose), Some(text));
        assert_eq!(loaded.plain_server.as_deref(), Some("42"));
    }
}
