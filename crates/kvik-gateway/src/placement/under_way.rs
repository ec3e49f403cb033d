//! Prompts that were sent to a worker and whose answers have not ended.
//!
//! The worker will have their KV before whoever is placed behind them gets there, but no event tells so yet. Without
//! this, prompts that share a beginning and come at a time are computed on several workers, just when the fleet
//! is busy.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::upstream::backend::Backend;

/// Prompts that are remembered; beyond them new ones are not, which costs what they could have shared.
const MAX_PROMPTS: usize = 4096;
/// A common beginning counts in steps of a usual token block: engines share whole blocks only.
const BLOCK_TOKENS: usize = 16;

/// All prompts that are under way.
#[derive(Debug, Default)]
pub(crate) struct UnderWay {
    prompts: Mutex<Prompts>,
}

#[derive(Debug, Default)]
struct Prompts {
    by_number: HashMap<u64, Prompt>,
    next_number: u64,
}

#[derive(Debug)]
struct Prompt {
    backend: Arc<Backend>,
    tokens: Arc<[u32]>,
}

/// A prompt that is under way until this is dropped.
#[derive(Debug)]
pub(crate) struct UnderWayGuard {
    under_way: Arc<UnderWay>,
    number: u64,
}

impl UnderWay {
    /// Notes that a prompt was sent to a backend; `None` if too many are remembered.
    pub(crate) fn send(
        self: &Arc<Self>,
        backend: &Arc<Backend>,
        tokens: &Arc<[u32]>,
    ) -> Option<UnderWayGuard> {
        let mut prompts = self.prompts.lock();
        if prompts.by_number.len() >= MAX_PROMPTS {
            return None;
        }
        let number = prompts.next_number;
        prompts.next_number += 1;
        let prompt = Prompt { backend: Arc::clone(backend), tokens: Arc::clone(tokens) };
        prompts.by_number.insert(number, prompt);
        Some(UnderWayGuard { under_way: Arc::clone(self), number })
    }

    /// Raises `saved` of each of `backends` to the whole blocks that a prompt shares with one that it is at.
    pub(crate) fn raise(&self, tokens: &[u32], backends: &[&Arc<Backend>], saved: &mut [f64]) {
        for prompt in self.prompts.lock().by_number.values() {
            let place = backends.iter().position(|backend| Arc::ptr_eq(backend, &prompt.backend));
            let Some(place) = place else { continue };
            let n_shared = tokens.iter().zip(&*prompt.tokens).take_while(|(one, other)| one == other).count();
            let n_shared = (n_shared / BLOCK_TOKENS * BLOCK_TOKENS) as f64;
            if let Some(saved) = saved.get_mut(place) {
                *saved = saved.max(n_shared);
            }
        }
    }
}

impl Drop for UnderWayGuard {
    fn drop(&mut self) {
        self.under_way.prompts.lock().by_number.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::backend::BackendKind;

    fn backend(id: &str) -> Arc<Backend> {
        Arc::new(Backend::new(id.to_owned(), BackendKind::Worker, 1, "http://127.0.0.1:1"))
    }

    #[test]
    fn a_prompt_under_way_counts_for_its_worker_until_it_ends() {
        let under_way = Arc::new(UnderWay::default());
        let backends = [backend("a"), backend("b")];
        let tokens: Arc<[u32]> = (0..40).collect();
        let saved = |tokens: &[u32]| {
            let mut saved = vec![5.0, 20.0];
            under_way.raise(tokens, &[&backends[0], &backends[1]], &mut saved);
            saved
        };
        let guard = under_way.send(&backends[0], &tokens);
        assert_eq!(saved(&tokens), [32.0, 20.0]);
        assert_eq!(saved(&tokens[..20]), [16.0, 20.0]);
        assert_eq!(saved(&[7; 40]), [5.0, 20.0]);
        drop(guard);
        assert_eq!(saved(&tokens), [5.0, 20.0]);
    }

    #[test]
    fn no_more_prompts_are_remembered_than_there_is_room_for() {
        let under_way = Arc::new(UnderWay::default());
        let (backend, tokens): (_, Arc<[u32]>) = (backend("a"), Arc::new([1]));
        let mut guards: Vec<_> = (0..MAX_PROMPTS).map(|_| under_way.send(&backend, &tokens)).collect();
        assert!(under_way.send(&backend, &tokens).is_none());
        guards.pop();
        assert!(under_way.send(&backend, &tokens).is_some());
    }
}
