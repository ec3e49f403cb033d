//! Options and prompts that are refused: one line that names the field, exit code 2 or 3.

use std::ffi::OsString;

use super::support::{run, run_with_stdin};

/// Runs `generate` on a prompt with `options`, separated by spaces, which must be refused.
#[track_caller]
fn refusal(options: &str) -> String {
    let arguments = ["generate", "--prompt", "Once"];
    run(arguments.into_iter().chain(options.split_whitespace())).failure(3)
}

/// Runs `generate` with options that the argument parser refuses; returns its first line.
#[track_caller]
fn usage_error(options: &str) -> String {
    let answer = run(std::iter::once("generate").chain(options.split_whitespace()));
    assert_eq!((answer.exit_code, answer.stdout.as_str()), (Some(2), ""), "{answer:?}");
    answer.stderr.lines().next().unwrap().to_owned()
}

#[test]
fn values_out_of_their_range_are_refused() {
    for (options, message) in [
        ("--max-tokens 0", "`max_tokens` is 0; allowed: at least 1"),
        ("--temperature -1", "`temperature` is -1; allowed: 0 to 100"),
        ("--temperature NaN", "`temperature` is NaN; allowed: 0 to 100"),
        ("--temperature inf", "`temperature` is inf; allowed: 0 to 100"),
        ("--top-p 0", "`top_p` is 0; allowed: above 0 to 1"),
        ("--min-p 1.5", "`min_p` is 1.5; allowed: 0 to 1"),
        ("--repetition-penalty 0", "`repetition_penalty` is 0; allowed: above 0 to 100"),
        ("--presence-penalty -3", "`presence_penalty` is -3; allowed: -2 to 2"),
        ("--frequency-penalty 3", "`frequency_penalty` is 3; allowed: -2 to 2"),
        ("--n 0", "`n` is 0; allowed: 1 to 128"),
        ("--json --logprobs 2000", "`logprobs` is 2000; allowed: 0 to 1024"),
    ] {
        assert_eq!(refusal(options), format!("error: failed to read the options: {message}"));
    }
}

#[test]
fn a_store_that_cannot_be_had_is_told_before_anything_starts() {
    for (options, message) in [
        (["--ram", "banana"], "`store.ram` is banana; allowed: a size such as 2GiB, 512MiB or 1073741824"),
        (
            ["--nvme", "x"],
            "`store.nvme` is x; allowed: DIR:SIZE, such as /var/cache/kvik:20GiB, or a block device, such as \
             /dev/nvme1n1 or /dev/nvme1n1:200GiB",
        ),
    ] {
        let answer = run(std::iter::once("up").chain(options));
        assert_eq!((answer.exit_code, answer.stdout.as_str()), (Some(3), ""), "{answer:?}");
        let expected = format!("error: failed to read the settings of the KV store: {message}\n");
        assert_eq!(answer.stderr, expected);
    }
}

#[test]
fn settings_that_only_the_opening_of_a_store_can_judge_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("store.sock").display().to_string();
    let short = folder.path().join("short.key");
    std::fs::write(&short, "short").unwrap();
    let disk = format!("{}:4096", folder.path().join("disk").display());
    let key = format!("tiers.digest_key_file={}", short.display());
    let serve = |options: &[&str]| {
        let answer = run(["store", "serve", "--socket", &socket].iter().chain(options));
        (answer.exit_code, answer.stderr.lines().last().unwrap().to_owned())
    };
    for options in [
        &["--ram", "1"][..],
        &["--ram", "1MiB", "--nvme", &disk],
        &["--ram", "1MiB", "--set", &key],
        &["--ram", "1MiB", "--set", "tiers.chunk_tokens=0"],
    ] {
        let (exit_code, message) = serve(options);
        assert_eq!(exit_code, Some(3), "{message}");
        assert!(message.contains("; allowed: "), "{message}");
    }
    // A file that is not there is no refused setting.
    let absent = format!("tiers.digest_key_file={}", folder.path().join("absent").display());
    let (exit_code, message) = serve(&["--ram", "1MiB", "--set", &absent]);
    assert_eq!(exit_code, Some(1), "{message}");
}

