//! The folder of shared memory: which ledgers are in it, and in which of them a name is.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use kvik_memory::ledger::{DeviceSnapshot, GroupSnapshot, Ledger, list_devices};

use super::arguments::CommonArguments;

/// The bytes of a segment of kvcached: total, used and preallocated.
const KVCACHED_SEGMENT_BYTES: usize = 24;

/// A folder of shared memory, seen whole or for one device.
#[derive(Debug, Clone)]
pub(crate) struct MemoryFolder {
    dir: PathBuf,
    device: Option<String>,
}

/// Everything in a folder at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    /// The ledgers, sorted by device.
    pub(crate) devices: Vec<DeviceSnapshot>,
    /// Segments of kvcached itself, sorted by name.
    pub(crate) kvcached: Vec<KvcachedSegment>,
    /// Ledgers that could not be read.
    pub(crate) unreadable: Vec<UnreadableLedger>,
}

/// A segment that an engine with kvcached made; it is only read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KvcachedSegment {
    pub(crate) ipc_name: String,
    pub(crate) limit_bytes: u64,
    pub(crate) used_bytes: u64,
    pub(crate) parked_bytes: u64,
}

/// A ledger that could not be read, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnreadableLedger {
    pub(crate) device: String,
    pub(crate) reason: String,
}

/// A group and the ledger that it is in.
#[derive(Debug)]
pub(crate) struct FoundGroup {
    pub(crate) ledger: Ledger,
    pub(crate) budget_bytes: u64,
    pub(crate) group: GroupSnapshot,
}

// === impl MemoryFolder ===

impl MemoryFolder {
    pub(crate) fn new(common: &CommonArguments) -> Self {
        Self { dir: common.dir().to_owned(), device: common.device.clone() }
    }

    /// This folder, seen for `device`.
    pub(crate) fn of_device(&self, device: &str) -> Self {
        Self { device: Some(device.to_owned()), ..self.clone() }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The device that was asked for.
    pub(crate) fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// The devices that have a ledger and were asked for.
    ///
    /// Fails if one was asked for that has none.
    pub(crate) fn devices(&self) -> anyhow::Result<Vec<String>> {
        let devices = list_devices(&self.dir)?;
        let Some(wanted) = &self.device else { return Ok(devices) };
        if devices.contains(wanted) {
            return Ok(vec![wanted.clone()]);
        }
        bail!("no ledger of device {wanted} in {}; {}", self.dir.display(), there_are(&devices))
    }

    /// Looks at everything.
    pub(crate) fn read(&self) -> anyhow::Result<Reading> {
        let mut reading = Reading::default();
        for device in self.devices()? {
            let snapshot = Ledger::open_existing(&self.dir, &device)
                .and_then(|ledger| ledger.map(|ledger| ledger.snapshot()).transpose());
            match snapshot {
                Ok(Some(snapshot)) => reading.devices.push(snapshot),
                // It went since the folder was listed.
                Ok(None) => {}
                Err(error) => {
                    reading.unreadable.push(UnreadableLedger { device, reason: error.to_string() });
                }
            }
        }
        // A segment of kvcached does not say which device it is about.
        if self.device.is_none() {
            reading.kvcached = kvcached_segments(&self.dir)?;
        }
        Ok(reading)
    }

    /// Every IPC name, sorted.
    pub(crate) fn names(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.read()?.names())
    }

    /// Finds a group that exists.
    ///
    /// Fails if the name is unknown, on several devices, or of kvcached.
    pub(crate) fn find(&self, ipc_name: &str) -> anyhow::Result<FoundGroup> {
        match self.find_if_any(ipc_name)? {
            Some(found) => Ok(found),
            None => Err(self.unknown(ipc_name)?),
        }
    }

    /// Finds a group; `None` if there is none in any ledger that can be read.
    pub(crate) fn find_if_any(&self, ipc_name: &str) -> anyhow::Result<Option<FoundGroup>> {
        let mut found: Vec<FoundGroup> = Vec::new();
        for device in self.devices()? {
            // One that cannot be read does not hide the others, unless it was asked for.
            let ledger = match Ledger::open_existing(&self.dir, &device) {
                Ok(ledger) => ledger,
                Err(error) if self.device.is_some() => return Err(error.into()),
                Err(_) => continue,
            };
            let Some(ledger) = ledger else { continue };
            let DeviceSnapshot { groups, budget_bytes, .. } = ledger.snapshot()?;
            let group = groups.into_iter().find(|group| group.ipc_name == ipc_name);
            found.extend(group.map(|group| FoundGroup { ledger, budget_bytes, group }));
        }
        if found.len() > 1 {
            let devices: Vec<&str> = found.iter().map(|found| found.ledger.device()).collect();
            bail!(
                "{ipc_name} is on several devices: {}; choose one with --device DEVICE",
                devices.join(", ")
            );
        }
        Ok(found.pop())
    }

