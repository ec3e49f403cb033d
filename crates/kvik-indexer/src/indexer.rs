//! The index as a library: a prompt in, how much of it each worker has out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::BoxFuture;
use kvik_index::holders::{BlockKey, BridgeConfig, Tier, Walk};
use kvik_proto::index::{
    BlockStats, BlocksPage, BookStats, ModelStats, ScoreRequest, ScoreResponse, SourceStats,
};
use kvik_runtime::shutdown::Shutdown;
use kvik_tokens::{
    AddSpecial, ChatOptions, Json, Outcome, TokenizeInput, TokenizeRequest, Tokenizer, TokenizersPool,
};
use kvik_types::TokenId;
use serde_json::value::RawValue;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::book::Book;
use crate::catalog::Catalog;
use crate::config::{IndexConfig, TokenizeMode};
use crate::error::{IndexerError, Result};
use crate::grpc::{self, CallGuard, GrpcLimits, PodScore, PodScores};
use crate::ingest::Learning;
use crate::keys::KeyKind;
use crate::score::{Query, ScorerKind, Scoring, WorkerScore, score_of_nothing, score_workers};
use crate::storage::{Storage, open_storage};
use crate::tasks;

/// Predictions that were held against a worker's report, by `outcome`: `kept`, `short`.
const PREDICTIONS: &str = "kvik_index_predictions_total";
/// Blocks of a page of a source.
pub(crate) const MAX_PAGE_BLOCKS: usize = 10_000;

/// A prompt in one of its forms.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Text; special tokens are added as the tokenizer does.
    Text(String),
    /// A conversation, as the `OpenAI` API has it, and how it is rendered.
    Chat(Vec<Json>, ChatOptions),
    /// Tokens, taken as they are.
    Tokens(Vec<TokenId>),
}

/// Answers which worker has how much of a prompt.
#[derive(Debug)]
pub struct Indexer {
    catalog: Arc<Catalog>,
    storage: Storage,
    pool: TokenizersPool,
    has_tokenizer_root: bool,
    scoring: Scoring,
    /// Where a question names none, and for routing.
    scorer: ScorerKind,
    mode: TokenizeMode,
    predictions: Predictions,
    grpc_limits: GrpcLimits,
}

/// What became of predictions.
#[derive(Debug, Default)]
struct Predictions {
    n_kept: AtomicU64,
    n_short: AtomicU64,
}

impl Indexer {
    /// Starts an index: opens its books and listens to the configured engines. All tasks run on `shutdown`.
    ///
    /// # Errors
    /// If the configuration cannot be used, or an address is taken. A server or an engine that is away is waited
    /// for.
    pub fn start<'a>(config: &'a IndexConfig, shutdown: &'a Shutdown) -> BoxFuture<'a, Result<Arc<Self>>> {
        // Boxed, so that the index is compiled with this crate and not again with each program that polls it.
        Box::pin(async move { Self::run(config, shutdown) })
    }

    fn run(config: &IndexConfig, shutdown: &Shutdown) -> Result<Arc<Self>> {
        config.validate()?;
        let storage = open_storage(config)?;
        let learning = Learning {
            seeds: config.hash_seeds.clone().into(),
            own_block_tokens: config.bridge_block_size()?,
            bridge: BridgeConfig::default(),
        };
        let catalog = Arc::new(Catalog::new(storage.backends(), learning));
        let pool = TokenizersPool::try_new(config.pool()?)?;
        let scoring = Scoring {
            weights: config.weights()?,
            costs: config.cost_model(),
            token_bytes: config.costs.token_bytes,
        };
        let indexer = Arc::new(Self {
            catalog,
            storage,
            pool,
            has_tokenizer_root: config.tokenizers.root.is_some(),
            scoring,
            scorer: config.scorer.parse()?,
            mode: config.tokenizers.mode,
            predictions: Predictions::default(),
            grpc_limits: config.grpc.clone(),
        });
        tasks::start(&indexer.storage, &indexer.catalog, config, shutdown)?;
        Ok(indexer)
    }

