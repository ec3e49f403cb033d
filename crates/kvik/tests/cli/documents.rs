//! What describes the command line: the long version, scripts of shells, manual pages.

use std::process::Command;

use super::support::run;

#[test]
fn the_long_version_tells_what_the_binary_was_built_from() {
    for arguments in [["--version", "--verbose"], ["--verbose", "--version"], ["-V", "--verbose"]] {
        let text = run(arguments).success();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some(concat!("kvik ", env!("CARGO_PKG_VERSION"))));
        let fields: Vec<(&str, &str)> =
            lines.map(|line| line.split_once(char::is_whitespace).unwrap()).collect();
        let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["commit", "target", "profile", "compiler", "features"]);
        assert!(fields.iter().all(|(_, value)| !value.trim().is_empty()), "{text}");
        assert!(text.contains(std::env::consts::ARCH) && text.contains("rustc 1."), "{text}");
    }
}

#[test]
fn verbose_means_nothing_without_the_version() {
    let answer = run(["--verbose", "config"]);
    assert_eq!(answer.exit_code, Some(2));
    assert!(answer.stderr.contains("--version"), "{}", answer.stderr);
}

#[test]
fn every_shell_gets_a_script_for_each_program() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        for program in ["kvik", "kvctl"] {
            let script = run(["completions", shell, "--program", program]).success();
            assert!(script.contains(program), "{shell}");
        }
        assert_eq!(
            run(["completions", shell]).success(),
            run(["completions", shell, "--program", "kvik"]).success()
        );
    }
    assert_eq!(run(["completions", "tcsh"]).exit_code, Some(2));
}

#[test]
fn bash_completes_commands_and_flags() {
    let script = run(["completions", "bash"]).success();
    // What bash does when the tabulator key is hit after these words.
    let ask = |words: &str| {
        let program = format!(
            "{script}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
             _kvik kvik \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"\nprintf \"%s\\n\" \"${{COMPREPLY[@]}}\""
        );
        let output = Command::new("bash").args(["-c", &program]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(ask("kvik gate"), "gateway\n");
    assert_eq!(ask("kvik gateway --coo"), "--coordinator\n");
    assert_eq!(ask("kvik store ser"), "serve\n");
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    assert_eq!(run(["man", pages.to_str().unwrap()]).success(), "");
    let mut names: Vec<String> = std::fs::read_dir(&pages)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in
        ["kvctl.1", "kvctl-cache.1", "kvik.1", "kvik-gateway.1", "kvik-store-serve.1", "kvik-worker.1"]
    {
        assert!(names.iter().any(|found| found == name), "{name} of {names:?}");
    }
    let page = std::fs::read_to_string(pages.join("kvik-gateway.1")).unwrap();
    assert!(page.contains(".TH kvik-gateway 1") && page.contains("coordinator"), "{page}");
}

#[test]
fn a_folder_for_pages_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let folder = file.path().join("man1");
    let answer = run(["man", folder.to_str().unwrap()]);
    assert_eq!(answer.exit_code, Some(1));
    assert!(answer.stderr.contains(folder.to_str().unwrap()), "{}", answer.stderr);
}
