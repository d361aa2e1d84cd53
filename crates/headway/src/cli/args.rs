//! What can be typed: commands and the option set that they share. Each shared option has an
//! environment twin `HEADWAY_…`.

use super::{error::CliError, explain::ExplainArgs, parse};
use clap::{Args, Parser, Subcommand, builder::BoolishValueParser};
use headway_attention::Registry;
use headway_engine::{
    options::{DTypeOption, EngineOptions, LoadFormat},
    tuning,
};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  headway generate \"The capital of France is\"
  headway generate --chat \"Write a haiku about rain\" --max-tokens 60
  headway generate --model gemma3-270m --json --logprobs 5 \"2 + 2 =\"
  headway chat
  headway serve --port 8000
  headway embed --model ./all-MiniLM-L6-v2 \"a text\"
  headway explain ./config.json --engine vllm --device h100
  headway tune --model ./Llama-3.1-8B --device cuda:0
  headway backends

Every option of the engine has an environment twin (--block-size is HEADWAY_BLOCK_SIZE). Besides:
  HEADWAY_CACHE_DIR     folder of fetched models and of profiles [default: headway in the user's cache
                        folder]
  HEADWAY_PROFILE       file of headway tune's figures, for tune and --attention-backend tuned
  HEADWAY_KERNELS_DIR   folder of kernel modules [default: headway/modules in the user's cache folder]
  HEADWAY_HUB_TIMEOUT   seconds that the Hugging Face hub may stay silent
  HEADWAY_CPU_ISA       lowers the CPU's instruction set: portable, avx2, avx512,
                        avx512bf16, amx
  HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE mean what they mean to Hugging Face's tools";

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
    /// Turn texts into vectors, with an encoder.
    Embed(Box<EmbedArgs>),
    /// Talk to a model in the terminal.
    Chat(Box<ChatArgs>),
    /// Answer requests over HTTP, as the OpenAI API has them; with a status page.
    Serve(Box<super::serve::ServeArgs>),
    /// The attention backends of this build and what each supports.
    Backends(BackendsArgs),
    /// Which backend each layer of a model gets on a device, why not the others, and what comes out.
    Explain(Box<ExplainArgs>),
    /// Measure attention calls, a step's metadata, or a whole model, beside what the machine does at most.
    Bench(Box<super::bench::BenchArgs>),
    /// Measure the attention backends on a model's own layers, and keep which is quickest for --attention-backend tuned.
    Tune(Box<super::tune::TuneArgs>),
    /// Build or fetch attention kernels (headway's own in Triton, FlashInfer's, vLLM's), and list them.
    Kernels(super::kernels::KernelsArgs),
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
    /// The text to continue; without it, standard input is read where that is no terminal.
    pub prompt: Option<String>,
    /// Token ids that go in as they are, separated by commas; no BOS is added.
    #[arg(long, value_name = "IDS", value_delimiter = ',', allow_hyphen_values = true, value_parser = parse::token_id, conflicts_with_all = ["prompt", "prompt_file", "chat"])]
    pub prompt_ids: Option<Vec<u32>>,
    /// A UTF-8 file with the prompt, which goes in as it is, with a newline at its end if it has one.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    /// Put the prompt into the model's chat template, as the user's message.
    #[arg(long)]
    pub chat: bool,
    /// Many requests: a JSON object a line with `prompt` or `prompt_ids`, and any sampling option; and
    /// `bidirectional_ranges` ([[from, to], ..], prompt positions that see each other both ways) for models
    /// that are made for it. All run together; answers come in input order.
    #[arg(long, value_name = "FILE.jsonl", conflicts_with_all = ["prompt", "prompt_ids", "prompt_file"])]
    pub batch: Option<PathBuf>,
    /// One JSON object a request on standard output, with token ids and timings; with -v, one about the
    /// start-up first.
    #[arg(long)]
    pub json: bool,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Report the N most likely tokens at each position, the prompt's last among them.
    #[arg(long, value_name = "N", value_parser = parse::whole::<usize>)]
    pub logprobs: Option<usize>,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `headway embed`.
#[derive(Args, Debug)]
#[command(after_help = "\
One JSON object a line: {\"index\", \"tokens\", \"embedding\"}.

Examples:
  headway embed --model ./all-MiniLM-L6-v2 \"a first text\" \"a second\"
  headway embed --model ./bge-small-en-v1.5 --file texts.txt > vectors.jsonl")]
pub struct EmbedArgs {
    /// The texts.
    #[arg(conflicts_with_all = ["file", "prompt_ids"])]
    pub texts: Vec<String>,
    /// A UTF-8 file with a text a line.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt_ids")]
    pub file: Option<PathBuf>,
    /// Token ids of one input, separated by commas; nothing is added.
    #[arg(long, value_name = "IDS", value_delimiter = ',', allow_hyphen_values = true, value_parser = parse::token_id)]
    pub prompt_ids: Option<Vec<u32>>,
    /// How the tokens' states become one vector [default: what the model's 1_Pooling/config.json says, else mean].
    #[arg(long, value_name = "HOW")]
    pub pooling: Option<super::embed::PoolingArg>,
    /// Leave vectors as long as they come; else they get length 1.
    #[arg(long)]
    pub no_normalize: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `headway chat`.
#[derive(Args, Debug)]
#[command(after_help = "\
Ctrl-C stops the answer; Ctrl-D or /exit ends. /clear forgets the conversation, /help lists commands.

Examples:
  headway chat
  headway chat --system \"Answer in one sentence.\" --temperature 0
  headway chat --model ./Qwen2.5-0.5B-Instruct")]
pub struct ChatArgs {
    /// Instructions for the model, before the conversation.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
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
#[command(
    after_help = "Examples:\n  headway backends -v\n  headway backends --json | jq .name\n\nTwo for keys and values on one \
                      device serve as one by the name A+B: A for decodes, B for prefills."
)]
pub struct BackendsArgs {
    /// One JSON object a backend: its whole rule book.
    #[arg(long)]
    pub json: bool,
    /// Say more: features of each backend, and the instruction set in use.
    #[arg(long, short)]
    pub verbose: bool,
}

/// `headway pull`.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  headway pull smollm2-135m-instruct\n  headway pull gemma3-270m\n  headway pull HuggingFaceTB/SmolLM2-360M-Instruct"
)]
pub struct PullArgs {
    /// A known name (smollm2-135m-instruct, gemma3-270m, qwen2.5-coder-0.5b-instruct), or a repository on
    /// the Hugging Face hub.
    pub name: String,
    /// One JSON object: name, path, source, bytes, files.
    #[arg(long)]
    pub json: bool,
}

