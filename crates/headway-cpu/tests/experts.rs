//! A mixture of experts on the CPU against float64, and the promise that a row's result is its own.

use headway_cpu::{CpuExec, CpuOptions, Isa};
use headway_tensor::{
    Activation, DType, ExpertLimits, ExpertParts, ExpertsSpec, LinearPart, Ops, RouterScores, Routing,
    SharedBytes, TensorMut, TensorRef, Weight, WeightType, quant,
};
use headway_testkit::{
    Rng,
    reference::experts::{self, Expert, published_rules},
};
use proptest::prelude::*;

const SWIGLU: Activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };

/// A layer's experts with random weights, and the same for the reference.
struct Layer {
    routing: Routing,
    activation: Activation,
    correction: Option<Vec<f32>>,
    hidden: usize,
    inner: usize,
    experts: Vec<Expert>,
    dtype: WeightType,
}

fn bytes(dtype: WeightType, values: &[f32]) -> Vec<u8> {
    match dtype {
        WeightType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        WeightType::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        WeightType::F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
        WeightType::Quant(format) => quant::quantize(format, values).unwrap(),
    }
}

impl Layer {
    /// Weights are rounded to the type first, so that the reference computes with what the file holds.
    fn new(
        rng: &mut Rng,
        routing: Routing,
        (hidden, inner): (usize, usize),
        dtype: WeightType,
        bias: bool,
    ) -> Self {
        let mut matrix = |rows: usize, cols: usize| {
            let values: Vec<f32> =
                (0..rows * cols).map(|_| (rng.normal() / (cols as f64).sqrt()) as f32).collect();
            let bytes = SharedBytes::new(bytes(dtype, &values));
            Weight::new("w", dtype, vec![rows, cols], bytes).unwrap().to_f32()
        };
        let experts = (0..routing.experts)
            .map(|_| Expert {
                gate_up: matrix(2 * inner, hidden),
                gate_up_bias: if bias { matrix(2 * inner / 32, 32) } else { vec![] },
                down: matrix(hidden, inner),
                down_bias: if bias { matrix(hidden / 32, 32) } else { vec![] },
            })
            .collect();
        let activation = if bias { SWIGLU } else { Activation::Silu };
        Self { routing, activation, correction: None, hidden, inner, experts, dtype }
    }

    fn spec(&self, fused: bool) -> ExpertsSpec {
        let part = |rows: usize, cols: usize, values: &[f32], bias: &[f32]| LinearPart {
            weight: Weight::new(
                "w",
                self.dtype,
                vec![rows, cols],
                SharedBytes::new(bytes(self.dtype, values)),
            )
            .unwrap(),
            bias: (!bias.is_empty()).then(|| Weight::from_f32("b", vec![rows], bias).unwrap()),
        };
        let (h, i) = (self.hidden, self.inner);
        let parts = |e: &Expert| {
            let half =
                |v: &[f32], n: usize| if v.is_empty() { vec![] } else { v[n..n + v.len() / 2].to_vec() };
            let gate_up = if fused {
                vec![part(2 * i, h, &e.gate_up, &e.gate_up_bias)]
            } else {
                (0..2)
                    .map(|n| part(i, h, &half(&e.gate_up, n * i * h), &half(&e.gate_up_bias, n * i)))
                    .collect()
            };
            ExpertParts { gate_up, down: part(h, i, &e.down, &e.down_bias) }
        };
        ExpertsSpec {
            routing: self.routing,
            correction: self.correction.clone(),
            activation: self.activation,
            experts: self.experts.iter().map(parts).collect(),
        }
    }

    fn limits(&self) -> ExpertLimits {
        let Routing { experts, top_k, .. } = self.routing;
        ExpertLimits { experts, top_k, hidden: self.hidden, intermediate: self.inner }
    }

