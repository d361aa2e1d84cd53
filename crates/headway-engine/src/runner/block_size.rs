//! Tokens in a block of the KV cache: as asked, as backends prefer, and as states beside attention make it.

use super::{StartupError, decide::Setting};
use crate::models::needs::{LayerNeeds, MixerNeeds};
use headway_attention::{
    RuleBook,
    process::{rules::KernelBlockSize, select::Selection},
};

/// Tokens in a block where neither the user nor a backend says.
pub const DEFAULT_BLOCK_SIZE: usize = 16;
/// Tokens in a block, at most.
const LARGEST_BLOCK: usize = 1 << 20;

/// The block size of a model's attention layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// As asked, or as the backends prefer.
    pub preferred: usize,
    /// After states had their say.
    pub in_force: usize,
}

/// Tokens in a block as the backends prefer or the user asks, and after states had their say. Layers without
/// a cache, and states themselves, are not asked.
///
/// # Errors
/// A size that a backend doesn't take; states so large that no block of attention is as large.
pub fn of_layers(
    setting: &Setting,
    layers: &[LayerNeeds],
    selections: &[Selection],
    max_model_len: usize,
) -> Result<BlockSizes, StartupError> {
    let is_state = |l: &LayerNeeds| matches!(l.mixer, MixerNeeds::State(_));
    let pages: Vec<(&LayerNeeds, &RuleBook)> = layers
        .iter()
        .zip(selections)
        .filter(|(l, _)| setting.need(l).has_cache && !is_state(l))
        .map(|(l, s)| (l, s.backend.rules()))
        .collect();
    let rules = || pages.iter().map(|(_, r)| *r);
    let preferred = block_size(rules(), setting.block_size)?;
    let page = |l: &LayerNeeds| setting.cache_spec(l, 1, max_model_len).page_size_bytes();
    let token = pages.iter().map(|(l, _)| page(l)).max().unwrap_or(0);
    let state = layers.iter().filter(|l| is_state(l)).map(page).max().unwrap_or(0);
    let in_force = block_size_beside_states(preferred, token, state, rules());
    if in_force > LARGEST_BLOCK {
        return Err(StartupError::Option {
            option: "--block-size",
            value: setting.block_size.map_or_else(|| "(not given)".into(), |b| b.to_string()),
            why: format!(
                "a request's state is {state} bytes, and a page of attention as large would hold {in_force} tokens of \
                 {token} bytes, more than the {LARGEST_BLOCK} that a block may; choose a wider --kv-cache-dtype, or \
                 set mamba_ssm_cache_dtype in config.json to a narrower type"
            ),
        });
    }
    Ok(BlockSizes { preferred, in_force })
}

/// The manager's block size: as asked (selection has checked it), or what the backends prefer.
///
/// # Errors
/// A size that a backend doesn't take.
pub fn block_size<'a>(
    rules: impl Iterator<Item = &'a RuleBook> + Clone,
    asked: Option<usize>,
) -> Result<usize, StartupError> {
    match asked {
        Some(b) if b == 0 || b > LARGEST_BLOCK || !rules.clone().all(|r| r.supports_block_size(b)) => {
            Err(block_size_error(b, rules))
        }
        Some(b) => Ok(b),
        None => {
            let preferred = rules.clone().map(|r| r.preferred_block_size(DEFAULT_BLOCK_SIZE)).max();
            let preferred = preferred.unwrap_or(DEFAULT_BLOCK_SIZE);
            // Backends that prefer different sizes: the first multiple that all take.
            let multiple =
                (1..=64).map(|n| n * preferred).find(|b| rules.clone().all(|r| r.supports_block_size(*b)));
            Ok(multiple.unwrap_or(preferred))
        }
    }
}

/// The error of a block size that isn't taken.
pub fn block_size_error<'a>(asked: usize, rules: impl Iterator<Item = &'a RuleBook> + Clone) -> StartupError {
    block_size_error_of("--block-size", asked, rules)
}

/// The same of another option.
pub fn block_size_error_of<'a>(
    option: &'static str,
    asked: usize,
    rules: impl Iterator<Item = &'a RuleBook> + Clone,
) -> StartupError {
    StartupError::Option {
        option,
        value: asked.to_string(),
        why: format!("{} takes {}; give such a number, or leave it out", names(rules.clone()), sizes(rules)),
    }
}

fn names<'a>(rules: impl Iterator<Item = &'a RuleBook>) -> String {
    let mut names: Vec<_> = rules.map(|r| r.name.to_string()).collect();
    names.dedup();
    names.join(", ")
}

fn sizes<'a>(rules: impl Iterator<Item = &'a RuleBook>) -> String {
    let mut sizes: Vec<usize> = rules.flat_map(|r| r.kernel_block_sizes.iter().map(smallest)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let least = sizes.clone();
    sizes.retain(|n| !least.iter().any(|m| m < n && n.is_multiple_of(*m)));
    let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
    format!("multiples of {} up to {LARGEST_BLOCK}", sizes.join(" or "))
}

fn smallest(k: &KernelBlockSize) -> usize {
    match *k {
        KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => n,
    }
}

/// The block size that makes an attention page at least as large as a page of state: all pages of a pool have
/// one size, and an attention page that is padded up to a state's would waste what it is padded with. The smallest
/// multiple of what the kernels take; `at_least` where that is large enough.
pub fn block_size_beside_states<'a>(
    at_least: usize,
    bytes_per_token: usize,
    state_bytes: usize,
    rules: impl Iterator<Item = &'a RuleBook>,
) -> usize {
    if bytes_per_token == 0 || at_least * bytes_per_token >= state_bytes {
        return at_least;
    }
    let step = rules
        .map(|r| r.kernel_block_sizes.iter().map(smallest).min().unwrap_or(1).max(1))
        .fold(DEFAULT_BLOCK_SIZE, |a, b| a / gcd(a, b) * b);
    state_bytes.div_ceil(bytes_per_token).next_multiple_of(step)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_pages_grow_to_a_state() {
        let sixteen =
            RuleBook { kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)], ..RuleBook::default() };
        let of = |at_least, token, state| {
            block_size_beside_states(at_least, token, state, std::iter::once(&sixteen))
        };
        // 8 heads of 128 in bfloat16 beside a state of 5,316,608 bytes.
        assert_eq!(of(16, 4096, 5_316_608), 1312);
        assert_eq!(of(16, 1024, 1_594_368), 1568);
        assert_eq!(of(2048, 4096, 5_316_608), 2048);
        assert_eq!(of(16, 4096, 0), 16);
    }
}
