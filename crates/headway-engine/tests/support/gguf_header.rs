//! Reads the tokenizer's keys of a GGUF header, for tests. Panics on anything unexpected: the files are known.

use headway_engine::text::GgufTokenizer;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

enum Value {
    Number(i64),
    Float(f32),
    Bool(bool),
    Text(String),
    List(Vec<Value>),
}

struct Reader(BufReader<File>);

impl Reader {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    fn text(&mut self) -> String {
        let mut bytes = vec![0; self.u64() as usize];
        self.0.read_exact(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    fn value(&mut self, kind: u32) -> Value {
        match kind {
            0 => Value::Number(i64::from(self.bytes::<1>()[0])),
            4 => Value::Number(i64::from(self.u32())),
            5 => Value::Number(i64::from(self.u32() as i32)),
            6 => Value::Float(f32::from_le_bytes(self.bytes())),
            7 => Value::Bool(self.bytes::<1>()[0] != 0),
            8 => Value::Text(self.text()),
            9 => {
                let kind = self.u32();
                let len = self.u64();
                Value::List((0..len).map(|_| self.value(kind)).collect())
            }
            10 => Value::Number(self.u64() as i64),
            other => panic!("value type {other}"),
        }
    }
}

fn texts(list: Vec<Value>) -> Vec<String> {
    let text = |v| if let Value::Text(t) = v { t } else { panic!("not a text") };
    list.into_iter().map(text).collect()
}

/// The tokenizer's part of the header.
pub fn read(path: &Path) -> GgufTokenizer {
    let mut r = Reader(BufReader::with_capacity(1 << 20, File::open(path).unwrap()));
    assert_eq!(&r.bytes::<4>(), b"GGUF");
    let (_version, _tensors, keys) = (r.u32(), r.u64(), r.u64());
    let mut out = GgufTokenizer::default();
    for _ in 0..keys {
        let key = r.text();
        let kind = r.u32();
        let value = r.value(kind);
        match (key.strip_prefix("tokenizer.").unwrap_or_default(), value) {
            ("ggml.model", Value::Text(t)) => out.model = t,
            ("ggml.pre", Value::Text(t)) => out.pre = Some(t),
            ("ggml.tokens", Value::List(l)) => out.tokens = texts(l),
            ("ggml.merges", Value::List(l)) => out.merges = Some(texts(l)),
            ("ggml.scores", Value::List(l)) => {
                let float = |v| if let Value::Float(f) = v { f } else { panic!("not a float") };
                out.scores = Some(l.into_iter().map(float).collect());
            }
            ("ggml.token_type", Value::List(l)) => {
                let number = |v| if let Value::Number(n) = v { n as i32 } else { panic!("not a number") };
                out.token_types = Some(l.into_iter().map(number).collect());
            }
            ("ggml.bos_token_id", Value::Number(n)) => out.bos_id = Some(n as u32),
            ("ggml.eos_token_id", Value::Number(n)) => out.eos_id = Some(n as u32),
            ("ggml.eot_token_id", Value::Number(n)) => out.eot_id = Some(n as u32),
            ("ggml.unknown_token_id", Value::Number(n)) => out.unk_id = Some(n as u32),
            ("ggml.padding_token_id", Value::Number(n)) => out.pad_id = Some(n as u32),
            ("ggml.add_bos_token", Value::Bool(b)) => out.add_bos = Some(b),
            ("ggml.add_eos_token", Value::Bool(b)) => out.add_eos = Some(b),
            ("ggml.add_space_prefix", Value::Bool(b)) => out.add_space_prefix = Some(b),
            ("chat_template", Value::Text(t)) => out.chat_template = Some(t),
            _ => {}
        }
    }
    out
}
