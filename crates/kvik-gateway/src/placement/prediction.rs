//! What the index said about the worker that got a request, compared with what the worker reports.
//!
//! Answers have in their usage how many tokens of the prompt came out of the cache. A worker that had less than
//! the index said is corrected in the index, so that the next request with this prompt is not sent
//! there for the same wrong reason. A report counts only if it is about as many prompt tokens as the prediction: with
//! another prompt than the one that was looked up (truncated, several of them, rendered in another way) it says nothing
//! about the blocks that would be removed.

use std::sync::Arc;

use kvik_indexer::Indexer;
use memchr::memmem;

/// How usage names the tokens that came out of the cache.
const CACHED_TOKENS: &[u8] = b"\"cached_tokens\":";
/// How usage names the tokens of the prompt.
const PROMPT_TOKENS: &[u8] = b"\"prompt_tokens\":";
/// Most digits of a number of tokens.
const MAX_DIGITS: usize = 10;

/// A prediction for one request.
#[derive(Debug)]
pub(crate) struct Prediction {
    indexer: Arc<Indexer>,
    model: String,
    worker: String,
    prompt: Arc<LookedUp>,
    predicted_tokens: u64,
    reported_tokens: Option<u64>,
    reported_prompt_tokens: Option<u64>,
}

/// A prompt as it was looked up.
#[derive(Debug)]
pub(crate) struct LookedUp {
    pub(crate) tokens: Vec<u32>,
    pub(crate) salt: Option<String>,
}

impl Prediction {
    /// The index says that `worker` has the first `predicted_tokens` of `prompt`.
    pub(crate) fn new(
        indexer: Arc<Indexer>,
        model: &str,
        worker: &str,
        prompt: Arc<LookedUp>,
        predicted_tokens: u64,
    ) -> Self {
        let (model, worker) = (model.to_owned(), worker.to_owned());
        let (reported_tokens, reported_prompt_tokens) = (None, None);
        Self { indexer, model, worker, prompt, predicted_tokens, reported_tokens, reported_prompt_tokens }
    }

    /// Looks for the report in a part of the answer. One that is cut in two by the network is missed, which costs
    /// nothing but the correction.
    pub(crate) fn look(&mut self, data: &[u8]) {
        // The last one counts: with several choices the usage of all of them comes at the end.
        let last = |name: &[u8]| {
            let place = memmem::rfind(data, name)?;
            leading_number(&data[place + name.len()..])
        };
        self.reported_tokens = last(CACHED_TOKENS).or(self.reported_tokens);
        self.reported_prompt_tokens = last(PROMPT_TOKENS).or(self.reported_prompt_tokens);
    }

    /// The answer is complete: returns what corrects the index, if the worker has reported on this prompt.
    pub(crate) fn settle(self) -> Option<impl Future<Output = ()> + Send + 'static> {
        let reported_tokens = self.reported_tokens?;
        if self.reported_prompt_tokens != Some(self.prompt.tokens.len() as u64) {
            return None;
        }
        Some(async move {
            let Self { indexer, model, worker, prompt, predicted_tokens, .. } = self;
            let LookedUp { tokens, salt } = &*prompt;
            let salt = salt.as_deref();
            indexer.settle(&model, &worker, tokens, salt, predicted_tokens, reported_tokens).await;
        })
    }
}

fn leading_number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    let n_digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if n_digits == text.len() || n_digits > MAX_DIGITS {
        // The number may go on in the next part.
        return None;
    }
    std::str::from_utf8(&text[..n_digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_read_if_its_end_is_seen() {
        assert_eq!(leading_number(b" 48}"), Some(48));
        assert_eq!(leading_number(b"0,"), Some(0));
        for unusable in [&b"48"[..], b"", b"null}", b"-1}", b"99999999999}"] {
            assert_eq!(leading_number(unusable), None);
        }
    }
}