    /// Serves gRPC on `listener`, for calls that `guard` admits.
    pub fn serve_grpc(
        self: &Arc<Self>,
        listener: TcpListener,
        tls: Option<TlsAcceptor>,
        guard: Arc<dyn CallGuard>,
        shutdown: &Shutdown,
    ) {
        let (indexer, serving) = (Arc::clone(self), shutdown.clone());
        shutdown.spawn(async move {
            let scores = Arc::clone(&indexer) as Arc<dyn PodScores>;
            if let Err(error) = grpc::serve(listener, tls, scores, guard, &indexer.grpc_limits, serving).await
            {
                tracing::error!(%error, "gRPC is no longer served");
            }
        });
    }

    /// Hands over the tokenizer of a model that the configuration names none for.
    pub fn provide_tokenizer(&self, model: &str, tokenizer: Arc<Tokenizer>) {
        self.pool.provide(model, tokenizer);
    }

    /// Where the index is kept: `memory` or `redis`.
    pub fn backend_kind(&self) -> &'static str {
        self.storage.kind()
    }

    /// Counts since the start, by name.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let (n_loaded, n_lost) = self.storage.kept_counts();
        // Relaxed: counts.
        let counts = [
            ("kept_books_loaded", n_loaded),
            ("kept_books_lost", n_lost),
            ("predictions_kept", self.predictions.n_kept.load(Ordering::Relaxed)),
            ("predictions_short", self.predictions.n_short.load(Ordering::Relaxed)),
        ];
        counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
    }

    /// Turns a prompt into tokens, as the model's engines do.
    ///
    /// # Errors
    /// If there is no tokenizer for the model, it cannot read the prompt, or too many prompts wait.
    pub async fn tokenize(&self, model: &str, prompt: Prompt) -> Result<Vec<TokenId>> {
        let input = match prompt {
            Prompt::Tokens(tokens) => return Ok(tokens),
            Prompt::Text(text) => TokenizeInput::Text { text, add_special: AddSpecial::Yes },
            Prompt::Chat(messages, options) => TokenizeInput::Chat { messages, options },
        };
        match self.pool.tokenize(TokenizeRequest { model: model.to_owned(), input }).await? {
            Outcome::Tokenized(tokenized) => Ok(tokenized.tokens),
            Outcome::Busy => Err(IndexerError::Unavailable {
                operation: "tokenize a prompt",
                reason: "too many prompts wait".to_owned(),
            }),
        }
    }

    /// The tokens of a prompt as far as a choice of a worker can have them, and whether these are all.
    ///
    /// In the mode `background` they are those that are known from prompts before, found at once; the whole prompt is
    /// tokenized behind the request, so that the next one with its beginning finds it.
    ///
    /// # Errors
    /// As [`tokenize`](Self::tokenize).
    pub async fn tokenize_for_routing(&self, model: &str, prompt: Prompt) -> Result<(Vec<TokenId>, bool)> {
        let input = match (self.mode, prompt) {
            (TokenizeMode::Background, Prompt::Text(text)) => {
                TokenizeInput::Text { text, add_special: AddSpecial::Yes }
            }
            (TokenizeMode::Background, Prompt::Chat(messages, options)) => {
                TokenizeInput::Chat { messages, options }
            }
            (_, prompt) => return Ok((self.tokenize(model, prompt).await?, true)),
        };
        let known = self.pool.tokenize_behind(TokenizeRequest { model: model.to_owned(), input })?;
        Ok((known.tokens, false))
    }

    /// The books of all models; feeds are opened here.
    pub fn catalog(&self) -> &Arc<Catalog> {
        &self.catalog
    }

    /// Whether something of the model's KV is known, so that it is worth to look a prompt up.
    pub fn knows(&self, model: &str) -> bool {
        self.catalog.find(model).is_some_and(|books| books.has_books())
    }

    /// Finds for every worker how much of a prompt with this `cache_salt` it has. Workers that have nothing are left
    /// out.
    ///
    /// # Errors
    /// If the server that keeps the index is away.
    pub async fn find(
        &self,
        model: &str,
        tokens: &[TokenId],
        salt: Option<&str>,
    ) -> Result<BTreeMap<String, WorkerScore>> {
        let Some(books) = self.catalog.find(model) else { return Ok(BTreeMap::new()) };
        let scorer = self.scorer;
        let matches = books.lookup(tokens, salt, scorer.walk()).await?;
        let query = Query { prompt_tokens: tokens.len(), queued_tokens: &|_| 0 };
        Ok(score_workers(&matches, scorer, &self.scoring, &query))
    }

    /// Scores workers by how much of a prompt they have. `queued_tokens` is what a worker has to do already,
    /// for the scorer `cost`.
    ///
    /// # Errors
    /// If a field of the request cannot be used, or the index is away.
    pub async fn score(
        &self,
        request: ScoreRequest,
        queued_tokens: &(dyn Fn(&str) -> u64 + Sync),
    ) -> Result<ScoreResponse> {
        let ScoreRequest { model, prompt, messages, token_ids, cache_salt, pods, scorer } = request;
        let scorer = scorer.as_deref().map_or(Ok(self.scorer), str::parse)?;
        let prompt = prompt_in(prompt, messages.as_deref(), token_ids)?;
        let tokens = self.tokenize(&model, prompt).await?;
        let query = Query { prompt_tokens: tokens.len(), queued_tokens };
        let matches = match self.catalog.discover(&model).await? {
            Some(books) => books.lookup(&tokens, cache_salt.as_deref(), scorer.walk()).await?,
            None => Vec::new(),
        };
        let found = score_workers(&matches, scorer, &self.scoring, &query);
        let mut response = ScoreResponse {
            scorer: scorer.name().to_owned(),
            prompt_tokens: tokens.len(),
            model,
            ..ScoreResponse::default()
        };
        let mut put = |name: &str, found: Option<&WorkerScore>| {
            let score = found
                .map_or_else(|| score_of_nothing(name, scorer, &self.scoring, &query), |found| found.score);
            response.scores.insert(name.to_owned(), score);
            response.matched_tokens.insert(name.to_owned(), found.map_or(0, |found| found.matched_tokens));
            if let Some(found) = found {
                let tiers =
                    Tier::ALL.iter().map(|tier| (tier_name(*tier), found.matched_in[tier.as_index()]));
                let tiers = tiers.filter(|(_, n_tokens)| 0 < *n_tokens);
                let tiers = tiers.map(|(tier, n_tokens)| (tier.to_owned(), n_tokens)).collect();
                response.matched_by_tier.insert(name.to_owned(), tiers);
            }
        };
        if pods.is_empty() {
            for (worker, found) in &found {
                put(worker, Some(found));
            }
        } else {
            for pod in &pods {
                let found = found.iter().find(|(worker, _)| is_same_worker(worker, pod));
                put(pod, found.map(|(_, found)| found));
            }
        }
        response.best = best(&response, scorer);
        Ok(response)
    }

    /// Compares a prediction with what the worker reported after the request: what it did not have is removed from the
    /// index. `tokens` and `salt` must be those that the worker looked up, or true entries are removed.
    pub async fn settle(
        &self,
        model: &str,
        worker: &str,
        tokens: &[TokenId],
        salt: Option<&str>,
        predicted_tokens: u64,
        reported_tokens: u64,
    ) {
        // An engine computes the last token of a prompt even if it has all of it.
        let predicted_tokens = predicted_tokens.min((tokens.len() as u64).saturating_sub(1));
        let Some(books) = self.catalog.find(model) else { return };
        let mut is_short = false;
        for book in books.all() {
            let block_tokens = book.keys.block_tokens.get() as u64;
            let (predicted, reported) = (predicted_tokens / block_tokens, reported_tokens / block_tokens);
            if predicted <= reported {
                continue;
            }
            is_short = true;
            let mut keys: Vec<BlockKey> = Vec::new();
            let n_tokens = (predicted * block_tokens) as usize;
            book.keys.extend_salted(tokens.get(..n_tokens).unwrap_or(tokens), salt, &mut keys);
            let lost = keys.get(reported as usize..).unwrap_or_default();
            if let Err(error) = forget(&book, worker, lost).await {
                tracing::warn!(%model, %worker, %error, "failed to correct a prediction");
            }
        }
        let Predictions { n_kept, n_short } = &self.predictions;
        let (count, outcome) = if is_short { (n_short, "short") } else { (n_kept, "kept") };
        // Relaxed: a count.
        count.fetch_add(1, Ordering::Relaxed);
        metrics::counter!(PREDICTIONS, "outcome" => outcome).increment(1);
        if is_short {
            tracing::debug!(%model, %worker, predicted_tokens, reported_tokens, "corrected a prediction");
        }
    }

    /// What is known, model by model.
    ///
    /// # Errors
    /// If the server that keeps the index is away.
    pub async fn stats(&self) -> Result<Vec<ModelStats>> {
        let mut models = Vec::new();
        for books in self.catalog.all() {
            let model = books.model();
            let mut stats = ModelStats {
                model: model.to_owned(),
                has_tokenizer: self.pool.names(model) || self.has_tokenizer_root,
                books: Vec::new(),
            };
            for book in books.all() {
                let sources = book.backend.states().await?.into_iter().map(|state| SourceStats {
                    worker: state.source.worker.into(),
                    rank: state.source.rank,
                    epoch: state.epoch,
                    due_sequence: state.due_sequence,
                    is_unsure: state.is_unsure,
                    n_blocks: state.n_blocks,
                });
                stats.books.push(BookStats {
                    keys: book.keys.id(),
                    block_tokens: book.keys.block_tokens.get(),
                    sources: sources.collect(),
                });
            }
            models.push(stats);
        }
        Ok(models)
    }

    /// How many of the chunks with these keys each worker has in memory or on disk, in the books of kvik's own stores.
    ///
    /// Keys are halves of hashes that depend on model, tenant and all tokens, so a chunk of another book is found by
    /// chance only; the caller asks the worker's store before it believes the answer.
    ///
    /// # Errors
    /// If the server that keeps the index is away.
    pub async fn holders(&self, keys: &[BlockKey]) -> Result<BTreeMap<String, u64>> {
        let mut holders = BTreeMap::new();
        let books = self.catalog.all().into_iter().flat_map(|books| books.all());
        for book in books.filter(|book| matches!(book.keys.kind, KeyKind::Kvik { .. })) {
            for row in book.backend.lookup(keys, Walk::All).await? {
                let n_chunks = [Tier::Cpu, Tier::Disk].map(|tier| u64::from(row.covered_in[tier.as_index()]));
                let n_chunks = n_chunks.into_iter().sum::<u64>();
                if n_chunks > 0 {
                    *holders.entry(row.source.worker.to_string()).or_insert(0) += n_chunks;
                }
            }
        }
        Ok(holders)
    }

    /// A page of the blocks of a source, from the cursor that the page before named as the next.
    ///
    /// # Errors
    /// If there is no such model or book, or the index is away.
    pub async fn blocks(
        &self,
        model: &str,
        source: &kvik_index::holders::SourceName,
        keys: &str,
        from: Option<u64>,
        limit: usize,
    ) -> Result<BlocksPage> {
        let books = self.catalog.find(model);
        let books = books.ok_or_else(|| IndexerError::invalid("model", model, "a model of the index"))?;
        let book = books.all().into_iter().find(|book| book.keys.id() == keys);
        let book = book.ok_or_else(|| IndexerError::invalid("keys", keys, "those of a book of the model"))?;
        let limit = limit.clamp(1, MAX_PAGE_BLOCKS);
        let found = book.backend.blocks_of(source, from, limit).await?;
        let blocks = found.blocks.into_iter().map(|(key, tiers)| BlockStats {
            key: format!("{:016x}", key.0),
            tiers: Tier::ALL
                .iter()
                .filter(|tier| tiers >> tier.as_index() & 1 == 1)
                .map(|tier| tier_name(*tier).to_owned())
                .collect(),
        });
        let next = found.next.map(|cursor| format!("{cursor:016x}"));
        Ok(BlocksPage { blocks: blocks.collect(), next })
    }
}

