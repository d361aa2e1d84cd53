//! Walks all goldens through an engine and makes a table: model, cases, passed; alone and batched.
//!
//! The engine's side is two small traits, so that this crate depends on no engine.

use super::{
    RealGolden, TinyGolden, TokenizerGolden,
    check::{Bounds, Compute, Measured, check_real, check_tiny, comparable},
};
use crate::testdata;
use std::{fmt, path::Path};

/// What to generate from.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The prompt; nothing is added.
    pub ids: &'a [u32],
    /// What the encoder reads, of models that have one; else empty.
    pub encoder_ids: &'a [u32],
    /// Most ids to generate.
    pub max_new: usize,
    /// Each ends the generation and is kept; empty: go on past any end of sequence.
    pub stop: &'a [u32],
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generated {
    /// `[vocab_size]`: raw logits at the last position of the prompt, after the model's own caps.
    pub first_logits: Vec<f32>,
    /// Greedy ids.
    pub ids: Vec<u32>,
}

/// An engine with a model loaded.
///
/// One that knows the answers passes; its table would name every case that differs:
///
/// ```
/// use headway_testkit::golden::{self, TinyGolden, check::Compute, walk::{Generated, Generates, Prompt, Table, tiny}};
/// struct Recites<'a>(&'a TinyGolden);
/// impl Generates for Recites<'_> {
///     fn run(&mut self, prompt: Prompt<'_>) -> Result<Generated, String> {
///         let case = self.0.cases.iter().find(|c| c.prompt_ids == prompt.ids).ok_or("an unknown prompt")?;
///         let first_logits = case.logits.iter().map(|&x| x as f32).collect();
///         Ok(Generated { first_logits, ids: case.greedy_ids.clone() })
///     }
///     fn run_batch(&mut self, prompts: &[Prompt<'_>]) -> Result<Vec<Generated>, String> {
///         prompts.iter().map(|p| self.run(*p)).collect()
///     }
/// }
///
/// let golden = golden::tiny()?.swap_remove(0);
/// let mut table = Table::default();
/// tiny(&mut table, &golden, Compute::Float32, "from memory", &mut Recites(&golden));
/// assert!(table.ok(), "{table}");
/// # Ok::<(), golden::GoldenError>(())
/// ```
pub trait Generates {
    /// Generates from one prompt with nothing else under way.
    ///
    /// # Errors
    /// The engine's own, in words.
    fn run(&mut self, prompt: Prompt<'_>) -> Result<Generated, String>;

    /// Generates from several prompts in one continuous batch; answers in the prompts' order.
    ///
    /// # Errors
    /// The engine's own, in words.
    fn run_batch(&mut self, prompts: &[Prompt<'_>]) -> Result<Vec<Generated>, String>;
}

/// A tokenizer with its chat template.
///
/// ```
/// use headway_testkit::golden::walk::Tokenizes;
/// /// One id a byte; a chat is its contents, one a line.
/// struct Bytes;
/// impl Tokenizes for Bytes {
///     fn encode(&mut self, text: &str) -> Result<Vec<u32>, String> {
///         Ok(text.bytes().map(u32::from).collect())
///     }
///     fn decode(&mut self, ids: &[u32], _: bool) -> Result<String, String> {
///         let bytes: Result<Vec<u8>, _> = ids.iter().map(|&id| id.try_into()).collect();
///         String::from_utf8(bytes.map_err(|_| "an id above 255")?).map_err(|e| e.to_string())
///     }
///     fn render(&mut self, chat: &serde_json::Value, _: bool, _: Option<&str>) -> Result<String, String> {
///         let messages = chat.as_array().ok_or("a chat is a list")?;
///         Ok(messages.iter().filter_map(|m| m["content"].as_str()).map(|c| format!("{c}\n")).collect())
///     }
/// }
///
/// let chat = serde_json::json!([{"role": "user", "content": "hé"}]);
/// let text = Bytes.render(&chat, false, None)?;
/// let ids = Bytes.encode(&text)?;
/// assert_eq!((ids.len(), Bytes.decode(&ids, false)?), (4, text));
/// # Ok::<(), String>(())
/// ```
pub trait Tokenizes {
    /// Ids of a text: special tokens recognised, nothing added.
    ///
    /// # Errors
    /// In words.
    fn encode(&mut self, text: &str) -> Result<Vec<u32>, String>;

    /// Text of ids, special tokens shown or dropped.
    ///
    /// # Errors
    /// In words.
    fn decode(&mut self, ids: &[u32], skip_special: bool) -> Result<String, String>;

    /// The chat template applied; `template` is used where the model has none of its own.
    ///
    /// # Errors
    /// In words.
    fn render(
        &mut self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
        template: Option<&str>,
    ) -> Result<String, String>;
}

/// One model's row of a table.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The model, and the way it was run.
    pub name: String,
    /// Cases that ran.
    pub cases: usize,
    /// Cases that passed.
    pub passed: usize,
    /// Largest difference of a logit over the cases that passed.
    pub logit: f64,
    /// Ids that were compared and equal.
    pub ids: usize,
}

/// The outcome of a walk.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// By model and way.
    pub rows: Vec<Row>,
    /// What failed: model, way, case, reason.
    pub failures: Vec<String>,
    /// Models that the engine does not know yet, or that aren't there.
    pub not_run: Vec<String>,
}

impl Table {
    /// Whether something ran and all of it passed.
    pub fn ok(&self) -> bool {
        self.failures.is_empty() && self.rows.iter().map(|r| r.cases).sum::<usize>() > 0
    }

