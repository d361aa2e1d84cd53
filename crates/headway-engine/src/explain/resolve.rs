//! The way of start-up: needs, a backend for each, block sizes, the cache's plan, builders, graph mode, memory.

use super::{Answer, Contenders, Query, report, unknowns};
use crate::{
    models::{ModelNeeds, needs::MixerNeeds},
    runner::{
        StartupError, StartupReport,
        block_size::{self, BlockSizes},
        capacity,
        fast_prefill::SharingLayers,
        graphs::mode::{self, ModeRequest},
    },
};
use headway_attention::{
    AttentionError, BuilderPlan, CacheLimits, ContextParallel, GraphMode, GraphSupport, KvCachePlan,
    LayerNeed, Selection,
    group::{
        graph::{GraphRequest, GraphResolution, resolve as resolve_graph},
        kv::page::RequestLimits,
    },
    plan_kv_cache,
};

/// Memory for a plan whose shape is asked for, not its size.
const ENOUGH: usize = 1 << 50;

/// How start-up would end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It starts.
    Starts,
    /// It fails; [`StartupReport::error`] says why.
    Fails,
    /// A layer gets no backend.
    NoBackend,
}

/// The answer.
pub struct Outcome {
    /// Everything that was decided.
    pub report: StartupReport,
    /// How start-up would end.
    pub verdict: Verdict,
    /// For each mixer its backend and that one's place in the order of preference; `None`: it gets none.
    pub(super) picks: Vec<Option<(String, usize)>>,
    /// The graph mode in force.
    pub(super) graph_mode: GraphMode,
    /// Of a device without graphs, where none could be stronger.
    pub(super) has_no_graphs: bool,
    /// It is the model's files or the device that can't be.
    pub(super) no_change_helps: bool,
}

/// What stands once every layer has a backend.
pub(super) struct Planned {
    pub cache: KvCachePlan,
    pub builders: Vec<BuilderPlan>,
    pub graph: GraphResolution,
    pub blocks: BlockSizes,
    pub num_blocks: usize,
}

/// Runs the way of start-up.
pub fn resolve(model: &ModelNeeds, query: &Query, contenders: &Contenders) -> Outcome {
    let needs: Vec<LayerNeed> = model.mixers.iter().map(|l| query.setting.need(l)).collect();
    let picked = select(model, &needs, query, contenders);
    let mut report = report::begin(model, query, contenders);
    unknowns::of_model(&mut report, model, query, contenders);
    let pick = |(p, need): (&Picked, &LayerNeed)| {
        let name = p.as_ref().ok()?.backend.rules().name.to_string();
        let rank = contenders.rank(need, &name);
        Some((name, rank))
    };
    let picks = picked.iter().zip(&needs).map(pick).collect();
    let fails = |mut report: StartupReport, error: String, verdict| {
        report.error = Some(error);
        (report, verdict, GraphMode::None)
    };
    let selections: Result<Vec<Selection>, String> = picked.iter().cloned().collect();
    let (report, verdict, graph_mode) = match selections {
        Err(e) => {
            report::no_backend(&mut report, model, query, &needs, &picked, contenders);
            fails(report, e, Verdict::NoBackend)
        }
        Ok(selections) => match plan(model, query, &selections) {
            Ok(p) => match report::planned(&mut report, model, query, &selections, &p) {
                Ok(()) => (report, Verdict::Starts, p.graph.mode),
                Err(e) => fails(report, e.to_string(), Verdict::Fails),
            },
            Err(e) => {
                report::unplanned(&mut report, model, query, &selections);
                fails(report, e.to_string(), Verdict::Fails)
            }
        },
    };
    let has_no_graphs = query.setting.platform == "cpu";
    Outcome { report, verdict, picks, graph_mode, has_no_graphs, no_change_helps: false }
}

impl Outcome {
    /// With the word of start-up, where it was asked.
    pub(super) fn settled(mut self, start: Answer, model: &ModelNeeds) -> Self {
        let no_backend = self.picks.iter().any(Option::is_none);
        let fails = |no_backend| if no_backend { Verdict::NoBackend } else { Verdict::Fails };
        let (error, verdict) = match start {
            Answer::NotAsked => return self,
            Answer::Starts(warnings) => {
                self.report.warnings.extend(warnings);
                (None, Verdict::Starts)
            }
            Answer::Options(e) => {
                self.no_change_helps = matches!(e, StartupError::Option { option: "--threads", .. });
                (Some(e.to_string()), fails(no_backend))
            }
            Answer::Model { error, known } => {
                self.no_change_helps = true;
                let what = "what its attention layers would get is told all the same";
                let warning = format!("headway can't run this {}; {what}", model.architecture);
                self.report.warnings.insert(0, warning);
                (Some(error), fails(no_backend && !known))
            }
        };
        (self.report.error, self.verdict) = (error, verdict);
        self
    }
}

type Picked = Result<Selection, String>;

