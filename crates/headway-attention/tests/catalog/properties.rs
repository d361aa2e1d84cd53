//! Selection from the catalogue for layers at random.

use super::{asking, latest, on};
use headway_attention::{
    BackendRequest, KindTag, LayerNeed,
    process::{
        rules::{AttnType, ComputeCapability, LatentDims},
        select::reasons,
    },
};
use headway_tensor::DType;
use proptest::prelude::*;

fn needs() -> impl Strategy<Value = LayerNeed> {
    let capabilities = latest().capabilities().to_vec();
    let shape = (
        proptest::sample::select(
            vec![(8, 7), (10, 1), (13, 0)]
                .into_iter()
                .map(|(a, b)| ComputeCapability(a, b))
                .chain(capabilities)
                .collect::<Vec<_>>(),
        ),
        prop_oneof![Just(KindTag::Standard), Just(KindTag::Mla)],
        proptest::sample::select(vec![16, 64, 80, 128, 192, 256, 320, 512, 576, 1024]),
        proptest::sample::select(vec![DType::BF16, DType::F16, DType::F32]),
        proptest::option::of(proptest::sample::select(vec![
            "auto",
            "bfloat16",
            "fp8",
            "fp8_ds_mla",
            "nvfp4",
            "nonsense",
        ])),
        proptest::option::of(proptest::sample::select(vec![1, 16, 48, 64, 128, 544])),
        proptest::option::of((0usize..300, 0usize..100, 1usize..600, proptest::option::of(1usize..3000))),
    );
    let types = proptest::sample::select(vec![
        AttnType::Decoder,
        AttnType::Encoder,
        AttnType::EncoderOnly,
        AttnType::EncoderDecoder,
    ]);
    // Few flags at once, so that some layers have a backend.
    (shape, types, 0usize..130, proptest::collection::vec(proptest::bool::weighted(0.1), 11)).prop_map(
        |((capability, kind, head_size, dtype, kv, block_size, latent), attn_type, num_heads, flag)| {
            LayerNeed {
                kind,
                head_size,
                head_size_v: head_size,
                model_head_size: latent.map(|_| head_size),
                latent: latent.map(|(qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank, index_topk)| {
                    LatentDims {
                        qk_nope_head_dim,
                        qk_rope_head_dim,
                        kv_lora_rank,
                        v_head_dim: 128,
                        index_topk,
                    }
                }),
                num_heads,
                dtype,
                kv_cache_dtype: kv.map(Into::into),
                block_size,
                attn_type: if flag[10] { attn_type } else { AttnType::Decoder },
                sliding_window: flag[0].then_some(512),
                has_sinks: flag[1],
                use_sparse: flag[2],
                use_mm_prefix: flag[3],
                use_non_causal: flag[4],
                use_batch_invariant: flag[5],
                use_kv_connector: flag[6],
                use_dcp: flag[7],
                use_pcp: flag[8],
                use_rswa: flag[9],
                ..on(capability)
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// The chosen one is the first without a reason; where there is none the error names every candidate.
    #[test]
    fn the_first_without_a_reason(need in needs()) {
        let catalog = latest();
        let candidates = catalog.candidates(&need).unwrap();
        prop_assert!(!candidates.is_empty());
        let first = candidates.iter().find(|c| reasons(*c, &need).is_empty()).map(|c| c.backend.name.clone());
        match catalog.select("layer 0", &need, &BackendRequest::default()) {
            Ok(s) => {
                prop_assert_eq!(Some(&s.backend.name), first.as_ref());
                prop_assert!(s.refused.iter().all(|r| !r.reasons.is_empty()));
            }
            Err(e) => {
                prop_assert_eq!(first, None);
                let e = e.to_string();
                for c in &candidates {
                    prop_assert!(e.contains(&format!("{}: [", c.backend.name)), "{} in {}", c.backend.name, e);
                }
            }
        }
    }

    /// A named backend is what the layer gets, or an error that names it; never another.
    #[test]
    fn named_or_error(need in needs(), pick in any::<proptest::sample::Index>()) {
        let catalog = latest();
        let backend = pick.get(catalog.backends());
        match catalog.select("layer 0", &need, &asking(&backend.name)) {
            Ok(s) => prop_assert_eq!(&s.backend.name, &backend.name),
            Err(e) => {
                let start = format!("Selected backend {} is not", backend.name);
                prop_assert!(e.to_string().contains(&start), "{e}");
            }
        }
    }

    /// Leaving the block size out never makes a backend worse.
    #[test]
    fn no_block_size_refuses_less(need in needs()) {
        let catalog = latest();
        let without = LayerNeed { block_size: None, ..need.clone() };
        for backend in catalog.backends() {
            let of = |n: &LayerNeed| reasons(&catalog.candidate(backend, n).unwrap(), n);
            let (with, without) = (of(&need), of(&without));
            prop_assert!(without.iter().all(|r| with.contains(r)), "{}: {without:?} but {with:?}", backend.name);
        }
    }
}
