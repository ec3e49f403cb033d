//! The three scorers of the seed, as requests see them.

use kvik_indexer::feed::{FeedBatch, Naming};
use kvik_indexer::{IndexConfig, Indexer, is_same_worker};
use kvik_proto::events::{BlocksStored, EngineHash, KvEvent, Medium};
use kvik_proto::index::{HeldRun, PromptHoldersRequest, ScoreRequest, ScoreResponse};
use kvik_types::BlockHash;

use crate::engine::{MODEL, open, prompt, start};

const ROOT: BlockHash = BlockHash([9; 16]);

/// Blocks in a tier.
type Held<'a> = (Medium, &'a [usize]);

/// An index in which each worker has some blocks of one prompt of eight, in a tier.
async fn index(holdings: &[(&str, &[Held<'_>])]) -> (std::sync::Arc<Indexer>, Vec<u32>) {
    let (indexer, _shutdown) = start(&IndexConfig::default()).await;
    let tokens = prompt(1, 8);
    let keys: kvik_indexer::keys::Keys = format!("kvik:{ROOT}:16").parse().unwrap();
    let mut blocks = Vec::new();
    keys.extend(&tokens, &mut blocks);
    for (worker, tiers) in holdings {
        let feed = open(&indexer, worker, Naming::Kvik { root: ROOT, block_tokens: 16 }).await;
        let events = tiers.iter().map(|(medium, held)| {
            let hashes = held.iter().map(|block| EngineHash(blocks[*block].0)).collect();
            KvEvent::Stored(BlocksStored { hashes, medium: *medium, ..BlocksStored::default() })
        });
        let events = events.collect();
        let batch = FeedBatch { epoch: Some(1), sequence: 0, replayed: false, published_s: 0.0, events };
        feed.apply(batch).await.unwrap();
    }
    (indexer, tokens)
}

async fn score(indexer: &Indexer, tokens: &[u32], scorer: &str, pods: &[&str]) -> ScoreResponse {
    let request = ScoreRequest {
        model: MODEL.to_owned(),
        token_ids: Some(tokens.to_vec()),
        pods: pods.iter().map(|pod| (*pod).to_owned()).collect(),
        scorer: Some(scorer.to_owned()),
        ..ScoreRequest::default()
    };
    indexer.score(request, &|worker| if worker == "busy" { 1_000_000 } else { 0 }).await.unwrap()
}

#[tokio::test]
async fn each_scorer_counts_what_its_rule_says() {
    let (indexer, tokens) = index(&[
        ("prefix", &[(Medium::Gpu, &[0, 1, 2])]),
        ("holes", &[(Medium::Gpu, &[0, 2, 3, 4, 7])]),
        ("late", &[(Medium::Gpu, &[5, 6])]),
        ("mixed", &[(Medium::Cpu, &[0, 1]), (Medium::Gpu, &[1])]),
    ])
    .await;
    let expect = [
        ("LongestPrefixMatch", [("holes", 1.0), ("late", 0.0), ("mixed", 1.8), ("prefix", 3.0)], "prefix"),
        ("HighestBlockHit", [("holes", 8.0), ("late", 7.0), ("mixed", 2.0), ("prefix", 3.0)], "holes"),
        ("CoverageBasedMatching", [("holes", 5.0), ("late", 2.0), ("mixed", 1.8), ("prefix", 3.0)], "holes"),
    ];
    let pods = ["holes", "late", "mixed", "prefix"];
    for (scorer, scores, best) in expect {
        let answer = score(&indexer, &tokens, scorer, &pods).await;
        for (worker, expected) in scores {
            assert!((answer.scores[worker] - expected).abs() < 1e-9, "{scorer} {worker}: {answer:?}");
        }
        assert_eq!(answer.best.as_deref(), Some(best), "{scorer}");
    }
}

#[tokio::test]
async fn every_run_of_a_prompt_is_found_with_its_fastest_tier_also_behind_holes() {
    let (indexer, tokens) = index(&[
        ("whole", &[(Medium::Gpu, &[0, 1, 2, 3, 4, 5, 6, 7])]),
        ("holes", &[(Medium::Gpu, &[0, 2, 3]), (Medium::Cpu, &[3, 4]), (Medium::Disk, &[7])]),
        ("nothing", &[]),
    ])
    .await;
    // The same worker's store, which names blocks of twice the length in a book of its own.
    let root = BlockHash([7; 16]);
    let keys: kvik_indexer::keys::Keys = format!("kvik:{root}:32").parse().unwrap();
    let mut chunks = Vec::new();
    keys.extend(&tokens, &mut chunks);
    let feed = open(&indexer, "holes", Naming::Kvik { root, block_tokens: 32 }).await;
    let hashes = vec![EngineHash(chunks[0].0)];
    let event = KvEvent::Stored(BlocksStored { hashes, medium: Medium::Cpu, ..BlocksStored::default() });
    let batch =
        FeedBatch { epoch: Some(1), sequence: 0, replayed: false, published_s: 0.0, events: vec![event] };
    feed.apply(batch).await.unwrap();

    let with_tail: Vec<u32> = tokens.iter().copied().chain([1, 2, 3]).collect();
    let request = PromptHoldersRequest {
        model: MODEL.to_owned(),
        token_ids: Some(with_tail.clone()),
        ..PromptHoldersRequest::default()
    };
    let answer = indexer.prompt_holders(request.clone()).await.unwrap();
    assert!(answer.is_complete);
    assert_eq!((answer.block_tokens, &answer.token_ids), (16, &with_tail));
    let run = |first_token, tokens, tier: &str| HeldRun { first_token, tokens, tier: tier.to_owned() };
    assert_eq!(answer.workers["whole"], [run(0, 128, "gpu")]);
    let holes =
        [run(0, 16, "gpu"), run(16, 16, "cpu"), run(32, 32, "gpu"), run(64, 16, "cpu"), run(112, 16, "disk")];
    assert_eq!(answer.workers["holes"], holes);
    assert_eq!(answer.workers.len(), 2);
    let salted = PromptHoldersRequest { cache_salt: Some("s".to_owned()), ..request.clone() };
    assert!(indexer.prompt_holders(salted).await.unwrap().workers.is_empty());
    let both = PromptHoldersRequest { prompt: Some("text".to_owned()), ..request };
    assert!(indexer.prompt_holders(both).await.unwrap_err().to_string().contains("`prompt`"));
}

#[tokio::test]
async fn the_cost_of_a_long_queue_outweighs_a_match() {
    let (indexer, tokens) =
        index(&[("busy", &[(Medium::Gpu, &[0, 1, 2, 3, 4, 5, 6])]), ("idle", &[(Medium::Disk, &[0])])]).await;
    let answer = score(&indexer, &tokens, "cost", &["busy", "idle", "empty"]).await;
    assert_eq!(answer.best.as_deref(), Some("idle"), "{answer:?}");
    assert!(answer.scores["busy"] > answer.scores["empty"]);
}

#[tokio::test]
async fn pods_that_are_asked_for_are_all_answered_and_others_are_not() {
    let (indexer, tokens) =
        index(&[("http://10.0.0.1:8000", &[(Medium::Gpu, &[0])]), ("b", &[(Medium::Gpu, &[0])])]).await;
    let answer = score(&indexer, &tokens, "longest_prefix", &["10.0.0.1", "c"]).await;
    let workers: Vec<&String> = answer.scores.keys().collect();
    assert_eq!(workers, ["10.0.0.1", "c"]);
    assert_eq!(answer.matched_tokens["10.0.0.1"], 16);
    assert_eq!(score(&indexer, &tokens, "longest_prefix", &[]).await.scores.len(), 2);
}

#[tokio::test]
async fn a_request_that_cannot_be_scored_says_what_is_wrong() {
    let (indexer, _) = index(&[]).await;
    let base = ScoreRequest { model: MODEL.to_owned(), ..ScoreRequest::default() };
    let cases = [
        (base.clone(), "`prompt`"),
        (ScoreRequest { token_ids: Some(vec![1]), prompt: Some(String::new()), ..base.clone() }, "`prompt`"),
        (
            ScoreRequest { token_ids: Some(vec![1]), scorer: Some("best".to_owned()), ..base.clone() },
            "`scorer` is best",
        ),
        (ScoreRequest { prompt: Some("text".to_owned()), ..base }, "tokenizer"),
    ];
    for (request, expected) in cases {
        let error = indexer.score(request, &|_| 0).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn a_prediction_that_failed_is_taken_out_and_counted() {
    let (indexer, tokens) = index(&[("a", &[(Medium::Gpu, &[0, 1, 2, 3, 4, 5, 6, 7])])]).await;
    let matched = async || score(&indexer, &tokens, "longest_prefix", &["a"]).await.matched_tokens["a"];
    // An engine computes the last token anew: what it reports then is no lie.
    indexer.settle(MODEL, "a", &tokens, None, 128, 112).await;
    assert_eq!(matched().await, 128);
    indexer.settle(MODEL, "a", &tokens, None, 128, 50).await;
    assert_eq!(matched().await, 48);
    indexer.settle(MODEL, "a", &tokens, None, 48, 48).await;
    let counters = indexer.counters();
    assert_eq!((counters["predictions_kept"], counters["predictions_short"]), (2, 1));
}

#[test]
fn a_worker_has_many_names() {
    for (one, other, is_same) in [
        ("worker-0", "worker-0", true),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000", true),
        ("http://10.0.0.1:8000", "10.0.0.1", true),
        ("10.0.0.1:8000", "10.0.0.1:8001", false),
        ("http://[::1]:8000", "[::1]", true),
        ("::1", "::1:8000", false),
        ("worker-0", "worker-1", false),
    ] {
        assert_eq!(is_same_worker(one, other), is_same, "{one} {other}");
    }
}
