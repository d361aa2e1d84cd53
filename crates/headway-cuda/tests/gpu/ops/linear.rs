//! Linear layers.

use crate::{
    Outcome, ensure,
    reference::{FLOATS, Random, Worst, poisoned, read, rounded, tensor},
    text,
};
use headway_cuda::{CudaError, CudaExec, CudaOptions};
use headway_tensor::{DType, Linear, LinearPart, Ops, SharedBytes, Weight, WeightType, quant::QuantFormat};
use std::sync::Arc;

fn load(cx: &CudaExec, parts: Vec<LinearPart>, dtype: Option<DType>) -> Result<Arc<dyn Linear>, String> {
    cx.load_linear(parts, dtype).map_err(text)
}

fn part(values: &[f32], shape: [usize; 2], bias: Option<&[f32]>) -> Result<LinearPart, String> {
    let weight = Weight::from_f32("w", shape.to_vec(), values).map_err(text)?;
    let bias = bias.map(|b| Weight::from_f32("b", vec![b.len()], b)).transpose().map_err(text)?;
    Ok(LinearPart { weight, bias })
}

/// `x · wᵀ + bias`, and what sums of so many products may lose in float32.
fn exact(x: &[f32], w: &[f32], k: usize, bias: Option<&[f32]>) -> (Vec<f64>, f64) {
    let mut out = vec![];
    for x in x.chunks(k) {
        for (i, w) in w.chunks(k).enumerate() {
            let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            out.push(sum + bias.map_or(0.0, |b| f64::from(b[i])));
        }
    }
    (out, (k as f64).sqrt() * 1e-5)
}

pub fn shapes(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(31), Worst::default());
    for dtype in FLOATS {
        for (n, k, m) in [
            (1, 576, 960),
            (1, 8, 8),
            (3, 64, 40),
            (33, 576, 1536),
            (130, 200, 72),
            (5, 37, 11),
            (2, 1536, 3001),
        ] {
            let (w, x) = (random.values(m * k, 1.0), random.values(n * (k + 8), 1.0));
            let ws: Vec<f32> = w.iter().map(|x| rounded(*x, dtype)).collect();
            let layer = load(cx, vec![part(&w, [m, k], None)?], Some(dtype))?;
            ensure((layer.in_features(), layer.out_features()) == (k, m), || "sizes".into())?;
            let (wide, xs) = tensor(cx, dtype, &x, &[n, k + 8])?;
            let xs: Vec<f32> = xs.chunks(k + 8).flat_map(|r| &r[..k]).copied().collect();
            let x = wide.view().cols(0..k).map_err(text)?;
            let (sums, loss) = exact(&xs, &ws, k, None);
            for out_dtype in [dtype, DType::F32] {
                let mut out = poisoned(cx, out_dtype, &[n, m])?;
                cx.linear(&*layer, x, out.view_mut()).map_err(text)?;
                let name = format!("{n} rows, {k} to {m}, {dtype} to {out_dtype}");
                worst.see(&name, &read(cx, &out)?, &sums, out_dtype, loss)?;
            }
        }
    }
    Ok(worst.found())
}

/// Query, key and value in one layer, one of them without a bias; an output that is part of wider rows.
pub fn parts(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(32), Worst::default());
    let (k, sizes) = (128, [96, 32, 40]);
    for dtype in FLOATS {
        let w: Vec<Vec<f32>> = sizes.iter().map(|m| random.values(m * k, 1.0)).collect();
        let b: Vec<Vec<f32>> = sizes.iter().map(|m| random.values(*m, 2.0)).collect();
        let all = (0..3)
            .map(|i| part(&w[i], [sizes[i], k], (i != 1).then_some(&b[i][..])))
            .collect::<Result<Vec<_>, _>>()?;
        let layer = load(cx, all, Some(dtype))?;
        let (x, xs) = tensor(cx, dtype, &random.values(9 * k, 1.0), &[9, k])?;
        let ws: Vec<f32> = w.iter().flatten().map(|x| rounded(*x, dtype)).collect();
        for out_dtype in [dtype, DType::F32] {
            let mut bias: Vec<f32> = b.iter().flatten().map(|x| rounded(*x, out_dtype)).collect();
            bias[96..128].fill(0.0);
            let (sums, loss) = exact(&xs, &ws, k, Some(&bias));
            let mut out = poisoned(cx, out_dtype, &[9, 168 + 24])?;
            let view = out.view_mut().cols(16..184).map_err(text)?;
            cx.linear(&*layer, x.view(), view).map_err(text)?;
            let found = read(cx, &out)?;
            let inside: Vec<f32> = found.chunks(192).flat_map(|r| &r[16..184]).copied().collect();
            worst.see(&format!("{dtype} to {out_dtype}"), &inside, &sums, out_dtype, loss)?;
            let beside = found.chunks(192).flat_map(|r| r[..16].iter().chain(&r[184..])).all(|x| x.is_nan());
            ensure(beside, || "the neighbours were written".into())?;
        }
    }
    Ok(worst.found())
}

