use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;

use super::buddy::Buddy;
use super::*;

fn arena(n_units: u64) -> Arena {
    Arena::new(ArenaOptions::new(n_units * UNIT_BYTES as u64)).unwrap()
}

#[test]
fn a_slot_has_the_length_that_was_asked_for_and_starts_at_a_unit() {
    let arena = arena(64);
    for n_bytes in [0, 1, 4095, 4096, 4097, 3 * 4096 + 5] {
        let mut slot = arena.allocate(n_bytes).unwrap();
        assert_eq!(slot.len(), n_bytes);
        assert_eq!(slot.as_ptr().addr() % UNIT_BYTES, 0);
        assert_eq!(slot.offset() % UNIT_BYTES as u64, 0);
        slot.fill(7);
        assert!(slot.freeze().iter().all(|byte| *byte == 7));
    }
    assert_eq!(arena.stat().used_bytes, 0);
}

#[test]
fn a_request_for_more_than_the_arena_is_refused() {
    let arena = arena(16);
    assert!(arena.allocate(16 * UNIT_BYTES + 1).is_none());
    assert!(arena.allocate(usize::MAX).is_none());
    assert!(arena.allocate(16 * UNIT_BYTES).is_some());
}

#[test]
fn the_padding_of_a_lease_is_zero() {
    let arena = arena(1);
    arena.allocate(UNIT_BYTES).unwrap().fill(0xff);
    let mut slot = arena.allocate(10).unwrap();
    slot.padded_mut().fill(0xee);
    let lease = slot.freeze();
    assert_eq!(*lease, [0xee; 10]);
    assert_eq!(lease.padded().len(), UNIT_BYTES);
    assert!(lease.padded()[10..].iter().all(|byte| *byte == 0));
}

/// Bytes that tell in each unit which chunk and which unit of it they are.
pub(crate) fn content(number: u64, n_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![number as u8; n_bytes];
    for (unit_idx, unit) in bytes.chunks_mut(UNIT_BYTES).enumerate() {
        let name = [number.to_le_bytes(), (unit_idx as u64).to_le_bytes()].concat();
        let n_name_bytes = name.len().min(unit.len());
        unit[..n_name_bytes].copy_from_slice(&name[..n_name_bytes]);
    }
    bytes
}

fn stamp(bytes: &mut [u8], number: u64) {
    bytes.copy_from_slice(&content(number, bytes.len()));
}

fn is_stamped(bytes: &[u8], number: u64) -> bool {
    *bytes == content(number, bytes.len())
}

fn n_free_huge_pages() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = info.lines().find(|line| line.starts_with("HugePages_Free:"));
    line.and_then(|line| line.split_whitespace().nth(1)).map_or(0, |count| count.parse().unwrap())
}

#[test]
fn an_arena_of_nothing_or_of_too_much_is_refused() {
    for capacity_bytes in [0, 4095, u64::MAX] {
        let refused = Arena::new(ArenaOptions::new(capacity_bytes)).unwrap_err();
        assert!(matches!(refused, TierError::Invalid { field: "capacity_bytes", .. }));
    }
    let options = ArenaOptions { huge_pages: HugePages::Required, ..ArenaOptions::new((2 << 20) - 1) };
    assert!(matches!(Arena::new(options), Err(TierError::Invalid { field: "capacity_bytes", .. })));
}

#[test]
fn huge_pages_that_the_machine_does_not_have_are_an_error_only_where_they_are_required() {
    let capacity_bytes = (n_free_huge_pages() + 64) * HUGE_PAGE_BYTES as u64;
    let options = ArenaOptions::new(capacity_bytes);
    let refused = Arena::new(ArenaOptions { huge_pages: HugePages::Required, ..options });
    assert!(matches!(refused, Err(TierError::Io { .. })), "{refused:?}");
    let arena = Arena::new(options).unwrap();
    assert_eq!(arena.stat().page_bytes, 4096);
    assert_eq!(arena.stat().capacity_bytes, capacity_bytes);
    arena.allocate(10_000).unwrap().fill(1);
}

