//! How figures become a choice.
//!
//! A candidate's score for a layer is the weighted geometric mean of its times, each over the best time that any
//! candidate of that layer has in the same regime: 1.0 is the quickest everywhere, 1.1 takes a tenth longer. The
//! regimes of a class (decode, prefill, mixed) share its weight. A setting's score (the CPU's instruction set and the
//! block size, which all layers share) is the geometric mean of the best candidate's, weighted by the number of layers.
//! What would be taken without figures comes first and stays, unless another is better by more than [`MARGIN`].

use super::profile::{Candidate, LayerProfile};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// How much better than what would be taken anyway another must be: less is noise.
pub const MARGIN: f64 = 0.02;

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// One new token a request.
    Decode,
    /// A prompt.
    Prefill,
    /// Both.
    Mixed,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Decode, Self::Prefill, Self::Mixed];

    /// As options and files write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
        }
    }
}

/// What each class counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// Of all decode regimes together.
    pub decode: f64,
    /// Of all prefill regimes.
    pub prefill: f64,
    /// Of all mixed regimes.
    pub mixed: f64,
}

impl Default for Weights {
    /// Most steps of a server are decodes.
    fn default() -> Self {
        Self { decode: 2.0, prefill: 1.0, mixed: 1.0 }
    }
}

impl Weights {
    /// Of a class.
    pub fn of(&self, class: Class) -> f64 {
        match class {
            Class::Decode => self.decode,
            Class::Prefill => self.prefill,
            Class::Mixed => self.mixed,
        }
    }

    /// Whether they can weigh anything.
    pub(super) fn check(&self) -> Result<(), String> {
        let all = Class::ALL.map(|c| self.of(c));
        match all.iter().all(|w| (0.0..=1e6).contains(w)) && all.iter().sum::<f64>() > 0.0 {
            true => Ok(()),
            false => Err("weights are numbers from 0 to 1000000, and one is not 0".into()),
        }
    }
}

impl FromStr for Weights {
    type Err = String;
    /// `decode=2,prefill=1,mixed=1`; what isn't named is 0.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut weights = Self { decode: 0.0, prefill: 0.0, mixed: 0.0 };
        let mut named = vec![];
        for pair in text.split(',') {
            let wrong = || format!("{pair:?} is not CLASS=NUMBER with a class of decode, prefill, mixed");
            let (class, value) = pair.split_once('=').ok_or_else(wrong)?;
            let class = class.trim();
            if named.contains(&class) {
                return Err(format!("{class} is named twice"));
            }
            named.push(class);
            let to = match class {
                "decode" => &mut weights.decode,
                "prefill" => &mut weights.prefill,
                "mixed" => &mut weights.mixed,
                _ => return Err(wrong()),
            };
            *to = value.trim().parse().map_err(|_| wrong())?;
        }
        weights.check().map(|()| weights)
    }
}

/// What all layers share while they are measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setting {
    /// The CPU's instruction set for attention.
    pub instruction_set: Option<String>,
    /// Tokens in a block; `None`: what each backend prefers.
    pub block_size: Option<usize>,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.block_size.map(|b| format!("blocks of {b}"));
        let parts: Vec<_> = self.instruction_set.iter().cloned().chain(blocks).collect();
        f.pad(&parts.join(", "))
    }
}

/// The score of each candidate of a layer; `None` where it lacks a regime that another has.
pub fn scores(candidates: &[Candidate], weights: &Weights) -> Vec<Option<f64>> {
    let mut regimes: Vec<(Class, &str)> = vec![];
    for f in candidates.iter().flat_map(|c| &c.figures) {
        if !regimes.contains(&(f.class, f.regime.as_str())) {
            regimes.push((f.class, &f.regime));
        }
    }
    // A regime's share of its class, and its best time.
    let of_class = |class: Class| regimes.iter().filter(|r| r.0 == class).count() as f64;
    let weighed: Vec<(f64, f64, &str)> = regimes
        .iter()
        .map(|&(class, regime)| {
            let times = candidates.iter().filter_map(|c| c.median_us(regime));
            (weights.of(class) / of_class(class), times.fold(f64::INFINITY, f64::min), regime)
        })
        .collect();
    let all: f64 = weighed.iter().map(|w| w.0).sum();
    let score = |c: &Candidate| -> Option<f64> {
        let mut sum = 0.0;
        for &(weight, best, regime) in &weighed {
            sum += weight * (c.median_us(regime)? / best).ln();
        }
        // Weights that are all of classes which weren't measured choose nothing.
        (all > 0.0).then(|| (sum / all).exp())
    };
    candidates.iter().map(score).collect()
}

