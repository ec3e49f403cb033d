//! A pool of threads that turn requests into tokens.
//!
//! Tokenizing a long prompt takes milliseconds, which a thread that serves sockets does not have. Requests
//! wait in a bounded queue; when it is full the answer is [`Outcome::Busy`] at once, and the caller does
//! without tokens.

use std::collections::BTreeMap;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use kvik_types::TokenId;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::{error, warn};

use crate::error::{Result, TokensError};
use crate::prefix_store::{self, LruPrefixStore, PrefixStore, TriePrefixStore};
use crate::tokenizer::{AddSpecial, ChatMessage, ChatOptions, Json, Tokenizer};

mod queue;
#[cfg(test)]
mod tests;
mod tokenizers;

use queue::Queue;
use tokenizers::Tokenizers;

/// What a pool works with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Threads that tokenize. Default: 2.
    pub n_threads: usize,
    /// Requests that may wait. Default: 1024.
    pub max_waiting: usize,
    /// Folders of tokenizers by the name of their model. Default: none.
    pub models: BTreeMap<String, PathBuf>,
    /// A folder in which the tokenizer of every other model is looked for, as
    /// `<root>/<model>/tokenizer.json`. Default: none.
    pub root: Option<PathBuf>,
    /// Tokenizers that are kept in memory; the least recently used leave first. Default: 20.
    pub max_tokenizers: usize,
    /// For how long a model without a usable tokenizer is not looked for again. Default: 10 s.
    pub missing_for: Duration,
    /// Where known prefixes are kept. Default: stretches.
    pub prefix_store: PrefixStoreKind,
    /// Memory for known prefixes, in bytes. Default: 256 MiB.
    pub prefix_store_bytes: usize,
}

/// A kind of [`PrefixStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixStoreKind {
    /// None: every text is tokenized whole.
    None,
    /// [`LruPrefixStore`].
    Lru,
    /// [`TriePrefixStore`].
    Trie,
}

/// Asks for tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizeRequest {
    /// The model whose tokenizer is meant.
    pub model: String,
    /// What is tokenized.
    pub input: TokenizeInput,
}

/// What can become tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizeInput {
    /// A prompt.
    Text {
        /// The prompt.
        text: String,
        /// Whether the special tokens are added that a text of the model starts or ends with; engines do.
        add_special: AddSpecial,
    },
    /// A conversation.
    Chat {
        /// Its messages, as in [`ChatMessage::from_json`]; at least one.
        messages: Vec<Json>,
        /// How it is rendered.
        options: ChatOptions,
    },
    /// Tokens already; they are the answer.
    Tokens(Vec<TokenId>),
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The tokens.
    Tokenized(Tokenized),
    /// Too many requests wait; nothing was done.
    Busy,
}

/// The tokens of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tokenized {
    /// All tokens of the prompt.
    pub tokens: Vec<TokenId>,
    /// Bytes of the prompt's text; 0 if it came as tokens.
    pub n_text_bytes: usize,
    /// Bytes whose tokens were known from prompts before.
    pub n_known_bytes: usize,
}

/// Threads with tokenizers.
///
/// Dropping the pool lets its threads finish what they are at and waits for them; requests that still wait
/// get [`TokensError::Stopped`]. A folder that changes is not looked at again while its tokenizer is kept.
#[derive(Debug)]
pub struct TokenizersPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Queue<Task>,
    tokenizers: Tokenizers,
    store: Option<Box<dyn PrefixStore>>,
    /// All that run; a thread puts its successor here before it ends.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Task {
    request: TokenizeRequest,
    reply: oneshot::Sender<Result<Tokenized>>,
    /// Whether it is done for those that come later, so that it does not matter if its caller waits.
    is_for_store: bool,
}

// === impl PoolConfig ===

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            n_threads: 2,
            max_waiting: 1024,
            models: BTreeMap::new(),
            root: None,
            max_tokenizers: 20,
            missing_for: Duration::from_secs(10),
            prefix_store: PrefixStoreKind::Lru,
            prefix_store_bytes: 256 << 20,
        }
    }
}

