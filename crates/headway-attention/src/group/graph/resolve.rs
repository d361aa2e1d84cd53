//! Lifetime: the model. From the graph mode that was asked for to the one that survives start-up:
//! each lowering with its cause.

use super::{GraphMode, GraphSupport};
use crate::{AttentionError, Result};
use serde::Serialize;

/// What bears on the graph mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphRequest {
    /// `--graph-mode`; `None`: unset.
    pub configured: Option<GraphMode>,
    /// The weakest support over all groups.
    pub support: GraphSupport,
    /// The backend that has it.
    pub backend: String,
    /// Attention splits the model into pieces (in headway it always does).
    pub attention_splits: bool,
    /// The model is compiled or captured in pieces.
    pub piecewise_compilation: bool,
    /// Pieces are cut inside the compiler rather than before it.
    pub partitioned_in_compiler: bool,
    /// Something of the model can be captured piecewise.
    pub piecewise_available: bool,
    /// New tokens of a decoding request: 1 + speculative tokens.
    pub decode_query_len: usize,
    /// Sizes to capture, in tokens.
    pub capture_sizes: Option<Vec<usize>>,
    /// The largest of them that is allowed.
    pub max_capture_size: Option<usize>,
    /// Round the sizes to multiples of the decode query length. A dispatch that pads requests, not
    /// tokens, needs no rounding.
    pub round_sizes: bool,
    /// Blocks of the state pool, where the model has state-space layers: each decoding request needs one.
    pub state_blocks: Option<usize>,
    /// Most requests in a step, where it is to be checked against them.
    pub max_num_reqs: Option<usize>,
    /// A trial run before the pool has its size.
    pub is_profiling: bool,
}

impl Default for GraphRequest {
    fn default() -> Self {
        Self {
            configured: None,
            support: GraphSupport::Always,
            backend: String::new(),
            attention_splits: true,
            piecewise_compilation: true,
            partitioned_in_compiler: false,
            piecewise_available: true,
            decode_query_len: 1,
            capture_sizes: None,
            max_capture_size: None,
            round_sizes: false,
            state_blocks: None,
            max_num_reqs: None,
            is_profiling: false,
        }
    }
}

/// One step down from the mode that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lowering {
    /// The mode before.
    pub from: GraphMode,
    /// The mode after.
    pub to: GraphMode,
    /// Why, in a sentence that names the backend.
    pub because: String,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphResolution {
    /// The mode in force.
    pub mode: GraphMode,
    /// Each lowering, in order; each is a warning.
    pub lowerings: Vec<Lowering>,
    /// Sizes to capture, in tokens.
    pub capture_sizes: Option<Vec<usize>>,
    /// The largest of them.
    pub max_capture_size: Option<usize>,
}

/// Resolves the graph mode.
///
/// # Errors
/// [`AttentionError::Graph`]: a full graph for every batch where the backend has none; no size left
/// after rounding; fewer state blocks than decoding requests.
pub fn resolve(request: &GraphRequest) -> Result<GraphResolution> {
    let mut lowerings = vec![];
    let mut mode = request.configured.unwrap_or_default();
    let unchanged = |mode, lowerings| GraphResolution {
        mode,
        lowerings,
        capture_sizes: request.capture_sizes.clone(),
        max_capture_size: request.max_capture_size,
    };
    if mode == GraphMode::None {
        return Ok(unchanged(mode, lowerings));
    }
    for rule in [mixed_batches, decode_batches, speculative_decode, piecewise_capture] {
        if let Some((to, because)) = rule(mode, request)? {
            lowerings.push(Lowering { from: mode, to, because });
            mode = to;
        }
    }
    let mut answer = unchanged(mode, lowerings);
    if request.round_sizes && mode.decode_mode() == GraphMode::Full && request.decode_query_len > 1 {
        round_sizes(request, &mut answer)?;
    }
    check_state_blocks(mode, request)?;
    Ok(answer)
}

type Lowered = Result<Option<(GraphMode, String)>>;

