//! What the person at the screen has chosen, and what a key changes in it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::rows::{RowKey, SortBy};
use crate::size::{Limit, parse_limit};

/// The longest limit that can be typed, in characters.
const MAX_INPUT_CHARS: usize = 32;

/// What is chosen, typed and said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ScreenState {
    pub(crate) selected: Option<RowKey>,
    pub(crate) sort_by: SortBy,
    pub(crate) mode: Mode,
    pub(crate) message: Option<Message>,
}

/// What keys mean at the moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Normal,
    Help,
    /// A limit for a group is being typed.
    LimitPrompt {
        group: RowKey,
        input: String,
    },
}

/// What came of the last action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) text: String,
    pub(crate) is_error: bool,
}

/// What is to be done for a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    None,
    Quit,
    SetLimit { group: RowKey, limit: Limit },
    Trim { group: RowKey },
    CleanUp,
}

// === impl Message ===

impl Message {
    pub(crate) fn done(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_error: false }
    }

    pub(crate) fn error(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_error: true }
    }
}

// === impl ScreenState ===

impl ScreenState {
    /// Selects the first line if the selected one is gone or none was.
    pub(crate) fn keep_selection(&mut self, keys: &[RowKey]) {
        if !self.selected.as_ref().is_some_and(|selected| keys.contains(selected)) {
            // A member that went leaves the selection with its group.
            let group = self.selected.take().map(|key| RowKey { slot: None, ..key });
            self.selected = group.filter(|group| keys.contains(group)).or_else(|| keys.first().cloned());
        }
    }

    /// Takes a key; `keys` are the lines that can be selected, from top to bottom.
    pub(crate) fn on_key(&mut self, key: KeyEvent, keys: &[RowKey]) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::None;
        }
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Action::Quit;
        }
        match std::mem::take(&mut self.mode) {
            Mode::Normal => self.on_normal_key(key, keys),
            Mode::Help => Action::None,
            Mode::LimitPrompt { group, input } => self.on_prompt_key(key, group, input),
        }
    }

    fn on_normal_key(&mut self, key: KeyEvent, keys: &[RowKey]) -> Action {
        self.message = None;
        let group = self.selected.as_ref().map(|selected| RowKey { slot: None, ..selected.clone() });
        match (key.code, group) {
            (KeyCode::Char('q') | KeyCode::Esc, _) => return Action::Quit,
            (KeyCode::Up | KeyCode::Char('k'), _) => self.select_by(keys, -1),
            (KeyCode::Down | KeyCode::Char('j'), _) => self.select_by(keys, 1),
            (KeyCode::PageUp, _) => self.select_by(keys, -10),
            (KeyCode::PageDown, _) => self.select_by(keys, 10),
            (KeyCode::Home, _) => self.selected = keys.first().cloned(),
            (KeyCode::End, _) => self.selected = keys.last().cloned(),
            (KeyCode::Char('s'), _) => self.sort_by = self.sort_by.next(),
            (KeyCode::Char('?' | 'h'), _) => self.mode = Mode::Help,
            (KeyCode::Char('g'), _) => return Action::CleanUp,
            (KeyCode::Char('l'), Some(group)) => {
                self.mode = Mode::LimitPrompt { group, input: String::new() };
            }
            (KeyCode::Char('t'), Some(group)) => return Action::Trim { group },
            (KeyCode::Char('l' | 't'), None) => {
                self.message = Some(Message::error("no IPC name is selected"));
            }
            _ => {}
        }
        Action::None
    }

    fn on_prompt_key(&mut self, key: KeyEvent, group: RowKey, mut input: String) -> Action {
        match key.code {
            KeyCode::Esc => return Action::None,
            KeyCode::Enter if input.trim().is_empty() => return Action::None,
            KeyCode::Enter => match parse_limit(&input) {
                Ok(limit) => return Action::SetLimit { group, limit },
                Err(text) => {
                    self.message = Some(Message::error(text));
                    return Action::None;
                }
            },
            KeyCode::Backspace => {
                input.pop();
            }
            KeyCode::Char(c) if !c.is_control() && input.chars().count() < MAX_INPUT_CHARS => input.push(c),
            _ => {}
        }
        self.mode = Mode::LimitPrompt { group, input };
        Action::None
    }

    fn select_by(&mut self, keys: &[RowKey], n_lines: isize) {
        let current = keys.iter().position(|key| Some(key) == self.selected.as_ref()).unwrap_or(0);
        let last = keys.len().saturating_sub(1);
        self.selected = keys.get(current.saturating_add_signed(n_lines).min(last)).cloned();
    }
}
