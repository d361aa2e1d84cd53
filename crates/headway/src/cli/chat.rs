//! `headway chat`: a conversation in the terminal. Ctrl-C stops the answer, not the program.

use super::{CliError, args::ChatArgs, prompt::chat_ids, session};
use headway_attention::Registry;
use headway_engine::{Engine, Event, GenerateRequest, LlmEngine, sampling::SamplingParams, text::Message};
use rustyline::{DefaultEditor, error::ReadlineError};
use std::{
    io::Write,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

const HELP: &str = "/clear forgets the conversation, /exit ends (as does Ctrl-D), Ctrl-C stops an answer";

/// Runs the command.
pub fn run(args: ChatArgs, registry: Registry) -> Result<ExitCode, CliError> {
    let params = args.sampling.chat_params();
    params.validate().map_err(headway_engine::engine::RequestError::from)?;
    let mut engine = session::open(&args.engine, registry)?;
    if args.engine.verbose {
        session::print_report(engine.report());
    }
    engine.chat_template()?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .map_err(|e| CliError::Usage(format!("Ctrl-C can't be caught here: {e}")))?;
    let mut editor = DefaultEditor::new().map_err(|e| CliError::Usage(format!("the terminal: {e}")))?;
    eprintln!("{}; {HELP}", engine.report().model);
    let system: Vec<Message> = args.system.iter().map(Message::system).collect();
    let mut history = system.clone();
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(ExitCode::SUCCESS),
            Err(e) => return Err(CliError::Usage(format!("the terminal: {e}"))),
        };
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => return Ok(ExitCode::SUCCESS),
            "/help" => eprintln!("{HELP}"),
            "/clear" => history.clone_from(&system),
            text if text.starts_with('/') => eprintln!("unknown command {text}; {HELP}"),
            text => {
                let _ = editor.add_history_entry(text);
                history.push(Message::user(text));
                stop.store(false, Ordering::Relaxed);
                match answer(&mut engine, &history, &params, &stop) {
                    Ok(text) => history.push(Message::assistant(text)),
                    Err(e) => {
                        history.pop();
                        eprintln!("headway: {e}");
                    }
                }
            }
        }
    }
}

/// Streams one answer and returns its text; a stop from outside keeps what was said.
fn answer(
    engine: &mut LlmEngine,
    history: &[Message],
    params: &SamplingParams,
    stop: &AtomicBool,
) -> Result<String, CliError> {
    let prompt_ids = chat_ids(engine, history)?;
    let id = engine.add(GenerateRequest { prompt_ids, sampling: params.clone() })?;
    let (mut text, mut events, mut out) = (String::new(), vec![], std::io::stdout().lock());
    loop {
        if stop.load(Ordering::Relaxed) {
            engine.abort(id);
            writeln!(out, " [stopped]")?;
            return Ok(text);
        }
        engine.step(&mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Token(_, t) => {
                    out.write_all(t.text.as_bytes())?;
                    out.flush()?;
                    text.push_str(&t.text);
                }
                Event::Finished(..) => {
                    writeln!(out)?;
                    return Ok(text);
                }
                Event::Failed(_, e) => return Err(e.into()),
            }
        }
    }
}
