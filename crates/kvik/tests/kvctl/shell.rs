//! The shell where standard input is not a terminal.

use std::fs;

use crate::support::{Folder, join, units};

#[test]
fn lines_are_done_one_after_the_other() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let _member = join(&ledger, "a", 1, 0);
    let lines = "# a comment\n\nlimit a \"8 MB\"\ntrim a --json\nexit\nlimit a 2m\n";
    let stdout = folder.kvctl_with_stdin(&["shell"], lines).success();
    assert_eq!(stdout.lines().count(), 2, "{stdout}");
    assert!(stdout.lines().nth(1).unwrap().starts_with("{\"ipc\":\"a\""), "{stdout}");
    assert_eq!(ledger.snapshot().unwrap().groups[0].policy.max_bytes, Some(units(4)));
}

#[test]
fn an_unknown_line_is_an_error_and_never_a_system_command() {
    let folder = Folder::new();
    let ledger = folder.ledger("host0", 64);
    let _member = join(&ledger, "a", 1, 0);
    let witness = folder.path().join("witness");
    let lines = format!("touch {0}\n!touch {0}\nlist; touch {0}\nlist a\n", witness.display());
    let answer = folder.kvctl_with_stdin(&["shell"], &lines);
    assert_eq!(answer.exit_code, Some(1), "{answer:?}");
    let errors: Vec<&str> = answer.stderr.lines().collect();
    assert!(errors[0].starts_with("error: unknown command touch; there are: list, watch, "), "{errors:?}");
    assert!(errors[1].starts_with("error: unknown command !touch; "), "{errors:?}");
    assert!(errors[2].starts_with("error: unknown command list;"), "{errors:?}");
    assert_eq!(errors[3], "error: 3 lines failed");
    // The line after them was done.
    assert!(answer.stdout.starts_with("IPC "), "{answer:?}");
    assert!(!fs::exists(&witness).unwrap());
}

#[test]
fn help_and_errors_of_verbs_do_not_end_the_shell() {
    let folder = Folder::new();
    let lines =
        "help\nhelp limit\nlimit --help\nhelp nonsense\nlimit a\nlimit a 1x\nshell\n--json\nlist 'x\n";
    let answer = folder.kvctl_with_stdin(&["shell"], lines);
    assert_eq!(answer.exit_code, Some(1), "{answer:?}");
    let errors: Vec<&str> = answer.stderr.lines().collect();
    for (error, text) in errors.iter().zip([
        "no help for nonsense",
        "required arguments",
        "`1x` is no size",
        "this is the shell",
        "no command",
        "not closed",
        "6 lines failed",
    ]) {
        assert!(error.contains(text), "{text}: {errors:?}");
    }
    assert_eq!(errors.len(), 7, "{errors:?}");
    assert!(answer.stdout.contains("limit-percent") && answer.stdout.contains("<SIZE>"), "{answer:?}");
}
