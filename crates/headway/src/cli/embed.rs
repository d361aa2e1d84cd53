//! `headway embed`: a vector for each input, a JSON object a line.

use super::{CliError, args::EmbedArgs, session};
use headway_attention::Registry;
use headway_engine::{
    engine::{EmbedError, EmbedOptions, Embedder},
    models::plan::Pooling,
};
use serde_json::json;
use std::{io::Write, path::Path, process::ExitCode};

/// `--pooling`.
#[derive(clap::ValueEnum, Clone, Copy, Debug)]
pub enum PoolingArg {
    /// The mean over all tokens.
    Mean,
    /// The first token's state.
    First,
    /// The last token's state.
    Last,
}

/// Runs the command. Standard output stays empty until every input has its vector.
pub fn run(args: EmbedArgs, registry: Registry) -> Result<ExitCode, CliError> {
    let texts = texts(&args)?;
    let pooling = args.pooling.map(|p| match p {
        PoolingArg::Mean => Pooling::Mean,
        PoolingArg::First => Pooling::First,
        PoolingArg::Last => Pooling::Last,
    });
    let embed = EmbedOptions { pooling, normalize: !args.no_normalize };
    let mut embedder = session::open_with(&args.engine, registry, |path, options, progress| {
        Embedder::open(path, options, embed, progress)
    })?;
    session::warnings(embedder.report());
    let inputs = match &args.prompt_ids {
        Some(ids) => vec![ids.clone()],
        None => texts.iter().map(|t| embedder.tokenize(t)).collect::<Result<Vec<_>, EmbedError>>()?,
    };
    let vectors = embedder.embed(&inputs)?;
    let mut out = std::io::stdout().lock();
    if args.engine.verbose {
        session::print_report(embedder.report());
    }
    for (index, (input, vector)) in inputs.iter().zip(vectors).enumerate() {
        writeln!(out, "{}", json!({"index": index, "tokens": input.len(), "embedding": vector}))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The texts of the command line, or the lines of a file.
fn texts(args: &EmbedArgs) -> Result<Vec<String>, CliError> {
    let texts = match &args.file {
        Some(file) => lines(file)?,
        None => args.texts.clone(),
    };
    if texts.is_empty() && args.prompt_ids.is_none() {
        let what =
            "no input; give texts, --file or --prompt-ids, as in: headway embed --model DIR \"a text\"";
        return Err(CliError::Usage(what.into()));
    }
    Ok(texts)
}

fn lines(file: &Path) -> Result<Vec<String>, CliError> {
    let text = std::fs::read_to_string(file).map_err(|e| CliError::File {
        path: file.to_owned(),
        why: format!("cannot be read: {e}; --file takes a UTF-8 file with a text a line"),
    })?;
    Ok(text.lines().map(str::to_owned).collect())
}
