//! From the words of the command line to [`Cli`]. What can't be understood is told in one line; clap's
//! own messages take several.

use super::args::Cli;
use clap::{
    Arg, Command, CommandFactory, FromArgMatches,
    error::{ContextKind, ContextValue, ErrorKind},
};
use std::{ffi::OsString, process::ExitCode};

/// The whole definition, as it is parsed. Environment twins that are set to nothing count as unset.
pub fn command() -> Command {
    let tune: fn(Arg) -> Arg = |a| {
        let empty = a.get_env().and_then(std::env::var_os).is_some_and(|v| v.is_empty());
        let a = if empty { a.env(None::<&str>) } else { a };
        let a = a.hide_env_values(true);
        // Negative numbers are values, so that the message can name their option.
        let takes_values = a.get_action().takes_values();
        if takes_values { a.allow_negative_numbers(true) } else { a }
    };
    fn all(c: Command, tune: fn(Arg) -> Arg) -> Command {
        c.mut_args(tune).mut_subcommands(|c| all(c, tune))
    }
    all(Cli::command(), tune)
}

/// Parses the process's arguments; help, the version and errors are printed here.
///
/// # Errors
/// How the process should end.
pub fn parse() -> Result<Cli, ExitCode> {
    let words: Vec<OsString> = std::env::args_os().collect();
    let parsed = command().try_get_matches_from(&words).and_then(|m| Cli::from_arg_matches(&m));
    parsed.map_err(|e| match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = e.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = e.print();
            ExitCode::from(2)
        }
        ErrorKind::InvalidUtf8 => {
            note!("headway: {}", not_utf8(&words));
            ExitCode::from(2)
        }
        _ => {
            note!("headway: {}{}; see {} --help", one_line(&e), source(&e, &words), subject(&words));
            ExitCode::from(2)
        }
    })
}

/// clap's message without usage and hints on where to find help.
fn one_line(e: &clap::Error) -> String {
    let text = e.render().to_string();
    let parts = text
        .lines()
        .map(str::trim)
        .take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more information"))
        .filter(|l| !l.is_empty());
    let mut line = String::new();
    for part in parts {
        let part = part.strip_prefix("error: ").unwrap_or(part);
        match line.chars().last() {
            None => {}
            Some(':') => line.push(' '),
            Some(_) if part.starts_with('[') => line.push(' '),
            Some(_) => line.push_str("; "),
        }
        line.push_str(part);
    }
    line
}

/// Says so where a refused value came from the environment.
fn source(e: &clap::Error, words: &[OsString]) -> String {
    let (Some(ContextValue::String(option)), Some(ContextValue::String(value))) =
        (e.get(ContextKind::InvalidArg), e.get(ContextKind::InvalidValue))
    else {
        return String::new();
    };
    let long = option.split([' ', '[', '=']).next().unwrap_or(option);
    let typed = |w: &OsString| w.to_str().is_some_and(|w| w == long || w.starts_with(&format!("{long}=")));
    if words.iter().any(typed) {
        return String::new();
    }
    let definition = command();
    let arguments = definition.get_subcommands().flat_map(Command::get_arguments);
    let twin = arguments
        .filter(|a| a.get_long().is_some_and(|l| long.strip_prefix("--") == Some(l)))
        .find_map(Arg::get_env)
        .filter(|name| std::env::var(name).is_ok_and(|v| v == *value));
    twin.map(|name| format!(" (from {})", name.display())).unwrap_or_default()
}

/// The command in use, for the hint.
fn subject(words: &[OsString]) -> String {
    let (mut name, mut at) = (String::from("headway"), Cli::command());
    for word in words.iter().skip(1).filter_map(|w| w.to_str()) {
        let Some(sub) = at.find_subcommand(word).cloned() else { break };
        name = format!("{name} {word}");
        at = sub;
    }
    name
}

