//! The kernel that chooses tokens, for tests with logits of their own.

use crate::error::{ModelError, Result};
use crate::forward::ChosenToken;
use crate::sampling::TokenDraw;

use super::CudaBackend;
use super::device::Buffer;
use super::lists::words_of;

impl CudaBackend {
    /// The tokens that the device chooses from rows of logits, as many as there are draws.
    ///
    /// # Errors
    /// If the rows are not as long as the vocabulary, or the device fails.
    pub fn choose_tokens(&mut self, logits: &[f32], draws: &[TokenDraw]) -> Result<Vec<ChosenToken>> {
        let vocab_size = self.config.vocab_size;
        if logits.len() != draws.len() * vocab_size {
            let allowed = format!("{} rows of {vocab_size}", draws.len());
            return Err(ModelError::request("logits", logits.len(), allowed));
        }
        self.activations.reserve_logits(&self.config, draws.len())?;
        let words: Vec<u8> = draws.iter().flat_map(words_of).flat_map(u32::to_le_bytes).collect();
        let draws_on_device = Buffer::holding(&self.device, &words)?;
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        self.device.write(self.activations.logits.address(), &bytes)?;
        let (rows, chosen) = (self.activations.logits.address(), self.activations.chosen.address());
        // SAFETY: room for all rows was made above, and the stream is waited for before the draws go.
        unsafe {
            self.kernels.queue_choose_tokens(
                draws.len(),
                rows,
                draws_on_device.address(),
                chosen,
                vocab_size,
            )?;
        }
        self.device.synchronize()?;
        Ok(self.chosen(draws.len()).collect())
    }
}
