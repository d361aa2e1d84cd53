//! What must not matter: who else is in the batch, what a block held before, how metadata came about, and whether a
//! graph runs the step. And what is refused.

use super::world::{BLOCKS, SMALL, Shape, Turn, World, builder, common, decode, error, layer, prefill};
use crate::{
    Outcome, ensure,
    reference::{poisoned, read},
    text,
};
use headway_attention::{MetadataBuilder, StateSpaceImpl};
use headway_cuda::{CudaError, CudaExec, backends::mamba2::Mamba2Builder};
use headway_tensor::DType;

pub fn used_blocks(cx: &CudaExec) -> Outcome {
    let run = |used: bool| -> Result<Vec<f32>, String> {
        let mut w = World::new(cx, SMALL)?;
        if used {
            w.run(&[prefill(1, 0, 77, 4)], 0)?;
            w.run(&[decode(1, 77, 4)], 0)?;
        }
        let mut said = w.run(&[prefill(2, 0, 150, 4)], 0)?.remove(0);
        said.extend(w.run(&[decode(2, 150, 4)], 0)?.remove(0));
        // A prompt of one token, and one that is recomputed from its beginning as a decode would be.
        said.extend(w.run(&[prefill(3, 0, 1, 4)], 0)?.remove(0));
        said.extend(w.run(&[decode(3, 0, 4)], 0)?.remove(0));
        Ok(said)
    };
    let (clean, used) = (run(false)?, run(true)?);
    ensure(clean.iter().all(|x| x.is_finite()) && clean == used, || {
        "a fresh request saw a used block".into()
    })?;
    Ok(format!("{} values the same bit for bit", clean.len()))
}

pub fn rows_of_others(cx: &CudaExec) -> Outcome {
    let (mut alone, mut batch) = (World::new(cx, SMALL)?, World::new(cx, SMALL)?);
    let a = alone.run(&[prefill(1, 0, 60, 1)], 0)?;
    let b = batch.run(&[prefill(2, 0, 50, 3), prefill(1, 0, 60, 5), prefill(3, 0, 9, 2)], 2)?;
    ensure(a[0] == b[1], || "a prefill depends on others".into())?;
    let a = alone.run(&[decode(1, 60, 1)], 0)?;
    let b = batch.run(&[decode(3, 9, 2), decode(1, 60, 5), prefill(4, 0, 33, 9)], 1)?;
    ensure(a[0] == b[1], || "a decode depends on others".into())?;
    Ok("prefill of one segment and decode, bit for bit".into())
}

pub fn batch_invariant(cx: &CudaExec) -> Outcome {
    for (ssm, gap) in [(DType::F32, [3, 0]), (DType::F16, [8, 8])] {
        let shape = Shape { batch_invariant: true, ssm, gap, ..SMALL };
        let mut whole = World::new(cx, shape)?;
        let said = whole.run(&[prefill(1, 0, 100, 1)], 0)?.remove(0);
        let (most, _) = error(&said, &whole.reference(1, 100))?;
        ensure(most < 2e-2, || format!("off by {most:e}"))?;
        let mut cut = World::new(cx, shape)?;
        let (mut pieces, mut done) = (vec![], 0);
        for new in [1, 2, 30, 33, 1, 1, 32] {
            let turns = [prefill(1, done, new, 3), prefill(8, done, new + 5, 4)];
            pieces.extend(cut.run(&turns[..1 + done % 2], 0)?.remove(0));
            done += new;
        }
        ensure(said == pieces, || format!("{ssm}: the chunking changed a bit"))?;
        let same = whole.run(&[decode(1, 100, 1)], 0)?[0] == cut.run(&[decode(1, 100, 3)], 0)?[0];
        ensure(same, || format!("{ssm}: a decode after other chunks"))?;
    }
    Ok("whole and in seven pieces, bit for bit".into())
}

pub fn swapped_block_tables(cx: &CudaExec) -> Outcome {
    let turns = [decode(1, 20, 1), decode(2, 5, 2), prefill(3, 0, 240, 3), prefill(4, 8, 3, 4)];
    let moved: Vec<Turn> = turns.iter().map(|t| Turn { block: 11 - t.block, ..*t }).collect();
    let mut w = World::new(cx, SMALL)?;
    for (a, b) in [(20, 1), (5, 2)] {
        w.run(&[prefill(b, 0, a, b as i32)], 0)?;
        w.run(&[prefill(b, 0, a, 11 - b as i32)], 0)?;
    }
    w.run(&[prefill(4, 0, 8, 4)], 0)?;
    w.run(&[prefill(4, 0, 8, 7)], 0)?;
    let mut second = builder(cx, &w.shape.group())?;
    let first = w.builder.build(cx, &common(&turns, 0)?).map_err(text)?;
    let swapped = second.update_block_table(cx, &first, &common(&moved, 0)?).map_err(text)?;
    let other = Shape { head_dim: 16, ..w.shape };
    let mut other = builder(cx, &other.group())?;
    let e = other.update_block_table(cx, &first, &common(&moved, 0)?).err().ok_or("no refusal")?.to_string();
    ensure(e.contains("other states"), || e.clone())?;
    let a = w.run_with(&first, &turns, 0)?;
    let b = w.run_with(&swapped, &moved, 0)?;
    ensure(a == b, || "the second group's answers are others".into())?;
    Ok("as built, bit for bit".into())
}

