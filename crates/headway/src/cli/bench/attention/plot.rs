//! The plot: bars of the share of the ceiling, a group a case, a colour a backend, in sections by what a call does. One
//! file without outside assets, readable on light and on dark.

use super::{
    super::super::CliError,
    line::{Class, Line},
    side_by_side::{Key, distinct, key, keys, micros, share},
};
use serde::Deserialize;
use std::{collections::BTreeSet, fmt::Write, fs, path::Path};

/// Colours that people with any colour vision tell apart (Okabe and Ito, Wong 2011), and two more.
const COLOURS: [&str; 9] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f7fd6", "#a6761d", "#7f7f7f"];
const WIDTH: f64 = 980.0;
const LEFT: f64 = 200.0;
const RIGHT: f64 = 130.0;
const BAR: f64 = 9.0;
/// Between cases.
const GAP: f64 = 7.0;

/// Where bars end, whatever they stand for: a cache was quicker than the memory that they are held against.
const MOST: f64 = 1.5;

const STYLE: &str = "\
svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#222}.faint{fill:#666}.grid{stroke:#ddd}.full{stroke:#888}\
.mark{stroke:#000;stroke-width:2}h1,.title{font-size:16px;font-weight:600}.section{font-size:14px;font-weight:600}\
.small{font-size:10px}.end{text-anchor:end}.middle{text-anchor:middle}\
@media(prefers-color-scheme:dark){svg{background:#16181c}text{fill:#e4e4e4}.faint{fill:#9a9a9a}.grid{stroke:#34373d}\
.full{stroke:#888}.mark{stroke:#fff}}";

/// Measurements of another run, drawn as marks on the bars.
pub struct Marks(Vec<Mark>);

/// What of a line is drawn; its other fields are left.
#[derive(Deserialize)]
struct Mark {
    backend: String,
    case: String,
    heads: String,
    dtype: String,
    /// Not there: the activations'.
    kv_cache_dtype: Option<String>,
    share_of_ceiling: f64,
}

impl Marks {
    /// Reads lines as `--json` writes them.
    ///
    /// # Errors
    /// A file that can't be read; a line that is none, by its number.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let wrong = |why: String| CliError::File { path: path.to_owned(), why };
        let text = fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
        let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty());
        let mark = |(i, l): (usize, &str)| {
            let bad = |why: String| wrong(format!("line {}: {why}", i + 1));
            let mark: Mark = serde_json::from_str(l).map_err(|e| bad(e.to_string()))?;
            match mark.share_of_ceiling.is_finite() && mark.share_of_ceiling > 0.0 {
                true => Ok(mark),
                false => Err(bad("share_of_ceiling must be above 0".into())),
            }
        };
        lines.map(mark).collect::<Result<_, _>>().map(Self)
    }

    /// The mark of a line.
    pub fn of(&self, l: &Line) -> Option<f64> {
        let is = |m: &&Mark| {
            let coded = m.kv_cache_dtype.as_deref().filter(|t| t.starts_with("fp8"));
            m.backend == l.backend
                && m.case == l.case
                && m.heads == l.heads
                && m.dtype == l.dtype
                && coded == l.coded_cache()
        };
        self.0.iter().find(is).map(|m| m.share_of_ceiling)
    }
}

/// Whether a plot could be written there.
///
/// # Errors
/// No such folder; a folder of that name.
pub fn check(path: &Path) -> Result<(), CliError> {
    let wrong = |why: &str| Err(CliError::File { path: path.to_owned(), why: why.into() });
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match (folder.is_dir(), path.is_dir()) {
        (false, _) => wrong("there is no such folder"),
        (_, true) => wrong("is a folder; name a file"),
        _ => Ok(()),
    }
}

/// Writes the plot.
///
/// # Errors
/// The file system's.
pub fn write(path: &Path, lines: &[Line], marks: Option<&Marks>) -> Result<(), CliError> {
    let wrong = |e: std::io::Error| CliError::File { path: path.to_owned(), why: e.to_string() };
    fs::write(path, svg(lines, marks)).map_err(wrong)
}

/// A drawing in the making. Writing into a string can't fail.
struct Drawing {
    body: String,
    y: f64,
    /// The share at the right end of the bars.
    most: f64,
}