/// How tokens are chosen and when an answer ends.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// The most tokens to generate. [default: generate 128, chat as many as
    /// there is room for]
    #[arg(long, value_name = "N", value_parser = parse::at_least_one)]
    pub max_tokens: Option<usize>,
    /// The fewest tokens before an answer may end by itself. [default: 0]
    #[arg(long, value_name = "N", value_parser = parse::whole::<usize>)]
    pub min_tokens: Option<usize>,
    /// Higher is more varied; 0 takes the most likely token each time. [default: generate 0, chat 0.6]
    #[arg(long, value_name = "T", value_parser = parse::number)]
    pub temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all. [default: 0]
    #[arg(long, value_name = "K", value_parser = parse::whole::<usize>)]
    pub top_k: Option<usize>,
    /// Keep the most likely tokens that together have this probability; 1 keeps all. [default: generate 1,
    /// chat 0.95]
    #[arg(long, value_name = "P", value_parser = parse::number)]
    pub top_p: Option<f32>,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all. [default: 0]
    #[arg(long, value_name = "P", value_parser = parse::number)]
    pub min_p: Option<f32>,
    /// Above 1 makes tokens that occurred already less likely. [default: 1]
    #[arg(long, value_name = "R", value_parser = parse::number)]
    pub repetition_penalty: Option<f32>,
    /// Above 0 makes tokens that the answer has already less likely, below 0 more; -2 to 2. [default: 0]
    #[arg(long, value_name = "P", value_parser = parse::number)]
    pub presence_penalty: Option<f32>,
    /// The same for each time that the answer has them; -2 to 2. [default: 0]
    #[arg(long, value_name = "P", value_parser = parse::number)]
    pub frequency_penalty: Option<f32>,
    /// Adds to a token's logit; -100 all but rules it out, 100 makes it come. Several are separated by commas.
    #[arg(long, value_name = "ID=BIAS", value_delimiter = ',', value_parser = parse::bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the random stream: the same seed, the same answer. [default: a new one each time]
    #[arg(long, value_name = "N", value_parser = parse::whole::<u64>)]
    pub seed: Option<u64>,
    /// Text that ends the answer; can be given several times.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on after the model's end-of-sequence token.
    #[arg(long)]
    pub ignore_eos: bool,
}

