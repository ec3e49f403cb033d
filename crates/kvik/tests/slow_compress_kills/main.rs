//! Workers that are killed many times while they code the chunks of their disk again.

#![expect(clippy::unwrap_used, reason = "the helpers are tests too: what they cannot do ends the test")]
#![allow(dead_code, reason = "the helpers are those of the other suite, which uses more of them")]

#[path = "../service/cluster.rs"]
mod cluster;
#[path = "../service/compress_kills.rs"]
mod compress_kills;
#[path = "../service/http.rs"]
mod http;
#[path = "../service/process.rs"]
mod process;

#[test]
fn sixty_kills_of_a_compressing_worker_lose_no_chunk_and_leak_no_space() {
    compress_kills::kill_compressions(60);
}
