//! A profile that holds here, as start-up asks it.

use super::{
    LayerProfile, Machine, Profile, Setting, TuningError, default_path,
    key::{Here, Shape, differences, other_layers, words},
    place::kept,
    unmeasured,
};
use crate::{
    options::EngineOptions,
    runner::{StartupError, decide, devices},
};
use headway_attention::{AttentionError, BackendRequest, LayerNeed, Registry};
use std::path::PathBuf;

/// What `--attention-backend` names instead of a backend.
pub const TUNED: &str = "tuned";

/// Whether an `--attention-backend` means the measured choice.
pub fn is_asked(backend: Option<&str>) -> bool {
    backend.is_some_and(|b| b.eq_ignore_ascii_case(TUNED))
}

/// Whether the measured choice is asked for.
///
/// # Errors
/// A profile that is named and not asked for; a kind of layer that alone should have the measured choice.
pub fn asked(options: &EngineOptions) -> Result<bool, StartupError> {
    let tuned = is_asked(options.attention_backend.as_deref());
    if let Some((kind, name)) = options.backend_per_kind.iter().find(|(_, name)| is_asked(Some(name))) {
        return Err(StartupError::Option {
            option: "--backend-per-kind",
            value: format!("{kind}={name}"),
            why: "tuned is measured for all layers: give --attention-backend tuned".into(),
        });
    }
    if let Some(name) = options.backend_config.keys().next().filter(|_| tuned) {
        return Err(StartupError::Option {
            option: "--config",
            value: format!("[backend.{name}]"),
            why: "headway tune measured without tables, and tuned is what it measured; leave one of the two out".into(),
        });
    }
    match &options.profile {
        Some(path) if !tuned => Err(StartupError::Option {
            option: "--profile",
            value: path.display().to_string(),
            why: "is read with --attention-backend tuned alone; give that too, or leave it out".into(),
        }),
        _ => Ok(tuned),
    }
}

/// Where a profile lies: as asked, or where [`default_path`] says.
pub(super) fn path<'a>(
    options: &EngineOptions,
    machine: &Machine,
    shapes: impl Iterator<Item = (&'a Shape, usize)>,
) -> Result<PathBuf, TuningError> {
    match &options.profile {
        Some(path) => Ok(path.clone()),
        None => default_path(machine, shapes),
    }
}

/// The layout that is asked for, by its right name.
pub(super) fn layout(options: &EngineOptions) -> Result<Option<String>, StartupError> {
    Ok(decide::layout(options.kv_layout.as_deref())?.map(|l| l.to_string()))
}

/// A profile of this machine, these versions and these layers.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// Its file.
    pub path: PathBuf,
    profile: Profile,
}

impl Tuned {
    /// The profile for these needs (one a layer).
    ///
    /// # Errors
    /// [`TuningError`]: none is there, it is no profile, or holds elsewhere, which it says with both sides; a backend
    /// that the program doesn't have.
    pub fn read(
        options: &EngineOptions,
        here: &Here,
        registry: &Registry,
        needs: &[LayerNeed],
    ) -> Result<Self, StartupError> {
        refuse_unmeasured(needs)?;
        let shapes = shapes(needs);
        let path = path(options, &here.machine, layers(&shapes).into_iter())?;
        let profile = Profile::read(&path)?;
        Ok(Self { path, profile }.held_against(here, registry, &shapes, layout(options)?)?)
    }

    /// The profile of a card that is named and not opened: of its machine, platform and capability are held against it.
    ///
    /// # Errors
    /// As [`Tuned::read`]; several that could be meant.
    pub fn of_named(
        options: &EngineOptions,
        platform: &str,
        capability: &str,
        registry: &Registry,
        needs: &[LayerNeed],
    ) -> Result<Self, StartupError> {
        refuse_unmeasured(needs)?;
        let shapes = shapes(needs);
        let is_it = |p: &Profile| {
            p.machine.platform == platform && p.machine.compute_capability.as_deref() == Some(capability)
        };
        let path = match &options.profile {
            Some(path) => path.clone(),
            None => kept(layers(&shapes).into_iter(), is_it).map_err(|e| match e {
                TuningError::Missing { path } => {
                    TuningError::MissingOf { path, platform: platform.into(), capability: capability.into() }
                }
                e => e,
            })?,
        };
        let profile = Profile::read(&path)?;
        let machine = Machine {
            platform: platform.into(),
            compute_capability: Some(capability.into()),
            ..profile.machine.clone()
        };
        let here = devices::here(machine, registry);
        Ok(Self { path, profile }.held_against(&here, registry, &shapes, layout(options)?)?)
    }