    /// Adds another walk's rows.
    pub fn extend(&mut self, other: Self) {
        self.rows.extend(other.rows);
        self.failures.extend(other.failures);
        self.not_run.extend(other.not_run);
    }

    /// Adds a row with the outcome of each of its cases, by name.
    pub fn row(
        &mut self,
        name: String,
        outcomes: impl IntoIterator<Item = (String, Result<Measured, String>)>,
    ) {
        let mut row = Row { name, ..Row::default() };
        for (case, outcome) in outcomes {
            row.cases += 1;
            match outcome {
                Ok(m) => {
                    row.passed += 1;
                    row.logit = row.logit.max(m.logit);
                    row.ids += m.ids;
                }
                Err(why) => self.failures.push(format!("{}, case {case}: {why}", row.name)),
            }
        }
        self.rows.push(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|r| r.name.len()).max().unwrap_or(0).max(5);
        writeln!(f, "{:width$} {:>6} {:>6} {:>10} {:>6}", "model", "cases", "passed", "logit diff", "ids")?;
        for r in &self.rows {
            writeln!(f, "{:width$} {:>6} {:>6} {:>10.1e} {:>6}", r.name, r.cases, r.passed, r.logit, r.ids)?;
        }
        for n in &self.not_run {
            writeln!(f, "not run: {n}")?;
        }
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        Ok(())
    }
}

/// Answers of a set of prompts, alone or in one batch. An error of a batch is every case's error.
fn answers(
    engine: &mut dyn Generates,
    prompts: &[Prompt<'_>],
    batched: bool,
) -> Vec<Result<Generated, String>> {
    if !batched {
        return prompts.iter().map(|p| engine.run(*p)).collect();
    }
    match engine.run_batch(prompts) {
        Ok(all) if all.len() == prompts.len() => all.into_iter().map(Ok).collect(),
        Ok(all) => vec![Err(format!("{} answers to {} prompts", all.len(), prompts.len())); prompts.len()],
        Err(e) => vec![Err(e); prompts.len()],
    }
}

/// All cases of one tiny checkpoint, alone and then batched: two rows.
pub fn tiny(table: &mut Table, golden: &TinyGolden, compute: Compute, way: &str, engine: &mut dyn Generates) {
    let bounds = Bounds::tiny(golden, compute);
    let cases = comparable(golden, compute);
    let prompts: Vec<Prompt<'_>> = cases.iter().map(|c| c.prompt()).collect();
    for (batched, how) in [(false, "alone"), (true, "batched")] {
        let got = answers(engine, &prompts, batched);
        let outcomes = cases
            .iter()
            .zip(got)
            .map(|(c, g)| (c.name.clone(), g.and_then(|g| check_tiny(c, bounds, &g.first_logits, &g.ids))));
        table.row(format!("{} {way} {how}", golden.model.name), outcomes);
    }
}

/// All cases of one real model, alone and then batched: two rows. `longest` leaves out longer prompts.
pub fn real(
    table: &mut Table,
    golden: &RealGolden,
    compute: Compute,
    way: &str,
    longest: usize,
    engine: &mut dyn Generates,
) {
    let bounds = Bounds::real(compute);
    let cases: Vec<_> = golden.cases.iter().filter(|c| c.prompt_ids.len() <= longest).collect();
    let stop = &golden.tokenizer.eos_ids[..];
    let prompts: Vec<Prompt<'_>> = cases
        .iter()
        .map(|c| Prompt { ids: &c.prompt_ids, encoder_ids: &[], max_new: c.greedy_ids.len(), stop })
        .collect();
    for (batched, how) in [(false, "alone"), (true, "batched")] {
        let got = answers(engine, &prompts, batched);
        let outcomes = cases
            .iter()
            .zip(got)
            .map(|(c, g)| (c.name.clone(), g.and_then(|g| check_real(c, bounds, &g.first_logits, &g.ids))));
        table.row(format!("{} {way} {how}", golden.model.name), outcomes);
    }
}

/// An engine for a model; `Ok(None)` where its architecture is not known yet.
pub type Opened = Result<Option<Box<dyn Generates>>, String>;

/// Every tiny golden through engines that `open` makes from a checkpoint's folder.
///
/// # Errors
/// Goldens that can't be read; what fails in a model is in the table.
pub fn all_tiny(
    compute: Compute,
    way: &str,
    mut open: impl FnMut(&TinyGolden, &Path) -> Opened,
) -> Result<Table, super::GoldenError> {
    let mut table = Table::default();
    for golden in super::tiny()? {
        let name = &golden.model.name;
        let opened = testdata::model_dir(name).map_err(|e| e.to_string()).and_then(|dir| open(&golden, &dir));
        match opened {
            Ok(Some(mut engine)) => tiny(&mut table, &golden, compute, way, &mut *engine),
            Ok(None) => table.not_run.push(format!("{name}: {} is not known yet", golden.model.architecture)),
            Err(e) => table.failures.push(format!("{name}: {e}")),
        }
    }
    Ok(table)
}

fn equal<T: PartialEq + fmt::Debug + ?Sized>(what: &str, got: &T, want: &T) -> Result<(), String> {
    if got == want { Ok(()) } else { Err(format!("{what}: got {got:?}, expected {want:?}")) }
}

/// Every text and chat of a tokenizer golden: one row, all exact.
pub fn tokenizer(table: &mut Table, golden: &TokenizerGolden, t: &mut dyn Tokenizes) {
    let template = golden.tokenizer.chat_template.as_deref();
    let mut outcomes = vec![];
    for (i, c) in golden.cases.iter().enumerate() {
        let mut one = || {
            equal("ids", &t.encode(&c.text)?, &c.ids)?;
            equal("decoded", &t.decode(&c.ids, false)?, &c.decoded)?;
            equal("decoded without special tokens", &t.decode(&c.ids, true)?, &c.decoded_skip_special)
        };
        let text: String = c.text.chars().take(24).collect();
        outcomes.push((format!("{i} {text:?}"), one().map(|()| Measured { logit: 0.0, ids: c.ids.len() })));
    }
    for c in &golden.chat {
        let mut one = || {
            let rendered = t.render(&c.messages, c.add_generation_prompt, template)?;
            equal("rendering", &rendered, &c.rendered)?;
            equal("ids", &t.encode(&rendered)?, &c.ids)
        };
        outcomes.push((c.name.clone(), one().map(|()| Measured { logit: 0.0, ids: c.ids.len() })));
    }
    table.row(format!("{} tokenizer", golden.model.name), outcomes);
}

/// The prompts of a real golden through its tokenizer: renderings, ids and decoded answers, all exact.
pub fn prompts(table: &mut Table, golden: &RealGolden, t: &mut dyn Tokenizes) {
    let template = golden.tokenizer.chat_template.as_deref();
    let bos = golden.tokenizer.bos_id.filter(|_| golden.tokenizer.prepend_bos_to_plain_prompts);
    let outcomes: Vec<_> = golden
        .cases
        .iter()
        .map(|c| {
            let mut one = || {
                let (text, bos) = match (&c.text, &c.messages) {
                    (Some(text), _) => (text.clone(), bos),
                    (None, Some(messages)) => (t.render(messages, c.add_generation_prompt, template)?, None),
                    (None, None) => return Err("a case with neither text nor messages".into()),
                };
                if let Some(rendered) = &c.rendered {
                    equal("rendering", &text, rendered)?;
                }
                let ids: Vec<u32> = bos.into_iter().chain(t.encode(&text)?).collect();
                equal("ids", &ids, &c.prompt_ids)?;
                equal("text of the answer", &t.decode(&c.greedy_ids, false)?, &c.greedy_text)
            };
            (c.name.clone(), one().map(|()| Measured { logit: 0.0, ids: c.prompt_ids.len() }))
        })
        .collect();
    table.row(format!("{} prompts", golden.model.name), outcomes);
}
