//! Linear layers against float64, and the promise that no bit depends on the batch, the tile or the
//! threads.

use crate::{CpuExec, CpuOptions, Isa};
use headway_tensor::{
    BytesOwner, DType, LinearPart, Ops, SharedBytes, TensorMut, TensorRef, View, Weight, WeightType,
    quant::{QuantFormat, unpack_block},
};

fn cx(threads: usize, isa: Isa) -> CpuExec {
    CpuExec::new(CpuOptions { threads: Some(threads), isa: Some(isa), batch_invariant: false }).unwrap()
}

/// Pseudo-random bits.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// In −1..1.
    fn float(&mut self) -> f32 {
        self.next() as f32 / (1u32 << 30) as f32 - 1.0
    }
}

/// A valid weight with every bit pattern of quants and scales that its format allows, at an odd address.
fn weight(dtype: WeightType, n: usize, k: usize, seed: u64) -> Weight {
    let mut bits = Bits(seed);
    let mut bytes: Vec<u8> = match dtype {
        WeightType::F32 => (0..n * k).flat_map(|_| bits.float().to_le_bytes()).collect(),
        WeightType::F16 => {
            (0..n * k).flat_map(|_| half::f16::from_f32(bits.float()).to_bits().to_le_bytes()).collect()
        }
        WeightType::BF16 => {
            (0..n * k).flat_map(|_| half::bf16::from_f32(bits.float()).to_bits().to_le_bytes()).collect()
        }
        WeightType::Quant(f) => {
            let mut bytes: Vec<u8> = (0..f.bytes_for(n * k).unwrap()).map(|_| bits.next() as u8).collect();
            for block in bytes.chunks_exact_mut(f.block_bytes()) {
                for at in halves(f) {
                    let scale = half::f16::from_f32(bits.float() * 0.01);
                    block[*at..at + 2].copy_from_slice(&scale.to_bits().to_le_bytes());
                }
            }
            bytes
        }
    };
    let len = bytes.len();
    bytes.insert(0, 0);
    Weight::new("w", dtype, vec![n, k], SharedBytes::new(bytes).slice(1..len + 1).unwrap()).unwrap()
}

/// Where a block's half-precision numbers lie: random bits there would be infinities.
fn halves(f: QuantFormat) -> &'static [usize] {
    match f {
        QuantFormat::Q8_0 | QuantFormat::Q4_0 | QuantFormat::Q5_0 => &[0],
        QuantFormat::Q4_1 | QuantFormat::Q5_1 | QuantFormat::Q4_K | QuantFormat::Q5_K => &[0, 2],
        QuantFormat::Q2_K => &[80, 82],
        QuantFormat::Q3_K => &[108],
        QuantFormat::Q6_K => &[208],
    }
}

fn activations(m: usize, k: usize, seed: u64) -> Vec<f32> {
    let mut bits = Bits(seed);
    (0..m * k).map(|_| bits.float() * 3.0).collect()
}

fn run(cx: &CpuExec, parts: Vec<LinearPart>, compute: Option<DType>, x: &[f32], m: usize) -> Vec<f32> {
    let layer = cx.load_linear(parts, compute).unwrap();
    let (k, n) = (layer.in_features(), layer.out_features());
    let mut out = vec![f32::NAN; m * n];
    let view = TensorMut::from_host(&mut out, &[m, n]).unwrap();
    cx.linear(&*layer, TensorRef::from_host(&x[..m * k], &[m, k]).unwrap(), view).unwrap();
    out
}

fn part(weight: &Weight, bias: Option<&[f32]>) -> LinearPart {
    let bias = bias.map(|b| Weight::from_f32("b", vec![b.len()], b).unwrap());
    LinearPart { weight: weight.clone(), bias }
}

fn types() -> impl Iterator<Item = WeightType> {
    [WeightType::F32, WeightType::F16, WeightType::BF16]
        .into_iter()
        .chain(QuantFormat::ALL.into_iter().map(WeightType::Quant))
}

/// Float64 products of the dequantised weight, and per element the sum of magnitudes.
fn exact(w: &Weight, x: &[f32], m: usize) -> Vec<(f64, f64)> {
    let (k, rows) = (w.cols(), w.to_f32());
    let products = |x: &[f32], w: &[f32]| {
        x.iter().zip(w).fold((0.0, 0.0), |(sum, mag), (&x, &w)| {
            let p = f64::from(x) * f64::from(w);
            (sum + p, mag + p.abs())
        })
    };
    (0..m)
        .flat_map(|i| rows.chunks(k).map(|w| products(&x[i * k..(i + 1) * k], w)).collect::<Vec<_>>())
        .collect()
}

