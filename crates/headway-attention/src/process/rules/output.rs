//! Whether a backend writes its output as 8-bit codes.

use super::RuleBook;
use crate::{AttentionError, Result};
use headway_tensor::RowQuant;

impl RuleBook {
    /// Whether layers of this backend write outputs of heads of `head_size_v` as `quant` says, in the kernel's last
    /// step. A head is finished by itself, so a block of values with a scale must lie in one head.
    ///
    /// # Errors
    /// [`AttentionError::Unsupported`], with what to do.
    pub fn check_output_quant(&self, quant: &RowQuant, head_size_v: usize) -> Result<()> {
        let refuse = |what: String, remedy: String| {
            Err(AttentionError::Unsupported { backend: self.name.to_string(), what, remedy })
        };
        let kind = quant.kind();
        if !self.output_quants.contains(&kind) {
            let can: Vec<_> = self.output_quants.iter().map(|k| k.name()).collect();
            let can = if can.is_empty() { "no quantised output".into() } else { can.join(", ") };
            return refuse(
                format!("output as {kind}"),
                format!("it writes {can}: quantise the output afterwards, or choose another backend"),
            );
        }
        if !quant.fits(head_size_v) {
            return refuse(
                format!("output as {quant:?} with value heads of {head_size_v}"),
                "scales must be positive and finite, and whole blocks must make a head; quantise the output afterwards"
                    .into(),
            );
        }
        Ok(())
    }
}
