//! Listening to an engine: live, replayed, restarted, lost and found.

use std::path::PathBuf;
use std::sync::Arc;

use kvik_index::holders::Verdict;
use kvik_indexer::feed::FeedName;
use kvik_indexer::sources::engine::{EngineConfig, EngineLimits, EngineSource};
use kvik_proto::events::EventBatch;
use tokio::net::{TcpStream, UnixListener};

use crate::peer::{Engine, Peer, TOPIC, payload, pod1, quick, stored};
use crate::support::{Call, PATIENCE, Recorder};

fn fixture(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kvik-proto/tests/fixtures/vllm-events");
    std::fs::read(folder.join(name)).unwrap()
}

/// The frames of a captured message.
fn captured(name: &str, n_frames: usize) -> Vec<Vec<u8>> {
    (0..n_frames).map(|frame| fixture(&format!("{name}_frame{frame}.bin"))).collect()
}

fn slices(frames: &[Vec<u8>]) -> Vec<&[u8]> {
    frames.iter().map(Vec::as_slice).collect()
}

/// Listens to an engine as configured and waits until it has.
async fn listen(engine: &Engine, config: &EngineConfig) -> (EngineSource, Recorder, Peer<TcpStream>) {
    let recorder = Recorder::default();
    let source = EngineSource::start(config, recorder.feeds()).unwrap();
    let publisher = engine.accept().await;
    (source, recorder, publisher)
}

/// The same, with an engine whose first batch has been heard.
async fn listen_to_first(
    engine: &Engine,
    config: &EngineConfig,
) -> (EngineSource, Recorder, Peer<TcpStream>) {
    let (source, recorder, mut publisher) = listen(engine, config).await;
    publisher.publish(0).await;
    recorder.until_applied(&pod1(), &[0]).await;
    (source, recorder, publisher)
}

#[tokio::test]
async fn a_captured_stream_reaches_its_feed_as_it_was_published() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen(&engine, &engine.config()).await;
    let messages: Vec<_> = (0..6).map(|place| captured(&format!("b32_sha256_{place:03}"), 3)).collect();
    for message in &messages {
        publisher.send(&slices(message)).await;
    }
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4, 5]).await;
    for (call, message) in recorder.calls(&pod1()).iter().zip(&messages) {
        let Call::Applied(batch, Verdict::Applied) = call else { panic!("{call:?}") };
        let expected = EventBatch::decode(&message[2]).unwrap();
        assert_eq!(batch.events, expected.events);
        assert_eq!(batch.published_s.to_bits(), expected.published_s.to_bits());
        assert_eq!((batch.epoch, batch.replayed), (None, false));
    }
    assert_eq!(source.counters().messages, 6);
    assert_eq!(source.counters().malformed, 0);
}

#[tokio::test]
async fn a_gap_is_filled_with_what_the_captured_engine_replayed() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    publisher.send(&slices(&captured("b32_sha256_000", 3))).await;
    recorder.until_applied(&pod1(), &[0]).await;
    for place in 0..5 {
        let frames = captured(&format!("b32_sha256_replay{place:03}"), 4);
        // As the engine sent them: empty, topic, number, payload.
        assert_eq!((frames[0].as_slice(), frames[1].as_slice()), (&b""[..], TOPIC));
        let sequence = u64::from_be_bytes(frames[2].as_slice().try_into().unwrap());
        engine.book.lock().batches.insert(sequence, frames[3].clone());
    }
    let end = captured("b32_sha256_replay005", 4);
    assert_eq!(slices(&end), [b"", b"", &[0xff; 8][..], b""]);
    publisher.send(&slices(&captured("b32_sha256_005", 3))).await;
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4, 5]).await;
    assert_eq!(engine.book.lock().starts, [0, 1]);
    assert_eq!((source.counters().replayed_batches, source.counters().gaps), (5, 1));
}

#[tokio::test]
async fn a_late_listener_hears_first_what_it_missed() {
    let engine = Engine::bind().await;
    engine.remember(0..3);
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    publisher.publish(3).await;
    recorder.until_applied(&pod1(), &[0, 1, 2, 3]).await;
    assert_eq!(engine.book.lock().starts, [0]);
    assert_eq!((source.counters().replayed_batches, source.counters().gaps), (3, 0));
}

#[tokio::test]
async fn a_message_that_was_replayed_and_comes_live_too_is_a_duplicate_and_no_restart() {
    let engine = Engine::bind().await;
    engine.remember(0..8);
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    // Published between the subscription and the answer of the replay.
    for sequence in 5..9 {
        publisher.publish(sequence).await;
    }
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4, 5, 6, 7, 8]).await;
    assert_eq!(source.counters().restarts, 0);
    assert_eq!(recorder.holds(&pod1(), 1000), Some(false));
}

