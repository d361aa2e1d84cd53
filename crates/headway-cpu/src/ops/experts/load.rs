//! Experts as they are held, and the buffers of a step. Both live as long as the model.

use super::{route::Choice, sort::Sorted};
use crate::{
    CpuExec,
    kernels::linear::{CpuLinear, runs::Runs},
};
use headway_tensor::{
    Activation, DType, ExpertBuffers, ExpertLimits, ExpertParts, Experts, ExpertsSpec, Linear, Result,
    Routing, TensorError,
};

/// A layer's experts: two linear layers each.
pub(in super::super) struct CpuExperts {
    pub(super) routing: Routing,
    pub(super) correction: Option<Vec<f32>>,
    pub(super) activation: Activation,
    pub(super) gate_up: Vec<CpuLinear>,
    pub(super) down: Vec<CpuLinear>,
    pub(super) limits: ExpertLimits,
}

impl CpuExperts {
    /// Takes the experts in, each as [`CpuLinear::new`] does.
    ///
    /// # Errors
    /// A routing that can't be; as many experts or corrections as it doesn't say; experts of different shapes.
    pub(in super::super) fn new(cx: &CpuExec, spec: ExpertsSpec, compute: Option<DType>) -> Result<Self> {
        let ExpertsSpec { routing, correction, activation, experts } = spec;
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
        correction.as_ref().map_or(Ok(()), |c| count("score correction", c.len()))?;
        let (mut gate_up, mut down) = (Vec::with_capacity(experts.len()), Vec::with_capacity(experts.len()));
        for ExpertParts { gate_up: first, down: second } in experts {
            gate_up.push(CpuLinear::new(cx, first, compute)?);
            down.push(CpuLinear::new(cx, vec![second], compute)?);
        }
        let (hidden, intermediate) = (gate_up[0].in_features(), down[0].in_features());
        for (e, (first, second)) in gate_up.iter().zip(&down).enumerate() {
            let shapes =
                [first.out_features(), first.in_features(), second.out_features(), second.in_features()];
            if shapes != [2 * intermediate, hidden, hidden, intermediate] {
                return Err(TensorError::WrongShape {
                    what: format!("gate and up, and down, of expert {e}"),
                    found: shapes.to_vec(),
                    expected: format!("[{}, {hidden}] and [{hidden}, {intermediate}]", 2 * intermediate),
                });
            }
        }
        let limits = ExpertLimits { experts: routing.experts, top_k: routing.top_k, hidden, intermediate };
        Ok(Self { routing, correction, activation, gate_up, down, limits })
    }
}

impl Experts for CpuExperts {
    fn routing(&self) -> &Routing {
        &self.routing
    }

    fn limits(&self) -> ExpertLimits {
        self.limits
    }

    fn bytes(&self) -> usize {
        self.gate_up.iter().chain(&self.down).map(Linear::bytes).sum()
    }
}

/// What a pass works in.
pub(in super::super) struct CpuExpertBuffers {
    pub(super) limits: ExpertLimits,
    /// Tokens of a pass.
    pub(super) tokens: usize,
    /// Scores, `[tokens, experts]`.
    pub(super) scores: Vec<f32>,
    /// Choices, `[tokens, top_k]`.
    pub(super) choices: Vec<Choice>,
    pub(super) sorted: Sorted,
    pub(super) runs: Runs,
    /// What the experts read, and then what they give: `[slots, hidden]`.
    pub(super) rows: Vec<f32>,
    /// Gate and up, `[slots, 2 x intermediate]`.
    pub(super) gate_up: Vec<f32>,
    /// `[slots, intermediate]`.
    pub(super) gated: Vec<f32>,
}

impl CpuExpertBuffers {
    /// Buffers for steps of up to `max_tokens` tokens.
    pub(in super::super) fn new(limits: ExpertLimits, max_tokens: usize) -> Self {
        let ExpertLimits { experts, top_k, hidden, intermediate } = limits;
        let tokens = limits.pass_tokens(max_tokens);
        let slots = tokens * top_k;
        Self {
            limits,
            tokens,
            scores: vec![0.0; tokens * experts],
            choices: vec![Choice::default(); slots],
            sorted: Sorted::with_room(experts, slots),
            runs: Runs::with_room(experts),
            rows: vec![0.0; slots * hidden],
            gate_up: vec![0.0; slots * 2 * intermediate],
            gated: vec![0.0; slots * intermediate],
        }
    }
}

impl ExpertBuffers for CpuExpertBuffers {
    fn bytes(&self) -> usize {
        let floats = [&self.scores, &self.rows, &self.gate_up, &self.gated];
        floats.iter().map(|f| size_of_val(&f[..])).sum::<usize>()
            + size_of_val(&self.choices[..])
            + self.sorted.bytes()
    }
}
