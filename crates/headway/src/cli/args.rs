//! What can be typed: commands and the option set that they share. Each shared option has an
//! environment twin `HEADWAY_…`.

use super::error::CliError;
use clap::{Args, Parser, Subcommand};
use headway_engine::options::{DTypeOption, EngineOptions, LoadFormat};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  headway generate \"The capital of France is\"
  headway generate --chat \"Write a haiku about rain\" --max-tokens 60
  headway generate --model gemma3-270m --json --logprobs 5 \"2 + 2 =\"
  headway chat
  headway backends";

/// Attention backends for LLM serving in Rust, with the engine that makes them useful.
#[derive(Parser, Debug)]
#[command(name = "headway", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Continue a prompt, or answer it with --chat.
    Generate(Box<GenerateArgs>),
    /// Talk to a model in the terminal.
    Chat(Box<ChatArgs>),
    /// The attention backends of this build and what each supports.
    Backends(BackendsArgs),
    /// Fetch a model and say where it lies.
    Pull(PullArgs),
}

/// `headway generate`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  headway generate \"The capital of France is\"
  headway generate --model ./SmolLM2-135M-Instruct --temperature 0.7 --seed 1 \"Once upon a time\"
  headway generate --prompt-ids 1,2,3 --ignore-eos --max-tokens 16 --json
  headway generate --batch prompts.jsonl --json
      where each line is like {\"prompt\": \"Hello\", \"max_tokens\": 8}")]
pub struct GenerateArgs {
    /// The prompt; without one, standard input is read if it is not a terminal.
    pub prompt: Option<String>,
    /// Token ids that go in as they are, separated by commas.
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["prompt", "prompt_file", "chat"])]
    pub prompt_ids: Option<Vec<u32>>,
    /// A UTF-8 file with the prompt.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    /// Put the prompt into the model's chat template, as the user's message.
    #[arg(long)]
    pub chat: bool,
    /// A JSON object a line: `prompt` or `prompt_ids`, and any sampling option. All run together; results
    /// come in input order.
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["prompt", "prompt_ids", "prompt_file"])]
    pub batch: Option<PathBuf>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Report the N most likely tokens at each position, the prompt's last among them.
    #[arg(long, value_name = "N")]
    pub logprobs: Option<usize>,
    /// One JSON object a request on standard output.
    #[arg(long)]
    pub json: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `headway chat`.
#[derive(Args, Debug)]
#[command(after_help = "\
Ctrl-C stops the answer; Ctrl-D or /exit ends. /clear forgets the conversation, /help lists commands.")]
pub struct ChatArgs {
    /// Instructions for the model.
    #[arg(long)]
    pub system: Option<String>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `headway backends`.
#[derive(Args, Debug)]
pub struct BackendsArgs {
    /// One JSON object a backend: the whole rule book.
    #[arg(long)]
    pub json: bool,
    /// Say more: instruction sets, features.
    #[arg(long, short)]
    pub verbose: bool,
}

/// `headway pull`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  headway pull smollm2-135m-instruct\n  headway pull gemma3-270m\n  headway pull HuggingFaceTB/SmolLM2-360M-Instruct"
)]
pub struct PullArgs {
    /// A known name, or a repository on the Hugging Face hub.
    pub name: String,
    /// One JSON object.
    #[arg(long)]
    pub json: bool,
}

/// How tokens are chosen and when an answer ends.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// The most tokens to generate.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// 0 takes the most likely token each time. [generate: 0, chat: 0.6]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all.
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the most likely tokens that together have this probability.
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep tokens at least this fraction as likely as the most likely one.
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Above 1 makes tokens that occurred less likely.
    #[arg(long, value_name = "R")]
    pub repetition_penalty: Option<f32>,
    /// Seed of the random stream.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Text that ends the answer; can be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on after the model's end-of-sequence token.
    #[arg(long)]
    pub ignore_eos: bool,
}

