//! Sums, products, activations, caps, codes.

use crate::{
    Outcome, ensure,
    reference::{FLOATS, Random, Worst, poisoned, read, tensor},
    text,
};
use headway_cuda::CudaExec;
use headway_tensor::{Activation, DType, Ops, RowQuant, Tensor, fp8::f32_to_e4m3};

const ACTIVATIONS: [Activation; 5] = [
    Activation::Silu,
    Activation::GeluTanh,
    Activation::Gelu,
    Activation::ClampedSwiglu { alpha: 1.702, limit: 2.0 },
    Activation::Relu2,
];

/// What float32 loses, where values are a few units large.
const LOSS: f64 = 4e-6;

fn erf(x: f64) -> f64 {
    // The series converges for all x that tests use.
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn exact_gate(activation: Activation, gate: f32, up: f32) -> f64 {
    let (g, u) = (f64::from(gate), f64::from(up));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Silu => g * sigmoid(g) * u,
        Activation::GeluTanh => {
            0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3))).tanh()) * u
        }
        Activation::Gelu => 0.5 * g * (1.0 + erf(g / 2f64.sqrt())) * u,
        Activation::ClampedSwiglu { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (g, u) = (g.min(limit), u.clamp(-limit, limit));
            g * sigmoid(alpha * g) * (u + 1.0)
        }
        Activation::Relu2 => g.max(0.0).powi(2) * u,
    }
}

pub fn add_and_multiply(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(11), Worst::default());
    for dtype in FLOATS {
        for (n, w) in [(1, 1), (3, 17), (64, 576), (700, 4096), (5, 1000)] {
            let (x, xs) = tensor(cx, dtype, &random.values(n * w, 3.0), &[n, w])?;
            let (mut acc, rs) = tensor(cx, dtype, &random.values(n * (w + 8), 3.0), &[n, w + 8])?;
            let part = acc.view_mut().cols(8..w + 8).map_err(text)?;
            cx.add(part, x.view()).map_err(text)?;
            let mut exact: Vec<f64> = rs.iter().map(|x| f64::from(*x)).collect();
            for (row, x) in exact.chunks_mut(w + 8).zip(xs.chunks(w)) {
                row[8..].iter_mut().zip(x).for_each(|(r, x)| *r += f64::from(*x));
            }
            worst.see(&format!("sum of {n} x {w} {dtype}"), &read(cx, &acc)?, &exact, dtype, 0.0)?;
            let (mut y, ys) = tensor(cx, dtype, &random.values(n * w, 3.0), &[n, w])?;
            cx.multiply(y.view_mut(), x.view()).map_err(text)?;
            let exact: Vec<f64> = ys.iter().zip(&xs).map(|(y, x)| f64::from(*y) * f64::from(*x)).collect();
            worst.see(&format!("product of {n} x {w} {dtype}"), &read(cx, &y)?, &exact, dtype, 0.0)?;
        }
    }
    Ok(worst.found())
}

pub fn gated(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(12), Worst::default());
    for dtype in FLOATS {
        for activation in ACTIVATIONS {
            for (n, w) in [(1, 8), (3, 13), (65, 1536)] {
                let (x, xs) = tensor(cx, dtype, &random.values(n * 2 * w, 4.0), &[n, 2 * w])?;
                let mut out = poisoned(cx, dtype, &[n, w])?;
                cx.gated(activation, x.view(), out.view_mut()).map_err(text)?;
                let rows = xs.chunks(2 * w).map(|r| r.split_at(w));
                let exact: Vec<f64> = rows
                    .flat_map(|(g, u)| g.iter().zip(u).map(|(g, u)| exact_gate(activation, *g, *u)))
                    .collect();
                let name = format!("{activation:?} {n} x {w} {dtype}");
                worst.see(&name, &read(cx, &out)?, &exact, dtype, 3.0 * LOSS)?;
            }
        }
    }
    Ok(worst.found())
}

