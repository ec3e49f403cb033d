//! Room for a run when what is free lies in pieces.
//!
//! A *span* is a stretch of the arena in which everything is free or may be moved. Sliding what lies there
//! down, one after the other, joins its holes into one, and needs no room elsewhere: it works as long as
//! there is anything free at all. Of all spans whose holes are long enough together, the one with the least
//! to move is cleared.
//!
//! Only chunks without a reader's lease are moved. The holes of a span are taken first, so that no other
//! caller gets them, and its extents are dissolved, so that a slot can be treated as any other run.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Shared;
use super::buddy::joined;
use super::run::Run;
use super::slot::{Home, Lease};

/// How often a span is looked for: a reader may lease a chunk that was to be moved.
const MAX_ATTEMPTS: usize = 4;

/// The most units that are moved for one that is needed.
///
/// It bounds how long a writer waits. Where more than a ninth of the memory is free, some span is cheap enough,
/// since not all of them can be fuller than the average.
const MAX_MOVED_FOR_ONE: u32 = 8;

/// The owners of the chunks in an arena, which can let them be moved.
pub(crate) trait Tenants {
    /// Names a chunk.
    type Name: Copy;

    /// Calls `visit` with every chunk of the tenants.
    fn visit(&self, visit: &mut dyn FnMut(Self::Name, &Lease));

    /// Calls `act` with the lease of a chunk while no lookup can find it; returns what `act` returns, and
    /// `false` if the chunk is gone.
    fn with_lease(&self, name: Self::Name, act: &mut dyn FnMut(&mut Lease) -> bool) -> bool;
}

/// No owner: only free runs are joined.
pub(super) struct NoTenants;

/// What was moved since the arena was made.
#[derive(Debug, Default)]
pub(super) struct Moved {
    n_chunks: AtomicU64,
    n_bytes: AtomicU64,
}

/// A part of a span.
#[derive(Clone, Copy, Debug)]
struct Piece<N> {
    run: Run,
    /// The chunk's owner; none for a hole.
    tenant: Option<N>,
}

impl Shared {
    /// Makes `n_units` free in one run by moving what `tenants` do not lease; returns them.
    ///
    /// The caller is alone in this: it holds the lock on compaction.
    pub(super) fn clear<T: Tenants>(self: &Arc<Self>, n_units: u32, tenants: &T) -> Option<Run> {
        for _ in 0..MAX_ATTEMPTS {
            if self.n_free_units() < n_units {
                return None;
            }
            let mut pieces = self.holes();
            tenants.visit(&mut |name, lease| {
                if let Some(run) = lease.movable_run(self) {
                    pieces.push(Piece { run, tenant: Some(name) });
                }
            });
            pieces.sort_unstable_by_key(|piece| piece.run);
            let span = cheapest_span(&pieces, n_units)?;
            pieces.retain(|piece| piece.tenant.is_some() && piece.run.intersection(span) == piece.run);
            if let Some(run) = self.clear_span(span, pieces, n_units, tenants) {
                return Some(run);
            }
        }
        None
    }

    /// Slides the chunks of a span together; `None` if one of them could not be moved.
    fn clear_span<T: Tenants>(
        self: &Arc<Self>,
        span: Run,
        mut pieces: Vec<Piece<T::Name>>,
        n_units: u32,
        tenants: &T,
    ) -> Option<Run> {
        for slab in self.slabs.iter() {
            slab.dissolve(span, &self.buddy);
        }
        let claimed = self.buddy.lock().claim(span);
        pieces.extend(claimed.into_iter().map(|run| Piece { run, tenant: None }));
        pieces.sort_unstable_by_key(|piece| piece.run);

        // The run that is free so far; it and all later holes belong to this call.
        let mut hole = Run::new(span.start, 0);
        for Piece { run, tenant } in pieces {
            let is_next = hole.end() == run.start;
            match tenant {
                None if is_next && hole.n_units < n_units => hole.n_units += run.n_units,
                None if hole.n_units < n_units => {
                    self.buddy.lock().give(hole);
                    hole = run;
                }
                None => self.buddy.lock().give(run),
                Some(name) if is_next && hole.n_units > 0 && hole.n_units < n_units => {
                    let mut slide = |lease: &mut Lease| self.slide(lease, run, hole);
                    if tenants.with_lease(name, &mut slide) {
                        hole.start += run.n_units;
                    }
                }
                Some(_) => {}
            }
        }
        let (taken, rest) = if hole.n_units < n_units {
            (None, hole)
        } else {
            let taken = Run::new(hole.start, n_units);
            (Some(taken), Run::between(taken.end(), hole.end()))
        };
        self.buddy.lock().give(rest);
        taken
    }

