//! Questions over notes, and the parts of their prompts.

use std::io::BufRead;
use std::ops::Range;

use serde::Deserialize;

use super::EvalError;

/// How every note begins.
const NOTE: &str = "Note ";

/// What may stand behind a note and belongs to it.
const SEPARATORS: [&str; 2] = ["<|sep|>", "\n"];

/// What stands behind the last note.
const QUESTION_MARKS: [&str; 2] = ["\nQuestion:", "<|user|>"];

/// A prompt of notes with a question, and how a right answer begins.
#[derive(Debug, Clone, Deserialize)]
pub struct Question {
    /// The whole prompt.
    pub prompt: String,
    /// How the model's text begins if it is right.
    pub answer: String,
}

impl Question {
    /// Reads one JSON object a line.
    ///
    /// # Errors
    /// If the file cannot be read, or a line is not a question, with its number.
    pub fn read_all(file: impl BufRead) -> Result<Vec<Self>, EvalError> {
        let mut questions = Vec::new();
        for (line_idx, line) in file.lines().enumerate() {
            let line = line?;
            if line.trim().is_empty() {
                continue;
            }
            let question = serde_json::from_str(&line)
                .map_err(|source| EvalError::InvalidQuestion { line: line_idx + 1, source })?;
            questions.push(question);
        }
        if questions.is_empty() { Err(EvalError::NoQuestion) } else { Ok(questions) }
    }

    /// The places of the notes in the prompt, each with the separator behind it. What stands before, between and behind them
    /// belongs to no note.
    pub fn notes(&self) -> Vec<Range<usize>> {
        let end = QUESTION_MARKS.iter().filter_map(|mark| self.prompt.rfind(mark)).max();
        let end = end.unwrap_or(self.prompt.len());
        let starts: Vec<usize> =
            (1..).map_while(|number| self.prompt[..end].find(&format!("{NOTE}{number}: "))).collect();
        let mut notes = Vec::with_capacity(starts.len());
        for (idx, &start) in starts.iter().enumerate() {
            let limit = starts.get(idx + 1).copied();
            let note_end = limit.unwrap_or(end);
            // The separator of the last note may be the line break that the question begins with.
            let rest = &self.prompt[note_end..];
            let separator =
                SEPARATORS.iter().find(|separator| limit.is_none() && rest.starts_with(**separator));
            let is_separated =
                SEPARATORS.iter().any(|separator| self.prompt[..note_end].ends_with(separator));
            let n_more = separator.filter(|_| !is_separated).map_or(0, |separator| separator.len());
            notes.push(start..note_end + n_more);
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(prompt: &str) -> Vec<String> {
        let question = Question { prompt: prompt.to_owned(), answer: String::new() };
        question.notes().into_iter().map(|range| question.prompt[range].to_owned()).collect()
    }

    #[test]
    fn notes_are_found_with_their_separators_in_every_form() {
        let plain = "Note 1: A has a kite.\nNote 2: B.\nQuestion: Who?\nAnswer:";
        assert_eq!(notes(plain), ["Note 1: A has a kite.\n", "Note 2: B.\n"]);
        let joined = "Note 1: A.<|sep|>Note 2: B.<|sep|>\nQuestion: Who?\nAnswer:";
        assert_eq!(notes(joined), ["Note 1: A.<|sep|>", "Note 2: B.<|sep|>"]);
        let chat = "<|system|>Note 1: A.\nNote 2: B.<|user|>Who?<|assistant|>";
        assert_eq!(notes(chat), ["Note 1: A.\n", "Note 2: B."]);
        assert!(notes("Question: Who?\nAnswer:").is_empty());
    }

    #[test]
    fn a_line_that_is_no_question_is_named() {
        let lines = "{\"prompt\": \"p\", \"answer\": \"a\"}\n\n{\"prompt\": 1}\n";
        let error = Question::read_all(lines.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("line 3"), "{error}");
        assert!(matches!(Question::read_all(&b"\n"[..]), Err(EvalError::NoQuestion)));
    }
}
