//! `headway generate`: one prompt, streamed; or a batch.

use super::{
    CliError, args::GenerateArgs, batch, output::Answer, prompt::Prompt, sampling::in_room, session,
};
use headway_attention::Registry;
use headway_engine::{Engine, Event, GenerateRequest, LlmEngine, engine::Finished, sampling::SamplingParams};
use serde_json::json;
use std::{io::Write, process::ExitCode};

/// Runs the command.
pub fn run(args: GenerateArgs, registry: Registry) -> Result<ExitCode, CliError> {
    let params = args.sampling.params(args.logprobs);
    params.validate().map_err(headway_engine::engine::RequestError::from)?;
    if let Some(file) = &args.batch {
        let lines = batch::read(file)?;
        let engine = session::open(&args.engine, registry)?;
        report(&args, &engine, &mut std::io::stdout().lock())?;
        return batch::run(engine, lines, &args);
    }
    let prompt = Prompt::from_args(&args)?;
    let engine = session::open(&args.engine, registry)?;
    one(engine, prompt, params, &args)
}

/// One request. Standard output stays empty until it has been admitted.
fn one(
    mut engine: LlmEngine,
    prompt: Prompt,
    params: SamplingParams,
    args: &GenerateArgs,
) -> Result<ExitCode, CliError> {
    let prompt_ids = prompt.ids(&engine, args.chat)?;
    let mut answer = Answer { prompt_ids: prompt_ids.clone(), ..Answer::default() };
    let sampling = in_room(params, &engine, prompt_ids.len());
    engine.add(GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() })?;
    let mut out = std::io::stdout().lock();
    report(args, &engine, &mut out)?;
    let streamed = stream(&mut engine, &mut answer, !args.json, &mut out);
    // A failure after some text gets a line of its own.
    if !args.json && (streamed.is_ok() || !answer.text.is_empty()) {
        writeln!(out)?;
    }
    let finished = streamed?;
    if args.json {
        let object = answer.json(&engine, &finished, args.logprobs.is_some(), args.engine.verbose);
        writeln!(out, "{object}")?;
    } else {
        print_logprobs(&answer);
        if args.engine.verbose {
            print_timings(&finished);
            session::print_speculation(&engine, &finished);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// With -v: what was decided at start-up.
fn report(args: &GenerateArgs, engine: &LlmEngine, out: &mut impl Write) -> Result<(), CliError> {
    if args.engine.verbose && args.json {
        writeln!(out, "{}", json!({"startup": engine.report()}))?;
    } else if args.engine.verbose {
        session::print_report(engine.report());
    }
    Ok(())
}

/// Steps until the one request is done. With `show` its text is written as it comes, or its token ids
/// where the model has no tokenizer.
fn stream(
    engine: &mut LlmEngine,
    answer: &mut Answer,
    show: bool,
    out: &mut impl Write,
) -> Result<Finished, CliError> {
    let ids_only = engine.tokenizer().is_none();
    let mut events = vec![];
    loop {
        engine.step(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Token(_, token) => {
                    if show && ids_only {
                        write!(out, "{} ", token.token_id)?;
                    } else if show {
                        out.write_all(token.text.as_bytes())?;
                    }
                    out.flush()?;
                    answer.text.push_str(&token.text);
                    answer.logprobs.extend(token.logprobs);
                }
                Event::Finished(_, f) => return Ok(f),
                Event::Failed(_, e) => return Err(e.into()),
            }
        }
    }
}

pub(super) fn print_logprobs(answer: &Answer) {
    for (i, l) in answer.logprobs.iter().enumerate() {
        let row: Vec<_> = l.top.iter().map(|t| format!("{} {:.3}", t.token_id, t.logprob)).collect();
        note!("logprobs of token {i}: {}", row.join(", "));
    }
}

fn print_timings(f: &Finished) {
    let t = &f.timings;
    let rate = |n: usize, s: f64| if s > 0.0 { n as f64 / s } else { 0.0 };
    note!(
        "prefill {} tokens in {:.3} s ({:.1} tokens/s, {} cached); decode {} tokens in {:.3} s ({:.1} tokens/s); {}; seed {}",
        t.prefill_tokens,
        t.prefill_s,
        rate(t.prefill_tokens, t.prefill_s),
        f.cached_tokens,
        t.decode_tokens,
        t.decode_s,
        rate(t.decode_tokens, t.decode_s),
        f.reason.name(),
        f.seed,
    );
}
