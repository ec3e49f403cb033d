//! `kvctl shell`: the verbs at a prompt, with completion and history.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use clap::{CommandFactory as _, Parser as _};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{CompletionType, Config, Editor, Helper};

use super::arguments::{Cli, CommonArguments, Verb};
use super::folder::MemoryFolder;
use super::{is_closed_output, print_error};

const PROMPT: &str = "kvctl> ";
const HISTORY_NAME: &str = ".kvctl_history";

/// Lines that are commands of the shell and no verbs.
const SHELL_COMMANDS: [&str; 3] = ["exit", "help", "quit"];

/// Verbs after which any number of names may stand, and verbs after which one stands.
const VERBS_OF_NAMES: [&str; 3] = ["list", "watch", "kvtop"];
const VERBS_OF_ONE_NAME: [&str; 5] = ["delete", "limit", "limit-percent", "policy", "trim"];

/// What follows after a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Line,
    End,
}

/// Reads lines and does them until `exit` or the end of the input.
///
/// On a terminal a line that fails is reported and the next one is read. Otherwise the rest is done too,
/// and the shell fails at the end.
pub(crate) fn run(common: &CommonArguments, history: Option<&Path>) -> anyhow::Result<()> {
    if io::stdin().is_terminal() {
        return run_on_terminal(common, history.map(Path::to_owned).or_else(default_history).as_deref());
    }
    let mut n_failed = 0;
    for line in io::stdin().lock().lines() {
        match run_line(common, &line.context("read standard input")?) {
            Ok(Next::Line) => {}
            Ok(Next::End) => break,
            Err(error) if is_closed_output(&error) => return Err(error),
            Err(error) => {
                print_error(&error);
                n_failed += 1;
            }
        }
    }
    match n_failed {
        0 => Ok(()),
        1 => bail!("1 line failed"),
        n_failed => bail!("{n_failed} lines failed"),
    }
}

fn run_on_terminal(common: &CommonArguments, history: Option<&Path>) -> anyhow::Result<()> {
    let config = Config::builder().completion_type(CompletionType::List).history_ignore_space(true).build();
    let mut editor: Editor<ShellHelper, FileHistory> = Editor::with_config(config)?;
    editor.set_helper(Some(ShellHelper { folder: MemoryFolder::new(common) }));
    if let Some(history) = history {
        // The first time there is none.
        let _ = editor.load_history(history);
    }
    writeln!(
        anstream::stdout(),
        "kvctl on {}; `help` lists the commands, `exit` ends",
        common.dir().display()
    )?;
    loop {
        let line = match editor.readline(PROMPT) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(error).context("read a line"),
        };
        if !line.trim().is_empty() {
            editor.add_history_entry(line.as_str())?;
        }
        if let Some(history) = history {
            // Written with every line, so that a closed window loses none; a home that cannot be written
            // to takes nothing but the history.
            let _ = editor.append_history(history);
        }
        match run_line(common, &line) {
            Ok(Next::Line) => {}
            Ok(Next::End) => return Ok(()),
            Err(error) => print_error(&error),
        }
    }
}

/// Does one line.
fn run_line(common: &CommonArguments, line: &str) -> anyhow::Result<Next> {
    let words = split_words(line)?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => Ok(Next::Line),
        [comment, ..] if comment.starts_with('#') => Ok(Next::Line),
        ["exit" | "quit"] => Ok(Next::End),
        ["help", verbs @ ..] => print_help(verbs).map(|()| Next::Line),
        words => run_verb(common, words).map(|()| Next::Line),
    }
}

fn run_verb(common: &CommonArguments, words: &[&str]) -> anyhow::Result<()> {
    let first = words[0];
    if !first.starts_with('-') && !verbs().iter().any(|verb| verb == first) {
        bail!("unknown command {first}; there are: {}", commands().join(", "));
    }
    let cli = match Cli::try_parse_from(std::iter::once("kvctl").chain(words.iter().copied())) {
        Ok(cli) => cli,
        Err(error) if !error.use_stderr() => {
            // Help or the version, which was asked for.
            return Ok(write!(anstream::stdout(), "{}", error.render().ansi())?);
        }
        Err(error) => {
            let text = error.render().to_string();
            return Err(anyhow!("{}", text.trim_start_matches("error: ").lines().next().unwrap_or("usage")));
        }
    };
    match &cli.verb {
        None => bail!("no command in this line; `help` lists them"),
        Some(Verb::Shell(_)) => bail!("this is the shell"),
        Some(verb) => super::run(verb, &cli.common.over(common)),
    }
}

fn print_help(names: &[&str]) -> anyhow::Result<()> {
    let mut command = Cli::command().bin_name("").subcommand_required(true);
    command.build();
    let text = match names {
        [] => command.render_help(),
        [name, ..] => match command.find_subcommand_mut(name) {
            Some(verb) => verb.render_help(),
            None => bail!("no help for {name}; there is for: {}", verbs().join(", ")),
        },
    };
    Ok(write!(anstream::stdout(), "{}", text.ansi())?)
}

fn verbs() -> Vec<String> {
    Cli::command().get_subcommands().map(|verb| verb.get_name().to_owned()).collect()
}

fn commands() -> Vec<String> {
    let mut commands = verbs();
    commands.retain(|verb| verb != "shell");
    commands.extend(SHELL_COMMANDS.map(str::to_owned));
    commands
}

fn default_history() -> Option<PathBuf> {
    std::env::home_dir().map(|home| home.join(HISTORY_NAME))
}

/// Splits a line at white space, but not inside of quotes.
pub(crate) fn split_words(line: &str) -> anyhow::Result<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            None if c == '"' || c == '\'' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    if let Some(open) = quote {
        bail!("a {open} is not closed");
    }
    words.extend(word);
    Ok(words)
}

/// What can stand at the end of `line`, and where it begins there.
pub(crate) fn completions(line: &str, names: impl FnOnce() -> Vec<String>) -> (usize, Vec<String>) {
    let start = line.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    let begun = &line[start..];
    let before: Vec<&str> = line[..start].split_whitespace().collect();
    let n_plain = before.iter().filter(|word| !word.starts_with('-')).count();
    let mut candidates = match before.first() {
        None => commands(),
        Some(&"help") => verbs(),
        Some(verb) if begun.starts_with('-') => options_of(verb),
        Some(verb) if VERBS_OF_NAMES.contains(verb) => names(),
        Some(verb) if VERBS_OF_ONE_NAME.contains(verb) && n_plain == 1 => names(),
        Some(_) => Vec::new(),
    };
    candidates.retain(|candidate| candidate.starts_with(begun));
    candidates.sort();
    (start, candidates)
}

fn options_of(verb: &str) -> Vec<String> {
    let mut command = Cli::command();
    command.build();
    let Some(verb) = command.find_subcommand(verb) else { return Vec::new() };
    verb.get_arguments().filter_map(|argument| argument.get_long()).map(|name| format!("--{name}")).collect()
}

/// Completes commands, and the names that are in the folder at that moment.
#[derive(Debug)]
struct ShellHelper {
    folder: MemoryFolder,
}

impl Completer for ShellHelper {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _context: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let line = line.get(..position).unwrap_or(line);
        let (start, mut candidates) = completions(line, || self.folder.names().unwrap_or_default());
        if let [only] = candidates.as_mut_slice() {
            // The word is complete: the next one can follow.
            only.push(' ');
        }
        Ok((start, candidates))
    }
}

impl Hinter for ShellHelper {
    type Hint = String;
}

impl Highlighter for ShellHelper {}

impl Validator for ShellHelper {}

impl Helper for ShellHelper {}
