//! The table of builder metadata: what each builder makes of one batch. Every field of a case's answer is
//! compared; a field that a test doesn't know makes the case not understood.

mod batch;
mod fields;
mod flash;
mod flashinfer;
mod latent;
mod state_space;

use crate::{
    Outcome,
    differences::Why,
    read::{Table, text},
};
use serde_json::Value;

pub fn metadata(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    let outcome = match text(&i["builder"]) {
        "FLASH_ATTN" => flash::flash_attn(i, e),
        "TRITON_ATTN" => flash::triton(i, e),
        "FLASHINFER" => flashinfer::flashinfer(i, e),
        "MAMBA2" => state_space::mamba2(i, e),
        "MAMBA2_CHUNKS" => state_space::chunks(i, e),
        "MAMBA_BLOCK_TABLE" => state_space::block_table(i, e),
        "CAUSAL_CONV1D" => state_space::conv(i, e),
        b @ ("TRITON_MLA" | "FLASHMLA" | "FLASH_ATTN_MLA" | "FLASHINFER_MLA" | "CUTLASS_MLA") => {
            latent::mla(b, i, e)
        }
        "GDN" | "LINEAR" | "SHORT_CONV" | "MAMBA1" | "FLASH_ATTN_MLA_SPARSE" | "FLASHINFER_MLA_SPARSE" => {
            return Outcome::Deliberate(Why::OutOfScope);
        }
        other => return Outcome::NotUnderstood(format!("builder {other}")),
    };
    outcome.unwrap_or_else(|e| Outcome::Differs(format!("error {e}")))
}
