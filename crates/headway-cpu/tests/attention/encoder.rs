//! Layers without a cache (encoders), and cross-attention over an encoder's: against the float64 reference.

use super::{
    layer::Layer,
    run::{Cache, exec},
};
use headway_attention::{
    AttentionBackend, AttentionImpl, Causal, CommonAttentionMetadata, GroupInfo, KvBuf, KvCacheSpec, KvMut,
    MetadataBuilder, Qkv, StepInputs, group::kv::layout::KvCacheLayout,
};
use headway_cpu::{
    CpuAttn, CpuExec, Isa,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig},
};
use headway_tensor::{Dual, HostBuf, TensorMut, TensorRef, View};
use headway_testkit::{Params, Request, attend};
use std::sync::Arc;

/// Values between −1 and 1 that don't repeat soon.
fn values(n: usize, seed: u32) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 + 1.0) * (1.37 + seed as f32 * 0.11)).sin()).collect()
}

fn builder(cx: &CpuExec, l: &Layer, spec: KvCacheSpec) -> CpuAttnBuilder {
    let info = GroupInfo {
        max_num_reqs: 8,
        max_num_tokens: 1024,
        max_model_len: 1024,
        ..GroupInfo::new(spec, l.heads)
    };
    let config = CpuAttnConfig::default();
    let plan = CpuAttnBuilder::plan(&info, &CpuAttn::rules(), &config).unwrap();
    CpuAttnBuilder::new(cx, &info, &plan, &config).unwrap()
}

/// A step's common metadata: new tokens and tokens of each request, no mask.
fn common(q_lens: &[usize], seq_lens: &[usize], table: Vec<i32>, stride: usize) -> CommonAttentionMetadata {
    let mut starts = vec![0];
    q_lens.iter().for_each(|q| starts.push(starts[starts.len() - 1] + *q as i32));
    let tokens = starts[q_lens.len()] as usize;
    let lens: Vec<i32> = seq_lens.iter().map(|s| *s as i32).collect();
    let inputs = StepInputs::new(Dual::from_vec(starts), View::from_vec(lens.clone()), lens).unwrap();
    let slots = View::from_vec(vec![-1; tokens]);
    let table = Dual::from_vec(table);
    let mut common = CommonAttentionMetadata::new(Arc::new(inputs), table, stride, slots).unwrap();
    common.causal_override = Some(Causal::All(false));
    common
}

fn params(l: &Layer) -> Params<'static> {
    Params {
        num_heads: l.heads,
        num_kv_heads: l.kv_heads,
        head_size: l.size,
        head_size_v: l.size_v,
        scale: f64::from((l.size as f32).powf(-0.5)),
        ..Params::default()
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

/// Largest difference from the reference over all requests, whose rows and keys follow one another.
fn worst(
    l: &Layer,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    out: &[f32],
    q_lens: &[usize],
    kv_lens: &[usize],
) -> f64 {
    let (mut row, mut key, mut worst) = (0, 0, 0f64);
    let (width, width_v) = (l.kv_heads * l.size, l.kv_heads * l.size_v);
    for (&n, &m) in q_lens.iter().zip(kv_lens) {
        let q = wide(&q[row * l.heads * l.size..][..n * l.heads * l.size]);
        let (k, v) = (wide(&k[key * width..][..m * width]), wide(&v[key * width_v..][..m * width_v]));
        let expected =
            attend(&params(l), &Request { q: &q, k: &k, v: &v, causal: false, spans: &[], prefix: 0 });
        let got = &out[row * l.heads * l.size_v..][..n * l.heads * l.size_v];
        worst = got.iter().zip(&expected.out).map(|(a, b)| (f64::from(*a) - b).abs()).fold(worst, f64::max);
        (row, key) = (row + n, key + m);
    }
    worst
}

fn no_cache<'a>(buf: &'a mut KvBuf, l: &Layer) -> KvMut<'a> {
    KvMut {
        buf,
        offset: 0,
        block_stride: 0,
        page_bytes: 0,
        num_blocks: 0,
        block_size: l.block_size,
        dtype: l.cache,
        layout: KvCacheLayout::LBHNC,
        shared: false,
    }
}

