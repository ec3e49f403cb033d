//! The tokenizers of models: found, opened once, kept while they are used.

use std::collections::{BTreeMap, HashMap};
use std::panic;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::{Result, TokensError};
use crate::tokenizer::Tokenizer;

/// Models without a usable tokenizer that are remembered; clients can ask for any name.
const MAX_MISSING: usize = 1024;

/// Longest name of a model that is looked for in the root folder, in bytes.
const MAX_NAME_BYTES: usize = 512;

/// Tokenizers by the name of their model.
#[derive(Debug)]
pub(super) struct Tokenizers {
    models: BTreeMap<String, PathBuf>,
    root: Option<PathBuf>,
    max_opened: usize,
    missing_for: Duration,
    state: Mutex<State>,
    /// Handed over opened; kept whether they are used or not.
    provided: Mutex<BTreeMap<String, Arc<Tokenizer>>>,
    n_dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    opened: HashMap<String, Opened>,
    missing: HashMap<String, Missing>,
    last_use: u64,
}

/// A tokenizer that is there or being opened.
#[derive(Debug, Clone)]
struct Opened {
    /// Filled by the first caller, while the others wait for it without holding up other models.
    tokenizer: Arc<OnceLock<Result<Arc<Tokenizer>, Reason>>>,
    used: u64,
}

#[derive(Debug, Clone)]
struct Missing {
    reason: Reason,
    until: Instant,
}

/// Why a model has no tokenizer.
#[derive(Debug, Clone)]
enum Reason {
    NotFound { searched: String },
    Broken(String),
}

impl Tokenizers {
    pub(super) fn new(
        models: BTreeMap<String, PathBuf>,
        root: Option<PathBuf>,
        max_opened: usize,
        missing_for: Duration,
    ) -> Self {
        Self {
            models,
            root,
            max_opened,
            missing_for,
            state: Mutex::default(),
            provided: Mutex::default(),
            n_dropped: AtomicU64::new(0),
        }
    }

    /// Takes a tokenizer for a model that the configuration does not name.
    pub(super) fn provide(&self, model: &str, tokenizer: Arc<Tokenizer>) {
        self.provided.lock().insert(model.to_owned(), tokenizer);
    }

    /// Whether a tokenizer was named or handed over for a model.
    pub(super) fn names(&self, model: &str) -> bool {
        self.models.contains_key(model) || self.provided.lock().contains_key(model)
    }

    /// Returns the tokenizer of a model, opened if need be.
    pub(super) fn get(&self, model: &str, now: Instant) -> Result<Arc<Tokenizer>> {
        if !self.models.contains_key(model)
            && let Some(tokenizer) = self.provided.lock().get(model)
        {
            return Ok(Arc::clone(tokenizer));
        }
        let cell = {
            let mut state = self.state.lock();
            if let Some(missing) = state.missing.get(model) {
                if now < missing.until {
                    return Err(missing.reason.clone().of(model));
                }
                state.missing.remove(model);
            }
            state.last_use += 1;
            let used = state.last_use;
            let opened = state
                .opened
                .entry(model.to_owned())
                .or_insert_with(|| Opened { tokenizer: Arc::new(OnceLock::new()), used });
            opened.used = used;
            Arc::clone(&opened.tokenizer)
        };
        match cell.get_or_init(|| self.open(model)) {
            Ok(tokenizer) => {
                self.make_room();
                Ok(Arc::clone(tokenizer))
            }
            Err(reason) => {
                self.remember_missing(model, &cell, reason, now);
                Err(reason.clone().of(model))
            }
        }
    }

    /// Returns the tokenizer of a model if it is open already.
    pub(super) fn opened(&self, model: &str) -> Option<Arc<Tokenizer>> {
        if !self.models.contains_key(model)
            && let Some(tokenizer) = self.provided.lock().get(model)
        {
            return Some(Arc::clone(tokenizer));
        }
        let mut state = self.state.lock();
        state.last_use += 1;
        let used = state.last_use;
        let opened = state.opened.get_mut(model)?;
        opened.used = used;
        opened.tokenizer.get()?.as_ref().ok().map(Arc::clone)
    }

