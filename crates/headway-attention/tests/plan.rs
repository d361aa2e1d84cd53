//! The plan of a model's KV cache: groups, kernel blocks, placing, sharing.

mod support;

use headway_attention::{group::kv::layout::KvCacheLayout, *};
use headway_tensor::DType;
use support::registry;

fn full(block: usize, heads: usize) -> KvCacheSpec {
    KvCacheSpec::Full(AttentionSpec::new(block, heads, 64, DType::F32))
}

fn window(block: usize, heads: usize) -> KvCacheSpec {
    KvCacheSpec::SlidingWindow {
        attention: AttentionSpec::new(block, heads, 64, DType::F32),
        sliding_window: 512,
    }
}

fn layers(specs: &[KvCacheSpec], backend: &str) -> Vec<LayerCache> {
    let backend = registry().get(backend).unwrap();
    specs
        .iter()
        .enumerate()
        .map(|(i, s)| LayerCache {
            layer: AttnLayer(i as u32),
            spec: s.clone(),
            backend: backend.clone(),
            num_heads: 8,
            latent: None,
            shares_cache_of: None,
        })
        .collect()
}

fn limits() -> CacheLimits {
    CacheLimits::new(8, 128, 4096)
}

fn ids(g: &KvCacheGroup) -> Vec<u32> {
    g.layers.iter().map(|l| l.0).collect()
}

/// No byte of the pool belongs to two blocks or layers that can be in use at once.
fn assert_disjoint(plan: &KvCachePlan) {
    for g in &plan.kv_cache_groups {
        let mut spans = vec![];
        for l in &g.layers {
            let h = &plan.handles[l.0 as usize];
            if h.shared {
                continue;
            }
            spans.extend((0..h.num_blocks).map(|b| (h.offset + b * h.block_stride, h.page_bytes)));
        }
        spans.sort_unstable();
        assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "overlapping pages");
        assert!(spans.last().is_none_or(|(at, len)| at + len <= plan.total_bytes));
    }
    // Block b of one group and another block of another group never overlap either.
    let range = |l: &AttnLayer, b: usize| {
        let h = &plan.handles[l.0 as usize];
        let factor = h.num_blocks / plan.num_blocks;
        (h.offset + b * factor * h.block_stride, factor * h.page_bytes)
    };
    for (i, g) in plan.kv_cache_groups.iter().enumerate() {
        for other in &plan.kv_cache_groups[i + 1..] {
            for (a, b) in g.layers.iter().flat_map(|a| other.layers.iter().map(move |b| (a, b))) {
                let ((x, nx), (y, ny)) = (range(a, 1), range(b, 2));
                assert!(x + nx <= y || y + ny <= x, "block 1 of one group overlaps block 2 of another");
            }
        }
    }
}

#[test]
fn one_kind_is_one_group() -> Result<()> {
    let plan = plan_kv_cache(&layers(&vec![full(16, 2); 4], "HOST_ATTN"), &limits(), 1 << 20)?;
    assert_eq!(plan.kv_cache_groups.len(), 1);
    assert_eq!(plan.attention_groups.len(), 1);
    let page = 16 * 2 * 128 * 4;
    assert_eq!(plan.num_blocks, (1 << 20) / (4 * page));
    assert_eq!(plan.handles[3].offset, 3 * plan.num_blocks * page);
    assert_eq!(&plan.group_of_layer[..], [0; 4]);
    assert_disjoint(&plan);
    Ok(())
}

#[test]
fn gemma_like_windows_and_full_layers() -> Result<()> {
    // Five windows to one full layer, and two windows left over.
    let mut specs = vec![];
    for i in 0..20 {
        specs.push(if i % 6 == 5 { full(16, 1) } else { window(16, 1) });
    }
    let plan = plan_kv_cache(&layers(&specs, "HOST_ATTN"), &limits(), 1 << 22)?;
    let groups: Vec<_> = plan.kv_cache_groups.iter().map(ids).collect();
    assert_eq!(groups.len(), 1 + 6);
    assert_eq!(groups[0], [0, 7, 14]);
    assert_eq!(groups[6], [5, 11, 17]);
    assert_eq!(plan.kv_cache_groups.iter().map(|g| g.layers.len()).sum::<usize>(), 20);
    assert!(plan.warnings[0].contains("1 padding layers"));
    // The windows' metadata differ in nothing but the block table.
    let shares: Vec<_> = plan.attention_groups.iter().map(|g| g.shares_with).collect();
    assert_eq!(shares, [None, Some(0), Some(0), Some(0), Some(0), Some(0), None]);
    assert_disjoint(&plan);
    Ok(())
}