/// A graph of four decodes, replayed for four, two and three requests: idle rows are zeros and touch nothing.
pub fn captured(cx: &CudaExec) -> Outcome {
    let (mut plain, mut w) = (World::new(cx, SMALL)?, World::new(cx, SMALL)?);
    for world in [&mut plain, &mut w] {
        let prompts: Vec<_> = (1..=4).map(|i| prefill(i, 0, 10 * i as usize, i as i32)).collect();
        world.run(&prompts, 0)?;
    }
    let n = 4;
    let idle: Vec<_> = (0..n).map(|i| decode(i, 0, 0)).collect();
    let step = common(&idle, 0)?;
    let metadata = w.builder.build_for_capture(cx, &step).map_err(text)?;
    let frozen = Mamba2Builder::frozen(&metadata);
    let rows = w.rows(&idle, 0)?;
    let mut out = poisoned(cx, w.shape.act, &[n as usize, w.shape.inner()])?;
    let before = w.cache_bytes()?;
    let mut run = |w: &mut World<'_>| -> Result<(), headway_attention::AttentionError> {
        let first = w.shape.gap[0];
        let x = rows.view().cols(first..first + w.params.input_width())?;
        w.layer.forward(cx, x, &mut w.handle.on(&mut w.cache), &metadata, out.view_mut())
    };
    run(&mut w).map_err(text)?;
    cx.begin_capture().map_err(text)?;
    let recorded = run(&mut w);
    let graph = cx.end_capture().map_err(text)?;
    recorded.map_err(text)?;
    w.others_are_untouched(&before, &[])?;
    drop(metadata);
    let mut done = [0, 10, 20, 30, 40];
    for live in [vec![1, 2, 3, 4], vec![3, 1], vec![4, 2, 1]] {
        let turns: Vec<_> = live.iter().map(|&i| decode(i, done[i as usize], i as i32)).collect();
        live.iter().for_each(|&i| done[i as usize] += 1);
        let expected = plain.run(&turns, 0)?;
        let metadata = w.builder.build(cx, &common(&turns, n as usize - turns.len())?).map_err(text)?;
        ensure(Mamba2Builder::frozen(&metadata) == frozen, || "another fingerprint".into())?;
        let now = w.rows(&turns, n as usize - turns.len())?;
        let bytes = cx.read_tensor(now.view()).map_err(text)?;
        let memory = rows.device_mem().ok_or("rows on the host")?;
        headway_tensor::Exec::upload(cx, memory, 0, &bytes);
        let before = w.cache_bytes()?;
        graph.launch().map_err(text)?;
        let found = read(cx, &out)?;
        let inner = w.shape.inner();
        ensure(found[..turns.len() * inner] == expected[..turns.len()].concat()[..], || {
            format!("{live:?}: a replay answers otherwise")
        })?;
        ensure(found[turns.len() * inner..].iter().all(|x| *x == 0.0), || "idle rows are not zero".into())?;
        w.others_are_untouched(&before, &live.iter().map(|b| *b as usize).collect::<Vec<_>>())?;
    }
    let prefill = w.builder.build_for_capture(cx, &common(&[prefill(1, 0, 5, 1)], 0)?);
    let e = prefill.err().ok_or("a prefill was captured")?.to_string();
    ensure(e.contains("decodes of one token"), || e.clone())?;
    Ok("4, 2 and 3 requests in a graph of 4, bit for bit".into())
}

pub fn refusals(cx: &CudaExec) -> Outcome {
    let mut w = World::new(cx, SMALL)?;
    let mut says = |turns: &[Turn], words: &str| -> Result<(), String> {
        let e = w.run(turns, 0).err().ok_or(format!("{words}: no refusal"))?;
        ensure(e.contains(words), || e.clone())
    };
    says(&[prefill(1, 0, 4, 3), prefill(2, 0, 4, 3)], "two requests have block 3")?;
    says(&[prefill(1, 0, 4, 0)], "no block for its state")?;
    says(&[prefill(1, 0, 4, 99)], &format!("block 99; the cache has {BLOCKS}"))?;
    says(&[prefill(1, 0, 5000, 1)], "5000 new tokens; the group was built for")?;
    let mut p = SMALL.params(1);
    p.a[2] = 1.5;
    let grows = layer(cx, &p, &SMALL)?;
    let metadata = w.builder.build(cx, &common(&[prefill(1, 0, 4, 1)], 0)?).map_err(text)?;
    let rows = w.rows(&[prefill(1, 0, 4, 1)], 0)?;
    let mut out = poisoned(cx, w.shape.act, &[4, w.shape.inner()])?;
    let x = w.view(&rows)?;
    let e = grows.forward(cx, x, &mut w.handle.on(&mut w.cache), &metadata, out.view_mut());
    let e = e.err().ok_or("a decay that grows was taken")?.to_string();
    ensure(e.contains("1.5") && e.contains("A_log"), || e.clone())?;
    let (a, b) = (Shape { state: 300, ..SMALL }, Shape { ssm: DType::U8, ..SMALL });
    for (shape, words) in [(a, "up to 256"), (b, "float32, bfloat16 and float16")] {
        let e = builder(cx, &shape.group()).err().ok_or(format!("{words}: no refusal"))?;
        ensure(e.contains(words), || e.clone())?;
    }
    cx.check().map_err(|e: CudaError| e.to_string())?;
    Ok("8 refused".into())
}
