//! Dates for templates that print today's date. The caller passes the time: WASM has no clock, and tests need none.

use super::values::{Result, wrong};

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
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const SECONDS_PER_DAY: i64 = 86_400;

/// Formats `now`, in seconds since 1970 UTC, like C's `strftime`.
///
/// # Errors
/// For an unknown directive.
pub fn format(format: &str, now: i64) -> Result<String> {
    let (days, second) = (now.div_euclid(SECONDS_PER_DAY), now.rem_euclid(SECONDS_PER_DAY));
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let name = |names: &[&'static str], at: i64| {
        usize::try_from(at).ok().and_then(|at| names.get(at)).copied().unwrap_or_default()
    };
    let month_name = name(&MONTHS, month - 1);
    let weekday = name(&WEEKDAYS, (days + 4).rem_euclid(7));
    let short = |name: &'static str| name.get(..3).unwrap_or(name).to_owned();
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut directive = chars.next();
        let is_bare = directive == Some('-');
        if is_bare {
            directive = chars.next();
        }
        let number = |number: i64| if is_bare { number.to_string() } else { format!("{number:02}") };
        text += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year.rem_euclid(100)),
            Some('m') => number(month),
            Some('d') => number(day),
            Some('e') => format!("{day:2}"),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => short(month_name),
            Some('A') => weekday.to_owned(),
            Some('a') => short(weekday),
            Some('H') => number(hour),
            Some('I') => number((hour + 11) % 12 + 1),
            Some('M') => number(minute),
            Some('S') => number(second % 60),
            Some('p') => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('%') => "%".to_owned(),
            other => return wrong(format!("strftime_now: the directive {other:?} is unknown")),
        };
    }
    Ok(text)
}

/// Converts days since 1970-01-01 to year, month and day in the Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    let is_leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    // Every 400 years have 146,097 days.
    let (mut year, mut day) = (1970 + 400 * days.div_euclid(146_097), days.rem_euclid(146_097));
    while day >= 365 + i64::from(is_leap(year)) {
        day -= 365 + i64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + i64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1)
}
