//! What `--help` says: every option with its default and unit, and the exit codes.

use super::support::{kvik, run};

#[test]
fn help_lists_the_commands_and_the_exit_codes() {
    insta::assert_snapshot!(run(["--help"]).success());
}

#[test]
fn help_of_up_states_every_default() {
    insta::assert_snapshot!(run(["up", "--help"]).success());
}

#[test]
fn help_of_engines_lists_its_commands() {
    insta::assert_snapshot!(run(["engines", "--help"]).success());
}

#[test]
fn help_of_engines_up_states_every_default() {
    insta::assert_snapshot!(run(["engines", "up", "--help"]).success());
}

#[test]
fn help_of_demo_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["demo", "--help"]).success());
}

#[test]
fn help_of_generate_states_every_default() {
    insta::assert_snapshot!(run(["generate", "--help"]).success());
}

#[test]
fn help_of_models_lists_its_commands() {
    insta::assert_snapshot!(run(["models", "--help"]).success());
}

#[test]
fn help_of_models_inspect_states_its_default() {
    insta::assert_snapshot!(run(["models", "inspect", "--help"]).success());
}

#[test]
fn help_of_bench_lists_its_commands() {
    insta::assert_snapshot!(run(["bench", "--help"]).success());
}

#[test]
fn help_of_bench_engine_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["bench", "engine", "--help"]).success());
}

#[test]
fn help_of_bench_gateway_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["bench", "gateway", "--help"]).success());
}

#[test]
fn help_of_bench_edges_states_its_options() {
    insta::assert_snapshot!(run(["bench", "edges", "--help"]).success());
}

#[test]
fn help_of_bench_moving_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["bench", "moving", "--help"]).success());
}

#[test]
fn help_of_bench_memory_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["bench", "memory", "--help"]).success());
}

#[test]
fn help_of_bench_store_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["bench", "store", "--help"]).success());
}

#[test]
fn help_of_bench_index_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["bench", "index", "--help"]).success());
}

#[test]
fn help_of_bench_routing_states_every_default_and_unit() {
    insta::assert_snapshot!(run(["bench", "routing", "--help"]).success());
}

#[test]
fn without_a_command_the_help_is_printed_as_an_error() {
    let answer = run::<&str>([]);
    assert_eq!((answer.exit_code, answer.stdout.as_str()), (Some(2), ""));
    assert!(answer.stderr.contains("Usage: kvik [OPTIONS] <COMMAND>"), "{answer:?}");
}

#[test]
fn the_version_is_that_of_the_package() {
    let version = run(["--version"]).success();
    assert_eq!(version, concat!("kvik ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn colors_appear_only_where_they_are_asked_for() {
    let has_colors = |command: &mut std::process::Command| {
        let output = command.args(["models", "inspect"]).output().unwrap();
        output.stdout.contains(&0x1b)
    };
    assert!(!has_colors(kvik().env_remove("NO_COLOR")));
    assert!(has_colors(kvik().env_remove("NO_COLOR").env("CLICOLOR_FORCE", "1")));
}
