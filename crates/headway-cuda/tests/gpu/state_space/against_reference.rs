//! Outputs against the float64 mixer.

use super::world::{BLOCKS, SMALL, Shape, Turn, World, common, error, prefill};
use crate::{Outcome, ensure, text};
use headway_attention::MetadataBuilder;
use headway_cuda::CudaExec;
use headway_tensor::DType::{BF16, F16, F32};
use headway_testkit::Rng;

/// A request on its way: what it has done and what it has said.
struct Request {
    seed: u64,
    prompt: usize,
    total: usize,
    block: i32,
    said: Vec<f32>,
}

/// What rounding to a type and sums of rounded products may cost: at worst, and in the mean.
fn allowed(shape: &Shape) -> (f64, f64) {
    let of = |t| if t == BF16 { 8.0 } else { 1.0 };
    let by: f64 = of(shape.act);
    // A state is rounded at each step; what is lost adds up over as many as it remembers.
    let states = if shape.ssm == BF16 {
        24.0
    } else if shape.ssm == F16 {
        3.0
    } else {
        0.0
    };
    let worst = by.max(states);
    (5e-3 * worst, 6e-4 * worst)
}

/// Runs requests to their ends in random steps, decodes first; the worst error.
fn serve(world: &mut World<'_>, lengths: &[(usize, usize)], seed: u64) -> Result<(f64, f64), String> {
    let mut rng = Rng::new(seed);
    let mut blocks: Vec<i32> = (1..BLOCKS as i32).collect();
    rng.shuffle(&mut blocks);
    let mut requests: Vec<Request> = lengths
        .iter()
        .zip(blocks)
        .enumerate()
        .map(|(i, (&(prompt, more), block))| Request {
            seed: seed * 100 + i as u64,
            prompt,
            total: prompt + more,
            block,
            said: vec![],
        })
        .collect();
    let inner = world.shape.inner();
    loop {
        let mut turns: Vec<(usize, Turn)> = vec![];
        for (i, r) in requests.iter().enumerate() {
            let done = r.said.len() / inner;
            if done == r.total || (i > 0 && rng.chance(0.2)) {
                continue;
            }
            let prefilling = done < r.prompt;
            let new = if prefilling { rng.between(1, r.prompt - done) } else { 1 };
            turns.push((i, Turn { seed: r.seed, done, new, block: r.block, prefilling }));
        }
        if requests.iter().all(|r| r.said.len() == r.total * inner) {
            break;
        }
        turns.sort_by_key(|(_, t)| t.prefilling);
        let step: Vec<Turn> = turns.iter().map(|(_, t)| *t).collect();
        let mut out = world.run(&step, rng.below(3))?;
        let padding = out.pop().ok_or("no padding")?;
        ensure(padding.iter().all(|x| *x == 0.0), || "padding rows are not zero".into())?;
        for ((i, _), rows) in turns.iter().zip(out) {
            requests[*i].said.extend(rows);
        }
    }
    let mut worst = (0f64, 0f64);
    for r in &requests {
        let (most, mean) = error(&r.said, &world.reference(r.seed, r.total))?;
        worst = (worst.0.max(most), worst.1.max(mean));
    }
    let (most, mean) = allowed(&world.shape);
    match worst.0 <= most && worst.1 <= mean {
        true => Ok(worst),
        false => Err(format!(
            "{:?}, seed {seed}: off by {:.1e} at most and {:.1e} in the mean; {most:.1e} and {mean:.1e} are allowed",
            world.shape, worst.0, worst.1
        )),
    }
}

struct Found(usize, (f64, f64));

impl Found {
    fn see(&mut self, e: (f64, f64)) {
        self.0 += 1;
        self.1 = (self.1.0.max(e.0), self.1.1.max(e.1));
    }

    fn text(&self, of: &str) -> String {
        format!("{} {of}, off by {:.1e} at most, {:.1e} in the mean", self.0, self.1.0, self.1.1)
    }
}

pub fn random_batches(cx: &CudaExec) -> Outcome {
    let mut found = Found(0, (0.0, 0.0));
    for seed in 1..24 {
        let mut rng = Rng::new(seed * 77);
        let mut world = World::new(cx, SMALL)?;
        let lengths: Vec<_> = (0..rng.between(1, 7)).map(|_| (rng.between(1, 190), rng.below(6))).collect();
        found.see(serve(&mut world, &lengths, seed)?);
    }
    Ok(found.text("batches"))
}

