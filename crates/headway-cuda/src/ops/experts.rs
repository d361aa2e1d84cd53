//! Mixtures of experts as the device holds them: one matrix of all experts' gates and ups, one of their downs. And the
//! buffers of a step. Both live as long as the model; the kernels are in `kernels::ops::experts`.

use super::{
    linear::{alloc, check, chosen, weights as all_weights},
    upload::Upload,
};
use crate::{
    CudaExec,
    device::{CudaError, Result},
    kernels::ops::experts as kernels,
};
use headway_tensor::{
    Activation, DType, DeviceMem, Exec, ExpertBuffers, ExpertLimits, Experts, ExpertsSpec, LinearPart,
    Routing, TensorError,
};
use std::sync::Arc;

/// All experts' matrices of one kind.
pub(crate) struct Matrices {
    /// `[experts, out, in]`, contiguous.
    pub weights: Arc<dyn DeviceMem>,
    /// `[experts, out]` of float32.
    pub bias: Option<Arc<dyn DeviceMem>>,
}

/// A layer's experts.
pub(crate) struct CudaExperts {
    pub routing: Routing,
    /// `[experts]` of float32.
    pub correction: Option<Arc<dyn DeviceMem>>,
    pub activation: Activation,
    /// Of matrices and rows.
    pub dtype: DType,
    pub limits: ExpertLimits,
    /// `[experts, 2 x intermediate, hidden]`, gates before ups.
    pub gate_up: Matrices,
    /// `[experts, hidden, intermediate]`.
    pub down: Matrices,
}

impl CudaExperts {
    /// Takes the experts to the device, and loads the kernels.
    ///
    /// # Errors
    /// A routing that can't be; as many experts or corrections as it doesn't say; experts of different shapes; float32;
    /// no memory; the compiler's words.
    pub fn load(cx: &CudaExec, spec: ExpertsSpec, compute: Option<DType>) -> Result<Self> {
        let ExpertsSpec { routing, correction, activation, experts } = spec;
        let (dtype, limits) = Self::check(&routing, correction.as_deref(), &experts, compute)?;
        let ExpertLimits { hidden, intermediate, .. } = limits;
        let (first, second): (Vec<_>, Vec<_>) =
            experts.into_iter().map(|e| (e.gate_up, vec![e.down])).unzip();
        let gate_up = stack(cx, &first, [2 * intermediate, hidden], dtype)?;
        let down = stack(cx, &second, [hidden, intermediate], dtype)?;
        let correction = match correction {
            Some(values) => {
                let mem = alloc(cx, values.len() * 4)?;
                cx.upload(&mem, 0, bytemuck::cast_slice(&values));
                Some(mem)
            }
            None => None,
        };
        kernels::load(cx, dtype)?;
        cx.check()?;
        Ok(Self { routing, correction, activation, dtype, limits, gate_up, down })
    }

    /// The type and the sizes.
    fn check(
        routing: &Routing,
        correction: Option<&[f32]>,
        experts: &[headway_tensor::ExpertParts],
        compute: Option<DType>,
    ) -> Result<(DType, ExpertLimits)> {
        routing.check()?;
        let count = |what: &str, found: usize| match found == routing.experts {
            true => Ok(()),
            false => Err(TensorError::WrongShape {
                what: format!("{what} of a mixture of experts"),
                found: vec![found],
                expected: format!("[{}], one an expert", routing.experts),
            }),
        };
        count("weights", experts.len())?;
        correction.map_or(Ok(()), |c| count("score correction", c.len()))?;
        let dtype = chosen(experts.iter().flat_map(|e| e.gate_up.iter().chain([&e.down])), compute)?;
        if !matches!(dtype, DType::BF16 | DType::F16) {
            let supported = "bfloat16 and float16 (on the CPU also float32)";
            return Err(
                TensorError::WrongDType { what: "a mixture of experts", found: dtype, supported }.into()
            );
        }
        let (hidden, intermediate) = (experts[0].down.weight.rows(), experts[0].down.weight.cols());
        for (e, parts) in experts.iter().enumerate() {
            for part in &parts.gate_up {
                check(part, hidden)?;
            }
            check(&parts.down, intermediate)?;
            let both: usize = parts.gate_up.iter().map(|p| p.weight.rows()).sum();
            if [both, parts.down.weight.rows()] != [2 * intermediate, hidden] || hidden * intermediate == 0 {
                return Err(TensorError::WrongShape {
                    what: format!("gate and up, and down, of expert {e}"),
                    found: vec![both, hidden, parts.down.weight.rows(), intermediate],
                    expected: format!("[{}, {hidden}] and [{hidden}, {intermediate}]", 2 * intermediate),
                }
                .into());
            }
        }
        let limits = ExpertLimits { experts: routing.experts, top_k: routing.top_k, hidden, intermediate };
        Ok((dtype, limits))
    }
}

