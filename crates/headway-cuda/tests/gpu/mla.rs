//! What the suite's short requests don't reach of `CUDA_MLA`: keys in parts, prefills of several tiles, contexts through a
//! workspace that is filled several times.

use super::{
    Outcome, Test,
    attention::{CudaMemory, backends},
    ensure, text,
};
use headway_attention::AttentionError;
use headway_cuda::{
    CudaExec, DeviceInfo, KernelSpec,
    kernels::mla::{
        DecodeForm, DecodeKernels, Dims, PrefillForm, gather_spec, prefill_spec, write_latent_spec,
    },
};
use headway_testkit::suite::{Cell, SuiteConfig, run_suite_with};

pub const TESTS: &[Test] = &[
    ("mla: keys in parts, prefills of several tiles", long),
    ("mla: contexts through a small workspace", small_workspace),
];

/// New tokens and all tokens of requests, decodes first.
const LONG: [(usize, usize); 6] = [(1, 1100), (1, 64), (1, 513), (40, 300), (5, 530), (150, 150)];

/// The kernels that a cell of latent attention needs.
pub fn specs(info: &DeviceInfo, cell: &Cell) -> Result<Vec<KernelSpec>, AttentionError> {
    let (Some(l), Some(cache)) = (cell.latent, cell.kv_element()) else { return Ok(vec![]) };
    let d = Dims {
        heads: cell.num_heads,
        nope: l.qk_nope_head_dim,
        rope: l.qk_rope_head_dim,
        rank: l.kv_lora_rank,
        v: l.v_head_dim,
    };
    let shared = info.shared_per_block as usize;
    let decode = DecodeForm::choose(&d, cache, d.heads * (1 + cell.drafts), shared);
    let decode = decode.map_err(AttentionError::Inputs)?;
    let prefill = PrefillForm::choose(&d, shared).map_err(AttentionError::Inputs)?;
    let [decode, merge] = DecodeKernels::specs(&d, decode, (cell.dtype, cache), cell.batch_invariant)?;
    Ok(vec![
        decode,
        merge,
        prefill_spec(&d, prefill, cell.dtype)?,
        gather_spec(&d, cell.dtype, cache)?,
        write_latent_spec(d.latent(), cell.dtype, cache)?,
    ])
}

/// Runs these requests in every n-th cell whose name holds `only`.
fn requests(cx: &CudaExec, only: &str, every: usize, workspace: Option<usize>) -> Outcome {
    let backends = backends().map_err(text)?;
    let backend = backends.iter().find(|b| b.rules().name == "CUDA_MLA");
    let backend = backend.ok_or_else(|| "CUDA_MLA is not registered".to_owned())?;
    let config = SuiteConfig {
        only: Some(only.into()),
        requests: Some(LONG.to_vec()),
        every,
        backend_config: workspace.map(|n| serde_json::json!({ "workspace_tokens": n })),
        ..SuiteConfig::default()
    };
    let report = run_suite_with(&**backend, cx, &CudaMemory, &config);
    ensure(report.ok(), || report.to_string())?;
    Ok(report.to_string())
}

fn long(cx: &CudaExec) -> Outcome {
    let all =
        [("decode bfloat16 kv=auto d=576", 1), ("8+8/16/8", 1), ("latent=", 37), ("batch-invariant", 7)];
    let said = all.into_iter().map(|(only, every)| requests(cx, only, every, None));
    Ok(said.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn small_workspace(cx: &CudaExec) -> Outcome {
    // Each merge rounds to the output's type: in bfloat16 not as often as a workspace of one block would have it.
    let said = [256, 512].into_iter().map(|tokens| requests(cx, "latent=", 41, Some(tokens)));
    Ok(said.collect::<Result<Vec<_>, _>>()?.join("\n"))
}
