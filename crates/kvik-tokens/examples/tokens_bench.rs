//! What a known prefix saves: a prompt of 8192 tokens, cold and with its beginning known.
//!
//!     cargo run --release -p kvik-tokens --example tokens_bench
//!
//! Prints the median of the runs for the tokenizer alone, for a store that knows nothing, for one that
//! knows the first nine tenths of the prompt, and for one that knows the prompt. The text is that of the
//! bundled model's questions, with its tokenizer.

#![expect(clippy::print_stdout, reason = "a bench reports")]

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kvik_tokens::prefix_store::{LruPrefixStore, PrefixStore, TriePrefixStore, encode};
use kvik_tokens::{AddSpecial, Tokenizer};

const N_TOKENS: usize = 8192;
const N_RUNS: usize = 41;
const STORE_BYTES: usize = 64 << 20;

type NewStore = fn() -> Box<dyn PrefixStore>;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/kvik-tiny"));
    let tokenizer = Tokenizer::open(folder)?;
    let text = prompt(&tokenizer, &fs::read_to_string(folder.join("notes_qa.jsonl"))?)?;
    let n_tokens = tokenizer.encode(&text, AddSpecial::Yes)?.len();
    println!("prompt: {n_tokens} tokens, {} bytes; median of {N_RUNS} runs", text.len());
    let direct = median(|| {
        let start = Instant::now();
        tokenizer.encode(&text, AddSpecial::Yes).map(|_| start.elapsed())
    })?;
    println!("tokenizer alone      {:>9.3} ms", milliseconds(direct));
    let nine_tenths = &text[..text.floor_char_boundary(text.len() / 10 * 9)];
    let stores: [(&str, NewStore); 2] = [
        ("lru", || Box::new(LruPrefixStore::new(STORE_BYTES))),
        ("trie", || Box::new(TriePrefixStore::new(STORE_BYTES))),
    ];
    for (name, new_store) in stores {
        for (what, known) in
            [("nothing known", None), ("9/10 known", Some(nine_tenths)), ("all known", Some(text.as_str()))]
        {
            let mut n_known_bytes = 0;
            let time = median(|| {
                let store = new_store();
                if let Some(known) = known {
                    encode(&tokenizer, store.as_ref(), known, AddSpecial::Yes)?;
                }
                let start = Instant::now();
                let encoded = encode(&tokenizer, store.as_ref(), &text, AddSpecial::Yes)?;
                n_known_bytes = encoded.n_known_bytes;
                Ok::<_, kvik_tokens::TokensError>(start.elapsed())
            })?;
            println!(
                "{:<21}{:>9.3} ms, {n_known_bytes} bytes known",
                format!("{name}, {what}"),
                milliseconds(time)
            );
        }
        let store = new_store();
        encode(&tokenizer, store.as_ref(), &text, AddSpecial::Yes)?;
        println!("{name} takes {} bytes for the prompt", store.used_bytes());
    }
    Ok(())
}

/// A prompt of about as many tokens as are asked for.
fn prompt(tokenizer: &Tokenizer, questions: &str) -> Result<String, Box<dyn Error>> {
    let mut text = String::new();
    let mut n_tokens = 0;
    for line in questions.lines().cycle() {
        let question: serde_json::Value = serde_json::from_str(line)?;
        let question = question["prompt"].as_str().ok_or("a question without a prompt")?;
        n_tokens += tokenizer.encode(question, AddSpecial::No)?.len() + 1;
        text.push_str(question);
        text.push('\n');
        if N_TOKENS <= n_tokens {
            break;
        }
    }
    Ok(text)
}

fn median<E>(mut run: impl FnMut() -> Result<Duration, E>) -> Result<Duration, E> {
    let mut times = (0..N_RUNS).map(|_| run()).collect::<Result<Vec<_>, E>>()?;
    times.sort_unstable();
    Ok(times[N_RUNS / 2])
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
