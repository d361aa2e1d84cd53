//! Lifetime: the model. Which shapes are captured as graphs, and which of them serves a batch. A
//! full graph is always preferred to a piecewise one, even where the piecewise one pads less.

use super::GraphMode;
use serde::{Deserialize, Serialize};

/// Micro-batching: how many, and from how many tokens on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatching {
    /// Micro-batches of a step.
    pub num_micro_batches: usize,
    /// Decode batches are split from this many tokens on.
    pub decode_token_threshold: usize,
    /// Other batches are split from this many tokens on.
    pub prefill_token_threshold: usize,
}

/// What decides the shapes to capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureOptions {
    /// The mode in force.
    pub mode: GraphMode,
    /// Sizes in tokens, in any order.
    pub capture_sizes: Vec<usize>,
    /// The largest that a size may be rounded up to, in tokens.
    pub max_capture_size: usize,
    /// Most requests in a step.
    pub max_num_reqs: usize,
    /// New tokens of a decoding request: 1 + speculative tokens.
    pub decode_query_len: usize,
    /// Numbers of active LoRA adapters to capture for; 0 is none.
    pub lora_cases: Vec<usize>,
    /// Decode graphs take mixed query lengths up to the decode query length.
    pub varlen_decode: bool,
    /// Query lengths of a drafting schedule that depends on the batch size; empty: fixed.
    pub decode_query_lens: Vec<usize>,
    /// Micro-batching.
    pub micro_batching: Option<MicroBatching>,
    /// No mixed graph is wider than the widest decode batch.
    pub limit_mixed_to_decode_tokens: bool,
}

/// A captured shape, or the shape that an eager batch runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GraphShape {
    /// Full, piecewise, or none (eager: nothing is padded).
    pub mode: GraphMode,
    /// Tokens, padding included.
    pub num_tokens: usize,
    /// Requests, padding included; `None`: requests are not padded.
    pub num_reqs: Option<usize>,
    /// New tokens of every request, in a graph of uniform decodes.
    pub uniform_token_count: Option<usize>,
    /// Most new tokens of a request, in a graph of decodes of mixed lengths.
    pub max_query_len: Option<usize>,
    /// Active LoRA adapters.
    pub num_active_loras: usize,
    /// Micro-batches.
    pub num_micro_batches: usize,
}

/// A batch as the dispatch sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Requests.
    pub num_reqs: usize,
    /// New tokens.
    pub num_tokens: usize,
    /// New tokens of every request, where all decode and are alike.
    pub uniform_token_count: Option<usize>,
    /// Active LoRA adapters.
    pub num_active_loras: usize,
    /// Most new tokens of a request; `None` with a prefill in it, or where it isn't known.
    pub max_query_len: Option<usize>,
    /// Micro-batches.
    pub num_micro_batches: usize,
}

/// The shapes of a model's graphs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphPlan {
    shapes: Vec<GraphShape>,
    lora_cases: Vec<usize>,
}

