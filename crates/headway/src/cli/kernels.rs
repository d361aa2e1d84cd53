//! `headway kernels`: headway's own kernels in Triton, compiled; other projects', built from their packages or taken out of
//! them; and what is there, listed.

mod fetch;
mod triton;

use super::CliError;
use clap::{Args, Subcommand, ValueEnum, builder::PossibleValue};
use comfy_table::{ContentArrangement, Table, presets};
use headway_cuda::modules::{
    Entry, FOLDER_VARIABLE, Kind, ModuleFolder,
    build::{BuildOptions, Toolchain, ToolchainOptions, build},
    default_folder,
    extension::{ExtensionEntry, try_extension},
};
use serde_json::json;
use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// `headway kernels`.
#[derive(Args, Debug)]
pub struct KernelsArgs {
    /// What to do.
    #[command(subcommand)]
    command: KernelsCommand,
}

#[derive(Subcommand, Debug)]
enum KernelsCommand {
    /// Compile headway's own kernels in Triton, or another project's from its package; no GPU is needed.
    Build(Box<BuildArgs>),
    /// Take compiled kernels out of another project's package.
    Fetch(fetch::FetchArgs),
    /// The kernels that are there, and what each is for.
    List(ListArgs),
}

/// `headway kernels build`.
#[derive(Args, Debug)]
#[command(after_help = "\
Needs the package of FlashInfer 0.7.4, TVM-FFI's headers (torch is not needed), nvcc 13 and g++:
  pip install --no-deps flashinfer-python==0.7.4 'apache-tvm-ffi==0.1.*'
  pip install nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
  pip install 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'
where the last two lines are what NVIDIA's toolkit has too. What was built is left as it is; an
interrupted build goes on where it was.

triton: headway's own kernels, for TRITON_ATTN and (--mla) TRITON_MLA. Needs python3 with Triton 3.6.0 and nothing else:
  pip install triton==3.6.0
One build serves layers with windows and sinks and without; a soft cap needs its own.

Examples:
  headway kernels build triton --head-size 64,128 --dtype bfloat16 --arch sm_90a
  headway kernels build triton --mla --arch sm_90a
  headway kernels build flashinfer --head-size 128 --arch sm_90a
  headway kernels build flashinfer --head-size 64,128 --dtype bfloat16,float16 --arch sm_90a
  headway kernels build flashinfer --head-size 256 --arch sm_90a --sliding-window
  headway kernels build flashinfer --head-size 128 --arch sm_80 --packages ./site-packages")]
struct BuildArgs {
    /// Whose kernels.
    project: Project,
    /// Sizes of heads, separated by commas: 64, 128, 256 (triton: multiples of 8 up to 256).
    #[arg(long, value_name = "N", value_delimiter = ',')]
    head_size: Vec<usize>,
    /// Element types, separated by commas: bfloat16, float16.
    #[arg(long, value_name = "TYPE", value_delimiter = ',', default_value = "bfloat16")]
    dtype: Vec<String>,
    /// The architecture, as nvcc names it: sm_80, sm_89, sm_90a (Hopper), sm_100a.
    #[arg(long)]
    arch: String,
    /// For layers with a sliding window.
    #[arg(long)]
    sliding_window: bool,
    /// For layers with a cap on their logits.
    #[arg(long)]
    soft_cap: bool,
    /// Kernels of latent attention (512 and 64).
    #[arg(long)]
    mla: bool,
    /// Kernels to build, separated by commas [default: all that the architecture has].
    #[arg(long, value_name = "KIND", value_delimiter = ',')]
    kind: Vec<KindArg>,
    /// The folder of modules [default: HEADWAY_KERNELS_DIR, or headway/modules in the user's cache folder].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// A folder of Python packages (site-packages) [default: where python3 finds them].
    #[arg(long, value_name = "DIR")]
    packages: Option<PathBuf>,
    /// The compiler [default: nvcc on PATH, of NVIDIA's toolkit or of its package].
    #[arg(long, value_name = "PATH")]
    nvcc: Option<PathBuf>,
    /// Compilers at once; one takes up to 4 GB [default: the machine's processors].
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// One JSON object on standard output.
    #[arg(long)]
    json: bool,
}

/// `headway kernels list`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  headway kernels list
  headway kernels list --json --check")]
struct ListArgs {
    /// The folder of modules [default: HEADWAY_KERNELS_DIR, or headway/modules in the user's cache folder].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Open each module, and say what is wrong with it.
    #[arg(long)]
    check: bool,
    /// One JSON object on standard output.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Project {
    /// FlashInfer's kernels, by nvcc.
    Flashinfer,
    /// Headway's own kernels in Triton, by python3 with Triton.
    Triton,
}

/// A kind of kernels, as users write it.
#[derive(Clone, Copy, Debug)]
struct KindArg(Kind);

impl ValueEnum for KindArg {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self(Kind::Fa2), Self(Kind::Fa3), Self(Kind::MlaFa2), Self(Kind::MlaFa3)]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.0.name()))
    }
}

/// Runs the command.
pub fn run(args: &KernelsArgs) -> Result<ExitCode, CliError> {
    match &args.command {
        KernelsCommand::Build(a) => make(a),
        KernelsCommand::Fetch(a) => fetch::run(a),
        KernelsCommand::List(a) => list(a),
    }
}