    /// Runs `x` `[n, hidden]` with buffers for `max_tokens`.
    fn run(
        &self,
        cx: &CpuExec,
        x: &[f32],
        logits: &[f32],
        max_tokens: usize,
        compute: Option<DType>,
    ) -> Vec<f32> {
        let n = x.len() / self.hidden;
        let w = cx.load_experts(self.spec(n.is_multiple_of(2)), compute).unwrap();
        assert_eq!((w.limits(), w.routing()), (self.limits(), &self.routing));
        let mut buffers = cx.expert_buffers(self.limits(), max_tokens).unwrap();
        // What lies there is not added to.
        let mut out = vec![7f32; x.len()];
        cx.mixture_of_experts(
            &*w,
            TensorRef::from_host(x, &[n, self.hidden]).unwrap(),
            TensorRef::from_host(logits, &[n, self.routing.experts]).unwrap(),
            &mut *buffers,
            false,
            TensorMut::from_host(&mut out, &[n, self.hidden]).unwrap(),
        )
        .unwrap();
        out
    }
}

fn cx(threads: usize, isa: Isa) -> CpuExec {
    CpuExec::new(CpuOptions { threads: Some(threads), isa: Some(isa), batch_invariant: true }).unwrap()
}

fn numbers(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.normal() as f32).collect()
}

#[test]
fn every_rule_and_type_against_float64() {
    let mut rng = Rng::new(5);
    for (name, routing) in published_rules() {
        for (dtype, bias, activation) in [
            (WeightType::F32, false, Activation::Silu),
            (WeightType::BF16, true, SWIGLU),
            (WeightType::F16, false, Activation::Gelu),
            (WeightType::Quant(quant::QuantFormat::Q8_0), true, Activation::GeluTanh),
        ] {
            let mut layer = Layer::new(&mut rng, routing, (64, 96), dtype, bias);
            layer.activation = activation;
            if routing.scores == RouterScores::Sigmoid {
                layer.correction = Some((0..routing.experts).map(|_| rng.normal() as f32 * 0.2).collect());
            }
            let n = 23;
            let (x, logits) = (numbers(&mut rng, n * 64), numbers(&mut rng, n * routing.experts));
            let got = layer.run(&cx(2, Isa::detect().unwrap()), &x, &logits, n, Some(DType::F32));
            for t in 0..n {
                let wide = |v: &[f32]| v.iter().copied().map(f64::from).collect::<Vec<_>>();
                let logits = wide(&logits[t * routing.experts..(t + 1) * routing.experts]);
                let routed = experts::route(&routing, &logits, layer.correction.as_deref());
                assert!(routed.margin > 1e-6, "{name}: a draw; take another seed");
                let x = wide(&x[t * 64..(t + 1) * 64]);
                let want = experts::mixture(&routed.choices, layer.activation, &layer.experts, &x);
                let size = want.iter().fold(1f64, |m, w| m.max(w.abs()));
                for (g, w) in got[t * 64..].iter().zip(&want) {
                    assert!((f64::from(*g) - w).abs() < 4e-6 * size, "{name} {dtype} token {t}: {g} and {w}");
                }
            }
        }
    }
}

#[test]
fn every_level_chooses_the_same_and_computes_nearly_the_same() {
    let mut rng = Rng::new(6);
    for (name, routing) in published_rules() {
        let layer = Layer::new(&mut rng, routing, (64, 32), WeightType::BF16, false);
        let (x, logits) = (numbers(&mut rng, 9 * 64), numbers(&mut rng, 9 * routing.experts));
        let portable = layer.run(&cx(1, Isa::Portable), &x, &logits, 9, None);
        for &isa in Isa::available() {
            let got = layer.run(&cx(1, isa), &x, &logits, 9, None);
            let far = got.iter().zip(&portable).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(far < 1e-4, "{name} {isa}: {far}");
        }
    }
}

