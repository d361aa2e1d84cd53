//! Tokens chosen on the device, where the answer is known by arithmetic alone. `sampling_equality` of `headway-engine` holds
//! them against the host's sampler.

use crate::{
    Outcome, ensure,
    reference::{Random, read, tensor},
    text,
};
use headway_cuda::CudaExec;
use headway_tensor::{DType, Ops, RowChoice, RowSampler};

const GREEDY: RowChoice<'static> = RowChoice {
    row: 0,
    temperature: 0.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    history: [&[], &[]],
    uniform: 0.0,
};
const DRAW: RowChoice<'static> = RowChoice { temperature: 1.0, ..GREEDY };
/// The largest number of `[0, 1)`: draws the last token that is kept.
const LAST: f64 = 1.0 - 1.0 / (1u64 << 53) as f64;

fn sampler(cx: &CudaExec, rows: usize, vocab: usize) -> Result<Box<dyn RowSampler>, String> {
    cx.row_sampler(rows, vocab).map_err(text)?.ok_or_else(|| format!("no sampler for {vocab} tokens"))
}

/// The tokens of these choices from `[rows, vocab]` logits, and the logits afterwards.
fn choose(
    cx: &CudaExec,
    logits: &[f32],
    vocab: usize,
    choices: &[RowChoice<'_>],
) -> Result<(Vec<Option<u32>>, Vec<f32>), String> {
    let (mut x, _) = tensor(cx, DType::F32, logits, &[logits.len() / vocab, vocab])?;
    let (mut sampler, mut tokens) = (sampler(cx, choices.len(), vocab)?, vec![]);
    for c in choices {
        ensure(sampler.push(c), || format!("{c:?} was not taken"))?;
    }
    sampler.choose(cx, x.view_mut(), &mut tokens).map_err(text)?;
    Ok((tokens, read(cx, &x)?))
}

/// The largest, the first of several; penalised tokens; rows in any order.
pub fn greedy(cx: &CudaExec) -> Outcome {
    let mut random = Random(51);
    for vocab in [1, 2, 33, 1024, 49_152, 128_001] {
        let mut logits = random.values(4 * vocab, 8.0);
        let (a, b) = (vocab / 3, vocab - 1);
        (logits[a], logits[b]) = (9.0, 9.0);
        logits[vocab..2 * vocab].fill(0.0);
        logits[vocab] = -0.0;
        logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
        logits[2 * vocab + b] = -1e30;
        let history = [[a as u32, a as u32], [b as u32, b as u32]];
        let rows = [
            GREEDY,
            RowChoice { row: 2, ..GREEDY },
            RowChoice { row: 1, ..GREEDY },
            RowChoice { repetition_penalty: 1.5, history: [&history[0], &[]], ..GREEDY },
        ];
        let (tokens, after) = choose(cx, &logits, vocab, &rows)?;
        let first = a as u32;
        let second = if vocab > 2 { b as u32 } else { first.max(b as u32) };
        let expected = [Some(first), Some(b as u32), Some(0), Some(second)];
        ensure(tokens == expected, || format!("{vocab}: {tokens:?}, not {expected:?}"))?;
        let same = after.iter().zip(&logits).all(|(a, b)| a.to_bits() == b.to_bits());
        ensure(same, || format!("{vocab}: greedy rows were changed"))?;
    }
    Ok("6 vocabularies".into())
}

/// Rows without an answer have none and stay as they are; those beside them have theirs.
pub fn broken(cx: &CudaExec) -> Outcome {
    for vocab in [5, 49_152] {
        let mut logits = Random(52).values(4 * vocab, 3.0);
        logits[vocab - 1] = f32::NAN;
        logits[vocab + 2] = f32::INFINITY;
        logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
        logits[3 * vocab + 3] = 50.0;
        for of in [GREEDY, RowChoice { top_k: 3, top_p: 0.5, ..DRAW }] {
            let rows = [0, 1, 2, 3].map(|row| RowChoice { row, ..of });
            let (tokens, after) = choose(cx, &logits, vocab, &rows)?;
            ensure(tokens == [None, None, None, Some(3)], || format!("{vocab}: {tokens:?}"))?;
            let same = after.iter().zip(&logits).take(3 * vocab).all(|(a, b)| a.to_bits() == b.to_bits());
            ensure(same, || format!("{vocab}: a row without an answer was changed"))?;
        }
    }
    Ok("NaN, infinity, nothing possible".into())
}

/// Equal logits: what is kept is a number of first tokens, and the ends of `[0, 1)` draw the first and the last of them.
/// More are equal than the device keeps in a list.
pub fn cuts(cx: &CudaExec) -> Outcome {
    let mut cases = 0;
    for vocab in [16, 1000, 49_152] {
        let logits = vec![-1.25; vocab];
        let half = vocab / 2;
        for (kept, of) in [
            (vocab, DRAW),
            (vocab, RowChoice { min_p: 1.0, temperature: 1e-3, ..DRAW }),
            (half, RowChoice { top_p: 0.5, ..DRAW }),
            (1, RowChoice { top_p: f32::MIN_POSITIVE, ..DRAW }),
            (1, RowChoice { top_k: 1, ..DRAW }),
            (7, RowChoice { top_k: 7, min_p: 0.5, ..DRAW }),
            (half, RowChoice { top_k: half, ..DRAW }),
            (half / 2, RowChoice { top_k: half, top_p: 0.5, ..DRAW }),
            (vocab, RowChoice { top_k: vocab + 3, ..DRAW }),
        ] {
            let rows = [RowChoice { uniform: 0.0, ..of }, RowChoice { uniform: LAST, row: 1, ..of }];
            let (tokens, after) = choose(cx, &[&logits[..], &logits[..]].concat(), vocab, &rows)?;
            let expected = [Some(0), Some(kept as u32 - 1)];
            ensure(tokens == expected, || format!("{vocab}, {of:?}: {tokens:?}, not {expected:?}"))?;
            let weights = after[..vocab].iter().filter(|w| **w > 0.0).count();
            ensure(weights == kept, || format!("{vocab}, {of:?}: {weights} tokens kept, not {kept}"))?;
            cases += 1;
        }
    }
    Ok(format!("{cases} cuts"))
}

pub fn refusals(cx: &CudaExec) -> Outcome {
    let none = cx.row_sampler(4, 1 << 22).map_err(text)?;
    ensure(none.is_none() && cx.row_sampler(4, 0).map_err(text)?.is_none(), || {
        "an absurd vocabulary".into()
    })?;
    let mut s = sampler(cx, 2, 10)?;
    let penalised = RowChoice { repetition_penalty: 2.0, history: [&[3], &[10]], ..GREEDY };
    ensure(!s.push(&penalised), || "a token outside the vocabulary".into())?;
    let mut refused = |rows: &[usize], dtype: DType, shape: [usize; 2], words: &str| -> Result<(), String> {
        let (mut x, _) = tensor(cx, dtype, &vec![0.5; shape[0] * shape[1]], &shape)?;
        for row in rows {
            s.push(&RowChoice { row: *row, ..GREEDY });
        }
        match s.choose(cx, x.view_mut(), &mut vec![]) {
            Err(e) if e.to_string().contains(words) => Ok(()),
            other => Err(format!("{rows:?} of {shape:?} {dtype}: {other:?}")),
        }
    };
    refused(&[0, 3], DType::F32, [3, 10], "row 3 of 3")?;
    refused(&[0], DType::F32, [3, 11], "[rows, 10]")?;
    refused(&[0], DType::BF16, [3, 10], "float32")?;
    // What was refused is forgotten.
    let (mut x, _) = tensor(cx, DType::F32, &[0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], &[1, 10])?;
    let mut tokens = vec![];
    s.push(&GREEDY);
    s.choose(cx, x.view_mut(), &mut tokens).map_err(text)?;
    ensure(tokens == [Some(1)], || format!("{tokens:?}"))?;
    ensure(!s.push(&GREEDY) || !s.push(&GREEDY) || !s.push(&GREEDY), || "three rows for two".into())?;
    Ok("6 refusals".into())
}
