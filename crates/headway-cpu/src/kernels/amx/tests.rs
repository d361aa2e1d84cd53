//! Tiles against their model. Without AMX there is nothing to run; then the model alone is tested.

use super::{Config, FULL, ROW, SIDE, Tiles, model};
use crate::Isa;

/// Pseudo-random bfloat16 bits: numbers of every size, denormals and zeros among them, no infinities.
fn bits(seed: u64, n: usize) -> Vec<u16> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = (state >> 40) as u16;
            match state >> 33 & 15 {
                0 => x & 0x807f,
                _ => (x & 0x80ff) | (((x >> 8 & 15) + 120) << 7),
            }
        })
        .collect()
}

#[test]
fn the_model_adds_pairs_apart_and_flushes_denormals() {
    let of = |x: f32| (x.to_bits() >> 16) as u16;
    assert_eq!(model::dot(1.0, &[of(2.0), of(3.0)], &[of(5.0), of(7.0)]), 32.0);
    // 2^24 + 1 is lost in one chain, and here the ones meet in a chain of their own.
    let big = [of(16_777_216.0), of(1.0), 0, of(1.0)];
    let one = [of(1.0); 4];
    assert_eq!(model::dot(0.0, &big, &one), 16_777_218.0);
    assert_eq!(model::dot(0.0, &[0x0001, 0], &[of(1e30), 0]), 0.0);
    assert_eq!(model::dot(f32::from_bits(1), &[0, 0], &[0, 0]).to_bits(), 0);
    assert_eq!(model::long_dot(&[of(1.0); 70], &[of(0.5); 70]), 35.0);
}

#[test]
fn tiles_multiply_as_the_model_says() {
    if !Isa::available().contains(&Isa::Amx) {
        return;
    }
    for (rows, pairs, cols) in [(16, 16, 16), (1, 16, 16), (7, 3, 5), (16, 1, 1), (5, 16, 2)] {
        // Rows further apart than they are long, and guards around what is written.
        let (a_stride, b_stride) = (100, 72);
        let a = bits(1 + rows as u64, a_stride / 2 * SIDE);
        let b = bits(2, b_stride / 2 * SIDE);
        let mut c = [[0.5f32; 20]; SIDE];
        let config = Config::new([
            (rows, 4 * cols),
            (rows, 4 * pairs),
            (pairs, 4 * cols),
            (0, 0),
            (0, 0),
            (0, 0),
            (0, 0),
            (SIDE, ROW),
        ]);
        // SAFETY: the level is available; the arrays have 16 rows of the strides given.
        unsafe {
            let mut tiles = Tiles::new(&config);
            tiles.load::<1>(a.as_ptr().cast(), a_stride);
            tiles.load::<2>(b.as_ptr().cast(), b_stride);
            tiles.load::<0>(c.as_ptr().cast(), 80);
            tiles.dot::<0, 1, 2>();
            tiles.store::<0>(c.as_mut_ptr().cast(), 80);
        }
        for (m, found) in c.iter().enumerate() {
            for (n, found) in found.iter().enumerate() {
                let row = &a[m * a_stride / 2..][..2 * pairs];
                let at = |k: usize, i: usize| b[k * b_stride / 2 + 2 * n.min(15) + i];
                let column: Vec<u16> = (0..pairs).flat_map(|k| [at(k, 0), at(k, 1)]).collect();
                let expected = if m < rows && n < cols { model::dot(0.5, row, &column) } else { 0.5 };
                assert_eq!(found.to_bits(), expected.to_bits(), "{rows} {pairs} {cols}: {m}, {n}");
            }
        }
    }
}

#[test]
fn a_configuration_zeroes_tiles_and_each_thread_has_its_own() {
    if !Isa::available().contains(&Isa::Amx) {
        return;
    }
    let full = Config::new([(SIDE, ROW); 8]);
    let twos = [2f32; FULL / 4];
    let stored = |tiles: &Tiles| {
        let mut out = [1f32; FULL / 4];
        // SAFETY: a full tile.
        unsafe { tiles.store::<7>(out.as_mut_ptr().cast(), ROW) };
        out
    };
    // SAFETY: the level is available; the arrays are full tiles; each thread holds one `Tiles`.
    unsafe {
        let mut tiles = Tiles::new(&full);
        tiles.load::<7>(twos.as_ptr().cast(), ROW);
        let other = std::thread::spawn(move || {
            let mut tiles = Tiles::new(&full);
            let before = stored(&tiles);
            tiles.zero::<7>();
            before == [0.0; FULL / 4]
        });
        assert!(other.join().unwrap());
        assert!(stored(&tiles) == twos);
        tiles.configure(&full);
        assert!(stored(&tiles) == [0.0; FULL / 4]);
    }
}
