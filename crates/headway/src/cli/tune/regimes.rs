//! The batches that layers are measured with.

use super::super::measure::{CacheState, Case, Kind};
use headway_engine::tuning::Class;

/// A platform's usual ones: requests of decodes, their tokens, tokens of prompts.
struct Usual {
    batches: &'static [usize],
    contexts: &'static [usize],
    prompts: &'static [usize],
}

const CPU: Usual = Usual { batches: &[1, 8, 32], contexts: &[512, 2048], prompts: &[256, 1024] };
const CUDA: Usual = Usual { batches: &[1, 8, 32, 128], contexts: &[1024, 8192], prompts: &[1024, 4096] };

/// What is asked for; empty: the usual.
#[derive(Clone, Copy, Default)]
pub struct Asked<'a> {
    /// Requests of decodes.
    pub batches: &'a [usize],
    /// Their tokens.
    pub contexts: &'a [usize],
    /// Tokens of prompts.
    pub prompts: &'a [usize],
}

/// As asked or usual, none longer than the model takes; decodes have so many new tokens, drafted ones among them.
pub fn of(args: Asked<'_>, platform: &str, max_model_len: usize, new_tokens: usize) -> Vec<Case> {
    let usual = if platform == "cpu" { CPU } else { CUDA };
    let or = |asked: &[usize], usual: &[usize], most: usize| -> Vec<usize> {
        let list = if asked.is_empty() { usual } else { asked };
        let mut list: Vec<usize> = list.iter().map(|n| (*n).min(most)).collect();
        list.sort_unstable();
        list.dedup();
        list
    };
    let batches = or(args.batches, usual.batches, usize::MAX);
    let contexts = or(args.contexts, usual.contexts, max_model_len);
    let prompts = or(args.prompts, usual.prompts, max_model_len);
    let decoded = |context: usize| [new_tokens.min(context), context];
    let decode = |&context: &usize, &batch: &usize| {
        case(format!("decode_b{batch}_c{context}"), Kind::Decode, vec![decoded(context); batch])
    };
    let mut all: Vec<Case> =
        contexts.iter().flat_map(|c| batches.iter().map(move |b| decode(c, b))).collect();
    all.extend(prompts.iter().map(|&n| case(format!("prefill_1x{n}"), Kind::Prefill, vec![[n, n]])));
    // The middle of the decodes beside the shortest prompt.
    let (batch, context, prompt) = (batches[batches.len() / 2], contexts[0], prompts[0]);
    let mut seqs = vec![decoded(context); batch];
    seqs.push([prompt, prompt]);
    all.push(case(format!("mixed_1p{prompt}_{batch}d{context}"), Kind::Mixed, seqs));
    all
}

fn case(id: String, kind: Kind, seqs: Vec<[usize; 2]>) -> Case {
    Case { id, kind, cache: CacheState::Cold, seqs, tokens: 0, latent: false }
}

/// The class that a batch counts for.
pub fn class(kind: Kind) -> Class {
    match kind {
        Kind::Decode => Class::Decode,
        Kind::Mixed => Class::Mixed,
        Kind::Prefill | Kind::Write => Class::Prefill,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_of_each_class_and_no_longer_than_the_model() {
        let ids = |asked, platform, most| -> Vec<String> {
            of(asked, platform, most, 1).into_iter().map(|c| c.id).collect()
        };
        let cuda = ids(Asked::default(), "cuda", 100_000);
        assert_eq!(cuda.len(), 4 * 2 + 2 + 1);
        assert!(cuda.contains(&"decode_b128_c8192".to_owned()) && cuda[10] == "mixed_1p1024_32d1024");
        // What is cut to one length is measured once.
        let short = ids(Asked::default(), "cpu", 128);
        assert_eq!(
            short,
            ["decode_b1_c128", "decode_b8_c128", "decode_b32_c128", "prefill_1x128", "mixed_1p128_8d128"]
        );
        let asked = Asked { batches: &[4], contexts: &[7, 7], prompts: &[5] };
        assert_eq!(ids(asked, "cpu", 100), ["decode_b4_c7", "prefill_1x5", "mixed_1p5_4d7"]);
        assert!(of(asked, "cpu", 100, 1).iter().all(|c| c.check().is_ok()));
        let drafts = of(asked, "cpu", 100, 3);
        assert_eq!((&drafts[0].seqs[..], drafts[2].seqs[0]), (&[[3, 7]; 4][..], [3, 7]));
    }
}
