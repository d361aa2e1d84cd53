//! The operations through their trait: strided rows, threads, and arguments that don't fit.

use crate::{CpuExec, CpuOptions};
use headway_tensor::{
    Activation, DType, GatedNorm, Ops, RopeStyle, Tensor, TensorError, TensorMut, TensorRef, View,
};

fn cx(threads: usize) -> CpuExec {
    CpuExec::new(CpuOptions { threads: Some(threads), ..Default::default() }).unwrap()
}

fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect()
}

#[test]
fn norms_of_many_rows_agree_whatever_the_threads() {
    let (n, w) = (200, 96);
    let (x, weight, mut results) = (ramp(n * w), ramp(w), Vec::new());
    for threads in 1..=3 {
        let cx = cx(threads);
        let weight = Tensor::from_slice(&cx, &weight, &[w]).unwrap();
        let mut out = vec![0f32; n * w];
        let view = TensorRef::from_host(&x, &[n, w]).unwrap();
        cx.rms_norm(view, &weight, 1e-5, TensorMut::from_host(&mut out, &[n, w]).unwrap()).unwrap();
        results.push(out);
    }
    assert!(results.windows(2).all(|r| r[0] == r[1]));
    for (row, out) in x.chunks(w).zip(results[0].chunks(w)) {
        let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / w as f64;
        for ((&x, &w), &o) in row.iter().zip(&weight).zip(out) {
            assert!((f64::from(x) / (mean + 1e-5).sqrt() * f64::from(w) - f64::from(o)).abs() < 1e-5);
        }
    }
}

#[test]
fn layer_norms_have_the_mean_and_variance_that_weight_and_bias_say() {
    let cx = cx(2);
    for w in [5, 16, 40] {
        let n = 9;
        let (x, weight, bias) = (ramp(n * w), ramp(w), ramp(2 * w)[w..].to_vec());
        let mut out = x.clone();
        let tensor = |v: &[f32]| Tensor::from_slice(&cx, v, &[w]).unwrap();
        let view = TensorMut::from_host(&mut out, &[n, w]).unwrap();
        cx.layer_norm_in_place(view, &tensor(&weight), &tensor(&bias), 1e-5).unwrap();
        for (row, out) in x.chunks(w).zip(out.chunks(w)) {
            let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / w as f64;
            let variance = row.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / w as f64;
            for (i, (&x, &o)) in row.iter().zip(out).enumerate() {
                let norm = (f64::from(x) - mean) / (variance + 1e-5).sqrt();
                let expected = norm * f64::from(weight[i]) + f64::from(bias[i]);
                assert!((expected - f64::from(o)).abs() < 2e-5, "{expected} {o}");
            }
        }
    }
}

#[test]
fn products_are_element_by_element_with_rows_of_another_stride() {
    let cx = cx(2);
    let (n, w) = (4, 24);
    let (mut x, y) = (ramp(n * w), ramp(n * 3 * w));
    let before = x.clone();
    let part = TensorRef::from_host(&y, &[n, 3 * w]).unwrap().cols(w..2 * w).unwrap();
    cx.multiply(TensorMut::from_host(&mut x, &[n, w]).unwrap(), part).unwrap();
    for (i, v) in x.iter().enumerate() {
        assert_eq!(*v, before[i] * y[i / w * 3 * w + w + i % w]);
    }
}

#[test]
fn the_fused_norm_is_add_then_norm_and_in_place_is_the_same() {
    let cx = cx(2);
    let (n, w) = (33, 40);
    let weight = Tensor::from_slice(&cx, &ramp(w), &[w]).unwrap();
    let x: Vec<f32> = ramp(n * w).iter().map(|v| v * 0.5).collect();
    let x = TensorRef::from_host(&x, &[n, w]).unwrap();
    let (mut residual, mut out) = (ramp(n * w), vec![0f32; n * w]);
    fn view(t: &mut [f32]) -> TensorMut<'_> {
        TensorMut::from_host(t, &[33, 40]).unwrap()
    }
    cx.add_rms_norm(view(&mut residual), x, &weight, 1e-6, view(&mut out)).unwrap();
    let mut sum = ramp(n * w);
    cx.add(view(&mut sum), x).unwrap();
    assert_eq!(sum, residual);
    cx.rms_norm_in_place(view(&mut sum), &weight, 1e-6).unwrap();
    assert_eq!(sum, out);
}

