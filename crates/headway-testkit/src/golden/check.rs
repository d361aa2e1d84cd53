//! How near is near enough, per kind of run, and the comparison of one answer with its golden.
//!
//! Logits by the largest absolute difference. Greedy ids must be equal up to the first step whose
//! margin is too small to be sure of; after it the text is another one and is not compared.

use super::{HiddenLayer, RealCase, TinyCase, TinyGolden};

/// What the run under test computed in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Compute {
    /// Weights widened (or dequantised) to float32, all in float32.
    Float32,
    /// Weights and activations in bfloat16 or float16.
    Half,
    /// Block-quantised weights times quantised activations.
    Quantised,
}

/// Bounds of a comparison.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bounds {
    /// Largest difference of a logit.
    pub logit: f64,
    /// Largest difference of the log of the sum of exponentials.
    pub logsumexp: f64,
    /// Ids are compared up to the first step with a smaller margin.
    pub margin: f64,
    /// Logits are compared as log-probabilities: quantised activations shift all logits of a row
    /// together, which changes no answer, and the tolerances were measured on log-probabilities.
    pub normalised: bool,
}

impl Bounds {
    /// For a tiny checkpoint. In half precision twice the reference's own distance.
    pub fn tiny(golden: &TinyGolden, compute: Compute) -> Self {
        match compute {
            Compute::Float32 => Self { logit: 1e-3, logsumexp: 1e-3, margin: 0.0, normalised: false },
            Compute::Half | Compute::Quantised => {
                let logit = 2.0 * golden.numerics.bf16_compute_max_abs;
                Self { logit, logsumexp: logit, margin: logit, normalised: false }
            }
        }
    }

    /// For a real model.
    pub const fn real(compute: Compute) -> Self {
        match compute {
            Compute::Float32 => Self { logit: 5e-3, logsumexp: 5e-3, margin: 0.01, normalised: false },
            Compute::Half => Self { logit: 0.8, logsumexp: 0.5, margin: 0.5, normalised: false },
            Compute::Quantised => {
                Self { logit: 1.0, logsumexp: f64::INFINITY, margin: 0.5, normalised: true }
            }
        }
    }
}

/// The cases of a tiny checkpoint that a run can be held against. In half precision the router of a
/// mixture of experts flips near ties, so that only prompts of up to 7 tokens can be compared.
pub fn comparable(golden: &TinyGolden, compute: Compute) -> Vec<&TinyCase> {
    let short = compute != Compute::Float32 && golden.model.is_mixture_of_experts();
    golden.cases.iter().filter(|c| !short || c.prompt_ids.len() <= 7).collect()
}

/// What a comparison measured.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Measured {
    /// Largest difference of a logit.
    pub logit: f64,
    /// Ids that were compared (and equal).
    pub ids: usize,
}

/// Ids that can be compared: up to the first step with too small a margin.
pub fn sure_ids(margins: &[f64], bound: f64) -> usize {
    margins.iter().position(|&m| m < bound).unwrap_or(margins.len())
}

fn ids(got: &[u32], want: &[u32], margins: &[f64], bound: f64) -> Result<usize, String> {
    let sure = sure_ids(margins, bound).min(want.len());
    let got_sure = &got[..sure.min(got.len())];
    match got_sure.iter().zip(want).position(|(g, w)| g != w) {
        Some(i) => Err(format!(
            "id {i} of the continuation is {}, expected {} (margin {:.4}); got {got:?}, expected {want:?}",
            got[i], want[i], margins[i]
        )),
        None if got.len() < sure => {
            Err(format!("the continuation ends after {} ids, expected {sure}", got.len()))
        }
        None => Ok(sure),
    }
}

/// Log of the sum of exponentials.
pub fn logsumexp(logits: &[f32]) -> f64 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let top = f64::from(top);
    top + logits.iter().map(|&x| (f64::from(x) - top).exp()).sum::<f64>().ln()
}

fn near(what: &str, got: f64, want: f64, bound: f64) -> Result<f64, String> {
    let off = (got - want).abs();
    if off <= bound { Ok(off) } else { Err(format!("{what} is {got:.5}, expected {want:.5} ± {bound}")) }
}

