//! `kvctl watch`: the list, again and again.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};

use super::arguments::WatchArguments;
use super::folder::MemoryFolder;
use super::list::ListAnswer;
use super::print;

/// Cursor to the corner, then everything off the screen.
const CLEAR_SCREEN: &str = "\u{1b}[H\u{1b}[2J";

/// Prints the list until the count is reached or a key ends it.
///
/// Fails if a name does not exist when it starts; one that goes later is left out.
pub(crate) fn watch(folder: &MemoryFolder, arguments: &WatchArguments, is_json: bool) -> anyhow::Result<()> {
    let interval = Duration::from_secs_f64(arguments.interval);
    let is_screen = !is_json && io::stdout().is_terminal();
    let has_keys = is_screen && io::stdin().is_terminal();
    let mut n_looks = 0;
    loop {
        let mut reading = folder.read()?;
        if n_looks == 0 {
            reading.check_names(&arguments.names)?;
        }
        reading.keep(&arguments.names);
        if is_screen {
            write!(io::stdout(), "{CLEAR_SCREEN}")?;
        } else if n_looks > 0 && !is_json {
            writeln!(io::stdout())?;
        }
        print(&ListAnswer::new(folder, &reading, None), is_json)?;
        n_looks += 1;
        if arguments.count.is_some_and(|count| count <= n_looks) {
            return Ok(());
        }
        if !has_keys {
            std::thread::sleep(interval);
        } else if is_ended_within(interval)? {
            return Ok(());
        }
    }
}

/// Waits for the interval, or for the key that ends the watch.
fn is_ended_within(interval: Duration) -> io::Result<bool> {
    struct RawMode;
    impl Drop for RawMode {
        fn drop(&mut self) {
            // There is nothing left to do about a terminal that is gone.
            let _ = disable_raw_mode();
        }
    }

    enable_raw_mode()?;
    let _raw_mode = RawMode;
    let deadline = Instant::now() + interval;
    while event::poll(deadline.saturating_duration_since(Instant::now()))? {
        if let Event::Key(key) = event::read()? {
            let is_interrupt =
                key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            if is_interrupt || key.code == KeyCode::Char('q') {
                return Ok(true);
            }
        }
    }
    Ok(false)
}
