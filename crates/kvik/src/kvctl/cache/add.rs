//! `kvctl cache add`: texts that prompts will name.

use std::io::{IsTerminal as _, Read as _};
use std::path::Path;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvik_proto::cache::{SegmentsRequest, SegmentsResponse};
use kvik_proto::client::CacheClient;
use kvik_proto::openai::PromptPart;

use super::answers::{Rendered, Shown};
use super::arguments::AddArguments;

/// Has the texts computed one by one, so that the bar moves and an interrupted run goes on where it was.
pub(super) async fn run(arguments: &AddArguments, client: &CacheClient) -> anyhow::Result<Rendered> {
    let mut texts = Vec::new();
    for path in &arguments.files {
        let text = read(path).with_context(|| format!("read {}", path.display()))?;
        if arguments.paragraphs {
            texts.extend(paragraphs(&text).map(str::to_owned));
        } else {
            texts.push(text);
        }
    }
    texts.retain(|text| !text.is_empty());
    let progress = progress_bar(texts.len());
    let mut total = SegmentsResponse::default();
    for text in texts {
        let part = PromptPart { text: Some(text), ..PromptPart::default() };
        let request = SegmentsRequest { segments: vec![part], cache_salt: arguments.cache_salt.clone() };
        let added = client.add_segments(&request).await?;
        total.computed_segments += added.computed_segments;
        total.present_segments += added.present_segments;
        total.refused_segments += added.refused_segments;
        total.tokens += added.tokens;
        progress.inc(1);
    }
    progress.finish_and_clear();
    Rendered::of(&Shown(total))
}

fn read(path: &Path) -> std::io::Result<String> {
    if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}

/// The parts of a text between empty lines, each with the line breaks behind it: together they are the text.
fn paragraphs(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest.find("\n\n").map_or(rest.len(), |at| {
            let behind = &rest[at..];
            at + behind.len() - behind.trim_start_matches('\n').len()
        });
        let (part, behind) = rest.split_at(end);
        rest = behind;
        Some(part)
    })
}

fn progress_bar(n_segments: usize) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} segments")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(n_segments as u64), target).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_the_text_again() {
        for text in ["", "one", "one\n\ntwo", "one\ntwo\n\n\nthree\n", "\n\none\n\n"] {
            let parts: Vec<&str> = paragraphs(text).collect();
            assert_eq!(parts.concat(), text);
        }
        assert_eq!(paragraphs("a\nb\n\nc\n").collect::<Vec<_>>(), ["a\nb\n\n", "c\n"]);
    }
}
