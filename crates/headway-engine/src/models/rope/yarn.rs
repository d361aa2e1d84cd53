//! YaRN (arXiv 2309.00071): short wavelengths stay, long ones are divided by a factor, with a ramp
//! between, and attention is made sharper as the context grows.

/// The parameters of YaRN. Field names are those of Hugging Face configs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// How many times the original context is stretched.
    pub factor: f64,
    /// Context of the training.
    pub original_max_position_embeddings: f64,
    /// Pairs that turn more often than this within the original context stay as they are.
    pub beta_fast: f64,
    /// Pairs that turn less often than this are divided by the whole factor.
    pub beta_slow: f64,
    /// Whether the ramp begins and ends at whole pairs.
    pub truncate: bool,
    /// On cosine and sine; where the config is silent, [`Yarn::default_attention_factor`].
    pub attention_factor: f64,
    /// Weight of the logarithm in [`Yarn::softmax_factor`]; 0: none.
    pub mscale_all_dim: f64,
}

/// `0.1 · weight · ln(factor) + 1`, and 1 where nothing is stretched.
fn magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

impl Yarn {
    /// The factor on cosine and sine where the config names none: `mscale` and `mscale_all_dim` count
    /// only where both are there and not 0.
    pub fn default_attention_factor(factor: f64, mscale: f64, mscale_all_dim: f64) -> f64 {
        if mscale != 0.0 && mscale_all_dim != 0.0 {
            magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
        } else {
            magnitude(factor, 1.0)
        }
    }

    /// What models with multi-head latent attention (DeepSeek V2, V3) multiply the softmax scale with.
    /// Others have all of it in [`Yarn::attention_factor`].
    pub fn softmax_factor(&self) -> f64 {
        magnitude(self.factor, self.mscale_all_dim).powi(2)
    }

    /// The frequencies of `rotary_dim / 2` pairs, from those without scaling.
    pub(super) fn scale(&self, frequencies: &mut [f64], theta: f64) {
        let dim = 2.0 * frequencies.len() as f64;
        // The pair that turns this often within the original context.
        let pair = |turns: f64| {
            let wavelength = self.original_max_position_embeddings / turns;
            dim * (wavelength / std::f64::consts::TAU).ln() / (2.0 * theta.ln())
        };
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(dim - 1.0));
        if first == last {
            last += 0.001;
        }
        for (i, f) in frequencies.iter_mut().enumerate() {
            let divided = ((i as f64 - first) / (last - first)).clamp(0.0, 1.0);
            *f = *f / self.factor * divided + *f * (1.0 - divided);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn() -> Yarn {
        Yarn {
            factor: 16.0,
            original_max_position_embeddings: 64.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.0,
            mscale_all_dim: 0.707,
        }
    }

    #[test]
    fn fast_pairs_stay_slow_ones_are_divided_and_the_ramp_is_between() {
        let plain: Vec<f64> = (0..16).map(|i| 10000f64.powf(-f64::from(i) / 16.0)).collect();
        let mut scaled = plain.clone();
        yarn().scale(&mut scaled, 10000.0);
        // The pair that turns once in 64 positions is 16 ln(64 / 2π) / ln 10000 = 4.03, the ramp's end 5.
        assert_eq!(scaled[0], plain[0]);
        for i in 5..16 {
            assert!((scaled[i] - plain[i] / 16.0).abs() < 1e-15, "pair {i}");
        }
        for i in 1..5 {
            let share = f64::from(i) / 5.0;
            let expected = plain[i as usize] * (1.0 - share + share / 16.0);
            assert!((scaled[i as usize] - expected).abs() < 1e-15, "pair {i}");
        }
        let mut untruncated = plain.clone();
        Yarn { truncate: false, ..yarn() }.scale(&mut untruncated, 10000.0);
        assert!(untruncated[4] < scaled[4], "the ramp ends at 4.03 instead of 5");
    }

    #[test]
    fn magnitudes() {
        let one = 0.1 * 16f64.ln() + 1.0;
        assert_eq!(Yarn::default_attention_factor(16.0, 0.0, 0.0), one);
        assert_eq!(Yarn::default_attention_factor(16.0, 1.0, 0.0), one);
        assert_eq!(Yarn::default_attention_factor(16.0, 0.707, 0.707), 1.0);
        assert_eq!(Yarn::default_attention_factor(0.5, 0.0, 0.0), 1.0);
        assert!((yarn().softmax_factor() - (0.0707 * 16f64.ln() + 1.0).powi(2)).abs() < 1e-15);
        assert_eq!(Yarn { mscale_all_dim: 0.0, ..yarn() }.softmax_factor(), 1.0);
    }
}
