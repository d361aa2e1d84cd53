//! The reference against answers that can be worked out by hand.

use super::*;

const ONE: Params<'static> = Params {
    num_heads: 1,
    num_kv_heads: 1,
    head_size: 1,
    head_size_v: 1,
    scale: 1.0,
    sliding_window: None,
    rswa_window: None,
    logit_soft_cap: None,
    alibi_slopes: None,
    sinks: None,
};

fn near(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-12), "{a:?} {b:?}");
}

#[test]
fn equal_scores_average_and_rows_align_with_the_end() {
    let (k, v) = ([0.0; 4], [1.0, 2.0, 3.0, 10.0]);
    let r = Request { q: &[5.0, 5.0], k: &k, v: &v, causal: true, ..Request::default() };
    let a = attend(&ONE, &r);
    near(&a.out, &[2.0, 4.0]);
    near(&a.lse, &[3f64.ln(), 4f64.ln()]);
    near(&attend(&ONE, &Request { causal: false, ..r }).out, &[4.0, 4.0]);
}

#[test]
fn more_rows_than_keys_leave_empty_rows() {
    let r = Request { q: &[1.0; 3], k: &[2.0], v: &[7.0], causal: true, ..Request::default() };
    let a = attend(&ONE, &r);
    near(&a.out, &[0.0, 0.0, 7.0]);
    near(&a.lse, &[f64::NEG_INFINITY, f64::NEG_INFINITY, 2.0]);
    let none = attend(&ONE, &Request { k: &[], v: &[], ..r });
    assert_eq!((none.out, none.lse), (vec![0.0; 3], vec![f64::NEG_INFINITY; 3]));
}

#[test]
fn a_window_of_w_lets_w_positions_be_seen() {
    let seen = |i, w| (0..6).filter(|&j| sees(i, j, true, Some(w))).collect::<Vec<i64>>();
    assert_eq!((seen(5, 4), seen(2, 4), seen(3, 1)), (vec![2, 3, 4, 5], vec![0, 1, 2], vec![3]));
    let p = Params { sliding_window: Some(2), ..ONE };
    let r = Request {
        q: &[0.0; 6],
        k: &[0.0; 6],
        v: &[1., 2., 3., 4., 5., 6.],
        causal: true,
        ..Request::default()
    };
    near(&attend(&p, &r).out, &[1.0, 1.5, 2.5, 3.5, 4.5, 5.5]);
}

#[test]
fn scale_cap_alibi_and_sinks_act_in_order() {
    let slopes = [0.5f32];
    let sinks = [0.25f32];
    let p = Params {
        scale: 0.1,
        logit_soft_cap: Some(2.0),
        alibi_slopes: Some(&slopes),
        sinks: Some(&sinks),
        ..ONE
    };
    let a = attend(
        &p,
        &Request { q: &[10.0], k: &[3.0, -4.0], v: &[1.0, 2.0], causal: true, ..Request::default() },
    );
    let (s0, s1) = (2.0 * 1.5f64.tanh() - 0.5, 2.0 * (-2f64).tanh());
    let z = s0.exp() + s1.exp() + 0.25f64.exp();
    near(&a.out, &[(s0.exp() + 2.0 * s1.exp()) / z]);
    near(&a.lse, &[z.ln()]);
}

#[test]
fn huge_scores_stay_finite() {
    let p = Params { logit_soft_cap: Some(50.0), ..ONE };
    let r = Request { q: &[1.0], k: &[1e4, -1e4], v: &[3.0, 4.0], causal: false, ..Request::default() };
    near(&attend(&p, &r).lse, &[50.0]);
    near(&attend(&ONE, &r).out, &[3.0]);
}

#[test]
fn query_heads_share_key_heads_in_runs() {
    let p = Params { num_heads: 4, num_kv_heads: 2, head_size_v: 2, ..ONE };
    let r =
        Request { q: &[1.0; 4], k: &[0.0, 0.0], v: &[1., 2., 3., 4.], causal: true, ..Request::default() };
    near(&attend(&p, &r).out, &[1., 2., 1., 2., 3., 4., 3., 4.]);
}

#[test]
fn a_paged_batch_reads_through_its_table() {
    let by_slot: Vec<f64> = (0..12).map(f64::from).collect();
    let b = PagedBatch {
        q: &[0.0, 0.0],
        query_start_loc: &[0, 1, 1, 2],
        seq_lens: &[3, 0, 2],
        block_table: &[5, 1, 0, 0, 3, 0],
        block_table_stride: 2,
        block_size: 2,
        k_by_slot: &by_slot,
        v_by_slot: &by_slot,
        causal: &[true; 3],
        ..PagedBatch::default()
    };
    near(&attend_paged(&ONE, &b).out, &[(10.0 + 11.0 + 2.0) / 3.0, 6.5]);
}

/// What each row of six tokens sees, in order.
fn seen(p: &Params<'_>, r: &Request<'_>) -> Vec<Vec<i64>> {
    (0..6).map(|i| (0..6).filter(|&j| sees_masked(p, r, i, j)).collect()).collect()
}

#[test]
fn a_span_sees_itself_both_ways_and_a_window_does_not_cut_it() {
    let p = Params { sliding_window: Some(2), ..ONE };
    let span = 1..4;
    let r = Request { causal: true, spans: std::slice::from_ref(&span), ..Request::default() };
    let want = [vec![0], vec![0, 1, 2, 3], vec![1, 2, 3], vec![1, 2, 3], vec![3, 4], vec![4, 5]];
    assert_eq!(seen(&p, &r), want);
    assert_eq!(seen(&ONE, &r)[1..4], [vec![0, 1, 2, 3], vec![0, 1, 2, 3], vec![0, 1, 2, 3]]);
}

#[test]
fn r_swa_keeps_the_prefix_and_a_window_of_the_rest() {
    let p = Params { rswa_window: Some(2), ..ONE };
    let r = Request { causal: true, prefix: 2, ..Request::default() };
    let want = [vec![0], vec![0, 1], vec![0, 1, 2], vec![0, 1, 2, 3], vec![0, 1, 3, 4], vec![0, 1, 4, 5]];
    assert_eq!(seen(&p, &r), want);
    let none = Request { prefix: 0, ..r };
    assert_eq!(seen(&p, &none), seen(&Params { sliding_window: Some(2), ..ONE }, &none));
}
