//! The elastic scenario of the example `elastic_gpu`, small and on the host.
//!
//! The program starts itself as the engines, so it has a `main` of its own.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]
#![expect(clippy::print_stdout, reason = "it is its own test harness")]

use kvik_memory::geometry::UNIT_BYTES;

#[path = "../examples/elastic_gpu/play/mod.rs"]
mod play;

use play::Backend;
use play::scenario::Scenario;

const N_BUFFERS: u32 = 2;
/// 32 blocks, of which 25 are four fifths.
const BUDGET_BYTES: u64 = 32 * 2 * UNIT_BYTES;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, rest @ ..] = arguments.as_slice()
        && role == "engine"
    {
        return play::engine::run(rest).unwrap();
    }
    // As in the usual harness, what is not an option selects tests by name.
    let name = "three_engines_take_turns_at_most_of_the_memory_and_lose_nothing";
    let mut filters = arguments.iter().filter(|argument| !argument.starts_with('-')).peekable();
    if filters.peek().is_none() || filters.any(|filter| name.contains(filter.as_str())) {
        take_turns();
        println!("test {name} ... ok");
    }
}

fn take_turns() {
    let dir = tempfile::tempdir().unwrap();
    let scenario = Scenario {
        backend: Backend::Host,
        budget_bytes: Some(BUDGET_BYTES),
        n_buffers: N_BUFFERS,
        n_rounds: 1,
    };
    let played = play::scenario::play(scenario, &std::env::current_exe().unwrap(), dir.path()).unwrap();
    assert_eq!((played.device.as_str(), played.budget_bytes), ("host0", BUDGET_BYTES));
    assert_eq!(played.n_words_lost(), 0, "{:?}", played.turns);
    assert_eq!(played.block_bytes, u64::from(N_BUFFERS) * UNIT_BYTES);
    let most = played.turns.iter().filter(|turn| turn.report.n_blocks == 25);
    assert_eq!(
        most.map(|turn| (turn.engine, turn.what)).collect::<Vec<_>>(),
        [
            ("red", "has its turn"),
            ("green", "has its turn"),
            ("blue", "has its turn"),
            ("red", "is killed after this"),
            ("green", "takes what it left"),
            ("red", "starts again"),
        ]
    );
    let n_words_of_turns = 6 * 25 * u64::from(N_BUFFERS) * UNIT_BYTES / 8;
    assert!(n_words_of_turns < played.n_words_checked(), "{}", played.n_words_checked());
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}
