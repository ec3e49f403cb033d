//! What a regular expression can match, as far as cuts are concerned.

use regex_syntax::hir::{Class, Hir, HirKind};

use super::Pair;

/// What all tokenizers since GPT-2 write for "white space, but leave one for the next word".
const TRAILING_SPACE: &str = r"\s+(?!\S)";

/// How a regular expression relates to the cuts of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PatternFacts {
    /// Whether a match begins at every cut.
    pub(super) matches_after: bool,
}

/// How a part of an expression takes up characters.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "four facts that do not depend on each other")]
struct Taking {
    /// It can be skipped.
    is_nullable: bool,
    /// Its first character may be one after a cut.
    starts_after: bool,
    /// Its last character may be one before a cut.
    ends_before: bool,
    /// It may take up both sides of a cut, also on the way to a failure.
    crosses: bool,
}

/// Returns what holds for `pattern` at the cuts of `pair`, or `None` if an attempt to match that starts
/// before a cut could depend on what stands behind it.
///
/// Why that suffices: an expression without assertions reads no further than one character past what it
/// takes up. If no attempt takes up both sides of a cut, those that start before it fare the same with and
/// without the text behind it. So all matches up to the cut are the same, none goes over it, and since
/// there is no look-behind, those that start at the cut or later do not depend on what stands before. The
/// one assertion that is let through follows a run of white space, which ends before the character in front
/// of the cut.
pub(super) fn facts_of(pattern: &str, pair: Pair) -> Option<PatternFacts> {
    let alternatives: Vec<&str> = top_level_alternatives(pattern);
    let without_assertion: Vec<&str> =
        alternatives.into_iter().filter(|alternative| *alternative != TRAILING_SPACE).collect();
    let hir = regex_syntax::parse(&without_assertion.join("|")).ok()?;
    let taking = taking_of(&hir, pair)?;
    if taking.crosses || taking.is_nullable {
        return None;
    }
    Some(PatternFacts { matches_after: pair.after().iter().all(|after| matches_one(&hir, *after)) })
}

/// The parts of a pattern between the `|` that are in no group and no class.
fn top_level_alternatives(pattern: &str) -> Vec<&str> {
    let mut alternatives = Vec::new();
    let (mut start, mut n_groups, mut n_classes) = (0, 0_usize, 0_usize);
    let mut characters = pattern.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => {
                characters.next();
            }
            '[' => n_classes += 1,
            ']' => n_classes = n_classes.saturating_sub(1),
            '(' if n_classes == 0 => n_groups += 1,
            ')' if n_classes == 0 => n_groups = n_groups.saturating_sub(1),
            '|' if n_classes == 0 && n_groups == 0 => {
                alternatives.push(&pattern[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    alternatives.push(&pattern[start..]);
    alternatives
}

fn taking_of(hir: &Hir, pair: Pair) -> Option<Taking> {
    match hir.kind() {
        HirKind::Empty => Some(Taking { is_nullable: true, ..Taking::default() }),
        HirKind::Look(_) => None,
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).ok()?;
            let parts = text.chars().map(|character| Some(taking_of_ranges([(character, character)], pair)));
            in_order(parts)
        }
        HirKind::Class(Class::Unicode(class)) => {
            Some(taking_of_ranges(class.iter().map(|range| (range.start(), range.end())), pair))
        }
        HirKind::Class(Class::Bytes(class)) => {
            let is_ascii = class.iter().all(|range| range.end().is_ascii());
            let ranges = class.iter().map(|range| (char::from(range.start()), char::from(range.end())));
            is_ascii.then(|| taking_of_ranges(ranges, pair))
        }
        HirKind::Repetition(repetition) => {
            let once = taking_of(&repetition.sub, pair)?;
            let repeats = repetition.max != Some(1);
            Some(Taking {
                is_nullable: once.is_nullable || repetition.min == 0,
                crosses: once.crosses || (repeats && once.ends_before && once.starts_after),
                ..once
            })
        }
        HirKind::Capture(capture) => taking_of(&capture.sub, pair),
        HirKind::Concat(parts) => in_order(parts.iter().map(|part| taking_of(part, pair))),
        HirKind::Alternation(alternatives) => {
            let mut any = Taking::default();
            for alternative in alternatives {
                let taking = taking_of(alternative, pair)?;
                any.is_nullable |= taking.is_nullable;
                any.starts_after |= taking.starts_after;
                any.ends_before |= taking.ends_before;
                any.crosses |= taking.crosses;
            }
            Some(any)
        }
    }
}

fn taking_of_ranges(ranges: impl IntoIterator<Item = (char, char)>, pair: Pair) -> Taking {
    let mut taking = Taking::default();
    for (first, last) in ranges {
        taking.starts_after |= pair.after().iter().any(|after| (first..=last).contains(after));
        taking.ends_before |= pair.before().iter().any(|(low, high)| *low <= last && first <= *high);
    }
    taking
}

fn in_order(parts: impl Iterator<Item = Option<Taking>>) -> Option<Taking> {
    let mut whole = Taking { is_nullable: true, ..Taking::default() };
    for part in parts {
        let part = part?;
        whole.crosses |= part.crosses || (whole.ends_before && part.starts_after);
        whole.starts_after |= whole.is_nullable && part.starts_after;
        whole.ends_before = part.ends_before || (part.is_nullable && whole.ends_before);
        whole.is_nullable &= part.is_nullable;
    }
    Some(whole)
}

/// Whether the expression matches at `character`, whatever follows: some way through it takes up that one
/// alone.
fn matches_one(hir: &Hir, character: char) -> bool {
    match hir.kind() {
        HirKind::Empty | HirKind::Look(_) => false,
        HirKind::Literal(literal) => {
            let mut bytes = [0; 4];
            *literal.0 == *character.encode_utf8(&mut bytes).as_bytes()
        }
        HirKind::Class(Class::Unicode(class)) => {
            class.iter().any(|range| (range.start()..=range.end()).contains(&character))
        }
        HirKind::Class(Class::Bytes(class)) => u8::try_from(character)
            .is_ok_and(|byte| class.iter().any(|range| (range.start()..=range.end()).contains(&byte))),
        HirKind::Repetition(repetition) => {
            repetition.min <= 1 && repetition.max != Some(0) && matches_one(&repetition.sub, character)
        }
        HirKind::Capture(capture) => matches_one(&capture.sub, character),
        HirKind::Concat(parts) => (0..parts.len()).any(|taker| {
            parts.iter().enumerate().all(|(idx, part)| {
                if idx == taker {
                    matches_one(part, character)
                } else {
                    part.properties().minimum_len() == Some(0)
                }
            })
        }),
        HirKind::Alternation(alternatives) => {
            alternatives.iter().any(|alternative| matches_one(alternative, character))
        }
    }
}
