//! The thread with engines that fail.

use std::sync::Arc;
use std::time::Duration;

use kvik_model::{Engine, GenerateRequest, Result, SamplingParams};
use kvik_node::{KEPT_BYTES, KvLog};

use super::fragile::{FAILS_ON, LOSES_ON, PANICS_ON, fragile_engine};
use super::{EngineHandle, Patience};
use crate::admission::Admission;
use crate::error::Refusal;
use crate::events::{Event, StopCause};
use crate::generation::{Generation, Start, WINDOW};
use crate::metrics::WorkerMetrics;

fn start(slow_client_timeout: Duration) -> (EngineHandle, std::thread::JoinHandle<()>) {
    start_engine(fragile_engine().1, slow_client_timeout)
}

fn start_engine(
    engine: Engine,
    slow_client_timeout: Duration,
) -> (EngineHandle, std::thread::JoinHandle<()>) {
    let patience = Patience { slow_client: slow_client_timeout, memory: Duration::from_secs(30) };
    let kv_log = Arc::new(KvLog::new("w".to_owned(), 1, "m".to_owned(), Vec::new(), KEPT_BYTES));
    EngineHandle::spawn(engine, None, kv_log, WorkerMetrics::new("m", "w"), patience).unwrap()
}

fn request(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut sampling = SamplingParams::greedy(max_tokens);
    sampling.ignore_eos = true;
    GenerateRequest { prompt: prompt.to_vec(), sampling }
}

async fn begin(engine: &EngineHandle, requests: Vec<GenerateRequest>) -> Result<Generation, Refusal> {
    let permit = Admission::new(1).try_take(1).unwrap();
    let (begun, stages) = (Vec::new(), Vec::new());
    Generation::start(engine, Start { requests, name: None, salt: None, permit, begun, stages, blend: None })
        .await
}

async fn last_event(mut generation: Generation) -> Event {
    let mut last = None;
    while let Some((_, event)) = generation.next().await {
        last = Some(event);
    }
    last.unwrap()
}

#[tokio::test]
async fn a_panic_ends_requests_with_an_error_and_nothing_hangs() {
    let (engine, thread) = start(Duration::from_mins(1));
    let running = begin(&engine, vec![request(&[1, 70, 80], 4000)]).await.unwrap();
    // Accepted, then the pass panics.
    let fatal = begin(&engine, vec![request(&[1, PANICS_ON], 5)]).await.unwrap();
    assert!(matches!(last_event(fatal).await, Event::Stopped(StopCause::Ended)));
    assert!(matches!(last_event(running).await, Event::Stopped(StopCause::Ended)));
    assert!(thread.join().is_err());
    assert!(!engine.is_alive());
    assert!(engine.failure().get().unwrap().contains("panicked"));
    assert!(begin(&engine, vec![request(&[1, 70], 5)]).await.is_err());
    assert!(engine.snapshot().await.is_err());
}

