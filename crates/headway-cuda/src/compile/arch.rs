//! What kernels are compiled for.

use std::fmt;

/// A real architecture, as the compiler names it (`sm_90a`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Arch {
    capability: (u32, u32),
}

impl Arch {
    /// Those that kernels are built for ahead of time, oldest first.
    pub const KNOWN: [Self; 10] = [
        Self::of((8, 0)),
        Self::of((8, 6)),
        Self::of((8, 7)),
        Self::of((8, 9)),
        Self::of((9, 0)),
        Self::of((10, 0)),
        Self::of((10, 3)),
        Self::of((11, 0)),
        Self::of((12, 0)),
        Self::of((12, 1)),
    ];

    /// Of a device's compute capability.
    pub const fn of(capability: (u32, u32)) -> Self {
        Self { capability }
    }

    /// Compute capability: major, minor.
    pub const fn capability(self) -> (u32, u32) {
        self.capability
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.capability;
        // The letter admits instructions that only this generation has.
        let own = if matches!(self.capability, (9, 0) | (10, 0)) { "a" } else { "" };
        write!(f, "sm_{major}{minor}{own}")
    }
}

#[cfg(test)]
mod tests {
    use super::Arch;

    #[test]
    fn names_are_the_compilers() {
        let names = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)].map(|c| Arch::of(c).to_string());
        assert_eq!(names, ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_121"]);
    }
}
