//! A date for chat templates, given by the caller: this crate reads no clock.

use std::fmt::Write;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A day of the Gregorian calendar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CalendarDate {
    year: u16,
    month: u8,
    day: u8,
}

impl CalendarDate {
    /// A day, with `month` and `day` counted from 1; `None` if the calendar has no such day.
    pub fn try_new(year: u16, month: u8, day: u8) -> Option<Self> {
        let is_leap_year = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let n_days = match month {
            1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
            4 | 6 | 9 | 11 => 30,
            2 if is_leap_year => 29,
            2 => 28,
            _ => return None,
        };
        (1..=n_days).contains(&day).then_some(Self { year, month, day })
    }

    /// Writes the date with the directives `%Y %y %m %d %B %b %%` of `strftime`.
    pub(super) fn format(self, format: &str) -> Result<String, String> {
        let month_name = MONTHS[usize::from(self.month - 1)];
        let mut text = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            let written = match characters.next() {
                Some('Y') => write!(text, "{:04}", self.year),
                Some('y') => write!(text, "{:02}", self.year % 100),
                Some('m') => write!(text, "{:02}", self.month),
                Some('d') => write!(text, "{:02}", self.day),
                Some('B') => write!(text, "{month_name}"),
                Some('b') => write!(text, "{}", &month_name[..3]),
                Some('%') => write!(text, "%"),
                _ => {
                    return Err(format!("strftime_now got {format:?}; allowed: %Y %y %m %d %B %b %%"));
                }
            };
            written.map_err(|error| error.to_string())?;
        }
        Ok(text)
    }
}