#[tokio::test]
async fn a_gap_is_replayed_before_what_came_after_it() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen_to_first(&engine, &engine.config_with_replay()).await;
    engine.remember(0..6);
    for sequence in [3, 4, 5, 6] {
        publisher.publish(sequence).await;
    }
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4, 5, 6]).await;
    assert_eq!(engine.book.lock().starts, [0, 1]);
    let counters = source.counters();
    assert_eq!((counters.gaps, counters.skipped_gaps, counters.restarts), (1, 0, 0));
    assert_eq!(recorder.holds(&pod1(), 1006), Some(false));
}

#[tokio::test]
async fn answers_that_were_lost_on_the_way_are_asked_for_again() {
    let engine = Engine::bind().await;
    engine.remember(0..10);
    engine.book.lock().lost_once = [4, 5, 8].into();
    engine.book.lock().loses_end = true;
    let (source, recorder, _publisher) = listen(&engine, &engine.config_with_replay()).await;
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]).await;
    assert_eq!(engine.book.lock().starts, [0, 4]);
    assert_eq!((source.counters().skipped_gaps, source.counters().failed_replays), (0, 0));
}

#[tokio::test]
async fn what_the_engine_no_longer_has_is_given_up_and_the_source_is_unsure() {
    let engine = Engine::bind().await;
    engine.remember(7..9);
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    recorder.until_applied(&pod1(), &[7, 8]).await;
    publisher.publish(9).await;
    recorder.until_applied(&pod1(), &[7, 8, 9]).await;
    assert_eq!(recorder.skipped(&pod1()), [7]);
    assert_eq!(recorder.holds(&pod1(), 1008), Some(true));
    assert_eq!(source.counters().skipped_gaps, 1);
}

#[tokio::test]
async fn without_a_replay_a_gap_is_given_up_at_once() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen(&engine, &engine.config()).await;
    for sequence in [0, 1, 5] {
        publisher.publish(sequence).await;
    }
    recorder.until_applied(&pod1(), &[0, 1, 5]).await;
    assert_eq!(recorder.skipped(&pod1()), [5]);
    assert_eq!(recorder.holds(&pod1(), 1000), Some(true));
    assert_eq!((source.counters().gaps, source.counters().replays), (1, 0));
}

#[tokio::test]
async fn a_message_that_cannot_be_read_is_replayed_and_given_up_if_it_still_cannot() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen_to_first(&engine, &engine.config_with_replay()).await;
    engine.remember(0..4);
    engine.book.lock().batches.insert(1, b"\x93garbage".to_vec());
    publisher.send(&[TOPIC, &1_u64.to_be_bytes(), b"\x93garbage"]).await;
    publisher.publish(2).await;
    publisher.publish(3).await;
    recorder.until_applied(&pod1(), &[0, 2, 3]).await;
    assert_eq!(recorder.skipped(&pod1()), [2]);
    let counters = source.counters();
    assert_eq!(counters.gaps, 1);
    assert!(counters.malformed >= 2, "{counters:?}");
}

#[tokio::test]
async fn a_garbled_copy_is_made_good_by_the_replay() {
    let engine = Engine::bind().await;
    let (_source, recorder, mut publisher) = listen_to_first(&engine, &engine.config_with_replay()).await;
    engine.remember(0..3);
    publisher.send(&[TOPIC, &1_u64.to_be_bytes(), b"\xc1"]).await;
    publisher.publish(2).await;
    recorder.until_applied(&pod1(), &[0, 1, 2]).await;
    assert_eq!(recorder.holds(&pod1(), 1001), Some(false));
}

#[tokio::test]
async fn replays_without_a_topic_belong_to_the_topic_that_is_heard() {
    let engine = Engine::bind().await;
    engine.remember(0..3);
    engine.book.lock().has_no_topic = true;
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    // The topic of the first replay is unknown.
    recorder.until("the replay is refused", |_| source.counters().refused == 3).await;
    engine.remember(3..4);
    publisher.publish(3).await;
    recorder.until_applied(&pod1(), &[0, 1, 2, 3]).await;
}

#[tokio::test]
async fn an_engine_without_a_topic_is_heard_under_its_configured_name() {
    let engine = Engine::bind().await;
    engine.remember(0..2);
    engine.book.lock().has_no_topic = true;
    let config = EngineConfig {
        topic: String::new(),
        worker: Some("engine-7".to_owned()),
        model: Some("llama".to_owned()),
        ..engine.config_with_replay()
    };
    let recorder = Recorder::default();
    let _source = EngineSource::start(&config, recorder.feeds()).unwrap();
    let (mut publisher, prefix) = engine.accept_any().await;
    assert_eq!(prefix, b"");
    publisher.send(&[b"", &2_u64.to_be_bytes(), &stored(2)]).await;
    let name = FeedName { model: "llama".to_owned(), worker: "engine-7".to_owned(), rank: 0 };
    recorder.until_applied(&name, &[0, 1, 2]).await;
}