    /// Moves a chunk from `from` to the start of the hole before it, which belongs to the caller; afterwards
    /// the hole is as long as it was and starts where the chunk ends.
    ///
    /// Returns `false`, and does nothing, if the chunk is leased or lies elsewhere by now.
    fn slide(self: &Arc<Self>, lease: &mut Lease, from: Run, hole: Run) -> bool {
        let Some(held) = lease.exclusive() else {
            return false;
        };
        let is_here = Arc::ptr_eq(&held.shared, self) && held.run == from && hole.end() == from.start;
        let to = Run::new(hole.start, from.n_units);
        if !is_here || self.commit(to).is_err() || !self.detach(held.home) {
            return false;
        }
        let source = self.mapping.at(from.byte_range().start).as_ptr();
        let target = self.mapping.at(to.byte_range().start).as_ptr();
        // SAFETY: both ranges are inside of the mapping and committed. The units of the target belong to the
        // caller's hole or to the chunk itself, and the chunk is borrowed exclusively, so no reference into
        // either exists. They may overlap, which this copy allows.
        unsafe { ptr::copy(source, target, from.n_bytes()) };
        held.run = to;
        held.home = Home::Own;
        self.moved.count(from.n_bytes());
        true
    }

    /// Makes the run a thing of its own; `false` if it belongs to an extent that is in use.
    fn detach(&self, home: Home) -> bool {
        match home {
            Home::Own => true,
            Home::Slab(slab, slot) => self.slabs.get(slab).is_some_and(|slab| slab.detach(slot)),
        }
    }

    /// All free runs, also those inside of extents.
    fn holes<N>(&self) -> Vec<Piece<N>> {
        let mut runs = self.buddy.lock().free_runs();
        self.slabs.free_runs(&mut runs);
        joined(runs).into_iter().map(|run| Piece { run, tenant: None }).collect()
    }
}

/// The span with at least `n_units` of holes and the least to move; the shortest one of those.
///
/// The pieces are sorted. Where they do not touch lies something that cannot be moved. `None` also where there
/// is too much to move.
fn cheapest_span<N>(pieces: &[Piece<N>], n_units: u32) -> Option<Run> {
    let (mut first, mut n_free_units, mut n_moved_units) = (0, 0, 0);
    let mut cheapest: Option<(u32, u32, Run)> = None;
    for (last, piece) in pieces.iter().enumerate() {
        if last > 0 && pieces[last - 1].run.end() != piece.run.start {
            (first, n_free_units, n_moved_units) = (last, 0, 0);
        }
        match piece.tenant {
            None => n_free_units += piece.run.n_units,
            Some(_) => n_moved_units += piece.run.n_units,
        }
        while first < last {
            let Piece { run, tenant } = &pieces[first];
            match tenant {
                None if n_free_units - run.n_units < n_units => break,
                None => n_free_units -= run.n_units,
                Some(_) => n_moved_units -= run.n_units,
            }
            first += 1;
        }
        if n_free_units >= n_units && n_moved_units <= n_units.saturating_mul(MAX_MOVED_FOR_ONE) {
            let span = Run::between(pieces[first].run.start, piece.run.end());
            let candidate = (n_moved_units, span.n_units, span);
            if cheapest.is_none_or(|best| candidate < best) {
                cheapest = Some(candidate);
            }
        }
    }
    cheapest.map(|(_, _, span)| span)
}

impl Tenants for NoTenants {
    type Name = ();

    fn visit(&self, _visit: &mut dyn FnMut(Self::Name, &Lease)) {}

    fn with_lease(&self, _name: Self::Name, _act: &mut dyn FnMut(&mut Lease) -> bool) -> bool {
        false
    }
}

impl Moved {
    // Relaxed: the counts are for people and order nothing.

    fn count(&self, n_bytes: usize) {
        self.n_chunks.fetch_add(1, Ordering::Relaxed);
        self.n_bytes.fetch_add(n_bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn n_chunks(&self) -> u64 {
        self.n_chunks.load(Ordering::Relaxed)
    }

    pub(super) fn n_bytes(&self) -> u64 {
        self.n_bytes.load(Ordering::Relaxed)
    }
}
