//! Turning tokens into text one at a time, so that the parts join to what decoding all gives.
//!
//! Three kinds of decoder need three ways:
//! - Byte level (GPT-2, Llama 3, Qwen): a token is bytes, whatever stands around it. Only the
//!   bytes of a character that is not complete are held back.
//! - Byte fallback (Llama 2, Mistral): a run of byte tokens is text only if all of it is valid
//!   UTF-8, so one wrong byte changes text far before it. The run is held back until it ends.
//! - All others: the text of a token may depend on the tokens before it (a space that is
//!   stripped at the start). The last tokens that gave text are decoded again together with the
//!   new ones, and their text is taken off.

use std::sync::Arc;

use tokenizers::DecoderWrapper;

use super::Tokenizer;

/// What a text that is cut inside a character ends with.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// How the tokenizer's decoder joins tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joining {
    ByteLevel,
    ByteFallback,
    Other,
}

/// Text of a growing token sequence.
#[derive(Debug)]
pub(super) struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Byte level: bytes of a character that is not complete; at most 3.
    pending_bytes: Vec<u8>,
    /// Others: context tokens, then tokens that have given no text yet. Tokens without text of
    /// their own never enter, so the context takes all that is stripped at a start.
    window: Vec<u32>,
    n_context_tokens: usize,
    /// What the context tokens alone decode to.
    context_text: String,
}

impl Joining {
    pub(super) fn of(decoder: Option<&DecoderWrapper>) -> Self {
        match decoder {
            Some(DecoderWrapper::ByteLevel(_)) => Self::ByteLevel,
            Some(DecoderWrapper::ByteFallback(_)) => Self::ByteFallback,
            Some(DecoderWrapper::Sequence(sequence)) => match sequence.get_decoders() {
                [single] => Self::of(Some(single)),
                decoders if decoders.iter().any(|each| matches!(each, DecoderWrapper::ByteFallback(_))) => {
                    Self::ByteFallback
                }
                _ => Self::Other,
            },
            _ => Self::Other,
        }
    }
}

impl Detokenizer {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            pending_bytes: Vec::new(),
            window: Vec::new(),
            n_context_tokens: 0,
            context_text: String::new(),
        }
    }

    /// Takes a token and returns the text that no later token can change.
    pub(super) fn push(&mut self, token: u32) -> String {
        let Some(piece) = self.tokenizer.piece(token, self.skip_special) else {
            return String::new();
        };
        match self.tokenizer.joining() {
            Joining::ByteLevel => {
                push_piece_bytes(&piece, &mut self.pending_bytes);
                self.take_complete_characters()
            }
            Joining::ByteFallback => {
                self.window.push(token);
                if is_byte_piece(&piece) { String::new() } else { self.take_window_text() }
            }
            Joining::Other => {
                self.window.push(token);
                self.take_window_text()
            }
        }
    }

    /// Returns the text that was held back, once it is known that no more tokens come.
    pub(super) fn finish(&mut self) -> String {
        if self.tokenizer.joining() == Joining::ByteLevel {
            let bytes = std::mem::take(&mut self.pending_bytes);
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        let window = std::mem::take(&mut self.window);
        let context_text = std::mem::take(&mut self.context_text);
        self.n_context_tokens = 0;
        // Fails only where decoding everything at once fails as well.
        let mut text = self.tokenizer.decode(&window, false).unwrap_or_default();
        let n_given_bytes = text
            .char_indices()
            .map(|(start, character)| start + character.len_utf8())
            .take_while(|end| context_text.get(..*end) == text.get(..*end))
            .last()
            .unwrap_or(0);
        text.split_off(n_given_bytes)
    }

    fn take_complete_characters(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.pending_bytes.as_slice();
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            rest = invalid;
            // No length: the bytes so far are the start of a character.
            let Some(n_invalid_bytes) = error.error_len() else {
                break;
            };
            text.push(REPLACEMENT);
            rest = &rest[n_invalid_bytes..];
        }
        self.pending_bytes = rest.to_vec();
        text
    }

    fn take_window_text(&mut self) -> String {
        let Ok(text) = self.tokenizer.decode(&self.window, false) else {
            return String::new();
        };
        let is_cut = self.tokenizer.joining() == Joining::Other && text.ends_with(REPLACEMENT);
        let Some(new_text) = text.strip_prefix(&self.context_text).filter(|_| !is_cut) else {
            return String::new();
        };
        let new_text = new_text.to_owned();
        let context_text =
            self.tokenizer.decode(&self.window[self.n_context_tokens..], false).unwrap_or_default();
        if context_text.is_empty() {
            self.context_text = text;
        } else {
            self.window.drain(..self.n_context_tokens);
            self.context_text = context_text;
        }
        self.n_context_tokens = self.window.len();
        new_text
    }
}

/// Appends the bytes that a byte-level piece stands for.
fn push_piece_bytes(piece: &str, bytes: &mut Vec<u8>) {
    let n_bytes_before = bytes.len();
    for character in piece.chars() {
        if let Some(byte) = byte_of_character(character) {
            bytes.push(byte);
        } else {
            // An added token written as plain text stands for itself, as a whole.
            bytes.truncate(n_bytes_before);
            bytes.extend_from_slice(piece.as_bytes());
            return;
        }
    }
}

/// The byte that a character of the byte-level alphabet stands for.
///
/// Printable Latin-1 stands for itself. The other bytes, in ascending order (0x00 to 0x20, 0x7F
/// to 0xA0, 0xAD), follow from U+0100 on.
fn byte_of_character(character: char) -> Option<u8> {
    let code = u32::from(character);
    let byte = match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Whether a piece is a byte-fallback token such as `<0xE2>`.
fn is_byte_piece(piece: &str) -> bool {
    piece
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}