/// A backend for each layer; equal needs are asked once.
fn select(model: &ModelNeeds, needs: &[LayerNeed], query: &Query, contenders: &Contenders) -> Vec<Picked> {
    let mut asked: Vec<(&LayerNeed, Picked)> = vec![];
    let mut out = vec![];
    for (l, need) in model.mixers.iter().zip(needs) {
        if let Some((_, s)) = asked.iter().find(|(n, _)| *n == need) {
            out.push(s.clone());
            continue;
        }
        let name = format!("layer {}", l.layer);
        let measured = query.tuned.as_ref().map(|t| t.request(need, &query.asked.engine));
        let request = measured.as_ref().unwrap_or(&query.request);
        let s = contenders.select(&name, need, request).map_err(|e| e.to_string());
        asked.push((need, s.clone()));
        out.push(s);
    }
    out
}

fn plan(model: &ModelNeeds, query: &Query, selections: &[Selection]) -> Result<Planned, StartupError> {
    let setting = &query.setting;
    let blocks = block_size::of_layers(setting, &model.mixers, selections, query.max_model_len)?;
    let caches = setting.caches(&model.mixers, selections, blocks.in_force, query.max_model_len);
    let fast_prefill =
        SharingLayers::asked(query.asked.engine.kv_sharing_fast_prefill, &model.mixers, &model.architecture)?;
    let limits = CacheLimits {
        num_speculative_tokens: setting.speculative_tokens,
        batch_invariant: setting.batch_invariant,
        kv_cache_layout: query.layout,
        fast_prefill_from: fast_prefill.map(|s| s.first),
        context_parallel: ContextParallel { size: setting.dcp, ..ContextParallel::default() },
        ..CacheLimits::new(query.max_num_seqs, query.max_num_batched_tokens, query.max_model_len)
    };
    let cache = plan_kv_cache(&caches, &limits, ENOUGH)?;
    let tables = &query.asked.engine.backend_config;
    let builders = cache
        .attention_groups
        .iter()
        .map(|g| g.backend.plan(&g.info, &g.backend.configure(tables)?))
        .collect::<Result<Vec<_>, AttentionError>>()?;
    let block_bytes = cache.total_bytes / cache.num_blocks.max(1);
    let num_blocks = (query.kv_memory / (block_bytes as u64).max(1)).min(i32::MAX as u64) as usize;
    let num_blocks = if block_bytes == 0 { 1 } else { num_blocks };
    let graph = graph(model, query, &cache, &builders, num_blocks)?;
    Ok(Planned { cache, builders, graph, blocks, num_blocks })
}

fn graph(
    model: &ModelNeeds,
    query: &Query,
    cache: &KvCachePlan,
    builders: &[BuilderPlan],
    num_blocks: usize,
) -> Result<GraphResolution, AttentionError> {
    // Without a memory size there is no number of blocks to check.
    let num_blocks = Some(num_blocks).filter(|_| query.kv_memory > 0);
    if query.own {
        let request = ModeRequest {
            platform: query.setting.platform,
            asked: query.graph_mode,
            decode_query_len: 1 + query.setting.speculative_tokens,
            max_num_reqs: query.max_num_seqs,
            num_blocks,
        };
        return mode::resolve(cache, builders.iter(), &request);
    }
    let names = cache.attention_groups.iter().map(|g| g.backend.rules().name.as_ref());
    let (support, backend) = GraphSupport::weakest(names.zip(builders.iter().map(|b| b.graph_support)));
    let has_states = model.mixers.iter().any(|l| matches!(l.mixer, MixerNeeds::State(_)));
    let default = match query.setting.platform {
        "cpu" => GraphMode::None,
        _ if query.compilation => GraphMode::FullAndPiecewise,
        _ => GraphMode::None,
    };
    resolve_graph(&GraphRequest {
        configured: Some(query.graph_mode.unwrap_or(default)),
        support,
        backend: backend.unwrap_or_default().to_owned(),
        attention_splits: query.compilation,
        piecewise_compilation: query.compilation,
        piecewise_available: query.compilation,
        decode_query_len: 1 + query.setting.speculative_tokens,
        state_blocks: num_blocks.filter(|_| has_states),
        max_num_reqs: Some(query.max_num_seqs),
        ..GraphRequest::default()
    })
}

impl Planned {
    /// Fills in what fits.
    pub fn capacity(
        &self,
        report: &mut StartupReport,
        model: &ModelNeeds,
        query: &Query,
    ) -> Result<(), AttentionError> {
        let limits = RequestLimits {
            max_model_len: query.max_model_len,
            max_in_flight_tokens: query.max_num_batched_tokens,
            max_encoder_tokens: model.max_encoder_tokens,
            dcp_size: query.setting.dcp,
        };
        capacity::fill(&mut report.memory, &self.cache, self.num_blocks, &limits)?;
        let block_bytes = self.cache.total_bytes / self.cache.num_blocks.max(1);
        report.memory.kv_cache_bytes = (self.num_blocks * block_bytes) as u64;
        Ok(())
    }
}
