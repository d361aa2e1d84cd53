//! Outputs that the kernel writes as 8-bit codes: the bits of quantising its float32 output afterwards, which are those
//! of the published rules; and what is refused.

use super::{
    layer::Layer,
    run::{Cache, builder, exec},
    world::{Req, World},
};
use headway_attention::{AttentionImpl, MetadataBuilder, Qkv, QuantisedOut, Registry, Result};
use headway_cpu::{CpuExec, Isa, backends::cpu_attn::CpuAttnLayer};
use headway_tensor::{DType, RowQuant, Tensor, TensorMut, View, fp8::e4m3_to_f32};
use headway_testkit::Rng;

/// The codes and scales of a step, or its float32 output.
struct Done {
    plain: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

/// Room for the codes and scales of `n` rows, with other bytes in it.
fn room(cx: &CpuExec, q: RowQuant, n: usize, l: &Layer) -> Result<(Tensor, Tensor)> {
    let mut codes = Tensor::zeros(cx, q.dtype(), &[n, l.heads, l.size_v])?;
    codes.view_mut().into_host_bytes()?.fill(0xaa);
    let mut scales = Tensor::zeros(cx, DType::F32, &[n, l.heads, q.scales_of(l.size_v)])?;
    scales.host_mut::<f32>()?.fill(-1.0);
    Ok((codes, scales))
}

/// Both outputs of one step.
fn run(cx: &CpuExec, l: &Layer, w: &World, q: RowQuant) -> Result<Done> {
    let mut cache = Cache::new(l, w.num_blocks, 0x55);
    let kernel: CpuAttnLayer = l.kernel();
    let metadata = builder(cx, l, true).build(cx, &w.common())?;
    let (old_k, old_v, old_slots) = &w.context;
    let n = w.slots.len();
    let query = w.q.view(&[n, l.heads, l.size]);
    for (k, v, slots) in [(old_k, old_v, old_slots), (&w.k, &w.v, &w.slots)] {
        let n = slots.len();
        let x = Qkv { q: query, k: k.view(&[n, l.kv_heads, l.size]), v: v.view(&[n, l.kv_heads, l.size_v]) };
        kernel.update_kv_cache(cx, &x, &mut cache.view(l), &View::from_vec(slots.clone()))?;
    }
    let x = Qkv { q: query, k: w.k.view(&[n, l.kv_heads, l.size]), v: w.v.view(&[n, l.kv_heads, l.size_v]) };
    let elements = n * l.heads * l.size_v;
    let mut plain = vec![f32::NAN; elements];
    let out = TensorMut::from_host(&mut plain, &[n, l.heads, l.size_v])?;
    kernel.forward(cx, &x, &mut cache.view(l), &metadata, out)?;
    let (mut codes, mut scales) = room(cx, q, n, l)?;
    let out = QuantisedOut { quant: q, codes: codes.view_mut(), scales: scales.view_mut() };
    kernel.forward_quantised(cx, &x, &mut cache.view(l), &metadata, out)?;
    let codes = codes.view().into_host_bytes()?[..elements].to_vec();
    Ok(Done { plain, codes, scales: scales.host::<f32>()?.to_vec() })
}

/// The nearest e4m3 code, by trying all: ties to the even code, beyond the largest the largest.
fn nearest(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let magnitude = f64::from(x.abs());
    let distance = |c: &u8| (f64::from(e4m3_to_f32(*c)) - magnitude).abs();
    let best = (0..0x7f).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    // An infinite distance is the same for all codes.
    let best = if magnitude.is_infinite() { 0x7e } else { best.unwrap_or(0) };
    best | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// Codes and scales by the published rules, written plainly.
fn by_the_rule(q: RowQuant, out: &[f32]) -> (Vec<u8>, Vec<f32>) {
    match q {
        RowQuant::E4m3 { scale } => (out.iter().map(|x| nearest(x / scale)).collect(), vec![]),
        RowQuant::I8 { scale } => {
            let code = |x: &f32| {
                let x = f64::from(x / scale);
                let (low, up) = (x.floor(), x.ceil());
                let odd = |n: f64| n.rem_euclid(2.0) != 0.0;
                let to = if x - low < up - x || (x - low == up - x && !odd(low)) { low } else { up };
                if x.is_nan() { 0 } else { to.clamp(-128.0, 127.0) as i8 as u8 }
            };
            (out.iter().map(code).collect(), vec![])
        }
        RowQuant::E4m3Blocks { block } => {
            let (mut codes, mut scales) = (vec![], vec![]);
            for block in out.chunks(block) {
                let largest = block
                    .iter()
                    .filter(|x| !x.is_nan())
                    .fold(1e-10f32, |m, x| if x.abs() > m { x.abs() } else { m });
                scales.push(largest / 448.0);
                codes.extend(block.iter().map(|x| nearest(x / (largest / 448.0))));
            }
            (codes, scales)
        }
    }
}

/// NaN is NaN, whatever its sign.
fn same(a: u8, b: u8, float: bool) -> bool {
    a == b || (float && a & 0x7f == 0x7f && b & 0x7f == 0x7f)
}

#[test]
fn codes_are_those_of_the_float_output() {
    let mut rng = Rng::new(71);
    // Decodes, a prefill, and a context that is split over items; rows of padding.
    let reqs = [Req::new(40, 1), Req::new(33, 33), Req::new(1300, 1), Req::new(7, 2)];
    let quants = |block| {
        [
            RowQuant::E4m3 { scale: 0.013 },
            // Most values saturate.
            RowQuant::E4m3 { scale: 2e-4 },
            RowQuant::I8 { scale: 0.01 },
            RowQuant::E4m3Blocks { block },
        ]
    };
    for (size, size_v, block) in [(64, 64, 32), (128, 128, 128), (64, 256, 128), (40, 24, 24)] {
        let l = Layer { size_v, sinks: size == 64, ..Layer::plain(4, 2, size) };
        let mut w = World::new(&l, &reqs, 0, 3, &mut rng);
        // A value that is no number: every row that sees it is none in that channel.
        if let super::act::Act::F32(v) = &mut w.v {
            v[10 * l.kv_heads * size_v + 5] = f32::NAN;
        }
        for &isa in Isa::available() {
            let cx = exec(isa, 2);
            for q in quants(block) {
                let got = run(&cx, &l, &w, q).unwrap();
                let live = w.rows() * l.heads * size_v;
                let (codes, scales) = by_the_rule(q, &got.plain[..live]);
                let float = q.dtype() == DType::F8E4M3;
                let wrong = codes.iter().zip(&got.codes).position(|(a, b)| !same(*a, *b, float));
                assert_eq!(wrong, None, "{isa}, {q:?}, heads of {size}/{size_v}");
                assert_eq!(got.scales[..scales.len()], scales, "{isa}, {q:?}");
                assert!(got.codes[live..].iter().all(|c| *c == 0), "rows past the requests are 0");
                assert!(got.scales[scales.len()..].iter().all(|s| *s == 0.0));
                // And the same function over the finished output gives the same bits, NaN's sign too.
                let (mut after, mut made) = (vec![0; live], vec![0f32; scales.len()]);
                let heads = got.plain[..live].chunks_exact(size_v).zip(after.chunks_exact_mut(size_v));
                for (i, (row, codes)) in heads.enumerate() {
                    let n = q.scales_of(size_v);
                    q.quantise(row, 1.0, codes, &mut made[i * n..(i + 1) * n]);
                }
                assert_eq!((after, made), (got.codes[..live].to_vec(), scales), "{isa}, {q:?}");
            }
        }
        assert!(
            size != 64
                || run(&exec(Isa::of_machine(), 1), &l, &w, quants(block)[0])
                    .unwrap()
                    .plain
                    .iter()
                    .any(|x| x.is_nan())
        );
    }
}

#[test]
fn what_the_kernel_can_not_write_is_refused() {
    let mut rng = Rng::new(3);
    let l = Layer::plain(2, 1, 64);
    let w = World::new(&l, &[Req::new(5, 5)], 0, 0, &mut rng);
    let cx = exec(Isa::of_machine(), 1);
    let refused = |l: &Layer, w: &World, q: RowQuant| run(&cx, l, w, q).err().unwrap().to_string();
    let e = refused(&l, &w, RowQuant::E4m3Blocks { block: 48 });
    assert!(e.contains("block: 48") && e.contains("value heads of 64"), "{e}");
    let e = refused(&l, &w, RowQuant::E4m3 { scale: 0.0 });
    assert!(e.contains("scale: 0.0"), "{e}");
    let half = Layer { dtype: DType::BF16, ..l };
    let w = World::new(&half, &[Req::new(5, 5)], 0, 0, &mut rng);
    let mut cache = Cache::new(&half, w.num_blocks, 0);
    let metadata = builder(&cx, &half, true).build(&cx, &w.common()).unwrap();
    let x = Qkv { q: w.q.view(&[5, 2, 64]), k: w.k.view(&[5, 1, 64]), v: w.v.view(&[5, 1, 64]) };
    let quant = RowQuant::E4m3 { scale: 1.0 };
    let (mut codes, mut scales) = room(&cx, quant, 5, &half).unwrap();
    let out = QuantisedOut { quant, codes: codes.view_mut(), scales: scales.view_mut() };
    let e = half.kernel().forward_quantised(&cx, &x, &mut cache.view(&half), &metadata, out).unwrap_err();
    assert!(e.to_string().contains("activations in float32 are"), "{e}");
}

#[test]
fn rule_books_say_who_can() {
    let mut registry = Registry::default();
    headway_cpu::register(&mut registry).unwrap();
    let check = |backend: &str, q: RowQuant, head: usize| {
        registry.get(backend).unwrap().rules().check_output_quant(&q, head).map_err(|e| e.to_string())
    };
    let (fp8, blocks) = (RowQuant::E4m3 { scale: 0.5 }, RowQuant::E4m3Blocks { block: 128 });
    for q in [fp8, blocks, RowQuant::I8 { scale: 2.0 }] {
        assert_eq!(check("CPU_ATTN", q, 128), Ok(()));
        for other in ["CPU_MLA", "MAMBA2_ATTN"] {
            let e = check(other, q, 128).unwrap_err();
            let words =
                [other, q.kind().name(), "it writes no quantised output", "quantise the output afterwards"];
            assert!(words.iter().all(|w| e.contains(w)), "{e}");
        }
    }
    let e = check("CPU_ATTN", blocks, 64).unwrap_err();
    assert!(e.contains("value heads of 64") && e.contains("whole blocks must make a head"), "{e}");
}
