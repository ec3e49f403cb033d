//! Conversations over shared documents.
//!
//! A document is a list of notes of the kind that the bundled model was trained on. A conversation asks several questions about
//! one document, each with all earlier turns before it, so its requests share a growing prefix; conversations about one
//! document share the document. Everything follows from the seed: two runs send the same prompts in the same order.

use serde_json::{Value, json};

/// Documents that conversations are about.
const N_DOCUMENTS: u64 = 36;
/// Notes of a document: about 1 000 tokens of the bundled model.
const N_NOTES: u64 = 40;
/// Most turns of a conversation.
const MAX_TURNS: u64 = 4;
/// Most tokens of an answer; the model answers in one sentence.
const MAX_TOKENS: u64 = 16;

const NAMES: [&str; 16] = [
    "Olga", "Owen", "Felix", "Lily", "Sara", "June", "Tom", "Nora", "Zelda", "Kari", "Bokafa", "Norini",
    "Vari", "Tiva", "Lanoma", "Goso",
];
const PLACES: [&str; 8] = ["Quarry", "Farrow", "Norley", "Wexley", "Glenby", "Lorton", "Milby", "Torley"];
const JOBS: [&str; 8] = ["builder", "gardener", "pilot", "fisher", "judge", "doctor", "teacher", "baker"];
const COLORS: [&str; 8] = ["striped", "shiny", "white", "grey", "pink", "orange", "silver", "green"];
const THINGS: [&str; 8] = ["chair", "doll", "boat", "kite", "rope", "wheel", "hat", "clock"];
const ROOMS: [&str; 8] = ["forest", "kitchen", "cellar", "garden", "tower", "yard", "market", "stable"];

/// Numbers that follow from a seed.
#[derive(Debug, Clone)]
pub(super) struct Numbers(u64);

/// One conversation: its document and the turns so far.
#[derive(Debug)]
pub(super) struct Conversation {
    messages: Vec<Value>,
    questions: Vec<String>,
}

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `bound`, by splitmix64.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }

    fn word(&mut self, words: &[&'static str]) -> &'static str {
        words[self.below(words.len() as u64) as usize]
    }
}

impl Conversation {
    /// A conversation about one of the documents.
    pub(super) fn new(numbers: &mut Numbers) -> Self {
        let document_number = numbers.below(N_DOCUMENTS);
        let n_turns = 1 + numbers.below(MAX_TURNS);
        Self {
            messages: vec![json!({"role": "system", "content": document(document_number)})],
            questions: (0..n_turns).map(|_| question(numbers)).collect(),
        }
    }

    /// The body of the next request; `None` after the last turn.
    pub(super) fn next_request(&mut self, model: &str) -> Option<Value> {
        let question = self.questions.pop()?;
        self.messages.push(json!({"role": "user", "content": question}));
        Some(json!({
            "model": model,
            "messages": self.messages,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        }))
    }

    /// Adds the answer, which the next turn's prompt contains.
    pub(super) fn answered(&mut self, text: &str) {
        self.messages.push(json!({"role": "assistant", "content": text}));
    }
}

fn document(number: u64) -> String {
    let mut numbers = Numbers::new(0xd0c0 + number);
    let notes = (1..=N_NOTES).map(|note| {
        let (name, place, job) = (numbers.word(&NAMES), numbers.word(&PLACES), numbers.word(&JOBS));
        let (color, thing, room) = (numbers.word(&COLORS), numbers.word(&THINGS), numbers.word(&ROOMS));
        format!(
            "Note {note}: {name} keeps a {color} {thing} in the {room}. {name} lives in {place} and works as a {job}. \
             It was a very long walk home."
        )
    });
    notes.collect::<Vec<_>>().join("\n")
}

fn question(numbers: &mut Numbers) -> String {
    match numbers.below(3) {
        0 => format!("Who has the {} {}?", numbers.word(&COLORS), numbers.word(&THINGS)),
        1 => format!("What is the job of {}?", numbers.word(&NAMES)),
        _ => format!("What does {} keep?", numbers.word(&NAMES)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_make_equal_conversations_and_turns_share_a_prefix() {
        let conversation = || Conversation::new(&mut Numbers::new(7));
        let (mut one, mut other) = (conversation(), conversation());
        let first = one.next_request("m").unwrap();
        assert_eq!(Some(&first), other.next_request("m").as_ref());
        one.answered("yes");
        if let Some(second) = one.next_request("m") {
            let (before, after) =
                (first["messages"].as_array().unwrap(), second["messages"].as_array().unwrap());
            assert_eq!(after[..before.len()], before[..]);
        }
    }

    #[test]
    fn documents_differ() {
        assert_ne!(document(0), document(1));
    }
}
