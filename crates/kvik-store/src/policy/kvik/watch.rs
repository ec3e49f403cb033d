//! What is being waited for: requests and blocks since their last use, in order of time.

use std::collections::VecDeque;

use super::ages::N_AGES;
use super::model::Model;

/// The name of no watch.
pub(super) const NOT_WATCHED: u64 = u64::MAX;

/// How many are watched at once; the oldest are given up, which says nothing about them.
const MAX_WATCHED: usize = 1 << 18;

/// The queue of all watches, with a cursor for each step of age.
///
/// A cursor stands at the first watch that has not got through its step. Time moves the cursors forward,
/// and each watch they pass unused is counted by the model, so the work per watch is bounded by the number
/// of steps.
#[derive(Debug)]
pub(super) struct Watch {
    queue: VecDeque<Watched>,
    /// Number of the first in the queue.
    first: u64,
    cursors: [u64; N_AGES - 1],
}

/// One request, or one block, since its last use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watched {
    pub(super) begin_ms: u64,
    /// Blocks of the request's chain.
    pub(super) n_blocks: u32,
    pub(super) turn: u16,
    /// Usual time between the turns so far, if it was not the first.
    pub(super) pace_s: Option<f32>,
    /// Since when, and under which watch, the blocks wait that its next turn did not use.
    pub(super) left_behind: Option<LeftBehind>,
    pub(super) is_over: bool,
    pub(super) class: u16,
    pub(super) weight: f32,
}

/// The end of a chain that a conversation has turned away from.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeftBehind {
    pub(super) since_ms: u64,
    pub(super) watch: u64,
}

impl Watched {
    pub(super) fn new(class: u16, weight: f32) -> Self {
        let (begin_ms, n_blocks, turn, pace_s, left_behind, is_over) = (0, 0, 0, None, None, false);
        Self { begin_ms, n_blocks, turn, pace_s, left_behind, is_over, class, weight }
    }
}

impl Watch {
    pub(super) fn new() -> Self {
        Self { queue: VecDeque::new(), first: 0, cursors: [0; N_AGES - 1] }
    }

    pub(super) fn get(&self, number: u64) -> Option<&Watched> {
        let position = number.checked_sub(self.first)?;
        self.queue.get(usize::try_from(position).ok()?)
    }

    /// Begins a watch and returns its number.
    pub(super) fn begin(&mut self, now_ms: u64, watched: Watched) -> u64 {
        if self.queue.len() == MAX_WATCHED {
            self.queue.pop_front();
            self.first += 1;
        }
        self.queue.push_back(Watched { begin_ms: now_ms, ..watched });
        self.first + self.queue.len() as u64 - 1
    }

    /// Notes that a next turn used the request of a watch and left the end of its chain behind.
    pub(super) fn leave_behind(&mut self, number: u64, left_behind: LeftBehind) {
        let position = number.checked_sub(self.first);
        if let Some(watched) = position.and_then(|position| self.queue.get_mut(position as usize)) {
            watched.left_behind = Some(left_behind);
        }
    }

    /// Ends a watch, if it is one and still on, because what it watched was used.
    pub(super) fn note_used(&mut self, number: u64, now_ms: u64, model: &mut Model) {
        let Some(position) = number.checked_sub(self.first) else { return };
        let Some(watched) = self.queue.get_mut(position as usize) else { return };
        if !watched.is_over {
            watched.is_over = true;
            let age = model.ages().step((now_ms - watched.begin_ms) as f64 / 1000.0);
            model.note_used(watched.class, age, watched.weight);
        }
    }

    /// Tells the model of all that got through a step of age unused.
    pub(super) fn advance(&mut self, now_ms: u64, model: &mut Model) {
        for (age, cursor) in self.cursors.iter_mut().enumerate() {
            let end_s = model.ages().end_s(age);
            *cursor = (*cursor).max(self.first);
            while let Some(watched) = self.queue.get((*cursor - self.first) as usize) {
                if ((now_ms - watched.begin_ms) as f64) < end_s * 1000.0 {
                    break;
                }
                if !watched.is_over {
                    model.note_unused(watched.class, age, watched.weight);
                }
                *cursor += 1;
            }
        }
        let last = self.cursors[N_AGES - 2];
        while self.first < last && self.queue.pop_front().is_some() {
            self.first += 1;
        }
    }
}
