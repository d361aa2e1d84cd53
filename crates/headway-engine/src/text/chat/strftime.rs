//! `strftime_now`: the date in a template, in UTC, with the C locale's names. Not a calendar library.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
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

struct Parts {
    year: i64,
    month: usize,
    day: i64,
    weekday: usize,
    yearday: i64,
    hour: i64,
    minute: i64,
    second: i64,
    micros: u32,
}

/// Formats a time as Python's `strftime`; codes that are not known stay as they are.
pub(crate) fn strftime(time: SystemTime, format: &str) -> String {
    let parts = split(time);
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let bare = chars.next_if_eq(&'-').is_some();
        match chars.next() {
            Some(code) => match field(&parts, code) {
                Some(text) if bare => {
                    let short = text.trim_start_matches(['0', ' ']);
                    out.push_str(if short.is_empty() { "0" } else { short });
                }
                Some(text) => out.push_str(&text),
                None => {
                    out.push_str(if bare { "%-" } else { "%" });
                    out.push(code);
                }
            },
            None => out.push_str(if bare { "%-" } else { "%" }),
        }
    }
    out
}

fn field(p: &Parts, code: char) -> Option<String> {
    let hour12 = if p.hour % 12 == 0 { 12 } else { p.hour % 12 };
    let short = |name: &str| name.chars().take(3).collect::<String>();
    Some(match code {
        'Y' => p.year.to_string(),
        'y' => format!("{:02}", p.year.rem_euclid(100)),
        'm' => format!("{:02}", p.month + 1),
        'd' => format!("{:02}", p.day),
        'e' => format!("{:2}", p.day),
        'B' => MONTHS[p.month].to_string(),
        'b' | 'h' => short(MONTHS[p.month]),
        'A' => DAYS[p.weekday].to_string(),
        'a' => short(DAYS[p.weekday]),
        'w' => p.weekday.to_string(),
        'u' => (if p.weekday == 0 { 7 } else { p.weekday }).to_string(),
        'j' => format!("{:03}", p.yearday),
        'H' => format!("{:02}", p.hour),
        'I' => format!("{hour12:02}"),
        'M' => format!("{:02}", p.minute),
        'S' => format!("{:02}", p.second),
        'f' => format!("{:06}", p.micros),
        'p' => (if p.hour < 12 { "AM" } else { "PM" }).to_string(),
        'F' => format!("{}-{:02}-{:02}", p.year, p.month + 1, p.day),
        'T' => format!("{:02}:{:02}:{:02}", p.hour, p.minute, p.second),
        'D' => format!("{:02}/{:02}/{:02}", p.month + 1, p.day, p.year.rem_euclid(100)),
        'R' => format!("{:02}:{:02}", p.hour, p.minute),
        // a naive time has no zone in Python either
        'Z' | 'z' => String::new(),
        'n' => "\n".into(),
        't' => "\t".into(),
        '%' => "%".into(),
        _ => return None,
    })
}

fn split(time: SystemTime) -> Parts {
    let (seconds, micros) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (i64::try_from(after.as_secs()).unwrap_or(0), after.subsec_micros()),
        Err(before) => (-i64::try_from(before.duration().as_secs()).unwrap_or(0), 0),
    };
    let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let first = days_before(year);
    Parts {
        year,
        month,
        day,
        weekday: (days + 4).rem_euclid(7) as usize,
        yearday: days - first + 1,
        hour: rest / 3600,
        minute: rest / 60 % 60,
        second: rest % 60,
        micros,
    }
}

fn leap(year: i64) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

/// Days from 1970-01-01 to the first day of `year`.
fn days_before(year: i64) -> i64 {
    let y = year - 1;
    y * 365 + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) - 719_162
}

/// Year, month from 0 and day from 1 of a day counted from 1970-01-01.
fn civil(days: i64) -> (i64, usize, i64) {
    let mut year = 1970 + days.div_euclid(366);
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut left = days - days_before(year);
    for month in 0..12 {
        let length = match month {
            1 => 28 + i64::from(leap(year)),
            3 | 5 | 8 | 10 => 30,
            _ => 31,
        };
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    (year, 11, 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64, format: &str) -> String {
        strftime(UNIX_EPOCH + Duration::from_secs(seconds), format)
    }

    #[test]
    fn dates_that_are_known() {
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S %j"), "Thursday 01 January 1970 00:00:00 001");
        assert_eq!(at(951_782_400, "%Y-%m-%d %a %b"), "2000-02-29 Tue Feb");
        assert_eq!(at(1_735_689_599, "%d %b %Y %I:%M %p %j"), "31 Dec 2024 11:59 PM 366");
        assert_eq!(at(1_735_689_600, "%-d/%-m/%y %e|%% %Q %"), "1/1/25  1|% %Q %");
    }
}
