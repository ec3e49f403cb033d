//! Prints what an engine says, one JSON object a line, until standard input ends.
//!
//! ```text
//! cargo run -p kvik-indexer --example listen '{"endpoint": "tcp://127.0.0.1:5557"}'
//! ```
//!
//! The argument is an `EngineConfig`. The last line has the counts of the source.

#![expect(clippy::print_stdout, reason = "printing is all it is for")]

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use kvik_index::holders::{Batch, HolderIndex, IndexConfig, SourceId, Verdict};
use kvik_indexer::Result;
use kvik_indexer::feed::{Feed, FeedBatch, FeedName, Feeds, Holding, Naming};
use kvik_indexer::sources::engine::{EngineConfig, EngineSource};
use parking_lot::Mutex;
use serde_json::json;
use tokio::io::AsyncReadExt as _;

/// Judges the order of batches as the real index does, and prints them.
struct Printer(Arc<Mutex<HolderIndex>>);

#[derive(Debug)]
struct PrintedFeed {
    index: Arc<Mutex<HolderIndex>>,
    name: FeedName,
    source: SourceId,
}

impl Feeds for Printer {
    fn open(&self, name: FeedName, _naming: Naming) -> BoxFuture<'_, Result<Arc<dyn Feed>>> {
        async move {
            let source = self.0.lock().add_source(&format!("{}@{}", name.worker, name.model), name.rank)?;
            let feed: Arc<dyn Feed> = Arc::new(PrintedFeed { index: Arc::clone(&self.0), name, source });
            Ok(feed)
        }
        .boxed()
    }
}

impl Feed for PrintedFeed {
    fn apply(&self, batch: FeedBatch) -> BoxFuture<'_, Result<Verdict>> {
        async move {
            let FeedBatch { epoch, sequence, replayed, published_s, events } = batch;
            let judged = Batch { source: self.source, epoch, sequence, replayed, events: &[] };
            let verdict = self.index.lock().apply(&judged);
            let events: Vec<String> = events.iter().map(|event| format!("{event:?}")).collect();
            println!(
                "{}",
                json!({
                    "worker": self.name.worker, "model": self.name.model, "rank": self.name.rank,
                    "sequence": sequence, "replayed": replayed, "published_s": published_s,
                    "verdict": format!("{verdict:?}"), "events": events,
                })
            );
            Ok(verdict)
        }
        .boxed()
    }

    fn replace(&self, holding: Holding) -> BoxFuture<'_, Result<bool>> {
        async move {
            println!("{}", json!({ "worker": self.name.worker, "replaced": holding.next_sequence }));
            Ok(self.index.lock().replace(self.source, holding.epoch, holding.next_sequence, []))
        }
        .boxed()
    }

    fn skip_gap(&self, next: u64) -> BoxFuture<'_, Result<()>> {
        async move {
            println!("{}", json!({ "worker": self.name.worker, "skipped_to": next }));
            self.index.lock().skip_gap(self.source, next);
            Ok(())
        }
        .boxed()
    }

    fn position(&self) -> BoxFuture<'_, Result<(Option<u64>, Option<u64>)>> {
        async move { Ok(self.index.lock().position(self.source).unwrap_or_default()) }.boxed()
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            println!("{}", json!({ "worker": self.name.worker, "closed": true }));
            self.index.lock().remove_source(self.source);
            Ok(())
        }
        .boxed()
    }
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let config = std::env::args().nth(1).ok_or("usage: listen CONFIG, a JSON object")?;
    let config: EngineConfig = serde_json::from_str(&config)?;
    let index = HolderIndex::new(IndexConfig::default());
    let source = EngineSource::start(&config, Arc::new(Printer(Arc::new(Mutex::new(index)))))?;
    // A pipe that its writer closes, or Ctrl-D.
    tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
    let counters = source.counters();
    source.stop().await;
    println!("{}", json!({ "counters": format!("{counters:?}") }));
    Ok(())
}
