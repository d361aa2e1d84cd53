//! The figures for people.

use super::super::measure::meter::Ceilings;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use headway_engine::tuning::{Candidate, Class, LayerProfile, Profile, Question};
use std::{
    io::{Result, Write},
    path::Path,
};

/// Prints what was measured and what it chose.
pub fn print(
    out: &mut dyn Write,
    question: &Question,
    profile: &Profile,
    ceilings: &Ceilings,
    file: &Path,
) -> Result<()> {
    writeln!(out, "{} on {}\n{}", question.model, profile.machine.describe(), ceilings.words)?;
    for layer in &profile.layers {
        writeln!(out, "\n{} of {}", layers(layer.layers), layer.what)?;
        match &layer.not_measured {
            Some(why) => writeln!(out, "  {}: {why}", layer.backend)?,
            None => writeln!(out, "{}", table(layer, profile))?,
        }
        let within: Vec<String> = layer.within_spread(&profile.setting).into_iter().map(named).collect();
        if !within.is_empty() {
            writeln!(out, "  within the spread of its samples: {}", within.join("; "))?;
        }
    }
    let chosen = profile.setting.to_string();
    let setting = if chosen.is_empty() { chosen } else { format!(" in {chosen}") };
    let mut names: Vec<_> = profile.layers.iter().map(|l| l.backend.as_str()).collect();
    names.dedup();
    let w = &profile.weights;
    writeln!(
        out,
        "\nchosen     {}{setting}; * marks it; times are geometric means over the batches of a class, with their share of the \
         ceiling; score: 1 is quickest in every batch, decode counts {}, prefill {}, mixed {}\n\
         profile    {}; --attention-backend tuned starts with it",
        names.join(", "),
        w.decode,
        w.prefill,
        w.mixed,
        file.display()
    )
}

/// A candidate in words.
fn named(c: &Candidate) -> String {
    let isa = c.setting.instruction_set.as_ref().map(|i| format!(" in {i}")).unwrap_or_default();
    format!("{}{isa}, blocks of {}", c.backend, c.block_size)
}

fn layers(n: usize) -> String {
    if n == 1 { "1 layer".into() } else { format!("{n} layers") }
}

fn table(layer: &LayerProfile, profile: &Profile) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let classes = Class::ALL.map(|c| [format!("{} us", c.name()), "share".to_owned()]);
    let head = ["", "backend", "in", "blocks", "score"].map(str::to_owned);
    table.set_header(head.into_iter().chain(classes.into_iter().flatten()).chain(["".to_owned()]));
    let chosen = layer.chosen(&profile.setting);
    for c in &layer.candidates {
        let mark = if chosen.is_some_and(|x| std::ptr::eq(x, c)) { "*" } else { "" };
        let of_class = Class::ALL.map(|class| {
            let us = c.mean_us(class).map_or("-".into(), |us| format!("{us:.1}"));
            [us, share(c, class).map_or("-".into(), |s| format!("{:.0}%", s * 100.0))]
        });
        let first = [
            mark.to_owned(),
            c.backend.clone(),
            c.setting.instruction_set.clone().unwrap_or_default(),
            c.block_size.to_string(),
            c.score.map_or("-".into(), |s| format!("{s:.3}")),
        ];
        let left = c.left.clone().unwrap_or_default();
        table.add_row(first.into_iter().chain(of_class.into_iter().flatten()).chain([left]));
    }
    for i in 3..11 {
        if let Some(column) = table.column_mut(i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The geometric mean of the shares in a class.
fn share(c: &Candidate, class: Class) -> Option<f64> {
    let figures = c.figures.iter().filter(|f| f.class == class);
    let logs = figures.map(|f| f.share_of_ceiling.map(f64::ln)).collect::<Option<Vec<f64>>>()?;
    (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
}