impl PoolConfig {
    fn validate(&self) -> Result<()> {
        let at_least_one = [
            ("n_threads", self.n_threads),
            ("max_waiting", self.max_waiting),
            ("max_tokenizers", self.max_tokenizers),
        ];
        match at_least_one.into_iter().find(|(_, value)| *value == 0) {
            Some((field, value)) => {
                Err(TokensError::InvalidConfig { field, value: value.to_string(), allowed: "1 or more" })
            }
            None => Ok(()),
        }
    }
}

// === impl TokenizersPool ===

impl TokenizersPool {
    /// Starts the threads; tokenizers are opened when they are asked for.
    ///
    /// # Errors
    /// If a number of the configuration is 0 or a thread cannot be started.
    pub fn try_new(config: PoolConfig) -> Result<Self> {
        config.validate()?;
        let store: Option<Box<dyn PrefixStore>> = match config.prefix_store {
            PrefixStoreKind::None => None,
            PrefixStoreKind::Lru => Some(Box::new(LruPrefixStore::new(config.prefix_store_bytes))),
            PrefixStoreKind::Trie => Some(Box::new(TriePrefixStore::new(config.prefix_store_bytes))),
        };
        let shared = Shared {
            queue: Queue::new(config.max_waiting),
            tokenizers: Tokenizers::new(
                config.models,
                config.root,
                config.max_tokenizers,
                config.missing_for,
            ),
            store,
            threads: Mutex::default(),
        };
        // Made first, so that threads that were started are joined if a later one cannot be.
        let pool = Self { shared: Arc::new(shared) };
        for _ in 0..config.n_threads {
            pool.shared.start_thread().map_err(TokensError::Thread)?;
        }
        Ok(pool)
    }

    /// Returns the tokens of a request.
    ///
    /// Dropping the future takes the request back unless a thread is at it already, whose work is then lost.
    ///
    /// # Errors
    /// If the model has no usable tokenizer, or the tokenizer or its chat template refuses the input.
    pub async fn tokenize(&self, request: TokenizeRequest) -> Result<Outcome> {
        match self.submit(request) {
            Some(reply) => Ok(Outcome::Tokenized(reply.await.map_err(|_| TokensError::Stopped)??)),
            None => Ok(Outcome::Busy),
        }
    }

    /// Returns at once what is known of the tokens of a request from texts before, which may be nothing, and tokenizes
    /// all of it behind the caller, so that the next request with this beginning finds it.
    ///
    /// The tokens are the first of the request's. They are none while the tokenizer is not open, while too many requests
    /// wait, and without a store of known prefixes, in which case nothing is tokenized either.
    ///
    /// # Errors
    /// If the chat template refuses the input.
    pub fn tokenize_behind(&self, request: TokenizeRequest) -> Result<Tokenized> {
        let Some(store) = &self.shared.store else { return Ok(Tokenized::default()) };
        let mut known = Tokenized::default();
        let mut text_request = request;
        if let Some(tokenizer) = self.shared.tokenizers.opened(&text_request.model) {
            let (text, add_special) = match text_request.input {
                TokenizeInput::Tokens(tokens) => return Ok(Tokenized { tokens, ..Tokenized::default() }),
                TokenizeInput::Text { text, add_special } => (text, add_special),
                TokenizeInput::Chat { messages, options } => {
                    (rendered(&tokenizer, messages, &options)?, AddSpecial::No)
                }
            };
            let found = prefix_store::known(&tokenizer, store.as_ref(), &text, add_special);
            known =
                Tokenized { tokens: found.tokens, n_text_bytes: text.len(), n_known_bytes: found.n_bytes };
            if known.n_known_bytes == known.n_text_bytes {
                return Ok(known);
            }
            // Rendered once: the threads get the text.
            text_request.input = TokenizeInput::Text { text, add_special };
        }
        let (reply, _) = oneshot::channel();
        self.shared.queue.push(Task { request: text_request, reply, is_for_store: true });
        Ok(known)
    }

    /// Does the same as [`tokenize`](Self::tokenize), for callers outside of an async runtime.
    pub fn tokenize_blocking(&self, request: TokenizeRequest) -> Result<Outcome> {
        match self.submit(request) {
            Some(reply) => Ok(Outcome::Tokenized(reply.blocking_recv().map_err(|_| TokensError::Stopped)??)),
            None => Ok(Outcome::Busy),
        }
    }

    /// Hands over the tokenizer of a model. One that the configuration names for it counts instead.
    pub fn provide(&self, model: &str, tokenizer: Arc<Tokenizer>) {
        self.shared.tokenizers.provide(model, tokenizer);
    }