/// Published models of fewer heads, and awkward sizes.
pub fn all_shapes() -> Vec<Shape> {
    let of = |heads, head_dim, groups, state, conv_kernel, chunk, act| Shape {
        heads,
        head_dim,
        groups,
        state,
        conv_kernel,
        chunk,
        act,
        conv: act,
        gap: [8, 8],
        ..SMALL
    };
    let mut all = vec![
        of(8, 64, 1, 128, 4, 256, BF16),
        of(16, 64, 8, 128, 4, 128, BF16),
        of(4, 128, 1, 256, 4, 256, BF16),
        of(6, 32, 2, 32, 4, 32, BF16),
        of(6, 80, 2, 64, 4, 256, F16),
        of(2, 40, 1, 200, 4, 64, F16),
        of(8, 8, 4, 16, 4, 96, F16),
    ];
    let odd = |s: Shape| Shape { gap: [3, 2], conv: F32, ..s };
    all.extend([
        odd(of(3, 7, 1, 5, 2, 13, F16)),
        odd(of(4, 33, 4, 18, 5, 1, F16)),
        odd(of(5, 1, 5, 1, 16, 67, F16)),
        odd(of(2, 72, 1, 130, 3, 50, BF16)),
    ]);
    all
}

pub fn shapes(cx: &CudaExec) -> Outcome {
    let mut found = Found(0, (0.0, 0.0));
    for shape in all_shapes() {
        found.see(serve(&mut World::new(cx, shape)?, &[(300, 3), (1, 2), (65, 1)], 5)?);
    }
    Ok(found.text("shapes"))
}

pub fn types_of_states(cx: &CudaExec) -> Outcome {
    let mut found = Found(0, (0.0, 0.0));
    for (act, conv, ssm) in
        [(BF16, BF16, BF16), (BF16, F32, F16), (F16, F16, BF16), (F16, F32, F16), (F16, F16, F32)]
    {
        for gap in [[8, 8], [3, 0]] {
            let shape = Shape { act, conv, ssm, gap, ..SMALL };
            found.see(serve(&mut World::new(cx, shape)?, &[(90, 6), (40, 3), (1, 9)], 3)?);
        }
    }
    Ok(found.text("types and alignments"))
}

/// Whole prompts, cut into segments where they are few, and not where they fill the device.
pub fn segments(cx: &CudaExec) -> Outcome {
    let shape = Shape { act: F16, conv: F16, ..all_shapes()[0] };
    let many = Shape { heads: 64, ..shape };
    let mut found = Found(0, (0.0, 0.0));
    let mut run = |shape: Shape, lengths: &[usize], segmented: bool| -> Result<(), String> {
        let mut world = World::new(cx, shape)?;
        let half = |n: usize| n / 2 + 3;
        for second in [false, true] {
            let turns: Vec<Turn> = lengths
                .iter()
                .enumerate()
                .map(|(i, &n)| match second {
                    false => prefill(i as u64 + 1, 0, half(n), i as i32 + 1),
                    true => prefill(i as u64 + 1, half(n), n - half(n), i as i32 + 1),
                })
                .collect();
            let out = world.run(&turns, 0)?;
            for ((turn, said), n) in turns.iter().zip(&out).zip(lengths) {
                let exact = world.reference(turn.seed, *n);
                let inner = world.shape.inner();
                let exact = &exact[turn.done * inner..(turn.done + turn.new) * inner];
                let (most, mean) = error(said, exact)?;
                ensure(most < allowed(&shape).0 && mean < allowed(&shape).1, || {
                    format!("{lengths:?} second {second}, request {}: {most:e} {mean:e}", turn.seed)
                })?;
                found.see((most, mean));
            }
        }
        let whole: Vec<Turn> =
            lengths.iter().enumerate().map(|(i, &n)| prefill(1, 0, n, i as i32 + 1)).collect();
        let metadata = world.builder.build(cx, &common(&whole, 0)?).map_err(text)?;
        let found = metadata.lists().segmented();
        ensure(found == segmented, || format!("{lengths:?}: in segments {found}"))
    };
    run(shape, &[1500], true)?;
    run(shape, &[700, 64, 300], true)?;
    run(many, &[600], true)?;
    run(many, &[150, 20, 90, 130, 64, 65, 200], false)?;
    Ok(found.text("prefills"))
}

pub fn a_long_request(cx: &CudaExec) -> Outcome {
    let mut found = Found(0, (0.0, 0.0));
    found.see(serve(&mut World::new(cx, SMALL)?, &[(2900, 200)], 11)?);
    Ok(found.text("request of 3100 tokens"))
}
