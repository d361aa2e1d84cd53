//! What a single change of an option would gain: each is tried with `answer`, and those that give a
//! layer a better backend, a stronger graph mode, or a start at all, are told.

use super::{Contenders, ExplainOptions, Outcome, Subject, Verdict, answer};
use crate::{models::ModelNeeds, options::DTypeOption, runner::report::SuggestionReport, tuning};
use headway_attention::GraphMode;
use headway_tensor::DType;

/// Block sizes that are tried.
const BLOCK_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

/// Numbers of requests that are tried.
const FEWER_REQUESTS: [usize; 4] = [128, 64, 32, 16];

struct Change {
    option: &'static str,
    from: Option<String>,
    to: Option<String>,
    options: ExplainOptions,
}

/// The changes that gain something, at most one an option.
pub(super) fn suggestions(
    subject: &Subject,
    options: &ExplainOptions,
    contenders: &Contenders,
    now: &Outcome,
) -> Vec<SuggestionReport> {
    let mut out: Vec<SuggestionReport> = vec![];
    let Ok(model) = subject.needs(contenders) else { return out };
    let best = strength(now.graph_mode) == (GraphMode::Full, true) || now.has_no_graphs;
    if now.verdict == Verdict::Starts && best && (0..now.picks.len()).all(|i| rank(now, i) == 0) {
        return out;
    }
    for c in changes(options) {
        if out.iter().any(|s| s.option == c.option) {
            continue;
        }
        let Ok(then) = answer(subject, &c.options, contenders, false) else { continue };
        if let Some(gain) = gain(model, now, &then, &c) {
            out.push(SuggestionReport { option: c.option, from: c.from, to: c.to, gain });
        }
    }
    out
}

/// Single changes, the mildest of each option first.
fn changes(now: &ExplainOptions) -> Vec<Change> {
    let o = &now.engine;
    let mut out = vec![];
    let mut add = |option, from: Option<String>, to: Option<String>, change: &dyn Fn(&mut ExplainOptions)| {
        if from != to {
            let mut options = now.clone();
            change(&mut options);
            out.push(Change { option, from, to, options });
        }
    };
    let number = |n: Option<usize>| n.map(|n| n.to_string());
    add("--block-size", number(o.block_size), None, &|x| x.engine.block_size = None);
    for b in BLOCK_SIZES {
        add("--block-size", number(o.block_size), Some(b.to_string()), &|x| x.engine.block_size = Some(b));
    }
    // What was measured to be quickest need not come first.
    let named = o.attention_backend.clone().filter(|b| !tuning::is_asked(Some(b)));
    add("--attention-backend", named, None, &|x| x.engine.attention_backend = None);
    let per_kind: Vec<_> = o.backend_per_kind.iter().map(|(k, b)| format!("{k}={b}")).collect();
    let per_kind = (!per_kind.is_empty()).then(|| per_kind.join(","));
    add("--backend-per-kind", per_kind, None, &|x| x.engine.backend_per_kind.clear());
    add("--kv-layout", o.kv_layout.clone(), None, &|x| x.engine.kv_layout = None);
    let flag = |on: bool| on.then(|| "true".to_owned());
    add("--batch-invariant", flag(o.batch_invariant), None, &|x| x.engine.batch_invariant = false);
    add("--kv-connector", flag(now.kv_connector), None, &|x| x.kv_connector = false);
    add("--dcp", number(o.decode_context_parallel), None, &|x| x.engine.decode_context_parallel = None);
    add("--pcp", number(now.prefill_context_parallel), None, &|x| x.prefill_context_parallel = None);
    add("--compilation", (now.compilation == Some(false)).then(|| "off".into()), None, &|x| {
        x.compilation = None
    });
    add("--kv-cache-dtype", o.kv_cache_dtype.clone(), None, &|x| x.engine.kv_cache_dtype = None);
    for d in ["auto", "bfloat16", "fp8"] {
        add("--kv-cache-dtype", o.kv_cache_dtype.clone(), Some(d.into()), &|x| {
            x.engine.kv_cache_dtype = Some(d.into())
        });
    }
    let dtype = (o.dtype != DTypeOption::Auto).then(|| o.dtype.to_string());
    for d in [DType::BF16, DType::F16] {
        add("--dtype", dtype.clone(), Some(d.to_string()), &|x| x.engine.dtype = DTypeOption::As(d));
    }
    add("--speculative-tokens", number(o.speculative_tokens), None, &|x| {
        let e = &mut x.engine;
        // Without drafts their sizes would be refused.
        (e.speculative_tokens, e.prompt_lookup_min, e.prompt_lookup_max) = (None, None, None);
    });
    add("--graph-mode", o.graph_mode.clone(), None, &|x| x.engine.graph_mode = None);
    for m in GraphMode::ALL {
        add("--graph-mode", o.graph_mode.clone(), Some(m.to_string()), &|x| {
            x.engine.graph_mode = Some(m.to_string())
        });
    }
    add("--max-num-seqs", number(o.max_num_seqs), None, &|x| x.engine.max_num_seqs = None);
    for n in FEWER_REQUESTS {
        add("--max-num-seqs", number(o.max_num_seqs), Some(n.to_string()), &|x| {
            x.engine.max_num_seqs = Some(n)
        });
    }
    out
}