pub fn activate(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(13), Worst::default());
    for dtype in FLOATS {
        for activation in [ACTIVATIONS[0], ACTIVATIONS[1], ACTIVATIONS[2], ACTIVATIONS[4]] {
            for (n, w) in [(1, 24), (9, 77)] {
                let (mut x, xs) = tensor(cx, dtype, &random.values(n * w, 4.0), &[n, w])?;
                cx.activate(activation, x.view_mut()).map_err(text)?;
                let exact: Vec<f64> = xs.iter().map(|x| exact_gate(activation, *x, 1.0)).collect();
                let name = format!("{activation:?} {n} x {w} {dtype}");
                worst.see(&name, &read(cx, &x)?, &exact, dtype, LOSS)?;
            }
        }
    }
    let mut x = Tensor::zeros(cx, DType::BF16, &[1, 8]).map_err(text)?;
    let refused = cx.activate(ACTIVATIONS[3], x.view_mut());
    ensure(refused.is_err_and(|e| e.to_string().contains("up projection")), || "not refused".into())?;
    Ok(worst.found())
}

pub fn scale_and_cap(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(14), Worst::default());
    for dtype in FLOATS {
        for (factor, cap) in [(1.0, Some(30.0f32)), (0.0625, Some(50.0)), (12.5, None), (1.0, None)] {
            for (n, w) in [(2, 4096), (5, 333)] {
                let (mut x, xs) = tensor(cx, dtype, &random.values(n * w, 60.0), &[n, w])?;
                cx.scale_and_cap(x.view_mut(), factor, cap).map_err(text)?;
                let exact: Vec<f64> = xs
                    .iter()
                    .map(|x| f64::from(*x) * f64::from(factor))
                    .map(|x| cap.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh()))
                    .collect();
                let name = format!("{factor} {cap:?} {n} x {w} {dtype}");
                worst.see(&name, &read(cx, &x)?, &exact, dtype, 10.0 * LOSS)?;
            }
        }
    }
    Ok(worst.found())
}

/// Bit for bit what the host makes of the same values.
pub fn quantise_rows(cx: &CudaExec) -> Outcome {
    let (mut random, mut count) = (Random(15), 0);
    for dtype in FLOATS {
        for (n, w) in [(3, 64), (7, 131), (40, 4096)] {
            let mut values = random.values(n * w, 1.0);
            values.iter_mut().for_each(|x| *x = x.powi(5) * 600.0);
            values[..3].copy_from_slice(&[f32::NAN, f32::INFINITY, -0.0]);
            let (x, xs) = tensor(cx, dtype, &values, &[n, w])?;
            let mut codes = Tensor::zeros(cx, DType::F8E4M3, &[n, w]).map_err(text)?;
            let quant = RowQuant::E4m3 { scale: 0.7 };
            cx.quantise_rows(&quant, x.view(), codes.view_mut()).map_err(text)?;
            let found = cx.read_tensor(codes.view()).map_err(text)?;
            for (i, (x, code)) in xs.iter().zip(&found).enumerate() {
                let exact = f32_to_e4m3(x / 0.7);
                let same = *code == exact || (x.is_nan() && code & 0x7f == 0x7f);
                ensure(same, || format!("{n} x {w} {dtype}: {i}: {x} is {code:#04x}, not {exact:#04x}"))?;
            }
            count += found.len();
        }
        // Heads of rows with more in them, as a fused projection leaves queries.
        let values = random.values(5 * 200, 300.0);
        let (x, xs) = tensor(cx, dtype, &values, &[5, 200])?;
        let mut codes = Tensor::zeros(cx, DType::F8E4M3, &[5, 3, 48]).map_err(text)?;
        let heads = x.view().cols(16..160).and_then(|x| x.heads(3)).map_err(text)?;
        cx.quantise_rows(&RowQuant::E4m3 { scale: 1.0 }, heads, codes.view_mut()).map_err(text)?;
        let found = cx.read_tensor(codes.view()).map_err(text)?;
        for (i, code) in found.iter().enumerate() {
            let exact = f32_to_e4m3(xs[i / 144 * 200 + 16 + i % 144]);
            ensure(*code == exact, || format!("{dtype}, heads: {i} is {code:#04x}, not {exact:#04x}"))?;
        }
        count += found.len();
    }
    Ok(format!("{count} codes"))
}
