//! Every level against float64 and, bit for bit, against the portable one.

use super::*;

fn values(n: usize, seed: u32, range: f32) -> Vec<f32> {
    let mut s = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (s >> 8) as f32 / (1 << 24) as f32
    };
    (0..n).map(|_| (next() * 2.0 - 1.0) * range).collect()
}

#[track_caller]
fn close(ours: &[f32], exact: impl Iterator<Item = f64>, tolerance: f64) {
    for (i, (o, e)) in ours.iter().zip(exact).enumerate() {
        assert!((f64::from(*o) - e).abs() <= tolerance * (1.0 + e.abs()), "{i}: {o} against {e}");
    }
}

/// Runs `f` at every level and checks that the bits are those of the portable one; returns these.
fn at_every_level(f: impl Fn(Isa) -> Vec<f32>) -> Vec<f32> {
    let portable = f(Isa::Portable);
    for &isa in Isa::available() {
        let level = f(isa);
        let same = level.iter().zip(&portable).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same && level.len() == portable.len(), "{isa} differs from portable");
    }
    portable
}

const SIZES: [usize; 7] = [1, 2, 15, 16, 64, 576, 1031];

#[test]
fn sums_and_norms() {
    for n in SIZES {
        let (x, w) = (values(n, 1, 3.0), values(n, 2, 1.0));
        let sum = at_every_level(|isa| vec![sum_of_squares(isa, &x)]);
        let exact: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        close(&sum, std::iter::once(exact), 1e-6);
        let mut out = vec![0f32; n];
        let scaled_out = at_every_level(|isa| {
            scaled(isa, &mut out.clone(), &x, 0.3, &w);
            let mut y = x.clone();
            scaled_in_place(isa, &mut y, 0.3, &w);
            y
        });
        scaled(Isa::Portable, &mut out, &x, 0.3, &w);
        assert_eq!(out, scaled_out);
        close(&out, x.iter().zip(&w).map(|(&x, &w)| f64::from(x) * 0.3 * f64::from(w)), 1e-6);
    }
}

#[test]
fn gates() {
    for n in SIZES {
        let (g, u) = (values(n, 3, 12.0), values(n, 4, 2.0));
        let run = |f: fn(Isa, &mut [f32], &[f32], &[f32])| {
            at_every_level(|isa| {
                let mut out = vec![0f32; n];
                f(isa, &mut out, &g, &u);
                out
            })
        };
        let pairs = || g.iter().zip(&u).map(|(&g, &u)| (f64::from(g), f64::from(u)));
        close(&run(silu), pairs().map(|(g, u)| g / (1.0 + (-g).exp()) * u), 1e-6);
        let tanh = |g: f64| 0.5 * g * (1.0 + (0.797_884_560_802_865_4 * (g + 0.044_715 * g * g * g)).tanh());
        close(&run(gelu_tanh), pairs().map(|(g, u)| tanh(g) * u), 3e-6);
        // The two forms of GELU differ by less than 5e-4 (times up, at most 2).
        close(&run(gelu), pairs().map(|(g, u)| tanh(g) * u), 1.1e-3);
    }
    let (mut out, extremes) = ([0f32; 6], [0.0f32, -0.0, 1e4, -1e4, 3e38, -3e38]);
    for f in [silu, gelu_tanh, gelu] {
        f(Isa::Portable, &mut out, &extremes, &[1.0; 6]);
        assert!(out.iter().all(|v| !v.is_nan()), "{out:?}");
        assert_eq!((out[0], out[2], out[3].abs()), (0.0, 1e4, 0.0));
    }
}

#[test]
fn the_clamped_gate() {
    for n in SIZES {
        let (g, u) = (values(n, 3, 12.0), values(n, 4, 12.0));
        let out = at_every_level(|isa| {
            let mut out = vec![0f32; n];
            clamped_swiglu(isa, &mut out, &g, &u, 1.702, 7.0);
            out
        });
        let exact = g.iter().zip(&u).map(|(&g, &u)| {
            let (g, u) = (f64::from(g).min(7.0), f64::from(u).clamp(-7.0, 7.0));
            (u + 1.0) * g / (1.0 + (-1.702f32 as f64 * g).exp())
        });
        close(&out, exact, 1e-6);
    }
}

#[test]
fn scores_of_routers() {
    for n in SIZES {
        let x = values(n, 8, 20.0);
        let out = at_every_level(|isa| {
            let mut y = x.clone();
            softmax(isa, &mut y);
            y
        });
        let sum: f64 = x.iter().map(|&v| f64::from(v).exp()).sum();
        close(&out, x.iter().map(|&v| f64::from(v).exp() / sum), 1e-6);
        let out = at_every_level(|isa| {
            let mut y = x.clone();
            sigmoid(isa, &mut y);
            add_scaled(isa, &mut y, &x, 0.5);
            y
        });
        close(&out, x.iter().map(|&v| f64::from(v)).map(|v| 1.0 / (1.0 + (-v).exp()) + 0.5 * v), 1e-6);
    }
    let mut far = [1e30f32, -1e30, f32::NEG_INFINITY];
    softmax(Isa::Portable, &mut far);
    assert_eq!(far, [1.0, 0.0, 0.0]);
}

#[test]
fn soft_caps_hold_for_large_scores() {
    let x = [1e4f32, -1e4, 3e38, f32::INFINITY, f32::NEG_INFINITY, 0.0, 1.0];
    let out = at_every_level(|isa| {
        let mut y = x.to_vec();
        soft_cap(isa, &mut y, 2.0, 50.0);
        y
    });
    assert_eq!(out[..6], [50.0, -50.0, 50.0, 50.0, -50.0, 0.0]);
    close(&out[6..], std::iter::once(50.0 * (2.0f64 / 50.0).tanh()), 1e-6);
    let out = at_every_level(|isa| {
        let mut y = values(37, 5, 4.0);
        scale(isa, &mut y, 0.25);
        add(isa, &mut y, &values(37, 6, 1.0));
        y
    });
    close(
        &out,
        values(37, 5, 4.0).iter().zip(values(37, 6, 1.0)).map(|(&a, b)| f64::from(a) * 0.25 + f64::from(b)),
        1e-6,
    );
}

#[test]
fn rotations_pair_what_their_names_say() {
    let table: Vec<[f32; 2]> = (0..20).map(|i| [(i as f32).cos(), (i as f32).sin()]).collect();
    let x = values(48, 7, 1.0);
    type Rotate = fn(Isa, &mut [f32], &[[f32; 2]]);
    let (halves, pairs): (Rotate, Rotate) = (rope_halves, rope_interleaved);
    for (f, index) in
        [(halves, (|i| (i, i + 20)) as fn(usize) -> (usize, usize)), (pairs, |i| (2 * i, 2 * i + 1))]
    {
        let out = at_every_level(|isa| {
            let mut y = x.clone();
            f(isa, &mut y, &table);
            y
        });
        for (i, [cos, sin]) in table.iter().enumerate() {
            let (a, b) = index(i);
            let (xa, xb) = (f64::from(x[a]), f64::from(x[b]));
            let (cos, sin) = (f64::from(*cos), f64::from(*sin));
            close(&[out[a], out[b]], [xa * cos - xb * sin, xb * cos + xa * sin].into_iter(), 1e-6);
        }
        assert_eq!(out[40..], x[40..], "the rest of a head is not rotated");
    }
}
