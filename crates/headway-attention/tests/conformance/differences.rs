//! Where headway decides otherwise on purpose, and why. A case counts only where the difference is
//! exactly of this kind; the table's test decides that.

/// The kinds of deliberate difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A uniform batch that some captured full graph fits.
    FullGraphFits,
}

impl Why {
    /// The reason.
    pub fn reason(self) -> &'static str {
        match self {
            Self::FullGraphFits => {
                "every uniform batch that fits a captured full graph by padding uses the smallest such graph; the \
                 reference looks only at the next captured size and runs eagerly where that one is of another kind"
            }
        }
    }
}
