//! Merges for SentencePiece vocabularies that come with scores only.
//!
//! SentencePiece BPE joins, among all neighbours whose concatenation is a piece, those with the highest score. The same
//! order as a list of merges: every split of every piece into two pieces, sorted by the piece's score, then its id. Runs
//! once, when a model is loaded. Not for unigram models, which need no merges.

use std::collections::HashMap;

/// All merges, best first, as pairs of pieces. `mergeable` says which ids take part: normal, user-defined and unused
/// pieces, not control, unknown or byte tokens.
pub(super) fn derive_merges(
    tokens: &[String],
    scores: &[f32],
    mergeable: impl Fn(usize) -> bool,
) -> Vec<(String, String)> {
    let ids: HashMap<&str, u32> =
        (0..tokens.len()).filter(|i| mergeable(*i)).map(|i| (tokens[i].as_str(), i as u32)).collect();
    let mut found: Vec<(u32, u32, u32)> = Vec::with_capacity(tokens.len() * 2);
    for (&token, &id) in &ids {
        for (at, _) in token.char_indices().skip(1) {
            // the left part first: it is the more often missing one
            let Some(&left) = ids.get(&token[..at]) else { continue };
            let Some(&right) = ids.get(&token[at..]) else { continue };
            found.push((id, left, right));
        }
    }
    let score = |id: u32| scores.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
    found.sort_unstable_by(|a, b| score(b.0).total_cmp(&score(a.0)).then(a.cmp(b)));
    let text = |id: u32| tokens.get(id as usize).cloned().unwrap_or_default();
    found.into_iter().map(|(_, left, right)| (text(left), text(right))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_decide_the_order_and_control_tokens_take_no_part() {
        let tokens: Vec<String> = ["<s>", "a", "b", "ab", "abb", "bb"].map(String::from).to_vec();
        let scores = [0.0, -1.0, -2.0, -9.0, -4.0, -3.0];
        let merges = derive_merges(&tokens, &scores, |i| i != 0);
        let pairs: Vec<(&str, &str)> = merges.iter().map(|(l, r)| (l.as_str(), r.as_str())).collect();
        assert_eq!(pairs, [("b", "b"), ("a", "bb"), ("ab", "b"), ("a", "b")]);
    }
}