/// Row lengths that end inside vectors, blocks of K, and quantised blocks.
fn row_lengths(dtype: WeightType) -> &'static [usize] {
    match dtype.block_elems() {
        1 => &[1, 7, 13, 24, 64, 100, 576, 1500],
        32 => &[32, 96, 576, 1536],
        _ => &[256, 768, 1536],
    }
}

#[test]
fn float32_arithmetic_is_close_to_float64() {
    for dtype in types() {
        for &k in row_lengths(dtype) {
            let (m, n) = (7, 21);
            let (w, x) = (weight(dtype, n, k, 1), activations(m, k, 2));
            for &isa in Isa::available() {
                let out = run(&cx(1, isa), vec![part(&w, None)], Some(DType::F32), &x, m);
                for (i, (o, (e, magnitude))) in out.iter().zip(exact(&w, &x, m)).enumerate() {
                    assert!(
                        (f64::from(*o) - e).abs() <= 1e-6 * magnitude + 1e-30,
                        "{dtype} {k} {isa} {i}: {o} {e}"
                    );
                }
            }
        }
    }
}

/// Activations that quantise without error: whole numbers up to 127, times a power of two for each
/// block of 16.
fn exact_activations(m: usize, k: usize, seed: u64) -> Vec<f32> {
    let mut bits = Bits(seed);
    let mut x: Vec<f32> = (0..m * k).map(|_| (bits.next() % 255) as f32 - 127.0).collect();
    for block in x.chunks_exact_mut(16) {
        block[bits.next() as usize % 16] = 127.0;
        let scale = 2f32.powi(bits.next() as i32 % 9 - 8);
        block.iter_mut().for_each(|x| *x *= scale);
    }
    x
}

#[test]
fn integer_arithmetic_is_exact_but_for_the_sums_of_floats() {
    for format in QuantFormat::ALL {
        let dtype = WeightType::Quant(format);
        for &k in row_lengths(dtype) {
            let (m, n) = (7, 21);
            let (w, x) = (weight(dtype, n, k, 1), exact_activations(m, k, 2));
            let portable = run(&cx(1, Isa::Portable), vec![part(&w, None)], None, &x, m);
            for (i, (o, (e, magnitude))) in portable.iter().zip(exact(&w, &x, m)).enumerate() {
                // A zero point makes the two terms of a block larger than their sum.
                let tolerance = 4e-6 * magnitude + 1e-30;
                assert!((f64::from(*o) - e).abs() <= tolerance, "{dtype} {k} {i}: {o} against {e}");
            }
            for &isa in Isa::available() {
                let out = run(&cx(1, isa), vec![part(&w, None)], None, &x, m);
                assert!(out == portable, "{dtype} {k}: {isa} differs from portable");
                let few = run(&cx(1, isa), vec![part(&w, None)], None, &x, 2);
                assert!(few == portable[..2 * n], "{dtype} {k}: {isa} differs from portable for two rows");
            }
        }
    }
}

#[test]
fn extreme_quants_do_not_saturate() {
    for format in QuantFormat::ALL {
        let (dtype, k, m) = (WeightType::Quant(format), 512, 4);
        // Every integer at its largest, at its smallest, and (a signed byte) at −128.
        for fill in [0xffu8, 0x00, 0x80, 0x7f] {
            let row = format.bytes_for(k).unwrap();
            let mut bytes = vec![fill; 9 * row];
            for block in bytes.chunks_exact_mut(format.block_bytes()) {
                for at in halves(format) {
                    block[*at..at + 2].copy_from_slice(&half::f16::from_f32(0.5).to_bits().to_le_bytes());
                }
            }
            let w = Weight::new("w", dtype, vec![9, k], SharedBytes::new(bytes)).unwrap();
            let signs: [fn(usize) -> f32; 4] = [
                |_| 127.0,
                |_| -127.0,
                |i| if i % 2 == 0 { 127.0 } else { -127.0 },
                |i| ((i * 7) % 255) as f32 - 127.0,
            ];
            let mut x: Vec<f32> = signs.iter().flat_map(|s| (0..k).map(s)).collect();
            x.chunks_exact_mut(16).for_each(|b| b[0] = 127.0);
            for &isa in Isa::available() {
                for (m, first) in [(m, 0), (1, 0), (1, 1), (1, 2), (1, 3)] {
                    let x = &x[first * k..];
                    let out = run(&cx(1, isa), vec![part(&w, None)], None, x, m);
                    for (o, (e, magnitude)) in out.iter().zip(exact(&w, x, m)) {
                        assert!(
                            (f64::from(*o) - e).abs() <= 1e-5 * magnitude,
                            "{dtype} {fill:#x} {isa}: {o} {e}"
                        );
                    }
                }
            }
        }
    }
}