/// All experts' parts one below the other.
fn stack(
    cx: &CudaExec,
    experts: &[Vec<LinearPart>],
    [n_out, n_in]: [usize; 2],
    dtype: DType,
) -> Result<Matrices> {
    let weights = alloc(cx, experts.len() * n_out * n_in * dtype.size())?;
    let biased = experts.iter().flatten().any(|p| p.bias.is_some());
    let bias = biased.then(|| alloc(cx, experts.len() * n_out * DType::F32.size())).transpose()?;
    if let Some(bias) = &bias {
        cx.zero(bias, 0, bias.bytes());
    }
    let upload = Upload::of(cx, all_weights(experts.iter().flatten()))?;
    let mut row = 0;
    for part in experts.iter().flatten() {
        upload.put(&weights, row * n_in * dtype.size(), &part.weight, dtype)?;
        if let (Some(to), Some(from)) = (&bias, &part.bias) {
            upload.put(to, row * DType::F32.size(), from, DType::F32)?;
        }
        row += part.weight.rows();
    }
    Ok(Matrices { weights, bias })
}

impl Experts for CudaExperts {
    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn limits(&self) -> ExpertLimits {
        self.limits
    }

    fn bytes(&self) -> usize {
        let of = |m: &Matrices| m.weights.bytes() + m.bias.as_ref().map_or(0, |b| b.bytes());
        of(&self.gate_up) + of(&self.down) + self.correction.as_ref().map_or(0, |c| c.bytes())
    }
}

/// What a pass works in. A *slot* is a choice's place in the order by expert.
pub(crate) struct CudaExpertBuffers {
    pub limits: ExpertLimits,
    /// Tokens of a pass.
    pub tokens: usize,
    /// Experts, `[tokens, top_k]` of int32.
    pub choices: Arc<dyn DeviceMem>,
    /// Their weights in float32.
    pub weights: Arc<dyn DeviceMem>,
    /// First slot of each expert, and the end: `[experts + 1]` of int32.
    pub offsets: Arc<dyn DeviceMem>,
    /// Token of each slot, int32.
    pub rows: Arc<dyn DeviceMem>,
    /// Slot of each choice, `[tokens, top_k]` of int32.
    pub slots: Arc<dyn DeviceMem>,
    /// Between gate and down, `[slots, intermediate]` of 16-bit floats.
    pub inner: Arc<dyn DeviceMem>,
    /// What the experts give, `[slots, hidden]` of float32.
    pub results: Arc<dyn DeviceMem>,
}

/// Bytes that a token takes in the buffers.
fn bytes_of_token(l: ExpertLimits) -> usize {
    let wide = l.intermediate.saturating_mul(2).saturating_add(l.hidden.saturating_mul(4));
    wide.saturating_add(4 * 4).saturating_mul(l.top_k).max(1)
}

/// Tokens of a pass: what fits in as many bytes as the limits say.
fn pass_tokens(limits: ExpertLimits, max_tokens: usize) -> usize {
    (limits.buffer_bytes(max_tokens) / bytes_of_token(limits)).clamp(1, max_tokens.max(1))
}

