//! One turn of the engine: choose rows, run the forward pass, register what became full, choose tokens.

use std::time::Instant;

use kvik_tokens::Tokenizer;

use crate::error::{ModelError, Result};
use crate::forward::{KvImport, SequenceRows, WantedLogits, WantedRow};

use super::lost_device::lose;
use super::scheduler::ScheduledRows;
use super::{Engine, EngineEvent};

impl Engine {
    /// Computes one batch and appends what came of it to `events`. Does nothing when idle.
    ///
    /// # Errors
    /// [`ModelError::DeviceLost`] if the device has failed, now or before; other errors if the backend refuses the batch,
    /// which would be a defect of the engine: requests are checked when they are submitted.
    pub fn step(&mut self, events: &mut Vec<EngineEvent>) -> Result<()> {
        self.check_device()?;
        self.loans.take_back(&mut self.pool);
        self.give_back_memory();
        let scheduled = self.schedule(events);
        self.is_starved = scheduled.is_empty() && self.has_work();
        if scheduled.is_empty() {
            if self.is_starved {
                self.pool.note_starved();
            }
            return self.check_device();
        }
        // Scheduling copies blocks.
        self.check_device()?;
        if let Err(error) = self.forward(&scheduled) {
            if !matches!(error, ModelError::Device { .. }) {
                return Err(error);
            }
            lose(&mut self.lost_device, &error);
            return self.check_device();
        }
        let mut logits_row = 0;
        for rows in &scheduled {
            let Some(idx) = self.running.iter().position(|sequence| sequence.key() == rows.key) else {
                continue;
            };
            let has_logits = self.running[idx].n_pending() == rows.n_rows;
            if !self.end_awaited(idx, events) {
                logits_row += usize::from(has_logits);
                continue;
            }
            self.running[idx].advance(rows.n_rows, &mut self.pool);
            self.end_prefix(idx, events);
            let sequence = &self.running[idx];
            if sequence.n_pending() == 0 {
                // Finished already if another choice of its request has failed in this step.
                if sequence.is_segment() {
                    self.end_segment(idx, events);
                    continue;
                }
                if !sequence.is_finished() {
                    self.choose_tokens(idx, logits_row, events)?;
                }
                logits_row += 1;
            }
        }
        self.retire_finished();
        self.check_device()
    }

    /// Drops the KV that came in with a prompt that is computed, and reports its admission: that comes before its first token also if
    /// the rest of the KV was lost just now.
    fn end_prefix(&mut self, idx: usize, events: &mut Vec<EngineEvent>) {
        if self.running[idx].n_pending() == 0 && self.running[idx].take_prefix().is_some() {
            let mut sequence = self.running.remove(idx);
            self.tell_admitted(&mut sequence, events);
            self.running.insert(idx, sequence);
        }
    }

    /// Ends the copy that a pass has waited for; false if it has failed, and the pass has to be done again.
    fn end_awaited(&mut self, idx: usize, events: &mut Vec<EngineEvent>) -> bool {
        let Some(incoming) = self.running[idx].take_awaited() else { return true };
        let mut sequence = self.running.remove(idx);
        let has_come = self.end_copy(&mut sequence, incoming);
        self.tell_admitted(&mut sequence, events);
        self.running.insert(idx, sequence);
        has_come
    }

    fn forward(&mut self, scheduled: &[ScheduledRows]) -> Result<()> {
        let mut sequences = Vec::with_capacity(scheduled.len());
        let mut imports: Vec<&dyn KvImport> = Vec::new();
        let mut draws = Vec::with_capacity(scheduled.len());
        let (n_computed, n_attended) = (self.stats.n_computed_tokens, self.stats.n_attended_tokens);
        for rows in scheduled {
            let Some(sequence) = self.running.iter().find(|sequence| sequence.key() == rows.key) else {
                continue;
            };
            let is_last = rows.n_rows == sequence.n_pending();
            let (tokens, positions) = sequence.pending(rows.n_rows);
            let n_logits = usize::from(is_last && !sequence.is_segment());
            if n_logits == 1 {
                // Choices that begin together draw from one row.
                let is_one = sequence.n_forks() == 0;
                let input = sequence.sampler_input();
                draws.push(match input.draw_alone().filter(|_| is_one) {
                    None => WantedRow::Logits,
                    Some(draw) if input.params.logprobs.is_some() => WantedRow::TokenAndLogits(draw),
                    Some(draw) => WantedRow::Token(draw),
                });
            }
            self.stats.n_attended_tokens += positions.n_attended(rows.n_rows);
            sequences.push(SequenceRows { tokens, positions, block_table: sequence.table(), n_logits });
            self.stats.n_computed_tokens += rows.n_rows as u64;
            imports.extend(sequence.awaited());
        }
        self.stats.n_steps += 1;
        let wanted = WantedLogits::Tokens(&draws);
        if !imports.is_empty() {
            self.stats.n_passes_ahead += 1;
            return self.backend.forward_arriving(&sequences, &imports, wanted, &mut self.logits);
        }
        let begin = Instant::now();
        self.backend.forward_wanted(&sequences, wanted, &mut self.logits)?;
        let n_rows = self.stats.n_computed_tokens - n_computed;
        let n_attended = self.stats.n_attended_tokens - n_attended;
        self.pass_times.note(n_rows as usize, n_attended, begin.elapsed());
        Ok(())
    }

    /// Chooses the next token of the sequence at `idx`; the first time, also that of the other
    /// choices of its request, which start from the same blocks.
    fn choose_tokens(&mut self, idx: usize, logits_row: usize, events: &mut Vec<EngineEvent>) -> Result<()> {
        let position = self.running[idx].n_computed() - 1;
        let n_forks = self.running[idx].take_forks();
        let chosen = self.logits.chosen(logits_row);
        let is_finite = match chosen {
            Some(chosen) => chosen.is_finite,
            // To the end in any case, which is faster than to look whether to stop.
            None => self.logits.row(logits_row).iter().fold(true, |all, logit| all & logit.is_finite()),
        };
        if !is_finite {
            let request = self.running[idx].request;
            events.push(EngineEvent::Failed { request, error: ModelError::NotFinite { position } });
            for sequence in self.running.iter_mut().filter(|sequence| sequence.request == request) {
                sequence.set_failed();
            }
            self.waiting.retain(|sequence| sequence.request != request);
            return Ok(());
        }
        for choice in 1..=n_forks {
            let stop = self.running[idx].sampling().stop.clone();
            let text = self.text_stream(&stop)?;
            let fork = self.running[idx].fork(choice, text, &mut self.pool);
            // After its siblings: the list stays in order of arrival.
            self.running.insert(idx + choice as usize, fork);
        }
        let longest = self.max_sequence_tokens();
        let logits = &self.logits;
        let end_tokens = self.tokenizer.as_deref().map_or(&[][..], Tokenizer::eos_token_ids);
        let config_end_tokens = &self.backend.config().eos_token_ids;
        for sequence in &mut self.running[idx..=idx + n_forks as usize] {
            let (token, logprobs) = match chosen {
                Some(chosen) => {
                    let row = logits.has_row(logits_row).then(|| logits.row(logits_row));
                    let input = sequence.sampler_input();
                    (chosen.token, row.and_then(|row| input.logprobs(row, chosen.token)))
                }
                None => self.sampler.sample(logits.row(logits_row), sequence.sampler_input()),
            };
            let is_end = end_tokens.contains(&token) || config_end_tokens.contains(&token);
            sequence.push_token(token, logprobs, is_end, longest, events);
            self.stats.n_generated_tokens += 1;
        }
        Ok(())
    }
}
