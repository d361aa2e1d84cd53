//! [`SpeculationStats`]: how often drafted tokens were right.

use serde::Serialize;

/// Drafted and accepted tokens, by position in the draft.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Drafts that were checked: a request's in a step.
    pub drafts: u64,
    /// `drafted[i]`: drafts with a token at position `i`.
    pub drafted: Vec<u64>,
    /// `accepted[i]`: those of them whose tokens up to `i` were all accepted.
    pub accepted: Vec<u64>,
}

/// As `--json` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpeculationSummary {
    /// [`SpeculationStats::drafts`].
    pub drafts: u64,
    /// Drafted tokens.
    pub drafted_tokens: u64,
    /// Accepted ones.
    pub accepted_tokens: u64,
    /// Accepted of drafted tokens, from 0 to 1; 0 where nothing was drafted.
    pub acceptance_rate: f64,
    /// By position in the draft: the share of drafts with a token there that was accepted.
    pub acceptance_by_position: Vec<f64>,
    /// Tokens that a step with a draft yielded, the sampled one included; 1 where nothing was drafted.
    pub mean_accepted_length: f64,
}

impl SpeculationStats {
    /// Counts a draft of so many tokens, of which the first `accepted` were right.
    pub fn record(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        self.drafts += 1;
        let count = |counts: &mut Vec<u64>, n: usize| {
            counts.resize(counts.len().max(drafted), 0);
            counts[..n].iter_mut().for_each(|c| *c += 1);
        };
        count(&mut self.drafted, drafted);
        count(&mut self.accepted, accepted.min(drafted));
    }

    /// What came since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        let less = |now: &[u64], then: &[u64]| -> Vec<u64> {
            let then = then.iter().copied().chain(std::iter::repeat(0));
            now.iter().zip(then).map(|(a, b)| a.saturating_sub(b)).collect()
        };
        Self {
            drafts: self.drafts.saturating_sub(earlier.drafts),
            drafted: less(&self.drafted, &earlier.drafted),
            accepted: less(&self.accepted, &earlier.accepted),
        }
    }

    /// Sums and rates.
    pub fn summary(&self) -> SpeculationSummary {
        let (drafted, accepted): (u64, u64) = (self.drafted.iter().sum(), self.accepted.iter().sum());
        let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        SpeculationSummary {
            drafts: self.drafts,
            drafted_tokens: drafted,
            accepted_tokens: accepted,
            acceptance_rate: share(accepted, drafted),
            acceptance_by_position: self
                .accepted
                .iter()
                .zip(&self.drafted)
                .map(|(a, d)| share(*a, *d))
                .collect(),
            mean_accepted_length: 1.0 + share(accepted, self.drafts),
        }
    }
}

impl std::fmt::Display for SpeculationSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |x: f64| format!("{:.0}", x * 100.0);
        let by_position: Vec<String> = self.acceptance_by_position.iter().map(|x| percent(*x)).collect();
        write!(
            f,
            "drafted {} tokens in {} drafts, accepted {} ({} %)",
            self.drafted_tokens,
            self.drafts,
            self.accepted_tokens,
            percent(self.acceptance_rate)
        )?;
        if self.drafts == 0 {
            return Ok(());
        }
        write!(
            f,
            "; by position {} %; {:.2} tokens a step with a draft",
            by_position.join(" "),
            self.mean_accepted_length
        )
    }
}
