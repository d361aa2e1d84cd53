//! `chat` over a pipe: history, commands, the end, Ctrl-C.

use super::support::{Run, headway, llama};
use std::{
    io::{Read, Write},
    process::{Child, Command, Stdio},
};

fn chat(args: &[&str]) -> Child {
    let mut c = headway();
    c.args(["chat", "--temperature", "0", "--ignore-eos", "--model"]).arg(llama()).args(args);
    c.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn end(child: Child) -> Run {
    let o = child.wait_with_output().unwrap();
    let text = |b: &[u8]| String::from_utf8(b.to_vec()).unwrap();
    Run { code: o.status.code(), out: text(&o.stdout), err: text(&o.stderr) }
}

/// Answers to these lines. An answer may hold newlines of its own, so lines are compared as a whole.
fn say(lines: &str, args: &[&str]) -> Run {
    talk(lines, args).fine()
}

fn talk(lines: &str, args: &[&str]) -> Run {
    let mut child = chat(args);
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    end(child)
}

#[test]
fn a_message_that_fails_shows_in_the_exit_code_of_a_pipe() {
    let r = talk("Hello\n", &["--max-model-len", "8"]);
    assert_eq!(r.code, Some(1), "{}", r.err);
    assert!(r.out.is_empty() && r.err.contains("/clear forgets it"), "{}", r.err);
}

#[test]
fn history_clear_and_exit() {
    let few = ["--max-tokens", "6"];
    let once = say("Hello\n", &few).out;
    assert!(once.ends_with('\n') && once.len() > 1);
    let twice = say("Hello\nHello\n", &few).out;
    assert!(twice.starts_with(&once) && twice != once.repeat(2), "the second answer knows the first");
    let cleared = say("Hello\n/clear\nHello\n", &few).out;
    assert_eq!(cleared, once.repeat(2));
    let left = say("Hello\n/exit\nHello\n", &few).out;
    assert_eq!(left, once);
    let r = say("\n  \n/help\n/dance\nHello", &few);
    assert_eq!(r.out, once, "no newline at the end of the input");
    assert!(r.err.contains("unknown command /dance") && r.err.contains("/clear forgets"), "{}", r.err);
    let other = say("Hello\n", &["--max-tokens", "6", "--system", "Speak like a pirate."]).out;
    assert_ne!(other, once);
    assert_eq!(say("", &few).out, "");
}

#[test]
fn a_conversation_that_is_full_can_be_cleared() {
    let long = "word ".repeat(60);
    let r = talk(&format!("{long}\n/clear\nHi\n"), &["--max-model-len", "64", "--max-tokens", "4"]);
    assert!(r.err.contains("/clear forgets it"), "{}", r.err);
    assert_eq!(r.out, say("Hi\n", &["--max-tokens", "4"]).out);
    // An answer ends where the room ends.
    let r = talk("Hi\nHi\n", &["--max-model-len", "40"]);
    assert!(!r.out.is_empty() && r.err.contains("/clear forgets it"), "{}", r.err);
}

#[cfg(unix)]
#[test]
fn an_interrupt_stops_the_answer_and_not_the_program() {
    let interrupt = |child: &Child| {
        let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    };
    let mut child = chat(&[]);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"Hello\n").unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0]).unwrap();
    interrupt(&child);
    stdin.write_all(b"/clear\n/exit\n").unwrap();
    drop(stdin);
    let mut rest = vec![];
    out.read_to_end(&mut rest).unwrap();
    let r = end(child).fine();
    assert!(r.err.contains("[stopped]"), "{}", r.err);
    let whole = say("Hello\n", &[]).out;
    assert!(rest.len() < whole.len(), "{} of {}", rest.len(), whole.len());
}