fn not_supported(mode: GraphMode, r: &GraphRequest) -> String {
    format!("--graph-mode {mode} is not supported with {} backend (support: {})", r.backend, r.support)
}

fn mixed_batches(mode: GraphMode, r: &GraphRequest) -> Lowered {
    if mode.mixed_mode() != GraphMode::Full || r.support == GraphSupport::Always {
        return Ok(None);
    }
    let why = not_supported(mode, r);
    if r.support == GraphSupport::Never {
        return Err(AttentionError::Graph(format!("{why}; try --graph-mode PIECEWISE")));
    }
    let to = if r.attention_splits { GraphMode::FullAndPiecewise } else { GraphMode::FullDecodeOnly };
    Ok(Some((to, why)))
}

fn decode_batches(mode: GraphMode, r: &GraphRequest) -> Lowered {
    if mode.decode_mode() != GraphMode::Full || r.support != GraphSupport::Never {
        return Ok(None);
    }
    let in_pieces = r.piecewise_compilation && (r.attention_splits || r.partitioned_in_compiler);
    let (to, is) = if in_pieces { (GraphMode::Piecewise, "is") } else { (GraphMode::None, "is not") };
    Ok(Some((to, format!("{}, and attention {is} compiled piecewise", not_supported(mode, r)))))
}

fn speculative_decode(mode: GraphMode, r: &GraphRequest) -> Lowered {
    let uniform = r.decode_query_len > 1 && r.support < GraphSupport::UniformBatch;
    if mode.decode_mode() != GraphMode::Full || !uniform {
        return Ok(None);
    }
    let to = if r.attention_splits { GraphMode::Piecewise } else { GraphMode::None };
    let why = format!(
        "--graph-mode {mode} is not supported with speculative decoding ({} tokens a step) for attention backend \
         {} (support: {})",
        r.decode_query_len, r.backend, r.support
    );
    Ok(Some((to, why)))
}

fn piecewise_capture(mode: GraphMode, r: &GraphRequest) -> Lowered {
    if !mode.has_piecewise() || r.piecewise_available {
        return Ok(None);
    }
    let why =
        format!("--graph-mode {mode} requires piecewise capture, and the model offers nothing to capture so");
    Ok(Some((mode.without_piecewise(), why)))
}

fn round_sizes(r: &GraphRequest, answer: &mut GraphResolution) -> Result<()> {
    let (Some(sizes), Some(max)) = (&r.capture_sizes, r.max_capture_size) else { return Ok(()) };
    if sizes.is_empty() {
        return Ok(());
    }
    let q = r.decode_query_len;
    let mut rounded: Vec<usize> = sizes.iter().map(|s| s.next_multiple_of(q)).filter(|&s| s <= max).collect();
    rounded.sort_unstable();
    rounded.dedup();
    if rounded.is_empty() && q <= max {
        rounded.push(q);
    }
    let Some(&largest) = rounded.last() else {
        return Err(AttentionError::Graph(format!(
            "No valid cudagraph sizes after rounding to multiple of {q} (num_speculative_tokens + 1) please adjust \
             num_speculative_tokens ({}) or max_cudagraph_capture_size ({max}) or cudagraph_capture_sizes ({sizes:?})",
            q - 1
        )));
    };
    answer.capture_sizes = Some(rounded);
    answer.max_capture_size = Some(largest);
    Ok(())
}

fn check_state_blocks(mode: GraphMode, r: &GraphRequest) -> Result<()> {
    let (Some(blocks), Some(reqs)) = (r.state_blocks, r.max_num_reqs) else { return Ok(()) };
    if !mode.has_full() || r.is_profiling || reqs <= blocks {
        return Ok(());
    }
    Err(AttentionError::Graph(format!(
        "--max-num-seqs ({reqs}) exceeds the available state-space cache blocks ({blocks}). Each decode sequence \
         requires one, so graph capture cannot proceed. Lower --max-num-seqs to at most {blocks} or raise \
         --kv-cache-memory."
    )))
}
