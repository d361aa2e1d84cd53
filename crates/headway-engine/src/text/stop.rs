//! Stop strings over token boundaries, with hold-back.
//!
//! A [`StopMatcher`] lives for one request and sits behind its [`StreamDecoder`](super::StreamDecoder). Not for stop
//! token ids, which the engine compares itself.

use super::error::TextError;

/// Finds the first stop string in a stream of text pieces. Text that may still be the beginning of a stop string is
/// held back; nothing at or after a match is ever emitted.
///
/// The match that *ends* first wins, as it would be seen character by character; of those that end together the longest.
///
/// ```
/// use headway_engine::text::StopMatcher;
/// let mut stop = StopMatcher::new(&["b g".to_string()])?;
/// assert_eq!(stop.push("ab"), "a");
/// assert_eq!(stop.push(" gx"), "");
/// assert_eq!(stop.matched(), Some("b g"));
/// # Ok::<(), headway_engine::text::TextError>(())
/// ```
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    matched: Option<usize>,
}

impl StopMatcher {
    /// A matcher for these stop strings; an empty list never stops.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`] for an empty string.
    pub fn new(stops: &[String]) -> Result<Self, TextError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::EmptyStop { index });
        }
        Ok(Self { stops: stops.to_vec(), held: String::new(), matched: None })
    }

    /// Takes the next piece of text and returns what may be shown now. After a match it returns nothing.
    pub fn push(&mut self, piece: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        if self.stops.is_empty() {
            return piece.to_string();
        }
        self.held.push_str(piece);
        if let Some((begin, which)) = self.first_match() {
            self.matched = Some(which);
            self.held.truncate(begin);
            return std::mem::take(&mut self.held);
        }
        let keep = self.held_back();
        let tail = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, tail)
    }

    /// Ends the text: what was held back and is no stop string after all.
    pub fn finish(&mut self) -> String {
        if self.matched.is_some() { String::new() } else { std::mem::take(&mut self.held) }
    }

    /// The stop string that ended the text, if one did.
    pub fn matched(&self) -> Option<&str> {
        self.matched.and_then(|i| self.stops.get(i)).map(String::as_str)
    }

    /// Begin (bytes in `held`) and index of the match that ends first.
    fn first_match(&self) -> Option<(usize, usize)> {
        let found = self.stops.iter().enumerate().filter_map(|(i, stop)| {
            let begin = self.held.find(stop.as_str())?;
            Some((begin + stop.len(), begin, i))
        });
        found.min().map(|(_, begin, i)| (begin, i))
    }

    /// Bytes at the end of `held` that are the beginning of some stop string.
    fn held_back(&self) -> usize {
        self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0)
    }
}

/// Length of the longest proper prefix of `stop` that ends `text`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = (stop.len() - 1).min(text.len());
    (1..=longest)
        .rev()
        .find(|&n| stop.is_char_boundary(n) && text.as_bytes().ends_with(&stop.as_bytes()[..n]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut matcher = StopMatcher::new(&stops).unwrap();
        let mut out: String = pieces.iter().map(|p| matcher.push(p)).collect();
        out.push_str(&matcher.finish());
        (out, matcher.matched().map(str::to_string))
    }

    #[test]
    fn a_stop_over_two_tokens_is_found() {
        assert_eq!(run(&["b g"], &["ab", " gx"]), ("a".into(), Some("b g".into())));
        assert_eq!(run(&["STOP"], &["S", "T", "O", "X"]), ("STOX".into(), None));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b", "c"]), ("a".into(), Some("aab".into())));
    }

    #[test]
    fn a_stop_at_the_very_start_emits_nothing() {
        assert_eq!(run(&["hi"], &["hi there"]), (String::new(), Some("hi".into())));
    }

    #[test]
    fn of_two_stops_the_one_that_ends_first_wins() {
        assert_eq!(run(&["ab", "abc"], &["xabc"]), ("x".into(), Some("ab".into())));
        assert_eq!(run(&["abc", "ab"], &["xab", "c"]), ("x".into(), Some("ab".into())));
        assert_eq!(run(&["bcd", "abcd"], &["xabcd"]), ("x".into(), Some("abcd".into())));
    }

    #[test]
    fn stops_of_several_bytes_hold_back_whole_characters() {
        assert_eq!(run(&["é!"], &["caf", "é", "?"]), ("café?".into(), None));
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".into(), Some("é!".into())));
    }

    #[test]
    fn empty_stops_are_refused_and_no_stops_pass_everything() {
        assert_eq!(
            StopMatcher::new(&["a".into(), String::new()]).unwrap_err(),
            TextError::EmptyStop { index: 1 }
        );
        assert_eq!(run(&[], &["a", "b"]), ("ab".into(), None));
    }
}
