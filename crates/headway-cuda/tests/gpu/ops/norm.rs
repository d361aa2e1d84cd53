//! Norms.

use crate::{
    Outcome,
    reference::{FLOATS, Random, Worst, poisoned, read, rounded, tensor},
    text,
};
use headway_cuda::CudaExec;
use headway_tensor::{DType, GatedNorm, Ops};

/// Widths for warps and blocks, whole accesses and odd ends.
const WIDTHS: [usize; 8] = [1, 7, 64, 128, 500, 576, 1031, 4096];

fn rms(row: &[f64], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    row.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * f64::from(*w)).collect()
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|x| f64::from(*x)).collect()
}

/// What float32 loses, where values are a few units large.
const LOSS: f64 = 4e-6;

pub fn rms_norm(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(1), Worst::default());
    for dtype in FLOATS {
        for (i, w) in WIDTHS.into_iter().enumerate() {
            let n = [1, 3, 40, 9][i % 4];
            // Columns of wider rows: a part of a fused projection.
            let gap = [0, 8, 3][i % 3];
            let (x, xs) = tensor(cx, dtype, &random.values(n * (w + gap), 3.0), &[n, w + gap])?;
            let (weight, ws) = tensor(cx, DType::F32, &random.values(w, 1.5), &[w])?;
            let mut out = poisoned(cx, dtype, &[n, w])?;
            let view = x.view().cols(gap..w + gap).map_err(text)?;
            cx.rms_norm(view, &weight, 1e-5, out.view_mut()).map_err(text)?;
            let rows = xs.chunks(w + gap).map(|r| rms(&wide(&r[gap..]), &ws, 1e-5));
            let exact: Vec<f64> = rows.flatten().collect();
            worst.see(&format!("{n} x {w} {dtype}"), &read(cx, &out)?, &exact, dtype, LOSS)?;
        }
    }
    Ok(worst.found())
}

/// Query and key heads of a fused projection; what lies beside them stays as it is.
pub fn heads_in_place(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(2), Worst::default());
    for dtype in FLOATS {
        for (heads, size) in [(1, 64), (5, 128), (4, 80), (3, 37)] {
            let (n, width) = (11, (heads + 2) * size);
            let (mut x, xs) = tensor(cx, dtype, &random.values(n * width, 3.0), &[n, width])?;
            let (weight, ws) = tensor(cx, DType::F32, &random.values(size, 1.5), &[size])?;
            let part =
                x.view_mut().cols(size..(heads + 1) * size).and_then(|v| v.heads(heads)).map_err(text)?;
            cx.rms_norm_in_place(part, &weight, 1e-6).map_err(text)?;
            let mut exact = wide(&xs);
            for row in exact.chunks_mut(width) {
                for head in row[size..(heads + 1) * size].chunks_mut(size) {
                    let normed = rms(head, &ws, 1e-6);
                    head.copy_from_slice(&normed);
                }
            }
            worst.see(&format!("{heads} x {size} {dtype}"), &read(cx, &x)?, &exact, dtype, LOSS)?;
        }
    }
    Ok(worst.found())
}

pub fn add_rms_norm(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(3), Worst::default());
    for dtype in FLOATS {
        for w in WIDTHS {
            let n = 5;
            let (mut residual, rs) = tensor(cx, dtype, &random.values(n * w, 3.0), &[n, w])?;
            let (x, xs) = tensor(cx, dtype, &random.values(n * w, 1.0), &[n, w])?;
            let (weight, ws) = tensor(cx, DType::F32, &random.values(w, 1.5), &[w])?;
            let mut out = poisoned(cx, dtype, &[n, w])?;
            cx.add_rms_norm(residual.view_mut(), x.view(), &weight, 1e-5, out.view_mut()).map_err(text)?;
            let sums: Vec<f32> = rs.iter().zip(&xs).map(|(r, x)| rounded(r + x, dtype)).collect();
            let name = format!("{n} x {w} {dtype}");
            worst.see(&format!("{name}, residual"), &read(cx, &residual)?, &wide(&sums), dtype, 0.0)?;
            let exact: Vec<f64> = sums.chunks(w).flat_map(|r| rms(&wide(r), &ws, 1e-5)).collect();
            worst.see(&name, &read(cx, &out)?, &exact, dtype, LOSS)?;
        }
    }
    Ok(worst.found())
}

pub fn layer_norm(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(4), Worst::default());
    for dtype in FLOATS {
        for w in WIDTHS.into_iter().filter(|w| *w > 1) {
            let n = 6;
            let values: Vec<f32> = random.values(n * w, 2.0).iter().map(|x| x + 0.7).collect();
            let (mut x, xs) = tensor(cx, dtype, &values, &[n, w])?;
            let (weight, ws) = tensor(cx, DType::F32, &random.values(w, 1.5), &[w])?;
            let (bias, bs) = tensor(cx, DType::F32, &random.values(w, 1.0), &[w])?;
            cx.layer_norm_in_place(x.view_mut(), &weight, &bias, 1e-5).map_err(text)?;
            let mut exact = vec![];
            for row in xs.chunks(w).map(wide) {
                let mean = row.iter().sum::<f64>() / w as f64;
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / w as f64;
                let by = 1.0 / (variance + 1e-5).sqrt();
                exact.extend((0..w).map(|i| (row[i] - mean) * by * f64::from(ws[i]) + f64::from(bs[i])));
            }
            worst.see(&format!("{n} x {w} {dtype}"), &read(cx, &x)?, &exact, dtype, 2.0 * LOSS)?;
        }
    }
    Ok(worst.found())
}

pub fn gated_norm(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(5), Worst::default());
    let silu = |g: f32| f64::from(g) / (1.0 + (-f64::from(g)).exp());
    for dtype in FLOATS {
        for (w, groups, before) in [
            (64, 1, false),
            (1536, 8, false),
            (1536, 1, true),
            (90, 3, true),
            (4096, 2, false),
            (100, 0, false),
        ] {
            let n = 7;
            let (mut x, xs) = tensor(cx, dtype, &random.values(n * w, 3.0), &[n, w])?;
            let (gate, gs) = tensor(cx, dtype, &random.values(n * (w + 8), 3.0), &[n, w + 8])?;
            let (weight, ws) = tensor(cx, DType::F32, &random.values(w, 1.5), &[w])?;
            let norm = match groups {
                0 => GatedNorm::None,
                groups => GatedNorm::Rms { weight: &weight, groups, eps: 1e-5, before_gate: before },
            };
            let view = gate.view().cols(8..w + 8).map_err(text)?;
            cx.gated_norm(x.view_mut(), view, norm).map_err(text)?;
            let mut exact = vec![];
            for (x, g) in xs.chunks(w).zip(gs.chunks(w + 8).map(|g| &g[8..])) {
                let gated = |i: usize| f64::from(x[i]) * if before { 1.0 } else { silu(g[i]) };
                let part = w / groups.max(1);
                for first in (0..w).step_by(part) {
                    let row: Vec<f64> = (first..first + part).map(gated).collect();
                    let normed = if groups == 0 { row } else { rms(&row, &ws[first..first + part], 1e-5) };
                    let after = |i: usize| if before { silu(g[first + i]) } else { 1.0 };
                    exact.extend(normed.iter().enumerate().map(|(i, x)| x * after(i)));
                }
            }
            let name = format!("{n} x {w} in {groups}, norm first {before}, {dtype}");
            worst.see(&name, &read(cx, &x)?, &exact, dtype, 4.0 * LOSS)?;
        }
    }
    Ok(worst.found())
}
