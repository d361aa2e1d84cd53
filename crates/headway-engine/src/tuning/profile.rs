//! The file: everything that was measured of a model's layers on a machine, and what was chosen.

use super::{
    TuningError,
    key::{Here, Machine, Shape, digest},
    rule::{Class, Setting, Weights},
};
use crate::sources::FetchOptions;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
};

/// The form of the file.
const FORMAT: u32 = 1;
/// A profile of a thousand layers with a hundred candidates each is smaller.
const LARGEST: u64 = 64 << 20;
/// Tokens in a block, at most.
const LARGEST_BLOCK: usize = 1 << 20;

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

    /// Reads a profile.
    ///
    /// # Errors
    /// A file that isn't there, can't be read, or is no profile.
    pub fn read(path: &Path) -> Result<Self, TuningError> {
        let file = |why: String| TuningError::File { path: path.to_owned(), why };
        match fs::metadata(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(TuningError::Missing { path: path.to_owned() });
            }
            Err(e) => return Err(file(e.to_string())),
            Ok(m) if !m.is_file() => return Err(file("is no file".into())),
            Ok(m) if m.len() > LARGEST => {
                return Err(file(format!("is {} bytes, and no profile is that large", m.len())));
            }
            Ok(_) => {}
        }
        let bytes = fs::read(path).map_err(|e| file(e.to_string()))?;
        Self::parse(&bytes).map_err(|why| TuningError::Corrupt { path: path.to_owned(), why })
    }

    /// Reads a profile's text.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let value: serde_json::Value = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        // Said first, since another form has other fields.
        match value.get("format").and_then(serde_json::Value::as_u64) {
            Some(f) if f == u64::from(FORMAT) => {}
            Some(f) => return Err(format!("of form {f}, and this headway reads form {FORMAT}")),
            None => return Err("it has no number \"format\"".into()),
        }
        let profile: Self = serde_json::from_value(value).map_err(|e| e.to_string())?;
        profile.check()?;
        Ok(profile)
    }

    /// Holds what the types can't say.
    fn check(&self) -> Result<(), String> {
        self.weights.check()?;
        let block = |b: usize| (1..=LARGEST_BLOCK).contains(&b);
        if self.setting.block_size.is_some_and(|b| !block(b)) {
            return Err(format!("no block has {:?} tokens", self.setting.block_size));
        }
        if self.layers.is_empty() {
            return Err("it has no layers".into());
        }
        for l in &self.layers {
            let wrong = |why: String| Err(format!("{}: {why}", l.what));
            let times = l.candidates.iter().flat_map(|c| &c.figures);
            let positive = |t: &f64| t.is_finite() && *t > 0.0;
            for f in times {
                let shares = f.share_of_ceiling.iter().all(positive);
                if ![f.median_us, f.min_us, f.max_us].iter().all(positive) || !shares {
                    return wrong(format!("{} has a time that is none", f.regime));
                }
            }
            if let Some(c) = l.candidates.iter().find(|c| !block(c.block_size)) {
                return wrong(format!("{}: no block has {} tokens", c.backend, c.block_size));
            }
            if l.not_measured.is_none() && l.chosen(&self.setting).is_none_or(|c| c.figures.is_empty()) {
                return wrong(format!("{} was chosen, and there are no figures of it", l.backend));
            }
        }
        Ok(())
    }

    /// As text.
    pub fn text(&self) -> String {
        // Maps have text keys and numbers are finite: it can't fail.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Makes the folder of a profile's place, and tries whether a file can be written there.
    ///
    /// # Errors
    /// The file system's; a place that is no file's.
    pub fn check_place(path: &Path) -> Result<(), TuningError> {
        let file = |e: std::io::Error| TuningError::File { path: path.to_owned(), why: e.to_string() };
        if path.is_dir() {
            return Err(TuningError::File { path: path.to_owned(), why: "is a folder; name a file".into() });
        }
        let (folder, beside) = beside(path);
        fs::create_dir_all(folder).map_err(file)?;
        fs::File::create(&beside).and_then(|_| fs::remove_file(&beside)).map_err(file)
    }

    /// Writes it in place of what is there; the folder is made.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, path: &Path) -> Result<(), TuningError> {
        let file = |e: std::io::Error| TuningError::File { path: path.to_owned(), why: e.to_string() };
        let (folder, beside) = beside(path);
        fs::create_dir_all(folder).map_err(file)?;
        let written = fs::File::create(&beside).and_then(|mut f| {
            f.write_all(self.text().as_bytes())?;
            f.sync_all()
        });
        let done = written.and_then(|()| fs::rename(&beside, path));
        done.inspect_err(|_| drop(fs::remove_file(&beside))).map_err(file)
    }
}

/// The folder of a file, and where it is written before it is renamed into its place: whole, or not there.
fn beside(path: &Path) -> (&Path, PathBuf) {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    (folder, path.with_extension(format!("{}.part", std::process::id())))
}

/// The folder of profiles.
fn folder() -> Result<PathBuf, TuningError> {
    let options = FetchOptions::from_env().map_err(|e| TuningError::NoFolder { why: e.to_string() })?;
    Ok(options.cache_dir.join("profiles"))
}

/// The one profile of these layers that is kept and `is_it`.
///
/// # Errors
/// None, or several; one that can't be read.
pub(super) fn kept<'a>(
    layers: impl Iterator<Item = (&'a Shape, usize)>,
    is_it: impl Fn(&Profile) -> bool,
) -> Result<PathBuf, TuningError> {
    let (folder, ending) = (folder()?, format!("-{}.json", digest(layers)));
    let names = fs::read_dir(&folder).into_iter().flatten().filter_map(|e| Some(e.ok()?.path()));
    let of_layers = names.filter(|p| p.to_str().is_some_and(|p| p.ends_with(&ending)));
    let mut found: Vec<PathBuf> = vec![];
    for path in of_layers {
        if is_it(&Profile::read(&path)?) {
            found.push(path);
        }
    }
    found.sort();
    match found.len() {
        0 => Err(TuningError::Missing { path: folder.join(format!("*{ending}")) }),
        1 => Ok(found.remove(0)),
        _ => Err(TuningError::Several { paths: found }),
    }
}

/// The file of a model's shape on a device, in `profiles` in headway's cache folder.
///
/// # Errors
/// No such folder.
pub fn default_path<'a>(
    machine: &Machine,
    layers: impl Iterator<Item = (&'a Shape, usize)>,
) -> Result<PathBuf, TuningError> {
    Ok(folder()?.join(format!("{}-{}.json", machine.slug(), digest(layers))))
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
    fn a_file_is_replaced_as_a_whole_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made").join("p.json");
        assert!(matches!(Profile::read(&path), Err(TuningError::Missing { .. })));
        let mut p = profile();
        p.write(&path).unwrap();
        p.measured = "2026-12-01T00:00:00Z".into();
        p.write(&path).unwrap();
        assert_eq!(Profile::read(&path).unwrap(), p);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        assert!(matches!(Profile::read(folder.path()), Err(TuningError::File { .. })));
        assert!(matches!(p.write(&path.join("below a file")), Err(TuningError::File { .. })));
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
            device in ".{0,20}",
        ) {
            let layers: Vec<LayerProfile> = all
                .iter()
                .map(|cs| LayerProfile {
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
