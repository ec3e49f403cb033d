//! Running the binary, and model folders to run it on.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// What one run of the binary gave.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) exit_code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A model folder that is removed when dropped.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    folder: TempDir,
}

/// The binary, without what the caller's environment would change in its answers.
pub(crate) fn kvik() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvik"));
    let of_hub = ["HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"];
    for name in ["CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"].into_iter().chain(of_hub) {
        command.env_remove(name);
    }
    command.env("NO_COLOR", "1");
    command
}

/// Runs the binary with nothing on standard input.
pub(crate) fn run<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Answer {
    run_with_stdin(arguments, b"")
}

/// Runs the binary with `stdin` on standard input.
pub(crate) fn run_with_stdin<S: AsRef<OsStr>>(
    arguments: impl IntoIterator<Item = S>,
    stdin: &[u8],
) -> Answer {
    let mut child = kvik()
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that does not read its input may have closed it already.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    let output = child.wait_with_output().unwrap();
    Answer {
        exit_code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The folder of the model that the binary carries.
pub(crate) fn bundled_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/kvik-tiny")
}

impl Answer {
    /// Standard output of a run that went well and had nothing to say beside it.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert_eq!((self.exit_code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        self.stdout
    }

    /// Standard output of a run that went well, as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.success()).unwrap()
    }

    /// The message of a run that was refused with `exit_code`: one line, and no output.
    #[track_caller]
    pub(crate) fn failure(self, exit_code: i32) -> String {
        assert_eq!((self.exit_code, self.stdout.as_str()), (Some(exit_code), ""), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        self.stderr.trim_end().to_owned()
    }
}

impl ModelFolder {
    /// A copy of the bundled model.
    pub(crate) fn bundled() -> Self {
        let copy = Self { folder: TempDir::new().unwrap() };
        for name in [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            copy.write(name, &fs::read(bundled_folder().join(name)).unwrap());
        }
        copy
    }

    /// One of the engine's random reference models, with the bundled model's tokenizer.
    pub(crate) fn reference(name: &str) -> Self {
        let copy = Self::bundled();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvik-model/tests/fixtures");
        for file_name in ["config.json", "model.safetensors"] {
            copy.write(file_name, &fs::read(fixtures.join(name).join(file_name)).unwrap());
        }
        copy
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path().join(name)).unwrap()
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path().join(name), bytes).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        fs::remove_file(self.path().join(name)).unwrap();
    }

    /// Puts `to` in the place of the first `from` in a file, which must be there.
    pub(crate) fn edit(&self, name: &str, from: &str, to: &str) {
        let mut bytes = self.read(name);
        let place = bytes.windows(from.len()).position(|window| window == from.as_bytes());
        let start = place.expect("the text to replace is in the file");
        bytes.splice(start..start + from.len(), to.bytes());
        self.write(name, &bytes);
    }

    /// Runs `kvik generate` on this model.
    pub(crate) fn generate(&self) -> Answer {
        let arguments = ["generate", "--prompt", "Once", "--max-tokens", "4", "--model"];
        run(arguments.iter().map(OsStr::new).chain([self.path().as_os_str()]))
    }

    /// `text` with this folder's path, which differs from run to run, replaced by `[DIR]`.
    pub(crate) fn redact(&self, text: &str) -> String {
        text.replace(&self.path().display().to_string(), "[DIR]")
    }
}