/// Holds an answer to a tiny case: all logits at the last position of the prompt, the ids after it.
///
/// # Errors
/// The first thing that is off, in words.
pub fn check_tiny(
    case: &TinyCase,
    bounds: Bounds,
    logits: &[f32],
    greedy: &[u32],
) -> Result<Measured, String> {
    if logits.len() != case.logits.len() {
        return Err(format!("{} logits, expected {}", logits.len(), case.logits.len()));
    }
    let mut worst = (0, 0.0);
    for (i, (g, w)) in logits.iter().zip(&case.logits).enumerate() {
        let off = (f64::from(*g) - w).abs();
        if off.is_nan() || off > worst.1 {
            worst = (i, off);
        }
        if off.is_nan() {
            break;
        }
    }
    let (i, logit) = worst;
    near(&format!("logit {i}"), f64::from(logits[i]), case.logits[i], bounds.logit)?;
    near("logsumexp", logsumexp(logits), case.logsumexp, bounds.logsumexp)?;
    let ids = ids(greedy, &case.greedy_ids, &case.greedy_margins, bounds.margin)?;
    Ok(Measured { logit, ids })
}

/// Holds an answer to a real case: the ten largest logits, the norm of all, the ids.
///
/// # Errors
/// The first thing that is off, in words.
pub fn check_real(
    case: &RealCase,
    bounds: Bounds,
    logits: &[f32],
    greedy: &[u32],
) -> Result<Measured, String> {
    let sum = logsumexp(logits);
    near("logsumexp", sum, case.logsumexp, bounds.logsumexp)?;
    let shift = if bounds.normalised { sum - case.logsumexp } else { 0.0 };
    let mut worst = 0f64;
    for &(id, want) in &case.top10 {
        let got = f64::from(*logits.get(id as usize).ok_or_else(|| format!("no logit of id {id}"))?);
        worst = worst.max(near(&format!("logit of id {id}"), got - shift, want, bounds.logit)?);
    }
    let n = logits.len() as f64;
    let mean = logits.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
    let l2 = logits.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let all = if bounds.normalised { 4.0 * bounds.logit } else { bounds.logit };
    near("mean of all logits", mean, case.logit_mean, all)?;
    near("L2 norm of all logits", l2, case.logit_l2, all * n.sqrt())?;
    let compared = ids(greedy, &case.greedy_ids, &case.greedy_margins, bounds.margin)?;
    if compared == case.greedy_ids.len() && greedy.len() != compared {
        return Err(format!("{} ids, expected {compared} ({})", greedy.len(), case.finish));
    }
    Ok(Measured { logit: worst, ids: compared })
}

/// Holds norms between layers to a golden's (relative 1e-4: float32 runs alone).
///
/// # Errors
/// The first place that is off or missing.
pub fn check_hidden(got: &[HiddenLayer], want: &[HiddenLayer]) -> Result<(), String> {
    for w in want {
        let g = got.iter().find(|g| g.at == w.at).ok_or_else(|| format!("nothing at {}", w.at))?;
        near(&format!("{}: norm at the last position", w.at), g.last_l2, w.last_l2, 1e-4 * w.last_l2)?;
        near(&format!("{}: norm over all positions", w.at), g.all_l2, w.all_l2, 1e-4 * w.all_l2)?;
        for (i, (g, x)) in g.last_head8.iter().zip(&w.last_head8).enumerate() {
            near(&format!("{}: value {i}", w.at), *g, *x, 1e-4 * w.last_l2)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_compared_up_to_the_first_small_margin() {
        let margins = [1.0, 0.3, 2.0];
        assert_eq!(ids(&[1, 9, 9], &[1, 2, 3], &margins, 0.5), Ok(1));
        assert!(ids(&[1, 9, 9], &[1, 2, 3], &margins, 0.0).unwrap_err().starts_with("id 1"));
        assert!(ids(&[1], &[1, 2, 3], &margins, 0.0).unwrap_err().contains("ends after 1"));
        assert_eq!(ids(&[1, 2, 3], &[1, 2, 3], &margins, 0.0), Ok(3));
    }

    #[test]
    fn a_logit_that_is_nan_is_off() {
        let case = TinyCase {
            name: "x".into(),
            prompt_ids: vec![1],
            encoder_ids: vec![],
            logsumexp: 2f64.ln(),
            logits: vec![0.0, 0.0],
            greedy_ids: vec![0],
            greedy_margins: vec![1.0],
        };
        let b = Bounds { logit: 1e-3, logsumexp: 1e-3, margin: 0.0, normalised: false };
        assert_eq!(check_tiny(&case, b, &[0.0, 5e-4], &[0]).unwrap().ids, 1);
        assert!(check_tiny(&case, b, &[0.0, f32::NAN], &[0]).unwrap_err().starts_with("logit 1 is NaN"));
        assert!(check_tiny(&case, b, &[0.0, 2e-3], &[0]).is_err());
        assert!(check_tiny(&case, b, &[0.0, 0.0], &[1]).is_err());
        assert!(check_tiny(&case, b, &[0.0], &[0]).is_err());
    }
}