/// The option set that every command with an engine shares.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// A path (folder, .gguf, .safetensors), a known name, or a hub id.
    #[arg(long, env = "HEADWAY_MODEL", default_value = headway_engine::sources::DEFAULT_MODEL)]
    pub model: String,
    /// cpu, cuda or cuda:N.
    #[arg(long, env = "HEADWAY_DEVICE")]
    pub device: Option<String>,
    /// auto, float32, bfloat16 or float16. auto is the file's type; block-quantised weights stay quantised
    /// unless this is float32.
    #[arg(long, env = "HEADWAY_DTYPE", value_parser = |s: &str| s.parse::<DTypeOption>(), default_value = "auto")]
    pub dtype: DTypeOption,
    /// auto, float32, bfloat16, float16, fp8_e4m3 or fp8_e5m2.
    #[arg(long, env = "HEADWAY_KV_CACHE_DTYPE")]
    pub kv_cache_dtype: Option<String>,
    /// Tokens in a block of the KV cache.
    #[arg(long, env = "HEADWAY_BLOCK_SIZE", value_name = "N")]
    pub block_size: Option<usize>,
    /// Order of the cache's axes: NHD, HND, or letters of L, B, H, N, C.
    #[arg(long, env = "HEADWAY_KV_LAYOUT", value_name = "LAYOUT")]
    pub kv_layout: Option<String>,
    /// The backend of every layer, by name; an error where it doesn't fit.
    #[arg(long, env = "HEADWAY_ATTENTION_BACKEND", value_name = "NAME")]
    pub attention_backend: Option<String>,
    /// The backend of one kind of layer, as kind=NAME,…
    #[arg(long, env = "HEADWAY_BACKEND_PER_KIND", value_name = "KIND=NAME")]
    pub backend_per_kind: Option<String>,
    /// NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.
    #[arg(long, env = "HEADWAY_GRAPH_MODE", value_name = "MODE")]
    pub graph_mode: Option<String>,
    /// The same answer, bit for bit, whatever else runs beside it.
    #[arg(long, env = "HEADWAY_BATCH_INVARIANT", num_args = 0..=1, default_missing_value = "true", default_value = "false", require_equals = true)]
    pub batch_invariant: bool,
    /// Micro-batches of a step.
    #[arg(long, env = "HEADWAY_MICRO_BATCHES", value_name = "N")]
    pub micro_batches: Option<usize>,
    /// Tokens to draft in a step.
    #[arg(long, env = "HEADWAY_SPECULATIVE_TOKENS", value_name = "N")]
    pub speculative_tokens: Option<usize>,
    /// The most tokens of a request, prompt and answer.
    #[arg(long, env = "HEADWAY_MAX_MODEL_LEN", value_name = "N")]
    pub max_model_len: Option<usize>,
    /// The most requests in a step.
    #[arg(long, env = "HEADWAY_MAX_NUM_SEQS", value_name = "N")]
    pub max_num_seqs: Option<usize>,
    /// The most new tokens in a step.
    #[arg(long, env = "HEADWAY_MAX_NUM_BATCHED_TOKENS", value_name = "N")]
    pub max_num_batched_tokens: Option<usize>,
    /// Memory for the KV cache: bytes, or a number with KiB, MiB or GiB.
    #[arg(long, env = "HEADWAY_KV_CACHE_MEMORY", value_name = "SIZE", value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Threads of the CPU kernels.
    #[arg(long, env = "HEADWAY_THREADS", value_name = "N")]
    pub threads: Option<usize>,
    /// Tensor-parallel ranks.
    #[arg(long, env = "HEADWAY_TP", value_name = "N")]
    pub tp: Option<usize>,
    /// Decode context-parallel ranks.
    #[arg(long, env = "HEADWAY_DCP", value_name = "N")]
    pub dcp: Option<usize>,
    /// Compute every prompt anew instead of reusing cached prefixes.
    #[arg(long, env = "HEADWAY_NO_PREFIX_CACHING", num_args = 0..=1, default_missing_value = "true", default_value = "false", require_equals = true)]
    pub no_prefix_caching: bool,
    /// auto, or dummy for seeded random weights of the config's shapes.
    #[arg(long, env = "HEADWAY_LOAD_FORMAT", default_value = "auto", value_parser = ["auto", "dummy"])]
    pub load_format: String,
    /// A TOML file with options of this list and [backend.NAME] tables.
    #[arg(long, env = "HEADWAY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what was decided at start-up.
    #[arg(long, short)]
    pub verbose: bool,
}

impl EngineArgs {
    /// As the engine takes them.
    pub fn options(&self) -> Result<EngineOptions, CliError> {
        let per_kind = self.backend_per_kind.as_deref().unwrap_or("");
        Ok(EngineOptions {
            device: self.device.clone(),
            dtype: self.dtype,
            kv_cache_dtype: self.kv_cache_dtype.clone(),
            block_size: self.block_size,
            kv_layout: self.kv_layout.clone(),
            attention_backend: self.attention_backend.clone(),
            backend_per_kind: headway_attention::BackendRequest::parse_per_kind(per_kind)?,
            graph_mode: self.graph_mode.clone(),
            batch_invariant: self.batch_invariant,
            micro_batches: self.micro_batches,
            speculative_tokens: self.speculative_tokens,
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            kv_cache_memory: self.kv_cache_memory,
            threads: self.threads,
            tensor_parallel: self.tp,
            decode_context_parallel: self.dcp,
            no_prefix_caching: self.no_prefix_caching,
            load_format: if self.load_format == "dummy" { LoadFormat::Dummy } else { LoadFormat::Auto },
            backend_config: super::config::backend_tables(self.config.as_deref())?,
            registry: None,
        })
    }
}

/// Bytes, or a number with a unit.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        unit => return Err(format!("unknown unit {unit}; give bytes, or a number with KiB, MiB or GiB")),
    };
    let number: f64 = digits.parse().map_err(|_| format!("{digits:?} is not a number"))?;
    let bytes = number * factor as f64;
    if bytes.is_finite() && (1.0..1e15).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err("a size above 0 is needed".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_size("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_size("4096"), Ok(4096));
        assert!(parse_size("0").is_err() && parse_size("2 parsecs").is_err() && parse_size("-1").is_err());
    }
}
