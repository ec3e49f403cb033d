//! The order of one source's batches: what a sequence number says about what came before.

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its events are in the index.
    Applied,
    /// The source restarted: what it held is gone, and the events of this batch are in the index.
    Restarted,
    /// It was applied before; nothing changed.
    Duplicate,
    /// Batches before it are missing; nothing was applied and the source is unsure until they have
    /// come. If the batch showed a restart, what the source held before is gone.
    ///
    /// The caller replays from `expected` and then hands `got` in again, or gives up on the missing
    /// ones with [`skip_gap`](super::HolderIndex::skip_gap), or replaces the whole source.
    Gap {
        /// The number that was due.
        expected: u64,
        /// The number that came.
        got: u64,
    },
    /// It was sent before the source's last restart; nothing changed.
    OldEpoch,
    /// No such source; nothing changed.
    UnknownSource,
}

/// Where the stream of one source stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ordering {
    /// The epoch of the last batch; `None` until the source has named one.
    pub(super) epoch: Option<u64>,
    /// The number that is due; `None` after the last of all numbers.
    pub(super) due: Option<u64>,
    /// Batches were missed and not replayed, or are being waited for.
    pub(super) gap: Gap,
}

/// Whether something is missing from what the index knows of a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gap {
    /// Nothing is.
    None,
    /// Batches are; the gap closes when the batch `until` has been applied.
    Open {
        /// The highest number that came too early.
        until: u64,
    },
    /// They were given up; only a restart or a replacement makes the source sure again.
    Skipped,
}

/// What to do with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Judgment {
    /// What to tell the caller.
    pub(super) verdict: Verdict,
    /// Forget everything about the source before anything else.
    pub(super) forget: bool,
}

impl Ordering {
    pub(super) fn new(first_sequence: u64) -> Self {
        Self { epoch: None, due: Some(first_sequence), gap: Gap::None }
    }

    /// Judges a batch and moves on accordingly.
    pub(super) fn judge(
        &mut self,
        epoch: Option<u64>,
        sequence: u64,
        replayed: bool,
        first_sequence: u64,
    ) -> Judgment {
        let mut restarted = false;
        if let Some(epoch) = epoch {
            match self.epoch {
                Some(current) if epoch < current => {
                    return Judgment { verdict: Verdict::OldEpoch, forget: false };
                }
                Some(current) if epoch == current => {}
                Some(_) => restarted = true,
                // What came before without an epoch was of another life.
                None => restarted = self.due != Some(first_sequence),
            }
            self.epoch = Some(epoch);
        } else if !replayed && self.due.is_none_or(|due| sequence < due) {
            // A live stream delivers in order: numbers that fall back were counted anew.
            restarted = true;
        }
        if restarted {
            *self = Self { epoch: self.epoch, ..Self::new(first_sequence) };
        }
        let verdict = match self.due {
            Some(due) if sequence == due => {
                self.due = due.checked_add(1);
                if matches!(self.gap, Gap::Open { until } if due >= until) {
                    self.gap = Gap::None;
                }
                if restarted { Verdict::Restarted } else { Verdict::Applied }
            }
            Some(due) if sequence > due => {
                self.gap = match self.gap {
                    Gap::None => Gap::Open { until: sequence },
                    Gap::Open { until } => Gap::Open { until: until.max(sequence) },
                    Gap::Skipped => Gap::Skipped,
                };
                Verdict::Gap { expected: due, got: sequence }
            }
            _ => Verdict::Duplicate,
        };
        Judgment { verdict, forget: restarted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(ordering: &mut Ordering, epoch: Option<u64>, sequence: u64) -> Verdict {
        ordering.judge(epoch, sequence, false, 0).verdict
    }

    #[test]
    fn numbers_in_order_apply_and_earlier_ones_are_duplicates() {
        let mut ordering = Ordering::new(0);
        for sequence in 0..4 {
            assert_eq!(judge(&mut ordering, Some(7), sequence), Verdict::Applied);
        }
        for sequence in 0..4 {
            assert_eq!(judge(&mut ordering, Some(7), sequence), Verdict::Duplicate);
        }
        assert_eq!(judge(&mut ordering, Some(7), 4), Verdict::Applied);
    }

    #[test]
    fn a_gap_stays_open_until_the_missing_batches_have_come() {
        let mut ordering = Ordering::new(0);
        judge(&mut ordering, Some(1), 0);
        assert_eq!(judge(&mut ordering, Some(1), 3), Verdict::Gap { expected: 1, got: 3 });
        assert_eq!(judge(&mut ordering, Some(1), 1), Verdict::Applied);
        assert_eq!(ordering.gap, Gap::Open { until: 3 });
        assert_eq!(judge(&mut ordering, Some(1), 3), Verdict::Gap { expected: 2, got: 3 });
        assert_eq!(judge(&mut ordering, Some(1), 2), Verdict::Applied);
        assert_eq!(judge(&mut ordering, Some(1), 3), Verdict::Applied);
        assert_eq!(ordering.gap, Gap::None);
    }

    #[test]
    fn a_higher_epoch_restarts_and_a_lower_one_is_old() {
        let mut ordering = Ordering::new(0);
        judge(&mut ordering, Some(5), 0);
        assert_eq!(
            ordering.judge(Some(6), 0, false, 0),
            Judgment { verdict: Verdict::Restarted, forget: true }
        );
        assert_eq!(judge(&mut ordering, Some(5), 1), Verdict::OldEpoch);
        let late = ordering.judge(Some(7), 2, false, 0);
        assert_eq!(late, Judgment { verdict: Verdict::Gap { expected: 0, got: 2 }, forget: true });
        // The restart is judged once.
        assert_eq!(
            ordering.judge(Some(7), 0, false, 0),
            Judgment { verdict: Verdict::Applied, forget: false }
        );
    }

    #[test]
    fn without_epochs_a_live_number_that_falls_back_is_a_restart_and_a_replayed_one_a_duplicate() {
        let mut ordering = Ordering::new(0);
        for sequence in 0..3 {
            judge(&mut ordering, None, sequence);
        }
        assert_eq!(ordering.judge(None, 1, true, 0).verdict, Verdict::Duplicate);
        assert_eq!(ordering.judge(None, 0, false, 0), Judgment { verdict: Verdict::Restarted, forget: true });
    }

    #[test]
    fn the_last_of_all_numbers_is_no_overflow() {
        let mut ordering = Ordering::new(u64::MAX);
        assert_eq!(ordering.judge(Some(1), u64::MAX, false, u64::MAX).verdict, Verdict::Applied);
        assert_eq!(ordering.judge(Some(1), u64::MAX, false, u64::MAX).verdict, Verdict::Duplicate);
    }
}