    /// Whether a tokenizer was named or handed over for a model; one in the root folder is found only when it is
    /// asked for.
    pub fn names(&self, model: &str) -> bool {
        self.shared.tokenizers.names(model)
    }

    /// Returns the number of requests that wait.
    pub fn n_waiting(&self) -> usize {
        self.shared.queue.len()
    }

    /// Returns the memory that known prefixes take, in bytes.
    pub fn prefix_store_bytes(&self) -> usize {
        self.shared.store.as_ref().map_or(0, |store| store.used_bytes())
    }

    fn submit(&self, request: TokenizeRequest) -> Option<oneshot::Receiver<Result<Tokenized>>> {
        let (reply, answer) = oneshot::channel();
        // Nothing to do for a thread.
        if let TokenizeInput::Tokens(tokens) = request.input {
            let _ = reply.send(Ok(Tokenized { tokens, ..Tokenized::default() }));
            return Some(answer);
        }
        self.shared.queue.push(Task { request, reply, is_for_store: false }).then_some(answer)
    }
}

impl Drop for TokenizersPool {
    fn drop(&mut self) {
        self.shared.queue.close();
        loop {
            // Not held while a thread is waited for: it may put another one there.
            let Some(thread) = self.shared.threads.lock().pop() else { break };
            // Panics are caught around each request.
            if thread.join().is_err() {
                error!("a tokenizer thread has panicked");
            }
        }
    }
}

// === impl Shared ===

impl Shared {
    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        // Held until the handle is there, so that a join of all threads finds this one.
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        let shared = Arc::clone(self);
        threads.push(thread::Builder::new().name("tokenizer".to_owned()).spawn(move || shared.work())?);
        Ok(())
    }

    fn work(self: &Arc<Self>) {
        let n_dropped_before = self.tokenizers.n_dropped();
        while let Some(task) = self.queue.pop() {
            self.answer(task);
            // A thread keeps words of every tokenizer that it has used, also of those that are gone.
            let n_dropped = self.tokenizers.n_dropped() - n_dropped_before;
            if self.tokenizers.max_opened() as u64 <= n_dropped && self.start_thread().is_ok() {
                return;
            }
        }
    }

    fn answer(&self, task: Task) {
        // Its caller has gone.
        if task.reply.is_closed() && !task.is_for_store {
            return;
        }
        let Task { request, reply, .. } = task;
        let model = request.model.clone();
        // The libraries behind this panic on some of what tokenizer files can say.
        let outcome = panic::catch_unwind(AssertUnwindSafe(|| self.serve(request)));
        let outcome = outcome.unwrap_or_else(|_| {
            warn!(%model, "the tokenizer panicked");
            Err(TokensError::BrokenTokenizer { model, reason: "it panicked".to_owned() })
        });
        let _ = reply.send(outcome);
    }

    fn serve(&self, request: TokenizeRequest) -> Result<Tokenized> {
        let tokenizer = self.tokenizers.get(&request.model, Instant::now())?;
        let (text, add_special) = match request.input {
            TokenizeInput::Text { text, add_special } => (text, add_special),
            TokenizeInput::Chat { messages, options } => {
                (rendered(&tokenizer, messages, &options)?, AddSpecial::No)
            }
            TokenizeInput::Tokens(tokens) => return Ok(Tokenized { tokens, ..Tokenized::default() }),
        };
        let n_text_bytes = text.len();
        let Some(store) = &self.store else {
            return Ok(Tokenized {
                tokens: tokenizer.encode(&text, add_special)?,
                n_text_bytes,
                n_known_bytes: 0,
            });
        };
        let encoded = prefix_store::encode(&tokenizer, store.as_ref(), &text, add_special)?;
        Ok(Tokenized { tokens: encoded.tokens, n_text_bytes, n_known_bytes: encoded.n_known_bytes })
    }
}

fn rendered(tokenizer: &Tokenizer, messages: Vec<Json>, options: &ChatOptions) -> Result<String> {
    if messages.is_empty() {
        return Err(TokensError::request("messages", "empty", "at least one message"));
    }
    let messages = messages.into_iter().map(ChatMessage::from_json).collect::<Result<Vec<_>>>()?;
    tokenizer.render_chat(&messages, options)
}
