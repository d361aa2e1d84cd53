//! Lifetime: the model. The block size that the kernels of a KV cache group see.

use crate::{AttentionError, Result, RuleBook, process::rules::KernelBlockSize};

/// The kernel block size of a manager block that all backends take: the manager's own where each of
/// them takes it, else the largest exact size that any of them names, divides the manager's, and all
/// take.
///
/// # Errors
/// No common size; names each backend with its sizes.
pub fn select_kernel_block_size(manager_block_size: usize, backends: &[&RuleBook]) -> Result<usize> {
    let all_take = |size: usize| {
        backends
            .iter()
            .all(|b| b.kernel_block_sizes.is_empty() || b.kernel_block_sizes.iter().any(|k| k.accepts(size)))
    };
    if all_take(manager_block_size) {
        return Ok(manager_block_size);
    }
    let mut exact: Vec<usize> = backends
        .iter()
        .flat_map(|b| &b.kernel_block_sizes)
        .filter_map(|k| match k {
            KernelBlockSize::Exact(n) => Some(*n),
            KernelBlockSize::MultipleOf(_) => None,
        })
        .filter(|&n| n > 0 && manager_block_size.is_multiple_of(n))
        .collect();
    exact.sort_unstable_by(|a, b| b.cmp(a));
    exact.into_iter().find(|&n| all_take(n)).ok_or_else(|| {
        let sizes = |b: &RuleBook| -> String {
            let list: Vec<_> = b.kernel_block_sizes.iter().map(ToString::to_string).collect();
            format!("{}: [{}]", b.name, list.join(", "))
        };
        let each: Vec<_> = backends.iter().map(|b| sizes(b)).collect();
        AttentionError::KvCache(format!(
            "No common block size for {manager_block_size} ({}).",
            each.join("; ")
        ))
    })
}

/// The block size of a KV cache group that all of its backends take. Blocks that aren't cut stay whole: of
/// state-space layers (`whole`), and those between whose pages other layers' lie.
///
/// # Errors
/// As [`select_kernel_block_size`].
pub fn group_block_size(
    manager_block_size: usize,
    whole: bool,
    pages_between: bool,
    backends: &[&RuleBook],
) -> Result<usize> {
    if whole || pages_between {
        return Ok(manager_block_size);
    }
    select_kernel_block_size(manager_block_size, backends)
}