/// The option set that every command with an engine shares.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// A path (folder, .gguf, .safetensors), a known name (smollm2-135m-instruct, gemma3-270m,
    /// qwen2.5-coder-0.5b-instruct), or a hub id (org/name).
    #[arg(long, env = "HEADWAY_MODEL", default_value = headway_engine::sources::DEFAULT_MODEL)]
    pub model: String,
    /// cpu, cuda or cuda:N. [default: cpu]
    #[arg(long, env = "HEADWAY_DEVICE")]
    pub device: Option<String>,
    /// auto, float32, bfloat16 or float16. auto is the file's type; block-quantised weights stay quantised
    /// unless this is float32.
    #[arg(long, env = "HEADWAY_DTYPE", value_name = "TYPE", value_parser = |s: &str| s.parse::<DTypeOption>(), default_value = "auto")]
    pub dtype: DTypeOption,
    /// auto, float32, bfloat16, float16, fp8_e4m3 or fp8_e5m2. auto is the model's type. [default: auto]
    #[arg(long, value_name = "TYPE", env = "HEADWAY_KV_CACHE_DTYPE")]
    pub kv_cache_dtype: Option<String>,
    /// Tokens in a block of the KV cache. [default: what the backend prefers]
    #[arg(long, env = "HEADWAY_BLOCK_SIZE", value_name = "N", value_parser = parse::at_least_one)]
    pub block_size: Option<usize>,
    /// Order of the cache's axes: NHD, HND, or letters of L, B, H, N, C. [default: the first that every
    /// backend reads]
    #[arg(long, env = "HEADWAY_KV_LAYOUT", value_name = "LAYOUT")]
    pub kv_layout: Option<String>,
    /// The backend of every layer, by name (see headway backends), an error where it doesn't fit. A+B is made of two: A
    /// computes the decodes of a step, B the rest. tuned is what headway tune measured to be quickest. [default: the first
    /// that fits]
    #[arg(long, env = "HEADWAY_ATTENTION_BACKEND", value_name = "NAME")]
    pub attention_backend: Option<String>,
    /// The file of headway tune's figures. [default: HEADWAY_PROFILE, or by device and layers, in headway/profiles in
    /// the user's cache folder]
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// The backend of one kind of layer, as KIND=NAME,…; kinds: full, sliding_window, mla, state_space,
    /// encoder, cross.
    #[arg(long, env = "HEADWAY_BACKEND_PER_KIND", value_name = "KIND=NAME")]
    pub backend_per_kind: Option<String>,
    /// CUDA graphs: NONE; FULL, a graph for a whole step; PIECEWISE, graphs between the attention calls; FULL_DECODE_ONLY
    /// or FULL_AND_PIECEWISE, whole for decode steps and none or pieces for others. [default: FULL_DECODE_ONLY on CUDA,
    /// NONE on a CPU]
    #[arg(long, env = "HEADWAY_GRAPH_MODE", value_name = "MODE")]
    pub graph_mode: Option<String>,
    /// The same answer, bit for bit, whatever else runs beside it.
    #[arg(long, env = "HEADWAY_BATCH_INVARIANT", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value = "false", hide_possible_values = true, require_equals = true, value_parser = BoolishValueParser::new())]
    pub batch_invariant: bool,
    /// Cut steps into N micro-batches, each with builders of its own; smaller steps run whole. [default: 1]
    #[arg(long, env = "HEADWAY_MICRO_BATCHES", value_name = "N", value_parser = parse::at_least_one)]
    pub micro_batches: Option<usize>,
    /// Tokens from which on a step of decodes is cut into micro-batches. [default: 32]
    #[arg(long, env = "HEADWAY_MICRO_BATCH_DECODE_TOKENS", value_name = "N", value_parser = parse::at_least_one)]
    pub micro_batch_decode_tokens: Option<usize>,
    /// Tokens from which on any other step is cut into micro-batches. [default: 512]
    #[arg(long, env = "HEADWAY_MICRO_BATCH_PREFILL_TOKENS", value_name = "N", value_parser = parse::at_least_one)]
    pub micro_batch_prefill_tokens: Option<usize>,
    /// Where a model's last layers read the caches of earlier ones (Gemma 4), compute in them only the tokens whose
    /// logits are wanted: a prompt's last. The answers stay the same.
    #[arg(long, env = "HEADWAY_KV_SHARING_FAST_PREFILL", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value = "false", hide_possible_values = true, require_equals = true, value_parser = BoolishValueParser::new())]
    pub kv_sharing_fast_prefill: bool,
    /// The most tokens to draft for a request in a step: what followed when its last tokens came before.
    /// The answers stay the same, and come sooner where they repeat the prompt or themselves; with latent attention
    /// (MLA) over a rounded cache that holds with --batch-invariant or --kv-cache-dtype float32. [default: 0]
    #[arg(long, env = "HEADWAY_SPECULATIVE_TOKENS", value_name = "N", value_parser = parse::whole::<usize>)]
    pub speculative_tokens: Option<usize>,
    /// The fewest last tokens that must have come before for a draft. [default: 3]
    #[arg(long, env = "HEADWAY_PROMPT_LOOKUP_MIN", value_name = "N", value_parser = parse::at_least_one)]
    pub prompt_lookup_min: Option<usize>,
    /// The most last tokens that are compared: the longest match is taken. [default: 8]
    #[arg(long, env = "HEADWAY_PROMPT_LOOKUP_MAX", value_name = "N", value_parser = parse::at_least_one)]
    pub prompt_lookup_max: Option<usize>,
    /// The most tokens of a request, prompt and answer. [default: the model's own]
    #[arg(long, env = "HEADWAY_MAX_MODEL_LEN", value_name = "N", value_parser = parse::at_least_one)]
    pub max_model_len: Option<usize>,
    /// The most requests in a step. [default: 64]
    #[arg(long, env = "HEADWAY_MAX_NUM_SEQS", value_name = "N", value_parser = parse::at_least_one)]
    pub max_num_seqs: Option<usize>,
    /// The most new tokens in a step; longer prompts are computed in chunks. [default: 512]
    #[arg(long, env = "HEADWAY_MAX_NUM_BATCHED_TOKENS", value_name = "N", value_parser = parse::at_least_one)]
    pub max_num_batched_tokens: Option<usize>,
    /// Memory for the KV cache: bytes, or a number with KiB, MiB or GiB. [default: two fifths of what is
    /// free after the weights, and no more than can be used]
    #[arg(long, env = "HEADWAY_KV_CACHE_MEMORY", value_name = "SIZE", allow_hyphen_values = true, value_parser = parse::size)]
    pub kv_cache_memory: Option<u64>,
    /// Threads of the CPU kernels. [default: one a usable core]
    #[arg(long, env = "HEADWAY_THREADS", value_name = "N", value_parser = parse::at_least_one)]
    pub threads: Option<usize>,
    /// Tensor-parallel ranks. [default: 1]
    #[arg(long, env = "HEADWAY_TP", value_name = "N", value_parser = parse::at_least_one)]
    pub tp: Option<usize>,
    /// Decode context-parallel ranks. [default: 1]
    #[arg(long, env = "HEADWAY_DCP", value_name = "N", value_parser = parse::at_least_one)]
    pub dcp: Option<usize>,
    /// Compute every prompt anew instead of reusing cached prefixes.
    #[arg(long, env = "HEADWAY_NO_PREFIX_CACHING", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", default_value = "false", hide_possible_values = true, require_equals = true, value_parser = BoolishValueParser::new())]
    pub no_prefix_caching: bool,
    /// auto, or dummy for seeded random weights of the config's shapes.
    #[arg(long, env = "HEADWAY_LOAD_FORMAT", value_name = "FORMAT", default_value = "auto", hide_possible_values = true, value_parser = ["auto", "dummy"])]
    pub load_format: String,
    /// A TOML file with a [backend.NAME] table for each backend that takes settings of its own.
    #[arg(long, env = "HEADWAY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what was decided at start-up.
    #[arg(long, short)]
    pub verbose: bool,
}

