//! Mixtures of experts out of Hugging Face configs: what each family calls its counts and tensors. A family's
//! translator reads a mixture once and asks it for each layer's feed-forward.

use super::{
    ConfigReader,
    hf::{Names, Sizes, activation},
    state_space::flag_or,
};
use crate::models::{
    ModelError,
    plan::{ExpertWeights, ExpertsPlan, FeedForwardPlan, LinearPlan, StackedPlan},
};
use headway_tensor::{
    Activation, ExpertGroups, GroupScore, RouterScores, Routing, experts::MAX_EXPERT_GROUPS,
};

/// Far beyond published models.
const MOST_EXPERTS: usize = 1 << 14;

/// The counts of a config: experts, and how many a token goes to.
fn counts(c: &ConfigReader<'_>, experts: &[&str], scores: RouterScores) -> Result<Routing, ModelError> {
    let field = experts.iter().copied().find(|f| c.get(f).is_some()).unwrap_or(experts[0]);
    let (n, k) = (c.usize(field)?, c.usize("num_experts_per_tok")?);
    if n > MOST_EXPERTS {
        return Err(c.error(field, format!("is {n}; at most {MOST_EXPERTS} are expected")));
    }
    if k > n {
        let why = format!("is {k}, but {field} is {n}: a token can't go to more experts than there are");
        return Err(c.error("num_experts_per_tok", why));
    }
    Ok(Routing::top_k(n, k, scores))
}

/// What a family's config class says where the file is silent.
struct Defaults {
    groups: usize,
    chosen_groups: Option<usize>,
    renormalize: bool,
    scale: f64,
}

/// Groups of experts, where the config limits a token to some of more than one.
fn groups(
    c: &ConfigReader<'_>,
    rule: &Routing,
    score: GroupScore,
    defaults: &Defaults,
) -> Result<Option<ExpertGroups>, ModelError> {
    let count = c.opt_usize("n_group")?.unwrap_or(if c.is_null("n_group") { 1 } else { defaults.groups });
    if count == 1 {
        return Ok(None);
    }
    let chosen = match (c.opt_usize("topk_group")?, defaults.chosen_groups) {
        (Some(n), _) => n,
        (None, Some(n)) if !c.is_null("topk_group") => n,
        _ => c.usize("topk_group")?,
    };
    let size = rule.experts / count;
    if !rule.experts.is_multiple_of(count) || count > MAX_EXPERT_GROUPS {
        let why = format!(
            "is {count}; it must divide the {} experts and be at most {MAX_EXPERT_GROUPS}",
            rule.experts
        );
        return Err(c.error("n_group", why));
    }
    if score == GroupScore::SumOfTwoBest && size < 2 {
        return Err(c.error("n_group", format!("is {count}; a group must have at least two experts")));
    }
    if chosen > count || size * chosen < rule.top_k {
        let why = format!(
            "is {chosen}; {} experts a token must fit in that many of the {count} groups of {size}",
            rule.top_k
        );
        return Err(c.error("topk_group", why));
    }
    Ok(Some(ExpertGroups { count, chosen, score }))
}

impl Names {
    /// Experts in tensors of their own, under `module`.N: `gate_proj`, `up_proj`, `down_proj`.
    fn each_expert(&self, module: &str, routing: &Routing, hidden: usize, inner: usize) -> ExpertWeights {
        let one = |e: usize| {
            let part = |name: &str, width| self.part(&format!("{module}.{e}.{name}"), false, width);
            (
                LinearPlan::stacked([part("gate_proj", inner), part("up_proj", inner)], hidden),
                LinearPlan::stacked([part("down_proj", hidden)], inner),
            )
        };
        ExpertWeights::Each((0..routing.experts).map(one).collect())
    }
}

/// Qwen3-MoE (arXiv 2505.09388): softmax over all experts, every layer but those that the config names.
pub(super) struct QwenExperts {
    routing: Routing,
    activation: Activation,
    intermediate: usize,
    every: usize,
    dense: Vec<usize>,
}

impl QwenExperts {
    pub(super) fn read(c: &ConfigReader<'_>) -> Result<Self, ModelError> {
        if c.count("shared_expert_intermediate_size")?.is_some_and(|n| n > 0) {
            return Err(
                c.unsupported("a shared expert behind a gate of its own", "Qwen3-MoE's models have none")
            );
        }
        let routing = counts(c, &["num_experts", "num_local_experts"], RouterScores::Softmax)?;
        Ok(Self {
            routing: Routing { renormalize: c.flag("norm_topk_prob")?, ..routing },
            activation: activation(c)?,
            intermediate: c.usize("moe_intermediate_size")?,
            every: c.opt_usize("decoder_sparse_step")?.unwrap_or(1),
            dense: c.indices("mlp_only_layers")?,
        })
    }