/// What the change gains, in a sentence; `None`: nothing, or it costs a layer its backend.
fn gain(model: &ModelNeeds, now: &Outcome, then: &Outcome, c: &Change) -> Option<String> {
    if then.verdict != Verdict::Starts {
        return None;
    }
    let with = match (&c.from, &c.to) {
        (Some(from), None) => format!("without {} {from}", c.option),
        (_, Some(to)) => format!("with {} {to}", c.option),
        (None, None) => return None,
    };
    if now.verdict != Verdict::Starts {
        let mut backends: Vec<&str> = then.picks.iter().flatten().map(|p| p.0.as_str()).collect();
        backends.dedup();
        return Some(format!("{with} it starts, on {}", backends.join(", ")));
    }
    let stronger = strength(then.graph_mode) > strength(now.graph_mode);
    let weaker = strength(then.graph_mode) < strength(now.graph_mode);
    // A backend named by the user had its reason; dropping the name is told, not judged by priority.
    let better: Vec<usize> = (0..now.picks.len()).filter(|&i| rank(then, i) < rank(now, i)).collect();
    let worse = (0..now.picks.len()).any(|i| rank(then, i) > rank(now, i));
    if let (Some(&first), false) = (better.first(), worse || weaker) {
        let (Some(old), Some(new)) = (&now.picks[first], &then.picks[first]) else { return None };
        let reasons = reasons(now, model.mixers[first].layer as u32, &old.0, &new.0)?;
        let layers = better.len();
        return Some(format!(
            "{} is there for {layers} layers only because {} is refused ({reasons}); {with} {} is valid",
            old.0, new.0, new.0
        ));
    }
    if stronger && !worse && c.option != "--graph-mode" {
        return Some(format!("{with} the graph mode is {} instead of {}", then.graph_mode, now.graph_mode));
    }
    (stronger && c.option == "--graph-mode")
        .then(|| format!("{with} the graph mode is {} instead of {}", then.graph_mode, now.graph_mode))
}

/// The place of a layer's backend in the order of preference.
fn rank(o: &Outcome, mixer: usize) -> usize {
    o.picks[mixer].as_ref().map_or(usize::MAX, |p| p.1)
}

/// Modes by how a decode step runs, then by whether mixed steps have graphs at all.
fn strength(mode: GraphMode) -> (GraphMode, bool) {
    (mode.decode_mode(), mode.mixed_mode() != GraphMode::None)
}

/// Why the better backend is refused now.
fn reasons(now: &Outcome, layer: u32, old: &str, new: &str) -> Option<String> {
    let group =
        now.report.groups.iter().find(|g| g.layers.contains(&layer) && g.backend.as_deref() == Some(old))?;
    group.refused.iter().find(|r| r.backend == new).map(|r| r.reasons.join(", "))
}
