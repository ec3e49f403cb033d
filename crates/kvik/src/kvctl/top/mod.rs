//! `kvctl kvtop` and `kvik top`: the memory of all engines on a screen that follows it.
//!
//! `screen` draws, `rows` orders what is drawn, `state` takes keys, `rates` and `page_map` prepare
//! numbers; all of them are functions of their arguments. Only this file reads ledgers and keys, and `engines` asks a
//! controller of engines.

mod engines;
pub(crate) mod page_map;
pub(crate) mod rates;
mod rows;
mod screen;
mod state;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kvik_engines::EngineStatus;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};

use self::engines::EnginesFeed;
use self::page_map::PageMaps;
use self::rates::Rates;
use self::rows::{RowKey, rows};
use self::screen::View;
use self::state::{Action, Message, ScreenState};
use super::arguments::{CommonArguments, TopArguments};
use super::folder::{MemoryFolder, Reading};
use super::list::ListAnswer;
use super::{cleanup, limit, message, trim};

/// Shows the screen until the user quits, or with `--json` measures once.
///
/// Fails if a name does not exist, or without `--json` if this is no terminal.
pub fn run(common: &CommonArguments, arguments: &TopArguments) -> anyhow::Result<()> {
    let folder = MemoryFolder::new(common);
    let first = folder.read()?;
    first.check_names(&arguments.names)?;
    let mut screen = Screen {
        folder,
        names: arguments.names.clone(),
        refresh: Duration::from_secs_f64(arguments.refresh),
        reading: first,
        read_at: Instant::now(),
        rates: Rates::default(),
        feed: EnginesFeed::new(arguments.engines.as_deref()),
        engines: Vec::new(),
        pages: PageMaps::default(),
        state: ScreenState::default(),
    };
    screen.reading.keep(&screen.names);
    screen.pages = PageMaps::read(screen.folder.dir(), &screen.reading);
    screen.engines = screen.feed.read();
    if common.json {
        std::thread::sleep(screen.refresh);
        screen.read()?;
        let answer = ListAnswer::new(&screen.folder, &screen.reading, Some(&screen.rates));
        return super::print(&answer.with_engines(screen.engines), true);
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        bail!("kvtop needs a terminal; `kvctl list` and --json do not");
    }
    let mut terminal = ratatui::try_init().context("set up the terminal")?;
    let result = screen.run(&mut terminal);
    ratatui::restore();
    result
}

/// What the screen knows.
#[derive(Debug)]
struct Screen {
    folder: MemoryFolder,
    names: Vec<String>,
    refresh: Duration,
    reading: Reading,
    read_at: Instant,
    rates: Rates,
    feed: EnginesFeed,
    engines: Vec<EngineStatus>,
    /// Read with `reading`, so that both show one moment.
    pages: PageMaps,
    state: ScreenState,
}

// === impl Screen ===

impl Screen {
    fn run(&mut self, terminal: &mut DefaultTerminal) -> anyhow::Result<()> {
        let dir = self.folder.dir().display().to_string();
        loop {
            self.state.keep_selection(&self.keys());
            let pages = self.state.selected.as_ref().and_then(|selected| self.pages.of(selected));
            let view = View {
                dir: &dir,
                refresh_s: self.refresh.as_secs_f64(),
                reading: &self.reading,
                rates: &self.rates,
                state: &self.state,
                pages: pages.as_ref(),
                engines: &self.engines,
            };
            terminal
                .draw(|frame| screen::draw(&view, frame.area(), frame.buffer_mut()))
                .context("draw the screen")?;
            if event::poll(self.refresh.saturating_sub(self.read_at.elapsed())).context("wait for a key")? {
                // A resize needs nothing but the next drawing.
                if let Event::Key(key) = event::read().context("read a key")? {
                    let action = self.state.on_key(key, &self.keys());
                    if action == Action::Quit {
                        return Ok(());
                    }
                    self.act(&action);
                }
            }
            if self.read_at.elapsed() >= self.refresh
                && let Err(error) = self.read()
            {
                self.state.message = Some(Message::error(message(&error)));
            }
        }
    }

    /// Reads again and measures the rates since the last time.
    fn read(&mut self) -> anyhow::Result<()> {
        let elapsed = self.read_at.elapsed();
        self.read_at = Instant::now();
        let mut reading = self.folder.read()?;
        reading.keep(&self.names);
        self.rates = Rates::between(&self.reading, &reading, elapsed);
        self.pages = PageMaps::read(self.folder.dir(), &reading);
        self.reading = reading;
        self.engines = self.feed.read();
        Ok(())
    }

    /// The lines that can be selected.
    fn keys(&self) -> Vec<RowKey> {
        rows(&self.reading, &self.rates, self.state.sort_by).iter().filter_map(rows::Row::key).collect()
    }

    /// Does what a key asked for and says what came of it.
    fn act(&mut self, action: &Action) {
        let folder = |group: &RowKey| self.folder.of_device(&group.device);
        let result = match action {
            Action::None | Action::Quit => return,
            Action::CleanUp => cleanup::clean_up(&self.folder).map(|answer| answer.sentence()),
            Action::Trim { group } => {
                trim::trim(&folder(group), &group.ipc_name).map(|answer| answer.sentence())
            }
            Action::SetLimit { group, limit } => folder(group)
                .find(&group.ipc_name)
                .and_then(|found| limit::set(&found, limit.bytes()))
                .map(|answer| answer.sentence()),
        };
        self.state.message = Some(match result {
            Ok(text) => Message::done(text),
            Err(error) => Message::error(message(&error)),
        });
    }
}
