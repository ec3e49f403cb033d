//! Why a place is a cut: the steps from text to tokens, one after the other.
//!
//! Let `x y` be a text with a pair of [`Pair`] where the two meet.
//!
//! 1. *Added tokens* are found in the text as it is, the leftmost and longest first. None has the pair in
//!    it, so none lies across, and what is found on either side does not depend on the other. A token that
//!    looks for a word's end or swallows white space looks past its edges; [`added_tokens_allow`] and
//!    [`CutRule::at`](super::CutRule::at) take care of these.
//! 2. *Normalizers* that compose and decompose characters never combine what stands after a cut with what
//!    stands before it, and leave the pair a pair. Spaces may become a character of their own.
//! 3. *Pre-tokenizers* split what is left into words. One that [cuts](Stage::Cuts) has a word's end at
//!    every cut, one that [keeps](Stage::Keeps) may leave a word across it, and both give the same words
//!    elsewhere.
//! 4. *The model* makes tokens of each word for itself. If no pre-tokenizer cuts, there is one word across
//!    the cut, and it must be byte-pair encoding without a token that has the pair in it: then no merge
//!    goes across, and merges on either side do not see the other.
//! 5. *Post-processors* add tokens around the whole, which the caller does.

use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

use super::pattern::facts_of;
use super::{CutRule, Pair};

/// The expression that a byte-level pre-tokenizer has built in.
const BYTE_LEVEL_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// What a pre-tokenizer does at a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// A word ends there.
    Cuts,
    /// A word may go across; all others are those of the two sides.
    Keeps,
}

/// What became of the spaces of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spaces {
    Kept,
    Replaced(char),
}

/// Where words end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Words {
    /// At every cut.
    EndAtCuts,
    /// Not even at spaces, which have become the given character.
    GoOn(char),
}

/// Says that all pairs are cuts, but for those with `space` in front.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Proof {
    /// What spaces become on the way.
    space: Option<char>,
}

pub(super) fn rule_of(tokenizer: &Tokenizer) -> Option<CutRule> {
    let mut pairs = Vec::new();
    let mut excluded_before = None;
    for pair in Pair::ALL {
        let Some(proof) = prove(tokenizer, pair) else { continue };
        pairs.push(pair);
        excluded_before = excluded_before.or(proof.space);
    }
    if pairs.is_empty() {
        return None;
    }
    let added_tokens = tokenizer.get_added_tokens_decoder();
    let mut swallowing: Vec<String> =
        added_tokens.values().filter(|token| token.rstrip).map(|token| token.content.clone()).collect();
    swallowing.sort_unstable();
    Some(CutRule { pairs, excluded_before, swallowing })
}

/// Goes through the steps; `None` if one of them has no reason.
fn prove(tokenizer: &Tokenizer, pair: Pair) -> Option<Proof> {
    let spaces = spaces_after(tokenizer.get_normalizer(), pair)?;
    let words = words_of(tokenizer.get_pre_tokenizer(), spaces, pair)?;
    let space = match (words, spaces, tokenizer.get_pre_tokenizer()) {
        (Words::GoOn(space), ..) | (_, Spaces::Replaced(space), _) => Some(space),
        (_, _, Some(PreTokenizerWrapper::Metaspace(metaspace))) => Some(metaspace.get_replacement()),
        _ => None,
    };
    if !added_tokens_allow(tokenizer, pair, space) {
        return None;
    }
    let is_model_fit = match (tokenizer.get_model(), words) {
        (ModelWrapper::BPE(bpe), Words::EndAtCuts) => is_deterministic(bpe),
        (ModelWrapper::Unigram(unigram), Words::EndAtCuts) => unigram.alpha.is_none_or(|alpha| alpha == 0.0),
        (ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_), Words::EndAtCuts) => true,
        (ModelWrapper::BPE(bpe), Words::GoOn(space)) => {
            is_deterministic(bpe) && pair == Pair::Space && no_merge_crosses(bpe, space)
        }
        // The best way through a whole text is a sum of scores, whose rounding depends on all that came
        // before.
        (_, Words::GoOn(_)) => false,
    };
    is_model_fit.then_some(Proof { space })
}

fn added_tokens_allow(tokenizer: &Tokenizer, pair: Pair, space: Option<char>) -> bool {
    let vocabulary = tokenizer.get_added_vocabulary();
    tokenizer.get_added_tokens_decoder().iter().all(|(id, token)| {
        // What is looked for: the text of the token as the normalizer leaves it, if it runs before.
        let sought = vocabulary.simple_id_to_token(*id).unwrap_or_else(|| token.content.clone());
        let is_free = |text: &str| {
            let mut before = None;
            text.chars().all(|character| {
                let is_pair = before.is_some_and(|before: char| {
                    pair.is(before, character)
                        || (space == Some(character) && space != Some(before) && !before.is_whitespace())
                });
                before = Some(character);
                !is_pair
            })
        };
        // At the beginning of a text there is no word before such a token, and after a cut there may be one.
        let starts_at_cut =
            sought.chars().next().is_some_and(|first| pair.after().contains(&first) || space == Some(first));
        let looks_back = token.single_word && starts_at_cut;
        // Behind the text of a token that swallows is no cut; that of a normalized one may look different.
        let swallows_unseen = token.rstrip && token.normalized && tokenizer.get_normalizer().is_some();
        is_free(&token.content) && is_free(&sought) && !looks_back && !swallows_unseen
    })
}

