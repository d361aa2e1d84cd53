//! Several backends in one table: a row a case, a column a backend, the quickest marked.

use super::line::{Class, Line};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use std::fmt::Write;

/// What makes two lines the same question.
pub type Key<'a> = (Class, &'a str, &'a str, usize, Option<usize>, &'a str);

/// A column that says of a row what is asked: its heading, and its cell.
type Column = (&'static str, fn(&Key<'_>) -> String);

/// A line's question.
pub fn key(l: &Line) -> Key<'_> {
    (l.class, &l.heads, l.dtype, l.threads, l.asked_block_size, &l.case)
}

/// The values in order of first appearance.
pub fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut out = vec![];
    for x in all {
        if !out.contains(&x) {
            out.push(x);
        }
    }
    out
}

/// The rows, class by class, each in the order measured.
pub fn keys(lines: &[Line]) -> Vec<Key<'_>> {
    let mut keys = distinct(lines.iter().map(key));
    keys.sort_by_key(|k| k.0);
    keys
}

/// A table of keys and values, and one of latents, which other backends compute.
pub fn tables(lines: &[Line]) -> String {
    let (mut out, mut raced) = (String::new(), false);
    for latent in [false, true] {
        let of_kind = |l: &&Line| l.class.is_latent() == latent;
        let backends = distinct(lines.iter().filter(of_kind).map(|l| l.backend.as_str()));
        raced |= backends.len() > 1;
        if !backends.is_empty() {
            let keys: Vec<_> = keys(lines).into_iter().filter(|k| k.0.is_latent() == latent).collect();
            // Writing into a string can't fail.
            let _ = writeln!(out, "\n{}", table(lines, &keys, &backends));
        }
    }
    if !out.is_empty() {
        let cache = lines.iter().find_map(Line::coded_cache);
        let cache = cache.map(|c| format!("; {c} cache")).unwrap_or_default();
        let quickest = if raced { "; * is the quickest" } else { "" };
        out += &format!("us of a call and its share of the ceiling{quickest}{cache}\n");
    }
    out
}

fn table(lines: &[Line], keys: &[Key<'_>], backends: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let mut columns: Vec<Column> =
        vec![("case", |k| k.5.to_owned()), ("heads", |k| k.1.to_owned()), ("dtype", |k| k.2.to_owned())];
    let sizes: [Column; 2] =
        [("thr", |k| k.3.to_string()), ("block", |k| k.4.map_or_else(String::new, |b| b.to_string()))];
    // Those that are not the same in all rows.
    columns.extend(sizes.into_iter().filter(|(_, cell)| distinct(keys.iter().map(cell)).len() > 1));
    let first = columns.len();
    let head = columns.iter().map(|c| c.0.to_owned());
    table.set_header(head.chain(backends.iter().flat_map(|b| [(*b).to_owned(), "share".to_owned()])));
    for k in keys {
        let of = |b: &&str| lines.iter().find(|l| l.backend == *b && key(l) == *k);
        let all: Vec<Option<&Line>> = backends.iter().map(of).collect();
        let there = all.iter().flatten().count();
        let best = all.iter().flatten().map(|l| l.median_ms).fold(f64::INFINITY, f64::min);
        let cells = all.iter().flat_map(|l| match l {
            None => ["-".to_owned(), "-".to_owned()],
            Some(l) => {
                let mark = if there > 1 && l.median_ms == best { "* " } else { "" };
                [format!("{mark}{}", micros(l.median_ms)), share(l)]
            }
        });
        table.add_row(columns.iter().map(|c| (c.1)(k)).chain(cells));
    }
    for i in first..first + 2 * backends.len() {
        if let Some(column) = table.column_mut(i) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Microseconds with the digits that matter.
pub fn micros(ms: f64) -> String {
    match ms * 1e3 {
        us if us < 100.0 => format!("{us:.2}"),
        us if us < 10_000.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

/// In percent.
pub fn share(l: &Line) -> String {
    l.share_of_ceiling.map_or("-".into(), |s| format!("{:.0}%", s * 100.0))
}

#[cfg(test)]
mod tests {
    use super::{super::line::tests::line, *};

    #[test]
    fn rows_are_cases_and_the_quickest_is_marked() {
        let lines = [
            line("A", "decode_b1", Class::Decode, 0.012, Some(0.5)),
            line("B", "decode_b1", Class::Decode, 0.010, Some(0.6)),
            line("A", "write_1", Class::Write, 0.001, Some(0.1)),
            line("A", "prefill_1x8", Class::Prefill, 2.0, None),
            line("B", "prefill_1x8", Class::Prefill, 20.0, None),
            line("M", "mla_decode", Class::LatentDecode, 0.5, Some(0.9)),
        ];
        let text = tables(&lines);
        let rows: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(rows[1], ["case", "heads", "dtype", "A", "share", "B", "share"]);
        assert_eq!(rows[2], ["decode_b1", "1/1/8", "bf16", "12.00", "50%", "*", "10.00", "60%"]);
        assert_eq!(rows[3], ["prefill_1x8", "1/1/8", "bf16", "*", "2000.0", "-", "20000", "-"]);
        // Alone it is no quickest.
        assert_eq!(rows[4], ["write_1", "1/1/8", "bf16", "1.00", "10%", "-", "-"]);
        assert_eq!(rows[7], ["mla_decode", "1/1/8", "bf16", "500.0", "90%"]);
        assert!(text.ends_with("; * is the quickest\n"), "{text}");
        // Nothing to be quicker than.
        assert!(!tables(&lines[5..]).contains('*'));
        assert_eq!(tables(&[]), "");
    }
}
