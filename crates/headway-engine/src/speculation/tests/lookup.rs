//! Prompt lookup: named cases, and a plain search beside it.

use crate::sampling::uniform;
use crate::speculation::{LookupSizes, PromptLookup};

/// A drafter whose drafts were right so far.
fn trusted(sizes: (usize, usize)) -> PromptLookup {
    let mut lookup = PromptLookup::new(LookupSizes { min: sizes.0, max: sizes.1 });
    lookup.learn_outcome(100, 100);
    lookup
}

fn propose(sizes: (usize, usize), tokens: &[u32], most: usize) -> Vec<u32> {
    let mut out = vec![];
    trusted(sizes).propose(tokens, most, &mut out);
    out
}

/// The same by looking everywhere: the longest match of at most `max` tokens, the latest of those.
fn searched(sizes: (usize, usize), tokens: &[u32], most: usize) -> Vec<u32> {
    let end = tokens.len();
    let len = |at: usize| {
        let pairs = tokens[..at].iter().rev().zip(tokens.iter().rev());
        pairs.take(sizes.1).take_while(|(a, b)| a == b).count()
    };
    let found = (0..end).filter(|at| len(*at) >= sizes.0).max_by_key(|at| (len(*at), *at));
    let mut all = tokens.to_vec();
    for i in 0..found.map_or(0, |_| most) {
        all.push(all[found.unwrap_or(0) + i]);
    }
    all.split_off(end)
}

#[test]
fn what_followed_the_longest_match_is_proposed() {
    assert_eq!(propose((2, 4), &[1, 2, 3, 4, 9, 1, 2], 2), [3, 4]);
    // 1 2 comes twice before; 8 1 2 once.
    assert_eq!(propose((2, 4), &[8, 1, 2, 3, 1, 2, 4, 8, 1, 2], 1), [3]);
    // Of equal matches the latest.
    assert_eq!(propose((2, 2), &[8, 1, 2, 3, 1, 2, 4, 8, 1, 2], 1), [4]);
}

#[test]
fn without_a_match_nothing_is_proposed() {
    for tokens in [&[][..], &[1], &[1, 1], &[1, 2, 3, 4, 5]] {
        assert_eq!(propose((2, 4), tokens, 4), [0; 0], "{tokens:?}");
    }
    assert_eq!(propose((3, 4), &[1, 2, 3, 9, 2, 3], 4), [0; 0], "two tokens are too short a match");
    assert_eq!(propose((2, 4), &[1, 2, 1, 2], 0), [0; 0]);
}

#[test]
fn a_text_that_goes_round_is_drafted_in_full() {
    assert_eq!(propose((1, 4), &[7, 7], 5), [7; 5]);
    assert_eq!(propose((2, 4), &[5, 1, 2, 3, 1, 2, 3], 7), [1, 2, 3, 1, 2, 3, 1]);
}

#[test]
fn as_a_search_of_everything_finds_it_however_the_tokens_came() {
    for (seed, words) in [(1, 3), (2, 8), (3, 60)] {
        let tokens: Vec<u32> = (0..1500).map(|i| (uniform(seed, i) * words as f64) as u32).collect();
        for sizes in [(1, 1), (1, 5), (2, 3), (3, 9)] {
            let mut grown = trusted(sizes);
            for end in (0..tokens.len()).step_by(7) {
                let mut drafts = vec![];
                grown.propose(&tokens[..end], 6, &mut drafts);
                let expected = searched(sizes, &tokens[..end], 6);
                // Few words make more matches than are looked at: then a shorter or none may be found.
                if words > 10 {
                    assert_eq!(drafts, expected, "{sizes:?}, {end} of {words} words");
                }
                assert!(drafts.is_empty() || drafts.len() == 6);
                assert!(expected.len() >= drafts.len());
            }
        }
    }
}

#[test]
fn right_drafts_grow_and_wrong_ones_shrink() {
    let mut lookup = PromptLookup::new(LookupSizes { min: 1, max: 4 });
    let mut len = |outcome: Option<usize>| {
        let mut drafts = vec![];
        lookup.propose(&[7, 7, 7, 7], 8, &mut drafts);
        outcome.into_iter().for_each(|accepted| lookup.learn_outcome(drafts.len(), accepted));
        drafts.len()
    };
    let lengths = [Some(2), Some(4), Some(8), Some(3), Some(0), Some(0), Some(1), None].map(&mut len);
    assert_eq!(lengths, [2, 4, 8, 8, 4, 1, 1, 2]);
}

#[test]
fn memory_is_a_few_bytes_a_token() {
    let tokens: Vec<u32> = (0..200_000).map(|i| (uniform(5, i) * 1000.0) as u32).collect();
    let mut lookup = PromptLookup::new(LookupSizes::default());
    for end in [10, 1000, 100_000, 200_000] {
        lookup.propose(&tokens[..end], 4, &mut vec![]);
        assert!(lookup.bytes() <= 16 * end + (1 << 11), "{} bytes of {end} tokens", lookup.bytes());
    }
}