fn svg(lines: &[Line], marks: Option<&Marks>) -> String {
    let backends = distinct(lines.iter().map(|l| l.backend.as_str()));
    let marked = lines.iter().filter_map(|l| marks?.of(l));
    let largest = lines.iter().filter_map(|l| l.share_of_ceiling).chain(marked).fold(1.0, f64::max);
    let mut d =
        Drawing { body: String::new(), y: 26.0, most: (largest * 20.0).ceil().min(MOST * 20.0) / 20.0 };
    let isa = lines.first().map_or("", |l| l.isa.as_str());
    let cache = lines.iter().find_map(Line::coded_cache);
    let cache = cache.map(|c| format!(", {c} cache")).unwrap_or_default();
    d.text(16.0, "title", &format!("Attention calls on {isa}{cache}: share of the ceiling"));
    d.y += 20.0;
    let held =
        "decode and write against memory reads and writes, prefill and mixed against the matrix product";
    d.text(16.0, "faint", held);
    d.legend(&backends, marks.is_some());
    let keys = keys(lines);
    let classes: BTreeSet<Class> = keys.iter().map(|k| k.0).collect();
    let group = |k: &Key<'_>| (k.0, k.1.to_owned(), k.2.to_owned(), k.3, k.4);
    let varied = |f: fn(&Key<'_>) -> usize| distinct(keys.iter().map(f)).len() > 1;
    let (threads, blocks) = (varied(|k| k.3), varied(|k| k.4.unwrap_or(0)));
    for class in classes {
        for g in distinct(keys.iter().filter(|k| k.0 == class).map(group)) {
            let mut title = format!("{}, heads {}, {}", class.title(), g.1, g.2);
            if threads {
                title += &format!(", {} threads", g.3);
            }
            if let Some(b) = g.4.filter(|_| blocks) {
                title += &format!(", blocks of {b}");
            }
            d.section(&title, keys.iter().filter(|k| group(k) == g), lines, &backends, marks);
        }
    }
    let (width, height) = (WIDTH, d.y + 10.0);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height:.0}\" viewBox=\"0 0 {width} {height:.0}\" \
         role=\"img\"><title>Share of the ceiling</title><style>{STYLE}</style>\n{}</svg>\n",
        d.body
    )
}

impl Drawing {
    fn x(&self, share: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (share / self.most).min(1.0)
    }

    fn text(&mut self, x: f64, class: &str, text: &str) {
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{:.1}\" class=\"{class}\">{}</text>",
            self.y,
            escape(text)
        );
    }

    fn legend(&mut self, backends: &[&str], marks: bool) {
        self.y += 24.0;
        let mut x = 16.0;
        for (i, name) in backends.iter().enumerate() {
            // About the width of its letters.
            let width = 30.0 + 8.0 * name.chars().count() as f64;
            if x + width > WIDTH {
                (x, self.y) = (16.0, self.y + 18.0);
            }
            let (y, colour) = (self.y - 9.0, colour(i));
            let _ = writeln!(
                self.body,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>"
            );
            self.text(x + 15.0, "", name);
            x += width;
        }
        if marks {
            if x + 200.0 > WIDTH {
                (x, self.y) = (16.0, self.y + 18.0);
            }
            self.line("mark", x + 5.0, self.y - 10.0, self.y + 2.0);
            self.text(x + 15.0, "", "the same elsewhere (--marks)");
        }
        self.y += 12.0;
    }

    fn line(&mut self, class: &str, x: f64, from: f64, to: f64) {
        let _ = writeln!(
            self.body,
            "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{from:.1}\" y2=\"{to:.1}\"/>"
        );
    }

    /// Cases of one class and one kind of layer.
    fn section<'k>(
        &mut self,
        title: &str,
        keys: impl Iterator<Item = &'k Key<'k>>,
        lines: &[Line],
        backends: &[&str],
        marks: Option<&Marks>,
    ) {
        self.y += 26.0;
        self.text(16.0, "section", title);
        self.y += 24.0;
        let all: Vec<Vec<(usize, &Line)>> = keys
            .map(|k| {
                let of = |(i, b): (usize, &&str)| {
                    Some((i, lines.iter().find(|l| l.backend == **b && key(l) == *k)?))
                };
                backends.iter().enumerate().filter_map(of).collect()
            })
            .collect();
        let (top, bars) = (self.y, all.iter().map(Vec::len).sum::<usize>());
        let bottom = top + bars as f64 * BAR + all.len() as f64 * GAP;
        let steps = (self.most * 4.0).floor() as usize;
        for step in 0..=steps {
            let share = step as f64 / 4.0;
            let x = self.x(share);
            self.line(if step == 4 { "full" } else { "grid" }, x, top - 4.0, bottom);
            self.y = top - 7.0;
            self.text(x, "faint small middle", &format!("{:.0}%", share * 100.0));
        }
        self.y = top;
        for of_case in all {
            self.case(&of_case, marks);
        }
        self.y = bottom;
    }

    /// One case's bars.
    fn case(&mut self, all: &[(usize, &Line)], marks: Option<&Marks>) {
        let Some((_, first)) = all.first() else { return };
        let top = self.y;
        self.y = top + (all.len() as f64 * BAR) / 2.0 + 4.0;
        self.text(LEFT - 8.0, "end", &first.case);
        self.y = top;
        let best = all.iter().map(|(_, l)| l.median_ms).fold(f64::INFINITY, f64::min);
        for &(i, l) in all {
            let (y, colour) = (self.y, colour(i));
            let end = self.x(l.share_of_ceiling.unwrap_or(0.0));
            let words = format!("{}: {} us, {} of the ceiling", l.backend, micros(l.median_ms), share(l));
            let _ = writeln!(
                self.body,
                "<rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"><title>{}</title></rect>",
                (end - LEFT).max(0.5),
                BAR - 1.0,
                escape(&words)
            );
            if let Some(x) = marks.and_then(|m| m.of(l)).map(|share| self.x(share)) {
                self.line("mark", x, y - 0.5, y + BAR - 0.5);
            }
            self.y = y + BAR - 1.5;
            let quickest = if all.len() > 1 && l.median_ms == best { " *" } else { "" };
            let after = format!("{} {} us{quickest}", share(l), micros(l.median_ms));
            self.text(end + 5.0, "small", &after);
            self.y = y + BAR;
        }
        self.y += GAP;
    }
}

fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::{super::line::tests::line, *};

    /// Names of the elements, where every one is closed in its order.
    fn elements(text: &str) -> Vec<String> {
        let (mut open, mut all): (Vec<String>, Vec<String>) = (vec![], vec![]);
        for tag in text.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').unwrap_or_else(|| panic!("{tag}"));
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            match (tag.strip_prefix('/'), tag.ends_with('/')) {
                (Some(name), _) => assert_eq!(open.pop().as_deref(), Some(name)),
                (None, closed) => {
                    let name = tag.split([' ', '/']).next().unwrap().to_owned();
                    all.push(name.clone());
                    open.extend((!closed).then_some(name));
                }
            }
        }
        assert!(open.is_empty(), "{open:?}");
        all
    }

    #[test]
    fn every_measurement_is_a_bar_in_its_section() {
        let lines = [
            line("A", "decode_b1", Class::Decode, 0.012, Some(0.5)),
            line("<B & \"C\">", "decode_b1", Class::Decode, 0.010, Some(1.25)),
            line("A", "prefill_1x8", Class::Prefill, 2.0, None),
            line("M", "mla_decode", Class::LatentDecode, 0.5, Some(0.9)),
        ];
        let marks = Marks(vec![Mark {
            backend: "A".into(),
            case: "decode_b1".into(),
            heads: "1/1/8".into(),
            dtype: "bf16".into(),
            kv_cache_dtype: None,
            share_of_ceiling: 0.55,
        }]);
        let text = svg(&lines, Some(&marks));
        let all = elements(&text);
        let count = |name: &str| all.iter().filter(|n| *n == name).count();
        // Bars, and the legend's squares.
        assert_eq!(count("rect"), 4 + 3);
        assert_eq!(text.matches("class=\"mark\"").count(), 2);
        for section in ["decode, heads 1/1/8, bf16", "prefill, heads", "MLA decode, heads"] {
            assert!(text.contains(&format!(">{section}")), "{section}");
        }
        assert!(text.contains("125% 10.00 us *") && text.contains("&lt;B &amp; &quot;C&quot;&gt;"));
        assert!(text.contains(">- 2000.0 us<") && text.contains(">125%<"), "{text}");
        // Nothing is outside of the drawing.
        let xs = text.split(" x=\"").skip(1).map(|x| x.split('"').next().unwrap().parse::<f64>().unwrap());
        assert!(xs.into_iter().all(|x| (0.0..WIDTH).contains(&x)));
        elements(&svg(&[], None));
    }

    #[test]
    fn marks_that_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            Marks::read(&path)
        };
        let good = r#"{"backend": "A", "case": "c", "heads": "h", "dtype": "bf16", "share_of_ceiling": 0.5, "more": 1}"#;
        assert_eq!(read(&format!("{good}\n\n{good}\n")).unwrap().0.len(), 2);
        let error = |text: &str| read(text).err().unwrap().to_string();
        assert!(error(&format!("{good}\n{{")).contains("m.jsonl: line 2: "));
        assert!(error(&good.replace("0.5", "0")).contains("above 0"));
        assert!(error(&good.replace("heads", "hats")).contains("missing field `heads`"));
        assert!(check(&path).is_ok() && check(dir.path()).is_err() && check(&path.join("x.svg")).is_err());
    }
}
