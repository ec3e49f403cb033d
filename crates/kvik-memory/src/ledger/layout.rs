//! How a ledger lies in its segment.
//!
//! Every field is an atomic, so every bit pattern is a value and two processes may look at it at the
//! same time. Nothing that is read here may be trusted: `table.rs` checks what it takes out.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// The first word of a ledger's segment.
pub const LEDGER_MAGIC: u64 = u64::from_le_bytes(*b"KVIKLEDG");

/// The version of this layout; it changes with every change of this file.
pub const LEDGER_VERSION: u64 = 2;

/// How many engines one device can have at a time.
///
/// A claim that its own slack does not cover reads two cache lines of each, so the number is a bound on its cost as well.
pub const N_SLOTS: usize = 64;

/// How many groups one device can have.
pub const N_GROUPS: usize = 64;

/// The longest name of a group, device or engine label in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// The bytes of a ledger's segment.
pub const LEDGER_BYTES: usize = size_of::<LedgerLayout>();

/// A name of up to [`MAX_NAME_BYTES`] bytes, padded with zeros.
pub type NameWords = [AtomicU64; MAX_NAME_BYTES / 8];

/// Words that several processes may write at the same time.
///
/// # Safety
///
/// The type is `repr(C)`, consists of atomics only, and so is valid for any bytes.
pub unsafe trait SharedWords {}

/// The whole segment.
#[derive(Debug)]
#[repr(C)]
pub struct LedgerLayout {
    /// What the segment is, and the words of the device.
    pub header: HeaderLayout,
    /// The groups.
    pub groups: [GroupLayout; N_GROUPS],
    /// The members.
    pub slots: [SlotLayout; N_SLOTS],
}

/// What the segment is, and the words of the device.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct HeaderLayout {
    /// [`LEDGER_MAGIC`].
    pub magic: AtomicU64,
    /// [`LEDGER_VERSION`].
    pub version: AtomicU64,
    /// [`LEDGER_BYTES`].
    pub size_bytes: AtomicU64,
    /// The unit of all counts, in bytes.
    pub unit_bytes: AtomicU64,
    /// Not zero once everything else is written.
    pub ready: AtomicU64,
    /// What all members together may hold.
    pub budget_units: AtomicU64,
    /// One more than the highest slot that was ever taken; it never falls.
    pub n_slots_used: AtomicU64,
    /// The last ticket that was given to a waiter.
    pub last_ticket: AtomicU64,
    /// Advances with every release, limit change and reap; waiters sleep on it.
    pub capacity_event: AtomicU32,
    reserved_event: AtomicU32,
    /// Advances when a wait begins and when a limit moves: what members give back stays with them only while it does not.
    pub calm_epoch: AtomicU64,
    reserved: [AtomicU32; 12],
}

/// An IPC name and its policy.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct GroupLayout {
    /// The IPC name.
    pub name: NameWords,
    /// Free, open or kept: see the constants.
    pub state: AtomicU64,
    /// What the group is guaranteed when it asks.
    pub min_units: AtomicU64,
    /// What the group may hold at most.
    pub max_units: AtomicU64,
    /// Its weight when memory is scarce.
    pub weight: AtomicU64,
    /// Higher goes first among waiting claims.
    pub priority: AtomicU64,
    /// Advances with every change of the policy that names a revision.
    pub revision: AtomicU64,
    reserved: [AtomicU64; 2],
}

/// An unused group entry.
pub const GROUP_FREE: u64 = 0;
/// A group that goes with its last member.
pub const GROUP_OPEN: u64 = 1;
/// A group that an operator made: it stays without members.
pub const GROUP_KEPT: u64 = 2;

/// One member. Its lines are kept apart by how often they are written, so that a process that looks at members does not
/// slow down those that claim.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct SlotLayout {
    // The first line: what others look at, and what is written when a member joins or waits.
    /// The index of the member's group.
    pub group: AtomicU64,
    /// Free, joining or live: see the constants.
    pub state: AtomicU64,
    /// What the member waits for; zero when it does not.
    pub wanted_units: AtomicU64,
    /// Its place in the queue; zero when it does not wait.
    pub wait_ticket: AtomicU64,
    /// Until when, on the monotonic clock, the wait counts without being renewed.
    pub wait_expires_ms: AtomicU64,
    /// Not zero if the member can do nothing until it gets what it waits for.
    pub starved: AtomicU64,
    reserved_wait: [AtomicU64; 2],
    // The second line: what is written whenever pages come or go.
    /// Bytes of pages that are mapped and free.
    pub parked_bytes: AtomicU64,
    /// Bytes of pages that are in use.
    pub used_bytes: AtomicU64,
    /// Extents mapped and unmapped, waits and their time, denials.
    pub counters: CounterLayout,
    // Two more lines: requests of others, and what the owner is.
    /// How much the member is asked to give back.
    pub reclaim_units: AtomicU64,
    /// What happened since the member last looked: see the constants.
    pub notices: AtomicU64,
    /// Advances with every notice; the member sleeps on it.
    pub event: AtomicU32,
    /// The number in the name of the member's page file, plus one; zero when there is none.
    pub page_file: AtomicU32,
    /// The owner's process, in its namespace.
    pub pid: AtomicU64,
    /// The start of that process in clock ticks since boot.
    pub pid_started_ticks: AtomicU64,
    /// The inode of its pid namespace.
    pub pid_namespace: AtomicU64,
    /// How often the slot was taken.
    pub generation: AtomicU64,
    reserved_owner: AtomicU64,
    /// What the engine calls itself.
    pub label: NameWords,
    // Alone in its lines: what every claim writes.
    /// `{confirmed, pending, slack}`, see [`super::claim`].
    pub grant: AtomicU64,
    reserved_grant: [AtomicU64; 15],
}

/// Counters of one member that only rise.
#[derive(Debug)]
#[repr(C)]
pub struct CounterLayout {
    /// Bytes mapped since the member joined.
    pub mapped_bytes: AtomicU64,
    /// Bytes unmapped since the member joined.
    pub unmapped_bytes: AtomicU64,
    /// Waits that ended.
    pub n_waits: AtomicU64,
    /// Time spent in them.
    pub waited_us: AtomicU64,
    /// Claims that were denied.
    pub n_denied: AtomicU64,
    /// When the wait that is under way began, on the monotonic clock; zero without one.
    pub wait_started_ms: AtomicU64,
}

/// A slot without an owner.
pub const SLOT_FREE: u64 = 0;
/// A slot whose owner is still writing it.
pub const SLOT_JOINING: u64 = 1;
/// A slot with an owner.
pub const SLOT_LIVE: u64 = 2;

/// The limit of the group or the budget of the device moved.
pub const NOTICE_LIMIT: u64 = 1;
/// Memory came back while the member waited.
pub const NOTICE_CAPACITY: u64 = 2;
/// A tool asks for the parked pages.
pub const NOTICE_TRIM: u64 = 4;

// SAFETY: repr(C) of structs that are repr(C) and hold atomics only.
unsafe impl SharedWords for LedgerLayout {}

const _: () = {
    assert!(cfg!(target_endian = "little"), "tools read the segment as little-endian words");
    assert!(size_of::<HeaderLayout>() == 128);
    assert!(size_of::<GroupLayout>() == 128);
    assert!(size_of::<SlotLayout>() == 384);
    assert!(offset_of!(SlotLayout, parked_bytes) == 64);
    assert!(offset_of!(SlotLayout, reclaim_units) == 128);
    assert!(offset_of!(SlotLayout, grant) == 256);
    assert!(LEDGER_BYTES == 128 + N_GROUPS * 128 + N_SLOTS * 384);
};
