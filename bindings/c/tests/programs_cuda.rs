//! The programs of `programs.rs` that need a GPU.

mod support;

use std::path::Path;

use support::{Linkage, Program};

#[test]
fn a_gpu_frees_blocks_after_its_events_and_maps_chunks() {
    Program::build(Path::new("cuda.c"), Linkage::Static).run();
}

#[test]
fn the_adapters_for_tensorrt_llm_run_on_a_gpu() {
    for example in ["allocator.cpp", "cache_manager.cpp"] {
        Program::build_example(example, Linkage::Static).run_with(&["0"]);
    }
}

#[test]
fn the_allocation_trace_is_replayed_on_a_gpu() {
    let program = Program::build_example("alloc_trace.c", Linkage::Static);
    println!("{}", program.run_with(&["--device", "0", "--steps", "200", "--rounds", "1"]));
}
