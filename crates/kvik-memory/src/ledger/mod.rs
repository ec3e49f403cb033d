//! The shared table of grants of one device.
//!
//! Engines of one device open its [`Ledger`] in shared memory and [join](Ledger::join) it as a
//! [`Member`] each. A member takes grants before it creates memory and returns them after it released
//! it; the ledger decides by limits and shares, wakes members that wait and asks those that hold too much.
//!
//! From the inside out: `layout` is the words, `segment` the files, `claim` how a grant is taken
//! without a lock, `share` the entitlements, `liveness` which processes are alive, `checked` the words with
//! their checks, `handle` an open ledger, `member` an engine in it, `admin` what tools do.
//!
//! # Invariants
//!
//! * The sum of the confirmed grants exceeds neither the budget nor a group's limit by any claim; only
//!   a limit that is lowered leaves more held than allowed, until it is given back.
//! * A grant word has one writer: the owner of its slot, or a process that has proved the owner dead. Others may only take
//!   its slack, which is not in use.
//! * No lock is needed to claim or to return memory.
//! * Nothing that is read from a segment is trusted to be what kvik wrote.

mod admin;
mod checked;
pub mod claim;
mod handle;
mod ipc;
pub mod layout;
mod liveness;
mod member;
mod name;
mod page_states;
mod policy;
mod segment;
pub mod share;
#[doc(hidden)]
pub mod steps;

pub use admin::{
    Cleanup, Deletion, DeviceSnapshot, GroupSnapshot, LimitChange, LimitStatus, MemberSnapshot, clean_up,
    list_devices,
};
pub use handle::{DEFAULT_DIR, Ledger, LedgerOptions};
pub use member::{JoinOptions, Member};
pub use page_states::{PageCounts, PageStates};
pub use policy::Policy;
