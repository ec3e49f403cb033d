//! Leaders and ranks over real sockets, and in real processes where one of them dies.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod addresses;
mod children;
mod deaths;
mod faults;
mod model;
mod proxy;
mod sessions;
mod support;

use std::sync::Arc;

use kvik_memory::pages::PageMapper;

use self::children::Role;
use self::support::{FakeMapper, leader, page, peer, scratch_directory};

/// Children of other tests enter here too: the role is in their environment.
#[test]
fn a_rank_in_another_process_maps_and_unmaps() {
    if let Some(role) = children::role_of_this_process() {
        return children::play(role);
    }
    let directory = scratch_directory();
    let _rank = children::spawn(Role::Rank, &directory.path().join("r1"));
    let local = Arc::new(FakeMapper::new());
    let mapper = leader(Some(&local), vec![peer(1, directory.path().join("r1"))]);
    support::assert_mapped(&mapper.map(&[page(3), page(5)]));
    assert_eq!(local.mapped(), [page(3), page(5)]);
    assert!(mapper.unmap(&[page(3)]).is_empty());
    assert_eq!(mapper.unmap(&[page(3)]), [page(3)], "what is not mapped cannot be unmapped");
    support::assert_mapped(&mapper.map(&[page(3)]));
}
