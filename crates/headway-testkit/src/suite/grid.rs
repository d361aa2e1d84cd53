//! From a rule book to the cells that must run: every value of every axis, by a stated rule.
//!
//! The whole product is too large, so there are four passes, each over the three phases:
//! 1. activation dtype × cache dtype × feature, the other axes drawn at random by a counter;
//! 2. activation dtype × head size (and a pair with another value size where allowed);
//! 3. block size (the kernel's, and the manager's at once or twice that) × cache layout × head ratio;
//! 4. head size, over the first cache dtype of 8 bits.
//!
//! Head sizes of a range: the first, the last, one in the middle, and those of 64, 80, 96, 128, 192 and
//! 256 that it holds. Block sizes of "a multiple of n": n, 3 n and the least multiple from 16 on.

use super::cell::{Cell, Features, NonCausal, Phase};
use crate::rng::Rng;
use headway_attention::{
    RuleBook,
    group::kv::layout::KvCacheLayout,
    process::rules::{KernelBlockSize, KindTag, KvCacheDType, LatentDims},
};
use headway_tensor::DType;

/// Query heads and key/value heads.
pub const HEAD_RATIOS: [(usize, usize); 5] = [(4, 1), (4, 2), (4, 4), (12, 3), (1, 1)];

/// Head sizes that stand for those that the rule book takes.
pub fn head_sizes(rules: &RuleBook) -> Vec<usize> {
    let usual = [64, 80, 96, 128, 192, 256];
    let mut sizes: Vec<usize> = rules
        .head_sizes
        .iter()
        .flat_map(|r| {
            let steps = (r.last - r.first.min(r.last)) / r.step.max(1);
            [r.first, r.first + steps / 2 * r.step, r.first + steps * r.step]
        })
        .chain(usual.into_iter().filter(|&n| rules.supports_head_size(n)))
        .collect();
    if rules.head_sizes.is_empty() {
        sizes.extend([1, 7, 32]);
    }
    sizes.retain(|&n| n > 0);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Kernel block sizes that stand for those that the rule book takes.
pub fn kernel_block_sizes(rules: &RuleBook) -> Vec<usize> {
    let mut sizes: Vec<usize> = rules
        .kernel_block_sizes
        .iter()
        .flat_map(|k| match *k {
            KernelBlockSize::Exact(n) => vec![n],
            KernelBlockSize::MultipleOf(n) => vec![n, 3 * n, 16usize.next_multiple_of(n.max(1))],
        })
        .chain(rules.preferred_block_size)
        .collect();
    if rules.kernel_block_sizes.is_empty() {
        sizes.extend([1, 5, 16]);
    }
    sizes.retain(|&n| n > 0);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Pairs of key and value head size with different sizes.
pub fn different_v_sizes(rules: &RuleBook) -> Vec<(usize, usize)> {
    if !rules.supports_different_v_head_size {
        return vec![];
    }
    let sizes = head_sizes(rules);
    let (small, large) = (sizes[sizes.len() / 3], sizes[sizes.len() / 2]);
    if small == large { vec![] } else { vec![(large, small), (small, large)] }
}

/// The layouts to run, where the rule book names some. A layer's cache is addressed by block, so these
/// are the ones whose pages are one region of memory.
pub fn layouts(rules: &RuleBook) -> Vec<Option<KvCacheLayout>> {
    let named = rules.kv_cache_layouts.iter().copied();
    let named: Vec<_> = named.filter(|l| l.is_block_compact()).map(Some).collect();
    if named.is_empty() { vec![None] } else { named }
}

/// The features to run: each one that the rule book takes, pairs that models have, and all at once.
/// Window sizes take turns: one token, less than a block, a block, a little more, several blocks.
pub fn features(rules: &RuleBook, block_size: usize, turn: usize) -> Vec<Features> {
    let windows = [3, block_size, 1, block_size + 1, 2 * block_size + 3];
    let window = Some(windows[turn % windows.len()]);
    let plain = Features::default();
    let cap = Some(1.5);
    let (w, s) = (rules.supports_sliding_window, rules.supports_sinks);
    let (c, a) = (rules.supports_logit_soft_cap, rules.supports_alibi);
    let (m, r) = (rules.supports_mm_prefix, rules.supports_rswa);
    let everything =
        Features { window: window.filter(|_| w), sinks: s, soft_cap: cap.filter(|_| c), alibi: a, ..plain };
    let all = [
        (true, plain),
        (true, Features { huge_scores: true, ..plain }),
        (w, Features { window, ..plain }),
        (s, Features { sinks: true, ..plain }),
        (c, Features { soft_cap: cap, ..plain }),
        (c, Features { soft_cap: Some(50.0), huge_scores: true, ..plain }),
        (a, Features { alibi: true, ..plain }),
        (w && s, Features { window, sinks: true, ..plain }),
        (w && c, Features { window, soft_cap: cap, ..plain }),
        (w || s || c || a, everything),
        (rules.supports_non_causal, Features { non_causal: NonCausal::All, ..plain }),
        (rules.supports_non_causal, Features { non_causal: NonCausal::PerRequest, ..plain }),
        (m, Features { spans: true, ..plain }),
        (m && w, Features { spans: true, window, ..plain }),
        (
            m && rules.supports_non_causal,
            Features { spans: true, window, non_causal: NonCausal::PerRequest, ..plain },
        ),
        (r, Features { rswa: window, ..plain }),
        (r && m && s && c, Features { rswa: window, spans: true, sinks: true, soft_cap: cap, ..plain }),
    ];
    let mut on: Vec<Features> = vec![];
    for (_, f) in all.into_iter().filter(|(on, _)| *on) {
        if !on.contains(&f) {
            on.push(f);
        }
    }
    on
}

/// The axes of a rule book, sampled, and a counter that draws from the ones that aren't multiplied.
struct Axes<'a> {
    rules: &'a RuleBook,
    head_sizes: Vec<usize>,
    blocks: Vec<(usize, usize)>,
    layouts: Vec<Option<KvCacheLayout>>,
    turn: usize,
}

impl<'a> Axes<'a> {
    fn new(rules: &'a RuleBook) -> Self {
        let mut blocks: Vec<_> =
            kernel_block_sizes(rules).into_iter().flat_map(|k| [(k, k), (2 * k, k)]).collect();
        blocks.sort_unstable();
        Self { rules, head_sizes: head_sizes(rules), blocks, layouts: layouts(rules), turn: 0 }
    }

    /// A cell with these values; what isn't given is drawn by a counter. Head sizes come
    /// from the smaller half and blocks are of up to 64 tokens: the large ones have passes of their own.
    fn next(&mut self, dtype: DType, kv_cache_dtype: KvCacheDType, phase: Phase) -> Cell {
        self.turn += 1;
        let mut rng = Rng::new(self.turn as u64);
        let mut turn = |n: usize| rng.below(n);
        let head_size = self.head_sizes[turn(self.head_sizes.len().div_ceil(2))];
        let short = self.blocks.iter().filter(|b| b.0 <= 64).count().max(1);
        let (block_size, kernel_block_size) = self.blocks[turn(short)];
        let (num_heads, num_kv_heads) = HEAD_RATIOS[turn(HEAD_RATIOS.len())];
        let layout = self.layouts[turn(self.layouts.len())];
        Cell {
            dtype,
            kv_cache_dtype,
            head_size,
            head_size_v: head_size,
            latent: None,
            drafts: 0,
            num_heads,
            num_kv_heads,
            block_size,
            kernel_block_size,
            layout,
            features: Features::default(),
            phase,
            batch_invariant: false,
        }
    }

    fn by_dtype_and_feature(&mut self, cells: &mut Vec<Cell>) {
        let rules = self.rules;
        for &dtype in &rules.dtypes {
            for kv in &rules.kv_cache_dtypes {
                for phase in Phase::ALL {
                    let count = features(rules, 16, 0).len();
                    for f in 0..count {
                        let cell = self.next(dtype, kv.clone(), phase);
                        let turn = self.turn / count;
                        let features = features(rules, cell.block_size, turn)[f];
                        cells.push(Cell { features, ..cell });
                    }
                }
            }
        }
    }

    fn by_head_size(&mut self, cells: &mut Vec<Cell>) {
        let rules = self.rules;
        let Some(kv) = rules.kv_cache_dtypes.first() else { return };
        let same = self.head_sizes.iter().map(|&n| (n, n)).collect::<Vec<_>>();
        for (head_size, head_size_v) in same.into_iter().chain(different_v_sizes(rules)) {
            for &dtype in &rules.dtypes {
                for phase in Phase::ALL {
                    let cell = self.next(dtype, kv.clone(), phase);
                    cells.push(Cell { head_size, head_size_v, ..cell });
                }
            }
        }
    }

    /// Kernels over 8-bit caches may be others than those of pass 2.
    fn by_head_size_in_8_bits(&mut self, cells: &mut Vec<Cell>) {
        let rules = self.rules;
        let narrow =
            |kv: &&KvCacheDType| matches!(kv.element(DType::F32), Some(DType::F8E4M3 | DType::F8E5M2));
        let (Some(kv), Some(&dtype)) = (rules.kv_cache_dtypes.iter().find(narrow), rules.dtypes.first())
        else {
            return;
        };
        for head_size in self.head_sizes.clone() {
            for phase in Phase::ALL {
                let cell = self.next(dtype, kv.clone(), phase);
                cells.push(Cell { head_size, head_size_v: head_size, ..cell });
            }
        }
    }

    fn by_block(&mut self, cells: &mut Vec<Cell>) {
        let rules = self.rules;
        let (Some(kv), Some(&dtype)) = (rules.kv_cache_dtypes.first(), rules.dtypes.first()) else { return };
        for (block_size, kernel_block_size) in self.blocks.clone() {
            for layout in self.layouts.clone() {
                for (num_heads, num_kv_heads) in HEAD_RATIOS {
                    for phase in Phase::ALL {
                        let cell = self.next(dtype, kv.clone(), phase);
                        let of = Cell { block_size, kernel_block_size, layout, ..cell };
                        cells.push(Cell { num_heads, num_kv_heads, ..of });
                    }
                }
            }
        }
    }

    fn batch_invariant(&mut self, cells: &mut Vec<Cell>) {
        let rules = self.rules;
        if !rules.supports_batch_invariance {
            return;
        }
        for &dtype in &rules.dtypes {
            for kv in &rules.kv_cache_dtypes {
                for phase in Phase::ALL {
                    let cell = self.next(dtype, kv.clone(), phase);
                    let features = features(rules, cell.block_size, self.turn);
                    let features = features[Rng::new(!(self.turn as u64)).below(features.len())];
                    cells.push(Cell { batch_invariant: true, features, ..cell });
                }
            }
        }
    }
}

/// Heads and dimensions of latent attention: small, odd numbers of heads, without a rotary part, a real model's, and such
/// latents with as many heads as large models have.
const LATENT: [(usize, [usize; 4]); 8] = [
    (4, [32, 16, 48, 24]),
    (3, [8, 8, 24, 40]),
    (1, [64, 32, 32, 32]),
    (2, [16, 0, 64, 16]),
    (130, [8, 8, 16, 8]),
    (2, [128, 64, 512, 128]),
    (64, [8, 64, 512, 8]),
    (20, [16, 64, 512, 16]),
];

/// The cells of latent attention: dtypes × cache dtypes, dimensions, blocks × layouts, drafts and batch invariance, each
/// over the phases.
fn latent_cells(axes: &mut Axes<'_>) -> Vec<Cell> {
    let rules = axes.rules;
    let sizes: Vec<_> = LATENT.into_iter().filter(|(_, d)| rules.supports_head_size(d[1] + d[2])).collect();
    let (Some(kv), Some(&dtype), false) =
        (rules.kv_cache_dtypes.first(), rules.dtypes.first(), sizes.is_empty())
    else {
        return vec![];
    };
    let of = |cell: Cell, (num_heads, [nope, rope, rank, v]): (usize, [usize; 4])| Cell {
        head_size: rank + rope,
        head_size_v: rank + rope,
        num_heads,
        num_kv_heads: 1,
        latent: Some(LatentDims {
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            kv_lora_rank: rank,
            v_head_dim: v,
            index_topk: None,
        }),
        ..cell
    };
    let small = |turn: usize| sizes[turn % sizes.len().min(4)];
    let mut cells = vec![];
    for phase in Phase::ALL {
        for &dtype in &rules.dtypes {
            for kv in &rules.kv_cache_dtypes {
                let cell = axes.next(dtype, kv.clone(), phase);
                cells.push(of(cell, small(axes.turn)));
                if rules.supports_batch_invariance {
                    let cell = axes.next(dtype, kv.clone(), phase);
                    cells.push(of(Cell { batch_invariant: true, ..cell }, small(axes.turn)));
                }
            }
            let cell = axes.next(dtype, kv.clone(), phase);
            cells.push(of(
                Cell { drafts: if phase == Phase::Prefill { 0 } else { 3 }, ..cell },
                small(axes.turn),
            ));
        }
        for &size in &sizes {
            let cell = axes.next(dtype, kv.clone(), phase);
            cells.push(of(cell, size));
        }
        for (block_size, kernel_block_size) in axes.blocks.clone() {
            for layout in axes.layouts.clone() {
                let cell = axes.next(dtype, kv.clone(), phase);
                cells.push(of(Cell { block_size, kernel_block_size, layout, ..cell }, small(axes.turn)));
            }
        }
    }
    cells
}

/// Every cell that stands for a yes of the rule book. Cells that
/// [`headway_attention::AttentionBackend::combination`] refuses are still among them.
pub fn cells(rules: &RuleBook) -> Vec<Cell> {
    let mut axes = Axes::new(rules);
    let mut cells = vec![];
    if axes.head_sizes.is_empty() || axes.blocks.is_empty() {
        return cells;
    }
    if rules.kind == KindTag::Mla {
        return latent_cells(&mut axes);
    }
    axes.by_dtype_and_feature(&mut cells);
    axes.by_head_size(&mut cells);
    axes.by_block(&mut cells);
    axes.batch_invariant(&mut cells);
    axes.by_head_size_in_8_bits(&mut cells);
    cells
}