#[tokio::test]
async fn pods_and_ranks_behind_one_endpoint_have_feeds_of_their_own() {
    let engine = Engine::bind().await;
    let (_source, recorder, mut publisher) = listen(&engine, &engine.config()).await;
    for (pod, rank) in [("a", 0), ("b", 0), ("a", 1), ("b", 0)] {
        let topic = format!("kv@{pod}@tiny");
        let sequence = u64::from(recorder.names().iter().any(|name| name.worker == "b" && pod == "b"));
        publisher.send(&[topic.as_bytes(), &sequence.to_be_bytes(), &payload(1.0, 7, rank)]).await;
        let name = FeedName { model: "tiny".to_owned(), worker: pod.to_owned(), rank: u32::from(rank) };
        recorder.until("it came", |recorder| recorder.applied(&name).len() as u64 == sequence + 1).await;
    }
    assert_eq!(recorder.names().len(), 3);
}

#[tokio::test]
async fn an_engine_that_was_only_disconnected_goes_on_where_it_was() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    publisher.publish(0).await;
    publisher.publish(1).await;
    recorder.until_applied(&pod1(), &[0, 1]).await;
    engine.remember(0..4);
    drop(publisher);
    let mut publisher = engine.accept().await;
    publisher.publish(4).await;
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4]).await;
    // From the last one that was taken, to see that it is the same.
    assert_eq!(engine.book.lock().starts, [0, 1]);
    let counters = source.counters();
    assert_eq!((counters.connections, counters.restarts, counters.skipped_gaps), (2, 0, 0));
    assert_eq!(recorder.holds(&pod1(), 1000), Some(false));
}

#[tokio::test]
async fn an_engine_that_was_restarted_and_has_gone_further_than_before_is_not_taken_for_the_old_one() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    publisher.publish(0).await;
    publisher.publish(1).await;
    recorder.until_applied(&pod1(), &[0, 1]).await;
    // Its second life: other batches under the same numbers.
    for sequence in 0..4 {
        engine.book.lock().batches.insert(sequence, payload(500.0 + sequence as f64, 2000 + sequence, 0));
    }
    drop(publisher);
    let _publisher = engine.accept().await;
    recorder.until_applied(&pod1(), &[0, 1, 0, 1, 2, 3]).await;
    assert_eq!(engine.book.lock().starts, [0, 1, 0]);
    assert_eq!(source.counters().restarts, 1);
    assert_eq!(recorder.holds(&pod1(), 1000), None);
    assert_eq!(recorder.holds(&pod1(), 2000), Some(false));
    assert_eq!(recorder.skipped(&pod1()), [0_u64; 0]);
}

#[tokio::test]
async fn an_engine_that_was_restarted_and_has_nothing_yet_is_forgotten() {
    let engine = Engine::bind().await;
    let (source, recorder, publisher) = listen_to_first(&engine, &engine.config_with_replay()).await;
    drop(publisher);
    let mut publisher = engine.accept().await;
    recorder.until("its blocks are gone", |recorder| recorder.holds(&pod1(), 1000).is_none()).await;
    publisher.send(&[TOPIC, &0_u64.to_be_bytes(), &payload(500.0, 2000, 0)]).await;
    recorder.until_applied(&pod1(), &[0, 0]).await;
    assert_eq!(recorder.holds(&pod1(), 2000), Some(false));
    assert_eq!(source.counters().restarts, 1);
}

#[tokio::test]
async fn an_engine_whose_buffer_has_rolled_past_all_that_is_known_begins_anew_and_unsure() {
    let engine = Engine::bind().await;
    let (_source, recorder, publisher) = listen_to_first(&engine, &engine.config_with_replay()).await;
    engine.remember(50..53);
    drop(publisher);
    let _publisher = engine.accept().await;
    recorder.until_applied(&pod1(), &[0, 50, 51, 52]).await;
    assert_eq!(recorder.holds(&pod1(), 1000), None);
    assert_eq!(recorder.holds(&pod1(), 1051), Some(true));
}

#[tokio::test]
async fn a_number_that_falls_in_the_live_stream_is_a_restart() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen(&engine, &engine.config()).await;
    for sequence in [0, 1, 2, 0] {
        publisher.publish(sequence).await;
    }
    recorder.until_applied(&pod1(), &[0, 1, 2, 0]).await;
    assert_eq!(recorder.holds(&pod1(), 1001), None);
    assert_eq!(recorder.holds(&pod1(), 1000), Some(false));
    assert_eq!(source.counters().restarts, 1);
}

