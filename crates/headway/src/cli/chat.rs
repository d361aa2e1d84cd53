//! `headway chat`: a conversation in the terminal, or over a pipe with one message a line. Ctrl-C stops
//! the answer, not the program.

use super::{CliError, args::ChatArgs, prompt::chat_ids, session};
use headway_attention::Registry;
use headway_engine::{
    Engine, Event, GenerateRequest, LlmEngine,
    sampling::SamplingParams,
    text::{Message, TextError},
};
use rustyline::{DefaultEditor, error::ReadlineError};
use std::{
    io::{BufRead, IsTerminal, Write},
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
    engine.chat_template().map_err(|e| match e {
        TextError::NoChatTemplate => CliError::Usage(
            "this model has no chat template (it is probably a base model), so it can't hold a conversation; use \
             headway generate, or an instruction-tuned model"
                .into(),
        ),
        e => e.into(),
    })?;
    let mut input = Input::open()?;
    let stop = Stop::install(matches!(input, Input::Terminal(_)))?;
    note!("{}; {HELP}", engine.report().model);
    let system: Vec<Message> = args.system.iter().map(Message::system).collect();
    let mut history = system.clone();
    let mut failed = false;
    while let Some(line) = input.line()? {
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => break,
            "/help" => note!("{HELP}"),
            "/clear" => history.clone_from(&system),
            text if text.starts_with('/') => note!("unknown command {text}; {HELP}"),
            text => {
                history.push(Message::user(text));
                let verbose = args.engine.verbose;
                match stop.during(|flag| answer(&mut engine, &history, &params, verbose, flag)) {
                    Ok(text) => history.push(Message::assistant(text)),
                    Err(e @ CliError::Output(_)) => return Err(e),
                    Err(e) => {
                        history.pop();
                        failed = true;
                        note!("headway: {e}");
                    }
                }
            }
        }
    }
    // Whoever types has seen the error; a script looks at the exit code.
    Ok(if failed && matches!(input, Input::Pipe(_)) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Where messages come from.
enum Input {
    Terminal(Box<DefaultEditor>),
    Pipe(std::io::Lines<std::io::StdinLock<'static>>),
}

impl Input {
    fn open() -> Result<Self, CliError> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(Self::Pipe(stdin.lock().lines()));
        }
        let editor = DefaultEditor::new().map_err(|e| CliError::Usage(format!("the terminal: {e}")))?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    /// The next line; `None` at the end.
    fn line(&mut self) -> Result<Option<String>, CliError> {
        match self {
            Self::Pipe(lines) => {
                lines.next().transpose().map_err(|e| CliError::Usage(format!("standard input: {e}")))
            }
            Self::Terminal(editor) => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        let _ = editor.add_history_entry(line.trim());
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Interrupted) => note!("Ctrl-D or /exit ends"),
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(e) => return Err(CliError::Usage(format!("the terminal: {e}"))),
                }
            },
        }
    }
}

/// Ctrl-C: stops an answer; between answers it ends a program that reads from a pipe (in a terminal the
/// line editor hears it).
struct Stop {
    asked: Arc<AtomicBool>,
    answering: Arc<AtomicBool>,
}

impl Stop {
    fn install(terminal: bool) -> Result<Self, CliError> {
        let stop = Self { asked: Arc::default(), answering: Arc::default() };
        let (asked, answering) = (stop.asked.clone(), stop.answering.clone());
        ctrlc::set_handler(move || {
            if answering.load(Ordering::SeqCst) || terminal {
                asked.store(true, Ordering::SeqCst);
            } else {
                std::process::exit(130);
            }
        })
        .map_err(|e| CliError::Usage(format!("Ctrl-C can't be caught here: {e}")))?;
        Ok(stop)
    }

    fn during<T>(&self, f: impl FnOnce(&AtomicBool) -> T) -> T {
        self.asked.store(false, Ordering::SeqCst);
        self.answering.store(true, Ordering::SeqCst);
        let result = f(&self.asked);
        self.answering.store(false, Ordering::SeqCst);
        result
    }
}

/// Streams one answer and returns its text; a stop from outside keeps what was said.
fn answer(
    engine: &mut LlmEngine,
    history: &[Message],
    params: &SamplingParams,
    verbose: bool,
    stop: &AtomicBool,
) -> Result<String, CliError> {
    let prompt_ids = chat_ids(engine, history)?;
    let (used, most) = (prompt_ids.len(), engine.max_request_tokens());
    if used >= most {
        let what = format!("the conversation has {used} tokens, and {most} with the answer are the most");
        return Err(CliError::Usage(format!("{what}; /clear forgets it")));
    }
    let max_tokens = Some(params.max_tokens.unwrap_or(most).min(most - used));
    let id = engine.add(GenerateRequest {
        prompt_ids,
        sampling: SamplingParams { max_tokens, ..params.clone() },
        ..GenerateRequest::default()
    })?;
    let result = stream(engine, verbose, stop);
    // Whatever ended the answer, the request does not outlive it.
    engine.abort(id);
    result
}

fn stream(engine: &mut LlmEngine, verbose: bool, stop: &AtomicBool) -> Result<String, CliError> {
    let (mut text, mut events, mut out) = (String::new(), vec![], std::io::stdout().lock());
    loop {
        if stop.load(Ordering::SeqCst) {
            writeln!(out)?;
            note!("[stopped]");
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
                Event::Finished(_, f) => {
                    writeln!(out)?;
                    if verbose {
                        session::print_speculation(engine, &f);
                    }
                    return Ok(text);
                }
                Event::Failed(_, e) => return Err(e.into()),
            }
        }
    }
}
