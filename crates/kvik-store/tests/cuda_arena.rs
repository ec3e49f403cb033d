//! An arena that is registered with a GPU's driver; needs the feature `cuda-tests` and a device.

use kvik_store::register_with_cuda;
use kvik_tier::{Arena, ArenaOptions};

#[test]
fn an_arena_is_registered_once_and_its_memory_is_given_back() {
    for _ in 0..3 {
        let arena = Arena::new(ArenaOptions::new(256 << 20)).unwrap();
        register_with_cuda(&arena, 0).unwrap();
        // The driver knows the range: it refuses to register it again.
        let error = register_with_cuda(&arena, 0).unwrap_err().to_string();
        assert!(error.contains("ALREADY_REGISTERED"), "{error}");
        let mut slot = arena.allocate(1 << 20).unwrap();
        slot.fill(7);
        assert!(slot.freeze().iter().all(|byte| *byte == 7));
    }
}

#[test]
fn a_device_that_is_not_there_leaves_the_arena_as_it_is() {
    let arena = Arena::new(ArenaOptions::new(16 << 20)).unwrap();
    assert!(register_with_cuda(&arena, 999).is_err());
    assert!(arena.allocate(1 << 20).is_some());
}
