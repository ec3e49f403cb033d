//! Devices without a file system: what is refused, what is formatted, and losses of power while that happens.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use parking_lot::Mutex;

use super::{CAPACITY_BYTES, SEGMENT_BYTES, device_image, get, open, options, put, temporary_directory};
use crate::conformance::content_key;
use crate::decorator::Checksummed;
use crate::nvme::device::{DeviceHeader, Medium};
use crate::nvme::{AlignedBuffer, NvmeOptions, NvmeTier, format_device};
use crate::random::SplitMix64;
use crate::tier::Tier as _;

const DEVICE_BYTES: u64 = (1 << 20) + CAPACITY_BYTES;

fn strict(path: &Path) -> NvmeOptions {
    NvmeOptions { formats_device: false, ..options(path) }
}

fn refusal(options: &NvmeOptions) -> String {
    NvmeTier::open(options).map(|_| ()).unwrap_err().to_string()
}

#[test]
fn a_formatted_device_keeps_its_chunks_over_starts() {
    let dir = temporary_directory();
    let path = device_image(dir.path());
    assert_eq!(format_device(&options(&path)).unwrap(), CAPACITY_BYTES);
    let whole = NvmeOptions { capacity_bytes: NvmeOptions::WHOLE_DEVICE, ..strict(&path) };
    let tier = Checksummed::new(NvmeTier::open(&whole).unwrap());
    for chunk_idx in 0..12 {
        assert!(put(&tier, chunk_idx).is_present(), "chunk {chunk_idx}");
    }
    tier.delete(&[content_key(3)]).unwrap();
    drop(tier);
    let tier = Checksummed::new(NvmeTier::open(&strict(&path)).unwrap());
    for chunk_idx in 0..12 {
        assert_eq!(get(&tier, chunk_idx, "again").is_hit(), chunk_idx != 3, "chunk {chunk_idx}");
    }
    assert_eq!(fs::metadata(&path).unwrap().len(), DEVICE_BYTES, "it takes no more than the device");
}

#[test]
fn a_device_is_used_again_and_again_within_its_length() {
    let dir = temporary_directory();
    let path = device_image(dir.path());
    let tier = open(&path);
    for chunk_idx in 0..400 {
        assert!(put(&tier, chunk_idx).is_present(), "chunk {chunk_idx}");
        assert!(get(&tier, chunk_idx, "fresh").is_hit());
        if let Some(old) = chunk_idx.checked_sub(8) {
            tier.delete(&[content_key(old)]).unwrap();
        }
    }
    drop(tier);
    assert_eq!(fs::metadata(&path).unwrap().len(), DEVICE_BYTES);
    let tier = open(&path);
    assert!((392..400).all(|chunk_idx| get(&tier, chunk_idx, "again").is_hit()));
}

#[test]
fn a_device_without_a_header_is_refused_and_not_touched() {
    let dir = temporary_directory();
    let path = dir.path().join("device");
    let mut random = SplitMix64::new(7);
    let bytes: Vec<u8> = (0..DEVICE_BYTES).map(|_| 1 + random.below(80) as u8).collect();
    fs::write(&path, &bytes).unwrap();
    let text = refusal(&strict(&path));
    assert!(text.contains("it has no header of kvik") && text.contains("kvik store format DEVICE"), "{text}");
    assert!(fs::read(&path).unwrap() == bytes, "nothing was written");
    // On demand it is formatted, once.
    format_device(&strict(&path)).unwrap();
    let again = format_device(&strict(&path)).unwrap_err().to_string();
    assert!(again.contains("has not formatted"), "{again}");
    NvmeTier::open(&strict(&path)).unwrap();
}

#[test]
fn a_device_with_the_mark_of_another_program_is_never_formatted_or_used() {
    for (offset, mark, owner) in [
        (0x438, &b"\x53\xef"[..], "ext2"),
        (0x1_0040, b"_BHRfS_M", "Btrfs"),
        (0x200, b"EFI PART", "GUID partition"),
        (0, b"XFSB", "XFS"),
    ] {
        let dir = temporary_directory();
        let path = device_image(dir.path());
        // Also where kvik had formatted it before.
        drop(open(&path));
        File::options().write(true).open(&path).unwrap().write_all_at(mark, offset).unwrap();
        let before = fs::read(&path).unwrap();
        let text = refusal(&options(&path));
        assert!(text.contains(owner) && text.contains("wipefs"), "{text}");
        assert!(format_device(&options(&path)).unwrap_err().to_string().contains(owner));
        assert!(fs::read(&path).unwrap() == before, "nothing was written");
    }
}

#[test]
fn a_device_in_use_and_a_size_that_it_does_not_have_are_refused() {
    let dir = temporary_directory();
    let path = device_image(dir.path());
    let tier = open(&path);
    assert!(refusal(&options(&path)).contains("no other program has open"));
    assert!(format_device(&options(&path)).unwrap_err().to_string().contains("no other program has open"));
    drop(tier);
    // The device has become larger; its format has not.
    File::options().write(true).open(&path).unwrap().set_len(2 * DEVICE_BYTES).unwrap();
    let larger = NvmeOptions { capacity_bytes: 2 * CAPACITY_BYTES, ..options(&path) };
    assert!(refusal(&larger).contains("that of the format, 524288 bytes"), "{}", refusal(&larger));
    let too_large = NvmeOptions { capacity_bytes: 4 * DEVICE_BYTES, ..options(&path) };
    assert!(refusal(&too_large).contains("which the device has"));
    let tiny = dir.path().join("tiny");
    fs::write(&tiny, [0; 8192]).unwrap();
    assert!(refusal(&NvmeOptions { capacity_bytes: u64::MAX, ..options(&tiny) }).contains("capacity_bytes"));
    let folder = NvmeOptions { capacity_bytes: u64::MAX, ..options(&dir.path().join("folder")) };
    assert!(refusal(&folder).contains("a size where it is a folder"));
}