impl GraphPlan {
    /// Decides what to capture.
    pub fn new(options: &CaptureOptions) -> Self {
        let mut sizes: Vec<usize> = options.capture_sizes.iter().copied().filter(|&s| s > 0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut shapes = vec![];
        for &size in &sizes {
            decode_shapes(options, size, &mut shapes);
            mixed_shape(options, size, &mut shapes);
        }
        // Piecewise graphs first, then full ones, each largest first; else in order of discovery.
        shapes.sort_by_key(|s| (s.mode == GraphMode::Full, usize::MAX - s.num_tokens));
        let mut lora_cases = options.lora_cases.clone();
        lora_cases.sort_unstable();
        Self { shapes, lora_cases }
    }

    /// The shapes, in the order of capture: the largest first, so that later ones find its memory.
    pub fn shapes(&self) -> &[GraphShape] {
        &self.shapes
    }

    /// The shape that a batch runs in: the smallest full graph that it fits by padding, else the
    /// smallest piecewise one, else eager.
    pub fn dispatch(&self, batch: &Batch) -> GraphShape {
        let graph =
            self.smallest(GraphMode::Full, batch).or_else(|| self.smallest(GraphMode::Piecewise, batch));
        graph.unwrap_or_else(|| self.eager(batch))
    }

    /// As [`GraphPlan::dispatch`], for a batch that no full graph serves whatever its shape: one whose attention was not
    /// known at capture.
    pub fn dispatch_piecewise(&self, batch: &Batch) -> GraphShape {
        self.smallest(GraphMode::Piecewise, batch).unwrap_or_else(|| self.eager(batch))
    }

    /// The smallest shape of a mode that serves a batch.
    fn smallest(&self, mode: GraphMode, batch: &Batch) -> Option<GraphShape> {
        let loras = self.lora_case(batch.num_active_loras);
        let fits = |s: &&GraphShape| s.mode == mode && s.fits(batch) && s.num_active_loras == loras;
        self.shapes.iter().filter(fits).min_by_key(|s| s.num_tokens).copied()
    }

    /// The shape of a batch that runs without a graph.
    pub fn eager(&self, batch: &Batch) -> GraphShape {
        GraphShape {
            mode: GraphMode::None,
            num_tokens: batch.num_tokens,
            num_reqs: Some(batch.num_reqs),
            uniform_token_count: None,
            max_query_len: None,
            num_active_loras: self.lora_case(batch.num_active_loras),
            num_micro_batches: batch.num_micro_batches,
        }
    }

    /// The captured number of adapters that serves so many active ones.
    fn lora_case(&self, active: usize) -> usize {
        match self.lora_cases.iter().filter(|&&c| c > 0).max() {
            Some(&most) if active > 0 => {
                self.lora_cases.iter().copied().find(|&c| c >= active).unwrap_or(most)
            }
            _ => active,
        }
    }
}

impl GraphShape {
    fn fits(&self, batch: &Batch) -> bool {
        batch.num_tokens > 0
            && batch.num_tokens <= self.num_tokens
            && self.num_reqs.is_none_or(|n| batch.num_reqs <= n)
            && self.uniform_token_count.is_none_or(|n| batch.uniform_token_count == Some(n))
            && self.max_query_len.is_none_or(|n| batch.max_query_len.is_some_and(|q| q <= n))
            && batch.num_micro_batches == self.num_micro_batches
    }
}

/// Adds a shape for each LoRA case, each followed by its twin for micro-batches where there is one.
fn add(options: &CaptureOptions, shape: GraphShape, split: Option<GraphShape>, shapes: &mut Vec<GraphShape>) {
    let mut loras = options.lora_cases.clone();
    loras.sort_unstable();
    for num_active_loras in loras {
        for s in [Some(shape), split].into_iter().flatten() {
            let s = GraphShape { num_active_loras, ..s };
            if !shapes.contains(&s) {
                shapes.push(s);
            }
        }
    }
}

/// The twin of a shape whose batches are split: every micro-batch must get a token, and decode batches
/// have a threshold of their own.
fn split(options: &CaptureOptions, shape: &GraphShape, decode: bool) -> Option<GraphShape> {
    let micro = options.micro_batching?;
    let from = if decode { micro.decode_token_threshold } else { micro.prefill_token_threshold };
    let n = micro.num_micro_batches;
    (shape.num_tokens >= from && shape.num_tokens >= n)
        .then_some(GraphShape { num_micro_batches: n, ..*shape })
}

fn decode_shapes(options: &CaptureOptions, size: usize, shapes: &mut Vec<GraphShape>) {
    if options.mode.decode_mode() != GraphMode::Full || !options.mode.separates_decode() {
        return;
    }
    let full = |num_tokens, num_reqs, uniform_token_count, max_query_len| GraphShape {
        mode: GraphMode::Full,
        num_tokens,
        num_reqs: Some(num_reqs),
        uniform_token_count,
        max_query_len,
        num_active_loras: 0,
        num_micro_batches: 1,
    };
    let q = options.decode_query_len;
    if options.varlen_decode {
        if size <= options.max_num_reqs * q {
            let reqs = size.min(options.max_num_reqs);
            let shape = full(size, reqs, None, Some(q));
            add(options, shape, split(options, &shape, true), shapes);
        }
        return;
    }
    let lens = if options.decode_query_lens.is_empty() { vec![q] } else { options.decode_query_lens.clone() };
    for q in lens {
        let tokens = size.next_multiple_of(q.max(1));
        if tokens <= options.max_capture_size && tokens <= options.max_num_reqs * q {
            let shape = full(tokens, tokens / q, Some(q), None);
            add(options, shape, split(options, &shape, true), shapes);
        }
    }
}

fn mixed_shape(options: &CaptureOptions, size: usize, shapes: &mut Vec<GraphShape>) {
    let mode = options.mode.mixed_mode();
    let too_wide =
        options.limit_mixed_to_decode_tokens && size > options.max_num_reqs * options.decode_query_len;
    if mode == GraphMode::None || too_wide {
        return;
    }
    let shape = GraphShape {
        mode,
        num_tokens: size,
        num_reqs: (mode == GraphMode::Full).then(|| size.min(options.max_num_reqs)),
        uniform_token_count: None,
        max_query_len: None,
        num_active_loras: 0,
        num_micro_batches: 1,
    };
    // A full graph cannot split a batch inside a request, so micro-batches need uniform ones.
    let uniform = shape.num_reqs.filter(|&n| n > 0 && size.is_multiple_of(n)).map(|n| size / n);
    let twin = uniform.and_then(|u| {
        split(options, &shape, u <= options.decode_query_len)
            .map(|s| GraphShape { uniform_token_count: Some(u), ..s })
    });
    add(options, shape, twin, shapes);
}
