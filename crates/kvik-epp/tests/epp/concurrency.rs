//! Many requests at a time.

use tokio::task::JoinSet;

use crate::data_plane::completion;
use crate::engine::Engine;
use crate::support::TestEpp;

const N_AT_A_TIME: usize = 64;
const N_EACH: usize = 3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_up_to_a_megabyte_pass_unchanged_at_a_concurrency_of_64() {
    let engines = Engine::start_many(4).await;
    let epp = TestEpp::before(&engines, |_, _| ()).await;
    let mut clients = JoinSet::new();
    for client in 0..N_AT_A_TIME {
        let data_plane = epp.data_plane.clone();
        clients.spawn(async move {
            for turn in 0..N_EACH {
                let number = client * N_EACH + turn;
                // From a few bytes to a megabyte.
                let body = completion(number, (number * 15_731) % 1_000_000);
                let (mut exchange, outcome) = data_plane.complete(&body).await;
                let sent = outcome.sent();
                assert_eq!(sent.content_length, Some(body.len()));
                assert!(sent.body == body, "request {number} came back changed");
                exchange.answer(200, None, &[&body, b"data: [DONE]\n\n"]).await;
            }
        });
    }
    clients.join_all().await;
    epp.idle().await;
}
