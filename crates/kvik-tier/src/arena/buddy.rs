//! Which units are free, and in how large pieces.

use super::bits::BitTree;
use super::run::Run;

/// A buddy allocator over the units of the arena that hands out runs of any length.
///
/// Free units are kept as *blocks*: `2^order` units at a multiple of as many. Two free halves of a block are
/// always one free block. A run is cut out of blocks and the rest of them stays free, so a run of odd length
/// wastes nothing; that is also why a run is given back with its length.
#[derive(Debug)]
pub(super) struct Buddy {
    /// For each order, the free blocks by their number among the blocks of that order.
    free_by_order: Vec<BitTree>,
    /// One bit for each order that has free blocks: most have none at a time, and are not looked at.
    orders_with_free: u32,
    n_free_units: u32,
}

impl Buddy {
    /// An allocator of `n_units`, all of them free.
    pub(super) fn new(n_units: u32) -> Self {
        let n_orders = (u32::BITS - n_units.leading_zeros()).max(1);
        let free_by_order =
            (0..n_orders).map(|order| BitTree::new((n_units as usize >> order).max(1))).collect();
        let mut buddy = Self { free_by_order, orders_with_free: 0, n_free_units: 0 };
        buddy.give(Run::new(0, n_units));
        buddy
    }

    pub(super) fn n_free_units(&self) -> u32 {
        self.n_free_units
    }

    /// Takes `n_units` out of the free run around the lowest of the smallest blocks that hold them.
    ///
    /// As many as a power of two start at a multiple of it. Other numbers start where that free run does, so
    /// that runs of one odd length lie side by side and not each in a block of its own.
    ///
    /// `None` where no free block is large enough; a free run that is may still lie across blocks.
    pub(super) fn take(&mut self, n_units: u32) -> Option<Run> {
        let wanted_order = order_of(n_units)?;
        let order = bits_from(self.orders_with_free, wanted_order).next()?;
        let number = self.free_by_order[order as usize].first()?;
        let block = block_run(order, number);
        self.remove(order, number);
        let mut start = block.start;
        if !n_units.is_power_of_two() {
            while let Some((order, number)) = self.free_block_before(start) {
                self.remove(order, number);
                start = block_run(order, number).start;
            }
        }
        let run = Run::new(start, n_units);
        self.give(Run::between(run.end(), block.end()));
        Some(run)
    }

    /// Takes every unit of `span` that is free; returns the runs, rising and apart from each other.
    pub(super) fn claim(&mut self, span: Run) -> Vec<Run> {
        let mut claimed = Vec::new();
        for order in 0..self.free_by_order.len() as u32 {
            let mut bound = span.start >> order;
            while let Some(number) = self.free_by_order[order as usize].first_from(bound) {
                let block = block_run(order, number);
                let inside = block.intersection(span);
                if inside.n_units == 0 {
                    break;
                }
                bound = number + 1;
                self.remove(order, number);
                self.give(Run::between(block.start, inside.start));
                self.give(Run::between(inside.end(), block.end()));
                claimed.push(inside);
            }
        }
        joined(claimed)
    }

    /// Makes a run free that was taken; parts of it may be given one by one.
    pub(super) fn give(&mut self, run: Run) {
        self.n_free_units += run.n_units;
        let mut start = run.start;
        while start < run.end() {
            let fitting_order = (run.end() - start).ilog2();
            let order = if start == 0 { fitting_order } else { fitting_order.min(start.trailing_zeros()) };
            self.give_block(order, start >> order);
            start += 1 << order;
        }
    }

    /// The free runs, rising, with neighboring blocks joined.
    pub(super) fn free_runs(&self) -> Vec<Run> {
        let blocks = self.free_by_order.iter().enumerate();
        joined(
            blocks
                .flat_map(|(order, free)| free.iter().map(move |number| block_run(order as u32, number)))
                .collect(),
        )
    }

    fn give_block(&mut self, mut order: u32, mut number: u32) {
        let top_order = self.free_by_order.len() as u32 - 1;
        while order < top_order && self.free_by_order[order as usize].contains(number ^ 1) {
            self.remove(order, number ^ 1);
            // It is free still, as half of the block that is given now.
            self.n_free_units += 1 << order;
            order += 1;
            number >>= 1;
        }
        self.free_by_order[order as usize].insert(number);
        self.orders_with_free |= 1 << order;
    }

    /// The free block that ends at `unit`.
    fn free_block_before(&self, unit: u32) -> Option<(u32, u32)> {
        let last = unit.checked_sub(1)?;
        bits_from(self.orders_with_free, 0)
            .take_while(|order| *order <= unit.trailing_zeros())
            .map(|order| (order, last >> order))
            .find(|(order, number)| self.free_by_order[*order as usize].contains(*number))
    }

    fn remove(&mut self, order: u32, number: u32) {
        let free = &mut self.free_by_order[order as usize];
        free.remove(number);
        if free.is_empty() {
            self.orders_with_free &= !(1 << order);
        }
        self.n_free_units -= 1 << order;
    }
}

/// The numbers of the bits that are set, from bit `first` on, rising.
fn bits_from(bits: u32, first: u32) -> impl Iterator<Item = u32> {
    let mut rest = bits & u32::MAX.checked_shl(first).unwrap_or(0);
    std::iter::from_fn(move || {
        let bit = (rest != 0).then(|| rest.trailing_zeros())?;
        rest &= rest - 1;
        Some(bit)
    })
}

/// The order of the smallest block that holds `n_units`.
fn order_of(n_units: u32) -> Option<u32> {
    Some(n_units.checked_next_power_of_two()?.trailing_zeros())
}

fn block_run(order: u32, number: u32) -> Run {
    Run::new(number << order, 1 << order)
}

/// Sorts runs that do not overlap and joins those that touch.
pub(super) fn joined(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable();
    runs.dedup_by(|next, before| {
        let is_touching = before.end() == next.start;
        if is_touching {
            before.n_units += next.n_units;
        }
        is_touching
    });
    runs
}