impl PodScores for Indexer {
    fn scores<'a>(
        &'a self,
        prompt: &'a str,
        model: &'a str,
        pods: &'a [String],
    ) -> BoxFuture<'a, Result<Vec<PodScore>>> {
        Box::pin(async move {
            let request = ScoreRequest {
                model: model.to_owned(),
                prompt: Some(prompt.to_owned()),
                pods: pods.to_vec(),
                ..ScoreRequest::default()
            };
            let response = self.score(request, &|_| 0).await?;
            // Clients take the highest score: of a cost, the requests like this one that a second is enough for.
            let as_score =
                |cost: f64| if self.scorer == ScorerKind::Cost { 1.0 / cost.max(1e-6) } else { cost };
            let scores = response.scores.into_iter().map(|(pod, score)| (pod, as_score(score)));
            let scores = scores.filter(|(_, score)| *score > 0.0);
            Ok(scores.map(|(pod, score)| PodScore { pod, score, data_parallel_rank: None }).collect())
        })
    }
}

/// The prompt of a request that has it in one of its forms.
pub(crate) fn prompt_in(
    text: Option<String>,
    messages: Option<&RawValue>,
    tokens: Option<Vec<TokenId>>,
) -> Result<Prompt> {
    match (text, messages, tokens) {
        (Some(text), None, None) => Ok(Prompt::Text(text)),
        (None, Some(messages), None) => {
            let messages = serde_json::from_str(messages.get()).map_err(|error| {
                IndexerError::invalid("messages", error, "a list of messages with `role` and `content`")
            })?;
            Ok(Prompt::Chat(messages, ChatOptions::default()))
        }
        (None, None, Some(tokens)) => Ok(Prompt::Tokens(tokens)),
        _ => {
            let allowed = "exactly one of `prompt`, `messages` and `token_ids`";
            Err(IndexerError::invalid("prompt", "not given, or in several forms", allowed))
        }
    }
}

