//! A device that has failed: the engine computes and hands out nothing more.

use super::Engine;
use crate::error::{ModelError, Result};

impl Engine {
    /// Why the device can no longer be used, once it has failed. The engine computes and hands out nothing more then.
    pub fn lost_device(&self) -> Option<&str> {
        self.lost_device.as_deref()
    }

    pub(super) fn check_device(&self) -> Result<()> {
        match &self.lost_device {
            None => Ok(()),
            Some(reason) => Err(ModelError::DeviceLost { reason: reason.clone() }),
        }
    }
}

/// Notes that the device has failed; the first failure counts, others follow from it.
pub(super) fn lose(lost_device: &mut Option<String>, error: &ModelError) {
    lost_device.get_or_insert_with(|| error.to_string());
}