    /// The feed-forward of layer `i`.
    pub(super) fn layer(&self, i: usize, n: &Names, s: &Sizes) -> FeedForwardPlan {
        if self.dense.contains(&i) || !(i + 1).is_multiple_of(self.every) {
            return n.gated(s, self.activation, false);
        }
        FeedForwardPlan::Experts(ExpertsPlan {
            router: LinearPlan::stacked([n.part("mlp.gate", false, self.routing.experts)], s.hidden),
            correction: None,
            routing: self.routing,
            weights: n.each_expert("mlp.experts", &self.routing, s.hidden, self.intermediate),
            intermediate: self.intermediate,
            activation: self.activation,
            shared: None,
        })
    }
}

/// DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): experts that are always on beside those chosen, out
/// of groups where the config has them; the first layers are dense.
pub(super) struct DeepSeekExperts {
    /// `None`: every layer is dense.
    routing: Option<Routing>,
    corrected: bool,
    activation: Activation,
    intermediate: usize,
    shared: usize,
    first: usize,
    every: usize,
}

impl DeepSeekExperts {
    /// V2: softmax; `topk_method` greedy or group_limited_greedy.
    pub(super) fn v2(c: &ConfigReader<'_>) -> Result<Self, ModelError> {
        let method = c.text("topk_method")?.unwrap_or("greedy");
        let grouped = match method {
            "greedy" => false,
            "group_limited_greedy" => true,
            other => {
                let what = format!("topk_method {other} in DeepSeek V2");
                return Err(c.unsupported(what, "supported: greedy, group_limited_greedy"));
            }
        };
        Self::scored_by(c, "softmax")?;
        let silent = Defaults { groups: 1, chosen_groups: None, renormalize: false, scale: 1.0 };
        Self::read(c, RouterScores::Softmax, grouped.then_some(GroupScore::Best), false, &silent)
    }

    /// V3: sigmoid, with a correction where experts are chosen.
    pub(super) fn v3(c: &ConfigReader<'_>) -> Result<Self, ModelError> {
        match c.text("topk_method")? {
            None | Some("noaux_tc") => {}
            Some(other) => {
                let what = format!("topk_method {other} in DeepSeek V3");
                return Err(c.unsupported(what, "supported: noaux_tc"));
            }
        }
        Self::scored_by(c, "sigmoid")?;
        let silent = Defaults { groups: 8, chosen_groups: Some(4), renormalize: true, scale: 2.5 };
        Self::read(c, RouterScores::Sigmoid, Some(GroupScore::SumOfTwoBest), true, &silent)
    }

    /// Refuses another scoring function than the family's.
    fn scored_by(c: &ConfigReader<'_>, ours: &str) -> Result<(), ModelError> {
        match c.text("scoring_func")? {
            Some(other) if other != ours => {
                Err(c.unsupported(format!("scoring_func {other}"), format!("supported here: {ours}")))
            }
            _ => Ok(()),
        }
    }

    fn read(
        c: &ConfigReader<'_>,
        scores: RouterScores,
        group_score: Option<GroupScore>,
        corrected: bool,
        silent: &Defaults,
    ) -> Result<Self, ModelError> {
        let routing = match c.count("n_routed_experts")?.unwrap_or(0) {
            0 => None,
            _ => {
                let rule = counts(c, &["n_routed_experts"], scores)?;
                Some(Routing {
                    groups: group_score.map_or(Ok(None), |score| groups(c, &rule, score, silent))?,
                    renormalize: flag_or(c, "norm_topk_prob", silent.renormalize)?,
                    scale: c.opt_f64("routed_scaling_factor")?.unwrap_or(silent.scale) as f32,
                    ..rule
                })
            }
        };
        Ok(Self {
            corrected,
            activation: activation(c)?,
            intermediate: if routing.is_some() { c.usize("moe_intermediate_size")? } else { 0 },
            shared: c.count("n_shared_experts")?.unwrap_or(0),
            first: c.count("first_k_dense_replace")?.unwrap_or(0),
            every: c.opt_usize("moe_layer_freq")?.unwrap_or(1),
            routing,
        })
    }

    /// The feed-forward of layer `i`.
    pub(super) fn layer(&self, i: usize, n: &Names, s: &Sizes) -> FeedForwardPlan {
        let routing = match self.routing {
            Some(r) if i >= self.first && i.is_multiple_of(self.every) => r,
            _ => return n.gated(s, self.activation, false),
        };
        let (inner, experts) = (self.intermediate, routing.experts);
        let shared =
            || n.gated_at("mlp.shared_experts", s.hidden, inner * self.shared, self.activation, false);
        FeedForwardPlan::Experts(ExpertsPlan {
            router: LinearPlan::stacked([n.part("mlp.gate", false, experts)], s.hidden),
            correction: self.corrected.then(|| n.tensor("mlp.gate.e_score_correction_bias")),
            routing,
            weights: n.each_expert("mlp.experts", &routing, s.hidden, inner),
            intermediate: inner,
            activation: self.activation,
            shared: (self.shared > 0).then(|| Box::new(shared())),
        })
    }
}

