//! Prefix sums and lengths of a part of the batch.

use std::ops::Range;

/// New tokens of each request.
pub fn query_lens(query_start_loc: &[i32]) -> impl DoubleEndedIterator<Item = i32> + Clone + '_ {
    query_start_loc.windows(2).map(|w| (w[1] - w[0]).max(0))
}

/// Most new tokens of a request; 0 for an empty part.
pub fn max_query_len(query_start_loc: &[i32]) -> usize {
    query_lens(query_start_loc).max().map_or(0, |m| m as usize)
}

/// `[requests + 1]`, tokens: the prefix sum of a part of the batch, from 0. Empty for a part that
/// isn't in the batch.
pub fn rebase(query_start_loc: &[i32], requests: Range<usize>, out: &mut Vec<i32>) {
    out.clear();
    if let Some(part) = query_start_loc.get(requests.start..=requests.end) {
        out.extend(part.iter().map(|q| q - part[0]));
    }
}

/// Appends `[n + 1]`: 0, and the sums of the first 1, 2, … lengths. Returns the last one.
pub fn push_prefix_sum(lens: impl IntoIterator<Item = i32>, out: &mut Vec<i32>) -> i32 {
    let mut sum = 0;
    out.push(sum);
    out.extend(lens.into_iter().map(|l| {
        sum += l;
        sum
    }));
    sum
}

/// Tokens that each request had before this step.
pub fn context_lens<'a>(
    query_start_loc: &'a [i32],
    seq_lens: &'a [i32],
) -> impl Iterator<Item = i32> + Clone + 'a {
    query_lens(query_start_loc).zip(seq_lens).map(|(q, s)| (s - q).max(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_batch() {
        let q = [0, 1, 2, 7, 12];
        let mut out = vec![];
        rebase(&q, 2..4, &mut out);
        assert_eq!(out, [0, 5, 10]);
        rebase(&q, 4..4, &mut out);
        assert_eq!(out, [0]);
        rebase(&q, 4..6, &mut out);
        assert!(out.is_empty());
        assert_eq!(push_prefix_sum([3, 0, 2], &mut out), 5);
        assert_eq!(out, [0, 3, 3, 5]);
        assert_eq!(max_query_len(&q), 5);
        assert_eq!(context_lens(&q, &[9, 1, 5, 8]).collect::<Vec<_>>(), [8, 0, 0, 3]);
    }
}
