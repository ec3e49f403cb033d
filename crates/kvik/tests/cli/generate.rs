//! `kvik generate` on the bundled model.

use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use super::support::{bundled_folder, kvik, run, run_with_stdin};

const PROMPT: &str = "Tom and his dog went to the park.";

/// Runs `generate` on [`PROMPT`] with `options`, separated by spaces, and returns its JSON.
fn generate_json(options: &str) -> Value {
    let arguments = ["generate", "--prompt", PROMPT, "--json"];
    run(arguments.into_iter().chain(options.split_whitespace())).json()
}

#[test]
fn the_text_of_a_greedy_run_is_all_that_is_printed() {
    let text = run(["generate", "--prompt", PROMPT, "--max-tokens", "48"]).success();
    insta::assert_snapshot!(text, @r"
     He saw a big tree with a hole in it. He wanted to climb it, but he was too small. He tried to climb the tree, but he was too small.
    Then, he saw a boy named Tim. Tim wanted
    ");
}

#[test]
fn a_model_folder_gives_the_same_as_the_bundled_model() {
    let folder = bundled_folder();
    let arguments = ["generate", "--prompt", PROMPT, "--max-tokens", "24"];
    let from_folder =
        run(arguments.iter().map(AsRef::as_ref).chain(["--model".as_ref(), folder.as_os_str()]));
    assert_eq!(from_folder.success(), run(arguments).success());
}

#[test]
fn json_is_one_object_on_one_line() {
    let text = run(["generate", "--prompt", PROMPT, "--max-tokens", "8", "--json"]).success();
    assert!(text.starts_with(r#"{"model":"kvik-tiny","prompt_ids":[1,1315,"#), "{text}");
    assert_eq!(text.lines().count(), 1);
    let mut report: Value = serde_json::from_str(&text).unwrap();
    for name in ["ttft_ms", "tokens_per_s"] {
        let timing = &mut report["timings"][name];
        assert!(timing.as_f64().is_some_and(|value| 0.0 < value), "{name}");
        *timing = json!("[timing]");
    }
    insta::assert_snapshot!(serde_json::to_string_pretty(&report).unwrap());
}

#[test]
fn a_single_token_has_no_rate() {
    let report = generate_json("--max-tokens 1");
    assert_eq!(report["token_ids"], json!([376]));
    assert_eq!(report["timings"]["tokens_per_s"], Value::Null);
}

#[test]
fn log_probabilities_are_reported_for_each_token() {
    let report = generate_json("--max-tokens 2 --logprobs 2");
    let steps = report["logprobs"].as_array().unwrap();
    assert_eq!(steps.len(), 2);
    for (step, token_id) in steps.iter().zip(report["token_ids"].as_array().unwrap()) {
        assert_eq!(&step["token_id"], token_id);
        // Greedy: the chosen token is the most likely one.
        assert_eq!(&step["top"][0]["token_id"], token_id);
        assert_eq!(step["top"].as_array().unwrap().len(), 2);
        assert!(step["logprob"].as_f64().unwrap() < 0.0);
    }
}

#[test]
fn several_outputs_are_printed_one_after_another() {
    let options = "--n 2 --max-tokens 12 --temperature 0.8 --seed 7";
    let report = generate_json(options);
    let choices = report["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    assert_eq!(choices[0]["text"], report["text"]);
    assert_ne!(choices[0]["text"], choices[1]["text"]);

    let arguments = ["generate", "--prompt", PROMPT];
    let text = run(arguments.into_iter().chain(options.split_whitespace())).success();
    let expected = format!(
        "--- 1 of 2 ---\n{}\n--- 2 of 2 ---\n{}\n",
        choices[0]["text"].as_str().unwrap(),
        choices[1]["text"].as_str().unwrap()
    );
    assert_eq!(text, expected);
}

#[test]
fn a_random_run_reports_the_seed_that_repeats_it() {
    let first = generate_json("--max-tokens 16 --temperature 1");
    let seed = first["seed"].as_u64().unwrap();
    let again = generate_json(&format!("--max-tokens 16 --temperature 1 --seed {seed}"));
    assert_eq!(again["token_ids"], first["token_ids"]);
}

#[test]
fn a_stop_string_ends_the_text_before_it() {
    let report = generate_json("--stop tree --stop nothing");
    assert_eq!(report["text"], " He saw a big ");
    assert_eq!(report["finish_reason"], "stop");
}

#[test]
fn a_chat_is_rendered_with_the_models_template() {
    let system =
        "Note 1: In Glenby there is a doctor named Lily. Lily has a red kite, and it is in the barn.";
    let report = run([
        "generate",
        "--chat",
        "--system",
        system,
        "--prompt",
        "Who has the red kite?",
        "--max-tokens",
        "2",
        "--json",
    ])
    .json();
    assert_eq!(report["text"], " Lily.");
    // The template starts with the token that plain prompts get from the tokenizer: once, not twice.
    assert_eq!(report["prompt_ids"][0], 1);
    assert_ne!(report["prompt_ids"][1], 1);
}

#[test]
fn standard_input_is_the_prompt_less_its_last_line_break() {
    let arguments = ["generate", "--prompt", "-", "--max-tokens", "4", "--json"];
    let expected = &generate_json("--max-tokens 4")["prompt_ids"];
    for line_break in ["", "\n", "\r\n"] {
        let report = run_with_stdin(arguments, format!("{PROMPT}{line_break}").as_bytes()).json();
        assert_eq!(&report["prompt_ids"], expected, "{line_break:?}");
    }
    let report = run_with_stdin(arguments, format!("{PROMPT}\n\n").as_bytes()).json();
    assert_ne!(&report["prompt_ids"], expected);
}

#[test]
fn a_prompt_may_start_with_a_dash() {
    let text = run(["generate", "--prompt", "--- Once upon", "--max-tokens", "2"]).success();
    assert!(text.ends_with('\n'), "{text}");
}

#[test]
fn every_kv_dtype_and_number_of_threads_generates() {
    for options in ["--kv-dtype f16", "--kv-dtype bf16", "--threads 1", "--threads 3", "--kv-blocks 2"] {
        let report = generate_json(&format!("--max-tokens 4 {options}"));
        assert_eq!(report["text"], " He saw a big", "{options}");
    }
}

#[test]
fn a_reader_that_leaves_early_ends_the_run_quietly() {
    let mut child = kvik()
        .args(["generate", "--prompt", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The run starts only after its prompt, when its output has no reader any more.
    drop(child.stdout.take());
    child.stdin.take().unwrap().write_all(PROMPT.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}

#[cfg(target_os = "linux")]
#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output = kvik().args(["generate", "--prompt", PROMPT]).stdout(full).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(message.starts_with("error: failed to write to standard output: "), "{message}");
}
