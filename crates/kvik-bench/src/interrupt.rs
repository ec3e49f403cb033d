//! Signals that end a measurement before its time: the processes that it has started end with it.

use anyhow::{Context as _, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens for SIGTERM and SIGINT. From [`Interrupt::listen`] on they no longer end the process by themselves.
#[derive(Debug)]
pub struct Interrupt {
    terminate: Signal,
    interrupt: Signal,
}

impl Interrupt {
    /// Begins to listen; needs a runtime.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub fn listen() -> anyhow::Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        Ok(Self { terminate, interrupt })
    }

    /// What `work` gives. A signal that has come since [`Interrupt::listen`] drops it, and with it all that it owns.
    ///
    /// # Errors
    /// That of `work`, or that it was interrupted.
    pub async fn or<T>(&mut self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => bail!("finish: a signal has come"),
            _ = self.interrupt.recv() => bail!("finish: a signal has come"),
            outcome = work => outcome,
        }
    }
}