#[test]
fn a_bad_command_line_is_told_by_the_argument_parser() {
    for (options, message) in [
        ("--prompt x --kv-dtype int4", "error: invalid value 'int4' for '--kv-dtype <TYPE>'"),
        ("--prompt x --bogus", "error: unexpected argument '--bogus' found"),
        ("", "error: the following required arguments were not provided:"),
        ("--prompt x --system y", "error: the following required arguments were not provided:"),
        ("--prompt x --logprobs 2", "error: the following required arguments were not provided:"),
        (
            "--prompt x --max-tokens many",
            "error: invalid value 'many' for '--max-tokens <N>': invalid digit found in string",
        ),
        ("--prompt x --threads 0", "error: invalid value '0' for '--threads <N>': 0 is not in 1..=1024"),
    ] {
        assert_eq!(usage_error(options), message, "{options}");
    }
}

#[test]
fn an_empty_prompt_is_refused() {
    let expected = "error: failed to read the prompt: `prompt` is empty; allowed: at least one character";
    assert_eq!(run(["generate", "--prompt", ""]).failure(3), expected);
    assert_eq!(run_with_stdin(["generate", "--prompt", "-"], b"\n").failure(3), expected);
    assert_eq!(run(["generate", "--chat", "--prompt", ""]).failure(3), expected);
}

#[test]
fn a_prompt_longer_than_the_context_is_refused() {
    let prompt = "Once upon a time ".repeat(1200);
    let message = run_with_stdin(["generate", "--prompt", "-"], prompt.as_bytes()).failure(3);
    insta::assert_snapshot!(message, @"error: failed to read the prompt: `prompt` is 6001 tokens long; allowed: 1 to 4095 tokens, less than the model's context");
}

#[test]
fn a_prompt_that_does_not_fit_into_the_blocks_is_refused() {
    let prompt = "Once upon a time ".repeat(10);
    let message = run(["generate", "--prompt", &prompt, "--kv-blocks", "1"]).failure(3);
    insta::assert_snapshot!(message, @"error: failed to run the request: `prompt` is 51 tokens long; allowed: 1 to 15 tokens, by the KV pool");
}

#[test]
fn more_blocks_than_the_memory_holds_are_refused() {
    let message = refusal("--kv-blocks 4294967295");
    assert!(
        message.starts_with("error: failed to read the options: `kv_blocks` is 4294967295; allowed: 1 to "),
        "{message}"
    );
}

#[test]
fn an_empty_stop_string_is_refused() {
    let message = run(["generate", "--prompt", "Once", "--stop", ""]).failure(3);
    assert_eq!(
        message,
        "error: failed to run the request: `stop` is a string of 0 bytes; allowed: strings of 1 to 4096 bytes"
    );
}

#[test]
fn standard_input_that_is_not_utf8_is_refused() {
    let message = run_with_stdin(["generate", "--prompt", "-"], b"ab\xffc").failure(3);
    assert_eq!(
        message,
        "error: failed to read the prompt from standard input: `prompt` is not UTF-8 at byte 2; allowed: UTF-8 text"
    );
}

#[cfg(unix)]
#[test]
fn options_that_are_not_utf8_are_refused_by_name() {
    use std::os::unix::ffi::OsStringExt;

    let not_utf8 = || OsString::from_vec(b"a\xff".to_vec());
    let text = |text: &str| OsString::from(text);
    for (arguments, message) in [
        (
            vec![text("--prompt"), not_utf8()],
            "read the prompt: `prompt` is not UTF-8 at byte 1; allowed: UTF-8 text",
        ),
        (
            vec![text("--prompt"), text("Once"), text("--stop"), not_utf8()],
            "read the options: `stop` is not UTF-8 at byte 1; allowed: UTF-8 text",
        ),
        (
            vec![text("--prompt"), text("Once"), text("--chat"), text("--system"), not_utf8()],
            "read the options: `system` is not UTF-8 at byte 1; allowed: UTF-8 text",
        ),
    ] {
        let answer = run(std::iter::once(text("generate")).chain(arguments));
        assert_eq!(answer.failure(3), format!("error: failed to {message}"));
    }
}

#[test]
fn a_device_that_is_not_there_is_refused_by_every_command_that_runs_a_model() {
    let generate = ["generate", "--prompt", "Once"].as_slice();
    for command in [generate, &["worker", "--listen", "127.0.0.1:0", "--log", "off"]] {
        let arguments = command.iter().copied().chain(["--device", "cuda:99"]);
        let message = run(arguments).failure(3);
        assert!(message.contains("cuda:99"), "{message}");
    }
}
