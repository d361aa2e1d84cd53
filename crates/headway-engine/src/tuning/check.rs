//! What a profile's types can't say of it. A file is anybody's: its text is printed, and its figures choose.

use super::{LARGEST_SHARE, Profile, profile::FORMAT};
use serde_json::Value;

/// Tokens in a block, at most.
const LARGEST_BLOCK: usize = 1 << 20;
/// Characters of a text, at most.
const LONGEST_TEXT: usize = 1 << 13;

impl Profile {
    /// Reads a profile's text.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let value: serde_json::Value = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        // Said first, since another form has other fields.
        match value.get("format").and_then(serde_json::Value::as_u64) {
            Some(f) if f == u64::from(FORMAT) => {}
            Some(f) => return Err(format!("of form {f}, and this headway reads form {FORMAT}")),
            None => return Err("it has no number \"format\"".into()),
        }
        check_text("", &value)?;
        let profile: Self = serde_json::from_value(value).map_err(|e| e.to_string())?;
        profile.check()?;
        Ok(profile)
    }

    /// Holds what the types can't say.
    pub(super) fn check(&self) -> Result<(), String> {
        self.weights.check()?;
        if !is_time(&self.measured) {
            return Err(format!("measured {:?} is no time such as 2026-11-30T17:40:00Z", self.measured));
        }
        let block = |b: usize| (1..=LARGEST_BLOCK).contains(&b);
        if let Some(size) = self.setting.block_size.filter(|b| !block(*b)) {
            return Err(format!("no block has {size} tokens"));
        }
        if self.layers.is_empty() {
            return Err("it has no layers".into());
        }
        for (i, l) in self.layers.iter().enumerate() {
            let wrong = |why: String| Err(format!("{}: {why}", l.what));
            if self.layers[..i].iter().any(|other| other.shape == l.shape) {
                return wrong("the shape is listed twice".into());
            }
            let times = l.candidates.iter().flat_map(|c| &c.figures);
            let positive = |t: &f64| t.is_finite() && *t > 0.0;
            for f in times {
                if ![f.median_us, f.min_us, f.max_us].iter().all(positive) {
                    return wrong(format!("{} has a time that is none", f.regime));
                }
                if f.min_us > f.median_us || f.median_us > f.max_us {
                    return wrong(format!(
                        "{} has a median that is not between its least and its largest",
                        f.regime
                    ));
                }
                if let Some(s) = f.share_of_ceiling.filter(|s| !positive(s) || *s > LARGEST_SHARE) {
                    return wrong(format!("{} has a share of {s}, which is none", f.regime));
                }
            }
            if let Some(c) = l.candidates.iter().find(|c| c.score.is_some_and(|s| !s.is_finite() || s < 1.0))
            {
                return wrong(format!("{} has a score below 1", c.backend));
            }
            if let Some(c) = l.candidates.iter().find(|c| !block(c.block_size)) {
                return wrong(format!("{}: no block has {} tokens", c.backend, c.block_size));
            }
            if l.not_measured.is_none() && l.chosen(&self.setting).is_none_or(|c| c.figures.is_empty()) {
                return wrong(format!("{} was chosen, and there are no figures of it", l.backend));
            }
        }
        Ok(())
    }
}

/// Refuses text that would do something to a terminal, or fill it.
fn check_text(at: &str, value: &Value) -> Result<(), String> {
    let plain = |text: &str| match text.chars().any(char::is_control) {
        _ if text.len() > LONGEST_TEXT => Err(format!("{at} has a text of {} bytes", text.len())),
        true => Err(format!("{at} has control characters")),
        false => Ok(()),
    };
    match value {
        Value::String(text) => plain(text),
        Value::Array(all) => {
            all.iter().enumerate().try_for_each(|(i, v)| check_text(&format!("{at}[{i}]"), v))
        }
        Value::Object(all) => all.iter().try_for_each(|(name, v)| {
            plain(name)?;
            check_text(&if at.is_empty() { name.clone() } else { format!("{at}.{name}") }, v)
        }),
        _ => Ok(()),
    }
}

/// Whether it is of the form `2026-11-30T17:40:00Z`.
fn is_time(text: &str) -> bool {
    let form = b"0000-00-00T00:00:00Z";
    let fits = |(c, f): (u8, &u8)| if *f == b'0' { c.is_ascii_digit() } else { c == *f };
    if text.len() != form.len() || !text.bytes().zip(form).all(fits) {
        return false;
    }
    let number = |at: usize| text[at..at + 2].parse::<u8>().unwrap_or(u8::MAX);
    (1..=12).contains(&number(5))
        && (1..=31).contains(&number(8))
        && number(11) < 24
        && number(14) < 60
        && number(17) <= 60
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_their_form() {
        assert!(is_time("2026-11-30T17:40:00Z") && is_time(&crate::tuning::now()));
        for bad in [
            "",
            "2026-11-30",
            "2026-11-30 17:40:00Z",
            "2026-13-30T17:40:00Z",
            "2026-11-30T25:40:00Z",
            "2026-11-30T17:40:0\u{e9}",
        ] {
            assert!(!is_time(bad), "{bad}");
        }
    }
}