    /// The same, where it holds here.
    fn held_against(
        self,
        here: &Here,
        registry: &Registry,
        shapes: &[(Shape, usize)],
        layout: Option<String>,
    ) -> Result<Self, TuningError> {
        let p = &self.profile;
        let mut differ = differences(&p.here(), here);
        if p.kv_layout != layout {
            let text = |l: &Option<String>| l.clone().unwrap_or_else(|| "none".into());
            differ.push(format!(
                "--kv-layout: {} in the profile, {} here",
                text(&p.kv_layout),
                text(&layout)
            ));
        }
        differ.extend(other_layers(&p.shapes(), &layers(shapes)));
        let unknown = |l: &LayerProfile| {
            let why = match registry.get_on(&l.backend, &here.machine.platform).err()? {
                AttentionError::Unknown { .. } => "this program has none of that name".into(),
                e => e.to_string(),
            };
            Some(format!("backend {}: chosen in the profile, and {why}", l.backend))
        };
        differ.extend(p.layers.iter().find_map(unknown));
        match differ.is_empty() {
            true => Ok(self),
            false => Err(TuningError::Elsewhere { path: self.path, differences: differ }),
        }
    }

    /// What it chose and can't be had here, with its file.
    pub fn unusable(&self, why: impl ToString) -> TuningError {
        TuningError::Unusable { path: self.path.clone(), why: why.to_string() }
    }

    /// The instruction set that was chosen for attention, where it is among those of the device.
    ///
    /// # Errors
    /// It isn't.
    pub fn instruction_set(&self, here: &[&str]) -> Result<Option<&str>, TuningError> {
        let chosen = self.profile.setting.instruction_set.as_deref();
        match chosen.filter(|c| !here.iter().any(|h| h.eq_ignore_ascii_case(c))) {
            None => Ok(chosen),
            Some(c) => {
                let all = if here.is_empty() { "it has none".into() } else { here.join(", ") };
                Err(self.unusable(format!("instruction set {c} is not one of this machine's: {all}")))
            }
        }
    }

    fn layer(&self, need: &LayerNeed) -> Option<&LayerProfile> {
        let shape = Shape::of(need);
        self.profile.layers.iter().find(|l| l.shape == shape)
    }

    /// What selection is asked for a layer: the measured choice, where `--backend-per-kind` names no other.
    pub fn request(&self, need: &LayerNeed, options: &EngineOptions) -> BackendRequest {
        BackendRequest {
            backend: self.layer(need).map(|l| l.backend.clone()),
            per_kind: options.backend_per_kind.clone(),
        }
    }

    /// The figures behind a layer's backend, in a line; `None` where another backend was asked for.
    pub fn because(&self, need: &LayerNeed, backend: &str) -> Option<String> {
        let layer = self.layer(need).filter(|l| l.backend == backend)?;
        let day = self.profile.day();
        match (&layer.not_measured, layer.because(&self.profile.setting)) {
            (_, Some(figures)) => Some(format!("measured {day} {figures}")),
            (Some(why), None) => Some(format!("not measured {day}: {why}")),
            (None, None) => None,
        }
    }

    /// What was chosen for all layers.
    pub fn setting(&self) -> &Setting {
        &self.profile.setting
    }

    /// The profile in words, for the report.
    pub fn describe(&self) -> String {
        let p = &self.profile;
        format!("measured {} on {}; {}", p.day(), p.machine.describe(), self.path.display())
    }
}

/// Refuses a model of which nothing would be measured.
fn refuse_unmeasured(needs: &[LayerNeed]) -> Result<(), TuningError> {
    if needs.iter().any(|n| unmeasured(n).is_none()) {
        return Ok(());
    }
    let mut all: Vec<String> = needs.iter().map(words).collect();
    all.dedup();
    Err(TuningError::NothingMeasured { what: all.join("; ") })
}

fn layers(shapes: &[(Shape, usize)]) -> Vec<(&Shape, usize)> {
    shapes.iter().map(|(s, n)| (s, *n)).collect()
}

/// The shapes of needs, each with the number of layers that have it, in order.
fn shapes(needs: &[LayerNeed]) -> Vec<(Shape, usize)> {
    let mut out: Vec<(Shape, usize)> = vec![];
    for shape in needs.iter().map(Shape::of) {
        match out.iter_mut().find(|(s, _)| *s == shape) {
            Some((_, n)) => *n += 1,
            None => out.push((shape, 1)),
        }
    }
    out
}