#[test]
fn smaller_pages_get_larger_blocks() -> Result<()> {
    let plan = plan_kv_cache(&layers(&[full(16, 2), window(16, 1)], "SMALL_BLOCKS"), &limits(), 1 << 20)?;
    assert_eq!(plan.kv_cache_groups[0].block_size, 16);
    assert_eq!(plan.kv_cache_groups[1].block_size, 32);
    assert_eq!(plan.layout, KvCacheLayout::LBHNC);
    assert_disjoint(&plan);
    let cut = plan_kv_cache(&layers(&[full(64, 2)], "SMALL_BLOCKS"), &limits(), 1 << 20)?;
    let (h, info) = (&cut.handles[0], &cut.attention_groups[0].info);
    assert_eq!((h.block_size, info.kernel_block_size, info.spec.block_size()), (32, 32, 64));
    assert_eq!(h.num_blocks, 2 * cut.num_blocks);
    assert_disjoint(&cut);
    Ok(())
}

#[test]
fn a_layer_may_read_another_layers_cache() -> Result<()> {
    let mut l = layers(&[full(16, 2), full(16, 2), full(16, 2)], "HOST_ATTN");
    l[2].shares_cache_of = Some(AttnLayer(0));
    let plan = plan_kv_cache(&l, &limits(), 1 << 20)?;
    assert_eq!(plan.num_blocks, (1 << 20) / (2 * 16 * 2 * 128 * 4));
    assert_eq!(plan.handles[2].offset, plan.handles[0].offset);
    assert!(plan.handles[2].shared && !plan.handles[0].shared);
    assert_eq!(plan.attention_groups[0].info.layers.len(), 3);
    l[2].shares_cache_of = Some(AttnLayer(7));
    assert!(plan_kv_cache(&l, &limits(), 1 << 20).is_err());
    Ok(())
}

#[test]
fn query_heads_divide_attention_groups() -> Result<()> {
    let mut l = layers(&[full(16, 2), full(16, 2)], "HOST_ATTN");
    l[1].num_heads = 16;
    let plan = plan_kv_cache(&l, &limits(), 1 << 20)?;
    assert_eq!((plan.kv_cache_groups.len(), plan.attention_groups.len()), (1, 2));
    assert_eq!(plan.attention_groups[1].shares_with, None);
    Ok(())
}

#[test]
fn cacheless_layers_take_no_memory() -> Result<()> {
    let encoder = KvCacheSpec::EncoderOnly(AttentionSpec::new(16, 2, 64, DType::F32));
    let plan = plan_kv_cache(&layers(&[encoder.clone(), full(16, 2)], "HOST_ATTN"), &limits(), 1 << 20)?;
    assert_eq!(plan.handles[0].num_blocks, 0);
    assert_eq!(&plan.group_of_layer[..], [1, 0]);
    let alone = plan_kv_cache(&layers(&[encoder], "HOST_ATTN"), &limits(), 0)?;
    assert_eq!(alone.total_bytes, 0);
    Ok(())
}

#[test]
fn too_little_memory_is_said_with_numbers() {
    let e = plan_kv_cache(&layers(&[full(16, 2)], "HOST_ATTN"), &limits(), 100).err().unwrap().to_string();
    assert!(e.contains("100 bytes") && e.contains("16384") && e.contains("--kv-cache-memory"), "{e}");
}

#[test]
fn the_pool_takes_the_handles() -> Result<()> {
    let plan = plan_kv_cache(&layers(&[full(16, 2), window(16, 2)], "HOST_ATTN"), &limits(), 1 << 20)?;
    let buf = KvBuf::Host(headway_tensor::HostBuf::zeroed(plan.total_bytes)?);
    let mut pool = KvPool::new(vec![buf], plan.handles.clone())?;
    assert_eq!(pool.layer(AttnLayer(1))?.block_size, 16);
    assert!(KvPool::new(vec![], plan.handles).is_err());
    Ok(())
}
