//! What the tests of the ledger share.

use std::path::Path;

use kvik_memory::geometry::UNIT_BYTES;
use kvik_memory::ledger::{JoinOptions, Ledger, LedgerOptions, Member};
use kvik_memory::pages::{Claim, Grants as _};

/// Bytes of `n_units`.
pub(crate) const fn units(n_units: u64) -> u64 {
    n_units * UNIT_BYTES
}

/// The options of a ledger in `dir` with a budget of `n_units`.
pub(crate) fn options(dir: &Path, n_units: u64) -> LedgerOptions {
    LedgerOptions { dir: dir.to_owned(), budget_bytes: Some(units(n_units)), ..LedgerOptions::new("host0") }
}

/// A ledger in `dir` with a budget of `n_units`.
pub(crate) fn open_ledger(dir: &Path, n_units: u64) -> Ledger {
    Ledger::open(&options(dir, n_units)).unwrap()
}

/// A member of the group `ipc_name`.
pub(crate) fn join(ledger: &Ledger, ipc_name: &str) -> Member {
    ledger.join(&JoinOptions::new(ipc_name, "test engine")).unwrap()
}

/// Claims `n_units`, which must be granted.
pub(crate) fn take(member: &Member, n_units: u64) {
    assert_eq!(member.claim(units(n_units)).unwrap(), Claim::Granted, "{n_units} units");
}

/// The names of the files in `dir`, sorted.
pub(crate) fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
