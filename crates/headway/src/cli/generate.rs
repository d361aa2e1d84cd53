//! `headway generate`: one prompt, streamed; or a batch.

use super::{CliError, args::GenerateArgs, batch, output::Answer, prompt::Prompt, session};
use headway_attention::Registry;
use headway_engine::{Engine, Event, GenerateRequest, LlmEngine, engine::Finished};
use serde_json::json;
use std::{io::Write, process::ExitCode};

/// Runs the command.
pub fn run(args: GenerateArgs, registry: Registry) -> Result<ExitCode, CliError> {
    if let Some(file) = &args.batch {
        let lines = batch::read(file)?;
        let engine = open(&args, registry)?;
        return batch::run(engine, lines, &args);
    }
    let prompt = Prompt::from_args(&args)?;
    let params = args.sampling.params(args.logprobs);
    params.validate().map_err(headway_engine::engine::RequestError::from)?;
    let mut engine = open(&args, registry)?;
    let prompt_ids = prompt.ids(&engine, args.chat)?;
    let mut answer = Answer { prompt_ids: prompt_ids.clone(), ..Answer::default() };
    engine.add(GenerateRequest { prompt_ids, sampling: params })?;
    let mut out = std::io::stdout().lock();
    let finished = stream(&mut engine, &mut answer, |text| {
        if !args.json {
            out.write_all(text.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    })?;
    if args.json {
        writeln!(out, "{}", answer.json(&engine, &finished, args.logprobs.is_some()))?;
    } else {
        writeln!(out)?;
        print_logprobs(&answer);
        if args.engine.verbose {
            print_timings(&finished);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn open(args: &GenerateArgs, registry: Registry) -> Result<LlmEngine, CliError> {
    let engine = session::open(&args.engine, registry)?;
    if args.engine.verbose && args.json {
        println!("{}", json!({"startup": engine.report()}));
    } else if args.engine.verbose {
        session::print_report(engine.report());
    }
    Ok(engine)
}

/// Steps until the one request is done.
pub fn stream(
    engine: &mut LlmEngine,
    answer: &mut Answer,
    mut show: impl FnMut(&str) -> std::io::Result<()>,
) -> Result<Finished, CliError> {
    let mut events = vec![];
    loop {
        engine.step(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Token(_, token) => {
                    show(&token.text)?;
                    answer.text.push_str(&token.text);
                    answer.logprobs.extend(token.logprobs);
                }
                Event::Finished(_, f) => return Ok(f),
                Event::Failed(_, e) => return Err(e.into()),
            }
        }
    }
}

fn print_logprobs(answer: &Answer) {
    for (i, l) in answer.logprobs.iter().enumerate() {
        let row: Vec<_> = l.top.iter().map(|t| format!("{} {:.3}", t.token_id, t.logprob)).collect();
        eprintln!("logprobs of token {i}: {}", row.join(", "));
    }
}

fn print_timings(f: &Finished) {
    let t = &f.timings;
    let rate = |n: usize, s: f64| if s > 0.0 { n as f64 / s } else { 0.0 };
    eprintln!(
        "prefill {} tokens in {:.3} s ({:.1} tokens/s, {} cached); decode {} tokens in {:.3} s ({:.1} tokens/s); {}",
        t.prefill_tokens,
        t.prefill_s,
        rate(t.prefill_tokens, t.prefill_s),
        f.cached_tokens,
        t.decode_tokens,
        t.decode_s,
        rate(t.decode_tokens, t.decode_s),
        f.reason.name(),
    );
}
