use kvik_memory::PageId;

use super::*;

fn plan(block_bytes: u64, n_blocks: u64) -> Plan {
    let config = kvik_config { block_bytes, n_blocks, ..kvik_config::new() };
    Plan::try_new(&config, UNIT_BYTES).unwrap()
}

#[test]
fn every_block_that_was_asked_for_has_a_place() {
    for block_bytes in [1 << 10, 3 << 10, 1 << 20, (1 << 20) + 512, 3 << 20, 5_000_003, 64 << 20] {
        for n_blocks in [1, 2, 7, 100] {
            let plan = plan(block_bytes, n_blocks);
            let blocks = BlockGeometry::try_new(&plan.geometry, block_bytes).unwrap();
            let pages = 0..plan.geometry.capacity_pages();
            let n_whole: u64 = pages
                .map(|page| blocks.blocks_of_page(PageId(page)))
                .map(|blocks| u64::from(blocks.end.0 - blocks.start.0))
                .sum();
            assert!(n_whole >= n_blocks, "{n_whole} of {n_blocks} blocks of {block_bytes}");
        }
    }
}

#[test]
fn blocks_that_tile_pages_take_no_page_too_many() {
    assert_eq!(plan(1 << 20, 8).geometry.capacity_pages(), 4);
    assert_eq!(plan(4 << 20, 3).geometry.page_bytes(), 4 << 20);
    assert_eq!(plan(4 << 20, 3).geometry.capacity_pages(), 3);
}

#[test]
fn a_pool_without_blocks_has_one_page_of_addresses() {
    let plan = plan(0, 0);
    assert!(!plan.has_blocks);
    assert_eq!(plan.geometry.capacity_pages(), 1);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    for (block_bytes, n_blocks) in [(0, 1), (u64::MAX, 1), (1 << 20, u64::MAX), (1, 1 << 40)] {
        let config = kvik_config { block_bytes, n_blocks, ..kvik_config::new() };
        assert!(Plan::try_new(&config, UNIT_BYTES).is_err(), "{block_bytes} x {n_blocks}");
    }
}