#[test]
fn arenas_that_are_made_at_a_time_never_take_the_memory_of_another() {
    let threads: Vec<_> = (0..4_u8)
        .map(|number| {
            std::thread::spawn(move || {
                for _ in 0..1_000 {
                    let options = ArenaOptions { huge_pages: HugePages::Auto, ..ArenaOptions::new(16 << 20) };
                    let mut slot = Arena::new(options).unwrap().allocate(UNIT_BYTES).unwrap();
                    slot.fill(number);
                    assert!(slot.freeze().iter().all(|byte| *byte == number));
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn the_memory_file_cannot_be_resized_and_has_what_was_written() {
    let arena = arena(64);
    assert!(rustix::fs::ftruncate(arena.as_fd(), 0).is_err());
    assert!(rustix::fs::ftruncate(arena.as_fd(), 1 << 30).is_err());
    let _other = arena.allocate(5000).unwrap();
    let mut slot = arena.allocate(100).unwrap();
    stamp(&mut slot, 3);
    let lease = slot.freeze();
    let file = std::fs::File::from(arena.as_fd().try_clone_to_owned().unwrap());
    let mut bytes = [0; 100];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, lease.offset()).unwrap();
    assert_eq!(bytes, *lease);
}

#[test]
fn a_child_of_fork_does_not_get_the_mapping() {
    let arena = arena(1 << 10);
    let address = format!("{:x}-", arena.shared.mapping.address().as_ptr().addr());
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mapping = maps.split_once(&address).unwrap().1;
    let flags = mapping.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
}

#[test]
fn memory_is_taken_when_it_is_first_needed() {
    let arena = arena(8 * 512);
    assert_eq!(arena.stat().committed_bytes, 0);
    drop(arena.allocate(1));
    assert_eq!(arena.stat().committed_bytes, 2 << 20);
    drop(arena.allocate(1));
    assert_eq!(arena.stat().committed_bytes, 2 << 20);
    drop(arena.allocate(5 << 20));
    assert_eq!(arena.stat().committed_bytes, 6 << 20);

    let options = ArenaOptions { commitment: Commitment::AtStart, ..ArenaOptions::new((3 << 20) + 4096) };
    assert_eq!(Arena::new(options).unwrap().stat().committed_bytes, (3 << 20) + 4096);
}

#[test]
fn what_could_not_be_populated_is_tried_again() {
    let committed = Committed::new(4 * 512);
    let mut n_calls = 0;
    let refused = committed.ensure(Run::new(500, 100), |_| {
        n_calls += 1;
        Err("no memory")
    });
    assert_eq!((refused, n_calls, committed.n_bytes()), (Err("no memory"), 1, 0));
    let mut asked = Vec::new();
    let mut ensure = |run| {
        committed.ensure(run, |part| {
            asked.push(part);
            Ok::<_, ()>(())
        })
    };
    ensure(Run::new(600, 1)).unwrap();
    ensure(Run::new(0, 2048)).unwrap();
    ensure(Run::new(500, 100)).unwrap();
    assert_eq!(asked, [Run::new(512, 512), Run::new(0, 512), Run::new(1024, 1024)]);
}

#[test]
fn memory_that_the_kernel_does_not_have_is_no_room_and_no_crash() {
    let arena = arena(2 * 512);
    let empty = rustix::fs::memfd_create("kvik-empty", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    // SAFETY: nothing was allocated yet, so there are no references into what is replaced; it is unmapped
    // with the arena. A thread that touched it would be killed, as by a huge page that is missing.
    unsafe {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        let granule = arena.shared.mapping.at(2 << 20).as_ptr().cast();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        mmap(granule, 2 << 20, protection, MapFlags::SHARED | MapFlags::FIXED, &empty, 0).unwrap();
    }
    let mut slot = arena.allocate(2 << 20).unwrap();
    slot.fill(1);
    for n_refusals in 1..=2 {
        assert!(arena.allocate(1 << 20).is_none());
        let stat = arena.stat();
        assert_eq!((stat.n_refusals, stat.used_bytes, stat.committed_bytes), (n_refusals, 2 << 20, 2 << 20));
    }
    drop(slot);
    assert!(arena.allocate(2 << 20).is_some());
}

#[test]
fn memory_can_be_spread_over_a_list_of_nodes() {
    let arena = arena(512);
    let nodes = numa::nodes_with_memory();
    assert!(!nodes.is_empty());
    arena.shared.mapping.interleave(&nodes).unwrap();
    let options = |numa| ArenaOptions { numa, ..ArenaOptions::new(512 * UNIT_BYTES as u64) };
    let on_one = Arena::new(options(NumaPlacement::Node(nodes[0]))).unwrap();
    on_one.allocate(512 * UNIT_BYTES).unwrap().fill(1);
    let error = Arena::new(options(NumaPlacement::Node(4000))).unwrap_err().to_string();
    assert!(error.contains("`NUMA node` is 4000"), "{error}");
    assert!(arena.shared.mapping.interleave(&[5000]).is_err());
    arena.allocate(512 * UNIT_BYTES).unwrap().fill(1);
}

#[derive(Debug, Default)]
struct RecordingRegistrar {
    registered: Mutex<Vec<(usize, usize)>>,
    is_refusing: bool,
}

impl HostRegistrar for RecordingRegistrar {
    fn register(&self, address: NonNull<u8>, n_bytes: usize) -> Result<()> {
        if self.is_refusing {
            return Err(TierError::io("register memory", std::io::ErrorKind::Unsupported.into()));
        }
        self.registered.lock().push((address.as_ptr().addr(), n_bytes));
        Ok(())
    }

    fn unregister(&self, address: NonNull<u8>, n_bytes: usize) {
        self.registered.lock().retain(|range| *range != (address.as_ptr().addr(), n_bytes));
    }
}

#[test]
fn a_registered_arena_is_unregistered_when_its_last_lease_is_gone() {
    let registrar = Arc::new(RecordingRegistrar::default());
    let arena = arena(1024);
    arena.register_with(Arc::clone(&registrar) as Arc<dyn HostRegistrar>).unwrap();
    assert_eq!(arena.stat().committed_bytes, 4 << 20);
    let slot = arena.allocate(100).unwrap();
    let (address, n_bytes) = registrar.registered.lock()[0];
    assert!((address..address + n_bytes).contains(&slot.as_ptr().addr()));
    drop(arena);
    let lease = slot.freeze();
    assert_eq!(registrar.registered.lock().len(), 1);
    drop(lease);
    assert!(registrar.registered.lock().is_empty());
}

#[test]
fn an_arena_that_is_not_registered_works() {
    let arena = arena(1024);
    let refusing = RecordingRegistrar { is_refusing: true, ..RecordingRegistrar::default() };
    assert!(arena.register_with(Arc::new(refusing)).is_err());
    assert!(arena.allocate(100).is_some());
}

#[test]
fn a_size_that_is_asked_for_often_gets_extents_and_gives_them_back() {
    let arena = arena(64 * 64);
    let mut slots: Vec<Slot> = (0..200).map(|_| arena.allocate(3 * UNIT_BYTES).unwrap()).collect();
    let stat = arena.stat();
    // Three before the size is known, and 21 slots of three units in an extent of at most 64 units.
    assert_eq!(stat.n_extents, (200 - 3_usize).div_ceil(21));
    assert_eq!(stat.used_bytes, 200 * 3 * 4096);
    slots.clear();
    let stat = arena.stat();
    assert_eq!((stat.used_bytes, stat.n_extents, stat.idle_bytes), (0, 1, 63 * 4096));
    assert_eq!(arena.allocate(64 * 64 * UNIT_BYTES).unwrap().offset(), 0);
    assert_eq!(arena.stat().n_extents, 0);
}

#[test]
fn runs_of_an_odd_length_lie_side_by_side() {
    let mut buddy = Buddy::new(1000);
    let starts: Vec<u32> = std::iter::from_fn(|| buddy.take(33)).map(|run| run.start).collect();
    // The last ones may lie across blocks; only a search that joins free runs finds them.
    assert!(starts.len() >= 28, "{}", starts.len());
    assert!(starts.iter().zip(0..).all(|(start, idx)| *start == 33 * idx), "{starts:?}");
    assert_eq!(buddy.free_runs().len(), 1);
}

#[test]
fn a_power_of_two_starts_at_a_multiple_of_itself() {
    let mut buddy = Buddy::new(1000);
    assert_eq!(buddy.take(33), Some(Run::new(0, 33)));
    assert_eq!(buddy.take(64), Some(Run::new(64, 64)));
    assert_eq!(buddy.take(16), Some(Run::new(48, 16)));
}

#[test]
fn slots_of_a_dissolved_extent_come_back() {
    let arena = arena(64 * 64);
    let mut slots: Vec<Slot> = (0..45).map(|_| arena.allocate(3 * UNIT_BYTES).unwrap()).collect();
    slots.drain(..40);
    let n_extents_before = arena.stat().n_extents;
    // Only a run over the free slots of an extent is long enough.
    let mut blockers = Vec::new();
    while let Some(run) = arena.shared.buddy.lock().take(1) {
        blockers.push(run);
    }
    let large = arena.allocate(7 * UNIT_BYTES).unwrap();
    assert!(arena.stat().n_extents < n_extents_before);
    drop((slots, large));
    for run in blockers {
        arena.shared.buddy.lock().give(run);
    }
    assert_eq!(arena.stat().used_bytes, 0);
    assert!(arena.allocate(64 * 64 * UNIT_BYTES).is_some());
}

/// Tenants that have put a chunk elsewhere by the time it is to be moved.
struct RestlessTenants {
    leases: Mutex<[Lease; 2]>,
}

impl Tenants for RestlessTenants {
    type Name = ();

    fn visit(&self, visit: &mut dyn FnMut((), &Lease)) {
        visit((), &self.leases.lock()[0]);
    }

    fn with_lease(&self, (): (), act: &mut dyn FnMut(&mut Lease) -> bool) -> bool {
        act(&mut self.leases.lock()[1])
    }
}

#[test]
fn a_chunk_that_lies_elsewhere_by_now_is_not_moved() {
    let arena = arena(10);
    let mut slots: Vec<Slot> = (0..5).map(|_| arena.allocate(2 * UNIT_BYTES).unwrap()).collect();
    for (number, slot) in slots.iter_mut().enumerate() {
        stamp(slot, number as u64);
    }
    let last = slots.remove(4).freeze();
    drop(slots.remove(3));
    let middle = slots.remove(2).freeze();
    drop(slots.remove(1));
    let offsets = (middle.offset(), last.offset());
    assert!(offsets.0 < offsets.1, "between the holes lies the chunk that is listed");
    let tenants = RestlessTenants { leases: Mutex::new([middle, last]) };
    assert!(arena.allocate_among(4 * UNIT_BYTES, &tenants).is_none());
    let [middle, last] = tenants.leases.into_inner();
    assert_eq!((middle.offset(), last.offset()), offsets);
    assert!(is_stamped(&middle, 2) && is_stamped(&last, 4) && is_stamped(&slots[0], 0));
    assert_eq!(arena.stat().used_bytes, 6 * 4096);
}

#[test]
fn threads_that_take_and_give_at_a_time_never_share_a_byte() {
    let arena = arena(64 * 64);
    std::thread::scope(|scope| {
        for thread_number in 0..4_u64 {
            let arena = arena.clone();
            scope.spawn(move || {
                let mut held: Vec<(u64, Slot)> = Vec::new();
                for turn in 0..3000_u64 {
                    let number = turn * 4 + thread_number;
                    // Four sizes that get slabs, now and then one that does not.
                    let n_units = if turn.is_multiple_of(50) {
                        100 + turn as usize % 60
                    } else {
                        1 + turn as usize % 4
                    };
                    if let Some(mut slot) = arena.allocate(n_units * UNIT_BYTES - 100) {
                        stamp(&mut slot, number);
                        held.push((number, slot));
                    }
                    if held.len() > 60 || turn % 3 == 0 {
                        let victim = (number * 7919) as usize % held.len().max(1);
                        if victim < held.len() {
                            let (number, slot) = held.swap_remove(victim);
                            assert!(is_stamped(&slot, number));
                        }
                    }
                }
                assert!(held.iter().all(|(number, slot)| is_stamped(slot, *number)));
            });
        }
    });
    assert_eq!(arena.stat().used_bytes, 0);
    assert!(arena.allocate(64 * 64 * UNIT_BYTES).is_some());
}

proptest! {
    #[test]
    fn the_buddy_hands_out_no_unit_twice_and_gets_all_back(
        n_units in 1_u32..3000,
        requests in prop::collection::vec((1_u32..200, any::<bool>(), any::<Index>()), 1..200),
    ) {
        let mut buddy = Buddy::new(n_units);
        let mut taken: BTreeMap<u32, Run> = BTreeMap::new();
        for (n_wanted, is_free, index) in requests {
            if is_free && !taken.is_empty() {
                let start = *taken.keys().nth(index.index(taken.len())).unwrap();
                buddy.give(taken.remove(&start).unwrap());
            } else if let Some(run) = buddy.take(n_wanted) {
                prop_assert_eq!(run.n_units, n_wanted);
                prop_assert!(run.end() <= n_units);
                let before = taken.range(..run.end()).next_back();
                prop_assert!(before.is_none_or(|(_, other)| other.end() <= run.start));
                taken.insert(run.start, run);
            } else {
                // Any run of three times the length has an aligned block in it, rounded up.
                prop_assert!(buddy.free_runs().iter().all(|run| run.n_units < 4 * n_wanted));
            }
            let n_taken: u32 = taken.values().map(|run| run.n_units).sum();
            prop_assert_eq!(buddy.n_free_units(), n_units - n_taken);
        }
        for run in taken.into_values() {
            buddy.give(run);
        }
        prop_assert_eq!(buddy.free_runs(), [Run::new(0, n_units)]);
    }

    #[test]
    fn a_claim_takes_what_is_free_in_a_span_and_nothing_else(
        n_units in 1_u32..600,
        holes in prop::collection::vec((0_u32..600, 1_u32..30), 0..20),
        (start, length) in (0_u32..600, 0_u32..300),
    ) {
        let mut buddy = Buddy::new(n_units);
        let mut is_free = vec![true; n_units as usize];
        let whole = Run::new(0, n_units);
        for (hole_start, hole_length) in holes {
            for run in buddy.claim(Run::new(hole_start, hole_length).intersection(whole)) {
                is_free[run.start as usize..run.end() as usize].fill(false);
            }
        }
        let claimed = buddy.claim(Run::new(start, length).intersection(whole));
        let in_claim = |unit: u32| claimed.iter().any(|run| (run.start..run.end()).contains(&unit));
        let still_free = buddy.free_runs();
        for unit in 0..n_units {
            let was_free = is_free[unit as usize];
            let is_inside = (start..start + length).contains(&unit);
            prop_assert_eq!(in_claim(unit), was_free && is_inside);
            let is_left = still_free.iter().any(|run| (run.start..run.end()).contains(&unit));
            prop_assert_eq!(is_left, was_free && !is_inside);
        }
    }

    #[test]
    fn slots_never_overlap_keep_their_content_and_all_come_back(
        n_units in 1_u64..2000,
        steps in prop::collection::vec((0_usize..8, any::<bool>(), any::<Index>()), 1..300),
    ) {
        let arena = arena(n_units);
        // Sizes that repeat, so that some get slabs.
        let lengths = [0, 100, 4096, 5000, 3 * 4096, 9 * 4096 - 1, 40 * 4096, 300 * 4096];
        let mut model: BTreeMap<u64, (u64, Slot)> = BTreeMap::new();
        for (number, (length_idx, is_free, index)) in steps.into_iter().enumerate() {
            let number = number as u64;
            if is_free && !model.is_empty() {
                let offset = *model.keys().nth(index.index(model.len())).unwrap();
                let (owner, slot) = model.remove(&offset).unwrap();
                prop_assert!(is_stamped(&slot, owner));
            } else if let Some(mut slot) = arena.allocate(lengths[length_idx]) {
                prop_assert_eq!(slot.len(), lengths[length_idx]);
                stamp(&mut slot, number);
                let end = slot.offset() + slot.padded_mut().len() as u64;
                prop_assert!(end <= n_units * UNIT_BYTES as u64);
                let before = model.range_mut(..end).next_back();
                let end_before = before.map_or(0, |(at, (_, other))| at + other.padded_mut().len() as u64);
                prop_assert!(end_before <= slot.offset());
                model.insert(slot.offset(), (number, slot));
            }
            let n_taken: usize = model.values_mut().map(|(_, slot)| slot.padded_mut().len()).sum();
            prop_assert_eq!(arena.stat().used_bytes, n_taken as u64);
        }
        for (owner, slot) in model.into_values() {
            prop_assert!(is_stamped(&slot, owner));
        }
        prop_assert_eq!(arena.stat().used_bytes, 0);
        prop_assert!(arena.allocate(n_units as usize * UNIT_BYTES).is_some());
    }
}