impl CudaExpertBuffers {
    /// Buffers for steps of up to `max_tokens` tokens.
    ///
    /// # Errors
    /// No memory.
    pub fn new(cx: &CudaExec, limits: ExpertLimits, max_tokens: usize) -> Result<Self> {
        let tokens = pass_tokens(limits, max_tokens);
        let slots =
            tokens.checked_mul(limits.top_k).filter(|n| i32::try_from(*n).is_ok()).ok_or_else(|| {
                CudaError::Argument(format!(
                    "a mixture of experts: {tokens} tokens for {} experts each",
                    limits.top_k
                ))
            })?;
        Ok(Self {
            limits,
            tokens,
            choices: alloc(cx, slots * 4)?,
            weights: alloc(cx, slots * 4)?,
            offsets: alloc(cx, (limits.experts + 1) * 4)?,
            rows: alloc(cx, slots * 4)?,
            slots: alloc(cx, slots * 4)?,
            inner: alloc(cx, slots * limits.intermediate * 2)?,
            results: alloc(cx, slots * limits.hidden * 4)?,
        })
    }
}

impl ExpertBuffers for CudaExpertBuffers {
    fn bytes(&self) -> usize {
        let all = [
            &self.choices,
            &self.weights,
            &self.offsets,
            &self.rows,
            &self.slots,
            &self.inner,
            &self.results,
        ];
        all.into_iter().map(|m| m.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::{ExpertParts, RouterScores, Weight};

    fn part(rows: usize, cols: usize) -> LinearPart {
        LinearPart {
            weight: Weight::from_f32("w", vec![rows, cols], &vec![0.5; rows * cols]).unwrap(),
            bias: None,
        }
    }

    fn experts(n: usize, hidden: usize, inner: usize) -> Vec<ExpertParts> {
        let one = || ExpertParts {
            gate_up: vec![part(inner, hidden), part(inner, hidden)],
            down: part(hidden, inner),
        };
        (0..n).map(|_| one()).collect()
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let rule = Routing::top_k(4, 2, RouterScores::Softmax);
        let found = |rule: &Routing, c: Option<&[f32]>, experts: &[ExpertParts], dtype| {
            CudaExperts::check(rule, c, experts, dtype).map_err(|e| e.to_string())
        };
        let bf16 = Some(DType::BF16);
        let (dtype, limits) = found(&rule, None, &experts(4, 24, 7), bf16).unwrap();
        let expected = ExpertLimits { experts: 4, top_k: 2, hidden: 24, intermediate: 7 };
        assert_eq!((dtype, limits), (DType::BF16, expected));
        let refused = |outcome: std::result::Result<(DType, ExpertLimits), String>, words: &str| {
            let e = outcome.unwrap_err();
            assert!(e.contains(words), "{e}");
        };
        refused(found(&rule, None, &experts(4, 24, 7), None), "float32");
        refused(found(&rule, None, &experts(3, 24, 7), bf16), "[4], one an expert");
        refused(found(&rule, Some(&[0.0; 3]), &experts(4, 24, 7), bf16), "score correction");
        refused(found(&Routing { top_k: 5, ..rule }, None, &experts(4, 24, 7), bf16), "5 of 4 experts");
        let mut other = experts(4, 24, 7);
        other[2].down = part(24, 6);
        refused(found(&rule, None, &other, bf16), "[out, 7]");
        let mut other = experts(4, 24, 7);
        other[3].gate_up.pop();
        refused(found(&rule, None, &other, bf16), "expert 3");
    }

    #[test]
    fn a_pass_takes_no_more_memory_than_the_limits_say() {
        for (hidden, intermediate, top_k) in [(2048, 768, 8), (7168, 2048, 8), (1, 1, 1), (1 << 30, 8, 4)] {
            let l = ExpertLimits { experts: 128, top_k, hidden, intermediate };
            for most in [1, 100, 8192] {
                let tokens = pass_tokens(l, most);
                assert!(tokens >= l.pass_tokens(most) && tokens <= most);
                assert!(tokens * bytes_of_token(l) <= l.buffer_bytes(most), "{l:?} {most}");
            }
        }
    }
}