fn folder(given: Option<&PathBuf>) -> Result<PathBuf, CliError> {
    let none = || format!("there is no folder for modules: set {FOLDER_VARIABLE} or HOME, or name one");
    given.cloned().or_else(default_folder).ok_or_else(|| CliError::Usage(none()))
}

fn make(a: &BuildArgs) -> Result<ExitCode, CliError> {
    if let Project::Triton = a.project {
        return triton::make(a);
    }
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let options = BuildOptions {
        folder: folder(a.out.as_ref())?,
        head_sizes: a.head_size.clone(),
        mla: a.mla,
        dtypes: a.dtype.clone(),
        arch: a.arch.clone(),
        sliding_window: a.sliding_window,
        soft_cap: a.soft_cap,
        kinds: a.kind.iter().map(|k| k.0).collect(),
        jobs: a.jobs.unwrap_or_else(cores),
    };
    // What can't be built needs no tools to be refused.
    options.wants()?;
    let tools = Toolchain::find(&ToolchainOptions { packages: a.packages.clone(), nvcc: a.nvcc.clone() })?;
    let report = build(&options, &tools, &mut |line| note!("{line}"))?;
    say(a, &options.folder, &report.built, &report.present)
}

/// What a build did.
fn say(a: &BuildArgs, folder: &Path, built: &[PathBuf], present: &[PathBuf]) -> Result<ExitCode, CliError> {
    let mut out = std::io::stdout().lock();
    if a.json {
        writeln!(out, "{}", json!({"folder": folder, "built": built, "present": present}))?;
    } else {
        for path in built.iter().chain(present) {
            writeln!(out, "{}", path.display())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn list(a: &ListArgs) -> Result<ExitCode, CliError> {
    let folder = ModuleFolder::open(&folder(a.dir.as_ref())?)?;
    let checked = |m: &Entry| a.check.then(|| folder.try_module(m, None));
    let faults: Vec<_> = folder.modules().iter().map(|m| checked(m).and_then(Result::err)).collect();
    let opened = |e: &ExtensionEntry| a.check.then(|| try_extension(&folder, e)).and_then(Result::err);
    let extensions: Vec<_> = folder.extensions().iter().map(opened).collect();
    let compiled = triton::Listed::of(folder.path(), a.check)?;
    let mut out = std::io::stdout().lock();
    if a.json {
        let modules = folder.modules().iter().zip(&faults).map(|(m, fault)| {
            let mut of = json!(m);
            if a.check {
                of["fault"] = json!(fault.as_ref().map(ToString::to_string));
            }
            of
        });
        let fetched = folder.extensions().iter().zip(&extensions).map(|(e, fault)| {
            let mut of = json!(e);
            if a.check {
                of["fault"] = json!(fault.as_ref().map(ToString::to_string));
            }
            of
        });
        let (modules, fetched): (Vec<_>, Vec<_>) = (modules.collect(), fetched.collect());
        writeln!(
            out,
            "{}",
            json!({
                "folder": folder.path(), "modules": modules, "extensions": fetched, "triton": compiled.json(),
            })
        )?;
    } else if folder.modules().is_empty() && folder.extensions().is_empty() && compiled.is_empty() {
        writeln!(
            out,
            "no modules in {}; headway kernels build --help and headway kernels fetch --help say how to get some",
            folder.path().display()
        )?;
    } else {
        writeln!(out, "{}", folder.path().display())?;
        if !folder.modules().is_empty() {
            writeln!(out, "{}", table(folder.modules()).trim_fmt())?;
        }
        if !folder.extensions().is_empty() {
            writeln!(out, "{}", extension_table(folder.extensions()).trim_fmt())?;
        }
        if !compiled.is_empty() {
            writeln!(out, "{}", compiled.table().trim_fmt())?;
        }
        compiled.faults().try_for_each(|fault| writeln!(out, "{fault}"))?;
        faults.iter().flatten().try_for_each(|fault| writeln!(out, "{fault}"))?;
        extensions.iter().flatten().try_for_each(|fault| writeln!(out, "{fault}"))?;
    }
    let fault = faults.iter().any(Option::is_some)
        || extensions.iter().any(Option::is_some)
        || compiled.faults().next().is_some();
    Ok(if fault { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn extension_table(extensions: &[ExtensionEntry]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["EXTENSION", "VLLM", "BYTES", "FILE"]);
    for e in extensions {
        table.add_row([e.extension.name(), &e.vllm, &e.bytes.to_string(), &e.file]);
    }
    table
}

fn table(modules: &[Entry]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["KIND", "DTYPE", "HEAD SIZE", "FORM", "ARCH", "FLASHINFER", "NVCC", "BYTES", "FILE"]);
    for m in modules {
        let form: Vec<_> = [(m.sliding_window, "window"), (m.soft_cap, "soft cap")]
            .iter()
            .filter(|f| f.0)
            .map(|f| f.1)
            .collect();
        let form = if form.is_empty() { "plain".into() } else { form.join(", ") };
        let (kind, size, bytes) = (m.kind.name(), m.head_size.to_string(), m.bytes.to_string());
        table.add_row([kind, &m.dtype, &size, &form, &m.arch, &m.flashinfer, &m.nvcc, &bytes, &m.file]);
    }
    table
}
