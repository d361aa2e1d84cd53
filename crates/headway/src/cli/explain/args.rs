//! What can be typed after `headway explain`.

use super::super::{CliError, args::EngineArgs, parse};
use clap::{Args, builder::BoolishValueParser};
use headway_attention::Registry;
use headway_engine::{explain::ExplainOptions, options::EngineOptions};

/// `headway explain`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "\
Exit code: 0 it starts, 1 it fails for another reason, 3 no backend is valid for some layer.

Examples:
  headway explain ./config.json --engine vllm --device h100
  headway explain ./config.json --engine vllm --device b200 --kv-cache-dtype fp8 --speculative-tokens 3
  headway explain ./config.json --engine vllm --compare h100,b200
  headway explain ./config.json --engine vllm --compare block-size=16,block-size=64+graph-mode=FULL
  headway explain model.gguf --json")]
pub struct ExplainArgs {
    /// A folder, a config.json, a GGUF file, or a name or hub id whose files lie in the cache. Nothing is
    /// fetched. [default: --model]
    #[arg(value_name = "MODEL")]
    pub subject: Option<String>,
    /// Whose backends: headway, vllm, or vllm:VERSION.
    #[arg(long = "engine", env = "HEADWAY_ENGINE", value_name = "ENGINE", default_value = "headway")]
    pub of: String,
    /// Compilation in pieces: on or off (vllm). [default: on]
    #[arg(long, value_name = "on|off", value_parser = BoolishValueParser::new(), hide_possible_values = true)]
    pub compilation: Option<bool>,
    /// Prefill context-parallel ranks (vllm). [default: 1]
    #[arg(long, value_name = "N", value_parser = parse::at_least_one)]
    pub pcp: Option<usize>,
    /// A KV connector transfers the cache (vllm).
    #[arg(long)]
    pub kv_connector: bool,
    /// Memory of each device: bytes, or a number with KiB, MiB or GiB. [default: what the device's name says]
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub memory: Option<u64>,
    /// Two devices or two option sets side by side: A,B, each a device or OPTION=VALUE[+OPTION=VALUE…].
    #[arg(long, value_name = "A,B")]
    pub compare: Option<String>,
    /// One JSON object, in the schema of the start-up report.
    #[arg(long)]
    pub json: bool,
    /// The option set of the engine. --device also takes sm70 … sm121 and product names.
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl ExplainArgs {
    /// The model asked about.
    pub fn model(&self) -> &str {
        self.subject.as_deref().unwrap_or(&self.engine.model)
    }

    /// As the engine takes them.
    pub fn options(&self, registry: Registry) -> Result<ExplainOptions, CliError> {
        let engine: EngineOptions = self.engine.options(registry)?;
        Ok(ExplainOptions {
            engine,
            compilation: self.compilation,
            prefill_context_parallel: self.pcp,
            kv_connector: self.kv_connector,
            memory: self.memory,
        })
    }
}
