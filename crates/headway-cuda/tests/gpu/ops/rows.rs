//! Rotation, rows by number, the largest of a row, and what is refused.

use crate::{
    Outcome, ensure,
    reference::{FLOATS, Random, Worst, ids, poisoned, read, tensor},
    text,
};
use headway_cuda::CudaExec;
use headway_tensor::{DType, LinearPart, Ops, RopeStyle, Tensor, View, Weight};

/// What float32 loses, where values are a few units large.
const LOSS: f64 = 2e-6;

pub fn rope(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(21), Worst::default());
    for dtype in FLOATS {
        for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
            for (heads, size, half) in [(9, 64, 32), (3, 128, 64), (2, 80, 20), (1, 37, 9), (4, 96, 48)] {
                let (n, width, positions) = (13, (heads + 1) * size, 50);
                let at: Vec<i32> = (0..n).map(|_| random.below(positions) as i32).collect();
                let angles = random.values(positions * half, 3.0);
                let table: Vec<f32> = angles.iter().flat_map(|a| [a.cos() * 1.1, a.sin() * 1.1]).collect();
                let (table, ts) = tensor(cx, DType::F32, &table, &[positions, half, 2])?;
                let (mut x, xs) = tensor(cx, dtype, &random.values(n * width, 3.0), &[n, width])?;
                let part = x.view_mut().cols(size..width).and_then(|v| v.heads(heads)).map_err(text)?;
                cx.rope(part, &ids(cx, &at)?, &table, style).map_err(text)?;
                let mut exact: Vec<f64> = xs.iter().map(|x| f64::from(*x)).collect();
                for (t, row) in exact.chunks_mut(width).enumerate() {
                    for head in row[size..].chunks_mut(size) {
                        for i in 0..half {
                            let pair = &ts[(at[t] as usize * half + i) * 2..][..2];
                            let (c, s) = (f64::from(pair[0]), f64::from(pair[1]));
                            let (a, b) = match style {
                                RopeStyle::Halves => (i, i + half),
                                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                            };
                            (head[a], head[b]) = (head[a] * c - head[b] * s, head[b] * c + head[a] * s);
                        }
                    }
                }
                let name = format!("{style:?} {heads} x {size}, {half} pairs, {dtype}");
                worst.see(&name, &read(cx, &x)?, &exact, dtype, LOSS)?;
            }
        }
    }
    Ok(worst.found())
}

pub fn gather_rows(cx: &CudaExec) -> Outcome {
    let mut random = Random(22);
    for dtype in FLOATS {
        for w in [1, 40, 576, 777] {
            let (x, xs) = tensor(cx, dtype, &random.values(31 * w, 3.0), &[31, w])?;
            let rows: Vec<i32> = (0..19).map(|_| random.below(31) as i32).collect();
            let mut out = poisoned(cx, dtype, &[19, w])?;
            cx.gather_rows(x.view(), &ids(cx, &rows)?, out.view_mut()).map_err(text)?;
            let exact: Vec<f32> = rows.iter().flat_map(|r| &xs[*r as usize * w..][..w]).copied().collect();
            ensure(read(cx, &out)? == exact, || format!("rows of {w} {dtype}"))?;
        }
    }
    Ok("12 cases, every bit".into())
}

fn table(
    cx: &CudaExec,
    dtype: DType,
    values: &[f32],
    shape: [usize; 2],
) -> Result<std::sync::Arc<dyn headway_tensor::Linear>, String> {
    let weight = Weight::from_f32("table", shape.to_vec(), values).map_err(text)?;
    cx.load_linear(vec![LinearPart { weight, bias: None }], Some(dtype)).map_err(text)
}

pub fn embed(cx: &CudaExec) -> Outcome {
    let (mut random, mut worst) = (Random(23), Worst::default());
    for held in FLOATS {
        for dtype in FLOATS {
            for (w, scale) in [(64, 1.0f32), (77, 25.5)] {
                let values = random.values(300 * w, 2.0);
                let (_, held_values) = tensor(cx, held, &values, &[300, w])?;
                let table = table(cx, held, &values, [300, w])?;
                let at: Vec<i32> = (0..23).map(|_| random.below(300) as i32).collect();
                let mut out = poisoned(cx, dtype, &[23, w])?;
                cx.embed(&*table, &ids(cx, &at)?, scale, out.view_mut()).map_err(text)?;
                let row = |i: &i32| held_values[*i as usize * w..][..w].iter().map(|x| f64::from(*x));
                let exact: Vec<f64> = at.iter().flat_map(row).map(|x| x * f64::from(scale)).collect();
                worst.see(&format!("{held} as {dtype}, {w}"), &read(cx, &out)?, &exact, dtype, 0.0)?;
            }
        }
    }
    Ok(worst.found())
}