#[test]
fn rotation_of_the_key_columns_of_a_fused_projection() {
    let cx = cx(1);
    let table = Tensor::from_slice(&cx, &[1f32, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0], &[2, 2, 2]).unwrap();
    let positions = View::from_vec(vec![1, 0]);
    let mut data: Vec<f32> = (0..24).map(|i| i as f32).collect();
    let run = |data: &mut [f32], style| {
        let keys = TensorMut::from_host(data, &[2, 12]).unwrap().cols(4..8).unwrap().heads(1).unwrap();
        cx.rope(keys, &positions, &table, style)
    };
    run(&mut data, RopeStyle::Halves).unwrap();
    assert_eq!(data[4..8], [-6.0, -7.0, 4.0, 5.0]);
    run(&mut data, RopeStyle::Interleaved).unwrap();
    assert_eq!(data[4..8], [7.0, -6.0, -5.0, 4.0]);
    assert!(data[8..].iter().enumerate().all(|(i, &x)| x == (i + 8) as f32));
    let keys = TensorMut::from_host(&mut data, &[2, 1, 4]).unwrap();
    let e = cx.rope(keys, &View::from_vec(vec![0, 2]), &table, RopeStyle::Halves).unwrap_err();
    assert_eq!(e.to_string(), "rope: position 2 is outside 0..2");
}

#[test]
fn gates_gathers_and_caps() {
    let cx = cx(2);
    let x = TensorRef::from_host(&[0.0f32, 2.0, 3.0, 4.0, 1.0, -1.0, 0.5, 1.0], &[2, 4]).unwrap();
    let mut out = [0f32; 4];
    cx.gated(Activation::Silu, x, TensorMut::from_host(&mut out, &[2, 2]).unwrap()).unwrap();
    assert_eq!(out[0], 0.0);
    assert!((out[1] - 2.0 / (1.0 + (-2f32).exp()) * 4.0).abs() < 1e-5, "{out:?}");
    let mut rows = [0f32; 12];
    let ids = View::from_vec(vec![1, 1, 0]);
    cx.gather_rows(x, &ids, TensorMut::from_host(&mut rows, &[3, 4]).unwrap()).unwrap();
    assert_eq!(rows[..5], [1.0, -1.0, 0.5, 1.0, 1.0]);
    assert_eq!(rows[8..], [0.0, 2.0, 3.0, 4.0]);
    let e = cx.gather_rows(x, &View::from_vec(vec![2]), TensorMut::from_host(&mut rows, &[1, 4]).unwrap());
    assert!(e.unwrap_err().to_string().contains("row 2"));
    cx.scale_and_cap(TensorMut::from_host(&mut rows, &[3, 4]).unwrap(), 1e6, Some(30.0)).unwrap();
    assert_eq!((rows[0], rows[1], rows[8]), (30.0, -30.0, 0.0));
}

#[test]
fn other_activation_types_and_shapes_are_refused() {
    let cx = cx(1);
    let weight = Tensor::zeros(&cx, DType::F32, &[4]).unwrap();
    let half = Tensor::zeros(&cx, DType::BF16, &[1, 4]).unwrap();
    let mut out = [0f32; 8];
    let e = cx.rms_norm(half.view(), &weight, 1e-5, TensorMut::from_host(&mut out, &[1, 4]).unwrap());
    assert!(matches!(e, Err(TensorError::WrongDType { found: DType::BF16, .. })));
    let e = cx.rms_norm_in_place(TensorMut::from_host(&mut out, &[1, 8]).unwrap(), &weight, 1e-5);
    assert!(matches!(e, Err(TensorError::WrongShape { .. })));
    let x = TensorRef::from_host(&[0f32; 6], &[1, 6]).unwrap();
    let e = cx.gated(Activation::Gelu, x, TensorMut::from_host(&mut out, &[1, 2]).unwrap());
    assert!(matches!(e, Err(TensorError::WrongShape { .. })));
}

