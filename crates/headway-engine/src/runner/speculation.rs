//! `--speculative-tokens` and its companions: what is in force, and whether the backends can verify it.

use super::{StartupError, limits::Limits};
use crate::{options::EngineOptions, speculation::LookupSizes};
use headway_attention::BuilderPlan;

/// Sizes of matches as asked, held against each other.
///
/// # Errors
/// Sizes without anything to draft, 0, a least above the most.
pub fn lookup_sizes(o: &EngineOptions) -> Result<LookupSizes, StartupError> {
    const MIN: &str = "--prompt-lookup-min";
    const MAX: &str = "--prompt-lookup-max";
    let (min, max) = (o.prompt_lookup_min, o.prompt_lookup_max);
    for (option, value) in [(MIN, min), (MAX, max)] {
        let Some(n) = value else { continue };
        let why = match (n, o.speculative_tokens.unwrap_or(0)) {
            (0, _) => "it must be at least 1",
            (_, 0) => "nothing is drafted; add --speculative-tokens",
            _ => continue,
        };
        return Err(StartupError::Option { option, value: n.to_string(), why: why.into() });
    }
    let d = LookupSizes::default();
    let sizes = match (min, max) {
        (None, None) => d,
        (Some(min), None) => LookupSizes { min, max: d.max.max(min) },
        (None, Some(max)) => LookupSizes { min: d.min.min(max), max },
        (Some(min), Some(max)) => LookupSizes { min, max },
    };
    if sizes.min > sizes.max {
        let why = format!("it is above {MAX} {}; give that or less", sizes.max);
        return Err(StartupError::Option { option: MIN, value: sizes.min.to_string(), why });
    }
    Ok(sizes)
}

/// Refuses a backend that takes fewer query tokens of a decode than a step with drafted tokens has: it would compute
/// every such decode as a prefill.
///
/// # Errors
/// The first such backend, with the number of tokens that it would take.
pub fn check_builders<'a>(
    num_speculative_tokens: usize,
    builders: impl Iterator<Item = (&'a str, &'a BuilderPlan)>,
) -> Result<(), StartupError> {
    for (name, plan) in builders {
        let Some(most) = plan.reorder_batch_threshold.filter(|t| *t <= num_speculative_tokens) else {
            continue;
        };
        let tokens = if most == 1 { "1 query token".to_owned() } else { format!("{most} query tokens") };
        return Err(StartupError::Option {
            option: "--speculative-tokens",
            value: num_speculative_tokens.to_string(),
            why: format!(
                "is not supported with attention backend {name}, which takes {tokens} of a decode where \
                 {} are needed; set --speculative-tokens {} or choose another backend with \
                 --attention-backend or --backend-per-kind",
                1 + num_speculative_tokens,
                most.saturating_sub(1)
            ),
        });
    }
    Ok(())
}

impl Limits {
    /// Rows of logits in a step: one a request, and one for each token drafted.
    pub fn max_num_logits(&self) -> usize {
        let all = self.max_num_reqs.saturating_mul(self.num_speculative_tokens.saturating_add(1));
        all.min(self.max_num_tokens).max(self.max_num_reqs)
    }

    /// Holds the tokens of one decode against the token budget.
    ///
    /// # Errors
    /// More drafted tokens than a step can hold.
    pub(super) fn check_drafts(&self) -> Result<(), StartupError> {
        let (drafts, budget) = (self.num_speculative_tokens, self.max_num_tokens);
        if drafts < budget {
            return Ok(());
        }
        Err(StartupError::Option {
            option: "--speculative-tokens",
            value: drafts.to_string(),
            why: format!(
                "a decode then has more tokens than a step's {budget} of --max-num-batched-tokens; lower the first to {} \
                 or less, or raise the second",
                budget - 1
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::GraphSupport;

    fn sizes(k: Option<usize>, min: Option<usize>, max: Option<usize>) -> Result<LookupSizes, String> {
        let o = EngineOptions {
            speculative_tokens: k,
            prompt_lookup_min: min,
            prompt_lookup_max: max,
            ..EngineOptions::default()
        };
        lookup_sizes(&o).map_err(|e| e.to_string())
    }

    #[test]
    fn sizes_of_matches_go_together() {
        assert_eq!(sizes(None, None, None), Ok(LookupSizes::default()));
        assert_eq!(sizes(Some(4), None, Some(2)), Ok(LookupSizes { min: 2, max: 2 }));
        assert_eq!(sizes(Some(4), Some(20), None), Ok(LookupSizes { min: 20, max: 20 }));
        assert_eq!(sizes(Some(4), Some(1), Some(5)), Ok(LookupSizes { min: 1, max: 5 }));
        for (k, min, max, words) in [
            (Some(4), Some(3), Some(2), "--prompt-lookup-min 3: it is above --prompt-lookup-max 2"),
            (Some(4), Some(0), None, "--prompt-lookup-min 0: it must be at least 1"),
            (None, None, Some(4), "--prompt-lookup-max 4: nothing is drafted; add --speculative-tokens"),
            (Some(0), Some(4), None, "--prompt-lookup-min 4: nothing is drafted"),
        ] {
            assert!(sizes(k, min, max).is_err_and(|e| e.starts_with(words)), "{words}");
        }
    }

    #[test]
    fn a_backend_that_takes_too_few_tokens_is_named_with_what_would_do() {
        let plan = |t| BuilderPlan {
            graph_support: GraphSupport::Never,
            reorder_batch_threshold: t,
            persistent_bytes: 0,
            workspace_bytes: 0,
        };
        let (any, one, four) = (plan(None), plan(Some(1)), plan(Some(4)));
        let check = |k, name, plan| {
            check_builders(k, [("ANY", &any), (name, plan)].into_iter()).map_err(|e| e.to_string())
        };
        assert_eq!(check(0, "ONE", &one), Ok(()));
        assert_eq!(check(3, "FOUR", &four), Ok(()));
        let e = check(2, "ONE", &one).unwrap_err();
        assert!(e.starts_with("--speculative-tokens 2: is not supported with attention backend ONE"), "{e}");
        assert!(e.contains("takes 1 query token of") && e.contains("set --speculative-tokens 0 or"), "{e}");
        let e = check(4, "FOUR", &four).unwrap_err();
        assert!(e.contains("takes 4 query tokens of") && e.contains("set --speculative-tokens 3 or"), "{e}");
    }

    #[test]
    fn rows_of_logits_never_exceed_the_tokens_of_a_step() {
        let limits = |reqs, tokens, drafts| Limits {
            max_num_reqs: reqs,
            max_num_tokens: tokens,
            max_model_len: 4096,
            micro_batching: crate::runner::micro_batches::resolve(&EngineOptions::default(), tokens).unwrap(),
            num_speculative_tokens: drafts,
        };
        assert_eq!(limits(4, 512, 0).max_num_logits(), 4);
        assert_eq!(limits(4, 512, 7).max_num_logits(), 32);
        assert_eq!(limits(64, 100, 7).max_num_logits(), 100);
        assert!(limits(1, 8, 7).check_drafts().is_ok());
        let e = limits(1, 8, 8).check_drafts().unwrap_err().to_string();
        assert!(e.contains("--max-num-batched-tokens") && e.contains("lower the first to 7"), "{e}");
    }
}
