//! The programs of `programs.rs` that need a GPU.

mod support;

use std::path::Path;

use support::{Linkage, Program};

#[test]
fn a_gpu_frees_blocks_after_its_events_and_maps_chunks() {
    Program::build(Path::new("cuda.c"), Linkage::Static).run();
}