/// Blocks of a GGUF file: the values that they stand for, as bfloat16.
pub fn blocks(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(33), Worst::default());
    let (m, k, n) = (48, 512, 4);
    for format in [QuantFormat::Q8_0, QuantFormat::Q4_K, QuantFormat::Q6_K] {
        let dtype = WeightType::Quant(format);
        let blocks = m * k / format.block_elems();
        let mut bytes: Vec<u8> = (0..blocks * format.block_bytes()).map(|_| random.bits() as u8).collect();
        // Scales of a moderate size: binary16 in every place where a format has one or has other bits.
        bytes.chunks_exact_mut(2).for_each(|b| b[1] = b[1] & 0x83 | 0x28);
        let weight = Weight::new("w", dtype, vec![m, k], SharedBytes::new(bytes)).map_err(text)?;
        let ws: Vec<f32> = weight.to_f32().iter().map(|x| rounded(*x, DType::BF16)).collect();
        let most = ws.iter().fold(1f32, |m, x| m.max(x.abs()));
        let layer = load(cx, vec![LinearPart { weight, bias: None }], None)?;
        let (x, xs) = tensor(cx, DType::BF16, &random.values(n * k, 1.0), &[n, k])?;
        let (sums, loss) = exact(&xs, &ws, k, None);
        let mut out = poisoned(cx, DType::F32, &[n, m])?;
        cx.linear(&*layer, x.view(), out.view_mut()).map_err(text)?;
        worst.see(dtype.name(), &read(cx, &out)?, &sums, DType::F32, loss * f64::from(most))?;
    }
    Ok(worst.found())
}

/// A product in a graph, on inputs of later steps.
pub fn captured(cx: &CudaExec) -> Outcome {
    let mut random = Random(34);
    let (n, k, m) = (8, 256, 512);
    let w = random.values(m * k, 1.0);
    let layer = load(cx, vec![part(&w, [m, k], None)?], Some(DType::BF16))?;
    let (mut x, _) = tensor(cx, DType::BF16, &random.values(n * k, 1.0), &[n, k])?;
    let mut out = poisoned(cx, DType::BF16, &[n, m])?;
    cx.linear(&*layer, x.view(), out.view_mut()).map_err(text)?;
    let ((), graph) =
        cx.capture(|| Ok::<_, CudaError>(cx.linear(&*layer, x.view(), out.view_mut())?)).map_err(text)?;
    for _ in 0..3 {
        let (y, _) = tensor(cx, DType::BF16, &random.values(n * k, 1.0), &[n, k])?;
        cx.add(x.view_mut(), y.view()).map_err(text)?;
        graph.launch().map_err(text)?;
        let replayed = read(cx, &out)?;
        cx.linear(&*layer, x.view(), out.view_mut()).map_err(text)?;
        ensure(replayed == read(cx, &out)?, || "a replay differs".into())?;
    }
    Ok("3 replays".into())
}

/// A row alone and among others, bit for bit.
pub fn batch_invariant(_: &CudaExec) -> Outcome {
    let options = CudaOptions {
        batch_invariant: true,
        kernel_cache: Some(std::env::temp_dir().join("headway-gpu-tests-kernels")),
        ..CudaOptions::default()
    };
    let cx = CudaExec::open(options).map_err(text)?;
    let (mut random, mut rows) = (Random(35), 0);
    for dtype in FLOATS {
        for (k, m) in [(576, 960), (4096, 512), (1536, 3001)] {
            let w = random.values(m * k, 1.0);
            let layer = load(&cx, vec![part(&w, [m, k], None)?], Some(dtype))?;
            let (x, _) = tensor(&cx, dtype, &random.values(300 * k, 1.0), &[300, k])?;
            let run = |first: usize, n: usize| -> Result<Vec<f32>, String> {
                let mut out = poisoned(&cx, DType::F32, &[n, m])?;
                let x = x.view().rows(first..first + n).map_err(text)?;
                cx.linear(&*layer, x, out.view_mut()).map_err(text)?;
                read(&cx, &out)
            };
            let all = run(0, 300)?;
            for (first, n) in [(0, 1), (7, 1), (299, 1), (0, 2), (5, 17), (100, 64), (31, 200)] {
                let part = run(first, n)?;
                let same = part == all[first * m..(first + n) * m];
                ensure(same, || format!("{n} rows from {first} of {k} to {m} {dtype} differ"))?;
                rows += n;
            }
        }
    }
    Ok(format!("{rows} rows the same"))
}