#[tokio::test]
async fn a_lost_device_ends_requests_for_another_worker_and_then_the_thread() {
    let (engine, thread) = start(Duration::from_mins(1));
    let running = begin(&engine, vec![request(&[1, 70, 80], 4000)]).await.unwrap();
    let fatal = begin(&engine, vec![request(&[1, LOSES_ON], 5)]).await.unwrap();
    assert!(matches!(last_event(fatal).await, Event::Stopped(StopCause::DeviceLost)));
    assert!(matches!(last_event(running).await, Event::Stopped(StopCause::DeviceLost)));
    engine.ended().await;
    assert!(thread.join().is_ok(), "nothing panics");
    assert!(!engine.is_alive());
    let reason = "the device is lost: cuStreamSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE";
    assert_eq!(engine.failure().get().unwrap(), reason);
    let refusal = begin(&engine, vec![request(&[1, 70], 5)]).await.unwrap_err();
    assert_eq!(refusal.status, http::StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn a_device_that_is_lost_between_requests_ends_the_thread_when_it_is_asked_for_kv() {
    let (_, engine, is_lost) = fragile_engine();
    let (engine, thread) = start_engine(engine, Duration::from_mins(1));
    let permit = Admission::new(1).try_take(1).unwrap();
    let requests = vec![request(&[1, 70], 5)];
    let (name, begun, stages) = (Some("kept".to_owned()), Vec::new(), Vec::new());
    let start = Start { requests, name: name.as_deref(), salt: None, permit, begun, stages, blend: None };
    let named = Generation::start(&engine, start).await.unwrap();
    assert!(matches!(last_event(named).await, Event::Finished { .. }));
    assert!(engine.export_kv("kept", 0..1).await.unwrap().is_some());
    is_lost.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(engine.export_kv("kept", 0..1).await.is_err());
    engine.ended().await;
    assert!(thread.join().is_ok());
    assert!(engine.failure().get().unwrap().starts_with("the device is lost"));
}

#[tokio::test]
async fn a_batch_that_the_backend_refuses_fails_its_requests_and_the_engine_goes_on() {
    let (engine, _thread) = start(Duration::from_mins(1));
    let failing = begin(&engine, vec![request(&[1, FAILS_ON], 5)]).await.unwrap();
    assert!(matches!(last_event(failing).await, Event::Failed(message) if message.contains("failed")));
    let next = begin(&engine, vec![request(&[1, 70], 5)]).await.unwrap();
    assert!(matches!(last_event(next).await, Event::Finished { .. }));
    assert_eq!(engine.snapshot().await.unwrap().n_running, 0);
}

#[tokio::test]
async fn an_output_that_is_not_read_pauses_at_the_window_and_is_ended_after_its_time() {
    let (engine, _thread) = start(Duration::from_millis(1));
    let mut slow = begin(&engine, vec![request(&[1, 70], 900)]).await.unwrap();
    // Not read at all: the engine itself gets it out of the way.
    let n_sequences = async || {
        let snapshot = engine.snapshot().await.unwrap();
        snapshot.n_running + snapshot.n_waiting
    };
    while 0 < n_sequences().await {
        tokio::task::yield_now().await;
    }
    let mut n_tokens = 0;
    let mut end = None;
    while let Some((_, event)) = slow.next().await {
        match event {
            Event::Token(_) => n_tokens += 1,
            other => end = Some(other),
        }
    }
    assert_eq!(n_tokens, WINDOW);
    assert!(matches!(end, Some(Event::Failed(message)) if message.contains("did not read")));
}

#[tokio::test]
async fn every_request_is_told_its_admission_before_its_first_token() {
    let (engine, _thread) = start(Duration::from_mins(1));
    let prompt: Vec<u32> = (100..140).collect();
    let first = begin(&engine, vec![request(&prompt, 2)]).await.unwrap();
    assert!(matches!(last_event(first).await, Event::Finished { .. }));
    let mut again = begin(&engine, vec![request(&prompt, 2), request(&[1, 70], 2)]).await.unwrap();
    let mut cached = [None, None];
    while let Some((part_idx, event)) = again.next().await {
        match event {
            Event::Admitted { cached_tokens, .. } => {
                assert_eq!(cached[part_idx].replace(cached_tokens), None);
            }
            Event::Token(_) => assert!(cached[part_idx].is_some()),
            _ => {}
        }
    }
    assert_eq!(cached, [Some(32), Some(0)]);
}

#[tokio::test]
async fn the_last_token_of_an_output_says_that_its_end_follows() {
    let (engine, _thread) = start(Duration::from_mins(1));
    let mut sampling = SamplingParams::greedy(5);
    (sampling.ignore_eos, sampling.n) = (true, 2);
    let requests =
        [vec![1, 70], vec![1, 80, 81]].map(|prompt| GenerateRequest { prompt, sampling: sampling.clone() });
    let mut generation = begin(&engine, requests.to_vec()).await.unwrap();
    let mut last = None;
    let mut n_ended = 0;
    while let Some((part_idx, event)) = generation.next().await {
        match event {
            Event::Token(token) => {
                assert_eq!(last, None, "nothing stands between a last token and its end");
                last = token.is_last.then_some((part_idx, token.choice));
            }
            Event::Finished { choice, .. } => {
                assert_eq!(last.take(), Some((part_idx, choice)));
                n_ended += 1;
            }
            _ => assert_eq!(last, None),
        }
    }
    assert_eq!(n_ended, 4);
}

#[tokio::test]
async fn an_output_that_is_read_goes_past_the_window() {
    let (engine, _thread) = start(Duration::from_mins(1));
    let mut sampling = SamplingParams::greedy(WINDOW * 2 + 40);
    sampling.ignore_eos = true;
    sampling.n = 2;
    let request = GenerateRequest { prompt: vec![1, 70], sampling };
    let mut generation = begin(&engine, vec![request]).await.unwrap();
    let mut n_tokens = 0;
    while let Some((_, event)) = generation.next().await {
        n_tokens += u32::from(matches!(event, Event::Token(_)));
    }
    assert_eq!(n_tokens, 2 * (WINDOW * 2 + 40));
}
