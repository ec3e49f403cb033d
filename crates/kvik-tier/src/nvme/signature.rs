//! What other programs leave at the beginning of a device.

/// Bytes from the beginning of a device that are searched, and that no segment lies in.
pub(crate) const SEARCHED_BYTES: u64 = 1 << 20;

/// A mark: what leaves it, where it lies and its bytes.
type Mark = (&'static str, usize, &'static [u8]);

const MARKS: [Mark; 28] = [
    ("an ext2, ext3 or ext4 file system", 0x438, &[0x53, 0xef]),
    ("an XFS file system", 0, b"XFSB"),
    ("a Btrfs file system", 0x1_0040, b"_BHRfS_M"),
    ("an F2FS file system", 0x400, &[0x10, 0x20, 0xf5, 0xf2]),
    ("a bcachefs or bcache device", 0x1018, &[0xc6, 0x85, 0x73, 0xf6]),
    ("an EROFS file system", 0x400, &[0xe2, 0xe1, 0xf5, 0xe0]),
    ("a JFS file system", 0x8000, b"JFS1"),
    ("a ReiserFS file system", 0x1_0034, b"ReIsEr"),
    ("a SquashFS file system", 0, b"hsqs"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("a UDF file system", 0x8001, b"BEA01"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("a FAT file system", 0x36, b"FAT"),
    ("a FAT32 file system", 0x52, b"FAT32"),
    ("a partition table", 0x1fe, &[0x55, 0xaa]),
    ("a GUID partition table", 0x200, b"EFI PART"),
    ("a GUID partition table", 0x1000, b"EFI PART"),
    ("an LVM volume", 0, b"LABELONE"),
    ("an LVM volume", 0x200, b"LABELONE"),
    ("an LVM volume", 0x400, b"LABELONE"),
    ("an LVM volume", 0x600, b"LABELONE"),
    ("an encrypted volume (LUKS)", 0, b"LUKS\xba\xbe"),
    ("a part of a RAID", 0, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("a part of a RAID", 0x1000, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("swap space", 0xff6, b"SWAPSPACE2"),
    ("swap space", 0xff6, b"SWAP-SPACE"),
    ("a Ceph BlueStore device", 0, b"bluestore block device"),
];

/// ZFS has its mark in one of many places, at multiples of this from 128 KiB on.
const ZFS_STEP: usize = 1024;
const ZFS_FIRST: usize = 128 << 10;
const ZFS_END: usize = 256 << 10;
const ZFS_MAGIC: u64 = 0x00ba_b10c;

/// What has left a mark in the first bytes of a device; none if nothing known has.
pub(crate) fn find_signature(bytes: &[u8]) -> Option<&'static str> {
    let has = |offset: usize, mark: &[u8]| bytes.get(offset..offset + mark.len()) == Some(mark);
    let found = MARKS.iter().find(|(_, offset, mark)| has(*offset, mark)).map(|(owner, ..)| *owner);
    let has_zfs = || {
        let magics = [ZFS_MAGIC.to_le_bytes(), ZFS_MAGIC.to_be_bytes()];
        (ZFS_FIRST..ZFS_END).step_by(ZFS_STEP).any(|offset| magics.iter().any(|magic| has(offset, magic)))
    };
    found.or_else(|| has_zfs().then_some("a ZFS file system"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_is_found_where_it_lies_and_nothing_in_empty_bytes() {
        let empty = vec![0; SEARCHED_BYTES as usize];
        assert_eq!(find_signature(&empty), None);
        assert_eq!(find_signature(&[]), None);
        for (owner, offset, mark) in MARKS {
            let mut bytes = empty.clone();
            bytes[offset..offset + mark.len()].copy_from_slice(mark);
            assert_eq!(find_signature(&bytes), Some(owner));
        }
        let mut bytes = empty;
        bytes[ZFS_FIRST + 7 * ZFS_STEP..][..8].copy_from_slice(&ZFS_MAGIC.to_le_bytes());
        assert_eq!(find_signature(&bytes), Some("a ZFS file system"));
    }
}
