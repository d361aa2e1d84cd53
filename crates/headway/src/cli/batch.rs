//! `headway generate --batch FILE.jsonl`: all lines run together, answers come in input order. A line
//! that can't run gets an `error` and spoils no other.

use super::{
    CliError,
    args::GenerateArgs,
    generate::print_logprobs,
    output::Answer,
    prompt::Prompt,
    sampling::{BatchLine, in_room},
};
use headway_engine::{Engine, Event, GenerateRequest, LlmEngine, engine::Finished, kv::RequestId};
use serde_json::{Value, json};
use std::{collections::HashMap, io::Write, path::Path, process::ExitCode};

/// Parses every line before a model is opened.
pub fn read(path: &Path) -> Result<Vec<BatchLine>, CliError> {
    let bad = |why: String| CliError::File { path: path.into(), why };
    let text = std::fs::read_to_string(path)
        .map_err(|e| bad(format!("cannot be read: {e}; --batch takes a UTF-8 file of JSON lines")))?;
    let mut lines = vec![];
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        if !line.trim_start().starts_with('{') {
            let what = "is not a JSON object; write one a line, as {\"prompt\": \"Hello\"}";
            return Err(bad(format!("line {} {what}", i + 1)));
        }
        let parsed: BatchLine =
            serde_json::from_str(line).map_err(|e| bad(format!("line {}: {}", i + 1, in_column(&e))))?;
        if parsed.prompt_ids.is_some() && parsed.chat == Some(true) {
            return Err(bad(format!("line {}: chat takes a prompt, not prompt_ids", i + 1)));
        }
        if parsed.prompt.is_some() == parsed.prompt_ids.is_some() {
            return Err(bad(format!("line {}: give either prompt or prompt_ids", i + 1)));
        }
        lines.push(parsed);
    }
    if lines.is_empty() {
        return Err(bad("has no requests; write a JSON object a line, as {\"prompt\": \"Hello\"}".into()));
    }
    Ok(lines)
}

/// What the parser says, without its own line number, which is always 1.
fn in_column(e: &serde_json::Error) -> String {
    let text = e.to_string();
    let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
    format!("{what} (column {})", e.column())
}

struct Slot {
    answer: Answer,
    with_logprobs: bool,
    done: Option<Result<Finished, String>>,
}

/// Runs the lines.
pub fn run(mut engine: LlmEngine, lines: Vec<BatchLine>, args: &GenerateArgs) -> Result<ExitCode, CliError> {
    let base = args.sampling.params(args.logprobs);
    let mut slots: Vec<Slot> = vec![];
    let mut by_id: HashMap<RequestId, usize> = HashMap::new();
    for line in lines {
        let sampling = line.params(&base);
        let mut slot =
            Slot { answer: Answer::default(), with_logprobs: sampling.logprobs.is_some(), done: None };
        match admit(&mut engine, line, sampling, args.chat, &mut slot.answer) {
            Ok(id) => {
                by_id.insert(id, slots.len());
            }
            Err(e) => slot.done = Some(Err(e.to_string())),
        }
        slots.push(slot);
    }
    let (mut printed, mut events, mut out) = (0, vec![], std::io::stdout().lock());
    loop {
        while let Some(slot) = slots.get(printed).filter(|s| s.done.is_some()) {
            print(&mut out, &engine, printed, slot, args)?;
            printed += 1;
        }
        if engine.is_idle() {
            break;
        }
        engine.step(&mut events)?;
        for event in events.drain(..) {
            apply(event, &by_id, &mut slots);
        }
    }
    let failed = slots.iter().any(|s| matches!(s.done, Some(Err(_)) | None));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn admit(
    engine: &mut LlmEngine,
    line: BatchLine,
    sampling: headway_engine::sampling::SamplingParams,
    chat: bool,
    answer: &mut Answer,
) -> Result<RequestId, CliError> {
    let chat = line.chat.unwrap_or(chat);
    let prompt = match (line.prompt, line.prompt_ids) {
        (_, Some(ids)) => Prompt::Ids(ids),
        (Some(text), None) if !text.is_empty() => Prompt::Text(text),
        _ => return Err(CliError::Usage("the prompt is empty".into())),
    };
    let prompt_ids = prompt.ids(engine, chat)?;
    answer.prompt_ids.clone_from(&prompt_ids);
    let sampling = in_room(sampling, engine, prompt_ids.len());
    let ranges = line.bidirectional_ranges.unwrap_or_default();
    let bidirectional_ranges = ranges.into_iter().map(|[from, to]| from..to).collect();
    Ok(engine.add(GenerateRequest {
        prompt_ids,
        sampling,
        bidirectional_ranges,
        ..GenerateRequest::default()
    })?)
}

fn apply(event: Event, by_id: &HashMap<RequestId, usize>, slots: &mut [Slot]) {
    let (Event::Token(id, _) | Event::Finished(id, _) | Event::Failed(id, _)) = &event;
    let Some(slot) = by_id.get(id).and_then(|&i| slots.get_mut(i)) else { return };
    match event {
        Event::Token(_, t) => {
            slot.answer.text.push_str(&t.text);
            slot.answer.logprobs.extend(t.logprobs);
        }
        Event::Finished(_, f) => slot.done = Some(Ok(f)),
        Event::Failed(_, e) => slot.done = Some(Err(e.to_string())),
    }
}

fn print(
    out: &mut impl Write,
    engine: &LlmEngine,
    index: usize,
    slot: &Slot,
    args: &GenerateArgs,
) -> Result<(), CliError> {
    match (&slot.done, args.json) {
        (Some(Ok(f)), true) => {
            let object: Value = slot.answer.json(engine, f, slot.with_logprobs, args.engine.verbose);
            writeln!(out, "{object}")?;
        }
        (Some(Err(e)), true) => {
            writeln!(out, "{}", json!({"prompt_token_ids": slot.answer.prompt_ids, "error": e}))?;
            note!("headway: request {}: {e}", index + 1);
        }
        (Some(Ok(f)), false) if engine.tokenizer().is_none() => {
            writeln!(out, "[{}] {:?}", index + 1, f.token_ids)?;
            print_logprobs(&slot.answer);
        }
        (Some(Ok(_)), false) => {
            writeln!(out, "[{}] {}", index + 1, slot.answer.text)?;
            print_logprobs(&slot.answer);
        }
        (Some(Err(e)), false) => note!("headway: request {}: {e}", index + 1),
        (None, _) => {}
    }
    Ok(())
}
