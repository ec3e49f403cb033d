//! The prompt that a verb is about.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use kvik_proto::worker::PromptInput;

#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct PromptArguments {
    /// The prompt as text, tokenized by the server
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,

    /// A file with the prompt; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_file: Option<PathBuf>,

    /// The prompt as tokens, separated by commas
    #[arg(long, value_name = "ID,...", value_delimiter = ',')]
    pub(crate) token_ids: Option<Vec<u32>>,
}

impl PromptArguments {
    /// Reads what is given.
    pub(crate) fn read(&self) -> anyhow::Result<PromptInput> {
        if let Some(token_ids) = &self.token_ids {
            return Ok(PromptInput { token_ids: Some(token_ids.clone()), ..PromptInput::default() });
        }
        let prompt = match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(path)) if path == Path::new("-") => {
                let mut text = String::new();
                std::io::stdin().lock().read_to_string(&mut text).context("read standard input")?;
                text
            }
            (None, Some(path)) => {
                fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?
            }
            (None, None) => bail!("one of --prompt, --prompt-file and --token-ids is needed"),
        };
        Ok(PromptInput { prompt: Some(prompt), ..PromptInput::default() })
    }
}
