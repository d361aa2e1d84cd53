//! `headway kernels fetch`: files of other projects' packages, by hash.

use super::{CliError, folder};
use clap::{Args, ValueEnum};
use headway_cuda::modules::extension::{FetchOptions, fetch};
use serde_json::json;
use std::{io::Write, path::PathBuf, process::ExitCode};

/// `headway kernels fetch`.
#[derive(Args, Debug)]
#[command(after_help = "\
flash-attn takes two files out of the wheel of vLLM 0.33.0 (Linux, x86-64): FlashAttention-3 (173 MB) and
FlashMLA (4 MB). pip brings the wheel (340 MB), which is thrown away; nothing else of it is kept, and neither
Python nor PyTorch is needed afterwards. Files that are others than that version's are refused.

Examples:
  headway kernels fetch flash-attn
  headway kernels fetch flash-attn --wheel vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl")]
pub(super) struct FetchArgs {
    /// What to fetch.
    what: What,
    /// The folder of modules [default: HEADWAY_KERNELS_DIR, or headway/modules in the user's cache folder].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// A wheel that is there [default: pip brings it].
    #[arg(long, value_name = "FILE")]
    wheel: Option<PathBuf>,
    /// The Python whose pip brings it.
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: PathBuf,
    /// One JSON object on standard output.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum What {
    FlashAttn,
}

/// Runs the command.
pub(super) fn run(a: &FetchArgs) -> Result<ExitCode, CliError> {
    let What::FlashAttn = a.what;
    let options =
        FetchOptions { folder: folder(a.out.as_ref())?, wheel: a.wheel.clone(), python: a.python.clone() };
    let report = fetch(&options, &mut |line| note!("{line}"))?;
    let mut out = std::io::stdout().lock();
    if a.json {
        writeln!(
            out,
            "{}",
            json!({"folder": options.folder, "fetched": report.fetched, "present": report.present})
        )?;
    } else {
        for path in report.fetched.iter().chain(&report.present) {
            writeln!(out, "{}", path.display())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
