//! Lifetime: the process. The instruction set that kernels are chosen by: detected once, lowered by
//! `HEADWAY_CPU_ISA`, then passed down by value. No kernel asks the processor by itself.

use std::{fmt, sync::OnceLock};

/// The environment variable that lowers the instruction set.
pub const ISA_ENV: &str = "HEADWAY_CPU_ISA";

/// An instruction set that kernels are compiled for, weakest first. Within one architecture a machine
/// that has a level has all lower ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Isa {
    /// What every processor of the target has; the reference for the others.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// [`Isa::Avx512`] with AVX512-BF16.
    Avx512Bf16,
    /// [`Isa::Avx512Bf16`] with AMX tiles of bfloat16, which the operating system has to grant.
    Amx,
    /// AArch64 Advanced SIMD.
    Neon,
}

/// `HEADWAY_CPU_ISA` asks for something that can't be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IsaError {
    /// Not the name of a level.
    #[error("{ISA_ENV}={asked}: no such instruction set; this machine has: {available}")]
    Unknown {
        /// What was asked for.
        asked: String,
        /// What the machine has, weakest first.
        available: String,
    },
    /// A level that the machine doesn't have.
    #[error(
        "{ISA_ENV}={asked}: this machine has no {asked}, it has: {available}; choose one of these or unset {ISA_ENV}"
    )]
    Missing {
        /// What was asked for.
        asked: Isa,
        /// What the machine has, weakest first.
        available: String,
    },
}

impl Isa {
    const ALL: [Self; 6] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx, Self::Neon];

    /// The level's name, as `HEADWAY_CPU_ISA` takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
            Self::Neon => "neon",
        }
    }

    /// The level of that name, in any case.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|i| i.name().eq_ignore_ascii_case(name))
    }

    /// The level in force: the machine's highest, or the lower one that `HEADWAY_CPU_ISA` names. Read
    /// once in the process.
    ///
    /// # Errors
    /// [`IsaError`], where the variable names no level or one that the machine doesn't have.
    pub fn detect() -> Result<Self, IsaError> {
        static IN_FORCE: OnceLock<Result<Isa, IsaError>> = OnceLock::new();
        IN_FORCE.get_or_init(|| Self::choose(std::env::var(ISA_ENV).ok().as_deref())).clone()
    }

    /// The highest level of this machine, whatever the environment says.
    pub fn of_machine() -> Self {
        Self::available().last().copied().unwrap_or(Self::Portable)
    }

    /// All levels that this machine can run, weakest first: tests go through them.
    pub fn available() -> &'static [Self] {
        static AVAILABLE: OnceLock<Vec<Isa>> = OnceLock::new();
        AVAILABLE.get_or_init(|| Self::ALL.into_iter().filter(|i| i.on_this_machine()).collect())
    }

    /// Whether this machine can run the level.
    pub fn is_available(self) -> bool {
        Self::available().contains(&self)
    }

    fn choose(asked: Option<&str>) -> Result<Self, IsaError> {
        let Some(asked) = asked.map(str::trim).filter(|a| !a.is_empty()) else {
            return Ok(Self::of_machine());
        };
        let available = || Self::available().iter().map(|i| i.name()).collect::<Vec<_>>().join(", ");
        match Self::by_name(asked) {
            None => Err(IsaError::Unknown { asked: asked.to_owned(), available: available() }),
            Some(i) if !i.on_this_machine() => Err(IsaError::Missing { asked: i, available: available() }),
            Some(i) => Ok(i),
        }
    }

    /// The levels of this architecture that the machine can't run, weakest first, and what each lacks.
    pub fn out_of_reach() -> Vec<(Self, String)> {
        let of_architecture = |i: &Self| (*i == Self::Neon) == cfg!(target_arch = "aarch64");
        Self::ALL.into_iter().filter(of_architecture).filter_map(|i| Some((i, i.lacks().err()?))).collect()
    }

    fn on_this_machine(self) -> bool {
        self.lacks().is_ok()
    }

    /// What the machine lacks for this level, in words; of the lower levels, if it lacks one of them.
    fn lacks(self) -> Result<(), String> {
        /// Ok where the processor has all of these.
        #[cfg(target_arch = "x86_64")]
        macro_rules! features {
            ($($feature:tt),*) => {{
                let all = [$(($feature, is_x86_feature_detected!($feature))),*];
                let lacking: Vec<_> = all.iter().filter(|(_, has)| !has).map(|(name, _)| *name).collect();
                match lacking.is_empty() {
                    true => Ok(()),
                    false => Err(format!("this processor lacks {}", lacking.join(", "))),
                }
            }};
        }
        match self {
            Self::Portable => Ok(()),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => features!("avx2", "fma", "f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.lacks()?;
                features!("avx512f", "avx512bw", "avx512dq", "avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                Self::Avx512.lacks()?;
                features!("avx512bf16")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => {
                // Tiles first: they say more than what the levels below lack.
                super::amx::ready()?;
                Self::Avx512Bf16.lacks()
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => match std::arch::is_aarch64_feature_detected!("neon") {
                true => Ok(()),
                false => Err("this processor lacks neon".into()),
            },
            #[allow(unreachable_patterns)]
            _ => Err("this is another architecture".into()),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_runs_portable_code_and_levels_rise() {
        let levels = Isa::available();
        assert_eq!(levels[0], Isa::Portable);
        assert!(levels.is_sorted());
        assert_eq!(Isa::choose(None), Ok(Isa::of_machine()));
    }

    #[test]
    fn what_is_out_of_reach_says_why_and_is_all_that_is_not_available() {
        let beyond = Isa::out_of_reach();
        assert!(beyond.iter().all(|(_, why)| !why.is_empty()), "{beyond:?}");
        let mut all: Vec<_> = Isa::available().to_vec();
        all.extend(beyond.iter().map(|(i, _)| *i));
        let foreign = if cfg!(target_arch = "x86_64") { 1 } else { 4 };
        if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
            assert_eq!(all.len() + foreign, Isa::ALL.len(), "{all:?}");
        }
    }

    #[test]
    fn the_level_can_be_lowered_by_name() {
        assert_eq!(Isa::choose(Some("Portable")), Ok(Isa::Portable));
        assert_eq!(Isa::choose(Some("  ")), Ok(Isa::of_machine()));
    }

    #[test]
    fn what_the_machine_lacks_is_an_error_that_names_what_it_has() {
        let e = Isa::choose(Some("sse9")).unwrap_err();
        assert!(matches!(&e, IsaError::Unknown { asked, .. } if asked == "sse9"));
        let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
        let e = Isa::choose(Some(foreign.name())).unwrap_err();
        assert!(e.to_string().contains("portable"), "{e}");
        assert!(matches!(e, IsaError::Missing { asked, .. } if asked == foreign));
    }
}
