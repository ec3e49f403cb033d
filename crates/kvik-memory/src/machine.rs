//! How much memory this process may use: the machine's, or less where its control group has a limit.

#![expect(unsafe_code, reason = "sysconf")]

use std::fs;
use std::path::{Path, PathBuf};

/// Where a control group hierarchy is mounted and which files hold its limits.
struct Hierarchy {
    mount_point: PathBuf,
    /// The group of this process, relative to the mount point.
    group: PathBuf,
    limit_file: &'static str,
}

/// Bytes of memory that this process may use; 0 if the operating system does not say.
///
/// The least of the machine's memory and of the limits (`memory.max`, or `memory.limit_in_bytes` of version 1) of its
/// control group and all groups above it. A limit that cannot be read counts as none.
pub fn memory_bytes() -> u64 {
    let limit = memory_limit_bytes(Path::new("/")).unwrap_or(u64::MAX);
    physical_bytes().min(limit)
}

/// The least limit of the control groups of this process, with `proc` and the mount points of control groups looked up
/// under `root`; `None` if there is no limit.
pub fn memory_limit_bytes(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).ok()?;
    let hierarchies = mounts.lines().filter_map(|mount| hierarchy(mount, &groups));
    hierarchies.filter_map(|hierarchy| hierarchy.limit_bytes(root)).min()
}

impl Hierarchy {
    /// The least limit of the group and of those above it, up to the mount point.
    fn limit_bytes(&self, root: &Path) -> Option<u64> {
        let mount_point = below(root, &self.mount_point);
        let limit = |group: &Path| {
            let text = fs::read_to_string(mount_point.join(group).join(self.limit_file)).ok()?;
            // `max` is no limit. Version 1 writes a number near 2^63 instead, which is more than any machine has.
            text.trim().parse().ok()
        };
        self.group.ancestors().filter_map(limit).min()
    }
}

/// The hierarchy of a line of `mountinfo`; `None` if it does not count memory.
///
/// A line is `id parent device root mount-point options [tags] - type source options`.
fn hierarchy(mount: &str, groups: &str) -> Option<Hierarchy> {
    let (place, kind) = mount.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (mount_root, mount_point) = (unescaped(place.next()?), unescaped(place.next()?));
    let mut kind = kind.split(' ');
    let (file_system, options) = (kind.next()?, kind.nth(1)?);
    let (limit_file, group) = match file_system {
        "cgroup2" => ("memory.max", group_of(groups, str::is_empty)?),
        "cgroup" if options.split(',').any(|option| option == "memory") => {
            let counts_memory = |controllers: &str| controllers.split(',').any(|name| name == "memory");
            ("memory.limit_in_bytes", group_of(groups, counts_memory)?)
        }
        _ => return None,
    };
    // In a container the mount may begin inside of the hierarchy while the group is named from its top. A group that is
    // not below the mount cannot be seen; the mount point is then the nearest that can.
    let group = Path::new(group).strip_prefix(&mount_root).unwrap_or(Path::new(""));
    let is_plain = group.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    let group = if is_plain { group } else { Path::new("") };
    Some(Hierarchy { mount_point: mount_point.into(), group: group.into(), limit_file })
}

/// The path of the first line `number:controllers:path` whose controllers fit.
fn group_of(groups: &str, fits: impl Fn(&str) -> bool) -> Option<&str> {
    groups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        fits(controllers).then_some(path)
    })
}

/// A path of `mountinfo`, which writes blanks and backslashes as three octal digits.
fn unescaped(text: &str) -> String {
    let mut plain = Vec::new();
    let mut bytes = text.as_bytes();
    while let Some((first, rest)) = bytes.split_first() {
        let digits = rest.get(..3).and_then(|digits| str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        if let Some(byte) = byte.filter(|_| *first == b'\\') {
            plain.push(byte);
            bytes = &rest[3..];
        } else {
            plain.push(*first);
            bytes = rest;
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

/// An absolute path looked up under another root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The machine's memory.
fn physical_bytes() -> u64 {
    // SAFETY: both calls only read the system's configuration.
    let (n_pages, page_bytes) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let whole = |value: libc::c_long| u64::try_from(value).unwrap_or(0);
    whole(n_pages).saturating_mul(whole(page_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const V2: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "30 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      32 31 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

    /// A root folder with these files below `proc/self` and limits below `sys/fs/cgroup`.
    fn root(groups: &str, mounts: &str, limits: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", groups);
        write("proc/self/mountinfo", mounts);
        for (path, limit) in limits {
            write(&format!("sys/fs/cgroup/{path}"), limit);
        }
        root
    }

    fn limit(groups: &str, mounts: &str, limits: &[(&str, &str)]) -> Option<u64> {
        memory_limit_bytes(root(groups, mounts, limits).path())
    }

    #[test]
    fn the_least_limit_of_all_groups_above_counts() {
        let groups = "0::/kube/pod/app\n";
        let of = |pod: &str, app: &str| {
            limit(
                groups,
                V2,
                &[
                    ("kube/memory.max", "max\n"),
                    ("kube/pod/memory.max", pod),
                    ("kube/pod/app/memory.max", app),
                ],
            )
        };
        assert_eq!(of("8589934592\n", "max\n"), Some(8 * GIB));
        assert_eq!(of("8589934592\n", "17179869184\n"), Some(8 * GIB));
        assert_eq!(of("8589934592\n", "4294967296\n"), Some(4 * GIB));
        assert_eq!(of("max\n", "max\n"), None);
    }

    #[test]
    fn version_one_has_its_limits_in_the_hierarchy_of_memory() {
        let groups = "5:cpu:/other\n4:memory:/pod/app\n0::/\n";
        let limits = [
            ("memory/pod/memory.limit_in_bytes", "8589934592\n"),
            ("memory/pod/app/memory.limit_in_bytes", "9223372036854771712\n"),
            ("cpu/other/memory.limit_in_bytes", "1\n"),
        ];
        assert_eq!(limit(groups, V1, &limits), Some(8 * GIB));
        let mixed = format!("{V1}{}", V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"));
        let more = [limits.as_slice(), &[("unified/memory.max", "4294967296")]].concat();
        assert_eq!(limit(groups, &mixed, &more), Some(4 * GIB));
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_mount_point() {
        let limits = [("memory.max", "8589934592\n")];
        // With a name space of control groups, and without one, where the mount begins at the group.
        assert_eq!(limit("0::/\n", V2, &limits), Some(8 * GIB));
        let inside = V2.replace(" / /sys", " /docker/abc /sys");
        assert_eq!(limit("0::/docker/abc\n", &inside, &limits), Some(8 * GIB));
        assert_eq!(limit("0::/../other\n", V2, &limits), Some(8 * GIB));
    }

    #[test]
    fn what_cannot_be_read_is_no_limit() {
        assert_eq!(memory_limit_bytes(Path::new("/nowhere")), None);
        assert_eq!(limit("0::/\n", V2, &[]), None);
        for (groups, mounts) in
            [("", ""), ("::", "a - b"), ("0:\n1", " - cgroup2"), ("0::/x", "1 2 3 4 5 - cgroup2 a b")]
        {
            assert_eq!(limit(groups, mounts, &[("memory.max", "nonsense")]), None, "{groups:?} {mounts:?}");
        }
        let blank = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/a\\040b");
        assert_eq!(limit("0::/\n", &blank, &[("a b/memory.max", "7")]), Some(7));
    }

    #[test]
    fn this_process_may_use_some_memory() {
        assert!(memory_bytes() > 0 && memory_bytes() <= physical_bytes());
    }
}
