//! Texts with facts about the layer in them: `index_topk {index_topk} is too small`.

use super::field::{Field, Value};
use crate::LayerNeed;
use serde::Deserialize;
use std::fmt::Write;

/// A text whose `{field}` stand for what the layer's need says; what is not known reads `None`.
/// `{compute_capability.major}` and `.minor` are its parts.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Text(Vec<Piece>);

#[derive(Clone, Debug)]
enum Piece {
    Plain(String),
    Fact(Field),
    Major,
    Minor,
}

impl Text {
    /// The text for a layer.
    pub fn of(&self, need: &LayerNeed) -> String {
        let mut out = String::new();
        for piece in &self.0 {
            let value = match piece {
                Piece::Plain(text) => Some(Value::Word(text)),
                Piece::Fact(field) => field.of(need),
                Piece::Major => need.compute_capability.map(|c| Value::Number(c.0 as usize)),
                Piece::Minor => need.compute_capability.map(|c| Value::Number(c.1 as usize)),
            };
            // Writing to a string can't fail.
            let _ = write!(out, "{}", value.unwrap_or(Value::Word("None")));
        }
        out
    }
}

impl TryFrom<String> for Text {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut pieces = vec![];
        let mut rest = text.as_str();
        while let Some((plain, tail)) = rest.split_once('{') {
            let (name, after) =
                tail.split_once('}').ok_or_else(|| format!("{text:?}: a brace isn't closed"))?;
            pieces.push(Piece::Plain(plain.to_owned()));
            pieces.push(match name {
                "compute_capability.major" => Piece::Major,
                "compute_capability.minor" => Piece::Minor,
                name => serde_json::from_value(name.into())
                    .map(Piece::Fact)
                    .map_err(|e| format!("{text:?} names {name}: {e}"))?,
            });
            rest = after;
        }
        pieces.push(Piece::Plain(rest.to_owned()));
        Ok(Self(pieces))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::super::rules::ComputeCapability, *};

    #[test]
    fn fills_facts_in() {
        let need = LayerNeed { compute_capability: Some(ComputeCapability(10, 3)), ..LayerNeed::default() };
        let text = |s: &str| Text::try_from(s.to_owned());
        let t = text("{head_size}, {index_topk}, {compute_capability.major}-{compute_capability.minor}.")
            .unwrap();
        assert_eq!(t.of(&need), "128, None, 10-3.");
        assert_eq!(text("plain").unwrap().of(&need), "plain");
        assert!(text("{head_sise}").unwrap_err().contains("head_sise"));
        assert!(text("{head_size").unwrap_err().contains("closed"));
    }
}
