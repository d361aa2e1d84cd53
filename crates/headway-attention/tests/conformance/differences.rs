//! Where headway decides otherwise on purpose, and why. A case counts only where the difference is
//! exactly of this kind; the table's test decides that.

/// The kinds of deliberate difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A uniform batch that some captured full graph fits.
    FullGraphFits,
    /// Layers that keep all tokens but look back differently far.
    WindowsMayDiffer,
    /// A rule book without kernel block sizes.
    AnyBlockSize,
    /// Groups of attention layers share metadata too.
    AllKindsShare,
    /// Builders of kinds of layer that no backend here implements.
    OutOfScope,
    /// A named backend of another platform.
    OtherPlatform,
    /// A latent-attention backend named for a model without latent dimensions.
    NoLatentDimensions,
}

impl Why {
    /// The reason.
    pub fn reason(self) -> &'static str {
        match self {
            Self::FullGraphFits => {
                "every uniform batch that fits a captured full graph by padding uses the smallest such graph; the \
                 reference looks only at the next captured size and runs eagerly where that one is of another kind"
            }
            Self::WindowsMayDiffer => {
                "layers that keep all their tokens can share a block table however far back they look; the reference \
                 refuses two windows in one group"
            }
            Self::AllKindsShare => {
                "groups that differ in the block table alone share metadata whatever their kind (the windows of a \
                 hybrid model); the reference does it for state-space layers only"
            }
            Self::OutOfScope => {
                "out of scope until a backend here implements them: the builders of GDN, LINEAR, SHORT_CONV, MAMBA1, \
                 FLASH_ATTN_MLA_SPARSE, FLASHINFER_MLA_SPARSE"
            }
            Self::OtherPlatform => {
                "a backend that runs on another platform is refused for it; the reference asks its rule book only and \
                 takes a CPU backend on a GPU where the user names it"
            }
            Self::NoLatentDimensions => {
                "dimensions that a model doesn't have are no reason; the reference reads an absent one as 1"
            }
            Self::AnyBlockSize => {
                "a rule book without kernel block sizes takes any, in selection as at start-up; the reference \
                 accepts it in selection and then finds no common size"
            }
        }
    }
}
