//! Lifetime: process. Which backend a layer gets, and why not the others. An explicit request is
//! never a hint: where it doesn't fit, the answer is an error with every reason.

use super::registry::nearest;
use crate::{AttentionError, DynBackend, KindTag, LayerNeed, Refusal, Registry, Result, RuleBook};
use serde::Serialize;
use std::sync::Arc;

/// What selection asks of a candidate: a backend of the registry, or an entry of the catalogue.
///
/// ```
/// use headway_attention::{process::select::{Candidate, choose}, *};
/// /// A rule book of a list, and whether its library is installed.
/// struct Listed(RuleBook, bool);
/// impl Candidate for Listed {
///     fn rules(&self) -> &RuleBook {
///         &self.0
///     }
///     fn combination(&self, _: &LayerNeed) -> Option<Refusal> {
///         None
///     }
///     fn unavailable(&self) -> Option<Refusal> {
///         (!self.1).then(|| "its library is missing".into())
///     }
/// }
///
/// let listed = |name: &'static str, there| Listed(RuleBook { name: name.into(), ..RuleBook::default() }, there);
/// let need = LayerNeed::default();
/// let choice = choose(&[listed("FAST", false), listed("PLAIN", true)], "layer 0", &need, None)?;
/// assert_eq!((choice.chosen, choice.refused[0].backend.as_str()), (1, "FAST"));
/// assert_eq!(choice.refused[0].reasons, ["its library is missing".into()]);
/// # Ok::<(), AttentionError>(())
/// ```
pub trait Candidate {
    /// The rule book.
    fn rules(&self) -> &RuleBook;
    /// Every reason against it by the rule book's fields.
    fn refusals(&self, need: &LayerNeed) -> Vec<Refusal> {
        self.rules().refusals(need)
    }
    /// A combination that no field can say.
    fn combination(&self, need: &LayerNeed) -> Option<Refusal>;
    /// Why others that fit go first, though it fits.
    fn stands_back(&self, need: &LayerNeed) -> Option<Refusal> {
        let _ = need;
        None
    }
    /// Why it can't be used whatever the layer (a library that is missing).
    fn unavailable(&self) -> Option<Refusal> {
        None
    }
}

impl Candidate for Arc<dyn DynBackend> {
    fn rules(&self) -> &RuleBook {
        (**self).rules()
    }
    fn refusals(&self, need: &LayerNeed) -> Vec<Refusal> {
        (**self).refusals(need)
    }
    fn combination(&self, need: &LayerNeed) -> Option<Refusal> {
        (**self).combination(need)
    }
    fn stands_back(&self, need: &LayerNeed) -> Option<Refusal> {
        (**self).stands_back(need)
    }
}

/// What the user asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackendRequest {
    /// `--attention-backend`, for every layer that attends.
    pub backend: Option<String>,
    /// `--backend-per-kind`: a kind of layer ([`LayerNeed::layer_kind`]) and its backend; wins over
    /// `backend`.
    pub per_kind: Vec<(String, String)>,
}

impl BackendRequest {
    /// Reads `--backend-per-kind`: `sliding_window=TRITON_ATTN,mla=FLASHMLA`.
    ///
    /// # Errors
    /// A pair without `=`, a kind that doesn't exist, or one named twice.
    pub fn parse_per_kind(text: &str) -> Result<Vec<(String, String)>> {
        let mut out: Vec<(String, String)> = vec![];
        for pair in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let wrong = |why: String| AttentionError::Selection(format!("--backend-per-kind {pair}: {why}"));
            let (kind, name) = pair
                .split_once('=')
                .ok_or_else(|| wrong("write KIND=BACKEND, pairs separated by commas".into()))?;
            if !LayerNeed::LAYER_KINDS.contains(&kind) {
                let near = nearest(kind, LayerNeed::LAYER_KINDS.into_iter());
                let near = near.map(|n| format!(" (did you mean {n}?)")).unwrap_or_default();
                return Err(wrong(format!(
                    "no kind of layer is named {kind}; there are: {}{near}",
                    LayerNeed::LAYER_KINDS.join(", ")
                )));
            }
            if out.iter().any(|(k, _)| k == kind) {
                return Err(wrong(format!("{kind} is named twice")));
            }
            out.push((kind.to_owned(), name.to_owned()));
        }
        Ok(out)
    }

    /// The backend asked for a layer of this need, and the option that asked.
    pub fn for_layer(&self, need: &LayerNeed) -> Option<(&str, &'static str)> {
        let kind = need.layer_kind();
        let by_kind =
            self.per_kind.iter().find(|(k, _)| k == kind).map(|(_, n)| (n.as_str(), "--backend-per-kind"));
        let attends = need.kind != KindTag::StateSpace;
        by_kind.or_else(|| self.backend.as_deref().filter(|_| attends).map(|n| (n, "--attention-backend")))
    }
}

