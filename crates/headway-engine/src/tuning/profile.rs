//! The file: everything that was measured of a model's layers on a machine, and what was chosen.

use super::{
    key::{Here, Machine, Shape},
    rule::{Class, Setting, Weights},
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The form of the file.
pub(super) const FORMAT: u32 = 1;
/// The largest share of a ceiling: above 1 a cache was quicker than the memory that it is held against.
pub const LARGEST_SHARE: f64 = 10.0;

/// What `headway tune` keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The form of the file.
    pub format: u32,
    /// When it was measured, in UTC, as `2026-11-30T17:40:00Z`.
    pub measured: String,
    /// On what.
    pub machine: Machine,
    /// With which versions.
    pub versions: BTreeMap<String, String>,
    /// The layout of the cache that was asked for; `None`: the one that each backend prefers.
    #[serde(default)]
    pub kv_layout: Option<String>,
    /// What each class of steps counted.
    pub weights: Weights,
    /// The setting that was chosen.
    pub setting: Setting,
    /// One entry a shape of layers.
    pub layers: Vec<LayerProfile>,
}

/// Layers of one shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerProfile {
    /// The shape in words.
    pub what: String,
    /// The shape.
    pub shape: Shape,
    /// Layers that have it.
    pub layers: usize,
    /// The backend that was chosen.
    pub backend: String,
    /// Why nothing was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_measured: Option<String>,
    /// What was measured, in the order of preference without figures.
    pub candidates: Vec<Candidate>,
}

/// A backend in a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// Its name.
    pub backend: String,
    /// What all layers shared.
    pub setting: Setting,
    /// Tokens in a block, as measured.
    pub block_size: usize,
    /// As the rule has it: 1 is the quickest in every regime; `None`: not measured in all of them.
    pub score: Option<f64>,
    /// Why it was left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
    /// Its times.
    pub figures: Vec<Figure>,
}

/// A call's time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The batch, such as `decode_b8_c1024`.
    pub regime: String,
    /// Its class.
    pub class: Class,
    /// Microseconds of the middle sample.
    pub median_us: f64,
    /// Of the quickest.
    pub min_us: f64,
    /// Of the slowest.
    pub max_us: f64,
    /// The least time that the device could take, over this.
    pub share_of_ceiling: Option<f64>,
}

impl Candidate {
    /// Its time in a regime.
    pub fn median_us(&self, regime: &str) -> Option<f64> {
        self.figures.iter().find(|f| f.regime == regime).map(|f| f.median_us)
    }

    /// The geometric mean of its times in a class's regimes.
    pub fn mean_us(&self, class: Class) -> Option<f64> {
        let logs: Vec<f64> =
            self.figures.iter().filter(|f| f.class == class).map(|f| f.median_us.ln()).collect();
        (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
    }
}

impl LayerProfile {
    /// The candidate that was chosen, where any was measured.
    pub fn chosen(&self, setting: &Setting) -> Option<&Candidate> {
        self.candidates.iter().find(|c| c.backend == self.backend && c.setting == *setting)
    }

    /// Candidates that the chosen one can't be told from: in most regimes its samples and theirs lie in one range.
    pub fn within_spread(&self, setting: &Setting) -> Vec<&Candidate> {
        let Some(chosen) = self.chosen(setting) else { return vec![] };
        let is_it = |c: &&Candidate| {
            let same = |f: &&Figure| c.figures.iter().any(|o| o.regime == f.regime && o.overlaps(f));
            c.score.is_some()
                && !std::ptr::eq(*c, chosen)
                && 2 * chosen.figures.iter().filter(same).count() > chosen.figures.len()
        };
        self.candidates.iter().filter(is_it).collect()
    }

    /// The figures that chose its backend, in a line: the mean of each class, with the next best in brackets.
    pub fn because(&self, setting: &Setting) -> Option<String> {
        let chosen = self.chosen(setting)?;
        let others = self.candidates.iter().filter(|c| c.setting == *setting && c.backend != self.backend);
        let others: Vec<&Candidate> = others.filter(|c| c.score.is_some()).collect();
        let class = |class: Class| {
            let us = chosen.mean_us(class)?;
            let next = others.iter().filter_map(|c| Some((c.mean_us(class)?, &c.backend)));
            let next = next.min_by(|a, b| a.0.total_cmp(&b.0));
            let next = next.map(|(us, name)| format!(" ({name} {})", micros(us))).unwrap_or_default();
            Some(format!("{} {} us{next}", class.name(), micros(us)))
        };
        let all: Vec<String> = Class::ALL.into_iter().filter_map(class).collect();
        (!all.is_empty()).then(|| format!("with blocks of {}: {}", chosen.block_size, all.join(", ")))
    }
}

impl Figure {
    /// Whether its samples and another's lie beside one another in no order.
    fn overlaps(&self, other: &Self) -> bool {
        self.min_us.max(other.min_us) <= self.max_us.min(other.max_us)
    }
}

/// Another program's words as a profile keeps them: in one line of bounded length.
pub fn plain(text: &str) -> String {
    const MOST: usize = 1000;
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MOST).collect()
}