fn spaces_after(normalizer: Option<&NormalizerWrapper>, pair: Pair) -> Option<Spaces> {
    match normalizer {
        None | Some(NormalizerWrapper::NFC(_)) => Some(Spaces::Kept),
        // These take letters apart and full-width punctuation to ASCII.
        Some(NormalizerWrapper::NFD(_) | NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_)) => {
            (pair == Pair::Space).then_some(Spaces::Kept)
        }
        Some(NormalizerWrapper::Replace(replace)) => {
            let value = serde_json::to_value(replace).ok()?;
            let is_space = value.get("pattern")?.get("String")?.as_str()? == " ";
            let mut content = replace.content.chars();
            let space = content.next().filter(|space| !space.is_whitespace() && !space.is_alphanumeric())?;
            (is_space && content.next().is_none() && pair == Pair::Space).then_some(Spaces::Replaced(space))
        }
        Some(NormalizerWrapper::Sequence(sequence)) => match sequence.as_ref() {
            [] => Some(Spaces::Kept),
            [single] => spaces_after(Some(single), pair),
            _ => None,
        },
        Some(_) => None,
    }
}

fn words_of(pre_tokenizer: Option<&PreTokenizerWrapper>, spaces: Spaces, pair: Pair) -> Option<Words> {
    match (pre_tokenizer, spaces) {
        (None, Spaces::Replaced(space)) => Some(Words::GoOn(space)),
        // Looks for spaces where none are left.
        (Some(PreTokenizerWrapper::Split(split)), Spaces::Replaced(space)) => {
            matches!(&split.pattern, SplitPattern::String(text) if text == " ").then_some(Words::GoOn(space))
        }
        (None, Spaces::Kept) | (Some(_), Spaces::Replaced(_)) => None,
        // A part after a cut starts with a space, so it gets none in front.
        (Some(PreTokenizerWrapper::Metaspace(metaspace)), Spaces::Kept) => {
            let words =
                if metaspace.split { Words::EndAtCuts } else { Words::GoOn(metaspace.get_replacement()) };
            (pair == Pair::Space).then_some(words)
        }
        (Some(pre_tokenizer), Spaces::Kept) => {
            (stage_of(pre_tokenizer, pair)? == Stage::Cuts).then_some(Words::EndAtCuts)
        }
    }
}

fn stage_of(pre_tokenizer: &PreTokenizerWrapper, pair: Pair) -> Option<Stage> {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(byte_level) => match byte_level {
            level if level.add_prefix_space => None,
            level if level.use_regex => {
                split_stage(BYTE_LEVEL_PATTERN, SplitDelimiterBehavior::Isolated, false, pair)
            }
            _ => Some(Stage::Keeps),
        },
        PreTokenizerWrapper::Split(Split {
            pattern: SplitPattern::Regex(pattern), behavior, invert, ..
        }) => split_stage(pattern, *behavior, *invert, pair),
        PreTokenizerWrapper::Whitespace(_)
        | PreTokenizerWrapper::WhitespaceSplit(_)
        | PreTokenizerWrapper::BertPreTokenizer(_) => (pair == Pair::Space).then_some(Stage::Cuts),
        // Both look at each character for itself.
        PreTokenizerWrapper::Digits(_) => Some(Stage::Keeps),
        PreTokenizerWrapper::Punctuation(punctuation) => {
            (punctuation.behavior == SplitDelimiterBehavior::Isolated).then_some(Stage::Keeps)
        }
        PreTokenizerWrapper::Sequence(sequence) => {
            let (last, others) = sequence.as_ref().split_last()?;
            let mut whole = stage_of(last, pair)?;
            for other in others {
                // What rewrites the text must come last: after it there are no pairs.
                if matches!(other, PreTokenizerWrapper::ByteLevel(_) | PreTokenizerWrapper::Sequence(_)) {
                    return None;
                }
                if stage_of(other, pair)? == Stage::Cuts {
                    whole = Stage::Cuts;
                }
            }
            Some(whole)
        }
        _ => None,
    }
}

fn split_stage(pattern: &str, behavior: SplitDelimiterBehavior, invert: bool, pair: Pair) -> Option<Stage> {
    let facts = facts_of(pattern, pair)?;
    match (behavior, invert) {
        // Words are matches and what lies between them.
        (SplitDelimiterBehavior::Isolated, false) => {
            Some(if facts.matches_after { Stage::Cuts } else { Stage::Keeps })
        }
        // Words are matches alone.
        (SplitDelimiterBehavior::Removed, true) => Some(Stage::Cuts),
        _ => None,
    }
}

fn is_deterministic(bpe: &BPE) -> bool {
    bpe.dropout.is_none_or(|dropout| dropout == 0.0)
}

/// Whether byte-pair encoding of a word that goes on over `space` treats the text from each `space` on as
/// if it stood alone.
fn no_merge_crosses(bpe: &BPE, space: char) -> bool {
    let vocabulary = bpe.get_vocab();
    // A known character also ends a run of unknown ones, which are fused.
    let knows_space = vocabulary.contains_key(space.encode_utf8(&mut [0; 4]) as &str);
    let has_edges =
        bpe.ignore_merges || bpe.continuing_subword_prefix.is_some() || bpe.end_of_word_suffix.is_some();
    let crosses = |token: &str| {
        let pairs = token.chars().zip(token.chars().skip(1));
        pairs.into_iter().any(|(before, after)| after == space && before != space && !before.is_whitespace())
    };
    knows_space && !has_edges && !vocabulary.keys().any(|token| crosses(token))
}