/// A candidate that doesn't fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The backend's name.
    pub backend: String,
    /// Every reason, in the field's order.
    pub reasons: Vec<Refusal>,
}

/// The answer for a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Index of the chosen candidate.
    pub chosen: usize,
    /// Candidates that don't fit, or stand back for the chosen one, in priority order.
    pub refused: Vec<Refused>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// The answer for a layer, with the backend itself.
#[derive(Clone)]
pub struct Selection {
    /// The backend that the layer gets.
    pub backend: Arc<dyn DynBackend>,
    /// Backends that don't fit, in priority order.
    pub refused: Vec<Refused>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// Chooses a backend of the registry for a layer. `layer` names it in errors.
///
/// # Errors
/// As [`Registry::get`] for a requested name; [`AttentionError::Selection`] where the requested backend doesn't fit, or
/// none does.
pub fn select(
    registry: &Registry,
    layer: &str,
    need: &LayerNeed,
    request: &BackendRequest,
) -> Result<Selection> {
    let mut candidates: Vec<_> = registry.iter().cloned().collect();
    let named = match request.for_layer(need) {
        None => None,
        Some((name, option)) => {
            let backend = registry.get_on(name, &need.platform)?;
            let at = candidates.iter().position(|b| Arc::ptr_eq(b, &backend)).unwrap_or(candidates.len());
            // A composition is a candidate only where it is asked for.
            candidates.extend((at == candidates.len()).then_some(backend));
            Some((at, option))
        }
    };
    let Choice { chosen, refused, warnings } = choose(&candidates, layer, need, named)?;
    Ok(Selection { backend: candidates[chosen].clone(), refused, warnings })
}

/// Every reason against a candidate, the combination rule's last.
pub fn reasons(candidate: &impl Candidate, need: &LayerNeed) -> Vec<Refusal> {
    if let Some(missing) = candidate.unavailable() {
        return vec![missing];
    }
    let mut reasons = candidate.refusals(need);
    reasons.extend(candidate.combination(need));
    reasons
}

/// Chooses among candidates in priority order; `named` is the index of the one that an option asks for.
///
/// # Errors
/// As [`select`].
pub fn choose<C: Candidate>(
    candidates: &[C],
    layer: &str,
    need: &LayerNeed,
    named: Option<(usize, &str)>,
) -> Result<Choice> {
    let mut all: Vec<Vec<Refusal>> = candidates.iter().map(|c| reasons(c, need)).collect();
    if named.is_none() {
        stand_back(candidates, need, &mut all);
    }
    let refused = || -> Vec<Refused> {
        let name = |i: usize| candidates[i].rules().name.to_string();
        let bad = all.iter().enumerate().filter(|(_, r)| !r.is_empty());
        bad.map(|(i, r)| Refused { backend: name(i), reasons: r.clone() }).collect()
    };
    if let Some((at, option)) = named {
        if all[at].is_empty() {
            return Ok(Choice { chosen: at, refused: refused(), warnings: vec![] });
        }
        return Err(not_valid(&candidates[at].rules().name, layer, option, &all[at], need));
    }
    let Some(chosen) = all.iter().position(Vec::is_empty) else {
        return Err(none_valid(layer, need, &refused()));
    };
    let warnings = block_size_warning(candidates, &all[..chosen], chosen, need).into_iter().collect();
    Ok(Choice { chosen, refused: refused(), warnings })
}

/// Adds why some of those that fit stand back, unless all of them do.
fn stand_back<C: Candidate>(candidates: &[C], need: &LayerNeed, all: &mut [Vec<Refusal>]) {
    let fits = all.iter().map(Vec::is_empty);
    let why: Vec<_> =
        candidates.iter().zip(fits).map(|(c, fits)| fits.then(|| c.stands_back(need))).collect();
    if why.iter().any(|w| matches!(w, Some(None))) {
        for (reasons, why) in all.iter_mut().zip(why) {
            reasons.extend(why.flatten());
        }
    }
}

fn list(reasons: &[Refusal]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn not_valid(name: &str, layer: &str, option: &str, reasons: &[Refusal], need: &LayerNeed) -> AttentionError {
    AttentionError::Selection(format!(
        "Selected backend {name} is not valid for {layer} ({}): {}. {option} asked for it; leave it out to have one \
         chosen",
        need.summary(),
        list(reasons)
    ))
}

fn none_valid(layer: &str, need: &LayerNeed, refused: &[Refused]) -> AttentionError {
    let each: Vec<_> = refused.iter().map(|r| format!("{}: [{}]", r.backend, list(&r.reasons))).collect();
    AttentionError::Selection(format!(
        "No valid attention backend found for {layer} ({}). Reasons: {}",
        need.summary(),
        if each.is_empty() { "no backend is registered".into() } else { each.join("; ") }
    ))
}

/// A block size that alone excluded a better backend costs speed without a need.
fn block_size_warning<C: Candidate>(
    candidates: &[C],
    higher: &[Vec<Refusal>],
    chosen: usize,
    need: &LayerNeed,
) -> Option<String> {
    let block_size = need.block_size?;
    let only = Refusal::from("block_size not supported");
    let names: Vec<_> = higher
        .iter()
        .enumerate()
        .filter(|(_, r)| matches!(r.as_slice(), [r] if *r == only))
        .map(|(i, _)| candidates[i].rules().name.as_ref())
        .collect();
    (!names.is_empty()).then(|| {
        format!(
            "--block-size {block_size} precluded higher-priority backend(s) {}. Using {} instead, which may result \
             in reduced performance. Consider removing --block-size to auto-select the optimal block size.",
            names.join(", "),
            candidates[chosen].rules().name
        )
    })
}

impl LayerNeed {
    /// The kinds of layer that `--backend-per-kind` takes.
    pub const LAYER_KINDS: [&'static str; 6] =
        ["full", "sliding_window", "mla", "state_space", "encoder", "cross"];

    /// What implements layers of one of [`LayerNeed::LAYER_KINDS`]; `None` for another name.
    pub fn tag_of_kind(kind: &str) -> Option<KindTag> {
        match kind {
            "mla" => Some(KindTag::Mla),
            "state_space" => Some(KindTag::StateSpace),
            other => Self::LAYER_KINDS.contains(&other).then_some(KindTag::Standard),
        }
    }

    /// The layer's kind, as options and reports name it.
    pub fn layer_kind(&self) -> &'static str {
        use super::rules::AttnType;
        match (self.kind, self.attn_type) {
            (KindTag::StateSpace, _) => "state_space",
            (KindTag::Mla, _) => "mla",
            (_, AttnType::Encoder | AttnType::EncoderOnly) => "encoder",
            (_, AttnType::EncoderDecoder) => "cross",
            _ if self.sliding_window.is_some() => "sliding_window",
            _ => "full",
        }
    }

    /// The layer in one line.
    pub fn summary(&self) -> String {
        let kv = self.kv_cache_dtype.as_ref().map_or("auto", |d| d.0.as_ref());
        let mut text =
            format!("{} of head size {}, {}, KV cache {kv}", self.kind.name(), self.head_size, self.dtype);
        if let Some(b) = self.block_size {
            text += &format!(", block size {b}");
        }
        if let Some(w) = self.sliding_window {
            text += &format!(", window {w}");
        }
        text += &format!(", on {}", self.platform);
        if let Some(c) = self.compute_capability {
            text += &format!(" {c}");
        }
        text
    }
}
