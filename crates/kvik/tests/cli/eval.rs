//! `kvik eval`.

use std::path::Path;

use serde_json::Value;

use super::support::run;

/// The first questions of the bundled model's set, in a file of their own.
fn questions(folder: &Path, n_questions: usize) -> String {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/kvik-tiny/notes_qa.jsonl");
    let all = std::fs::read_to_string(all).unwrap();
    let file = folder.join("questions.jsonl");
    std::fs::write(&file, all.lines().take(n_questions).collect::<Vec<_>>().join("\n")).unwrap();
    file.display().to_string()
}

fn notes(file: &str, arguments: &[&str]) -> Value {
    run([&["eval", "notes", "--json", "--file", file], arguments].concat()).json()
}

#[test]
fn notes_that_are_put_together_answer_as_notes_that_are_read_if_every_token_is_computed() {
    let folder = tempfile::tempdir().unwrap();
    let file = questions(folder.path(), 12);
    let full = notes(&file, &[]);
    let fields: Vec<&String> = full.as_object().unwrap().keys().collect();
    assert_eq!(fields.len(), 5, "{full}");
    assert_eq!(
        (&full["of"], &full["recomputed_share"], &full["flop_share"]),
        (&12.into(), &1.0.into(), &1.0.into())
    );
    assert!(full["right"].as_u64().unwrap() > 6, "{full}");
    let all = notes(&file, &["--blend", "all"]);
    assert_eq!((&all["right"], &all["recomputed_share"]), (&full["right"], &1.0.into()));
    let none = notes(&file, &["--blend", "none"]);
    assert_eq!(none["recomputed_share"], 0.0);
    assert!(none["flop_share"].as_f64().unwrap() < 0.5, "{none}");
    let coded = notes(&file, &["--codec", "lossless"]);
    assert_eq!(coded["right"], full["right"], "the same KV: {coded}");
}

#[test]
fn bad_questions_selectors_and_codecs_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = questions(folder.path(), 1);
    let broken = folder.path().join("broken.jsonl");
    std::fs::write(&broken, "{\"prompt\": 7}\n").unwrap();
    for (arguments, code, word) in [
        (vec!["--file", "/no/such/file"], 1, "open questions"),
        (vec!["--file", broken.to_str().unwrap()], 3, "line 1"),
        (vec!["--file", env!("CARGO_BIN_EXE_kvik")], 3, "UTF-8"),
        (vec!["--file", &file, "--blend", "first"], 2, "first:TOKENS"),
        (vec!["--file", &file, "--codec", "zip"], 3, "cachegen"),
    ] {
        let answer = run([&["eval", "notes"], arguments.as_slice()].concat());
        assert_eq!(answer.exit_code, Some(code), "{arguments:?}: {}", answer.stderr);
        assert!(answer.stderr.contains(word), "{arguments:?}: {}", answer.stderr);
    }
}
