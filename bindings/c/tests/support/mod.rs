//! Compiling and running programs in C and C++ against the library that cargo built for this test.

#![expect(dead_code, reason = "each test uses its part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// How a program takes the library.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Linkage {
    Shared,
    Static,
    /// It does not.
    Without,
}

/// A compiled program, and a folder for the ledger of its processes.
#[derive(Debug)]
pub(crate) struct Program {
    folder: TempDir,
}

/// What the static library needs of the system.
const SYSTEM_LIBRARIES: [&str; 6] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];

pub(crate) fn package() -> PathBuf {
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the tests"))
}

/// Compiles a text without linking; fails with the compiler's words, which a warning is enough for.
pub(crate) fn compile_text(text: &str, extension: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("there is room for a program");
    let source = folder.path().join("source").with_extension(extension);
    fs::write(&source, text).expect("a file in a new folder can be written");
    let output = compiler(&source).arg("-fsyntax-only").arg(&source).output().expect("there is a compiler");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

impl Program {
    /// Compiles a file of `examples/trtllm`.
    pub(crate) fn build_example(source: &str, linkage: Linkage) -> Self {
        Self::build(&package().join("examples/trtllm").join(source), linkage)
    }

    /// Compiles a file of `tests/programs`, or any other.
    pub(crate) fn build(source: &Path, linkage: Linkage) -> Self {
        let folder = tempfile::tempdir().expect("there is room for a program");
        let source = package().join("tests/programs").join(source);
        let mut command = compiler(&source);
        command.args(["-g", "-pthread", "-o"]).arg(folder.path().join("program")).arg(&source);
        let libraries = library_folder();
        match linkage {
            Linkage::Shared => {
                command.arg("-L").arg(&libraries).arg("-l:libkvik.so");
                command.arg(format!("-Wl,-rpath,{}", libraries.display())).arg("-ldl");
            }
            Linkage::Static => {
                command.arg(libraries.join("libkvik.a")).args(SYSTEM_LIBRARIES);
            }
            Linkage::Without => {
                command.arg("-ldl");
            }
        }
        let output = command.output().expect("there is a compiler");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { folder }
    }

    /// A process of the program, with a ledger of its own and no settings from outside.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(self.folder.path().join("program"));
        command
            .env_clear()
            .env("KVIK_MEMORY_DIR", self.folder.path())
            .env("KVIK_MEMORY_PAGE_PREALLOC_ENABLED", "false");
        command
    }

    /// Runs the program to its end.
    #[track_caller]
    pub(crate) fn run(&self) {
        self.run_with(&[]);
    }

    /// Runs the program with arguments to its end; returns what it printed.
    #[track_caller]
    pub(crate) fn run_with(&self, arguments: &[&str]) -> String {
        finish(self.command().args(arguments))
    }
}

/// Runs a program to its end; returns what it printed.
#[track_caller]
pub(crate) fn finish(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{printed}{words}", output.status);
    printed
}

fn compiler(source: &Path) -> Command {
    let is_cpp = source.extension().is_some_and(|extension| extension == "cpp");
    let (compiler, standard) = if is_cpp { ("g++", "-std=c++17") } else { ("gcc", "-std=c11") };
    let mut command = Command::new(compiler);
    command.env("LC_ALL", "C").args([standard, "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-I"]);
    command.arg(package().join("include"));
    command
}

/// Cargo puts the libraries of a package beside its tests.
pub(crate) fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    test.parent().expect("a program lies in a folder").to_owned()
}