/// Names the file of figures where `--profile` does not. No twin of that option: standing in the environment it asks for
/// nothing without `tuned`.
pub const PROFILE_VARIABLE: &str = "HEADWAY_PROFILE";

/// [`PROFILE_VARIABLE`].
pub fn profile_of_environment() -> Option<PathBuf> {
    std::env::var_os(PROFILE_VARIABLE).filter(|p| !p.is_empty()).map(PathBuf::from)
}

impl EngineArgs {
    /// `--load-format`.
    pub fn load_format(&self) -> LoadFormat {
        if self.load_format == "dummy" { LoadFormat::Dummy } else { LoadFormat::Auto }
    }

    /// As the engine takes them.
    pub fn options(&self, registry: Registry) -> Result<EngineOptions, CliError> {
        let per_kind = self.backend_per_kind.as_deref().unwrap_or("");
        Ok(EngineOptions {
            device: self.device.clone(),
            dtype: self.dtype,
            kv_cache_dtype: self.kv_cache_dtype.clone(),
            block_size: self.block_size,
            kv_layout: self.kv_layout.clone(),
            attention_backend: self.attention_backend.clone(),
            profile: self.profile.clone().or_else(|| {
                // Standing in the environment it asks for nothing; given as an option it does.
                tuning::is_asked(self.attention_backend.as_deref()).then(profile_of_environment).flatten()
            }),
            backend_per_kind: headway_attention::BackendRequest::parse_per_kind(per_kind)?,
            graph_mode: self.graph_mode.clone(),
            batch_invariant: self.batch_invariant,
            micro_batches: self.micro_batches,
            micro_batch_decode_tokens: self.micro_batch_decode_tokens,
            micro_batch_prefill_tokens: self.micro_batch_prefill_tokens,
            kv_sharing_fast_prefill: self.kv_sharing_fast_prefill,
            speculative_tokens: self.speculative_tokens,
            prompt_lookup_min: self.prompt_lookup_min,
            prompt_lookup_max: self.prompt_lookup_max,
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            kv_cache_memory: self.kv_cache_memory,
            threads: self.threads,
            tensor_parallel: self.tp,
            decode_context_parallel: self.dcp,
            no_prefix_caching: self.no_prefix_caching,
            load_format: self.load_format(),
            backend_config: super::config::backend_tables(self.config.as_deref(), &registry)?,
            registry: Some(registry),
        })
    }
}
