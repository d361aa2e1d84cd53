//! A plain Mamba-2 mixer (arXiv 2405.21060) in float64, token after token: what chunked and vectorised ones
//! are held against. Not for speed, and not for states that are rounded on the way.

/// One layer's sizes and numbers.
#[derive(Clone, Debug)]
pub struct Mamba2Params {
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Elements of the state for each element of a head.
    pub state: usize,
    /// `[conv_dim, conv_kernel]`.
    pub conv_weight: Vec<f32>,
    /// `[conv_dim]`.
    pub conv_bias: Vec<f32>,
    /// `[heads]`, below 0.
    pub a: Vec<f32>,
    /// `[heads]`.
    pub d: Vec<f32>,
    /// `[heads]`.
    pub dt_bias: Vec<f32>,
    /// Limits of dt after its softplus.
    pub dt_limit: (f32, f32),
}

impl Mamba2Params {
    /// Channels of the convolution: x, B, C.
    pub fn conv_dim(&self) -> usize {
        self.heads * self.head_dim + 2 * self.groups * self.state
    }

    /// Elements of an input row: xBC, then dt.
    pub fn input_width(&self) -> usize {
        self.conv_dim() + self.heads
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The outputs `[tokens, heads x head_dim]` of one sequence of inputs `[tokens, conv_dim + heads]` from its
/// first token on.
pub fn mamba2(p: &Mamba2Params, x: &[f32]) -> Vec<f64> {
    let (channels, inner) = (p.conv_dim(), p.heads * p.head_dim);
    let taps = p.conv_weight.len() / channels;
    let mut state = vec![0f64; inner * p.state];
    let mut out = vec![];
    let rows: Vec<&[f32]> = x.chunks_exact(p.input_width()).collect();
    for (t, row) in rows.iter().enumerate() {
        let conv: Vec<f64> = (0..channels)
            .map(|c| {
                let seen = (0..taps).filter(|k| t + k + 1 >= taps);
                let weighed =
                    |k: usize| f64::from(p.conv_weight[c * taps + k]) * f64::from(rows[t + k + 1 - taps][c]);
                silu(f64::from(p.conv_bias[c]) + seen.map(weighed).sum::<f64>())
            })
            .collect();
        for head in 0..p.heads {
            let group = head / (p.heads / p.groups);
            let b = &conv[inner + group * p.state..][..p.state];
            let c = &conv[inner + (p.groups + group) * p.state..][..p.state];
            let raw = f64::from(row[channels + head]) + f64::from(p.dt_bias[head]);
            let dt = raw.exp().ln_1p().max(f64::from(p.dt_limit.0)).min(f64::from(p.dt_limit.1));
            let decay = (dt * f64::from(p.a[head])).exp();
            for e in head * p.head_dim..(head + 1) * p.head_dim {
                let mut y = f64::from(p.d[head]) * conv[e];
                for (s, (b, c)) in state[e * p.state..][..p.state].iter_mut().zip(b.iter().zip(c)) {
                    *s = *s * decay + dt * conv[e] * b;
                    y += *s * c;
                }
                out.push(y);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_head_by_hand() {
        // conv_dim 3 (x, B, C), two taps of which the older is 0: x, B, C pass through silu.
        let p = Mamba2Params {
            heads: 1,
            head_dim: 1,
            groups: 1,
            state: 1,
            conv_weight: vec![0.0, 1.0, 0.0, 1.0, 0.0, 1.0],
            conv_bias: vec![0.0; 3],
            a: vec![-1.0],
            d: vec![0.5],
            dt_bias: vec![0.0],
            dt_limit: (0.0, f32::INFINITY),
        };
        let y = mamba2(&p, &[1.0, 2.0, 3.0, 0.0, -1.0, 2.0, 3.0, 1.0]);
        let (x0, x1, b, c) = (silu(1.0), silu(-1.0), silu(2.0), silu(3.0));
        let (dt0, dt1) = (2f64.ln(), 1f64.exp().ln_1p());
        let s0 = dt0 * x0 * b;
        let s1 = s0 * (-dt1).exp() + dt1 * x1 * b;
        assert!((y[0] - (s0 * c + 0.5 * x0)).abs() < 1e-12, "{y:?}");
        assert!((y[1] - (s1 * c + 0.5 * x1)).abs() < 1e-12, "{y:?}");
    }
}