/// Whether two names stand for one worker: an id, a URL, `host:port` or a host alone, which matches every port.
pub fn is_same_worker(one: &str, other: &str) -> bool {
    let bare = |name: &'_ str| {
        let name = name.split_once("://").map_or(name, |(_, rest)| rest);
        name.trim_end_matches('/').to_owned()
    };
    let (one, other) = (bare(one), bare(other));
    if one == other {
        return true;
    }
    match (split_port(&one), split_port(&other)) {
        (Some((host, _)), None) => host == other,
        (None, Some((host, _))) => host == one,
        _ => false,
    }
}

fn split_port(name: &str) -> Option<(&str, &str)> {
    let (host, port) = name.rsplit_once(':')?;
    let is_port = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    // An IPv6 address has colons of its own and stands in brackets if a port follows.
    (is_port && (!host.contains(':') || host.ends_with(']'))).then_some((host, port))
}

fn best(response: &ScoreResponse, scorer: ScorerKind) -> Option<String> {
    let something = |worker: &str| response.matched_by_tier.contains_key(worker);
    let mut best: Option<(&String, f64)> = None;
    for (worker, score) in &response.scores {
        let is_candidate = scorer == ScorerKind::Cost || something(worker) && *score > 0.0;
        if is_candidate && best.is_none_or(|(_, other)| scorer.is_better(*score, other)) {
            best = Some((worker, *score));
        }
    }
    best.map(|(worker, _)| worker.clone())
}

async fn forget(book: &Book, worker: &str, keys: &[BlockKey]) -> Result<()> {
    for state in book.backend.states().await? {
        if *state.source.worker == *worker {
            book.backend.forget(&state.source, keys).await?;
        }
    }
    Ok(())
}

/// The word for a tier.
pub fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Gpu => "gpu",
        Tier::Cpu => "cpu",
        Tier::Disk => "disk",
        Tier::Remote => "remote",
    }
}
