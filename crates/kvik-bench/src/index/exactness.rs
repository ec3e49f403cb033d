//! Whether the index says what is true where others guess.

use kvik_index::holders::{
    Batch, BlockKey, Event, HolderIndex, IndexConfig, LookupOptions, Matches, SourceId, Tier, WorkerMatch,
};

use crate::report::{Baseline, Goal, Measurement};

/// A course of events at one worker, and how many blocks of the prompt it has from the first on at the end.
struct Course {
    name: &'static str,
    truth: u32,
    steps: &'static [Step],
}

/// Blocks are numbered along the prompt.
#[derive(Clone, Copy)]
enum Step {
    Store { from: u64, to: u64 },
    Remove(&'static [u64]),
}

/// A block that is in no prompt.
const UNKNOWN: u64 = u64::MAX;

const COURSES: [Course; 5] = [
    Course { name: "exact_hole", truth: 3, steps: &[Step::Store { from: 0, to: 8 }, Step::Remove(&[3])] },
    Course {
        name: "exact_refill",
        truth: 8,
        steps: &[Step::Store { from: 0, to: 8 }, Step::Remove(&[3]), Step::Store { from: 3, to: 4 }],
    },
    Course {
        name: "exact_unknown_removal",
        truth: 7,
        steps: &[Step::Store { from: 0, to: 8 }, Step::Remove(&[UNKNOWN, 7])],
    },
    Course {
        name: "exact_late_parent",
        truth: 8,
        steps: &[Step::Store { from: 4, to: 8 }, Step::Store { from: 0, to: 4 }],
    },
    Course {
        name: "exact_deep_hole",
        truth: 40,
        steps: &[Step::Store { from: 0, to: 128 }, Step::Remove(&[40])],
    },
];

/// Plays every course and compares the answer with the truth.
pub(super) fn measure() -> anyhow::Result<Vec<Measurement>> {
    let mut results = Vec::new();
    for course in &COURSES {
        let answer = f64::from(play(course)?);
        let truth = f64::from(course.truth);
        let result = Measurement::from_repeats(course.name.to_owned(), "blocks", vec![answer]);
        // Too much is as wrong as too little.
        let goal = if answer <= truth { Goal::RatioAtLeast(1.0) } else { Goal::AtMost(truth) };
        results.extend(
            result.map(|result| result.compared_with(Baseline::new("truth", vec![truth]), Some(goal))),
        );
    }
    Ok(results)
}

fn play(course: &Course) -> anyhow::Result<u32> {
    let mut index = HolderIndex::new(IndexConfig::default());
    let source = index.add_source("worker-0", 0)?;
    for (step, sequence) in course.steps.iter().zip(0..) {
        match *step {
            Step::Store { from, to } => {
                let keys: Vec<BlockKey> = (from..to).map(key).collect();
                let parent = from.checked_sub(1).map(key);
                apply(&mut index, source, sequence, Event::Stored { tier: Tier::Gpu, parent, keys: &keys });
            }
            Step::Remove(blocks) => {
                let keys: Vec<BlockKey> = blocks.iter().map(|block| key(*block)).collect();
                apply(&mut index, source, sequence, Event::Removed { tier: Tier::Gpu, keys: &keys });
            }
        }
    }
    let prompt: Vec<BlockKey> = (0..128).map(key).collect();
    let mut matches = Matches::default();
    index.reader().lookup(&prompt, LookupOptions::default(), &mut matches);
    Ok(matches.rows().first().map_or(0, WorkerMatch::prefix_blocks))
}

fn apply(index: &mut HolderIndex, source: SourceId, sequence: u64, event: Event<'_>) {
    let batch = Batch { source, epoch: Some(1), sequence, replayed: false, events: &[event] };
    let _verdict = index.apply(&batch);
}

fn key(block: u64) -> BlockKey {
    BlockKey(block.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_is_the_truth() {
        for result in measure().unwrap() {
            assert_eq!(result.is_reached, Some(true), "{result:?}");
        }
    }
}
