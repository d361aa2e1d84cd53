//! `headway pull NAME`.

use super::{CliError, args::PullArgs};
use headway_engine::sources::{self, FetchOptions, ModelSpec, TerminalProgress};
use serde_json::json;
use std::{io::Write, process::ExitCode};

/// Runs the command.
pub fn run(args: &PullArgs) -> Result<ExitCode, CliError> {
    let spec = ModelSpec::parse(&args.name)?;
    let r = sources::pull(&spec, &FetchOptions::from_env()?, &TerminalProgress::new())?;
    let files = r.files.iter().map(|f| json!({"path": f.path, "bytes": f.bytes, "sha256": f.sha256}));
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(
            out,
            "{}",
            json!({"name": r.name, "path": r.path, "source": r.source.to_string(), "bytes": r.bytes(), "files": files.collect::<Vec<_>>()})
        )?;
    } else {
        writeln!(out, "{} from {}: {} bytes in {}", r.name, r.source, r.bytes(), r.path.display())?;
        for f in &r.files {
            writeln!(out, "  {}  {}", f.sha256.as_deref().unwrap_or("-"), f.path.display())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