    /// Why a name is not found.
    fn unknown(&self, ipc_name: &str) -> anyhow::Result<anyhow::Error> {
        let reading = self.read()?;
        if reading.kvcached.iter().any(|segment| segment.ipc_name == ipc_name) {
            return Ok(anyhow!("{ipc_name} is a segment of kvcached itself, which kvctl only reads"));
        }
        let names = reading.names();
        if reading.devices.is_empty() && names.is_empty() {
            return Ok(anyhow!("unknown IPC name {ipc_name}; there is no ledger in {}", self.dir.display()));
        }
        Ok(unknown_name(ipc_name, &names))
    }
}

/// The error for a name that does not exist.
pub(crate) fn unknown_name(ipc_name: &str, names: &[String]) -> anyhow::Error {
    anyhow!("unknown IPC name {ipc_name}; {}", there_are(names))
}

fn there_are(names: &[String]) -> String {
    if names.is_empty() { "there are none".to_owned() } else { format!("there are: {}", names.join(", ")) }
}

// === impl Reading ===

impl Reading {
    /// Every IPC name, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let groups = self.devices.iter().flat_map(|device| &device.groups).map(|group| &group.ipc_name);
        let mut names: Vec<String> =
            groups.chain(self.kvcached.iter().map(|segment| &segment.ipc_name)).cloned().collect();
        names.sort();
        names.dedup();
        names
    }

    /// Leaves only the given names; none means all.
    pub(crate) fn keep(&mut self, names: &[String]) {
        if names.is_empty() {
            return;
        }
        for device in &mut self.devices {
            device.groups.retain(|group| names.contains(&group.ipc_name));
            device.members.retain(|member| names.contains(&member.ipc_name));
        }
        self.kvcached.retain(|segment| names.contains(&segment.ipc_name));
    }

    /// Fails if one of `names` does not exist.
    pub(crate) fn check_names(&self, names: &[String]) -> anyhow::Result<()> {
        let existing = self.names();
        match names.iter().find(|name| !existing.contains(name)) {
            Some(name) => Err(unknown_name(name, &existing)),
            None => Ok(()),
        }
    }
}

/// The segments of kvcached in `dir`: regular files of exactly 24 bytes with a positive total.
fn kvcached_segments(dir: &Path) -> anyhow::Result<Vec<KvcachedSegment>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?;
    let mut segments: Vec<KvcachedSegment> = entries
        .flatten()
        .filter(|entry| {
            // Links are not followed: their length is that of their text.
            entry.metadata().is_ok_and(|file| file.is_file() && file.len() == KVCACHED_SEGMENT_BYTES as u64)
        })
        .filter_map(|entry| kvcached_segment(&entry.path(), entry.file_name().to_str()?))
        .collect();
    segments.sort_by(|left, right| left.ipc_name.cmp(&right.ipc_name));
    Ok(segments)
}

fn kvcached_segment(path: &Path, ipc_name: &str) -> Option<KvcachedSegment> {
    // A name that could steer the terminal is none that an engine has.
    if ipc_name.chars().any(char::is_control) {
        return None;
    }
    let bytes: [u8; KVCACHED_SEGMENT_BYTES] = std::fs::read(path).ok()?.try_into().ok()?;
    let word = |index: usize| bytes.as_chunks::<8>().0.get(index).map(|word| i64::from_le_bytes(*word));
    let limit_bytes = u64::try_from(word(0)?).ok().filter(|&total_bytes| total_bytes > 0)?;
    Some(KvcachedSegment {
        ipc_name: ipc_name.to_owned(),
        limit_bytes,
        used_bytes: u64::try_from(word(1)?).unwrap_or(0),
        parked_bytes: u64::try_from(word(2)?).unwrap_or(0),
    })
}
