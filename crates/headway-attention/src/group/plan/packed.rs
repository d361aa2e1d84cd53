//! Lifetime: the model. KV cache groups where blocks are outermost and pages differ in size: a block
//! holds a group's pages side by side, as often as the layers' pattern repeats.

use super::cache_groups::KvCacheGroup;
use crate::{AttentionError, AttnLayer, KvCacheSpec, Result, group::kv::merge};

type Layers = Vec<(AttnLayer, KvCacheSpec)>;

/// Layers that could share a block table, by the size of their pages.
struct Bucket {
    layers: Layers,
    by_page: Vec<(usize, Layers)>,
}

impl Bucket {
    fn new(layers: Layers) -> Self {
        let mut by_page: Vec<(usize, Layers)> = vec![];
        for (layer, spec) in &layers {
            let page = spec.page_size_bytes();
            match by_page.iter_mut().find(|(p, _)| *p == page) {
                Some((_, same)) => same.push((*layer, spec.clone())),
                None => by_page.push((page, vec![(*layer, spec.clone())])),
            }
        }
        Self { layers, by_page }
    }

    /// As many layers of each page size: a pattern that repeats.
    fn balanced(&self) -> bool {
        self.by_page.iter().all(|(_, l)| l.len() == self.by_page[0].1.len())
    }

    fn repeats(&self) -> usize {
        self.by_page.iter().map(|(_, l)| l.len()).max().unwrap_or(0)
    }

    /// States and windows need few blocks, so they are split to fit the block that the others need.
    fn splits(&self) -> bool {
        use KvCacheSpec::{Mamba, SlidingWindow, SlidingWindowMla};
        matches!(self.layers[0].1, Mamba(_) | SlidingWindow { .. } | SlidingWindowMla { .. })
    }

    /// Bytes of the widest of `n` groups.
    fn widest(&self, n: usize) -> usize {
        self.by_page.iter().map(|(page, l)| l.len().div_ceil(n) * page).sum()
    }
}

/// The number of repeats a group that pads least over all buckets; the larger of two.
fn least_padding(counts: &[usize], at_least: usize) -> usize {
    let low = at_least.max(1);
    let high = counts.iter().copied().max().unwrap_or(0).max(low);
    let padding = |d: usize| counts.iter().map(|c| c.next_multiple_of(d) - c).sum::<usize>();
    (low..=high).min_by_key(|&d| (padding(d), usize::MAX - d)).unwrap_or(low)
}

/// Groups for a layout whose blocks are outermost.
///
/// # Errors
/// A part of a bucket that turns out not to be of one type.
pub(super) fn packed_groups(layers: &[(AttnLayer, KvCacheSpec)]) -> Result<Vec<KvCacheGroup>> {
    let mut buckets: Vec<Layers> = vec![];
    for (layer, spec) in layers {
        let home = buckets.iter_mut().find(|b| {
            let mut specs: Vec<_> = b.iter().map(|(_, s)| s).collect();
            specs.push(spec);
            merge::is_uniform_type(&specs)
        });
        match home {
            Some(bucket) => bucket.push((*layer, spec.clone())),
            None => buckets.push(vec![(*layer, spec.clone())]),
        }
    }
    let buckets: Vec<Bucket> = buckets.into_iter().map(Bucket::new).collect();
    let balanced = || buckets.iter().filter(|b| b.balanced());
    let floor = balanced().filter(|b| b.by_page.len() > 1).map(Bucket::repeats).max().unwrap_or(0);
    let repeats =
        (floor > 0).then(|| least_padding(&balanced().map(Bucket::repeats).collect::<Vec<_>>(), floor));
    let parts = |b: &Bucket| match repeats {
        Some(r) if b.balanced() => b.repeats().div_ceil(r),
        _ => 1,
    };
    // A bucket that can go down to one layer a group never widens the block.
    let block = buckets
        .iter()
        .map(|b| b.widest(if b.splits() { b.layers.len() } else { parts(b) }))
        .max()
        .unwrap_or(0);
    let mut groups = vec![];
    for b in &buckets {
        let mut n = parts(b);
        if b.splits() {
            while n < b.layers.len() && b.widest(n) > block {
                n += 1;
            }
        }
        groups.extend(split(b, n)?);
    }
    Ok(groups)
}

fn split(bucket: &Bucket, n: usize) -> Result<Vec<KvCacheGroup>> {
    let of = |layers: &Layers| {
        KvCacheGroup::uniform(layers)
            .ok_or_else(|| AttentionError::KvCache("layers of one bucket are not of one type".into()))
    };
    if n == 1 {
        return Ok(vec![of(&bucket.layers)?]);
    }
    (0..n)
        .map(|i| {
            let mut part = vec![];
            for repeat in (i..bucket.repeats()).step_by(n) {
                part.extend(bucket.by_page.iter().filter_map(|(_, l)| l.get(repeat).cloned()));
            }
            of(&part)
        })
        .collect()
}