#[test]
fn a_header_is_read_only_as_a_whole() {
    let header = DeviceHeader { id: [7; 16], segment_bytes: SEGMENT_BYTES, n_segments: 8 };
    let block = header.encode();
    assert_eq!(DeviceHeader::decode(&block, DEVICE_BYTES), Ok(header));
    assert!(DeviceHeader::decode(&block, DEVICE_BYTES - 1).is_err(), "the device became smaller");
    for bit in 0..block.len() * 8 {
        let mut damaged = block.to_vec();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(DeviceHeader::decode(&damaged, DEVICE_BYTES).is_err(), "bit {bit}");
    }
    for n_bytes in 0..block.len() {
        assert!(DeviceHeader::decode(&block[..n_bytes], DEVICE_BYTES).is_err(), "{n_bytes} bytes");
    }
    for few in [0, 1, 7] {
        let header = DeviceHeader { n_segments: few, ..header };
        assert!(DeviceHeader::decode(&header.encode(), DEVICE_BYTES).is_err(), "{few} segments");
    }
    let huge = DeviceHeader { segment_bytes: 1 << 63, n_segments: 8, ..header };
    assert!(DeviceHeader::decode(&huge.encode(), u64::MAX).is_err());
}

/// Keeps what formatting writes.
#[derive(Default)]
struct FormatRecorder(Mutex<Vec<FormatEvent>>);

/// A write, or a sync.
type FormatEvent = Option<(u64, Vec<u8>)>;

impl Medium for FormatRecorder {
    fn write(&self, offset: u64, blocks: &AlignedBuffer) -> io::Result<()> {
        self.0.lock().push(Some((offset, blocks.to_vec())));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.lock().push(None);
        Ok(())
    }
}

#[test]
fn no_loss_of_power_while_a_device_is_formatted_brings_anything_back() {
    let dir = temporary_directory();
    let path = device_image(dir.path());
    let tier = open(&path);
    for chunk_idx in 0..20 {
        put(&tier, chunk_idx);
    }
    drop(tier);
    let before = fs::read(&path).unwrap();
    let recorder = FormatRecorder::default();
    let header = DeviceHeader { id: [9; 16], segment_bytes: SEGMENT_BYTES, n_segments: 8 };
    header.format(&recorder).unwrap();
    let events = recorder.0.into_inner();
    let mut random = SplitMix64::new(11);
    let (mut n_refused, mut n_formatted) = (0, 0);
    for n_events in 1..=events.len() {
        let n_safe = events[..n_events].iter().rposition(Option::is_none).unwrap_or(0);
        for _ in 0..24 {
            let mut bytes = before.clone();
            for (event_idx, event) in events[..n_events].iter().enumerate() {
                let Some((offset, written)) = event else { continue };
                for (sector_idx, sector) in written.chunks(512).enumerate() {
                    if event_idx < n_safe || random.below(2) == 0 {
                        let start = *offset as usize + sector_idx * 512;
                        bytes[start..start + sector.len()].copy_from_slice(sector);
                    }
                }
            }
            fs::write(&path, &bytes).unwrap();
            let is_begun = n_safe > 0;
            if let Ok(tier) = NvmeTier::open(&strict(&path)) {
                let tier = Checksummed::new(tier);
                let n_hits = (0..20).filter(|chunk_idx| get(&tier, *chunk_idx, "left").is_hit()).count();
                assert!(!is_begun || n_hits == 0, "{n_events} events: {n_hits} chunks came back");
                n_formatted += usize::from(is_begun);
            } else {
                n_refused += 1;
                let tier = open(&path);
                assert!(put(&tier, 50).is_present() && get(&tier, 50, "formatted again").is_hit());
            }
        }
    }
    assert!(n_refused > 100 && n_formatted >= 24, "{n_refused} refused, {n_formatted} formatted");
}

/// A loop device over an image, as long as it lives.
struct LoopDevice(PathBuf);

impl LoopDevice {
    /// `None` where this user or machine may not make one.
    fn over(image: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(image).output().ok()?;
        let path = String::from_utf8(made.stdout).ok().filter(|_| made.status.success())?;
        Some(Self(PathBuf::from(path.trim())))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn a_loop_device_is_used_past_the_page_cache_and_by_one_tier_alone() {
    let dir = tempfile::tempdir().unwrap();
    let Some(device) = LoopDevice::over(&device_image(dir.path())) else { return };
    let whole = NvmeOptions { capacity_bytes: NvmeOptions::WHOLE_DEVICE, ..strict(&device.0) };
    assert!(refusal(&whole).contains("kvik store format DEVICE"));
    format_device(&whole).unwrap();
    let tier = Checksummed::new(NvmeTier::open(&whole).unwrap());
    for chunk_idx in 0..12 {
        assert!(put(&tier, chunk_idx).is_present());
    }
    assert!(refusal(&whole).contains("no other program has open"), "the kernel refuses a second user");
    tier.flush().unwrap();
    drop(tier);
    let tier = Checksummed::new(NvmeTier::open(&whole).unwrap());
    assert!((0..12).all(|chunk_idx| get(&tier, chunk_idx, "again").is_hit()));
}
