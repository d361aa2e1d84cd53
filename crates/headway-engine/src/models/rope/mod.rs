//! Rotary position embeddings (RoFormer, arXiv 2104.09864) as a table of cosines and sines, with the
//! scalings that published models use.

mod yarn;

pub use yarn::Yarn;

use headway_tensor::RopeStyle;

/// How the frequencies are changed for contexts longer than the training's.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Positions divided by a factor (arXiv 2306.15595).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1's: long wavelengths divided, short ones kept, a ramp between.
    Llama3 {
        /// Divisor of long wavelengths.
        factor: f64,
        /// `original / low_freq_factor` is the wavelength from which the divisor applies in full.
        low_freq_factor: f64,
        /// `original / high_freq_factor` is the wavelength below which nothing changes.
        high_freq_factor: f64,
        /// Context of the training.
        original_max_position_embeddings: f64,
    },
    /// YaRN, by wavelength.
    Yarn(Yarn),
    /// The first pairs of a head alone turn, as if the whole head did (Gemma 4's `proportional`).
    Proportional {
        /// Pairs that turn.
        pairs: usize,
        /// Divisor of their frequencies.
        factor: f64,
    },
    /// A divisor for each frequency (LongRoPE, arXiv 2402.13753; GGUF's `rope_freqs`), and a factor on
    /// the rotated vectors.
    PerFrequency {
        /// One divisor a pair.
        factors: Vec<f64>,
        /// On cosine and sine.
        attention_factor: f64,
    },
}

/// One rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopePlan {
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated, from the first on; even.
    pub rotary_dim: usize,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Scaling, where there is one.
    pub scaling: Option<RopeScaling>,
}

impl RopePlan {
    /// The angle a position, of each pair: `[rotary_dim / 2]`.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        let half = self.rotary_dim / 2;
        let mut all: Vec<f64> =
            (0..half).map(|i| self.theta.powf(-((2 * i) as f64) / self.rotary_dim as f64)).collect();
        match &self.scaling {
            None => {}
            Some(RopeScaling::Linear { factor }) => all.iter_mut().for_each(|f| *f /= factor),
            Some(RopeScaling::Proportional { pairs, factor }) => {
                all.iter_mut().enumerate().for_each(|(i, f)| *f = if i < *pairs { *f / factor } else { 0.0 });
            }
            Some(RopeScaling::PerFrequency { factors, .. }) => {
                all.iter_mut().zip(factors).for_each(|(f, divisor)| *f /= divisor);
            }
            Some(RopeScaling::Yarn(yarn)) => yarn.scale(&mut all, self.theta),
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            }) => all.iter_mut().for_each(|f| *f = llama3(*f, *factor, *low, *high, *original)),
        }
        all
    }

    /// Factor on the softmax scale of models with multi-head latent attention: see
    /// [`Yarn::softmax_factor`]. 1 without YaRN.
    pub fn mla_softmax_factor(&self) -> f64 {
        match &self.scaling {
            Some(RopeScaling::Yarn(yarn)) => yarn.softmax_factor(),
            _ => 1.0,
        }
    }

    /// `[positions, rotary_dim / 2, 2]`: cosine, then sine, with the scaling's factor on both.
    pub fn table(&self, positions: usize) -> Vec<f32> {
        let inv: Vec<f32> = self.inverse_frequencies().iter().map(|&f| f as f32).collect();
        let factor = match &self.scaling {
            Some(RopeScaling::PerFrequency { attention_factor, .. })
            | Some(RopeScaling::Yarn(Yarn { attention_factor, .. })) => *attention_factor as f32,
            _ => 1.0,
        };
        let mut out = Vec::with_capacity(positions * inv.len() * 2);
        for p in 0..positions {
            for f in &inv {
                // float32 angles, as the reference computes them.
                let (sin, cos) = (p as f32 * f).sin_cos();
                out.extend([cos * factor, sin * factor]);
            }
        }
        out
    }
}

fn llama3(f: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = std::f64::consts::TAU / f;
    if wavelength > original / low {
        f / factor
    } else if wavelength < original / high {
        f
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * f / factor + smooth * f
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(scaling: Option<RopeScaling>) -> RopePlan {
        RopePlan { theta: 10000.0, rotary_dim: 8, style: RopeStyle::Halves, scaling }
    }

    #[test]
    fn frequencies_fall_geometrically() {
        let f = plan(None).inverse_frequencies();
        let expected = [1.0, 0.1, 0.01, 0.001];
        assert!(f.iter().zip(expected).all(|(a, b): (&f64, f64)| (a - b).abs() < 1e-12), "{f:?}");
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_divides_long_ones() {
        let s = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 128.0,
        };
        let (f, g) = (plan(None).inverse_frequencies(), plan(Some(s)).inverse_frequencies());
        assert_eq!(f[0], g[0]);
        assert_eq!(f[3] / 8.0, g[3]);
        assert!(g[1] < f[1] && g[1] > f[1] / 8.0, "between: {}", g[1]);
    }

    #[test]
    fn the_table_begins_with_no_rotation() {
        let t = plan(None).table(2);
        assert_eq!(&t[..4], &[1.0, 0.0, 1.0, 0.0]);
        assert_eq!(t.len(), 2 * 4 * 2);
        assert!((t[8] - 1f32.cos()).abs() < 1e-7 && (t[9] - 1f32.sin()).abs() < 1e-7);
    }
}
