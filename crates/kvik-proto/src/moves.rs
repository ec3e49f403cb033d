//! Sequences that move: what workers and gateways say to each other about them.
//!
//! | call | body | answer |
//! |---|---|---|
//! | `GET /sequences` | none | [`RunningSequences`] |
//! | `POST /sequences/{id}/move` | [`MoveRequest`] | [`MoveAnswer`]; the stream has the rest |
//! | `POST /sequences/{id}/thaw` | none | 200: a frozen sequence goes on in its own stream |
//! | `POST /sequences/resume` | [`ResumeHead`], a newline, the request's body | as the request's own path |
//! | `POST /sequences/moves` | [`Offer`], a newline, the request's body | [`OfferAnswer`] |
//! | `PUT /sequences/moves/{ticket}/kv?part=..&choice=..&first_block=..` | blocks, see [`KV_CHECKSUM`] | [`KvTaken`] |
//! | `DELETE /sequences/moves/{ticket}` | none | 200: what was taken may be forgotten |

use serde::{Deserialize, Serialize};

use crate::journal::{JournalHead, MoveNotice};

/// Header with the CRC-64/NVME of a body of blocks, in hexadecimal digits.
///
/// Such a body is the number of tokens (32 bits, little endian), the tokens of the blocks (32 bits each), and for each block
/// the bytes of all layers.
pub const KV_CHECKSUM: &str = "x-kvik-checksum";

/// Header of an answer that is not the client's: the request moves, and the body is [`MovedAnswer`].
pub const MOVED: &str = "x-kvik-moved";

/// Header of a request of which the worker is to compute the prompt only: the address of the worker that generates. The KV of the
/// prompt goes there as it is computed, and the request moves after its first token. If that is not possible, it stays.
pub const DECODE_AT: &str = "x-kvik-decode-at";

/// Header that names one life of a held sequence, wherever it is: a gateway chooses it at `/inference/init`, and steps under
/// another name of this kind are answered as those of an unknown sequence.
pub const HELD: &str = "x-kvik-held";

/// Header of the answer to `/inference/init` with [`HELD`]: the seed of the sequence's random choices.
pub const SEED: &str = "x-kvik-seed";

/// The path of the requests that begin held sequences. Such a request goes on by [`ResumeHead`] with the sequence's
/// [`HELD`] as the journal's id, and waits for its next step then.
pub const INIT_PATH: &str = "/inference/init";

/// What is known of a held sequence besides its tokens, as [`ResumeHead::partial`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPartial {
    /// For each token, the text that became final with it; empty if that is not known.
    #[serde(default)]
    pub texts: Vec<String>,
    /// Tokens that steps have been answered with. Default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answered: Option<u64>,
}

/// What a request is continued from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeHead {
    /// The path of the request.
    pub path: String,
    /// The journal's head.
    pub head: JournalHead,
    /// All items of the journal's progress.
    pub progress: String,
    /// Names KV that was moved ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket: Option<String>,
    /// What a [`MovedAnswer`] said; as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<serde_json::Value>,
}

/// The answer to a request without a stream that moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedAnswer {
    /// Names the KV on the other worker.
    pub ticket: String,
    /// The other worker's address.
    pub to: String,
    /// As that of a journal.
    pub head: JournalHead,
    /// As that of a journal.
    pub progress: String,
    /// What the answer has so far and cannot be made from its tokens again; for the worker that continues it.
    pub partial: serde_json::Value,
}

/// Asks a worker to move a running request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRequest {
    /// The address of the worker that takes it.
    pub to: String,
}

/// What came of asking a worker to move a request: it is frozen, and its gateway was told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MoveAnswer {
    /// As the gateway gets it.
    #[serde(flatten)]
    pub notice: MoveNotice,
    /// Bytes of KV that were copied while the request ran.
    pub copied_bytes: u64,
    /// The time that they took, in milliseconds.
    pub copy_ms: f64,
}

/// Offers a sequence to another worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Names it; 32 random hexadecimal digits.
    pub ticket: String,
    /// The worker that offers it.
    pub from: String,
    /// The path of the request.
    pub path: String,
    /// What KV may be mixed: the root of the engine's hashes, in hexadecimal digits.
    pub root: String,
    /// Names the bytes of a block.
    pub layout: String,
    /// Bytes of one block in one layer.
    pub block_layer_bytes: usize,
}

/// What the other worker has of an offered sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferAnswer {
    /// For each prompt: blocks from its start that need not be sent.
    pub have_blocks: Vec<usize>,
}

/// What the other worker has after it was sent blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTaken {
    /// Blocks from the start of the sequence. If it is less than the first block that was sent, none was taken.
    pub have_blocks: usize,
    /// Whether there is no room for more: the rest is computed.
    pub is_full: bool,
}

/// Asks a worker to drain.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DrainRequest {
    /// Time after which what still runs is ended, in seconds. Default: the worker's `drain_grace_s`.
    pub deadline_s: Option<u64>,
    /// Whether the answer follows the drain: a [`DrainReport`] a line, the last one when the worker has drained.
    /// Default: false.
    pub follow: bool,
}

/// What became of the requests of a worker that drains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainReport {
    /// Requests that still run.
    pub running: u64,
    /// Requests that went to another worker with their KV.
    pub migrated: u64,
    /// Requests that were left to go on elsewhere from their tokens.
    pub replayed: u64,
    /// Requests that ended here.
    pub finished: u64,
    /// Requests that the deadline ended, and no gateway could continue.
    pub failed: u64,
    /// Whether this is the last report.
    pub is_over: bool,
}

/// The running requests of a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningSequences {
    /// In the order of their arrival.
    pub sequences: Vec<RunningSequence>,
}

/// A running request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningSequence {
    /// Names it on this worker.
    pub id: String,
    /// The name that its client gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq_id: Option<String>,
    /// The path of the request.
    pub path: String,
    /// Tokens of its prompts.
    pub prompt_tokens: usize,
    /// Tokens that its outputs have so far.
    pub output_tokens: usize,
    /// Whether a gateway can continue it elsewhere.
    pub can_move: bool,
    /// Whether it moves now.
    pub is_moving: bool,
    /// Its outputs, over all prompts. Default: 1.
    #[serde(default = "one")]
    pub outputs: u64,
    /// Tokens that its outputs have to go at most. Default: 0.
    #[serde(default)]
    pub tokens_left: u64,
    /// Time since it came from another worker, in milliseconds. Default: none, it has begun here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_ms_ago: Option<u64>,
}

fn one() -> u64 {
    1
}