#[tokio::test]
async fn a_second_gap_waits_until_the_engine_may_be_asked_again() {
    let engine = Engine::bind().await;
    let limits = EngineLimits { replay_cooldown_ms: 600, ..quick() };
    let config = EngineConfig { limits, ..engine.config_with_replay() };
    let (source, recorder, mut publisher) = listen_to_first(&engine, &config).await;
    engine.remember(0..3);
    publisher.publish(2).await;
    recorder.until_applied(&pod1(), &[0, 1, 2]).await;
    let begun = tokio::time::Instant::now();
    engine.remember(3..7);
    for sequence in [4, 5, 6] {
        publisher.publish(sequence).await;
    }
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4, 5, 6]).await;
    assert!(begun.elapsed().as_millis() >= 200, "{:?}", begun.elapsed());
    assert_eq!((source.counters().replays, source.counters().skipped_gaps), (3, 0));
}

#[tokio::test]
async fn a_full_backlog_gives_a_gap_up_rather_than_waiting_to_ask_again() {
    let engine = Engine::bind().await;
    let limits = EngineLimits { replay_cooldown_ms: 3_600_000, max_backlog_messages: 2, ..quick() };
    let config = EngineConfig { limits, ..engine.config_with_replay() };
    let (_source, recorder, mut publisher) = listen_to_first(&engine, &config).await;
    engine.remember(0..3);
    publisher.publish(2).await;
    recorder.until_applied(&pod1(), &[0, 1, 2]).await;
    for sequence in [4, 5, 6, 7] {
        publisher.publish(sequence).await;
    }
    recorder.until_applied(&pod1(), &[0, 1, 2, 4, 5, 6, 7]).await;
    assert_eq!(recorder.skipped(&pod1()), [4]);
}

#[tokio::test]
async fn an_index_that_is_away_loses_nothing() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen_to_first(&engine, &engine.config()).await;
    recorder.fail(3);
    publisher.publish(1).await;
    publisher.publish(2).await;
    recorder.until_applied(&pod1(), &[0, 1, 2]).await;
    assert_eq!(recorder.n_failures_left(), 0);
    assert_eq!((source.counters().gaps, source.counters().restarts), (0, 0));
}

#[tokio::test]
async fn a_duplicate_that_is_handed_in_twice_is_no_restart() {
    let engine = Engine::bind().await;
    engine.remember(0..8);
    let (source, recorder, mut publisher) = listen(&engine, &engine.config_with_replay()).await;
    recorder.until_applied(&pod1(), &[0, 1, 2, 3, 4, 5, 6, 7]).await;
    recorder.fail(1);
    publisher.publish(5).await;
    publisher.publish(8).await;
    recorder.until("it went on", |recorder| recorder.applied(&pod1()).last() == Some(&8)).await;
    assert_eq!((recorder.n_failures_left(), source.counters().restarts), (0, 0));
    assert_eq!(recorder.holds(&pod1(), 1000), Some(false));
}

#[tokio::test]
async fn a_stopped_source_keeps_what_is_known_and_a_removed_one_does_not() {
    let engine = Engine::bind().await;
    let (source, recorder, mut publisher) = listen_to_first(&engine, &engine.config()).await;
    source.stop().await;
    assert_eq!(recorder.holds(&pod1(), 1000), Some(false));
    // The connection ended with it.
    assert_eq!(tokio::time::timeout(PATIENCE, publisher.receive()).await.unwrap(), None);

    let engine = Engine::bind().await;
    let (source, recorder, _publisher) = listen_to_first(&engine, &engine.config()).await;
    recorder.fail(2);
    source.remove().await;
    assert_eq!(recorder.calls(&pod1()).last(), Some(&Call::Closed));
    assert_eq!(recorder.holds(&pod1(), 1000), None);
}

#[tokio::test]
async fn a_dropped_handle_ends_the_task() {
    let engine = Engine::bind().await;
    let recorder = Recorder::default();
    let feeds = recorder.feeds();
    let source = EngineSource::start(&engine.config(), Arc::clone(&feeds)).unwrap();
    let mut publisher = engine.accept().await;
    drop(source);
    assert_eq!(tokio::time::timeout(PATIENCE, publisher.receive()).await.unwrap(), None);
}

#[tokio::test]
async fn an_engine_behind_a_unix_socket_is_heard() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events");
    let listener = UnixListener::bind(&path).unwrap();
    let config = EngineConfig {
        endpoint: format!("ipc://{}", path.display()),
        limits: quick(),
        ..EngineConfig::default()
    };
    let recorder = Recorder::default();
    let _source = EngineSource::start(&config, recorder.feeds()).unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let mut publisher = Peer::shake_hands(stream, b"PUB").await;
    assert_eq!(publisher.receive().await.unwrap(), [b"\x01kv@"]);
    publisher.publish(0).await;
    recorder.until_applied(&pod1(), &[0]).await;
}
