//! Requests to an engine, what came of them, and what comes of them alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvik_model::{Engine, EngineEvent, EngineOptions, FinishReason, GenerateRequest, RequestId, Usage};
use kvik_tokens::Tokenizer;

use super::{TestModel, backend_options, namespace};

/// One choice of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The text of all events together.
    pub text: String,
    /// Bits of the log probabilities of each token: the chosen one, then the top ones.
    pub logprobs: Vec<Vec<(u32, u32)>>,
    /// Why it ended; `None` while it has not.
    pub reason: Option<FinishReason>,
    /// What it used.
    pub usage: Usage,
}

/// Outputs by request and choice.
pub type Outputs = BTreeMap<(RequestId, u32), Output>;

/// An engine on a model without a tokenizer.
pub fn engine(model: &TestModel, n_blocks: usize, options: EngineOptions) -> Engine {
    engine_with(model, None, n_blocks, options)
}

/// An engine on a model.
pub fn engine_with(
    model: &TestModel,
    tokenizer: Option<Arc<Tokenizer>>,
    n_blocks: usize,
    options: EngineOptions,
) -> Engine {
    let backend = model.backend(&backend_options(n_blocks));
    Engine::new(Box::new(backend), tokenizer, &namespace(), options).unwrap()
}

/// Sorts `events` into `outputs`.
///
/// # Panics
/// If a request failed, or an output grew after its end.
pub fn collect(events: Vec<EngineEvent>, outputs: &mut Outputs) {
    for event in events {
        match event {
            EngineEvent::Token(token) => {
                let output = outputs.entry((token.request, token.choice)).or_default();
                assert!(output.reason.is_none(), "a token after the end");
                output.tokens.push(token.token);
                output.text.push_str(&token.text);
                if let Some(logprobs) = token.logprobs {
                    let mut bits = vec![(token.token, logprobs.chosen.to_bits())];
                    bits.extend(logprobs.top.iter().map(|(token, logprob)| (*token, logprob.to_bits())));
                    output.logprobs.push(bits);
                }
            }
            EngineEvent::Finished { request, choice, text, reason, usage } => {
                let output = outputs.entry((request, choice)).or_default();
                assert!(output.reason.is_none(), "a second end");
                output.text.push_str(&text);
                output.reason = Some(reason);
                output.usage = usage;
            }
            EngineEvent::Admitted { .. } => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Runs the requests that were submitted to their ends.
pub fn run(engine: &mut Engine) -> Outputs {
    let mut outputs = Outputs::new();
    collect(engine.run_until_idle().unwrap(), &mut outputs);
    outputs
}

/// The outputs of a request alone, by choice, in an engine with room for everything that computes
/// all of it.
pub fn alone(
    model: &TestModel,
    tokenizer: Option<&Arc<Tokenizer>>,
    request: &GenerateRequest,
) -> Vec<Output> {
    let mut options = EngineOptions::default();
    options.reuses_prefixes = false;
    let mut engine = engine_with(model, tokenizer.cloned(), 64, options);
    engine.submit(request.clone()).unwrap();
    run(&mut engine).into_values().collect()
}

/// Whether a part of an output is the start of the whole.
pub fn is_start_of(part: &Output, whole: &Output) -> bool {
    whole.tokens.starts_with(&part.tokens)
        && whole.text.starts_with(&part.text)
        && whole.logprobs.starts_with(&part.logprobs)
}
