//! Files that are replaced as a whole, even if the power fails.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// How the name of an unfinished file ends.
const UNFINISHED: &str = ".new";

/// A step of a replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Create,
    Write,
    SyncFile,
    Rename,
    SyncFolder,
}

/// Replaces a file: it is there as a whole or as it was before. Several threads and processes may replace one file at a
/// time; one of their contents stays.
///
/// # Errors
/// If a step fails. The file is then as it was before, or new but perhaps not yet on disk.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_in_steps(path, bytes, |_| Ok(()))
}

/// Removes what processes that have died left unfinished in a folder.
pub(crate) fn remove_unfinished(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if is_abandoned(&path)
            && let Err(error) = fs::remove_file(&path)
        {
            tracing::warn!(path = %path.display(), %error, "failed to remove an unfinished file");
        }
    }
}

/// Does the steps of a replacement, asking `before` at each.
fn replace_in_steps(
    path: &Path,
    bytes: &[u8],
    mut before: impl FnMut(Step) -> io::Result<()>,
) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let beside = unfinished_path(path);
    let written = (|| {
        before(Step::Create)?;
        let mut file = File::create_new(&beside)?;
        before(Step::Write)?;
        file.write_all(bytes)?;
        before(Step::SyncFile)?;
        file.sync_all()?;
        before(Step::Rename)?;
        fs::rename(&beside, path)
    })();
    written.inspect_err(|_| {
        // It may not be there yet, and there is nothing better to do.
        drop(fs::remove_file(&beside));
    })?;
    before(Step::SyncFolder)?;
    File::open(folder)?.sync_all()
}

/// A name beside `path` that no other thread or living process uses: `<file>.<process>.<number>.new`.
fn unfinished_path(path: &Path) -> PathBuf {
    static N_USED: AtomicU64 = AtomicU64::new(0);
    // Relaxed: each number is given once.
    let number = N_USED.fetch_add(1, Ordering::Relaxed);
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.{number}{UNFINISHED}", std::process::id()));
    beside.into()
}

/// Whether a file is unfinished and its process is not alive. An earlier process may have had our id.
fn is_abandoned(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let mut parts =
        name.and_then(|name| name.strip_suffix(UNFINISHED)).into_iter().flat_map(|name| name.rsplit('.'));
    let (Some(Ok(_)), Some(Ok(process))) =
        (parts.next().map(str::parse::<u64>), parts.next().map(str::parse::<u32>))
    else {
        return false;
    };
    process == std::process::id() || !Path::new("/proc").join(process.to_string()).is_dir()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_on_disk_before_the_name_and_the_name_before_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        let mut steps = Vec::new();
        let mut beside_at_rename = Vec::new();
        replace_in_steps(&path, b"new", |step| {
            steps.push(step);
            if step == Step::Rename {
                let entries = fs::read_dir(folder.path()).unwrap();
                beside_at_rename.extend(entries.map(|entry| fs::read(entry.unwrap().path()).unwrap()));
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(steps, [Step::Create, Step::Write, Step::SyncFile, Step::Rename, Step::SyncFolder]);
        assert_eq!(beside_at_rename, [b"new"], "all of it is written before it gets its name");
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn a_replacement_that_ends_at_any_step_leaves_the_old_file_or_the_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        for last in [Step::Create, Step::Write, Step::SyncFile, Step::Rename, Step::SyncFolder] {
            fs::write(&path, "old").unwrap();
            let crash = |step| if step == last { Err(io::Error::other("end")) } else { Ok(()) };
            assert!(replace_in_steps(&path, b"new", crash).is_err());
            let expected: &[u8] = if last == Step::SyncFolder { b"new" } else { b"old" };
            assert_eq!(fs::read(&path).unwrap(), expected, "{last:?}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{last:?}");
        }
    }

    #[test]
    fn threads_that_replace_one_file_do_not_disturb_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        let contents: Vec<Vec<u8>> = (0..4_u8).map(|number| vec![number; 10_000]).collect();
        std::thread::scope(|scope| {
            for content in &contents {
                scope.spawn(|| (0..20).for_each(|_| replace_file(&path, content).unwrap()));
            }
        });
        assert!(contents.contains(&fs::read(&path).unwrap()));
    }

    #[test]
    fn only_files_of_processes_that_have_died_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        // No process has the largest number, and one always has the first.
        for name in ["a.4294967295.0.new", "a.1.0.new", "a.new", "books.json", "x.y.z.new"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let ours = unfinished_path(&folder.path().join("a"));
        fs::write(&ours, "").unwrap();
        remove_unfinished(folder.path());
        let mut left: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["a.1.0.new", "a.new", "books.json", "x.y.z.new"]);
    }
}
