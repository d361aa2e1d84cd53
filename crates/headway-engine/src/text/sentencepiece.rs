//! Merges for SentencePiece vocabularies that come with scores only.
//!
//! SentencePiece BPE joins, among all neighbours whose concatenation is a piece, those with the highest score. The same
//! order as a list of merges: every split of every piece into two pieces, sorted by the piece's score, then its id. Runs
//! once, when a model is loaded. Not for unigram models, which need no merges.

use tokenizers::models::bpe::Vocab;

/// All merges, best first, as pairs of pieces. `ids` is the vocabulary of `tokens`; `mergeable` says which ids take part:
/// normal, user-defined and unused pieces, not control, unknown or byte tokens.
pub(super) fn derive_merges(
    tokens: &[String],
    ids: &Vocab,
    scores: &[f32],
    mergeable: impl Fn(u32) -> bool,
) -> Vec<(String, String)> {
    let piece = |text: &str| ids.get(text).copied().filter(|id| mergeable(*id));
    let mut found: Vec<(u32, u32, u32)> = Vec::with_capacity(tokens.len() * 2);
    for (id, token) in (0u32..).zip(tokens).filter(|(id, _)| mergeable(*id)) {
        for (at, _) in token.char_indices().skip(1) {
            let Some(left) = piece(&token[..at]) else { continue };
            let Some(right) = piece(&token[at..]) else { continue };
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
        let ids: Vocab = (0u32..).zip(&tokens).map(|(id, token)| (token.clone(), id)).collect();
        let merges = derive_merges(&tokens, &ids, &scores, |id| id != 0);
        let pairs: Vec<(&str, &str)> = merges.iter().map(|(l, r)| (l.as_str(), r.as_str())).collect();
        assert_eq!(pairs, [("b", "b"), ("a", "bb"), ("ab", "b"), ("a", "b")]);
    }
}
