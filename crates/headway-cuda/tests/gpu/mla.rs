//! What the suite's short requests don't reach of latent attention: keys in parts, prefills of several tiles, contexts
//! through a workspace that is filled several times, graphs.

use super::{
    Outcome, Test,
    attention::{CudaMemory, backends, without_modules, without_triton},
    ensure, flash_attn, mla_graphs, text,
};
use headway_attention::{AttentionError, process::rules::ComputeCapability};
use headway_cuda::{
    CudaExec, DeviceInfo, KernelSpec,
    kernels::mla::{
        DecodeForm, DecodeKernels, Dims, PrefillForm, gather_spec, prefill_spec, write_latent_spec,
    },
};
use headway_testkit::suite::{Cell, SuiteConfig, run_suite_with};

pub const TESTS: &[Test] = &[
    ("mla: keys in parts, prefills of several tiles, CUDA_MLA", long),
    ("mla: keys in parts, prefills of several tiles, FLASHINFER_MLA", long_flashinfer),
    ("mla: keys in parts, prefills of several tiles, FLASHMLA", long_flash_mla),
    ("mla: keys in parts, prefills of several tiles, TRITON_MLA", long_triton),
    ("mla: contexts through a small workspace", small_workspace),
    ("mla: graphs of decodes with drafts and without", mla_graphs::run),
];

/// New tokens and all tokens of requests, decodes first.
const LONG: [(usize, usize); 6] = [(1, 1100), (1, 64), (1, 513), (40, 300), (5, 530), (150, 150)];
/// The same of decodes with drafts, whose last keys lie in a part that the first rows see nothing of.
const LONG_DRAFTS: [(usize, usize); 5] = [(4, 258), (3, 67), (4, 131), (2, 300), (4, 99)];

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

/// Runs requests in every n-th cell of a backend whose name holds `only`.
fn requests(
    cx: &CudaExec,
    name: &str,
    requests: &[(usize, usize)],
    (only, every): (&str, usize),
    workspace: Option<usize>,
) -> Outcome {
    let backends = backends().map_err(text)?;
    let backend = backends.iter().find(|b| b.rules().name == name);
    let backend = backend.ok_or_else(|| format!("{name} is not registered"))?;
    let (major, minor) = cx.info().capability;
    let config = SuiteConfig {
        only: Some(only.into()),
        requests: Some(requests.to_vec()),
        every,
        backend_config: workspace.map(|n| serde_json::json!({ "workspace_tokens": n })),
        compute_capability: Some(ComputeCapability(major, minor)),
        ..SuiteConfig::default()
    };
    let report = run_suite_with(&**backend, cx, &CudaMemory, &config);
    ensure(report.ok(), || report.to_string())?;
    Ok(report.to_string())
}

fn long(cx: &CudaExec) -> Outcome {
    let all = [
        ("decode bfloat16 kv=auto d=576/576 heads=2", 1),
        ("8+8/16/8", 1),
        ("latent=", 37),
        ("batch-invariant", 7),
    ];
    let said = all.into_iter().map(|which| requests(cx, "CUDA_MLA", &LONG, which, None));
    let drafts = [requests(cx, "CUDA_MLA", &LONG_DRAFTS, ("drafts=3", 1), None)];
    Ok(said.chain(drafts).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn long_flashinfer(cx: &CudaExec) -> Outcome {
    let name = "FLASHINFER_MLA";
    if let Some(why) = without_modules(name)? {
        return Ok(why);
    }
    long_of(cx, name)
}

/// Of backends whose rule books draw these cells.
fn long_of(cx: &CudaExec, name: &str) -> Outcome {
    let said = [
        requests(cx, name, &LONG, ("decode bfloat16 kv=auto d=576/576 heads=2/1 block=48/48", 1), None)?,
        requests(cx, name, &LONG, ("decode bfloat16 kv=auto d=576/576 heads=20/1 block=16/16", 1), None)?,
        requests(cx, name, &LONG_DRAFTS, ("drafts=3", 1), None)?,
        requests(cx, name, &LONG, ("mixed bfloat16 kv=auto d=576/576 heads=2/1 block=32/16", 1), Some(512))?,
    ];
    Ok(said.join("\n"))
}

fn long_flash_mla(cx: &CudaExec) -> Outcome {
    let name = "FLASHMLA";
    if let Some(why) = flash_attn::missing(name) {
        return Ok(why);
    }
    requests(cx, name, &LONG, ("decode bfloat16 kv=auto", 5), None)
}

fn long_triton(cx: &CudaExec) -> Outcome {
    let name = "TRITON_MLA";
    if let Some(why) = without_triton(name)? {
        return Ok(why);
    }
    long_of(cx, name)
}

fn small_workspace(cx: &CudaExec) -> Outcome {
    // Each merge rounds to the output's type: in bfloat16 not as often as a workspace of one block would have it.
    let of = |tokens| requests(cx, "CUDA_MLA", &LONG, ("latent=", 41), Some(tokens));
    Ok([256, 512].into_iter().map(of).collect::<Result<Vec<_>, _>>()?.join("\n"))
}