/// Granite's mixtures (GraniteMoeHybrid): softmax over the chosen, fused stacked tensors, and a shared
/// feed-forward that is all there is where the config has no experts.
pub(super) struct GraniteExperts {
    /// `None`: the shared feed-forward alone.
    routing: Option<Routing>,
    activation: Activation,
    intermediate: usize,
    shared: usize,
}

impl GraniteExperts {
    pub(super) fn read(c: &ConfigReader<'_>) -> Result<Self, ModelError> {
        let routing = match c.count("num_local_experts")?.unwrap_or(0) {
            0 => None,
            _ => Some(counts(c, &["num_local_experts"], RouterScores::SoftmaxOfChosen)?),
        };
        let intermediate = c.usize("intermediate_size")?;
        let shared = c.count("shared_intermediate_size")?.unwrap_or(0);
        if routing.is_none() && shared == 0 {
            let why = "is missing or 0, and so is num_local_experts: layers need one of them";
            return Err(c.error("shared_intermediate_size", why));
        }
        Ok(Self { routing, activation: activation(c)?, intermediate, shared })
    }

    /// The feed-forward of a layer.
    pub(super) fn layer(&self, n: &Names, s: &Sizes) -> FeedForwardPlan {
        let single = |module: &str, from, to| LinearPlan::stacked([n.part(module, false, to)], from);
        let shared = || FeedForwardPlan::Gated {
            gate_up: single("shared_mlp.input_linear", s.hidden, 2 * self.shared),
            down: single("shared_mlp.output_linear", self.shared, s.hidden),
            activation: self.activation,
            gate_scale: 1.0,
        };
        let Some(routing) = self.routing else { return shared() };
        let stacked = |module: &str, in_features, out_features| StackedPlan {
            weight: n.weight(module),
            bias: None,
            transposed: false,
            in_features,
            out_features,
        };
        FeedForwardPlan::Experts(ExpertsPlan {
            router: single("block_sparse_moe.router.layer", s.hidden, routing.experts),
            correction: None,
            routing,
            weights: ExpertWeights::Stacked {
                gate_up: vec![stacked("block_sparse_moe.input_linear", s.hidden, 2 * self.intermediate)],
                interleaved: false,
                down: stacked("block_sparse_moe.output_linear", self.intermediate, s.hidden),
            },
            intermediate: self.intermediate,
            activation: self.activation,
            shared: (self.shared > 0).then(|| Box::new(shared())),
        })
    }
}

/// gpt-oss (its model card, arXiv 2508.10925): softmax over the chosen, a clamped activation, biases, gate and up
/// in turns; published in MXFP4, whose tensors lie the other way round.
pub(super) struct GptOssExperts {
    routing: Routing,
    activation: Activation,
    mxfp4: bool,
}

impl GptOssExperts {
    pub(super) fn read(c: &ConfigReader<'_>) -> Result<Self, ModelError> {
        let positive = |field: &str, default: f64| match c.opt_f64(field)? {
            Some(x) if x <= 0.0 => Err(c.error(field, format!("is {x}; it must be above 0"))),
            x => Ok(x.unwrap_or(default) as f32),
        };
        let (alpha, limit) = (positive("swiglu_alpha", 1.702)?, positive("swiglu_limit", 7.0)?);
        Ok(Self {
            routing: counts(c, &["num_local_experts", "num_experts"], RouterScores::SoftmaxOfChosen)?,
            activation: Activation::ClampedSwiglu { alpha, limit },
            mxfp4: c.quantisation() == Some("mxfp4"),
        })
    }

    /// The feed-forward of a layer.
    pub(super) fn layer(&self, n: &Names, s: &Sizes) -> FeedForwardPlan {
        let stacked = |name: &str, in_features, out_features| StackedPlan {
            weight: n.tensor(&format!("mlp.experts.{name}{}", if self.mxfp4 { "_blocks" } else { "" })),
            bias: Some(n.tensor(&format!("mlp.experts.{name}_bias"))),
            transposed: !self.mxfp4,
            in_features,
            out_features,
        };
        FeedForwardPlan::Experts(ExpertsPlan {
            router: LinearPlan::stacked([n.part("mlp.router", true, self.routing.experts)], s.hidden),
            correction: None,
            routing: self.routing,
            weights: ExpertWeights::Stacked {
                gate_up: vec![stacked("gate_up_proj", s.hidden, 2 * s.intermediate)],
                interleaved: true,
                down: stacked("down_proj", s.intermediate, s.hidden),
            },
            intermediate: s.intermediate,
            activation: self.activation,
            shared: None,
        })
    }
}

#[cfg(test)]
mod tests;