fn not_utf8(words: &[OsString]) -> String {
    if let Some(word) = words.iter().find(|w| w.to_str().is_none()) {
        return format!(
            "the argument '{}' is not UTF-8; convert it, or write the prompt as UTF-8 into a file for --prompt-file",
            word.display()
        );
    }
    let variable = std::env::vars_os()
        .find(|(n, v)| n.to_str().is_some_and(|n| n.starts_with("HEADWAY_")) && v.to_str().is_none());
    match variable {
        Some((name, _)) => format!("the environment variable {} is not UTF-8; set it again", name.display()),
        None => "an argument is not UTF-8; convert it".into(),
    }
}

/// A count of at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("give a whole number of at least 1".into()),
    }
}

/// A number of requests that a measurement can hold at a time.
pub fn requests(text: &str) -> Result<usize, String> {
    up_to(text, 1 << 16)
}

/// Samples of a measurement.
pub fn repetitions(text: &str) -> Result<usize, String> {
    up_to(text, 1000)
}

/// Tokens in a block of a measurement.
pub fn block(text: &str) -> Result<usize, String> {
    up_to(text, 1 << 20)
}

/// Tokens of a measurement's prompt or answer.
pub fn tokens(text: &str) -> Result<usize, String> {
    up_to(text, 1 << 24)
}

/// KV cache groups of a measurement.
pub fn groups(text: &str) -> Result<usize, String> {
    up_to(text, 32)
}

fn up_to(text: &str, most: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=most).contains(&n) => Ok(n),
        _ => Err(format!("give a whole number from 1 to {most}")),
    }
}

/// A whole number of at least 0.
pub fn whole<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "give a whole number of at least 0".into())
}

/// A number.
pub fn number(text: &str) -> Result<f32, String> {
    text.parse().map_err(|_| "give a number, such as 0.7".into())
}

/// A token id.
pub fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "give token ids of at least 0, separated by commas, as in 1,2,3".into())
}

/// A token id and what is added to its logit.
pub fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed =
        text.split_once('=').and_then(|(id, by)| Some((id.trim().parse().ok()?, by.trim().parse().ok()?)));
    parsed.ok_or_else(|| "give token ids with what is added to their logits, as in 17=-100,42=1.5".into())
}

/// Bytes, or a number with a unit.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        unit => return Err(format!("unknown unit {unit}; give bytes, or a number with KiB, MiB or GiB")),
    };
    let number: f64 = digits
        .trim()
        .parse()
        .map_err(|_| format!("{digits:?} is not a number; give bytes, or a number with KiB, MiB or GiB"))?;
    let bytes = number * factor as f64;
    if bytes.is_finite() && (1.0..1e15).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err("give a size of at least 1 byte and below 1000000 GiB".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        command().debug_assert();
    }

    fn message(words: &[&str]) -> String {
        one_line(&command().try_get_matches_from(words).unwrap_err())
    }

    #[test]
    fn messages_are_one_line_and_name_the_option() {
        let m = message(&["headway", "generate", "--block-size", "0"]);
        assert_eq!(m, "invalid value '0' for '--block-size <N>': give a whole number of at least 1");
        let m = message(&["headway", "generate", "--load-format", "x"]);
        assert_eq!(m, "invalid value 'x' for '--load-format <FORMAT>' [possible values: auto, dummy]");
        let m = message(&["headway", "generate", "--tempature", "1"]);
        assert!(m.starts_with("unexpected argument '--tempature' found; tip:"), "{m}");
        assert!(m.contains("'--temperature'") && !m.contains('\n'), "{m}");
        let m = message(&["headway", "pull"]);
        assert_eq!(m, "the following required arguments were not provided: <NAME>");
    }

    #[test]
    fn sizes() {
        assert_eq!(size("1.5GiB"), Ok(3 << 29));
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("2 MiB"), Ok(2 << 20));
        for bad in ["0", "2 parsecs", "-1", "-1GiB", "", "GiB", "nan", "1e300"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
