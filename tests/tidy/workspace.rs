//! The files and the packages the rules look at.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use cargo_metadata::{Metadata, MetadataCommand, Package};

/// Folders that hold build outputs, other people's code or version control, never sources.
const SKIPPED_FOLDERS: &[&str] =
    &[".git", ".mypy_cache", ".ruff_cache", ".venv", "__pycache__", "node_modules", "target"];

/// A text file of the repository.
#[derive(Debug)]
pub(crate) struct SourceFile {
    /// Path from the root of the repository, with `/` between components.
    pub(crate) path: String,
    pub(crate) bytes: Vec<u8>,
}

impl SourceFile {
    /// Returns the content; a rule that reads words does not care about an invalid byte, and the
    /// rule about ASCII reports it.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    pub(crate) fn has_extension(&self, extensions: &[&str]) -> bool {
        self.path
            .rsplit('/')
            .next()
            .and_then(|name| name.rsplit_once('.'))
            .is_some_and(|(_, extension)| extensions.contains(&extension))
    }

    /// Tells whether the file is `place`, `place.rs` or lies below the folder `place`.
    pub(crate) fn is_in(&self, place: &str) -> bool {
        self.path
            .strip_prefix(place)
            .is_some_and(|rest| rest.is_empty() || rest == ".rs" || rest.starts_with('/'))
    }

    /// Tells whether the whole file is only compiled for tests or benches.
    pub(crate) fn is_test_only(&self) -> bool {
        let is_test_folder = self.path.split('/').any(|part| matches!(part, "tests" | "benches" | "fuzz"));
        is_test_folder || self.path.ends_with("/tests.rs")
    }
}

/// Returns the root of the repository.
///
/// Cargo tells it at run time: the path of the build would be wrong in a tree that was copied or
/// moved together with its build outputs.
pub(crate) fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo runs the tests");
        Path::new(&manifest_dir).parent().expect("the package lies below the root").to_owned()
    });
    &ROOT
}

/// Returns every file with one of `extensions`, ordered by path.
pub(crate) fn source_files(extensions: &[&str]) -> Vec<SourceFile> {
    let mut files = all_files();
    files.retain(|file| file.has_extension(extensions));
    files
}

/// Returns every file of the repository that could be a source, ordered by path.
pub(crate) fn all_files() -> Vec<SourceFile> {
    let mut paths = Vec::new();
    collect(root(), &mut paths);
    paths.sort();
    paths.into_iter().map(|path| SourceFile { bytes: read(&path), path: relative(&path) }).collect()
}

/// Returns what `cargo metadata` says of the workspace, without a look at the network.
pub(crate) fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .other_options(["--offline".to_owned()])
        .exec()
        .expect("cargo metadata reads the workspace")
}

/// Returns the path of a package's folder from the root of the repository.
pub(crate) fn folder(package: &Package) -> String {
    let folder = package.manifest_path.parent().expect("a manifest lies in a folder");
    relative(folder.as_std_path())
}

/// Fails the calling test with all `places`, if there are any.
#[track_caller]
pub(crate) fn assert_none(places: &[String], rule: &str) {
    assert!(places.is_empty(), "{rule}\n  {}\n", places.join("\n  "));
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("list {}: {error}", folder.display()));
    for entry in entries {
        let entry = entry.unwrap_or_else(|error| panic!("list {}: {error}", folder.display()));
        let kind = entry.file_type().expect("the kind of a listed entry is known");
        let name = entry.file_name();
        // A link is followed by neither branch: it could lead out of the repository or in a circle.
        if kind.is_dir() && !SKIPPED_FOLDERS.iter().any(|skipped| name == *skipped) {
            collect(&entry.path(), paths);
        } else if kind.is_file() && is_maybe_source(&entry.path()) {
            paths.push(entry.path());
        }
    }
}

/// Tells sources from weights, recordings and other data, which can be large.
fn is_maybe_source(path: &Path) -> bool {
    match path.extension() {
        Some(extension) => ["rs", "py", "pyi", "toml", "sh"].iter().any(|known| extension == *known),
        // Scripts have no extension, and are short.
        None => fs::metadata(path).is_ok_and(|metadata| metadata.len() < 100_000),
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

fn relative(path: &Path) -> String {
    let relative = path.strip_prefix(root()).expect("the path lies below the root");
    relative.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("/")
}