/// Microseconds with three digits.
fn micros(us: f64) -> String {
    match us {
        us if us < 10.0 => format!("{us:.2}"),
        us if us < 100.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

impl Profile {
    /// One of this form, with nothing chosen yet.
    pub fn new(here: &Here, measured: String, weights: Weights, layers: Vec<LayerProfile>) -> Self {
        Self {
            format: FORMAT,
            measured,
            machine: here.machine.clone(),
            versions: here.versions.clone(),
            kv_layout: None,
            weights,
            setting: Setting::default(),
            layers,
        }
    }

    /// The day that it was measured.
    pub fn day(&self) -> &str {
        self.measured.split('T').next().unwrap_or(&self.measured)
    }

    /// Where and with what it was measured.
    pub(super) fn here(&self) -> Here {
        Here { machine: self.machine.clone(), versions: self.versions.clone() }
    }

    /// Its shapes, with their layers.
    pub(super) fn shapes(&self) -> Vec<(&Shape, usize)> {
        self.layers.iter().map(|l| (&l.shape, l.layers)).collect()
    }

    /// As text.
    pub fn text(&self) -> String {
        // Maps have text keys and numbers are finite: it can't fail.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use headway_attention::LayerNeed;
    use proptest::prelude::*;

    /// A candidate with figures of two decodes and a prefill, as many as there are.
    pub fn candidate(backend: &str, block_size: Option<usize>, us: &[f64]) -> Candidate {
        let regimes =
            [("decode_b1", Class::Decode), ("decode_b8", Class::Decode), ("prefill", Class::Prefill)];
        let figure = |((regime, class), us): ((&str, Class), &f64)| Figure {
            regime: regime.into(),
            class,
            median_us: *us,
            min_us: *us,
            max_us: *us,
            share_of_ceiling: None,
        };
        Candidate {
            backend: backend.into(),
            setting: Setting { instruction_set: None, block_size },
            block_size: block_size.unwrap_or(16),
            score: None,
            left: None,
            figures: regimes.into_iter().zip(us).map(figure).collect(),
        }
    }

    pub fn layer() -> LayerProfile {
        LayerProfile {
            what: "1/1 heads of 128, bfloat16".into(),
            shape: Shape::of(&LayerNeed::default()),
            layers: 1,
            backend: "A".into(),
            not_measured: None,
            candidates: vec![],
        }
    }

    pub fn profile() -> Profile {
        let machine = Machine { platform: "cpu".into(), device: "A Processor".into(), ..Machine::default() };
        let here = Here { machine, versions: BTreeMap::from([("headway".into(), "1".into())]) };
        let candidates =
            vec![candidate("A", None, &[12.3, 40.0, 500.0]), candidate("B", None, &[13.0, 45.0, 400.0])];
        let mut layers = vec![LayerProfile { candidates, ..layer() }];
        let weights = Weights::default();
        let setting = super::super::rule::choose(&mut layers, &weights);
        Profile { setting, ..Profile::new(&here, "2026-11-30T17:40:00Z".into(), weights, layers) }
    }

    #[test]
    fn figures_say_why() {
        let p = profile();
        let l = &p.layers[0];
        let why = l.because(&p.setting).unwrap();
        assert_eq!(why, "with blocks of 16: decode 22.2 us (B 24.2), prefill 500 us (B 400)");
        assert_eq!((l.backend.as_str(), p.day()), ("A", "2026-11-30"));
        assert_eq!(layer().because(&p.setting), None);
    }

    #[test]
    fn what_cannot_be_told_apart_is_named() {
        let spread = |backend: &str, us: &[f64], by: f64| {
            let mut c = candidate(backend, None, us);
            for f in &mut c.figures {
                (f.min_us, f.max_us) = (f.min_us / by, f.max_us * by);
            }
            c
        };
        let of = |by: f64| {
            let (a, b) = (spread("A", &[10.0, 10.0, 10.0], by), spread("B", &[11.0, 11.0, 30.0], by));
            let mut l = [LayerProfile { candidates: vec![a, b], ..layer() }];
            let setting = super::super::rule::choose(&mut l, &Weights::default());
            l[0].within_spread(&setting).iter().map(|c| c.backend.clone()).collect::<Vec<_>>()
        };
        // Two of three regimes are most.
        assert_eq!((of(1.01), of(1.1)), (vec![], vec!["B".to_owned()]));
        assert_eq!(plain("a\nb\u{1b}"), "a b ");
        assert_eq!(plain(&"x".repeat(5000)).len(), 1000);
    }

    #[test]
    fn what_is_no_profile_is_refused_with_its_fault() {
        let good: serde_json::Value = serde_json::from_str(&profile().text()).unwrap();
        let error = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut v = good.clone();
            change(&mut v);
            Profile::parse(v.to_string().as_bytes()).unwrap_err()
        };
        assert!(error(&|v| v["format"] = 2.into()).contains("of form 2"));
        assert!(error(&|v| *v = serde_json::json!([])).contains("format"));
        assert!(error(&|v| v["more"] = 1.into()).contains("more"));
        assert!(error(&|v| v["layers"] = serde_json::json!([])).contains("no layers"));
        assert!(error(&|v| v["layers"][0]["backend"] = "C".into()).contains("C was chosen"));
        assert!(error(&|v| v["setting"]["block_size"] = 0.into()).contains("no block has"));
        assert!(error(&|v| v["weights"]["decode"] = (-1).into()).contains("weights"));
        let figure = |v: &mut serde_json::Value, x: f64| {
            v["layers"][0]["candidates"][1]["figures"][0]["median_us"] = x.into();
        };
        assert!(error(&|v| figure(v, 0.0)).contains("a time that is none"));
        assert!(error(&|v| figure(v, -5.0)).contains("decode_b1"));
        assert!(error(&|v| figure(v, 99.0)).contains("not between"));
        let candidate = |v: &mut serde_json::Value, name: &str, x: serde_json::Value| {
            v["layers"][0]["candidates"][1][name] = x;
        };
        assert!(error(&|v| candidate(v, "score", 0.5.into())).contains("B has a score below 1"));
        for share in [0.0, -1.0, 10.5] {
            let e = error(&|v| {
                v["layers"][0]["candidates"][0]["figures"][0]["share_of_ceiling"] = share.into();
            });
            assert!(e.contains("has a share of"), "{e}");
        }
        let twice = error(&|v| {
            let l = v["layers"][0].clone();
            v["layers"].as_array_mut().unwrap().push(l);
        });
        assert!(twice.contains("listed twice"), "{twice}");
        assert!(error(&|v| v["setting"]["block_size"] = 0.into()).ends_with("no block has 0 tokens"));
        assert!(error(&|v| v["measured"] = "yesterday".into()).contains("measured \"yesterday\" is no time"));
        let e = error(&|v| v["machine"]["device"] = "a\u{1b}[2J".into());
        assert_eq!(e, "machine.device has control characters");
        let e = error(&|v| candidate(v, "backend", "A\nB".into()));
        assert_eq!(e, "layers[0].candidates[1].backend has control characters");
        assert!(error(&|v| v["a\u{7f}"] = 1.into()).contains("control characters"));
        assert!(
            error(&|v| v["layers"][0]["what"] = "x".repeat(9000).into()).contains("a text of 9000 bytes")
        );
        for text in ["", "{", "null", "\"text\"", "{\"format\": 1}", "\u{0}"] {
            assert!(Profile::parse(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(Profile::parse(&[0xff, 0xfe]).is_err());
    }

    fn figures() -> impl Strategy<Value = Vec<f64>> {
        proptest::collection::vec((1u32..).prop_map(|us| f64::from(us) / 1e3), 0..4)
    }

    proptest! {
        /// Whatever was measured and chosen is read back as it was, and a choice is one of the measured.
        #[test]
        fn a_profile_survives_its_file(
            all in proptest::collection::vec(
                proptest::collection::vec(("[A-Z_+]{1,12}", proptest::option::of(1usize..257), figures()), 1..5), 1..4),
            decode in 1u8..,
            device in "\\PC{0,20}",
        ) {
            let layers: Vec<LayerProfile> = all
                .iter()
                .zip(1..)
                .map(|(cs, num_heads)| LayerProfile {
                    shape: Shape::of(&LayerNeed { num_heads, ..LayerNeed::default() }),
                    candidates: cs.iter().map(|(name, b, us)| candidate(name, *b, us)).collect(),
                    not_measured: Some("a test".into()),
                    ..layer()
                })
                .collect();
            let mut p = profile();
            p.machine.device = device;
            p.weights.decode = f64::from(decode) / 4.0;
            p.layers = layers;
            p.setting = super::super::rule::choose(&mut p.layers, &p.weights);
            let text = p.text();
            prop_assert_eq!(&Profile::parse(text.as_bytes()).unwrap(), &p);
            for l in &p.layers {
                let in_it: Vec<_> = l.candidates.iter().filter(|c| c.setting == p.setting && c.score.is_some()).collect();
                prop_assert!(in_it.is_empty() || in_it.iter().any(|c| c.backend == l.backend));
            }
        }

        /// Cut or changed anywhere, a file is refused or still a profile that holds; never a panic.
        #[test]
        fn a_spoilt_file_is_no_crash(at in 0usize..4000, byte in any::<u8>(), cut in any::<bool>()) {
            let mut text = profile().text().into_bytes();
            let at = at % text.len();
            if cut { text.truncate(at) } else { text[at] = byte }
            if let Ok(p) = Profile::parse(&text) {
                prop_assert!(p.check().is_ok());
            }
        }
    }
}
