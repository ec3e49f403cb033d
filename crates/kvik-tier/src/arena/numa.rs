//! Memory of several NUMA nodes in turn.

use std::ptr::NonNull;
use std::{fs, io};

/// Where the kernel lists the nodes that have memory, such as `0-1,4`.
const NODES_WITH_MEMORY: &str = "/sys/devices/system/node/has_memory";

/// The most nodes that a kernel can be built for.
const MAX_NODES: usize = 1024;

/// The nodes that have memory; none where the kernel does not tell.
pub(super) fn nodes_with_memory() -> Vec<u32> {
    fs::read_to_string(NODES_WITH_MEMORY).map(|list| parse_list(&list)).unwrap_or_default()
}

/// Lets pages of the range that have no memory yet take it from `nodes` in turn.
///
/// # Errors
/// If the kernel refuses: the range then keeps its policy, which is to take memory where it is touched.
pub(super) fn interleave(address: NonNull<u8>, n_bytes: usize, nodes: &[u32]) -> io::Result<()> {
    let mut mask = [0_u64; MAX_NODES / 64];
    for node in nodes {
        let word = mask.get_mut(*node as usize / 64).ok_or(io::ErrorKind::InvalidInput)?;
        *word |= 1 << (node % 64);
    }
    // The kernel looks at one bit less than it is told.
    let n_bits = MAX_NODES as libc::c_ulong + 1;
    // SAFETY: the kernel reads `n_bits - 1` bits of the mask, which has that many. The call changes where
    // memory comes from and not what is read from it.
    let status = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            address.as_ptr(),
            n_bytes as libc::c_ulong,
            libc::MPOL_INTERLEAVE,
            mask.as_ptr(),
            n_bits,
            0_u32,
        )
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The numbers of a list such as `0-1,4`; what is no number is left out.
fn parse_list(list: &str) -> Vec<u32> {
    let mut nodes = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            nodes.extend((first..=last).take(MAX_NODES));
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::parse_list;

    #[test]
    fn a_list_of_nodes_has_single_ones_and_ranges() {
        assert_eq!(parse_list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(parse_list("0\n"), [0]);
        assert_eq!(parse_list("\n"), [0; 0]);
    }
}
