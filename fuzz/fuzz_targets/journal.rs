//! A line of a journal and its items are read or refused, whatever their bytes.

#![no_main]

use kvik_proto::journal::{JournalLine, Progress, ProgressLine};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    // As it is, and as what stands behind the start of each kind of line.
    for start in ["", ":kvik ", ":kvik-head ", ":kvik-move "] {
        read_line(&format!("{start}{text}"));
    }
    read_items(text);
});

fn read_line(line: &str) {
    let Ok(parsed) = JournalLine::parse(line) else { return };
    // What was read can be written, and is read again as the same.
    let mut again = Vec::new();
    parsed.write(&mut again);
    let again = String::from_utf8(again).expect("a line is text");
    let again = again.strip_suffix("\n\n").expect("a line has an end");
    assert_eq!(JournalLine::parse(again).as_ref(), Ok(&parsed));
}

fn read_items(items: &str) {
    let Ok(progress) = Progress::parse(items) else { return };
    // No more than the bytes could carry.
    let n_tokens: usize = progress.outputs.values().map(|output| output.tokens.len()).sum();
    assert!(n_tokens + progress.outputs.len() + progress.cached.len() <= 2 * items.len() + 1);
    let mut line = ProgressLine::default();
    for (number, output) in &progress.outputs {
        output.tokens.iter().for_each(|token| line.token(*number, *token));
        if output.is_ended {
            line.end(*number);
        }
    }
    for (prompt, cached) in &progress.cached {
        line.cached(*prompt, *cached);
    }
    assert_eq!(Progress::parse(&line.into_items()).as_ref(), Ok(&progress));
}