pub fn argmax(cx: &CudaExec) -> Outcome {
    let mut random = Random(24);
    for dtype in FLOATS {
        for w in [1, 5, 256, 49_152, 128_001] {
            let n = 6;
            let mut values = random.values(n * w, 8.0);
            // Ties, a row without a number, one with a single number, one of minus infinity.
            values[..w].iter_mut().enumerate().for_each(|(i, x)| *x = if i % 3 == 1 { 9.0 } else { *x });
            values[w..2 * w].fill(f32::NAN);
            values[2 * w..3 * w].fill(f32::NAN);
            values[3 * w - 1] = -4.0;
            values[3 * w..4 * w].fill(f32::NEG_INFINITY);
            let (x, xs) = tensor(cx, dtype, &values, &[n, w])?;
            let mut out = Tensor::from_slice(cx, &vec![-7i32; n], &[n]).map_err(text)?;
            cx.argmax(x.view(), out.view_mut()).map_err(text)?;
            let exact: Vec<f32> = xs
                .chunks(w)
                .map(|row| {
                    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    row.iter().position(|x| *x == most).unwrap_or(0) as f32
                })
                .collect();
            let found = read(cx, &out)?;
            ensure(found == exact, || format!("{w} {dtype}: {found:?}, not {exact:?}"))?;
        }
    }
    Ok("90 rows".into())
}

/// Seen by the next call that waits; the device lives.
pub fn out_of_range(cx: &CudaExec) -> Outcome {
    let (x, _) = tensor(cx, DType::BF16, &[1.0; 64], &[4, 16])?;
    let mut out = poisoned(cx, DType::BF16, &[2, 16])?;
    let expect = |outcome: headway_tensor::Result<()>, words: &str| {
        outcome.map_err(text)?;
        let e = cx.synchronize().err().map(text).unwrap_or_default();
        ensure(e.contains(words), || format!("'{e}', not '{words}'"))?;
        cx.synchronize().map_err(text)
    };
    expect(cx.gather_rows(x.view(), &ids(cx, &[3, 4])?, out.view_mut()), "gather_rows: row 4 is outside")?;
    expect(cx.gather_rows(x.view(), &ids(cx, &[-1, 0])?, out.view_mut()), "gather_rows: row -1 is outside")?;
    let table = table(cx, DType::BF16, &[0.5; 160], [10, 16])?;
    expect(cx.embed(&*table, &ids(cx, &[0, 10])?, 1.0, out.view_mut()), "embed: token id 10 is outside")?;
    let angles = Tensor::from_slice(cx, &[0f32; 5 * 16], &[5, 8, 2]).map_err(text)?;
    let heads = out.view_mut().heads(1).map_err(text)?;
    expect(cx.rope(heads, &ids(cx, &[4, 5])?, &angles, RopeStyle::Halves), "rope: position 5 is outside")?;
    Ok("4 kinds".into())
}

pub fn refusals(cx: &CudaExec) -> Outcome {
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(cx, dtype, shape).map_err(text);
    let (a, mut b) = (zeros(DType::BF16, &[2, 16])?, zeros(DType::F16, &[2, 16])?);
    let mut short = zeros(DType::BF16, &[2, 15])?;
    let linear = table(cx, DType::BF16, &[0.5; 64], [4, 16])?;
    let mut out = zeros(DType::BF16, &[2, 4])?;
    let host = View::from_vec(vec![0i32, 1]);
    let says = [
        (cx.add(b.view_mut(), a.view()), "one type"),
        (cx.add(short.view_mut(), a.view()), "[2, 1, 15]"),
        (cx.gather_rows(a.view(), &host, b.view_mut()), "memory is on cpu"),
        (cx.linear(&*linear, b.view(), out.view_mut()), "load the weight with compute float16"),
        (cx.linear(&*linear, a.view(), short.view_mut()), "[2, 4]"),
        (cx.linear(&*linear, a.view(), b.view_mut().cols(0..4).map_err(text)?), "float32 are supported"),
        (cx.scale_and_cap(out.view_mut(), 1.0, Some(-1.0)), "above 0"),
    ];
    for (i, (outcome, words)) in says.into_iter().enumerate() {
        let e = outcome.err().map(text).unwrap_or_default();
        ensure(e.contains(words), || format!("{i}: '{e}', not '{words}'"))?;
    }
    Ok("7 by name".into())
}