/// One activation row as the integer kernels quantise it, 16 elements at a time: bytes, scales, and sums
/// times scales.
fn quantised(x: &[f32]) -> (Vec<i32>, Vec<f32>, Vec<f32>) {
    let (mut q, mut d, mut s) = (vec![], vec![], vec![]);
    for block in x.chunks(16) {
        let largest = block.iter().fold(0f32, |a, v| a.max(v.abs()));
        let bytes: Vec<i32> =
            block.iter().map(|x| (x * (127.0 / largest)).round_ties_even() as i32).collect();
        let scale = largest / 127.0;
        d.push(scale);
        s.push(bytes.iter().sum::<i32>() as f32 * scale);
        q.extend(bytes);
    }
    (q, d, s)
}

/// What the integer kernels promise to the bit, from the file's form of a weight: sums of products in
/// integers, then float32 operations in one order.
fn promised(w: &Weight, format: QuantFormat, x: &[f32]) -> Vec<f32> {
    let (qx, dx, sx) = quantised(x);
    let row = |bytes: &[u8]| {
        let (mut q, mut d, mut m) = (vec![], vec![], vec![]);
        for block in bytes.chunks(format.block_bytes()) {
            let (mut bq, mut bd, mut bm) = ([0u8; 256], [0f32; 16], [0f32; 16]);
            unpack_block(format, block, &mut bq, &mut bd, &mut bm);
            let integer = |&b: &u8| if format.signed() { i32::from(b.cast_signed()) } else { i32::from(b) };
            q.extend(bq[..format.block_elems()].iter().map(integer));
            for sub in 0..format.sub_blocks() {
                // A scale for 16 elements, whatever the format's own length.
                for _ in 0..format.sub_block() / 16 {
                    d.push(bd[sub]);
                    m.push(bm[sub]);
                }
            }
        }
        let half = |h: usize| {
            let dot: i32 = (16 * h..16 * h + 16).map(|i| q[i] * qx[i]).sum();
            dot as f32 * dx[h]
        };
        let with_min = |h: usize, x: f32, s: f32| {
            if format.has_min() { d[h] * x + m[h] * s } else { d[h] * x }
        };
        let mut total = None;
        for block in (0..w.cols() / 32).collect::<Vec<_>>().chunks(32) {
            let mut sum = 0f32;
            for b in block {
                let (l, h) = (2 * b, 2 * b + 1);
                sum += match format.sub_block() {
                    16 => with_min(l, half(l), sx[l]) + with_min(h, half(h), sx[h]),
                    _ => with_min(l, half(l) + half(h), sx[l] + sx[h]),
                };
            }
            total = Some(total.map_or(sum, |t: f32| t + sum));
        }
        total.unwrap()
    };
    (0..w.rows()).map(|r| row(w.row(r).unwrap())).collect()
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(60))]

    /// Packed weights of any shape, stacked, with a bias, at every level and for few and many rows: to the
    /// bit what the file's form says, and close to float64.
    #[test]
    fn packed_weights_give_what_the_files_form_says(
        format in proptest::sample::select(QuantFormat::ALL.to_vec()),
        second in proptest::sample::select(QuantFormat::ALL.to_vec()),
        n in [1usize..30, 1usize..12],
        blocks in 1usize..7,
        seed in proptest::num::u64::ANY,
        threads in 1usize..3,
    ) {
        let k = 256 * blocks;
        let first = weight(WeightType::Quant(format), n[0], k, seed);
        let second = (weight(WeightType::Quant(second), n[1], k, seed ^ 1), second);
        let (x, mut bits) = (activations(64, k, seed ^ 2), Bits(seed ^ 3));
        let bias: Vec<f32> = (0..n[1]).map(|_| bits.float()).collect();
        let expected: Vec<Vec<f32>> = x
            .chunks(k)
            .map(|x| {
                let with_bias = promised(&second.0, second.1, x).into_iter().zip(&bias).map(|(v, b)| v + b);
                promised(&first, format, x).into_iter().chain(with_bias).collect()
            })
            .collect();
        for &isa in Isa::available() {
            let cx = cx(threads, isa);
            for m in (1..=9).chain([64]) {
                let parts = vec![part(&first, None), part(&second.0, Some(&bias))];
                let out = run(&cx, parts, None, &x, m);
                for (i, (out, expected)) in out.chunks(n[0] + n[1]).zip(&expected).enumerate() {
                    assert!(out == &expected[..], "{format} {isa}: {m} rows, row {i}: {out:?} {expected:?}");
                }
            }
        }
    }
}

