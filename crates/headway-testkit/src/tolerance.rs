//! How near is near enough: NaN and infinity positions first, then each element, then the angle.

use headway_tensor::DType;
use std::fmt;

/// Bounds on the difference from the reference. An element passes where
/// `|got - want| <= abs + rel · |want|`; the whole passes where its cosine with the reference is at
/// least `cosine` too.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Absolute part.
    pub abs: f64,
    /// Part relative to the reference.
    pub rel: f64,
    /// Least cosine of the angle between both, as vectors.
    pub cosine: f64,
}

/// How near two results were.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Closeness {
    /// Largest absolute difference over the finite elements.
    pub max_abs: f64,
    /// Cosine of the angle between both; 1 where one of them is zero or empty.
    pub cosine: f64,
}

/// The first thing that is wrong, in words that name the element.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch(pub String);

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Tolerance {
    /// Bounds for values of about 1 that were computed with inputs, probabilities and outputs of this
    /// type and float32 sums.
    pub const fn of(compute: DType) -> Self {
        match compute {
            DType::BF16 => Self { abs: 1.5e-2, rel: 1.5e-2, cosine: 0.9995 },
            DType::F16 => Self { abs: 2e-3, rel: 2e-3, cosine: 0.99999 },
            _ => Self { abs: 2e-5, rel: 2e-5, cosine: 0.9999999 },
        }
    }

    /// Compares element by element.
    ///
    /// # Errors
    /// A [`Mismatch`] that names the worst element: another length, another position of NaN or of an
    /// infinity, then a difference over the bound, then an angle over the bound.
    pub fn compare(&self, got: &[f64], want: &[f64]) -> Result<Closeness, Mismatch> {
        self.compare_within(got, want, &[])
    }

    /// As [`Tolerance::compare`], where an element may be off by so much more; past the end of `slack`, by nothing.
    ///
    /// # Errors
    /// As `compare`.
    pub fn compare_within(&self, got: &[f64], want: &[f64], slack: &[f64]) -> Result<Closeness, Mismatch> {
        if got.len() != want.len() {
            return Err(Mismatch(format!("{} elements, expected {}", got.len(), want.len())));
        }
        if let Some(i) = (0..got.len()).find(|&i| class(got[i]) != class(want[i])) {
            return Err(Mismatch(format!("element {i} is {}, expected {}", got[i], want[i])));
        }
        let finite = || got.iter().zip(want).enumerate().filter(|(_, (g, _))| g.is_finite());
        let allowed = |i: usize, w: f64| self.abs + self.rel * w.abs() + slack.get(i).copied().unwrap_or(0.0);
        let over = |(i, (g, w)): (usize, (&f64, &f64))| (g - w).abs() - allowed(i, *w);
        let worst = finite().max_by(|a, b| over(*a).total_cmp(&over(*b)));
        if let Some((i, (g, w))) = worst
            && over((i, (g, w))) > 0.0
        {
            let count = finite().filter(|x| over(*x) > 0.0).count();
            return Err(Mismatch(format!(
                "element {i} is {g:.6}, expected {w:.6}: off by {:.2e}, allowed {:.2e} ({count} of {} elements are off)",
                (g - w).abs(),
                allowed(i, *w),
                got.len()
            )));
        }
        let dot = |f: fn((&f64, &f64)) -> f64| finite().map(|(_, p)| f(p)).sum::<f64>();
        let norms = dot(|(g, _)| g * g).sqrt() * dot(|(_, w)| w * w).sqrt();
        let cosine = if norms > 0.0 { dot(|(g, w)| g * w) / norms } else { 1.0 };
        if cosine < self.cosine {
            return Err(Mismatch(format!("cosine {cosine:.8}, at least {} expected", self.cosine)));
        }
        let max_abs = finite().map(|(_, (g, w))| (g - w).abs()).fold(0.0, f64::max);
        Ok(Closeness { max_abs, cosine })
    }
}

/// NaN, plus infinity, minus infinity or a number.
fn class(x: f64) -> u8 {
    match x {
        x if x.is_nan() => 1,
        f64::INFINITY => 2,
        f64::NEG_INFINITY => 3,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Tolerance = Tolerance { abs: 0.1, rel: 0.0, cosine: 0.9 };

    #[test]
    fn nan_and_infinity_come_first() {
        let e = T.compare(&[9.0, f64::NAN], &[1.0, 2.0]).unwrap_err();
        assert_eq!(e.0, "element 1 is NaN, expected 2");
        assert!(T.compare(&[f64::INFINITY], &[f64::NEG_INFINITY]).is_err());
        assert!(T.compare(&[f64::NAN, f64::INFINITY], &[f64::NAN, f64::INFINITY]).is_ok());
    }

    #[test]
    fn the_worst_element_is_named() {
        let e = T.compare(&[1.2, 5.0, 3.0], &[1.0, 2.0, 3.0]).unwrap_err();
        assert!(e.0.starts_with("element 1 is 5.0") && e.0.contains("2 of 3"), "{e}");
        let ok = T.compare(&[1.05, 2.0], &[1.0, 2.0]).unwrap();
        assert!((ok.max_abs - 0.05).abs() < 1e-12 && ok.cosine > 0.99);
        let within = |slack: &[f64]| T.compare_within(&[1.2, 2.0], &[1.0, 2.0], slack);
        assert!(within(&[0.11]).is_ok() && within(&[0.0, 9.0]).unwrap_err().0.contains("allowed 1.00e-1"));
    }

    #[test]
    fn small_vectors_must_point_the_same_way() {
        let e = T.compare(&[0.05, 0.0], &[0.0, 0.05]).unwrap_err();
        assert!(e.0.starts_with("cosine"), "{e}");
        assert!(T.compare(&[], &[]).is_ok() && T.compare(&[1.0], &[]).is_err());
    }
}