#[test]
fn a_gated_norm_in_every_order() {
    let cx = cx(2);
    let (n, w, parts) = (40, 48, 4);
    let weight = Tensor::from_slice(&cx, &ramp(w), &[w]).unwrap();
    let silu = |g: f32| f64::from(g) / (1.0 + (-f64::from(g)).exp());
    // The gate is part of wider rows, as a projection leaves it.
    let wide: Vec<f32> = ramp(n * (w + 5)).iter().map(|v| v * 1.3).collect();
    let gate = TensorRef::from_host(&wide, &[n, w + 5]).unwrap().cols(5..w + 5).unwrap();
    for (groups, before_gate) in [(1, false), (parts, false), (parts, true), (0, false)] {
        let norm = match groups {
            0 => GatedNorm::None,
            groups => GatedNorm::Rms { weight: &weight, groups, eps: 1e-5, before_gate },
        };
        let mut x: Vec<f32> = ramp(n * w).iter().map(|v| v - 0.3).collect();
        let before = x.clone();
        cx.gated_norm(TensorMut::from_host(&mut x, &[n, w]).unwrap(), gate, norm).unwrap();
        for t in 0..n {
            let gate = |i: usize| silu(wide[t * (w + 5) + 5 + i]);
            let gated = |i: usize| f64::from(before[t * w + i]) * if before_gate { 1.0 } else { gate(i) };
            for i in 0..w {
                let size = w / groups.max(1);
                let part = i / size * size..(i / size + 1) * size;
                let mean = part.map(|j| gated(j).powi(2)).sum::<f64>() / size as f64;
                let normed = gated(i) / (mean + 1e-5).sqrt() * f64::from(ramp(w)[i]);
                let exact = match (groups, before_gate) {
                    (0, _) => gated(i),
                    (_, true) => normed * gate(i),
                    (_, false) => normed,
                };
                assert!((exact - f64::from(x[t * w + i])).abs() < 1e-5, "{groups} {before_gate}");
            }
        }
    }
    let mut x = ramp(2 * w);
    let gate = TensorRef::from_host(&wide[..2 * w], &[2, w]).unwrap();
    let norm = GatedNorm::Rms { weight: &weight, groups: 5, eps: 1e-5, before_gate: false };
    let e = cx.gated_norm(TensorMut::from_host(&mut x, &[2, w]).unwrap(), gate, norm).unwrap_err();
    assert!(e.to_string().contains("5 parts of 48 elements"), "{e}");
}

#[test]
fn an_activation_alone_is_the_gate_of_ones() {
    let cx = cx(1);
    let x = ramp(64);
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Relu2] {
        let mut alone = x.clone();
        cx.activate(activation, TensorMut::from_host(&mut alone, &[1, 64]).unwrap()).unwrap();
        let both: Vec<f32> = x.iter().copied().chain([1.0; 64]).collect();
        let mut gated = vec![0f32; 64];
        let both = TensorRef::from_host(&both, &[1, 128]).unwrap();
        cx.gated(activation, both, TensorMut::from_host(&mut gated, &[1, 64]).unwrap()).unwrap();
        assert_eq!(alone, gated);
    }
    let mut x = vec![-2.0, 3.0];
    cx.activate(Activation::Relu2, TensorMut::from_host(&mut x, &[1, 2]).unwrap()).unwrap();
    assert_eq!(x, [0.0, 9.0]);
}
