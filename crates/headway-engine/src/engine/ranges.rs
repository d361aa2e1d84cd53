//! What a request's bidirectional ranges must be, checked when it is submitted.

use std::ops::Range;

/// Why ranges were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The model sees causally alone.
    #[error(
        "{architecture} as configured sees no range of a prompt in both directions; leave them out, or set \
         is_mm_prefix_lm in the config of a model that was trained so"
    )]
    NotThisModel {
        /// As the config names it.
        architecture: String,
    },
    /// Nothing in it.
    #[error("{}..{} is empty or descending; a range goes from its first position to the one after its last", range.start, range.end)]
    Empty {
        /// As given.
        range: Range<usize>,
    },
    /// Beyond the prompt.
    #[error("{}..{} ends after the prompt of {prompt} tokens; end it at {prompt} at most", range.start, range.end)]
    Outside {
        /// As given.
        range: Range<usize>,
        /// Tokens of the prompt.
        prompt: usize,
    },
    /// Not after the one before.
    #[error(
        "{}..{} begins before {}..{} ends; give ranges in ascending order that don't overlap",
        range.start, range.end, before.start, before.end
    )]
    Overlap {
        /// As given.
        range: Range<usize>,
        /// The one before.
        before: Range<usize>,
    },
}

/// Holds ranges against a prompt of so many tokens.
///
/// # Errors
/// The first that is empty, descending, outside, or not after the one before.
pub(super) fn check(ranges: &[Range<usize>], prompt: usize) -> Result<(), RangeError> {
    for (i, range) in ranges.iter().enumerate() {
        let range = range.clone();
        if range.start >= range.end {
            return Err(RangeError::Empty { range });
        }
        if range.end > prompt {
            return Err(RangeError::Outside { range, prompt });
        }
        if let Some(before) = ranges[..i].last().filter(|b| b.end > range.start) {
            return Err(RangeError::Overlap { range, before: before.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(ranges: &[[usize; 2]]) -> String {
        let ranges: Vec<_> = ranges.iter().map(|[a, b]| *a..*b).collect();
        check(&ranges, 20).map_or_else(|e| e.to_string(), |()| "fine".into())
    }

    #[test]
    fn ranges_are_ascending_apart_and_in_the_prompt() {
        assert_eq!(said(&[]), "fine");
        assert_eq!(said(&[[0, 5], [5, 6], [10, 20]]), "fine");
        assert!(said(&[[3, 3]]).starts_with("3..3 is empty or descending"));
        assert!(said(&[[5, 3]]).starts_with("5..3 is empty or descending"));
        assert!(said(&[[0, 4], [15, 21]]).starts_with("15..21 ends after the prompt of 20 tokens"));
        assert!(said(&[[0, 4], [3, 6]]).starts_with("3..6 begins before 0..4 ends"));
        assert!(said(&[[8, 9], [1, 2]]).starts_with("1..2 begins before 8..9 ends"));
    }
}
