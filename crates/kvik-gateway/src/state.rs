//! What all requests and tasks of a gateway share.

use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::{HeaderName, HeaderValue};
use kvik_indexer::Indexer;
use kvik_proto::client::HttpClient;
use kvik_runtime::shutdown::Shutdown;
use kvik_runtime::telemetry::Tracer;
use kvik_runtime::trust::Trust;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::GatewayConfig;
use crate::held_book::HeldBook;
use crate::management::Readiness;
use crate::metrics::Metrics;
use crate::placement::admission::Admission;
use crate::placement::retry::RetryBudget;
use crate::placement::under_way::UnderWay;
use crate::request::api_keys::ApiKeys;
use crate::ui::board::Board;
use crate::upstream::fleet::Fleet;
use crate::upstream::members::{MemberBook, Origin};

/// The state of one gateway.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Read once by each request.
    view: ArcSwap<View>,
    /// Writers of the view hold this lock.
    book: Mutex<MemberBook>,
    pub(crate) http: HttpClient,
    pub(crate) trust: Arc<Trust>,
    /// Where it listens, by the field that says so.
    pub(crate) listeners: Vec<(&'static str, SocketAddr)>,
    /// The cluster's token, for workers and coordinators.
    pub(crate) cluster_header: Option<(HeaderName, HeaderValue)>,
    /// `None` where it is switched off.
    pub(crate) indexer: Option<Arc<Indexer>>,
    /// `None` where no program manages engines.
    pub(crate) readiness: Option<Arc<dyn Readiness>>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) under_way: Arc<UnderWay>,
    /// What clients step.
    pub(crate) held: HeldBook,
    pub(crate) retry_budget: RetryBudget,
    pub(crate) metrics: Metrics,
    pub(crate) tracer: Tracer,
    pub(crate) shutdown: Shutdown,
    /// What pages are shown.
    pub(crate) board: Board,
    /// Wakes the task that follows the fleet.
    pub(crate) members_changed: Notify,
}

/// What a request is decided by; immutable, replaced as a whole.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) config: Arc<GatewayConfig>,
    pub(crate) keys: Arc<ApiKeys>,
    pub(crate) fleet: Arc<Fleet>,
}

impl Shared {
    /// The state of a gateway that knows no worker yet.
    pub(crate) fn new(
        config: GatewayConfig,
        http: HttpClient,
        (trust, listeners): (Arc<Trust>, Vec<(&'static str, SocketAddr)>),
        indexer: Option<Arc<Indexer>>,
        readiness: Option<Arc<dyn Readiness>>,
        tracer: Tracer,
        shutdown: Shutdown,
    ) -> Self {
        let mut book = MemberBook::default();
        book.set_backends(Origin::Configuration, &config.backends);
        let fleet = Arc::new(book.fleet(&config));
        let admission = Arc::new(Admission::new(&config.admission, Instant::now()));
        let retry_budget = RetryBudget::new(&config.retry);
        let keys = Arc::new(ApiKeys::new(&config.api_keys));
        Self {
            view: ArcSwap::from_pointee(View { config: Arc::new(config), keys, fleet }),
            book: Mutex::new(book),
            http,
            cluster_header: trust.cluster_header(),
            trust,
            listeners,
            indexer,
            readiness,
            admission,
            under_way: Arc::default(),
            held: HeldBook::default(),
            retry_budget,
            metrics: Metrics::new(),
            tracer,
            shutdown,
            board: Board::default(),
            members_changed: Notify::new(),
        }
    }

    /// The view now.
    pub(crate) fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// Changes the members and publishes the fleet that follows, if `change` says that it differs.
    pub(crate) fn change_members(&self, change: impl FnOnce(&mut MemberBook) -> bool) {
        let mut book = self.book.lock();
        if change(&mut book) {
            let view = self.view.load_full();
            let fleet = Arc::new(book.fleet(&view.config));
            let (config, keys) = (Arc::clone(&view.config), Arc::clone(&view.keys));
            self.view.store(Arc::new(View { config, keys, fleet }));
            self.members_changed.notify_one();
        }
    }

    /// Looks at the members.
    pub(crate) fn read_members<T>(&self, read: impl FnOnce(&MemberBook) -> T) -> T {
        read(&self.book.lock())
    }

    /// Replaces the configuration by a validated one; workers keep their loads and breakers.
    pub(crate) fn replace_config(&self, config: GatewayConfig) {
        let mut book = self.book.lock();
        let before = self.view.load_full();
        book.set_backends(Origin::Configuration, &config.backends);
        self.admission.resize(before.config.admission.max_running, config.admission.max_running);
        let fleet = Arc::new(book.fleet(&config));
        let keys = Arc::new(ApiKeys::new(&config.api_keys));
        self.view.store(Arc::new(View { config: Arc::new(config), keys, fleet }));
        self.members_changed.notify_one();
    }
}
