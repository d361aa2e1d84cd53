//! Tokens from logits (`csrc/ops/sample.cu`).

use super::super::{Kernel, kernel_params};
use crate::{
    CudaExec, KernelSpec,
    device::{CudaError, Result},
    kernels::ops::rows::Rows,
};
use headway_tensor::{DType, DeviceMem, Exec, TensorError, TensorMut};
use std::sync::Arc;

const FILE: &str = "ops/sample.cu";
/// Threads of a block, and logits of a chunk, as the source has them.
const THREADS: u32 = 1024;
const CHUNK: usize = 1024;
/// The largest vocabulary: sums of its chunks lie in a block's shared memory.
pub(crate) const MOST_TOKENS: usize = 1 << 21;

kernel_params! {
    /// How a row's token is chosen.
    pub(crate) struct Choice {
        pub uniform: f64,
        pub row: i32, pub top_k: i32,
        pub temperature: f32, pub top_p: f32, pub min_p: f32, pub penalty: f32,
        /// Row of the bits of penalised tokens; −1: none.
        pub seen: i32, pub unused: i32,
    }
}

kernel_params! {
    struct Params {
        logits: u64, choices: u64, seen: u64, tokens: u64,
        stride: i64,
        vocab: i32, words: i32, index_bits: i32, unused: i32,
    }
}

/// Where a launch finds what it needs; all on one device.
pub(crate) struct Places<'a> {
    /// [`Choice`] of each row.
    pub choices: &'a Arc<dyn DeviceMem>,
    /// Bits of penalised tokens, whole words a row.
    pub seen: &'a Arc<dyn DeviceMem>,
    /// A token each, int32.
    pub tokens: &'a Arc<dyn DeviceMem>,
}

/// Words that have a bit for each token.
pub(crate) fn words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

pub(super) fn spec() -> KernelSpec {
    KernelSpec { file: FILE, entry: "sample", defines: vec![] }
}

/// The kernel, loaded.
///
/// # Errors
/// The compiler's words; the driver's.
pub(crate) fn load(cx: &CudaExec) -> Result<Arc<Kernel>> {
    cx.kernel(&spec())
}

/// Chooses a token for each of these choices, which `at.choices` begins with; `seen_rows` are those of `at.seen`.
///
/// # Errors
/// Logits of another type, shape or device; a choice of a row that is not there; smaller memory; the driver's.
pub(crate) fn sample(
    cx: &CudaExec,
    kernel: &Kernel,
    logits: TensorMut<'_>,
    vocab: usize,
    choices: &[Choice],
    at: &Places<'_>,
) -> Result<()> {
    let x = Rows::of_mut(cx, "sampling: logits", &logits)?;
    if x.dtype != DType::F32 {
        let (what, found, supported) = ("sampling: logits", x.dtype, "float32");
        return Err(TensorError::WrongDType { what, found, supported }.into());
    }
    if x.heads != 1 || x.width != vocab || vocab == 0 || vocab > MOST_TOKENS {
        return Err(TensorError::WrongShape {
            what: "sampling: logits".into(),
            found: vec![x.count(), x.width],
            expected: format!("[rows, {vocab}], of a vocabulary of 1 to {MOST_TOKENS}"),
        }
        .into());
    }
    let words = words(vocab);
    let seen_rows = at.seen.bytes() / (words * 4).max(1);
    for c in choices {
        let row = usize::try_from(c.row).is_ok_and(|r| r < x.tokens);
        if !row || c.seen >= 0 && c.seen as usize >= seen_rows {
            return Err(CudaError::Argument(format!("sampling: row {} of {}", c.row, x.tokens)));
        }
    }
    let room = [(at.choices, size_of::<Choice>()), (at.tokens, 4)];
    if room.iter().any(|(mem, size)| mem.bytes() < choices.len() * size) {
        return Err(CudaError::Argument(format!("sampling: no buffers for {} rows", choices.len())));
    }
    if [at.choices, at.seen, at.tokens].iter().any(|mem| mem.device() != cx.device()) {
        let (what, expected) = ("sampling: buffers", cx.device());
        return Err(TensorError::WrongDevice { what, found: at.choices.device(), expected }.into());
    }
    let params = Params {
        logits: x.arg.at,
        choices: at.choices.addr(),
        seen: at.seen.addr(),
        tokens: at.tokens.addr(),
        stride: x.arg.row / DType::F32.size() as i64,
        vocab: vocab as i32,
        words: words as i32,
        index_bits: (usize::BITS - (vocab - 1).leading_zeros()) as i32,
        unused: 0,
    };
    let shared = vocab.div_ceil(CHUNK) * size_of::<f64>();
    // SAFETY: rows and rows of bits are where the choices say, as checked; as many choices and tokens as blocks; a float
    // of shared memory for each chunk.
    unsafe { kernel.launch(cx, [choices.len() as u32, 1, 1], THREADS, shared as u32, &params) }
}