#[test]
fn what_lies_there_is_added_to_when_asked() {
    let mut rng = Rng::new(7);
    let layer = Layer::new(&mut rng, published_rules()[0].1, (32, 32), WeightType::F32, false);
    let cx = cx(1, Isa::Portable);
    let (x, logits) = (numbers(&mut rng, 4 * 32), numbers(&mut rng, 4 * 8));
    let alone = layer.run(&cx, &x, &logits, 4, None);
    let w = cx.load_experts(layer.spec(true), None).unwrap();
    let mut buffers = cx.expert_buffers(layer.limits(), 4).unwrap();
    // Rows of a wider buffer, as columns of it.
    let mut out = vec![2f32; 4 * 48];
    let view = TensorMut::from_host(&mut out, &[4, 48]).unwrap().cols(8..40).unwrap();
    cx.mixture_of_experts(
        &*w,
        TensorRef::from_host(&x, &[4, 32]).unwrap(),
        TensorRef::from_host(&logits, &[4, 8]).unwrap(),
        &mut *buffers,
        true,
        view,
    )
    .unwrap();
    for (row, alone) in out.chunks(48).zip(alone.chunks(32)) {
        assert!(row[..8].iter().chain(&row[40..]).all(|x| *x == 2.0));
        assert!(row[8..40].iter().zip(alone).all(|(a, b)| (a - b - 2.0).abs() < 1e-5));
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut rng = Rng::new(8);
    let cx = cx(1, Isa::Portable);
    let layer = Layer::new(&mut rng, published_rules()[0].1, (32, 64), WeightType::F32, false);
    let refused = |spec: ExpertsSpec, words: &str| {
        let e = cx.load_experts(spec, None).err().expect("refused").to_string();
        assert!(e.contains(words), "{e}");
    };
    refused(
        ExpertsSpec { routing: Routing { top_k: 9, ..layer.routing }, ..layer.spec(true) },
        "9 of 8 experts",
    );
    refused(ExpertsSpec { correction: Some(vec![0.0; 7]), ..layer.spec(true) }, "score correction");
    let mut spec = layer.spec(true);
    spec.experts.pop();
    refused(spec, "[8], one an expert");
    let mut spec = layer.spec(true);
    let other = Layer::new(&mut rng, published_rules()[0].1, (32, 32), WeightType::F32, false);
    spec.experts[3] = other.spec(true).experts.swap_remove(0);
    refused(spec, "expert 3");
    let w = cx.load_experts(layer.spec(true), None).unwrap();
    let mut small = cx.expert_buffers(ExpertLimits { intermediate: 32, ..layer.limits() }, 4).unwrap();
    let (x, logits, mut out) = (vec![0f32; 32], vec![0f32; 8], vec![0f32; 32]);
    let mut run = |x: &[f32], logits: &[f32], buffers: &mut dyn headway_tensor::ExpertBuffers| {
        cx.mixture_of_experts(
            &*w,
            TensorRef::from_host(x, &[1, x.len()]).unwrap(),
            TensorRef::from_host(logits, &[1, logits.len()]).unwrap(),
            buffers,
            false,
            TensorMut::from_host(&mut out, &[1, 32]).unwrap(),
        )
        .map_err(|e| e.to_string())
    };
    assert!(run(&x, &logits, &mut *small).unwrap_err().contains("too small"));
    let mut buffers = cx.expert_buffers(layer.limits(), 4).unwrap();
    assert!(buffers.bytes() > 4 * 3 * (32 + 3 * 64) * 4);
    assert!(run(&x[..31], &logits, &mut *buffers).unwrap_err().contains("input"));
    assert!(run(&x, &logits[..7], &mut *buffers).unwrap_err().contains("router logits"));
    run(&x, &logits, &mut *buffers).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A row's result is the same bits alone, in any batch, in passes of any size, with any number of threads.
    #[test]
    fn a_rows_result_is_its_own(
        seed in any::<u64>(),
        rule in 0usize..6,
        dtype in 0usize..3,
        n in 1usize..40,
        pass in 1usize..40,
        threads in 1usize..4,
    ) {
        let mut rng = Rng::new(seed);
        let (_, routing) = published_rules().swap_remove(rule);
        let dtype = [WeightType::F32, WeightType::BF16, WeightType::Quant(quant::QuantFormat::Q4_0)][dtype];
        let layer = Layer::new(&mut rng, routing, (64, 32), dtype, seed.is_multiple_of(2));
        let (x, logits) = (numbers(&mut rng, n * 64), numbers(&mut rng, n * routing.experts));
        let isa = Isa::detect().unwrap();
        let together = layer.run(&cx(threads, isa), &x, &logits, pass, None);
        let one = cx(1, isa);
        for t in [0, n / 2, n - 1] {
            let logits = &logits[t * routing.experts..(t + 1) * routing.experts];
            let alone = layer.run(&one, &x[t * 64..(t + 1) * 64], logits, 1, None);
            let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&alone), bits(&together[t * 64..(t + 1) * 64]));
        }
    }
}