    pub(super) fn max_opened(&self) -> usize {
        self.max_opened
    }

    /// Tokenizers that made room so far.
    pub(super) fn n_dropped(&self) -> u64 {
        // Relaxed: a count that orders nothing.
        self.n_dropped.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn is_missing(&self, model: &str) -> bool {
        self.state.lock().missing.contains_key(model)
    }

    fn open(&self, model: &str) -> Result<Arc<Tokenizer>, Reason> {
        let folder = self.folder_of(model)?;
        // The libraries behind this panic on some of what tokenizer files can say.
        let opened = panic::catch_unwind(|| Tokenizer::open(&folder));
        match opened.map_err(|_| Reason::Broken("opening it panicked".to_owned()))? {
            Ok(tokenizer) => Ok(Arc::new(tokenizer)),
            Err(TokensError::MissingFile { folder, what }) => {
                Err(Reason::NotFound { searched: folder.join(what).display().to_string() })
            }
            Err(error @ TokensError::Io { .. }) => {
                let source = std::error::Error::source(&error).map(ToString::to_string);
                Err(Reason::Broken(format!("{error}: {}", source.unwrap_or_default())))
            }
            Err(error) => Err(Reason::Broken(error.to_string())),
        }
    }

    fn folder_of(&self, model: &str) -> Result<PathBuf, Reason> {
        if let Some(folder) = self.models.get(model) {
            return Ok(folder.clone());
        }
        let Some(root) = &self.root else {
            let searched =
                "`models` of the configuration, which has no such name, and there is no `root`".to_owned();
            return Err(Reason::NotFound { searched });
        };
        // A name is untrusted text: it must not lead out of the root.
        let is_inside = !model.is_empty()
            && model.len() <= MAX_NAME_BYTES
            && !model.contains(['\0', '\\'])
            && Path::new(model).components().all(|component| matches!(component, Component::Normal(_)));
        if is_inside {
            Ok(root.join(model))
        } else {
            let searched = format!("nothing below {}, because the name is no path there", root.display());
            Err(Reason::NotFound { searched })
        }
    }

    /// Drops the tokenizers that were not used for the longest time.
    fn make_room(&self) {
        let mut state = self.state.lock();
        while self.max_opened < state.opened.len() {
            let Some(oldest) = state
                .opened
                .iter()
                // One that is being opened is used right now.
                .filter(|(_, opened)| opened.tokenizer.get().is_some())
                .min_by_key(|(_, opened)| opened.used)
                .map(|(model, _)| model.clone())
            else {
                return;
            };
            state.opened.remove(&oldest);
            self.n_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn remember_missing(
        &self,
        model: &str,
        cell: &Arc<OnceLock<Result<Arc<Tokenizer>, Reason>>>,
        reason: &Reason,
        now: Instant,
    ) {
        let mut state = self.state.lock();
        // Several may have waited for the same answer, and a new attempt may be under way already.
        if !state.opened.get(model).is_some_and(|opened| Arc::ptr_eq(&opened.tokenizer, cell)) {
            return;
        }
        state.opened.remove(model);
        if MAX_MISSING <= state.missing.len() {
            state.missing.retain(|_, missing| now < missing.until);
        }
        if MAX_MISSING <= state.missing.len() {
            state.missing.clear();
        }
        state
            .missing
            .insert(model.to_owned(), Missing { reason: reason.clone(), until: now + self.missing_for });
    }
}

impl Reason {
    fn of(self, model: &str) -> TokensError {
        let model = model.to_owned();
        match self {
            Self::NotFound { searched } => TokensError::NoTokenizer { model, searched },
            Self::Broken(reason) => TokensError::BrokenTokenizer { model, reason },
        }
    }
}