#[test]
fn an_encoder_attends_both_ways_over_the_step() {
    let l = Layer { size_v: 16, ..Layer::plain(6, 2, 24) };
    for &isa in Isa::available() {
        let cx = exec(isa, 3);
        let (kernel, mut builder) = (l.kernel(), builder(&cx, &l, KvCacheSpec::EncoderOnly(l.spec())));
        // Steps one after another in the same pages.
        for (seed, lens) in [(1, vec![1, 16, 64, 65, 130, 300]), (2, vec![63, 2]), (3, vec![512, 500])] {
            let n: usize = lens.iter().sum();
            let (q, k) = (values(n * l.heads * l.size, seed), values(n * l.kv_heads * l.size, seed + 5));
            let (v, mut out) =
                (values(n * l.kv_heads * l.size_v, seed + 9), vec![9f32; n * l.heads * l.size_v]);
            let metadata = builder.build(&cx, &common(&lens, &lens, vec![], 0)).unwrap();
            let x = Qkv {
                q: TensorRef::from_host(&q, &[n, l.heads, l.size]).unwrap(),
                k: TensorRef::from_host(&k, &[n, l.kv_heads, l.size]).unwrap(),
                v: TensorRef::from_host(&v, &[n, l.kv_heads, l.size_v]).unwrap(),
            };
            let mut nothing = KvBuf::Host(HostBuf::zeroed(0).unwrap());
            let view = TensorMut::from_host(&mut out, &[n, l.heads, l.size_v]).unwrap();
            kernel.forward(&cx, &x, &mut no_cache(&mut nothing, &l), &metadata, view).unwrap();
            let far = worst(&l, &q, &k, &v, &out, &lens, &lens);
            println!("{isa} {lens:?}: {far:.1e}");
            assert!(far < 2e-5, "{isa} {lens:?}: {far}");
        }
        assert_eq!(builder.reallocs(), 0);
    }
}

#[test]
fn an_encoder_takes_its_input_whole() {
    let l = Layer::plain(4, 4, 16);
    let cx = exec(Isa::available()[0], 1);
    let mut builder = builder(&cx, &l, KvCacheSpec::EncoderOnly(l.spec()));
    let e = builder.build(&cx, &common(&[5], &[9], vec![], 0)).unwrap_err().to_string();
    assert!(e.contains("9 tokens in parts (5 now)") && e.contains("whole input in one step"), "{e}");
}

#[test]
fn cross_attention_reads_the_encoders_tokens_whatever_the_number_of_rows() {
    let l = Layer::plain(4, 2, 32);
    for &isa in Isa::available() {
        let cx = exec(isa, 2);
        let (kernel, mut builder) = (l.kernel(), builder(&cx, &l, KvCacheSpec::Cross(l.spec())));
        // A decode, a prefill longer than the encoder's input, one shorter.
        let (q_lens, kv_lens) = (vec![1, 40, 3], vec![37, 5, 100]);
        let (n, m): (usize, usize) = (q_lens.iter().sum(), kv_lens.iter().sum());
        let (q, k) = (values(n * l.heads * l.size, 1), values(m * l.kv_heads * l.size, 2));
        let (v, mut out) = (values(m * l.kv_heads * l.size, 3), vec![9f32; n * l.heads * l.size]);
        let stride = 7;
        let (mut table, mut slots, mut next) = (vec![0; 3 * stride], vec![], 1);
        for (row, &len) in table.chunks_exact_mut(stride).zip(&kv_lens) {
            for t in 0..len {
                row[t / l.block_size] = (next + t / l.block_size) as i32;
                slots.push((next * l.block_size + t) as i64);
            }
            next += len.div_ceil(l.block_size);
        }
        let mut cache = Cache::new(&l, next, 0xff);
        let x = Qkv {
            q: TensorRef::from_host(&q, &[n, l.heads, l.size]).unwrap(),
            k: TensorRef::from_host(&k, &[m, l.kv_heads, l.size]).unwrap(),
            v: TensorRef::from_host(&v, &[m, l.kv_heads, l.size]).unwrap(),
        };
        kernel.update_kv_cache(&cx, &x, &mut cache.view(&l), &View::from_vec(slots)).unwrap();
        let metadata = builder.build(&cx, &common(&q_lens, &kv_lens, table, stride)).unwrap();
        let view = TensorMut::from_host(&mut out, &[n, l.heads, l.size]).unwrap();
        kernel.forward(&cx, &x, &mut cache.view(&l), &metadata, view).unwrap();
        let far = worst(&l, &q, &k, &v, &out, &q_lens, &kv_lens);
        println!("{isa}: {far:.1e}");
        assert!(far < 2e-5, "{isa}: {far}");
        assert!(cache.gaps_intact(0xff));
    }
}
