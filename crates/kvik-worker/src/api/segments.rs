//! Prompts in parts: which of their tokens may have KV from other prompts.

use std::ops::Range;
use std::sync::Arc;

use kvik_model::Selectors;
use kvik_proto::openai::{KvikFields, PromptPart};
use kvik_tokens::AddSpecial;

use crate::error::Refusal;
use crate::plan::BlendPart;
use crate::state::Loaded;

/// Most parts of a prompt.
const MAX_PARTS: usize = 4096;

/// A prompt in parts, each of which is tokenized on its own: so a reusable part has the same tokens in every prompt.
#[derive(Debug, Default)]
pub(super) struct PromptParts(Vec<(Piece, bool)>);

#[derive(Debug)]
enum Piece {
    Text(String),
    Tokens(Vec<u32>),
}

/// How a request wants its prompt put together; `None` if it is computed as any other.
pub(super) fn selectors(loaded: &Loaded, fields: Option<&KvikFields>) -> Result<Option<Selectors>, Refusal> {
    match fields.and_then(|fields| fields.blend.as_ref()) {
        None => Ok(loaded.blend.selectors.clone()),
        Some(blend) => {
            let selector = blend.selector();
            let selectors = selector.parse().map_err(|error: kvik_model::ModelError| {
                Refusal::invalid(error.to_string(), Some("kvik.blend"))
            })?;
            Ok(Some(selectors))
        }
    }
}

impl PromptParts {
    /// The parts of a prompt whose text is `text`; `None` where the request names none.
    ///
    /// # Errors
    /// If a part is neither a text nor tokens, or there are too many.
    pub(super) fn of(loaded: &Loaded, text: &str, fields: &KvikFields) -> Result<Option<Self>, Refusal> {
        let KvikFields { segments, separator, .. } = fields;
        let separator = match (separator, &loaded.blend.separator) {
            (None, Some(default)) if segments.is_empty() && text.contains(default) => Some(default),
            (given, _) => given.as_ref(),
        };
        match (segments.is_empty(), separator) {
            (true, None) => return Ok(None),
            (false, Some(_)) => {
                return Err(Refusal::field("kvik.separator", "given with `kvik.segments`", "one of the two"));
            }
            (true, Some(separator)) => return Self::separated(text, separator).map(Some),
            (false, None) => {}
        }
        let n_parts = segments.len();
        if MAX_PARTS < n_parts {
            let allowed = format!("at most {MAX_PARTS}");
            return Err(Refusal::field("kvik.segments", format!("{n_parts} parts"), &allowed));
        }
        let mut pieces = Vec::with_capacity(n_parts);
        for (idx, part) in segments.iter().enumerate() {
            let piece = match part {
                PromptPart { text: Some(text), token_ids: None, .. } => Piece::Text(text.clone()),
                PromptPart { text: None, token_ids: Some(tokens), .. } => Piece::Tokens(tokens.clone()),
                _ => {
                    let field = format!("kvik.segments[{idx}]");
                    return Err(Refusal::field(&field, "neither or both", "one of `text` and `token_ids`"));
                }
            };
            pieces.push((piece, part.reusable));
        }
        if text.is_empty() { Ok(Some(Self(pieces))) } else { Ok(Some(Self::found_in(text, pieces))) }
    }

    /// The parts of a rendered conversation of which `reusable` are texts, in their order.
    pub(super) fn of_messages(text: &str, reusable: Vec<String>) -> Self {
        Self::found_in(text, reusable.into_iter().map(|part| (Piece::Text(part), true)).collect())
    }

    fn separated(text: &str, separator: &str) -> Result<Self, Refusal> {
        if separator.is_empty() {
            return Err(Refusal::field("kvik.separator", "empty", "at least one character"));
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((part, behind)) = rest.split_once(separator) {
            if MAX_PARTS < pieces.len() {
                let allowed = format!("at most {MAX_PARTS} parts");
                return Err(Refusal::field("kvik.separator", "too often in the prompt", &allowed));
            }
            pieces.push((Piece::Text(part.to_owned()), true));
            pieces.push((Piece::Text(separator.to_owned()), false));
            rest = behind;
        }
        pieces.push((Piece::Text(rest.to_owned()), false));
        Ok(Self(pieces))
    }

    /// Cuts `text` where the reusable ones among `parts` stand in it. One that does not is passed over.
    fn found_in(text: &str, parts: Vec<(Piece, bool)>) -> Self {
        let mut pieces = Vec::new();
        let mut rest = text;
        for (piece, is_reusable) in parts {
            let Piece::Text(part) = piece else { continue };
            if let Some(start) = rest.find(&part).filter(|_| is_reusable && !part.is_empty()) {
                pieces.push((Piece::Text(rest[..start].to_owned()), false));
                rest = &rest[start + part.len()..];
                pieces.push((Piece::Text(part), true));
            }
        }
        pieces.push((Piece::Text(rest.to_owned()), false));
        Self(pieces)
    }

    /// The tokens of the prompt, and where those of reusable parts are.
    pub(super) async fn encode(
        self,
        loaded: &Arc<Loaded>,
        add_special: AddSpecial,
    ) -> Result<(Vec<u32>, Vec<Range<usize>>), Refusal> {
        let (mut tokens, mut segments) = (Vec::new(), Vec::new());
        let mut add_special = add_special;
        for (piece, is_reusable) in self.0 {
            let start = tokens.len();
            match piece {
                Piece::Tokens(given) => tokens.extend(given),
                Piece::Text(text) if is_reusable && start == 0 && add_special == AddSpecial::Yes => {
                    // What is added to the prompt does not belong to the part.
                    tokens.extend(loaded.encode(String::new(), AddSpecial::Yes).await?);
                    segments.push(tokens.len()..tokens.len());
                    tokens.extend(loaded.encode(text, AddSpecial::No).await?);
                    if let Some(segment) = segments.last_mut() {
                        segment.end = tokens.len();
                    }
                    add_special = AddSpecial::No;
                    continue;
                }
                Piece::Text(text) => tokens.extend(loaded.encode(text, add_special).await?),
            }
            add_special = AddSpecial::No;
            if is_reusable {
                segments.push(start..tokens.len());
            }
        }
        segments.retain(|segment| !segment.is_empty());
        Ok((tokens, segments))
    }
}

/// The tokens of a segment that the request calls `field`.
pub(super) async fn segment_tokens(
    loaded: &Arc<Loaded>,
    field: &str,
    part: PromptPart,
) -> Result<Vec<u32>, Refusal> {
    let tokens = match (part.text, part.token_ids) {
        (Some(text), None) => loaded.encode(text, AddSpecial::No).await?,
        (None, Some(tokens)) => tokens,
        _ => return Err(Refusal::field(field, "neither or both", "one of `text` and `token_ids`")),
    };
    loaded.check_prompt(field, &tokens)?;
    Ok(tokens)
}

/// What the engine receives of a prompt; `None` if there is nothing to put together.
pub(super) fn blend_part(
    loaded: &Loaded,
    selectors: Option<Selectors>,
    mut segments: Vec<Range<usize>>,
) -> Option<BlendPart> {
    segments.retain(|segment| loaded.blend.min_tokens <= segment.len());
    let selectors = selectors.filter(|_| !segments.is_empty())?;
    Some(BlendPart { segments, selectors })
}
