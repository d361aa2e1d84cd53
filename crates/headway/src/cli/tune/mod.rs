//! `headway tune`: which backend, block size and instruction set are quickest for a model's own layers on a device,
//! measured and kept.

mod measure;
mod regimes;
mod text;

use super::{
    CliError,
    args::{EngineArgs, profile_of_environment},
    parse, session,
};
use clap::Args;
use headway_attention::Registry;
use headway_engine::{
    runner::{StartupError, devices},
    tuning::{LayerProfile, Profile, Question, Setting, TUNED, Weights, now},
};
use serde_json::json;
use std::{io::Write, process::ExitCode};

/// `headway tune`.
#[derive(Args, Debug)]
#[command(after_help = "\
Every backend that takes a layer is timed on batches of decodes, on prompts, and on both, layer by layer, no weights \
loaded; on the CPU in each instruction set and block size too.

A backend's score is the weighted geometric mean of its times, each over the quickest backend's for that batch; the \
least wins, and what would be taken anyway stays unless another is 2 % better.

All figures are kept in the profile, which holds for this machine, these versions, and layers of this shape, whatever \
the model is called.

Examples:
  headway tune --model ./SmolLM2-135M-Instruct
  headway generate --model ./SmolLM2-135M-Instruct --attention-backend tuned \"Once upon a time\"
  headway tune --model ./config.json --device cuda:0 --json > figures.json
  headway tune --model ./config.json --batches 1,4 --contexts 4096 --prompts 2048 --weights decode=1
  headway tune --model ./model.gguf --block-size 32 --profile ./here.json
  headway explain ./SmolLM2-135M-Instruct --attention-backend tuned")]
pub struct TuneArgs {
    /// Requests of the decode batches, separated by commas. [default: 1,8,32; on CUDA 1,8,32,128]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = parse::requests)]
    batches: Vec<usize>,
    /// Tokens that each of these requests has, separated by commas. [default: 512,2048; on CUDA 1024,8192]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = parse::tokens)]
    contexts: Vec<usize>,
    /// Tokens of the prompts, separated by commas. [default: 256,1024; on CUDA 1024,4096]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = parse::tokens)]
    prompts: Vec<usize>,
    /// What decodes, prompts and batches of both count.
    #[arg(long, value_name = "CLASS=NUMBER", default_value = "decode=2,prefill=1,mixed=1")]
    weights: Weights,
    /// Block sizes to try, separated by commas. [default: 16,32,64,128; on CUDA what each backend prefers]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse::block, conflicts_with = "block_size")]
    block_sizes: Vec<usize>,
    /// Instruction sets of the CPU to try for attention, separated by commas. [default: all of this machine]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    instruction_sets: Vec<String>,
    /// Samples of each time.
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = parse::repetitions)]
    repetitions: usize,
    /// One JSON object: the profile's file, the profile, and what each layer's choice can't be told from.
    #[arg(long)]
    json: bool,
    /// The engine; --profile is the file that is written.
    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: &TuneArgs, registry: Registry) -> Result<ExitCode, CliError> {
    let mut options = args.engine.options(registry)?;
    options.profile = options.profile.or_else(profile_of_environment);
    if let Some(name) = options.attention_backend.as_ref().filter(|n| !n.eq_ignore_ascii_case(TUNED)) {
        return Err(CliError::Startup(StartupError::Option {
            option: "--attention-backend",
            value: name.clone(),
            why: "tune measures all that fit; leave it out".into(),
        }));
    }
    if let Some(value) = args.engine.backend_per_kind.clone().filter(|_| !options.backend_per_kind.is_empty())
    {
        return Err(CliError::Startup(StartupError::Option {
            option: "--backend-per-kind",
            value,
            why: "tune measures all that fit; leave it out, and give it with --attention-backend tuned"
                .into(),
        }));
    }
    if let Some((name, _)) = options.backend_config.iter().next() {
        let why =
            format!("tune measures {name} as it is without a [backend.{name}] table; leave the file out");
        let value = args.engine.config.as_ref().map(|p| p.display().to_string()).unwrap_or_default();
        return Err(CliError::Startup(StartupError::Option { option: "--config", value, why }));
    }
    let path = session::find(&args.engine.model)?;
    let mut device = devices::open(&options)?;
    let question = Question::of(&path, &options, &device)?;
    // Before minutes of measuring: whether the answer can be kept.
    let file = question.path(&options)?;
    Profile::check_place(&file).map_err(StartupError::from)?;
    let measured = measure::run(args, &options, &question, &mut device)?;
    let mut profile = Profile::new(&question.here, now(), args.weights, measured.layers);
    profile.kv_layout = question.kv_layout.clone();
    profile.setting = measure::chosen(&mut profile.layers, &args.weights)?;
    profile.write(&file).map_err(StartupError::from)?;
    let mut out = std::io::stdout().lock();
    match args.json {
        true => {
            let within: Vec<_> = profile.layers.iter().map(|l| within_spread(l, &profile.setting)).collect();
            writeln!(out, "{}", json!({ "file": file, "profile": profile, "within_spread": within }))?;
        }
        false => text::print(&mut out, &question, &profile, &measured.ceilings, &file)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The candidates that a layer's choice can't be told from.
fn within_spread(layer: &LayerProfile, setting: &Setting) -> Vec<serde_json::Value> {
    let all = layer.within_spread(setting).into_iter();
    all.map(|c| {
        json!({
            "backend": c.backend,
            "instruction_set": c.setting.instruction_set,
            "block_size": c.block_size,
        })
    })
    .collect()
}