#[test]
fn packing_costs_a_few_per_cent_of_the_files_size_and_tells_its_owner() {
    use std::{
        ops::Range,
        sync::{Arc, Mutex},
    };
    struct Owner(Vec<u8>, Arc<Mutex<Vec<Range<usize>>>>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    impl BytesOwner for Owner {
        fn not_needed_now(&self, range: Range<usize>) {
            self.1.lock().unwrap().push(range);
        }
    }
    for format in QuantFormat::ALL {
        let (n, k) = (2000, 1024);
        let len = format.bytes_for(n * k).unwrap();
        let told = Arc::new(Mutex::new(vec![]));
        let bytes = SharedBytes::of(Owner(vec![0; len + 10], told.clone())).slice(10..len + 10).unwrap();
        let w = Weight::new("w", WeightType::Quant(format), vec![n, k], bytes).unwrap();
        let cx = cx(2, Isa::of_machine());
        let layer = cx.load_linear(vec![part(&w, None)], None).unwrap();
        let growth = layer.bytes() as f64 / len as f64;
        assert!((1.0..1.04).contains(&growth), "{format}: {growth}");
        let mut told = std::mem::take(&mut *told.lock().unwrap());
        told.sort_by_key(|r| r.start);
        assert_eq!((told[0].start, told.last().unwrap().end), (10, len + 10), "{format}");
        assert!(told.windows(2).all(|w| w[0].end == w[1].start), "{format}: {told:?}");
        // In float32 nothing is packed.
        let layer = cx.load_linear(vec![part(&w, None)], Some(DType::F32)).unwrap();
        assert_eq!(layer.bytes(), 0);
    }
}

#[test]
fn quantised_activations_cost_half_a_step_at_most() {
    for format in QuantFormat::ALL {
        let (dtype, m, n, k) = (WeightType::Quant(format), 5, 16, 512);
        let (w, x) = (weight(dtype, n, k, 13), activations(m, k, 14));
        let rows = w.to_f32();
        let out = run(&cx(1, Isa::of_machine()), vec![part(&w, None)], None, &x, m);
        for (i, (o, (e, magnitude))) in out.iter().zip(exact(&w, &x, m)).enumerate() {
            let (x, w) = (&x[i / n * k..][..k], &rows[i % n * k..][..k]);
            let bound: f32 = (x.chunks(16).zip(w.chunks(16)))
                .map(|(x, w)| {
                    let step = x.iter().fold(0f32, |a, v| a.max(v.abs())) / 127.0;
                    w.iter().map(|w| w.abs()).sum::<f32>() * step * 0.5
                })
                .sum();
            let bound = f64::from(bound) * 1.001 + 4e-6 * magnitude;
            assert!((f64::from(*o) - e).abs() <= bound, "{dtype} {i}: {o} against {e}, bound {bound}");
        }
    }
}

#[test]
fn no_bit_depends_on_batch_tile_or_threads() {
    for dtype in types() {
        for compute in [None, Some(DType::F32)] {
            let k = row_lengths(dtype).last().copied().unwrap();
            let n = 45;
            let (w, x) = (weight(dtype, n, k, 3), activations(33, k, 4));
            for &isa in Isa::available() {
                let one = cx(1, isa);
                let alone: Vec<f32> = (0..33)
                    .flat_map(|i| run(&one, vec![part(&w, None)], compute, &x[i * k..(i + 1) * k], 1))
                    .collect();
                for m in 1..=33 {
                    let out = run(&one, vec![part(&w, None)], compute, &x, m);
                    assert!(out == alone[..m * n], "{dtype} {compute:?} {isa}: {m} rows");
                }
                for threads in [2, 3] {
                    for m in [1, 2, 5, 33] {
                        let out = run(&cx(threads, isa), vec![part(&w, None)], compute, &x, m);
                        assert!(
                            out == alone[..m * n],
                            "{dtype} {compute:?} {isa}: {threads} threads, {m} rows"
                        );
                    }
                }
                // Alone, two rows of the weight give what they gave among the others.
                let few = w.slice_rows(17..19).unwrap();
                let out = run(&one, vec![part(&few, None)], compute, &x, 33);
                let same = (0..33).all(|i| out[i * 2..i * 2 + 2] == alone[i * n + 17..i * n + 19]);
                assert!(same, "{dtype} {compute:?} {isa}: fewer columns");
            }
        }
    }
}

#[test]
fn many_rows_are_split_over_threads_too() {
    let (m, n, k) = (301, 24, 64);
    let (w, x) = (weight(WeightType::BF16, n, k, 5), activations(m, k, 6));
    for &isa in Isa::available() {
        let one = run(&cx(1, isa), vec![part(&w, None)], None, &x, m);
        assert_eq!(run(&cx(3, isa), vec![part(&w, None)], None, &x, m), one);
    }
}

#[test]
fn parts_are_stacked_and_biases_added_last() {
    let (k, m) = (256, 5);
    let (a, b) = (weight(WeightType::Quant(QuantFormat::Q4_K), 10, k, 7), weight(WeightType::F16, 3, k, 8));
    let (x, bias) = (activations(m, k, 9), [1.0, -2.0, 4.0]);
    let cx = cx(2, Isa::of_machine());
    for m in [1, 3, m] {
        let both = run(&cx, vec![part(&a, None), part(&b, Some(&bias))], None, &x, m);
        let first = run(&cx, vec![part(&a, None)], None, &x, m);
        let second = run(&cx, vec![part(&b, None)], None, &x, m);
        for i in 0..m {
            assert_eq!(both[i * 13..i * 13 + 10], first[i * 10..i * 10 + 10]);
            let with_bias: Vec<f32> = (0..3).map(|j| second[i * 3 + j] + bias[j]).collect();
            assert_eq!(both[i * 13 + 10..i * 13 + 13], with_bias);
        }
    }
}

#[test]
fn strided_input_and_output() {
    let (k, n) = (64, 8);
    let (w, x) = (weight(WeightType::F32, n, k, 10), activations(4, 2 * k, 11));
    let cx = cx(1, Isa::of_machine());
    let layer = cx.load_linear(vec![part(&w, None)], None).unwrap();
    let mut out = vec![7f32; 4 * 20];
    let view = TensorMut::from_host(&mut out, &[4, 20]).unwrap().cols(5..13).unwrap();
    let input = TensorRef::from_host(&x, &[4, 2 * k]).unwrap().cols(k..2 * k).unwrap();
    cx.linear(&*layer, input, view).unwrap();
    for i in 0..4 {
        let alone = run(&cx, vec![part(&w, None)], None, &x[(2 * i + 1) * k..], 1);
        assert_eq!(out[i * 20 + 5..i * 20 + 13], alone);
        assert!(out[i * 20..i * 20 + 5].iter().chain(&out[i * 20 + 13..(i + 1) * 20]).all(|&v| v == 7.0));
    }
}

#[test]
fn embedding_gives_dequantised_rows() {
    for dtype in types() {
        let w = weight(dtype, 9, 256, 12);
        let cx = cx(2, Isa::of_machine());
        let layer = cx.load_linear(vec![part(&w, None)], None).unwrap();
        let mut out = vec![0f32; 3 * 256];
        let ids = View::from_vec(vec![8, 0, 4]);
        cx.embed(&*layer, &ids, 2.0, TensorMut::from_host(&mut out, &[3, 256]).unwrap()).unwrap();
        let rows = w.to_f32();
        for (i, id) in [8, 0, 4].into_iter().enumerate() {
            let expected: Vec<f32> = rows[id * 256..(id + 1) * 256].iter().map(|v| v * 2.0).collect();
            assert_eq!(out[i * 256..(i + 1) * 256], expected, "{dtype}");
        }
        let outside = View::from_vec(vec![9]);
        let e = cx.embed(&*layer, &outside, 1.0, TensorMut::from_host(&mut out[..256], &[1, 256]).unwrap());
        assert!(e.unwrap_err().to_string().contains("token id 9"));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let cx = cx(1, Isa::of_machine());
    assert!(cx.load_linear(vec![], None).is_err());
    let (a, b) = (weight(WeightType::F32, 4, 8, 1), weight(WeightType::F32, 4, 9, 1));
    assert!(cx.load_linear(vec![part(&a, None), part(&b, None)], None).is_err());
    assert!(cx.load_linear(vec![part(&a, Some(&[1.0]))], None).is_err());
    assert!(cx.load_linear(vec![part(&a, None)], Some(DType::I8)).is_err());
    let layer = cx.load_linear(vec![part(&a, None)], None).unwrap();
    let x = TensorRef::from_host(&[0f32; 9], &[1, 9]).unwrap();
    let mut out = [0f32; 4];
    assert!(cx.linear(&*layer, x, TensorMut::from_host(&mut out, &[1, 4]).unwrap()).is_err());
}

/// The levels that multiply bfloat16.
#[cfg(target_arch = "x86_64")]
fn bf16_levels() -> impl Iterator<Item = Isa> {
    Isa::available().iter().copied().filter(|i| matches!(i, Isa::Avx512Bf16 | Isa::Amx))
}

/// A bfloat16 weight's rows, and activations that are bfloat16 already, as bits.
#[cfg(target_arch = "x86_64")]
fn bf16_bits(w: &Weight, x: &[f32]) -> (Vec<u16>, Vec<u16>) {
    let w = w.bytes().as_slice().as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
    (w, x.iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect())
}

#[cfg(target_arch = "x86_64")]
#[test]
fn products_of_bfloat16_are_those_of_rounded_activations() {
    for &k in row_lengths(WeightType::BF16) {
        let (m, n) = (35, 53);
        let (w, x) = (weight(WeightType::BF16, n, k, 1), activations(m, k, 2));
        let rounded: Vec<f32> = x.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
        let exact = exact(&w, &rounded, m);
        for isa in bf16_levels() {
            let out = run(&cx(1, isa), vec![part(&w, None)], None, &x, m);
            for (i, (o, (e, magnitude))) in out.iter().zip(&exact).enumerate() {
                assert!((f64::from(*o) - e).abs() <= 1e-6 * magnitude + 1e-30, "{k} {isa} {i}: {o} {e}");
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn tiles_sum_in_the_order_that_is_promised() {
    use crate::kernels::amx::model::long_dot;
    if !Isa::available().contains(&Isa::Amx) {
        return;
    }
    for (m, n, k) in [(1, 16, 32), (3, 5, 100), (33, 40, 70), (64, 33, 257)] {
        let (w, x) = (weight(WeightType::BF16, n, k, 3), activations(m, k, 4));
        let (rows, columns) = bf16_bits(&w, &x);
        let bias: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let out = run(&cx(2, Isa::Amx), vec![part(&w, Some(&bias))], None, &x, m);
        for (i, o) in out.iter().enumerate() {
            let sum = long_dot(&columns[i / n * k..][..k], &rows[i % n * k..][..k]);
            assert_eq!(*o, sum + bias[i % n], "{m} {n} {k}: {i}");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_row_of_bfloat16_products_is_the_same_among_any_number() {
    let (n, k) = (53, 100);
    let (w, x) = (weight(WeightType::BF16, n, k, 5), activations(35, k, 6));
    for isa in bf16_levels() {
        let row = |i: usize| run(&cx(1, isa), vec![part(&w, None)], None, &x[i * k..(i + 1) * k], 1);
        let alone: Vec<f32> = (0..35).flat_map(row).collect();
        for m in [2, 5, 7, 16, 17, 33, 35] {
            let out = run(&cx(1, isa), vec![part(&w, None)], None, &x, m);
            assert!(out == alone[..m * n], "{isa}: {m} rows");
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn packed_bfloat16_costs_its_padding_and_is_counted() {
    for isa in bf16_levels() {
        let layer =
            |w: &Weight, compute| cx(2, isa).load_linear(vec![part(w, None)], compute).unwrap().bytes();
        assert_eq!(layer(&weight(WeightType::BF16, 1600, 512, 1), None), 1600 * 512 * 2);
        assert_eq!(layer(&weight(WeightType::BF16, 17, 33, 1), None), 32 * 64 * 2);
        assert_eq!(layer(&weight(WeightType::BF16, 1600, 512, 1), Some(DType::F32)), 0);
    }
}