/// Scores all candidates and chooses the setting, and a backend for each layer.
pub fn choose(layers: &mut [LayerProfile], weights: &Weights) -> Setting {
    for layer in layers.iter_mut() {
        for (i, score) in scores(&layer.candidates, weights).into_iter().enumerate() {
            // As many digits as a file keeps exactly.
            layer.candidates[i].score = score.map(|s| (s * 1e4).round() / 1e4);
        }
    }
    let mut settings: Vec<Setting> = vec![];
    for c in layers.iter().flat_map(|l| &l.candidates).filter(|c| c.score.is_some()) {
        if !settings.contains(&c.setting) {
            settings.push(c.setting.clone());
        }
    }
    // Of a layer in a setting: the best score.
    let best = |l: &LayerProfile, s: &Setting| {
        let in_it = l.candidates.iter().filter(|c| c.setting == *s);
        in_it.filter_map(|c| c.score).reduce(f64::min)
    };
    let measured: Vec<&LayerProfile> =
        layers.iter().filter(|l| l.candidates.iter().any(|c| c.score.is_some())).collect();
    let count: f64 = measured.iter().map(|l| l.layers as f64).sum();
    let total = |s: &Setting| -> Option<f64> {
        let mut sum = 0.0;
        for l in &measured {
            sum += l.layers as f64 * best(l, s)?.ln();
        }
        (count > 0.0).then(|| (sum / count).exp())
    };
    let totals: Vec<Option<f64>> = settings.iter().map(total).collect();
    let chosen = first_or_better(&totals).map(|i| settings[i].clone()).unwrap_or_default();
    for layer in layers.iter_mut() {
        let in_it: Vec<Option<f64>> =
            layer.candidates.iter().map(|c| c.score.filter(|_| c.setting == chosen)).collect();
        if let Some(i) = first_or_better(&in_it) {
            layer.backend = layer.candidates[i].backend.clone();
        }
    }
    chosen
}

/// The first score, or the least where that is better by more than [`MARGIN`].
fn first_or_better(scores: &[Option<f64>]) -> Option<usize> {
    let there: Vec<(usize, f64)> = scores.iter().enumerate().filter_map(|(i, s)| Some((i, (*s)?))).collect();
    let first = *there.first()?;
    let least = there.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(if least.1 * (1.0 + MARGIN) < first.1 { least.0 } else { first.0 })
}

#[cfg(test)]
mod tests {
    use super::{super::profile::tests::candidate, *};

    fn layer(layers: usize, candidates: Vec<Candidate>) -> LayerProfile {
        LayerProfile { layers, candidates, ..super::super::profile::tests::layer() }
    }

    #[test]
    fn a_score_is_a_weighted_geometric_mean_of_ratios() {
        let all = [candidate("A", None, &[10.0, 40.0, 100.0]), candidate("B", None, &[20.0, 10.0, 100.0])];
        // Two decodes and a prefill.
        let s = scores(&all, &Weights { decode: 2.0, prefill: 1.0, mixed: 0.0 });
        let expect = |ratios: [f64; 3]| ((ratios[0].ln() + ratios[1].ln() + ratios[2].ln()) / 3.0).exp();
        assert!((s[0].unwrap() - expect([1.0, 4.0, 1.0])).abs() < 1e-12);
        assert!((s[1].unwrap() - expect([2.0, 1.0, 1.0])).abs() < 1e-12);
        let only_prefill = scores(&all, &"prefill=1".parse().unwrap());
        assert_eq!(only_prefill, [Some(1.0), Some(1.0)]);
        assert_eq!(scores(&all, &"mixed=1".parse().unwrap()), [None, None]);
    }

    #[test]
    fn who_lacks_a_regime_is_not_chosen() {
        let all = [candidate("A", None, &[10.0]), candidate("B", None, &[20.0, 10.0, 5.0])];
        let s = scores(&all, &Weights::default());
        assert!(s[0].is_none() && (s[1].unwrap() - 2f64.powf(1.0 / 3.0)).abs() < 1e-12, "{s:?}");
        let mut layers = [layer(1, all.to_vec())];
        choose(&mut layers, &Weights::default());
        assert_eq!(layers[0].backend, "B");
    }

    #[test]
    fn what_would_be_taken_anyway_stays_within_the_margin() {
        let of = |b: f64| {
            let all = vec![candidate("A", None, &[10.0, 10.0, 10.0]), candidate("B", None, &[b, b, b])];
            let mut layers = [layer(1, all)];
            choose(&mut layers, &Weights::default());
            layers[0].backend.clone()
        };
        assert_eq!([of(9.9), of(9.5), of(10.0), of(11.0)], ["A", "B", "A", "A"]);
    }

    #[test]
    fn one_setting_serves_all_layers_by_their_number() {
        let (small, large) = (Some(16), Some(64));
        let windowed =
            |n| layer(n, vec![candidate("A", small, &[10.0; 3]), candidate("A", large, &[20.0; 3])]);
        let full = |n| layer(n, vec![candidate("A", small, &[20.0; 3]), candidate("A", large, &[10.0; 3])]);
        assert_eq!(choose(&mut [windowed(5), full(1)], &Weights::default()).block_size, small);
        assert_eq!(choose(&mut [windowed(1), full(5)], &Weights::default()).block_size, large);
        // A layer that can't have a setting rules it out.
        let only = layer(1, vec![candidate("B", small, &[1.0; 3])]);
        assert_eq!(choose(&mut [windowed(1), full(5), only], &Weights::default()).block_size, small);
        assert_eq!(choose(&mut [layer(1, vec![])], &Weights::default()), Setting::default());
    }

    #[test]
    fn weights_by_name() {
        assert_eq!("decode=2, prefill=1,mixed=1".parse(), Ok(Weights::default()));
        for bad in ["", "decode", "decode=x", "chunk=1", "decode=0", "decode=-1", "decode=nan", "prefill=inf"]
        {
            assert!(bad.parse::<Weights>().is_err(), "{bad}");
        }
        let twice = "decode=1,prefill=1, decode=2".parse::<Weights>();
        assert_eq!(twice, Err("decode is named twice".into()));
    }
}
